"""Everything a pretraining run is made of, as dataclasses; importing this costs nothing.

Units are in the names: sequences or tokens, global unless a name says otherwise.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from gatewright.errors import UserError
from gatewright.models import ModelConfig

MAX_SAMPLES = 2**31 - 1
"""Most sequences of one run; the index of more would not fit into memory."""


def _refuse_outside(config: Any, flags: str, bounds: Mapping[str, tuple[str, bool]]) -> None:
    """Refuse the first field whose value does not hold; NaN never does.

    Args:
        flags: what stands before the fields in their flags, `--train.`.
        bounds: field -> what it must be, in words, and whether it is.
    """
    for name, (words, holds) in bounds.items():
        if not holds:
            flag = flags + name.replace("_", "-")
            raise UserError(f"{flag} {getattr(config, name)}: must be {words}")


@dataclasses.dataclass(frozen=True)
class ParallelConfig:
    """How one model is spread over processes; what is left over is data parallel.

    Optimizer state is always sharded over data parallel processes (ZeRO 1).
    """

    tensor: int = 1
    """Tensor parallel size: heads, channels and vocabulary rows are split over it."""
    pipeline: int = 1
    """Pipeline parallel size: layers are split over it."""
    context: int = 1
    """Context parallel size: the tokens of a sequence are split over it."""
    sequence: bool = False
    """Sequence parallelism: activations between tensor-parallel parts are split by tokens."""
    overlap: bool = False
    """Overlap gradient reduction and parameter gathering with computation."""

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "context"):
            if getattr(self, name) < 1:
                raise UserError(f"--parallel.{name} {getattr(self, name)}: must be at least 1")
        if self.sequence and self.tensor == 1:
            raise UserError("--parallel.sequence: needs --parallel.tensor of at least 2")

    @property
    def model_size(self) -> int:
        """Processes that hold one copy of the model."""
        return self.tensor * self.pipeline * self.context

    def data(self, world_size: int) -> int:
        """Return the data parallel size of `world_size` processes.

        Raises:
            UserError: the processes do not divide evenly into copies of the model.
        """
        if world_size % self.model_size:
            raise UserError(
                f"{world_size} processes cannot hold copies of a model spread over "
                f"{self.model_size} (--parallel.tensor {self.tensor} x --parallel.pipeline "
                f"{self.pipeline} x --parallel.context {self.context})"
            )
        return world_size // self.model_size

    def check(self, model: ModelConfig, seq_len_tokens: int) -> None:
        """Refuse a layout that cannot hold `model`, and say why.

        Raises:
            UserError: heads, groups, vocabulary, layers or tokens do not divide.
        """
        t, p, c = self.tensor, self.pipeline, self.context
        divides = [("model.vocab_size", model.vocab_size, "--parallel.tensor", t)]
        divides.append(("model.n_layers", model.n_layers, "--parallel.pipeline", p))
        if model.family == "mamba2":
            divides.append(("model.ngroups", model.ngroups, "--parallel.tensor", t))
            divides.append(
                ("the number of SSM heads", model.n_ssm_heads, "tensor * context", t * c)
            )
        else:
            divides.append(("model.n_heads", model.n_heads, "--parallel.tensor", t))
            divides.append(("model.n_kv_heads", model.n_kv_heads, "--parallel.tensor", t))
            divides.append(("model.ffn_dim", model.ffn_dim, "--parallel.tensor", t))
        if c > 1:
            divides.append(("train.seq_len_tokens", seq_len_tokens, "2 * context", 2 * c))
        if self.sequence:
            divides.append(("train.seq_len_tokens", seq_len_tokens, "tensor * context", t * c))
        for what, value, flag, by in divides:
            if value % by:
                fits = f" (the next that is: {-(-value // by) * by})" if "vocab" in what else ""
                raise UserError(f"{what} {value} is not a multiple of {flag} {by}{fits}")
        if model.family == "mamba2" and c > 1:
            groups = model.ngroups // t  # per tensor-parallel process
            if max(groups, c) % min(groups, c):
                raise UserError(
                    f"model.ngroups {model.ngroups}: its {groups} groups per tensor-parallel "
                    f"process and --parallel.context {c} do not divide one another"
                )


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Optimisation: AdamW, linear warm-up, cosine decay, clipping."""

    steps: int
    """Optimizer steps of the whole run."""
    seq_len_tokens: int
    """Tokens per training sequence."""
    global_batch_sequences: int
    """Sequences per optimizer step, over all processes."""
    micro_batch_sequences: int = 1
    """Sequences per process in one forward pass; the rest is accumulated."""
    lr: float = 3e-4
    """Peak learning rate."""
    min_lr: float = 3e-5
    """Learning rate at the end of the cosine."""
    lr_warmup_steps: int = 2000
    """Steps of linear warm-up."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; A_log, D, dt_bias, norms and biases have none."""
    adam_beta1: float = 0.9
    """AdamW: decay of the first moment."""
    adam_beta2: float = 0.95
    """AdamW: decay of the second moment."""
    adam_eps: float = 1e-8
    """AdamW: epsilon."""
    clip_grad_norm: float = 1.0
    """Global gradient norm above which gradients are scaled down."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Precision of weights and activations; master weights are fp32 either way."""
    fp32_gates: bool = True
    """Keep A_log, D and dt_bias in fp32 in a bf16 model (bf16 rounds a decay rate by 0.8%)."""
    init_std: float = 0.02
    """Standard deviation of initial weights."""
    seed: int = 1234
    """Seed of initialisation and of the order of data."""
    reset_at_documents: bool = False
    """Let neither attention nor SSM state cross a document boundary."""
    recompute: Literal["none", "full"] = "none"
    """Recompute each layer's activations in the backward pass instead of keeping them."""
    on_bad_loss: Literal["stop", "skip"] = "stop"
    """What to do when a loss or gradient norm is not finite."""
    spike_factor: float = 0.0
    """Also report losses above this multiple of the running mean; 0 turns it off."""

    def __post_init__(self) -> None:
        counts = ("steps", "seq_len_tokens", "global_batch_sequences", "micro_batch_sequences")
        inf, beta = math.inf, "at least 0 and below 1"
        _refuse_outside(
            self,
            "--train.",
            {
                **{name: ("at least 1", getattr(self, name) >= 1) for name in counts},
                "lr": ("finite and not below 0", 0 <= self.lr < inf),
                "min_lr": (f"between 0 and lr {self.lr}", 0 <= self.min_lr <= self.lr),
                "lr_warmup_steps": ("at least 0", self.lr_warmup_steps >= 0),
                "weight_decay": ("finite and not below 0", 0 <= self.weight_decay < inf),
                "adam_beta1": (beta, 0 <= self.adam_beta1 < 1),
                "adam_beta2": (beta, 0 <= self.adam_beta2 < 1),
                "adam_eps": ("finite and above 0", 0 < self.adam_eps < inf),
                "clip_grad_norm": ("above 0; inf turns it off", self.clip_grad_norm > 0),
                "init_std": ("finite and above 0", 0 < self.init_std < inf),
                "seed": ("at least 0 and below 2^31", 0 <= self.seed < 2**31),
                "spike_factor": ("finite and not below 0", 0 <= self.spike_factor < inf),
            },
        )
        if self.samples > MAX_SAMPLES:
            raise UserError(
                f"--train.steps {self.steps}: with {self.global_batch_sequences} sequences each, "
                f"that is more than the {MAX_SAMPLES} sequences of the longest run"
            )
        if self.lr_warmup_steps >= self.steps:
            raise UserError(
                f"--train.lr-warmup-steps {self.lr_warmup_steps}: must be below "
                f"--train.steps {self.steps}"
            )

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_sequences * self.seq_len_tokens

    @property
    def samples(self) -> int:
        """Sequences that the whole run consumes."""
        return self.steps * self.global_batch_sequences

    def microbatches(self, data_parallel: int) -> int:
        """Return the forward passes per step of one process.

        Raises:
            UserError: the global batch does not divide evenly.
        """
        per_pass = self.micro_batch_sequences * data_parallel
        if self.global_batch_sequences % per_pass:
            raise UserError(
                f"--train.global-batch-sequences {self.global_batch_sequences} is not a multiple "
                f"of micro batch {self.micro_batch_sequences} x data parallel {data_parallel}"
            )
        return self.global_batch_sequences // per_pass


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When to save and what to keep."""

    every_steps: int = 1000
    """Save each time this many steps are done (and at the end, and on a signal)."""
    keep_last: int = 2
    """Remove all but the newest this many checkpoints ..."""
    keep_every_steps: int = 0
    """... except those whose step is a multiple of this (0: none)."""
    asynchronous: bool = False
    """Write in a forked process while training goes on."""

    def __post_init__(self) -> None:
        _refuse_outside(
            self,
            "--checkpoint.",
            {
                "every_steps": ("at least 1", self.every_steps >= 1),
                "keep_last": ("at least 1", self.keep_last >= 1),
                "keep_every_steps": ("at least 0", self.keep_every_steps >= 0),
            },
        )


@dataclasses.dataclass(frozen=True)
class LogConfig:
    """What a run writes down, and how often."""

    every_steps: int = 10
    """Write a line of metrics every this many steps."""
    gates_every_steps: int = 500
    """Write gate statistics (Mamba-2 only) every this many steps; 0 turns it off."""
    tensorboard: bool = True
    """Also write TensorBoard events."""

    def __post_init__(self) -> None:
        _refuse_outside(
            self,
            "--log.",
            {
                "every_steps": ("at least 1", self.every_steps >= 1),
                "gates_every_steps": ("at least 0", self.gates_every_steps >= 0),
            },
        )


@dataclasses.dataclass(frozen=True)
class PretrainConfig:
    """One complete pretraining run, data and folders apart."""

    model: ModelConfig
    train: TrainConfig
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    init_gate_offset: float = 0.0
    """Added to every initial A_log (the papers' additive offset; -10 is practically no decay)."""
    exit_duration_minutes: float | None = None
    """Save and leave with code 75 after this long (Slurm time limits)."""
    vocab_follows_tokenizer: bool = False
    """Take vocab_size from the tokenizer, padded to a multiple of 128 (debug recipes)."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.init_gate_offset):
            raise UserError(f"--init-gate-offset {self.init_gate_offset}: must be finite")
        minutes = self.exit_duration_minutes
        if minutes is not None and not minutes >= 0:
            raise UserError(f"--exit-duration-minutes {minutes}: must be at least 0")
        if self.train.seq_len_tokens > self.model.max_seq_len_tokens:
            raise UserError(
                f"--train.seq-len-tokens {self.train.seq_len_tokens}: is above "
                f"--model.max-seq-len-tokens {self.model.max_seq_len_tokens}; raise that"
            )
        if self.train.reset_at_documents and self.parallel.context > 1:
            raise UserError(
                "--train.reset-at-documents: a sequence of packed documents cannot be split over "
                f"--parallel.context {self.parallel.context}; leave one of them out"
            )
        if self.init_gate_offset and self.model.family != "mamba2":
            raise UserError("--init-gate-offset: a llama has no gates to shift")

    def fit_vocab(self, tokenizer_vocab_size: int, named: str) -> PretrainConfig:
        """Return the configuration with a vocabulary that holds the tokenizer's.

        Raises:
            UserError: the recipe's embedding has fewer rows than the tokenizer has tokens.
        """
        if self.vocab_follows_tokenizer:
            padded = -(-tokenizer_vocab_size // 128) * 128
            return dataclasses.replace(self, model=self.model.with_vocab(padded))
        if tokenizer_vocab_size > self.model.vocab_size:
            raise UserError(
                f"{named} has {tokenizer_vocab_size} tokens, more than --model.vocab-size "
                f"{self.model.vocab_size}: raise that, or take another tokenizer"
            )
        return self
