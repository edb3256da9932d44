"""Every arm of the small table, by name, with the size it is given here and why.

The delta family needs 2,000 steps of batch 128 at 3e-3 on MQAR, the diagonal cells 5,000
(shorter runs are still climbing and would show the schedule, not the cell).  The honest
layout scores eight queries a sequence and takes half of the steps.  Haystacks keep the
authors' two layers and 3,000 steps, with batches of 64: the curriculum's lift, tried with
five seeds, is whole at that size (all lock in, at 1.000).  S5 keeps its two layers but d 64
instead of 128 and a third of the steps: the guardrail asks for an ordering at equal budget,
not for a record.
"""

from __future__ import annotations

import dataclasses

from synthetic.recall.cells import Cell, Name
from synthetic.recall.curriculum import Name as CurriculumName
from synthetic.recall.runs import Arm
from synthetic.recall.tasks import Layout, Task

FAST_STEPS, SLOW_STEPS = 2000, 5000
SLOW_CELLS = ("mamba2", "rwkv7_diagonal")
MQAR_CELLS: tuple[tuple[Name, bool], ...] = (
    ("gated_deltanet", True),
    ("gated_deltanet", False),
    ("deltanet", False),
    ("rwkv7", True),
    ("rwkv7", False),
    ("rwkv7_diagonal", True),
    ("rwkv7_diagonal", False),
    ("mamba2", True),
    ("mamba2", False),
)


def mqar(cell: Name, conv: bool, pairs: int = 32, layout: Layout = "fixed") -> Arm:
    """Return an MQAR arm of the factorial."""
    steps = SLOW_STEPS if cell in SLOW_CELLS else FAST_STEPS
    if layout == "shuffled":
        steps //= 2
    return Arm(Task("mqar", pairs=pairs, layout=layout), Cell(cell, conv=conv), steps=steps)


def haystack(
    cell: Name,
    conv: bool,
    curriculum: CurriculumName = "none",
    *,
    dense: int = 1,
    length: int = 64,
    collision: bool = False,
    bidirectional: bool = True,
) -> Arm:
    """Return a two-layer arm of the wall, the curriculum or the collision-key test."""
    return Arm(
        Task("collision" if collision else "haystack", length=length, dense=dense),
        Cell(cell, conv=conv),
        layers=2,
        bidirectional=bidirectional,
        curriculum=curriculum,
        steps=3000,
        batch=64,
    )


def s5(cell: Name, conv: bool, depth: int) -> Arm:
    """Return a forward-only arm of the state-tracking guardrail."""
    return Arm(
        Task("s5", length=2 * depth),
        Cell(cell, width=64, conv=conv),
        layers=2,
        bidirectional=False,
        steps=2000,
        lr=1e-3,
    )


def mqar_name(cell: str, conv: bool, layout: str) -> str:
    """Return an MQAR arm's name, such as `fixed/gated_deltanet+conv`."""
    return f"{layout}/{cell}{'+conv' if conv else ''}"


def all_arms(pairs: int) -> dict[str, Arm]:
    """Return every arm of the table by name, part by part."""
    arms: dict[str, Arm] = {}
    layouts: tuple[Layout, ...] = ("fixed", "shuffled")
    for layout in layouts:
        for cell, conv in MQAR_CELLS:
            arms[mqar_name(cell, conv, layout)] = mqar(cell, conv, pairs, layout)
        if layout == "fixed":
            # Equation 2's one gate a token, of which alone the summary says that decay is a tax.
            arms["fixed/gated_deltanet_scalar"] = mqar("gated_deltanet_scalar", False, pairs)
    arms |= {
        "wall/gated_deltanet+conv": haystack("gated_deltanet", True),
        "wall/mamba2+conv": haystack("mamba2", True),
        "wall/rwkv7": haystack("rwkv7", False),
        "wall/attention": haystack("attention", False),
        "lift/dense-1 curriculum": haystack("gated_deltanet", True, "uniform"),
        "lift/dense-4 curriculum": haystack("gated_deltanet", True, "uniform", dense=4),
        "lift/dense-4 only": haystack("gated_deltanet", True, dense=4),
    }
    shapes: tuple[CurriculumName, ...] = ("uniform", "ramp")
    for shape in shapes:
        for label, conv, both in (
            ("bidirectional", True, True),
            ("causal", True, False),
            ("no conv", False, True),
        ):
            arms[f"collision/{label} {shape}"] = haystack(
                "gated_deltanet",
                conv,
                shape,
                dense=4,
                collision=True,
                bidirectional=both,
            )
    for depth in (2, 4, 8, 16):
        arms[f"s5/gated_deltanet+conv {depth}"] = s5("gated_deltanet", True, depth)
        arms[f"s5/gated_deltanet {depth}"] = s5("gated_deltanet", False, depth)
    return arms


PARTS = ("fixed", "shuffled", "wall", "lift", "collision", "s5")


def work(arm: Arm) -> int:
    """Return about how long an arm takes, in no unit: to start the longest ones first.

    A last layer computes only what is read, so two layers cost about four times one.
    """
    tokens = arm.steps * arm.batch * arm.task.tokens
    return tokens * arm.layers**2 * len(arm.size.directions) * arm.cell.width**2


def scaled(arm: Arm, factor: float) -> Arm:
    """Return the arm with its steps multiplied, at least one."""
    return dataclasses.replace(arm, steps=max(1, round(arm.steps * factor)))
