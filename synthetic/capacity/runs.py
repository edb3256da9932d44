"""The capacity experiments: cells of the grid, layers, heads, a look inside, the circuits.

Each `run_*` adds the missing rows of one part to a sweep; `report` turns them into numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gatewright.runlog import progress
from synthetic.capacity import designed, linear_mamba, operators, tasks, variants
from synthetic.ensemble import Parameters
from synthetic.sweep import Row, Sweep


@dataclasses.dataclass(frozen=True)
class Measure:
    """How long to train and how much to measure."""

    steps: int
    seeds: int
    sequences: int


def _rows(part: str, settings: dict[str, Any], m: Measure, accuracy: list[float]) -> list[Row]:
    return [
        {"part": part, **settings, "steps": m.steps, "seed": seed, "accuracy": value}
        for seed, value in enumerate(accuracy)
    ]


def run_cells(
    sweep: Sweep,
    names: Sequence[str],
    vocab: int,
    facts: int,
    ds: Sequence[int],
    ns: Sequence[int],
    m: Measure,
) -> None:
    """Train linear models over the D x N grid, the seeds of a cell together."""
    cells = [(t, d, n) for t in names for d in ds for n in ns]
    for name, d, n in progress(cells, desc="capacity grid", unit="cell"):
        task = tasks.make(name, vocab, facts)  # type: ignore[arg-type]
        settings = {
            "task": name,
            "vocab": vocab,
            "facts": facts,
            "length": task.length,
            "d": d,
            "n": n,
            "model": "linear",
            "conv": True,
        }
        if sweep.has(part="cell", **settings):
            continue
        size = linear_mamba.Size(vocab, d, n)
        p = linear_mamba.train(
            [size] * m.seeds, list(range(m.seeds)), task, m.steps, f"{name} D={d} N={n}"
        )
        sweep.add_all(_rows("cell", settings, m, linear_mamba.accuracy(p, task, m.sequences)))


def run_layers(
    sweep: Sweep,
    vocab: int,
    facts: int,
    d: int,
    ns: Sequence[int],
    depths: Sequence[int],
    m: Measure,
) -> None:
    """Train residual stacks: does accuracy depend on layers x N only?"""
    task = tasks.make("mqar", vocab, facts)
    for layers in depths:
        for n in ns:
            settings = {
                "task": "mqar",
                "vocab": vocab,
                "facts": facts,
                "d": d,
                "n": n,
                "layers": layers,
            }
            if sweep.has(part="layers", **settings):
                continue
            size = variants.Size(vocab, d, n, layers=layers)
            p = variants.train(size, list(range(m.seeds)), task, m.steps, f"{layers} layers N={n}")
            found = variants.accuracy(p, size, task, m.sequences)
            sweep.add_all(_rows("layers", settings, m, found))


def run_heads(
    sweep: Sweep,
    vocab: int,
    facts: int,
    d: int,
    ns: Sequence[int],
    heads: Sequence[int],
    m: Measure,
) -> None:
    """Train the four ways to share keys, values and queries between heads."""
    task = tasks.make("mqar", vocab, facts)
    cases: list[tuple[variants.Pattern, int]] = [("single", 1)]
    cases += [(p, h) for p in ("mha", "mva", "mqa", "mka") for h in heads if h > 1]
    for pattern, count in cases:
        for n in ns:
            settings = {
                "task": "mqar",
                "vocab": vocab,
                "facts": facts,
                "d": d,
                "n": n,
                "pattern": pattern,
                "heads": count,
            }
            if sweep.has(part="heads", **settings):
                continue
            size = variants.Size(vocab, d, n, pattern=pattern, heads=count)
            p = variants.train(
                size, list(range(m.seeds)), task, m.steps, f"{pattern} x{count} N={n}"
            )
            found = variants.accuracy(p, size, task, m.sequences)
            sweep.add_all(_rows("heads", settings, m, found))


def look_inside(p: Parameters, member: int, task: tasks.Task, sequences: int) -> Row:
    """Return operators, inversion and the accuracy without the previous token's tap."""
    bare = operators.without_shift(p)
    return {
        "operators": operators.measure(p, member),
        "state": operators.invert_state(p, member, task, sequences=min(sequences, 500), seed=1),
        "accuracy_tap_removed": linear_mamba.accuracy(bare, task, sequences)[member],
    }


def run_inside(sweep: Sweep, vocab: int, facts: int, d: int, n: int, m: Measure) -> None:
    """Train one cell with and without the convolution and look inside the former."""
    task = tasks.make("mqar", vocab, facts)
    if sweep.has(part="inside"):
        return
    seeds = list(range(m.seeds))
    found = {}
    for conv in (True, False):
        size = linear_mamba.Size(vocab, d, n, conv=conv)
        p = linear_mamba.train([size] * m.seeds, seeds, task, m.steps, f"inside conv={conv}")
        found[conv] = linear_mamba.accuracy(p, task, m.sequences)
        if conv:
            inside = [look_inside(p, seed, task, m.sequences) for seed in seeds]
    settings = {"task": "mqar", "vocab": vocab, "facts": facts, "d": d, "n": n}
    rows = _rows("inside", settings, m, found[True])
    for row, ablated, extra in zip(rows, found[False], inside, strict=True):
        row.update(accuracy_without_conv=ablated, **extra)
    sweep.add_all(rows)


def run_designed(
    sweep: Sweep,
    regimes: Iterable[tuple[int, int]],
    ds: Sequence[int],
    ns: Sequence[int],
    draws: int,
    sequences: int,
) -> None:
    """Score the untrained circuits over the grid."""
    cells = [
        (name, vocab, facts, d, n)
        for vocab, facts in regimes
        for name in ("ar", "mqar")
        for d in ds
        for n in ns
    ]
    for name, vocab, facts, d, n in progress(cells, desc="designed circuits", unit="cell"):
        settings = {"task": name, "vocab": vocab, "facts": facts, "d": d, "n": n}
        if sweep.has(part="designed", **settings):
            continue
        task = tasks.make(name, vocab, facts)  # type: ignore[arg-type]
        found = designed.accuracy(task, d, n, draws=draws, sequences=sequences, seed=0)
        sweep.add_all(
            {"part": "designed", **settings, "seed": i, "accuracy": a} for i, a in enumerate(found)
        )


def save_checkpoint(p: Parameters, member: int, task: tasks.Task, size: Row, out: Path) -> None:
    """Write one member's weights and what a planner needs to know of it."""
    from safetensors.torch import save_file

    from gatewright import artifact

    out.mkdir(exist_ok=True)
    save_file({k: v[member].contiguous() for k, v in p.items()}, str(out / "model.safetensors"))
    artifact.write_json(
        out / "config.json",
        {
            "model_type": f"recall-{size['model']}",
            "vocab_size": size["vocab"],
            "hidden_size": size["d"],
            "state_size": size["n"],
            "num_hidden_layers": 1,
            "task": task.name,
            "trained_facts": task.facts,
        },
    )
