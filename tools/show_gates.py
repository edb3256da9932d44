"""Show the gates of a checkpoint: `python -m tools.show_gates CKPT [CKPT2] [--json]`.

Prints the effective length tau of every layer's heads; with two checkpoints of one model also
how far the gates moved between them (the paper's drift table).
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

    checkpoints: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """One checkpoint folder, or two of the same model (before, after)."""
    json: bool = False
    """Print everything, per head, as JSON instead of tables."""


def main(args: Args) -> None:
    """Show effective lengths of a checkpoint's gates, and their drift between two."""
    from gatewright.gates import find, statistics, tables

    if len(args.checkpoints) not in (1, 2):
        raise UserError("name one checkpoint folder, or two of the same model")
    shown: list[dict[str, Any]] = []
    found = []
    for path in args.checkpoints:
        gates = find.find_gates(path)
        layers = statistics.layer_gates(gates)
        found.append(layers)
        source = {
            "checkpoint": str(path),
            "model_type": gates.model_type,
            "dt_from": "weights",
            "warnings": list(gates.warnings),
        }
        shown.append(statistics.as_json(layers, source))
        if not args.json:
            for warning in gates.warnings:
                print(f"warning: {warning}")
            print(tables.gates_table(layers, str(path), "weights"))
    moved = statistics.drift(*found) if len(found) == 2 else None
    if args.json:
        out: Any = (
            shown[0] if moved is None else {"before": shown[0], "after": shown[1], "drift": moved}
        )
        print(json.dumps(out, indent=1))
    elif moved is not None:
        print(tables.drift_table(moved))


if __name__ == "__main__":
    cli.run(main, Args, prog="python -m tools.show_gates")
