"""What a fine-tuning run is given, checked before anything heavy starts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gatewright import artifact
from gatewright.errors import UserError
from sft.recipes import RECIPES, family

if TYPE_CHECKING:
    from gatewright.chat import Renderer
    from sft.dataset import Samples
    from sft.parent import Parent
    from sft.train import Args


@dataclass
class Inputs:
    """A run's inputs.

    Attributes:
        manifest: of the data.
        parent: the model it starts from.
        samples, held_out: the data's two splits.
        questions: held-out chats on which call accuracy is measured during training.
        renderer: what drew the data.
    """

    manifest: dict[str, Any]
    parent: Parent
    samples: Samples
    held_out: Samples
    questions: list[dict[str, Any]]
    renderer: Renderer


def read_data_manifest(data: Path) -> dict[str, Any]:
    """Return the manifest of a prepared data folder whose files have the sizes it states.

    Raises:
        UserError: it is none, or a file is missing or cut.
    """
    manifest = artifact.read_manifest(data, "sft-data", flag="--data")
    artifact.require_whole(data, "--data", (".bin", ".npy", ".jsonl", ".json"))
    return manifest


def check(recipe: str, args: Args) -> Inputs:
    """Read the inputs and refuse what cannot be trained on.

    Raises:
        UserError: names the flag, and what to do.
    """
    from sft import parent
    from sft.dataset import Samples
    from sft.engine import deepspeed_config
    from sft.held_out import load_questions, load_renderer

    config = args.train
    manifest = read_data_manifest(args.data)
    found = parent.inspect(args.model)
    parent.require_family(found, recipe, family(recipe), RECIPES.names())
    parent.check_vocabulary(found, args.data, manifest)
    deepspeed_config(config, int(os.environ.get("WORLD_SIZE", "1")))
    samples, held_out = Samples(args.data / "train"), Samples(args.data / "held_out")
    for split in (samples, held_out):
        split.require_ids_below(found.vocab_size)
    if not len(samples):
        raise UserError(f"--data {args.data}: holds no training sample")
    longest = int(samples.index["length"].max())
    if longest > config.context_tokens:
        raise UserError(
            f"--train.context-tokens {config.context_tokens}: --data {args.data} holds "
            f"a sample of {longest} tokens; raise it, or prepare with a shorter context"
        )
    smallest = int(samples.index["pool_size"].min())
    if config.curriculum != "fixed" and config.start_pool_size < smallest:
        raise UserError(
            f"--train.start-pool-size {config.start_pool_size}: the smallest pool of --data "
            f"{args.data} holds {smallest} tools; give at least that"
        )
    questions = load_questions(args.data, config.eval_calls) if config.eval_calls else []
    if config.curriculum == "gated" and not questions:
        raise UserError(
            f"--train.curriculum gated: --data {args.data} holds no held-out chat with a call to "
            "raise k on; prepare it with a larger --held-out"
        )
    if config.early_stop and not len(held_out):
        raise UserError(
            f"--train.early-stop {config.early_stop}: --data {args.data} holds no held-out chat "
            "whose loss could rise; prepare it with a larger --held-out"
        )
    renderer = load_renderer(args.data, manifest)
    return Inputs(manifest, found, samples, held_out, questions, renderer)
