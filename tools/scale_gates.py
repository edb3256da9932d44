"""Rescale the gates of a checkpoint: `python -m tools.scale_gates CKPT --scale 0.5 --out DIR`.

Copies the checkpoint and changes nothing but the bytes of its A_log tensors: A_log += log(s).
s > 1 gates more strongly (shorter memory), s < 1 more weakly.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from gatewright import cli
from gatewright.errors import UserError


@dataclasses.dataclass
class Args:
    """Copy a checkpoint with its gates rescaled; nothing but A_log changes."""

    checkpoint: Annotated[Path, tyro.conf.Positional]
    """Folder of the checkpoint: Hugging Face, mamba_ssm or Megatron."""
    out: Path | None = None
    """Folder to write. Several edits write DIR-s0.5, DIR-s2, ... (-d1 for offsets, -tau4096)."""
    scale: str | None = None
    """Factor of the decay rate, or several: 0.5 or 0.5,1,2. Above 1: shorter memory."""
    offset: str | None = None
    """The same in log space: added to A_log. One value or several; --offset=-1 if negative."""
    target_tau: str | None = None
    """Move the median effective length of the selected heads to this many tokens."""
    layers: str | None = None
    """Only these layers, for example 0-7,12."""
    heads: str | None = None
    """Only these heads of each layer, for example 0-3."""
    force: bool = False
    """Allow scales outside [1/64, 64]."""
    link: bool = False
    """Hard-link unchanged files and reflink changed ones where the filesystem can."""


def main(args: Args) -> None:
    """Rescale the gates of a checkpoint, leaving every other byte as it is."""
    from gatewright.gates import edits, find, report, rewrite
    from gatewright.runlog import progress

    if args.out is None:
        raise UserError("--out is missing: name the folder to write")
    gates = find.find_gates(args.checkpoint)
    for warning in gates.warnings:
        print(f"warning: {warning}")
    plans = [edits.resolve(edit, gates, {}, force=args.force) for edit in asked(args)]
    size = sum((gates.checkpoint.root / f).stat().st_size for f in gates.checkpoint.files)
    with progress(total=size, desc="copying", unit="B", scale=True, disable=size < 1 << 28) as bar:
        written = rewrite.write_edits(
            gates, plans, args.out, dts={}, link=args.link, progress=bar.update
        )
    for done in written:
        print(report.format_edit(f"{done.folder}", done.report))


def asked(args: Args) -> list:  # type: ignore[type-arg]
    """Return the edits that the command line asks for.

    Raises:
        UserError: none, or more than one kind, or a value that is not a number.
    """
    from gatewright.gates.edits import Edit, parse_selection

    kinds = {"scale": args.scale, "offset": args.offset, "target_tau": args.target_tau}
    given = {kind: text for kind, text in kinds.items() if text is not None}
    if len(given) != 1:
        raise UserError("give one of --scale, --offset and --target-tau")
    layers = None if args.layers is None else parse_selection(args.layers, "--layers")
    heads = None if args.heads is None else parse_selection(args.heads, "--heads")
    ((kind, text),) = given.items()
    flag = "--" + kind.replace("_", "-")
    values = []
    for part in text.split(","):
        try:
            values.append(float(part))
        except ValueError as e:
            raise UserError(f"{flag} {text}: {part!r} is not a number") from e
    return [Edit(kind, value, layers=layers, heads=heads) for value in values]


if __name__ == "__main__":
    cli.run(main, Args, prog="python -m tools.scale_gates")
