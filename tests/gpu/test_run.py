"""`tests/gpu/run.sh` under pytest: it skips itself without CUDA, and says so."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("run.sh")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_without_cuda_it_skips_itself() -> None:
    done = subprocess.run([SCRIPT], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("SKIPPED")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_checks_pass_on_this_gpu(tmp_path: Path) -> None:
    subprocess.run([SCRIPT, tmp_path / "results.json"], timeout=480, check=True)
    assert (tmp_path / "results.json").is_file()
