"""Pretrain a Mamba-2 or Llama with Megatron-Core.

    python -m pretrain.train RECIPE --data DIR --tokenizer DIR --out DIR [--train.steps N ...]
    python -m pretrain.train RECIPE ... --init-from CHECKPOINT
    torchrun --nproc-per-node 2 -m pretrain.train RECIPE ... --parallel.tensor 2

A run that finds a checkpoint of the same configuration in --out goes on from it; --init-from
takes another run's weights only, and starts step 0 with a fresh optimizer.

Exit codes: 0 finished; 2 bad input; 3 stopped at a loss that is not finite; 75 saved and left
early (signal or time limit): start the same command again to go on.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import tyro

from gatewright import artifact, cli, config, launch, processor, runlog
from gatewright.errors import UserError
from gatewright.megatron.config import (
    CheckpointConfig,
    LogConfig,
    ParallelConfig,
    PretrainConfig,
    TrainConfig,
)
from gatewright.models import ModelConfig
from pretrain.recipes import RECIPES

PROG = "python -m pretrain.train"


@dataclasses.dataclass(frozen=True)
class Args:
    """Where a run reads and writes, and every value of its recipe."""

    data: Path
    """Corpus folder made by pretrain.prepare."""
    tokenizer: Path
    """Tokenizer folder that the corpus was made with."""
    out: Path
    """Run folder; a run that was cut short goes on in it."""
    model: ModelConfig
    train: TrainConfig
    parallel: ParallelConfig
    checkpoint: CheckpointConfig
    log: LogConfig
    init_gate_offset: float
    """Added to every initial A_log (the papers' additive offset; -10 is practically no decay)."""
    exit_duration_minutes: float | None
    """Save and leave with code 75 after this long (Slurm time limits)."""
    vocab_follows_tokenizer: bool
    """Take vocab_size from the tokenizer, padded to a multiple of 128."""
    init_from: Path | None = None
    """Start from these weights: a Megatron run or iter_* folder, Hugging Face or mamba_ssm."""

    @classmethod
    def of_recipe(cls, recipe: PretrainConfig) -> Args:
        """Return the recipe's values, with the folders still to be named."""
        values = {f.name: getattr(recipe, f.name) for f in dataclasses.fields(recipe)}
        return cls(data=tyro.MISSING, tokenizer=tyro.MISSING, out=tyro.MISSING, **values)

    def pretrain_config(self) -> PretrainConfig:
        names = [f.name for f in dataclasses.fields(PretrainConfig)]
        return PretrainConfig(**{name: getattr(self, name) for name in names})


def tokenizer_size(folder: Path) -> int:
    """Return how many embeddings a tokenizer folder needs: its largest id, and one.

    Raises:
        UserError: the folder has no readable tokenizer.json.
    """
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UserError(f"--tokenizer {folder}: has no tokenizer.json")
    try:
        ids = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True).values()
        return max(ids) + 1  # ids may have gaps
    except Exception as e:
        raise UserError(f"{path}: cannot be read ({e})") from e


def world_size() -> int:
    """Return how many processes torchrun or srun started for this run; 1 without either."""
    launched = "RANK" in os.environ and "MASTER_ADDR" in os.environ
    return int(os.environ.get("WORLD_SIZE", "1")) if launched else 1


def check_inputs(args: Args) -> tuple[PretrainConfig, dict[str, Any]]:
    """Return the configuration fitted to the tokenizer, and the corpus's manifest.

    Raises:
        UserError: an input folder is missing, unfinished, of another kind, or the corpus was
            made with another tokenizer than --tokenizer, or the processes cannot share the work.
    """
    corpus = artifact.read_manifest(args.data, "corpus", flag="--data")
    artifact.require_whole(args.data, "--data", (".bin", ".idx"))
    artifact.read_manifest(args.tokenizer, "tokenizer", flag="--tokenizer")
    made_with = corpus["parents"].get("tokenizer", {}).get("content_hash")
    if made_with != artifact.content_hash(args.tokenizer):
        raise UserError(
            f"--data {args.data} was made with another tokenizer than --tokenizer "
            f"{args.tokenizer}: name that one, or run pretrain.prepare again"
        )
    resolved = args.pretrain_config().fit_vocab(
        tokenizer_size(args.tokenizer), f"--tokenizer {args.tokenizer}"
    )
    parallel = resolved.parallel
    parallel.check(resolved.model, resolved.train.seq_len_tokens)
    resolved.train.microbatches(parallel.data(world_size()))
    if args.init_from is not None:
        from gatewright.megatron import initial

        if resolved.init_gate_offset:
            raise UserError(
                "--init-gate-offset: shifts freshly initialised gates, not those of --init-from; "
                "leave it out, or edit that checkpoint with tools.scale_gates"
            )
        initial.check(args.init_from, resolved.model, args.tokenizer)
    return resolved, corpus


