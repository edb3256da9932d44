"""Pretraining: our Megatron loop against transformers' Trainer, tokens per second.

Same model (the debug recipes' sizes), same sequences in the same order, same precision (fp32),
AdamW, clipping and cosine on both sides; the Trainer is as transformers ships it, with its
fused AdamW.  Data loading, logging and the optimizer are inside both figures; starting up is
not.  The recipe's Mamba-2 says chunks of 64 tokens, which decides the peer's speed and not
ours (our kernels choose their own); it is measured at transformers' default of 256 as well.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gatewright.megatron import cpu, data, distributed, loop
from gatewright.megatron.config import PretrainConfig
from gatewright.megatron.recipes import RECIPES
from gatewright.models import hf_config
from tools.benchmarks.harness import Options, Result, result

ALLOCATORS = ("tuned",)
STEPS = 3
DEFAULT_CHUNK = 256  # of transformers' Mamba2Config
EOD = 0


def run(options: Options) -> Iterator[Result]:
    torch.set_num_threads(options.threads)
    cpu.enable()
    with tempfile.TemporaryDirectory() as tmp:
        corpus = write_corpus(Path(tmp) / "corpus")
        for name in ("mamba2_debug_cpu", "llama_debug_cpu"):
            config = endless(RECIPES.get(name))
            chunks = [config.model.chunk_size]
            if config.model.family == "mamba2":
                chunks.append(DEFAULT_CHUNK)
            with distributed.processes(config.parallel):
                ours, *peers = _tokens_per_second(
                    config, corpus, Path(tmp) / name, options.repeats, chunks
                )
            for chunk, peer in zip(chunks, peers, strict=True):
                named = f", chunk {chunk}" if config.model.family == "mamba2" else ""
                yield result(
                    options,
                    f"{name} training",
                    ours,
                    peer,
                    "tokens/s",
                    f"transformers Trainer{named}",
                    more_is_better=True,
                )


def endless(recipe: PretrainConfig) -> PretrainConfig:
    """Return the recipe without telemetry, checkpoints and TensorBoard, and with no end."""
    log = dataclasses.replace(
        recipe.log, gates_every_steps=0, tensorboard=False, every_steps=1_000_000
    )
    return dataclasses.replace(recipe, log=log)


def write_corpus(folder: Path, documents: int = 3000) -> data.Corpus:
    """Write documents of Zipf-distributed tokens."""
    rng = np.random.default_rng(0)
    written = []
    for length in rng.integers(50, 400, documents):
        tokens = np.minimum(rng.zipf(1.2, length), 8191)
        tokens[-1] = EOD
        written.append(tokens)
    data.write_documents(folder, written)
    return data.Corpus.of_folder(folder, EOD)


def _tokens_per_second(
    config: PretrainConfig, corpus: data.Corpus, out: Path, repeats: int, chunks: list[int]
) -> list[float]:
    """Return our median rate and the peer's at each chunk size, measured in turn."""
    out.mkdir()
    train = config.train
    with loop.Run(config, corpus, out, data_parallel=1) as ours:
        sides: list[Callable[[], float]] = [lambda: _our_seconds(ours)]
        for chunk in chunks:
            model = dataclasses.replace(config.model, chunk_size=chunk)
            sides.append(_trainer(dataclasses.replace(config, model=model), ours.dataset, out))
        times: list[list[float]] = [[] for _ in sides]
        for repeat in range(repeats + 1):
            for side, kept in zip(sides, times, strict=True):
                took = side()
                if repeat:  # the first one warms up
                    kept.append(took)
    return [train.tokens_per_step / statistics.median(kept) for kept in times]


def one_step(run: loop.Run) -> None:
    """Take one step of our loop, as `loop.train` does."""
    found = run.forward_backward()
    run.examine(found)
    run.write_down(found, run.update_weights(found))


def _our_seconds(run: loop.Run) -> float:
    """Return seconds per step over STEPS steps of our loop."""
    start = time.perf_counter()
    for _ in range(STEPS):
        one_step(run)
    return (time.perf_counter() - start) / STEPS


def _trainer(config: PretrainConfig, dataset: Any, out: Path) -> Callable[[], float]:
    """Return a function that trains STEPS + 1 steps and answers seconds per step of the last."""
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
    from transformers.utils import logging

    logging.set_verbosity_error()
    train = config.train
    model = AutoModelForCausalLM.from_config(hf_config(config.model))

    class Sequences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        """The same samples that our loop sees."""

        def __len__(self) -> int:
            return train.samples

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            tokens, _ = dataset._query_document_sample_shuffle_indices(index)
            sequence = torch.from_numpy(tokens[: train.seq_len_tokens])
            return {"input_ids": sequence, "labels": sequence}

    class Clock(TrainerCallback):
        ends: list[float]

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.ends = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.ends.append(time.perf_counter())

    clock = Clock()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(out / "trainer"),
            max_steps=STEPS + 1,
            per_device_train_batch_size=train.micro_batch_sequences,
            gradient_accumulation_steps=train.global_batch_sequences // train.micro_batch_sequences,
            learning_rate=train.lr,
            lr_scheduler_type="cosine",
            weight_decay=train.weight_decay,
            adam_beta2=train.adam_beta2,
            max_grad_norm=train.clip_grad_norm,
            optim="adamw_torch_fused",
            use_cpu=True,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Sequences(),
        callbacks=[clock],
    )

    def seconds() -> float:
        trainer.train()
        return (clock.ends[-1] - clock.ends[0]) / STEPS

    return seconds
