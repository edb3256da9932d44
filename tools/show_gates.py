"""Show the gates of a checkpoint: `python -m tools.show_gates CKPT [CKPT2] [--json]`.

Prints the effective length tau of every layer's heads, the share of heads that remember beyond
given context lengths, and a histogram; with two checkpoints of one model also how far the
gates moved between them (the paper's drift table).
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import tyro

from gatewright import cli
from gatewright.errors import UserError


@dataclasses.dataclass
class Args:
    """Show effective lengths of a checkpoint's gates, and their drift between two."""

    checkpoints: Annotated[tuple[str, ...], tyro.conf.Positional]
    """One checkpoint folder, or two of the same model (before, after)."""
    json: bool = False
    """Print everything, per head, as JSON instead of tables."""
    context_lengths: str = "4096,16384,65536"
    """Lengths in tokens for which the share of heads that remember longer is given."""
    svg: Path | None = None
    """Also write a figure of tau per layer and head to this file."""
    calibrate: Path | None = None
    """Text file: measure dt by running the model on it, instead of taking softplus(dt_bias)."""


def main(args: Args) -> None:
    """Show effective lengths of a checkpoint's gates, and their drift between two."""
    from gatewright.gates import figure, find, growth, statistics, tables

    for flag, given in (("--svg", args.svg), ("--calibrate", args.calibrate)):
        if given == Path():
            raise UserError(f"{flag}: is empty, or the current folder; give a path")
    if len(args.checkpoints) not in (1, 2):
        raise UserError("name one checkpoint folder, or two of the same model")
    contexts = cli.numbers(
        "--context-lengths", args.context_lengths, int, least=1, most=growth.MAX_CONTEXT
    )
    dt_from = "weights" if args.calibrate is None else "data"
    found: list[list[statistics.LayerGates]] = []
    shown: list[dict[str, Any]] = []
    for path in args.checkpoints:
        gates = find.find_gates(path)
        dts = {}
        if args.calibrate is not None:
            from gatewright.gates import calibrate

            dts = calibrate.measure(gates, args.calibrate).dt
        found.append(statistics.layer_gates(gates, dts))
        source = {
            "checkpoint": path,
            "model_type": gates.model_type,
            "dt_from": dt_from,
            "warnings": list(gates.warnings),
        }
        shown.append(statistics.as_json(found[-1], source, contexts))
    moved = statistics.drift(*found) if len(found) == 2 else None
    if args.svg is not None:
        titles = list(zip(args.checkpoints, found, strict=True))
        try:
            args.svg.write_text(figure.tau_svg(titles, dt_from, contexts), encoding="utf-8")
        except OSError as e:
            raise UserError(f"--svg {args.svg}: cannot be written ({e.strerror})") from e
    if args.json:
        both = {"before": shown[0], "after": shown[-1], "drift": moved}
        print(json.dumps(shown[0] if moved is None else both, indent=1))
        return
    for path, layers, about in zip(args.checkpoints, found, shown, strict=True):
        for warning in about["warnings"]:
            print(f"warning: {warning}")
        print(tables.gates_table(layers, path, dt_from, contexts))
    if moved is not None:
        print(tables.drift_table(moved))


if __name__ == "__main__":
    cli.run(main, Args, prog="python -m tools.show_gates")
