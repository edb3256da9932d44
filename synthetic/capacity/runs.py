"""The capacity experiments: cells of the grid, layers, heads, a look inside, the circuits.

Each `run_*` adds the missing rows of one part to a sweep and returns all that were asked for;
`report` turns them into numbers.
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

NAMES: tuple[tasks.Name, ...] = ("ar", "mqar")


@dataclasses.dataclass(frozen=True)
class Measure:
    """How long to train and how much to measure."""

    steps: int
    seeds: int
    sequences: int

    @property
    def members(self) -> list[int]:
        return list(range(self.seeds))


def _rows(part: str, settings: dict[str, Any], m: Measure, accuracy: list[float]) -> list[Row]:
    return [
        {"part": part, **settings, "steps": m.steps, "seed": seed, "accuracy": value}
        for seed, value in enumerate(accuracy)
    ]


def look_inside(p: Parameters, member: int, task: tasks.Task, sequences: int) -> Row:
    """Return operators, inversion and the accuracy without the previous token's tap."""
    bare = {k: v[member : member + 1] for k, v in operators.without_shift(p).items()}
    return {
        "operators": operators.measure(p, member),
        "state": operators.invert_state(p, member, task, sequences=min(sequences, 500), seed=1),
        "accuracy_tap_removed": linear_mamba.accuracy(bare, task, min(sequences, 500))[0],
    }


def run_cells(
    sweep: Sweep,
    names: Sequence[tasks.Name],
    vocab: int,
    facts: int,
    ds: Sequence[int],
    ns: Sequence[int],
    m: Measure,
) -> list[Row]:
    """Train linear models over the D x N grid, the seeds of a cell together; look inside each."""
    cells = [(t, d, n) for t in names for d in ds for n in ns]
    asked: list[Row] = []
    for name, d, n in progress(cells, desc="capacity grid", unit="cell"):
        task = tasks.make(name, vocab, facts)
        settings = {"task": name, "vocab": vocab, "facts": facts, "d": d, "n": n}
        if not sweep.has(part="cell", **settings):
            sizes = [linear_mamba.Size(vocab, d, n)] * m.seeds
            p = linear_mamba.train(sizes, m.members, task, m.steps, f"{name} D={d} N={n}")
            rows = _rows("cell", settings, m, linear_mamba.accuracy(p, task, m.sequences))
            for row, seed in zip(rows, m.members, strict=True):
                row["inside"] = look_inside(p, seed, task, m.sequences)
            sweep.add_all(rows)
        asked += sweep.select(part="cell", **settings)
    return asked


def retrain(
    sweep: Sweep,
    size: linear_mamba.Size,
    trained: tasks.Task,
    accuracy: float,
    loads: Sequence[tasks.Task],
    steps: int,
    sequences: int,
) -> None:
    """Train seed 0 afresh at every load; at `trained` it already was, and recalled `accuracy`.

    The law describes a model that was trained at the load; one trained at another has
    embeddings that were never asked to be as orthogonal.
    """
    for task in progress(loads, desc="trained at each load", unit="load"):
        own = {"part": "retrained", "facts": task.facts}
        if sweep.has(**own):
            continue
        if task == trained:
            sweep.add({**own, "accuracy": accuracy})
            continue
        fresh = linear_mamba.train([size], [0], task, steps, f"{task.facts} facts")
        sweep.add({**own, "accuracy": linear_mamba.accuracy(fresh, task, sequences)[0]})


def curve(
    sweep: Sweep,
    p: Parameters,
    loads: Sequence[tasks.Task],
    sequences: int,
    retrained: bool,
) -> list[Row]:
    """Measure recall at other numbers of facts: of models as they are, beside fresh ones."""
    points = []
    for task in loads:
        found = linear_mamba.accuracy(p, task, sequences)
        point: Row = {"facts": task.facts, "accuracy": sum(found) / len(found)}
        if retrained:
            own = sweep.select(part="retrained", facts=task.facts)
            point["retrained"] = own[0]["accuracy"]
        points.append(point)
    return points


def run_ablation(
    sweep: Sweep,
    names: Sequence[tasks.Name],
    vocab: int,
    facts: int,
    d: int,
    n: int,
    m: Measure,
) -> list[Row]:
    """Train one cell from scratch without the convolution."""
    asked: list[Row] = []
    for name in names:
        task = tasks.make(name, vocab, facts)
        settings = {"task": name, "vocab": vocab, "facts": facts, "d": d, "n": n}
        if not sweep.has(part="ablation", **settings):
            sizes = [linear_mamba.Size(vocab, d, n, conv=False)] * m.seeds
            p = linear_mamba.train(sizes, m.members, task, m.steps, f"{name} without convolution")
            found = linear_mamba.accuracy(p, task, m.sequences)
            sweep.add_all(_rows("ablation", settings, m, found))
        asked += sweep.select(part="ablation", **settings)
    return asked


def run_stacks(
    sweep: Sweep,
    vocab: int,
    facts: int,
    d: int,
    stacks: Sequence[tuple[int, int]],
    m: Measure,
) -> list[Row]:
    """Train residual stacks of (layers, N): does accuracy depend on layers x N only?"""
    asked: list[Row] = []
    for layers, n in progress(stacks, desc="layers", unit="stack"):
        size = variants.Size(vocab, d, n, layers=layers)
        asked += _run_variant(sweep, "layers", size, facts, {"layers": layers}, m)
    return asked


def run_heads(
    sweep: Sweep,
    vocab: int,
    facts: int,
    d: int,
    ns: Sequence[int],
    heads: Sequence[int],
    m: Measure,
) -> list[Row]:
    """Train the four ways to share keys, values and queries between heads."""
    cases: list[tuple[variants.Pattern, int]] = [("single", 1)]
    cases += [(p, h) for h in heads for p in ("mha", "mva", "mqa", "mka")]
    cells = [(n, *case) for n in ns for case in cases]
    asked: list[Row] = []
    for n, pattern, count in progress(cells, desc="heads", unit="cell"):
        size = variants.Size(vocab, d, n, pattern=pattern, heads=count)
        what = {"pattern": pattern, "heads": count}
        asked += _run_variant(sweep, "heads", size, facts, what, m)
    return asked


def _run_variant(
    sweep: Sweep, part: str, size: variants.Size, facts: int, what: Row, m: Measure
) -> list[Row]:
    task = tasks.make("mqar", size.vocab, facts)
    settings = {"task": "mqar", "vocab": size.vocab, "facts": facts, "d": size.d, "n": size.n}
    settings |= what
    if not sweep.has(part=part, **settings):
        label = " ".join(f"{k} {v}" for k, v in what.items())
        p = variants.train(size, m.members, task, m.steps, f"{label} N={size.n}")
        found = variants.accuracy(p, size, task, m.sequences)
        sweep.add_all(_rows(part, settings, m, found))
    return sweep.select(part=part, **settings)


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
        for name in NAMES
        for d in ds
        for n in ns
    ]
    for name, vocab, facts, d, n in progress(cells, desc="designed circuits", unit="cell"):
        settings = {"task": name, "vocab": vocab, "facts": facts, "d": d, "n": n}
        if sweep.has(part="designed", **settings):
            continue
        task = tasks.make(name, vocab, facts)
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
