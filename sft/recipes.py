"""Fine-tuning recipes: one named function per real run.

The paper does not state its fine-tuning hyperparameters.  The 8xH100 recipes are our choice:
a peak rate of 1e-5 to 2e-5 with short warm-up and cosine to a tenth is common for
full-parameter fine-tuning of 1-3B models on a few hundred million tokens; two epochs, because
tool-calling chats repeat their schemas and a third epoch tends to overfit them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

from gatewright.config import Recipes
from gatewright.errors import UserError

Curriculum = Literal["fixed", "ramp", "gated"]
Precision = Literal["fp32", "bf16"]


_RANGES: tuple[tuple[tuple[str, ...], Callable[[float], bool], str], ...] = (
    (
        ("context_tokens", "global_batch_packs", "micro_batch_packs", "keep_checkpoints",
         "log_every", "eval_new_tokens", "start_pool_size"),
        lambda x: x >= 1, "at least 1",
    ),
    (
        ("steps", "lr_warmup_steps", "checkpoint_every", "eval_every", "eval_packs", "eval_calls",
         "early_stop"),
        lambda x: x >= 0, "at least 0",
    ),
    (("lr", "eps"), lambda x: 0 < x < math.inf, "a positive number"),
    (("epochs", "weight_decay", "clip_norm"), lambda x: 0 <= x < math.inf, "at least 0"),
    (("beta1", "beta2"), lambda x: 0 <= x < 1, "a number in [0, 1)"),
    (("min_lr_ratio",), lambda x: 0 <= x <= 1, "a share in [0, 1]"),
    (("ramp_share", "gate_threshold"), lambda x: 0 < x <= 1, "a share in (0, 1]"),
)  # fmt: skip
"""(fields of TrainConfig, what fits, what to give instead); NaN fits nowhere."""


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How to train.

    Raises:
        UserError: values that do not fit; the message names the flag.
    """

    context_tokens: int
    """Tokens of one packed sequence; at least the longest sample."""
    global_batch_packs: int
    """Packed sequences per optimizer step, over all processes."""
    micro_batch_packs: int
    """Packed sequences per forward pass of one process."""
    lr: float
    """Peak learning rate."""
    steps: int = 0
    """Optimizer steps; 0 takes `epochs`."""
    epochs: float = 1.0
    """Passes over the packed training samples, if `steps` is 0."""
    lr_warmup_steps: int = 0
    """Steps over which the rate rises linearly from 0."""
    min_lr_ratio: float = 0.1
    """The cosine ends at this share of the peak."""
    weight_decay: float = 0.0
    """AdamW weight decay; none on norms, biases, A_log, D and dt_bias."""
    beta1: float = 0.9
    """AdamW beta1."""
    beta2: float = 0.95
    """AdamW beta2."""
    eps: float = 1e-8
    """AdamW epsilon."""
    clip_norm: float = 1.0
    """Gradients are clipped to this global norm; 0 leaves them."""
    precision: Precision = "fp32"
    """bf16 computes matrix products in bfloat16; weights and optimizer stay fp32."""
    zero_stage: int = 0
    """DeepSpeed ZeRO stage, 0 to 3."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    checkpoint_every: int = 0
    """Steps between checkpoints for resuming; 0 writes none."""
    keep_checkpoints: int = 2
    """Newest checkpoints that stay on disk while the run goes on."""
    log_every: int = 1
    """Steps between lines of metrics.jsonl."""
    eval_every: int = 0
    """Steps between evaluations; 0 evaluates at the end only."""
    eval_packs: int = 16
    """Most held-out packed sequences for the held-out loss; 0 turns it off."""
    eval_calls: int = 0
    """Held-out chats on which call accuracy is measured at each evaluation; 0 turns it off."""
    eval_new_tokens: int = 160
    """Longest answer generated for call accuracy."""
    early_stop: int = 0
    """Stop after this many evaluations without a lower held-out loss, and keep the weights of
    the lowest; 0 never stops early and keeps the last weights."""
    curriculum: Curriculum = "fixed"
    """Pool sizes over time: all at once, a ramp over steps, or raised on measured accuracy."""
    ramp_share: float = 0.5
    """Ramp: share of the steps after which the largest pools are reached."""
    gate_threshold: float = 0.7
    """Gated: right-tool accuracy at the current k that raises k."""
    start_pool_size: int = 1
    """Ramp and gated: first k."""
    seed: int = 0
    """Fixes the order of the samples."""

    def __post_init__(self) -> None:
        for names, fits, wanted in _RANGES:
            for name in names:
                if not fits(getattr(self, name)):
                    raise UserError(f"{flag(name)} {getattr(self, name)}: give {wanted}")
        if self.steps == 0 and self.epochs == 0:
            raise UserError("--train.steps or --train.epochs: give a positive number")
        if self.global_batch_packs % self.micro_batch_packs:
            raise UserError(
                f"--train.micro-batch-packs {self.micro_batch_packs} does not divide "
                f"--train.global-batch-packs {self.global_batch_packs}"
            )
        if not 0 <= self.zero_stage <= 3:
            raise UserError(f"--train.zero-stage {self.zero_stage}: choose 0, 1, 2 or 3")
        if self.curriculum == "gated" and not (self.eval_every and self.eval_calls):
            raise UserError(
                "--train.curriculum gated raises k on measured call accuracy: give "
                "--train.eval-every and --train.eval-calls too"
            )
        if self.early_stop and not self.eval_every:
            raise UserError("--train.early-stop counts evaluations: give --train.eval-every too")
        if self.early_stop and not self.eval_packs:
            raise UserError("--train.early-stop needs a held-out loss: give --train.eval-packs too")


def flag(name: str) -> str:
    """Return the command-line flag of a TrainConfig field."""
    return "--train." + name.replace("_", "-")


def family(recipe: str) -> str:
    """Return the model family that a recipe is for: its name begins with it."""
    return recipe.partition("_")[0]


RECIPES: Recipes[TrainConfig] = Recipes("sft")


def _h100(lr: float) -> TrainConfig:
    return TrainConfig(
        context_tokens=16_384,
        global_batch_packs=32,
        micro_batch_packs=1,
        lr=lr,
        epochs=2.0,
        lr_warmup_steps=100,
        min_lr_ratio=0.1,
        weight_decay=0.1,
        precision="bf16",
        zero_stage=1,
        gradient_checkpointing=True,
        checkpoint_every=250,
        log_every=5,
        eval_every=250,
        eval_packs=64,
        eval_calls=64,
    )


@RECIPES.register
def mamba2_1p5b_8xh100() -> TrainConfig:
    """The paper's Mamba-2 on 8 H100: 512K tokens a step, two epochs, bf16, ZeRO-1."""
    return _h100(lr=2e-5)


@RECIPES.register
def llama_2b_8xh100() -> TrainConfig:
    """The paper's Transformer on 8 H100: the same data, batch and schedule."""
    return _h100(lr=2e-5)


def _debug(lr: float) -> TrainConfig:
    return TrainConfig(
        context_tokens=2048,
        global_batch_packs=2,
        micro_batch_packs=1,
        lr=lr,
        steps=80,
        lr_warmup_steps=5,
        min_lr_ratio=0.05,
        weight_decay=0.01,
        eval_packs=4,
        curriculum="ramp",
        start_pool_size=1,
        ramp_share=0.7,
    )


@RECIPES.register
def mamba2_debug_cpu() -> TrainConfig:
    """The demo's Mamba-2 (about 5M parameters): under a minute on 2 cores."""
    return _debug(lr=2e-3)


@RECIPES.register
def llama_debug_cpu() -> TrainConfig:
    """The demo's Llama (about 5M parameters): the same tokens as the Mamba-2."""
    return _debug(lr=2e-3)
