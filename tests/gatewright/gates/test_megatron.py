"""Gates of a training checkpoint: any layout, and the optimizer's master edited with them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from gatewright.checkpoints import opening
from gatewright.gates import edits, find, rewrite
from gatewright.gates.edits import Edit
from tests.gatewright.megatron import tiny

STEP = {"train": {"dtype": "bf16", "fp32_gates": False, "lr": 1e-5, "min_lr": 0.0}}


def train(root: Path, processes: int, parallel: dict[str, int]) -> Path:
    """Write a run of one step in bf16, optimizer included, by several processes."""
    case = {
        "do": "steps",
        "family": "mamba2",
        "corpus": str(tiny.write_corpus(root / "corpus")),
        "out": str(root / "run"),
        "steps": 1,
        "save": True,
        "changes": STEP | {"parallel": parallel},
    }
    tiny.launch(processes, [case], root / "case")
    return root


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run saved by two tensor parallel processes."""
    return train(tmp_path_factory.mktemp("run"), 2, {"tensor": 2})


def gate_values(folder: Path, master: bool = False) -> np.ndarray:
    gates = find.find_gates(folder)
    tensors = [g.masters[0] if master else g.A_log for g in gates.gates]
    return np.stack([gates.checkpoint.read_float(t) for t in tensors])


def test_weights_and_masters_move_together_and_nothing_else(trained: Path, tmp_path: Path) -> None:
    gates = find.find_gates(trained / "run")
    assert gates.warnings == ()
    assert [g.A_log.dtype for g in gates.gates] == ["BF16"] * 4
    assert [len(g.A_log.pieces) for g in gates.gates] == [2] * 4  # one box per process
    assert [g.masters[0].dtype for g in gates.gates] == ["F32"] * 4
    plan = edits.resolve(Edit("scale", 0.5, layers=frozenset({0, 3})), gates, {})
    rewrite.write_edits(gates, [plan], tmp_path / "out", dts={})
    before, after = gate_values(trained / "run", True), gate_values(tmp_path / "out", True)
    np.testing.assert_array_equal(after[[1, 2]], before[[1, 2]])
    exact = (before[[0, 3]] + math.log(0.5)).astype(np.float32)
    np.testing.assert_array_equal(after[[0, 3]].astype(np.float32), exact)
    weights = gate_values(tmp_path / "out")
    np.testing.assert_allclose(weights, after, atol=2**-7)
    a = opening.open_checkpoint(trained / "run")
    b = opening.open_checkpoint(tmp_path / "out")
    assert set(a.tensors) == set(b.tensors)
    for name in a.tensors:
        if not name.endswith("A_log") or "exp_avg" in name:
            assert a.read(name).tobytes() == b.read(name).tobytes(), name


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"pipeline": 2}, {"tensor": 2, "pipeline": 2}])
def test_pipeline_stages_are_one_model(parallel: dict[str, int], tmp_path: Path) -> None:
    train(tmp_path, math.prod(parallel.values()), parallel)
    gates = find.find_gates(tmp_path / "run")
    assert gates.warnings == ()
    assert [g.layer for g in gates.gates] == [0, 1, 2, 3]
    assert [len(g.A_log.pieces) for g in gates.gates] == [parallel.get("tensor", 1)] * 4
    plan = edits.resolve(Edit("scale", 0.5, layers=frozenset({0, 3})), gates, {})
    rewrite.write_edits(gates, [plan], tmp_path / "out", dts={})
    for master in (True, False):
        before, after = (gate_values(tmp_path / f, master) for f in ("run", "out"))
        moved = np.array([math.log(0.5), 0, 0, math.log(0.5)])[:, None]
        np.testing.assert_allclose(after - before, moved + 0 * before, atol=2**-6)


def test_training_goes_on_from_the_edited_gates(trained: Path, tmp_path: Path) -> None:
    """The optimizer would restore the old gates at the first step if its copy were not edited."""
    gates = find.find_gates(trained / "run")
    plan = edits.resolve(Edit("scale", 0.25), gates, {})
    rewrite.write_edits(gates, [plan], tmp_path / "out", dts={})
    edited = gate_values(tmp_path / "out")
    resume = {
        "do": "steps",
        "family": "mamba2",
        "corpus": str(trained / "corpus"),
        "out": str(tmp_path / "resumed"),
        "load": str(tmp_path / "out" / (tmp_path / "out" / "latest").read_text().strip()),
        "steps": 1,
        "save": True,
        "changes": STEP,
    }
    tiny.launch(1, [resume], tmp_path / "case")  # and at another tensor parallel size
    after = gate_values(tmp_path / "resumed")
    assert np.abs(after - edited).max() < 0.02
    assert np.abs(after - gate_values(trained / "run")).min() > 1.0


def test_an_optimizer_without_named_masters_is_warned_about(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = opening.open_checkpoint(trained / "run")
    described = checkpoint.tensors.described  # type: ignore[attr-defined]
    for name in [n for n in described if n.startswith("optimizer.state.param.")]:
        described[name.replace("state.param", "distributed.bucket")] = described.pop(name)
    (warning,) = find.find_gates(checkpoint).warnings
    assert "resume with the weights only" in warning


def test_a_run_whose_latest_is_gone(trained: Path, tmp_path: Path) -> None:
    from gatewright.errors import UserError

    (tmp_path / "iter_0000001").mkdir()
    (tmp_path / "latest").write_text("iter_0000009\n")
    with pytest.raises(UserError, match="names 'iter_0000009', which is no checkpoint"):
        find.find_gates(tmp_path)
