"""The generation benchmark at toy size: both sides answer the same prompts."""

from pathlib import Path

import pytest

from tools.benchmarks import bfcl
from tools.benchmarks.harness import Options


def test_generation_is_compared_answer_by_answer(
    models: dict[str, Path], pools_1_4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pools").symlink_to(pools_1_4)
    monkeypatch.setattr(bfcl, "QUESTIONS", 2)
    monkeypatch.setattr(bfcl, "NEW_TOKENS", 2)
    options = Options(threads=1, allocator="default", repeats=1)
    (row,) = bfcl._generation(options, tmp_path, "llama", models["llama"])
    assert row.unit == "answers/s"
    assert row.peer is not None
    assert row.ours > 0
    assert row.peer > 0
