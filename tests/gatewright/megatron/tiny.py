"""A model, a corpus and a run small enough to repeat under many layouts."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from gatewright.megatron.config import (
    CheckpointConfig,
    LogConfig,
    ParallelConfig,
    PretrainConfig,
    TrainConfig,
)
from gatewright.models import ModelConfig

VOCAB = 256
EOD = 0

MODELS = {
    "mamba2": ModelConfig(
        "mamba2",
        VOCAB,
        32,
        4,
        max_seq_len_tokens=64,
        d_state=8,
        head_dim=8,
        ngroups=4,
        chunk_size=16,
    ),
    "llama": ModelConfig(
        "llama",
        VOCAB,
        32,
        4,
        max_seq_len_tokens=64,
        n_heads=4,
        n_kv_heads=2,
        head_dim=8,
        ffn_dim=48,
    ),
}


def write_corpus(folder: Path, documents: int = 300, seed: int = 0) -> Path:
    """Write counting sequences (t, t + stride, ...), each ended by EOD, as an IndexedDataset."""
    from gatewright.megatron import data

    rng = np.random.default_rng(seed)
    written = []
    for _ in range(documents):
        length = int(rng.integers(10, 90))
        start, stride = rng.integers(1, VOCAB), rng.integers(1, 4)
        tokens = (start + stride * np.arange(length)) % (VOCAB - 1) + 1
        tokens[-1] = EOD
        written.append(tokens)
    data.write_documents(folder, written)
    return folder


def config(family: str, **changes: Any) -> PretrainConfig:
    """Return a run of 10 steps of 4 sequences of 32 tokens.

    Args:
        changes: `parallel`, `train`, `checkpoint`, `log`, `model`: fields to replace.
    """
    base = PretrainConfig(
        model=MODELS[family],
        train=TrainConfig(
            steps=10,
            seq_len_tokens=32,
            global_batch_sequences=4,
            lr=1e-2,
            min_lr=1e-3,
            lr_warmup_steps=2,
            dtype="fp32",
            init_std=0.1,
        ),
        parallel=ParallelConfig(),
        checkpoint=CheckpointConfig(every_steps=5),
        log=LogConfig(every_steps=1, gates_every_steps=0, tensorboard=False),
    )
    for part, fields in changes.items():
        base = dataclasses.replace(
            base, **{part: dataclasses.replace(getattr(base, part), **fields)}
        )
    return base


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def losses(out: Path) -> list[float]:
    return [row["loss"] for row in metrics(out)]


def launch(processes: int, cases: list[dict[str, Any]], folder: Path, timeout: float = 1800) -> Any:
    """Run `worker.py` on several processes; returns what each case returned on rank 0."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(processes), "-m", "tests.gatewright.megatron.worker"]
    process = subprocess.Popen(
        [*command, str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GATEWRIGHT_QUIET": "1"},
        cwd=Path(__file__).resolve().parents[3],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        with contextlib.suppress(ProcessLookupError):  # workers too, if any are left
            os.killpg(process.pid, signal.SIGKILL)
    (folder / "output.txt").write_text(out)
    assert process.returncode == 0, out[-2000:] + err
    return json.loads((folder / "results.json").read_text())
