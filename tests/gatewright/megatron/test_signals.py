"""A signal to any one process makes all of them leave."""

from __future__ import annotations

from pathlib import Path

from tests.gatewright.megatron import tiny


def test_all_processes_hear_of_a_signal_to_one(tmp_path: Path) -> None:
    out = str(tmp_path)
    [heard] = tiny.launch(2, [{"do": "signals", "out": out}], tmp_path / "launch")
    # rank 0's answers: before anyone was signalled, after rank 1 was, and when time is up
    assert heard == [None, "SIGUSR1", "SIGUSR1", "the time limit"]
