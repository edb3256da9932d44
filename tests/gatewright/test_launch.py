"""The environment of computing processes."""

import os
import subprocess
import sys

import pytest

from gatewright import launch


def test_tunables_are_added_and_the_users_own_kept() -> None:
    env = launch.tuned_env({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0", "A": "b"})
    items = env["GLIBC_TUNABLES"].split(":")
    assert items[0] == "glibc.malloc.hugetlb=0"
    assert sum(i.startswith("glibc.malloc.hugetlb") for i in items) == 1
    assert any(i.startswith("glibc.malloc.mmap_threshold=") for i in items)
    assert env["A"] == "b"
    assert launch.allocator(env) == "tuned"
    assert launch.tuned_env(env) == env


def test_the_default_allocator_can_be_asked_for() -> None:
    env = launch.tuned_env({"GATEWRIGHT_MALLOC": "default"})
    assert "GLIBC_TUNABLES" not in env
    assert launch.allocator(env) == "default"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_retune_starts_the_program_again_once() -> None:
    code = (
        "import os, sys; from gatewright import launch; print('start', flush=True);"
        "launch.retune(); print(launch.allocator(), sys.argv[1:])"
    )
    env = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
    out = subprocess.run(
        [sys.executable, "-c", code, "x y", "--z"],
        env=env,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    ).stdout
    assert out.splitlines() == ["start", "start", "tuned ['x y', '--z']"]
