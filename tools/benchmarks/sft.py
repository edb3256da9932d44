"""Fine-tuning a small Mamba-2 on tool calls, tokens per second, against transformers' Trainer.

Both train the same model on the same rendered samples with AdamW in fp32, about 4,096 tokens a
step, and count real tokens only.  The peer does what the Trainer offers for this model on this
machine: a sample per row, padded to the longest of the batch, transformers' own Mamba-2 and
logits at every position (it cannot pack: its CPU path refuses `seq_idx`).  Ours packs, runs the
house's kernels and computes logits where there is a loss.  Times are those of training steps
after the first two, start-up apart.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.benchmarks.harness import Options, Result, result

ALLOCATORS = ("tuned",)
PEER = "transformers Trainer"
STEPS = 6
WARM = 2
CONTEXT_TOKENS = 2048
SAMPLES_PER_STEP = 4  # of about 1,000 tokens
VOCAB_SIZE = 4096


def _command(module: str, *arguments: object) -> str:
    environment = os.environ | {"GATEWRIGHT_QUIET": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{module} failed:\n{done.stderr[-3000:]}")
    return done.stdout


def _make_inputs(folder: Path) -> None:
    """Write chats, a tokenizer of their words, an untrained model and prepared samples."""
    _command("tools.demo_chats", "--out", folder / "chats")
    with (
        open(folder / "chats" / "chats.jsonl", encoding="utf-8") as chats,
        open(folder / "text.jsonl", "w", encoding="utf-8") as text,
    ):
        for line in chats:
            text.write(json.dumps({"text": line}) + "\n")
    _command(
        "tokenizer.train", "--corpus", folder / "text.jsonl", "--vocab-size", VOCAB_SIZE,
        "--out", folder / "tokenizer",
    )  # fmt: skip
    _command(
        "sft.prepare", "--input", folder / "chats" / "chats.jsonl", "--tokenizer",
        folder / "tokenizer", "--max-pool-size", 8, "--context-tokens", CONTEXT_TOKENS,
        "--out", folder / "data",
    )  # fmt: skip
    _make_model(folder / "model")


def _make_model(folder: Path) -> None:
    import torch
    from transformers import Mamba2ForCausalLM

    from gatewright.models import ModelConfig, hf_config

    torch.manual_seed(0)
    config = ModelConfig(
        family="mamba2", vocab_size=VOCAB_SIZE, d_model=256, n_layers=6, d_state=64,
        head_dim=64, ngroups=2, chunk_size=64, tie_embeddings=True,
    )  # fmt: skip
    Mamba2ForCausalLM(hf_config(config)).save_pretrained(str(folder))


def _ours(folder: Path, out: Path) -> float:
    _command(
        "sft.train", "mamba2_debug_cpu", "--model", folder / "model", "--data", folder / "data",
        "--out", out, "--train.steps", STEPS, "--train.curriculum", "fixed",
        "--train.eval-packs", 0, "--train.precision", "fp32",
    )  # fmt: skip
    with open(out / "metrics.jsonl", encoding="utf-8") as f:
        rows = [json.loads(line) for line in f][WARM:]
    seconds = sum(row["tokens"] / row["tokens_per_second"] for row in rows)
    return float(sum(row["tokens"] for row in rows) / seconds)


def _peer(folder: Path) -> float:
    return float(_command("tools.benchmarks.sft", folder).splitlines()[-1])


def train_with_trainer(folder: Path) -> float:
    """Train with transformers' Trainer; return real tokens per second after the warm-up."""
    import time

    import numpy as np
    import torch
    from transformers import Mamba2ForCausalLM, Trainer, TrainerCallback, TrainingArguments

    split = folder / "data" / "train"
    index = np.load(split / "samples.npy")
    tokens = np.memmap(split / "tokens.bin", dtype="<i4", mode="r")
    mask = np.memmap(split / "mask.bin", dtype=np.uint8, mode="r")
    rows = []
    for sample in index[np.random.default_rng(0).permutation(len(index))]:
        piece = slice(int(sample["start"]), int(sample["start"] + sample["length"]))
        rows.append((tokens[piece].astype(np.int64), mask[piece]))

    def collate(batch: list[Any]) -> dict[str, torch.Tensor]:
        longest = max(len(ids) for ids, _ in batch)
        out = {
            "input_ids": torch.zeros(len(batch), longest, dtype=torch.long),
            "attention_mask": torch.zeros(len(batch), longest, dtype=torch.long),
            "labels": torch.full((len(batch), longest), -100, dtype=torch.long),
        }
        for i, (ids, ones) in enumerate(batch):
            out["input_ids"][i, : len(ids)] = torch.from_numpy(ids)
            out["attention_mask"][i, : len(ids)] = 1
            out["labels"][i, : len(ids)] = torch.from_numpy(np.where(ones != 0, ids, -100))
        return out

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.times: list[float] = []

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.times.append(time.perf_counter())

    class InOrder(Trainer):
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return torch.utils.data.SequentialSampler(rows)

    clock = Clock()
    with tempfile.TemporaryDirectory() as scratch:
        trainer = InOrder(
            model=Mamba2ForCausalLM.from_pretrained(folder / "model"),
            args=TrainingArguments(
                output_dir=scratch, max_steps=STEPS, save_strategy="no", report_to=[],
                per_device_train_batch_size=SAMPLES_PER_STEP, use_cpu=True, disable_tqdm=True,
                learning_rate=2e-3, remove_unused_columns=False, logging_strategy="no",
            ),
            train_dataset=rows,  # type: ignore[arg-type]
            data_collator=collate,
            callbacks=[clock],
        )  # fmt: skip
        trainer.train()
    used = rows[WARM * SAMPLES_PER_STEP : STEPS * SAMPLES_PER_STEP]
    return sum(len(ids) for ids, _ in used) / (clock.times[-1] - clock.times[WARM - 1])


def run(options: Options) -> Iterator[Result]:
    """Train both sides in turn, each time in a fresh process; medians over the repeats."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        _make_inputs(folder)
        ours, peer = [], []
        for i in range(options.repeats):
            ours.append(_ours(folder, folder / f"out{i}"))
            peer.append(_peer(folder))
    yield result(
        options,
        "sft mamba2 5M",
        statistics.median(ours),
        statistics.median(peer),
        "tokens/s",
        PEER,
        more_is_better=True,
    )


if __name__ == "__main__":
    print(train_with_trainer(Path(sys.argv[1])))
