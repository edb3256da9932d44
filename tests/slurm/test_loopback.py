"""The bring-up script itself, where it must refuse or spare something."""

import subprocess
from pathlib import Path

import pytest

from tests.slurm.loopback import SCRIPT


@pytest.mark.parametrize("nodes", ["5", "0", "two"])
def test_no_more_nodes_than_there_are_ports(nodes: str, tmp_path: Path) -> None:
    argv = [SCRIPT, "up", tmp_path / "cluster", nodes]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (2, f"NODES {nodes}: give 1 to 4\n")
    assert not (tmp_path / "cluster").exists()


def test_an_old_pid_file_ends_nobody_elses_process(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        try:
            (tmp_path / "slurmd-n1.pid").write_text(str(other.pid))
            subprocess.run([SCRIPT, "down", tmp_path], capture_output=True, timeout=60, check=True)
            assert other.poll() is None
        finally:
            other.kill()
