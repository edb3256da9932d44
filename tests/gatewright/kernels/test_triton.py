"""Our scan against mamba_ssm's own Triton kernels, which Triton's interpreter runs on a CPU.

Needs triton and mamba_ssm's Python sources (its CUDA extensions are not used):

    MAMBA_SKIP_CUDA_BUILD=TRUE MAMBA_FORCE_BUILD=TRUE \\
        pip install --no-build-isolation --no-deps mamba-ssm==2.3.2.post1 triton
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gatewright.kernels import ssd_scan
from tests.gatewright.kernels.oracle import outputs_and_gradients, worst
from tests.gatewright.kernels.test_ssd import inputs

ROOT = Path(__file__).resolve().parents[3]
MISSING = [name for name in ("triton", "mamba_ssm") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"{' and '.join(MISSING)} are not installed"),
]

CASES: list[dict[str, Any]] = [
    {"sizes": {"b": 1, "l": 64, "h": 2, "p": 16, "n": 16}, "extras": ("D",)},
    {"sizes": {"b": 1, "l": 70, "h": 2, "p": 16, "n": 32, "g": 2}, "extras": ("D2", "z")},
    {"sizes": {"b": 2, "l": 37, "h": 2, "p": 32, "n": 16}, "extras": ("initial_states",)},
    {"sizes": {"b": 1, "l": 61, "h": 2, "p": 16, "n": 16}, "extras": ("D", "seq_idx")},
    {"sizes": {"b": 1, "l": 50, "h": 2, "p": 16, "n": 16, "scale": 64.0}, "extras": ("D",)},
]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, torch.Tensor]]:
    """Outputs, final states and gradients of mamba_ssm's kernels for every case."""
    folder = tmp_path_factory.mktemp("triton")
    cases = [
        {"tensors": case_inputs(i)[0], "options": case_inputs(i)[1]} for i in range(len(CASES))
    ]
    torch.save(cases, folder / "cases.pt")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.gatewright.kernels.triton_scan", str(folder)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "results.pt", weights_only=True)


def case_inputs(number: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    case = CASES[number]
    tensors, seq_idx = inputs(**case["sizes"], extras=case["extras"], seed=number)
    options = {"chunk_size": 32, "dt_softplus": True, "seq_idx": seq_idx}
    return tensors, options | {"return_final_states": seq_idx is None}


@pytest.mark.parametrize("number", range(len(CASES)))
def test_scan_agrees_with_mamba_ssm(
    kernels: str, number: int, theirs: list[dict[str, torch.Tensor]]
) -> None:
    tensors, options = case_inputs(number)
    found = outputs_and_gradients(ssd_scan, tensors, torch.float32, **options)
    error, name = worst(found, {k: v.double() for k, v in theirs[number].items()})
    assert error < 1e-5, name
