"""Rescale the gates of a checkpoint: `python -m tools.scale_gates CKPT --scale 0.5 --out DIR`.

Copies the checkpoint and changes nothing but the bytes of its A_log tensors: A_log += log(s).
s > 1 gates more strongly (shorter memory), s < 1 more weakly.

One edit writes `--out DIR`; several write `DIR-s0.5`, `DIR-s2`, ... (`-d-1` for offsets,
`-tau4096` for targets) in one pass over the checkpoint.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from gatewright import cli
from gatewright.errors import UserError

if TYPE_CHECKING:
    from gatewright.gates.edits import Edit

PROG = "python -m tools.scale_gates"


@dataclasses.dataclass
class Args:
    """Copy a checkpoint with its gates rescaled; nothing but A_log changes."""

    checkpoint: Annotated[str, tyro.conf.Positional]
    """Folder of the checkpoint: Hugging Face, mamba_ssm, Megatron or DeepSpeed universal."""
    out: Path | None = None
    """Folder to write. Several edits write DIR-s0.5, DIR-s2, ... (-d-1: offset, -tau4096)."""
    scale: str | None = None
    """Factor of the decay rate, or several: 0.5 or 0.5,1,2. Above 1: shorter memory."""
    offset: str | None = None
    """The same in log space: added to A_log. One value or several; --offset=-1 if negative."""
    target_tau: str | None = None
    """Move the median effective length of the selected heads to this many tokens."""
    from_: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """JSON with a value per head: {"scale": {"0": [0.5, 1]}}, or show_gates --json's output."""
    layers: str | None = None
    """Only these layers, for example 0-7,12."""
    heads: str | None = None
    """Only these heads of each layer, for example 0-3."""
    calibrate: Path | None = None
    """Text file: measure dt by running the model on it, instead of taking softplus(dt_bias)."""
    context_length: int | None = None
    """Tokens that the model shall read: warn when a state could outgrow its stored type."""
    keep_fp32_gates: bool = False
    """Store A_log in fp32 (safetensors only); loaders that cast the whole model undo it."""
    force: bool = False
    """Allow scales outside [1/64, 64]."""
    link: bool = False
    """Hard-link unchanged weight files, reflink others where the filesystem can. Do not write into
    either folder's weight files afterwards: they are the same files."""
    hash: bool = False
    """Hash every byte for the manifest (3 GB: seconds). Otherwise files above 64 MB have the hash
    that CKPT's manifest states, or a mark of their size, both ends and the edits."""
    in_place: bool = False
    """Edit the checkpoint itself; gates-undo.json beside it takes the edit back."""
    undo: bool = False
    """Take the last in-place edit back."""


def main(args: Args) -> None:
    """Rescale the gates of a checkpoint, leaving every other byte as it is."""
    for flag, path in (
        ("--out", args.out),
        ("--from", args.from_),
        ("--calibrate", args.calibrate),
    ):
        if path == Path():
            raise UserError(f"{flag}: is empty, or the current folder; give a path")
    if args.undo:
        _undo(args)
        return
    from gatewright.gates import edits, find, growth, report, rewrite
    from gatewright.runlog import progress

    wanted = asked(args)
    if args.out is not None and args.in_place:
        raise UserError("--in-place: edits the checkpoint itself; leave --out or --in-place out")
    if args.out is None and not args.in_place:
        raise UserError("name the folder to write (--out DIR), or edit --in-place")
    if args.in_place and (len(wanted) > 1 or args.keep_fp32_gates or args.link):
        raise UserError("--in-place: takes one edit, without --keep-fp32-gates and --link")
    if args.context_length is not None:
        growth.check_context(args.context_length)
    gates = find.find_gates(args.checkpoint)
    measured = None
    if args.calibrate is not None:
        from gatewright.gates import calibrate

        updates = args.context_length is not None
        measured = calibrate.measure(gates, args.calibrate, updates=updates)
    dts = {} if measured is None else measured.dt
    plans = [edits.resolve(edit, gates, dts, force=args.force) for edit in wanted]
    for warning in gates.warnings:
        print(f"warning: {warning}")
    if args.context_length is not None:
        for plan in plans:
            for warning in growth.warnings(plan, gates, args.context_length, measured):
                print(f"warning: {plan.edit.label}: {warning}")
    if args.in_place:
        from gatewright.gates import in_place

        done = in_place.edit(gates, plans[0], dts)
        print(report.format_edit(f"{args.checkpoint}", done))
        print(f"{PROG} {args.checkpoint} --undo takes it back")
        return
    assert args.out is not None
    size = sum((gates.checkpoint.root / f).stat().st_size for f in gates.checkpoint.files)
    # Below that a bar would be gone before it is seen.
    with progress(total=size, desc="copying", unit="B", scale=True, disable=size < 1 << 28) as bar:
        written = rewrite.write_edits(
            gates,
            plans,
            args.out,
            dts=dts,
            link=args.link,
            fp32=args.keep_fp32_gates,
            whole_hashes=args.hash,
            progress=bar.update,
        )
    for copy in written:
        print(report.format_edit(f"{copy.folder}", copy.report))


def _undo(args: Args) -> None:
    from gatewright.gates import in_place

    others = [
        f.name
        for f in dataclasses.fields(args)
        if f.name not in ("checkpoint", "undo") and getattr(args, f.name) != f.default
    ]
    if others:
        raise UserError(
            f"--undo: takes no other flag, not --{others[0].strip('_').replace('_', '-')}"
        )
    if not args.checkpoint:
        raise UserError("the checkpoint's path is empty; name its folder")
    print(f"{args.checkpoint}: {in_place.undo(Path(args.checkpoint))} places restored")


def asked(args: Args) -> list[Edit]:
    """Return the edits that the command line asks for.

    Raises:
        UserError: none, or more than one kind, or a value that is not a number.
    """
    from gatewright.gates.edits import Edit, parse_selection, read_table

    kinds = {"scale": args.scale, "offset": args.offset, "target_tau": args.target_tau}
    given = {kind: text for kind, text in kinds.items() if text is not None}
    if len(given) + (args.from_ is not None) != 1:
        raise UserError("give one of --scale, --offset, --target-tau and --from")
    layers = None if args.layers is None else parse_selection(args.layers, "--layers")
    heads = None if args.heads is None else parse_selection(args.heads, "--heads")
    if args.from_ is not None:
        return [dataclasses.replace(read_table(args.from_), layers=layers, heads=heads)]
    ((kind, text),) = given.items()
    flag = "--" + kind.replace("_", "-")
    values = cli.numbers(flag, text, float)
    return [Edit(kind, value, layers=layers, heads=heads) for value in values]


if __name__ == "__main__":
    cli.run(main, Args, prog=PROG)
