import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.slurm.loopback import SCRIPT, Cluster, missing


@pytest.fixture
def cluster(whole_cluster: Cluster) -> Iterator[Cluster]:
    """The process's Slurm cluster; a test that fails leaves no jobs to those after it."""
    yield whole_cluster
    whole_cluster.call("scancel", "--user=root")


@pytest.fixture(scope="session")
def whole_cluster() -> Iterator[Cluster]:
    """A Slurm cluster of Debian's packages on loopback, one for each test process."""
    reason = missing()
    if reason:
        pytest.skip(reason)
    # Sockets have short paths, so not below pytest's own folder.
    folder = Path(f"/tmp/gatewright-slurm-{os.getpid()}")
    began = time.monotonic()
    up = subprocess.run([SCRIPT, "up", folder], capture_output=True, text=True, timeout=60)
    try:
        assert up.returncode == 0, up.stdout + up.stderr
        assert time.monotonic() - began < 60
        yield Cluster(folder)
    finally:
        subprocess.run([SCRIPT, "down", folder], capture_output=True, timeout=60, check=False)
        left = [p for p in psutil.process_iter(["cmdline"]) if _belongs(p, folder)]
        shutil.rmtree(folder, ignore_errors=True)
    assert not left, f"the cluster left {left}"


def _belongs(process: psutil.Process, folder: Path) -> bool:
    if not any(str(folder) in word for word in process.info["cmdline"] or []):
        return False
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it ended between the two looks
        return False
