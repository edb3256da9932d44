"""What a pretraining run will take, from its configuration alone: memory, time, disk.

The formulas hold for the layers as they run on GPUs (fused norms and kernels, bf16);
`tests/gatewright/megatron/test_plan.py` compares them with what small models really keep.

Shape legend: T tokens of one microbatch on one process; D, E, H, N, G, V, F as in
`gatewright.models`.
"""

from __future__ import annotations

import dataclasses

from gatewright.errors import UserError
from gatewright.megatron.config import ParallelConfig, PretrainConfig
from gatewright.models import ModelConfig

PEAK_TFLOPS = {"h100": 989.4, "h200": 989.4, "a100": 312.0}
"""Dense bf16 peak of a GPU (NVIDIA's data sheets)."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes that one process needs, by part, at its fullest pipeline stage."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits


def local_parameters(model: ModelConfig, parallel: ParallelConfig, stage: int) -> float:
    """Return the parameters that one process of a pipeline stage holds.

    Norms over the residual stream are repeated on every tensor-parallel process; everything
    else is split.
    """
    t, p = parallel.tensor, parallel.pipeline
    repeated = model.d_model * (1 if model.family == "mamba2" else 2)
    layer = repeated + (model.layer_parameters() - repeated) / t
    total = model.n_layers / p * layer
    embedding = model.vocab_size * model.d_model / t
    if stage == 0:
        total += embedding
    if stage == p - 1:
        total += model.d_model  # final norm
        if not model.tie_embeddings or p > 1:
            total += embedding
    return total


def layer_activation_elements(model: ModelConfig, parallel: ParallelConfig) -> float:
    """Return the values per token that one layer keeps for its backward pass.

    Mamba-2: the norm's input and output (D each), [z|x|B|C|dt], the scan's output before
    gating, its gated copy, and the norm's output (E each).  Llama: two norms' inputs and
    outputs, [q|k|v] (v is a view of it), q and k after rotation, attention's output, both
    halves of the MLP's first projection and their product.
    """
    t = parallel.tensor
    residual = 1 / t if parallel.sequence else 1.0  # values of width D
    d = model.d_model
    if model.family == "mamba2":
        zxBCdt = 2 * model.d_inner + 2 * model.ngroups * model.d_state + model.n_ssm_heads
        return 2 * d * residual + (zxBCdt + 3 * model.d_inner) / t
    q_dim, kv_dim = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    return 4 * d * residual + (3 * q_dim + 3 * kv_dim + 3 * model.ffn_dim) / t


def memory(config: PretrainConfig, processes: int) -> Memory:
    """Return what the fullest process needs.

    Raises:
        UserError: a layout that cannot hold the model.
    """
    model, train, parallel = config.model, config.train, config.parallel
    parallel.check(model, train.seq_len_tokens)
    data = parallel.data(processes)
    train.microbatches(data)
    size = 2 if train.dtype == "bf16" else 4
    tokens = train.micro_batch_sequences * train.seq_len_tokens / parallel.context
    layers = model.n_layers / parallel.pipeline
    kept = layer_activation_elements(model, parallel)
    residual = model.d_model / parallel.tensor if parallel.sequence else model.d_model
    stages = []
    for stage in range(parallel.pipeline):
        parameters = local_parameters(model, parallel, stage)
        in_flight = parallel.pipeline - stage  # microbatches under way in 1F1B
        if train.recompute == "full":  # a layer's input each, and one layer while it is redone
            elements = layers * residual * in_flight + kept
        else:
            elements = layers * kept * in_flight
        last = stage == parallel.pipeline - 1
        # fp32 softmax beside logits in the model's precision
        logits = tokens * model.vocab_size / parallel.tensor * (4 + size) if last else 0.0
        stages.append(
            Memory(
                weights=parameters * size,
                gradients=parameters * 4,
                optimizer=parameters * 12 / (data * parallel.context),
                activations=tokens * elements * size,
                logits=logits,
            )
        )
    return max(stages, key=lambda m: m.total)


def checkpoint_bytes(config: PretrainConfig) -> float:
    """Return a checkpoint's size: weights, fp32 master weights and two moments."""
    size = 2 if config.train.dtype == "bf16" else 4
    return config.model.parameters() * (size + 12.0)


def hours(config: PretrainConfig, gpus: int, peak_tflops: float, mfu: float) -> float:
    """Return the wall-clock hours of the whole run at a model FLOPs utilisation.

    Raises:
        UserError: `mfu` is not between 0 and 1.
    """
    if not 0 < mfu <= 1:
        raise UserError(f"--mfu {mfu}: must lie between 0 and 1")
    tokens = config.train.steps * config.train.tokens_per_step
    flops = tokens * config.model.training_flops_per_token(config.train.seq_len_tokens)
    return flops / (gpus * peak_tflops * 1e12 * mfu) / 3600
