"""Every layout, from one checkpoint, computes the same losses and gradient norms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gatewright.megatron import tiny

STEPS = 5
BOTH = ("mamba2", "llama")

# processes -> (name, families, parallel fields, train fields)
LAYOUTS: dict[int, list[tuple[str, tuple[str, ...], dict[str, Any], dict[str, Any]]]] = {
    1: [
        ("microbatches of 2", BOTH, {}, {"micro_batch_sequences": 2}),
        ("recompute", BOTH, {}, {"recompute": "full"}),
    ],
    2: [
        ("tp2", BOTH, {"tensor": 2}, {}),
        ("tp2 sp", BOTH, {"tensor": 2, "sequence": True}, {}),
        ("pp2", BOTH, {"pipeline": 2}, {}),
        ("dp2", BOTH, {}, {}),
        ("dp2 overlap", BOTH, {"overlap": True}, {}),
        ("cp2", ("mamba2",), {"context": 2}, {}),
    ],
    4: [
        ("tp4", ("mamba2",), {"tensor": 4}, {}),
        ("tp2 pp2 sp", BOTH, {"tensor": 2, "pipeline": 2, "sequence": True}, {}),
        ("tp2 dp2 sp overlap", BOTH, {"tensor": 2, "sequence": True, "overlap": True}, {}),
        ("pp2 dp2 overlap", BOTH, {"pipeline": 2, "overlap": True}, {}),
        ("cp2 tp2", ("mamba2",), {"context": 2, "tensor": 2}, {}),
        ("cp2 dp2 overlap", ("mamba2",), {"context": 2, "overlap": True}, {}),
    ],
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One process, both families: a checkpoint after 2 steps, and the 5 steps that follow."""
    folder = tmp_path_factory.mktemp("layouts")
    corpus = str(tiny.write_corpus(folder / "corpus"))
    start, after = [], []
    for family in BOTH:
        common = {"do": "steps", "family": family, "corpus": corpus}
        start.append({**common, "out": str(folder / family), "steps": 2, "save": True})
        checkpoint = str(folder / family / "iter_0000002")
        after.append(
            {**common, "out": str(folder / f"{family}-1"), "steps": STEPS, "load": checkpoint}
        )
    results = tiny.launch(1, [*start, *after], folder / "launch")
    return {
        "folder": folder,
        "corpus": corpus,
        "reference": dict(zip(BOTH, results[len(start) :], strict=True)),
    }


@pytest.mark.parametrize("processes", LAYOUTS)
def test_every_layout_trains_alike(processes: int, base: dict[str, Any]) -> None:
    folder: Path = base["folder"]
    named, cases = [], []
    for name, families, parallel, train in LAYOUTS[processes]:
        for family in families:
            named.append((name, family))
            cases.append(
                {
                    "do": "steps",
                    "family": family,
                    "corpus": base["corpus"],
                    "load": str(folder / family / "iter_0000002"),
                    "out": str(folder / f"{name}-{family}"),
                    "steps": STEPS,
                    "changes": {"parallel": parallel, "train": train},
                }
            )
    results = tiny.launch(processes, cases, folder / f"launch-{processes}")
    for (name, family), found in zip(named, results, strict=True):
        for (loss, norm), (want_loss, want_norm) in zip(
            found, base["reference"][family], strict=True
        ):
            assert loss == pytest.approx(want_loss, abs=1e-5), f"{family} {name}: {results}"
            assert norm == pytest.approx(want_norm, rel=1e-4), f"{family} {name}: {results}"


def test_the_reference_learns(base: dict[str, Any]) -> None:
    """Five steps that changed nothing would make every layout agree."""
    for family, found in base["reference"].items():
        assert found[-1][0] < found[0][0] - 0.05, (family, found)
