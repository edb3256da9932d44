"""What the experiments' command lines share: lists in flags, sub-commands, bounds."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from gatewright import cli
from gatewright.errors import UserError


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
    device: str = "cpu"
    """Where the models run: cpu or cuda."""
    threads: int = 1
    """Threads that torch may use."""


@dataclasses.dataclass
class GatherArgs:
    """Join finished runs of one size, test the claims over all of them and draw the figure."""

    runs: list[Path]
    """Folders of `small` or `paper` with disjoint settings."""
    out: Path
    """Folder for the joined results."""
    replace: bool = False
    """Of a run that several folders hold, take the last one's."""


def prepared(args: GatedRunArgs, size: Any) -> tuple[Any, tuple[float, ...] | None]:
    """Set up torch as asked; return a size's settings with the flags' seeds and steps, and
    the flags' gate offsets (None: the size's).

    Raises:
        UserError: a flag out of bounds, or a GPU that is not there.
    """
    positive(args, "steps", "threads")
    import torch

    torch.set_num_threads(args.threads)
    if args.seeds is not None:
        size = dataclasses.replace(size, seeds=tuple(integers("--seeds", args.seeds, least=0)))
    if args.steps is not None:
        size = dataclasses.replace(size, recipe=dataclasses.replace(size.recipe, steps=args.steps))
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no GPU here; use --device cpu")
    given = args.offsets
    return size, None if given is None else numbers("--offsets", given, -100, 100)


def numbers(flag: str, text: str, low: float, high: float) -> tuple[float, ...]:
    """Parse a comma-separated list of numbers strictly between two bounds, sorted, once each.

    Raises:
        UserError: not a number, out of bounds, or none at all.
    """
    values = sorted(set(cli.numbers(flag, text, float)))
    if not all(low < v < high for v in values):
        raise UserError(f"{flag} {text}: each must lie between {low:g} and {high:g}, exclusive")
    return tuple(values)


def integers(flag: str, text: str, least: int = 1) -> list[int]:
    """Parse a comma-separated list of whole numbers, sorted, once each.

    Raises:
        UserError: not whole numbers, below `least`, or none.
    """
    return sorted(set(cli.numbers(flag, text, int, least=least)))


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
    """Refuse arguments that are not above zero, by their flag (None passes).

    Raises:
        UserError: one is not.
    """
    for name in names:
        value = getattr(args, name)
        if value is not None and value <= 0:
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
