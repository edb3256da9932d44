"""The recall-cell benchmark compares outputs before speed, and says how to get its peer."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from gatewright import rank_one_scan
from gatewright.errors import UserError
from tools.benchmarks import cells
from tools.benchmarks.harness import Options


def test_a_missing_peer_is_one_line_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install --no-deps"):
        cells.naive("delta_rule")


def test_a_peer_that_computes_something_else_stops_the_benchmark(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The peers here are our own recurrence in the peer's interface, right and wrong."""

    def recurrence(q, k, v, beta):  # type: ignore[no-untyped-def]
        q, k, v = (x[:, 0] for x in (q, k, v))
        beta = beta[:, 0, :, None]
        o = rank_one_scan.recurrence(
            q / cells.WIDTH**0.5, k, beta * v, torch.zeros_like(beta), beta * k, k
        )
        return o[:, None], None

    def peer(factor: float) -> ModuleType:
        module = ModuleType("peer")
        module.delta_rule_recurrence = recurrence  # type: ignore[attr-defined]
        module.delta_rule_chunkwise = lambda *a: (recurrence(*a)[0] * factor, None)  # type: ignore[attr-defined]
        return module

    monkeypatch.setattr(cells, "SEQUENCES", 2)
    monkeypatch.setattr(cells, "TOKENS", 32)
    options = Options(threads=torch.get_num_threads(), allocator="default", repeats=1)
    for factor, fine in ((1.0, True), (1.01, False)):
        module = peer(factor)
        monkeypatch.setattr(cells, "naive", lambda name, module=module: module)
        found = cells.run(options)
        first = next(found)
        assert first.peer_name == "fla-core naive recurrent"
        assert first.ratio == pytest.approx(first.peer / first.ours)
        if fine:
            assert next(found).unit == "ms"
        else:
            with pytest.raises(AssertionError):
                next(found)
    assert "fla" not in sys.modules
