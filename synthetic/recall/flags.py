"""The flags of `python -m synthetic.recall run`, and the arm that they describe."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gatewright import cli
from gatewright.errors import UserError
from synthetic.arguments import positive

if TYPE_CHECKING:
    from synthetic.recall.runs import Arm

# What a task's runs are like unless flags say otherwise, as the table's arms are; S5 at half of
# the authors' width.
DEFAULTS: dict[str, dict[str, int | float | str]] = {
    "mqar": {"layers": 1, "width": 32, "direction": "both", "pairs": 32, "layout": "fixed"},
    "haystack": {"layers": 2, "width": 32, "direction": "both", "length": 64},
    "collision": {"layers": 2, "width": 32, "direction": "both", "length": 64},
    "s5": {"layers": 2, "width": 64, "direction": "forward", "length": 16, "lr": 1e-3},
}
for _task in ("mqar", "haystack", "collision"):
    DEFAULTS[_task]["lr"] = 3e-3
for _task in ("haystack", "collision"):
    DEFAULTS[_task] |= {"dense": 1, "curriculum": "none"}
OF_SOME_TASKS = ("pairs", "layout", "length", "dense", "curriculum")


@dataclasses.dataclass
class RunArgs:
    """Train one cell on one task, its seeds together, and measure it beside its floors."""

    out: Path
    """Folder for results.jsonl and summary.json; an unfinished one is resumed."""
    cell: str
    """deltanet, gated_deltanet, gated_deltanet_scalar, rwkv7, rwkv7_diagonal, mamba2, attention."""
    conv: bool = True
    """With the width-4 causal depthwise convolution (armed); attention needs --no-conv."""
    task: Literal["mqar", "haystack", "collision", "s5"] = "mqar"
    """Which task."""
    pairs: int | None = None
    """mqar: K, key-value pairs of the table; default 32."""
    layout: Literal["fixed", "shuffled"] | None = None
    """mqar: the authors' fixed keys with one query (default), or shuffled keys with eight."""
    length: int | None = None
    """Tokens of a haystack or collision sequence, default 64; s5: twice the depth, default 16."""
    dense: int | None = None
    """haystack, collision: queries per sequence; default 1."""
    curriculum: Literal["none", "uniform", "ramp", "gated"] | None = None
    """haystack, collision: how the distance grows while training; default none."""
    direction: Literal["both", "forward"] | None = None
    """both: a bidirectional masked denoiser; forward: causal. Default forward for s5, else both."""
    layers: int | None = None
    """Layers; default 1 for mqar, 2 for the others (the authors')."""
    width: int | None = None
    """d, the model dimension; default 32 (the authors'), 64 for s5 (the authors: 128)."""
    seeds: int = 5
    """Seeds, trained together; a resumed folder trains those that it lacks."""
    steps: int = 2000
    """Training steps (the authors, mqar: 2,000 + 125 K)."""
    batch: int = 128
    """Sequences per step and seed (the authors: 256)."""
    lr: float | None = None
    """Peak learning rate; default 3e-3, for s5 1e-3 (the authors')."""
    sequences: int = 2048
    """Evaluation sequences (the authors')."""
    fast: bool = True
    """The C++ or chunked form of the cell; --no-fast runs the token-by-token recurrence."""
    threads: int = 2
    """Threads that torch may use."""

    def arm(self) -> Arm:
        """Return the arm, what no flag gives taken from its task.

        Raises:
            UserError: a value out of bounds, or a flag that the task does not use.
        """
        positive(self, "pairs", "length", "dense", "layers", "width", "seeds", "steps", "batch")
        positive(self, "lr", "sequences", "threads")

        from synthetic.recall import cells, runs, tasks

        if self.cell not in cells.NAMES:
            raise UserError(
                f"--cell: no {self.cell!r}{cli.nearest(self.cell, cells.NAMES)}; "
                f"choose from {', '.join(cells.NAMES)}"
            )
        known = DEFAULTS[self.task]
        for flag in OF_SOME_TASKS:
            if getattr(self, flag) is not None and flag not in known:
                users = " or ".join(t for t, uses in DEFAULTS.items() if flag in uses)
                raise UserError(
                    f"--{flag} belongs to --task {users}, not {self.task}: leave it out"
                )
        given = {f: v for f in known if (v := getattr(self, f)) is not None}
        full = {**known, **given}
        try:
            return runs.Arm(
                task=tasks.Task(
                    self.task,
                    **{f: full[f] for f in ("pairs", "layout", "length", "dense") if f in full},  # type: ignore[arg-type]
                ),
                cell=cells.Cell(self.cell, int(full["width"]), self.conv, fast=self.fast),  # type: ignore[arg-type]
                layers=int(full["layers"]),
                bidirectional=full["direction"] == "both",
                curriculum=full.get("curriculum", "none"),  # type: ignore[arg-type]
                steps=self.steps,
                batch=self.batch,
                lr=float(full["lr"]),
            )
        except ValueError as e:
            raise UserError(str(e)) from e
