"""What the experiments' command lines share: lists in flags, sub-commands, bounds."""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

from gatewright import cli, launch
from gatewright.errors import UserError

MOST_SEED = 2**31 - 1  # times the seeds' stride it still fits a generator's 64 bits


@dataclasses.dataclass
class GatedRunArgs:
    """Flags of an experiment that trains Mamba-2 at several gate offsets beside a baseline."""

    out: Path
    """Folder for results.jsonl, summary.json and the figure; an unfinished one is resumed."""
    offsets: str | None = None
    """Gate offsets of Mamba-2, comma-separated; default the size's."""
    seeds: str | None = None
    """Seeds, comma-separated; default the size's."""
    steps: int | None = None
    """Most training steps; default the size's."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the models run."""
    threads: int = 1
    """Threads that torch may use."""
    processes: int | None = None
    """Runs at a time, each in a process of its own; default: as many as the cores hold, and one
    on cuda or under torchrun, whose processes share each run."""

    def runs_at_a_time(self) -> int:
        """Return `processes`, or its default.

        Raises:
            UserError: several, where torchrun's processes share each run.
        """
        shared = int(os.environ.get("WORLD_SIZE", "1")) > 1
        if shared and self.processes not in (None, 1):
            raise UserError(f"--processes {self.processes}: torchrun's processes share each run")
        if self.processes is not None:
            return self.processes
        if shared or self.device != "cpu":
            return 1
        return max(1, launch.cores() // self.threads)


@dataclasses.dataclass
class GatherArgs:
    """Join finished runs of one size, test the claims over all of them and draw the figure."""

    runs: list[Path]
    """Folders of `small` or `paper` with disjoint settings."""
    out: Path
    """Folder for the joined results."""
    replace: bool = False
    """Of a run that several folders hold, take the last one's."""


def one_at_a_time(args: GatedRunArgs) -> int:
    """Return 1, the `processes` of the paper's size.

    Raises:
        UserError: others were asked for.
    """
    if args.processes not in (None, 1):
        raise UserError(
            f"--processes {args.processes}: runs of the paper's size go one after the other, each "
            "shared by torchrun's processes; leave the flag out"
        )
    return 1


def prepared(args: GatedRunArgs, size: Any) -> tuple[Any, tuple[float, ...] | None]:
    """Set up torch as asked; return a size's settings with the flags' seeds and steps, and
    the flags' gate offsets (None: the size's).

    Raises:
        UserError: a flag out of bounds, or a GPU that is not there.
    """
    positive(args, "steps", "threads", "processes")
    import torch

    torch.set_num_threads(args.threads)
    if args.seeds is not None:
        size = dataclasses.replace(size, seeds=tuple(integers("--seeds", args.seeds, 0, MOST_SEED)))
    if args.steps is not None:
        size = dataclasses.replace(size, recipe=dataclasses.replace(size.recipe, steps=args.steps))
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no GPU here; use --device cpu")
    given = args.offsets
    return size, None if given is None else numbers("--offsets", given, -30, 30)


def numbers(flag: str, text: str, low: float, high: float) -> tuple[float, ...]:
    """Parse a comma-separated list of numbers strictly between two bounds, sorted, once each.

    Raises:
        UserError: not a number, out of bounds, or none at all.
    """
    values = sorted(set(cli.numbers(flag, text, float)))
    if not all(low < v < high for v in values):
        raise UserError(f"{flag} {text}: each must lie between {low:g} and {high:g}, exclusive")
    return tuple(values)


def integers(flag: str, text: str, least: int = 1, most: int | None = None) -> list[int]:
    """Parse a comma-separated list of whole numbers, sorted, once each.

    Raises:
        UserError: not whole numbers, below `least`, above `most`, or none.
    """
    return sorted(set(cli.numbers(flag, text, int, least=least, most=most)))


def words(flag: str, text: str, known: Sequence[str]) -> list[str]:
    """Parse a comma-separated list of known names, in the given order, once each.

    Raises:
        UserError: an unknown name (the nearest is suggested), or none.
    """
    found = list(dict.fromkeys(x.strip() for x in text.split(",") if x.strip()))
    for word in found:
        if word not in known:
            raise UserError(
                f"{flag}: no {word!r}{cli.nearest(word, known)}; choose from {', '.join(known)}"
            )
    if not found:
        raise UserError(f"{flag}: name at least one of {', '.join(known)}")
    return found


def positive(args: Any, *names: str) -> None:
    """Refuse arguments that are not finite and above zero, by their flag (None passes).

    Raises:
        UserError: one is not.
    """
    for name in names:
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"--{name.replace('_', '-')} must be positive, not {value}")


def dispatch(
    prog: str, commands: Mapping[str, tuple[Callable[[Any], None], type]], argv: Sequence[str]
) -> NoReturn:
    """Run the command that the first word names, with its own flags."""
    if argv and argv[0] in commands:
        function, arguments = commands[argv[0]]
        cli.run(function, arguments, prog=f"{prog} {argv[0]}", argv=argv[1:])
    choice = "|".join(commands)
    if argv and argv[0] in ("-h", "--help"):
        print(f"usage: {prog} {choice} --out DIR [--flag value ...]")
        width = max(map(len, commands))
        for name, (function, _) in commands.items():
            print(f"  {name:{width}}  {(inspect.getdoc(function) or '').partition(chr(10))[0]}")
        raise SystemExit(0)
    given = f", not {argv[0]!r}{cli.nearest(argv[0], commands)}" if argv else ""
    cli.fail(UserError(f"name what to run: {prog} {choice}{given}"))
