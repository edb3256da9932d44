"""Every layout, from one checkpoint, computes the same losses and gradient norms.

Three launches do it all.  Four processes make the starting checkpoint (data parallel), then
train under each of their layouts from it and save; two processes do the same; one process
makes the reference, and goes on from what every layout saved.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.gatewright.megatron import tiny

BOTH = ("mamba2", "llama")
START, STEPS = 2, 5

# processes -> (name, families, parallel fields, train fields)
LAYOUTS: dict[int, list[tuple[str, tuple[str, ...], dict[str, Any], dict[str, Any]]]] = {
    4: [
        ("dp4", BOTH, {}, {}),
        ("tp4", ("mamba2",), {"tensor": 4}, {}),  # the Llama has two key heads to share out
        ("cp4", ("mamba2",), {"context": 4}, {}),
        ("tp2 pp2 sp", BOTH, {"tensor": 2, "pipeline": 2, "sequence": True}, {}),
        ("tp2 dp2 sp overlap", BOTH, {"tensor": 2, "sequence": True, "overlap": True}, {}),
        ("pp2 dp2 overlap", BOTH, {"pipeline": 2, "overlap": True}, {}),
        ("cp2 tp2", ("mamba2",), {"context": 2, "tensor": 2}, {}),
        ("cp2 dp2 overlap", ("mamba2",), {"context": 2, "overlap": True}, {}),
    ],
    2: [
        ("tp2", BOTH, {"tensor": 2}, {}),
        ("tp2 sp", BOTH, {"tensor": 2, "sequence": True}, {}),
        ("pp2", BOTH, {"pipeline": 2}, {}),
        ("dp2", BOTH, {}, {}),
        ("dp2 overlap", BOTH, {"overlap": True}, {}),
        ("cp2", ("mamba2",), {"context": 2}, {}),
    ],
    1: [
        ("microbatches of 2", BOTH, {}, {"micro_batch_sequences": 2}),
        ("recompute", BOTH, {}, {"recompute": "full"}),
    ],
}
ROWS = [
    (processes, name, family)
    for processes, lines in LAYOUTS.items()
    for name, families, _, _ in lines
    for family in families
]
Results = dict[tuple[str, str], Any]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Run all launches; returns [loss, gradient norm] of each step by (name, family)."""
    folder = tmp_path_factory.mktemp("layouts")
    corpus = str(tiny.write_corpus(folder / "corpus"))

    def case(name: str, family: str, **more: Any) -> dict[str, Any]:
        out = str(folder / f"{name}-{family}")
        return {"do": "steps", "family": family, "corpus": corpus, "out": out, **more}

    def saved(name: str, family: str, step: int) -> str:
        return str(folder / f"{name}-{family}" / f"iter_{step:07d}")

    def gates(name: str, **parallel: int) -> dict[str, Any]:
        changes = {"parallel": parallel, "log": {"gates_every_steps": 1}}
        start = saved("start", "mamba2", START)
        return {**case(name, "mamba2", load=start, changes=changes), "do": "gates"}

    found: Results = {}
    for processes, lines in LAYOUTS.items():
        keys, cases = [], []
        if processes == 4:
            for family in BOTH:
                keys.append(("start", family))
                cases.append(case("start", family, steps=START, save=True))
        for name, families, parallel, train in lines:
            for family in families:
                keys.append((name, family))
                changes = {"parallel": parallel, "train": train}
                start = saved("start", family, START)
                cases.append(
                    case(name, family, load=start, steps=STEPS, changes=changes, save=True)
                )
        if processes == 4:
            keys.append(("gates tp2 pp2", "mamba2"))
            cases.append(gates("gates tp2 pp2", tensor=2, pipeline=2))
            keys.append(("gates cp2 dp2", "mamba2"))
            cases.append(gates("gates cp2 dp2", context=2))
        if processes == 1:
            keys.append(("gates", "mamba2"))
            cases.append(gates("gates"))
            for family in BOTH:
                keys.append(("reference", family))
                start = saved("start", family, START)
                cases.append(case("reference", family, load=start, steps=STEPS + 1))
            for _, name, family in ROWS:
                keys.append((f"after {name}", family))
                last = saved(name, family, START + STEPS)
                cases.append(case(f"after {name}", family, load=last, steps=1))
        launched = tiny.launch(processes, cases, folder / f"launch-{processes}")
        found.update(zip(keys, launched, strict=True))
    return found


@pytest.mark.parametrize(("processes", "name", "family"), ROWS)
def test_layout_trains_alike(processes: int, name: str, family: str, results: Results) -> None:
    expected = results["reference", family]
    for step, (loss, norm) in enumerate(results[name, family]):
        assert loss == pytest.approx(expected[step][0], abs=1e-5), step
        assert norm == pytest.approx(expected[step][1], rel=1e-5), step
    # No update came before the first loss: only the forward pass could differ.
    assert results[name, family][0][0] == pytest.approx(expected[0][0], abs=1e-6)


@pytest.mark.parametrize(("processes", "name", "family"), ROWS)
def test_what_a_layout_saved_goes_on_in_one_process(
    processes: int, name: str, family: str, results: Results
) -> None:
    """Weights, moments and schedule of its checkpoint give the reference's next step."""
    [(loss, norm)] = results[f"after {name}", family]
    want_loss, want_norm = results["reference", family][STEPS]
    assert loss == pytest.approx(want_loss, abs=1e-5)
    assert norm == pytest.approx(want_norm, rel=1e-4)


def test_gate_statistics_are_of_the_whole_model(results: Results) -> None:
    """Heads are collected over tensor parallel, layers over pipeline parallel processes, and
    what is measured on tokens over data and context parallel ones."""
    expected = results["gates", "mamba2"]
    assert len(expected) == 4 * 7  # layers x (two kinds of tau x quartiles, drift)
    for name in ("gates tp2 pp2", "gates cp2 dp2"):
        assert results[name, "mamba2"] == pytest.approx(expected, rel=1e-5), name


@pytest.mark.parametrize("family", BOTH)
def test_the_reference_learns(family: str, results: Results) -> None:
    """Steps that changed nothing would make every layout agree."""
    losses = [loss for loss, _ in results["reference", family]]
    assert losses[-1] < losses[0] - 0.05
