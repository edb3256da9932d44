"""Starting `python -m pretrain.train` on a model and a corpus that take seconds."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STEPS = 64
FLAGS = {
    "--train.steps": STEPS,
    "--train.lr-warmup-steps": 2,
    "--train.seq-len-tokens": 32,
    "--checkpoint.every-steps": 8,
    "--train.lr": 0.01,
    "--train.init-std": 0.1,
    "--model.d-model": 32,
    "--model.n-layers": 2,
    "--model.head-dim": 8,
}


def flags(recipe: str, **more: int) -> list[str]:
    """Return the recipe's name and the flags that make its model tiny."""
    named = {f"--model.{name.replace('_', '-')}": value for name, value in more.items()}
    return [recipe, *(str(part) for pair in (FLAGS | named).items() for part in pair)]


MAMBA = flags("mamba2_debug_cpu", d_state=8, chunk_size=16)
LLAMA = flags("llama_debug_cpu", n_heads=4, n_kv_heads=2, ffn_dim=64)
TORCHRUN = (
    *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    *("-m", "pretrain.train"),
)


def command(inputs: dict[str, Path], out: Path, recipe_and_flags: list[str]) -> list[str]:
    recipe, *rest = recipe_and_flags
    folders = ["--data", str(inputs["corpus"]), "--tokenizer", str(inputs["tokenizer"])]
    return [recipe, *folders, "--out", str(out), *rest]


def start(
    arguments: list[str],
    program: tuple[str, ...] = ("-m", "pretrain.train"),
    env: dict[str, str] | None = None,
    **more: Any,
) -> subprocess.Popen[str]:
    quiet = {"OMP_NUM_THREADS": "1", "GATEWRIGHT_QUIET": "1"}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", *program, *arguments],
        cwd=ROOT,
        env={**os.environ, **quiet, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **more,
    )


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    out, err = process.communicate(timeout=900)
    assert process.returncode == code, err[-4000:]
    return out if code == 0 else out + err


def wait_for_step(out: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and process.poll() is None:
        metrics = out / "metrics.jsonl"
        if metrics.exists() and metrics.read_text().count("\n") >= step:
            return
        time.sleep(0.01)
    raise AssertionError(f"never reached step {step}: {process.communicate()}")