def open_run(args: Args, resolved: PretrainConfig, inputs: dict[str, str]) -> None:
    """Make --out, or check that it holds the same run; write config.json before any work.

    A run that did not get to its first step binds nobody: it takes other settings.

    Raises:
        UserError: --out is finished, or holds a run of another configuration or corpus, or
            something else.
    """
    if (args.out / artifact.MANIFEST).exists():
        raise UserError(f"--out {args.out} is already finished: choose another folder")
    path = args.out / "config.json"
    new = json.loads(json.dumps({**dataclasses.asdict(resolved), "inputs": inputs}))
    inside = {p.name for p in args.out.iterdir()} if args.out.is_dir() else set()
    inside = {name for name in inside if name[0] != "."}
    if path.exists():
        try:
            old = json.loads(path.read_text())
            if not isinstance(old, dict):
                raise ValueError("not a JSON object")
        except (ValueError, RecursionError) as e:
            raise UserError(f"{path}: is damaged ({e}); restore it, or give another --out") from e
        begun = "inputs" not in old or not inside <= _BEFORE_THE_FIRST_STEP
        different = sorted(_differences(old, new))
        if begun and different:
            raise UserError(
                f"--out {args.out} holds a run with another {different[0]}: repeat that run's "
                "settings to go on with it, or choose another folder"
            )
    elif inside:
        raise UserError(f"--out {args.out} is not empty: choose another folder")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"--out {args.out}: cannot create it ({e.strerror})") from e
    artifact.write_json(path, new)


# What a run leaves that is refused, or killed, before it has trained at all.
_BEFORE_THE_FIRST_STEP = {"config.json", "data-index", "gates_at_start.json"}

# What may change when a run goes on: the layout, and what is only seen or kept.
_MAY_CHANGE = (
    "parallel.",
    "checkpoint.",
    "log.",
    "exit_duration_minutes",
    "train.micro_batch_sequences",
    "train.recompute",
    "train.on_bad_loss",
    "train.spike_factor",
)


def _differences(old: Any, new: Any, prefix: str = "") -> list[str]:
    """Return the dotted names of values that differ and may not."""
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for key in {**old, **new}:
            found += _differences(old.get(key), new.get(key), f"{prefix}{key}.")
        return found
    name = prefix.rstrip(".")
    if old == new or f"{name}.".startswith(_MAY_CHANGE):
        return []
    return [name]


def final_loss(metrics: Path, steps: int) -> float:
    """Return the mean loss per token over the last tenth of a run's logged steps."""
    rows = [r for r in runlog.read_metrics(metrics) if "loss" in r]
    tail = [r["loss"] for r in rows if r["step"] > 0.9 * steps] or [rows[-1]["loss"]]
    return sum(tail) / len(tail)


def main(args: Args) -> int:
    """Pretrain a Mamba-2 or Llama with Megatron-Core."""
    resolved, corpus = check_inputs(args)
    inputs = {
        "data": artifact.content_hash(args.data),
        "tokenizer": artifact.content_hash(args.tokenizer),
    }
    if args.init_from is not None:
        inputs["init_from"] = artifact.content_hash(args.init_from)
    main_process = int(os.environ.get("RANK", "0")) == 0
    if main_process:
        open_run(args, resolved, inputs)

    from gatewright.megatron import distributed, health, loop, signals
    from gatewright.megatron.data import Corpus

    if main_process and resolved.train.dtype == "bf16":
        processor.warn_of_slow_bf16("--train.dtype fp32", distributed.device().type)
    facts = corpus["extra"]
    files = Corpus.of_folder(args.data, facts["eod_id"], facts.get("blend"))
    outcome = loop.train(resolved, files, args.out, args.init_from)
    if outcome.reason == loop.BAD_LOSS:
        if main_process:
            print(
                f"stopped at step {outcome.step + 1}: {outcome.reason}; its documents are in "
                f"{args.out / health.FILE}. Go on from the last checkpoint with "
                "--train.on-bad-loss skip, or take the documents out of the corpus",
                file=sys.stderr,
            )
        return signals.EXIT_BAD_LOSS
    if not outcome.finished:
        if main_process:
            print(
                f"left at step {outcome.step} of {resolved.train.steps} ({outcome.reason}), "
                f"saved in {args.out}: run the same command again to go on"
            )
        return signals.EXIT_RUN_AGAIN
    if main_process:
        _finish(args, resolved, corpus, inputs)
    return 0


def _finish(
    args: Args, resolved: PretrainConfig, corpus: dict[str, Any], inputs: dict[str, str]
) -> None:
    """Print the run's result beside the corpus's unigram entropy and write the manifest."""
    loss = final_loss(args.out / "metrics.jsonl", resolved.train.steps)
    unigram = float(corpus["extra"]["unigram_entropy_nats"])
    tokens = resolved.train.steps * resolved.train.tokens_per_step
    started = {}
    if args.init_from is not None:
        from gatewright.checkpoints.models_on_disk import stated_facts

        facts = stated_facts(args.init_from)  # training goes on from edited gates
        started = {"gate_scale": facts["gate_scale"]} if "gate_scale" in facts else {}
    artifact.finish(
        args.out,
        kind="pretrain",
        config=resolved,
        parents={name: getattr(args, name) for name in inputs},
        parent_hashes=inputs,
        seed=resolved.train.seed,
        extra={
            "final_loss_nats": loss,
            "unigram_entropy_nats": unigram,
            "tokens": tokens,
            "parameters": resolved.model.parameters(),
            **started,
        },
    )
    print(
        f"{resolved.model.family}, {resolved.model.parameters() / 1e6:.1f}M parameters, "
        f"{tokens / 1e6:.2f}M tokens: final loss {loss:.3f} nats per token "
        f"(unigram entropy of the corpus {unigram:.3f})"
    )


def run(argv: list[str]) -> None:
    """Take the recipe off the command line, then parse the rest over its values."""
    try:
        name, rest = config.split_recipe(argv, RECIPES, PROG)
        default = Args.of_recipe(RECIPES.get(name))
    except UserError as e:
        cli.fail(e)
    cli.run(main, Args, prog=f"{PROG} {name}", description=__doc__, default=default, argv=rest)


if __name__ == "__main__":
    launch.retune()
    run(sys.argv[1:])
