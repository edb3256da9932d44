"""What a model is, before any engine builds it: sizes, parameter counts, Hugging Face config.

One `ModelConfig` describes both families.  `gatewright.megatron` turns it into a Megatron-Core
model, `hf_config` into a transformers configuration; the counts are formulas, so a 1.5B model
costs nothing to describe.

Shape legend: D d_model, E = expand*D d_inner, H heads, P head_dim, N d_state, G ngroups,
V vocab_size, F ffn_dim, L layers.
"""

from __future__ import annotations

import dataclasses
import math
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gatewright.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

Family = Literal["mamba2", "llama"]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of a Mamba-2 or Llama language model.

    Raises:
        UserError: sizes that do not fit together; the message names the field.
    """

    family: Family
    """mamba2 or llama."""
    vocab_size: int
    """Rows of the embedding; at least the tokenizer's vocabulary."""
    d_model: int
    """Width of the residual stream."""
    n_layers: int
    """Number of blocks."""
    max_seq_len_tokens: int = 4096
    """Longest sequence seen in training (for Llama also the position limit)."""
    tie_embeddings: bool = False
    """Share input and output embeddings."""
    norm_eps: float = 1e-5
    """Epsilon of every RMSNorm."""

    expand: int = 2
    """Mamba-2 only: d_inner = expand * d_model."""
    d_state: int = 128
    """Mamba-2 only: state size N per head channel."""
    head_dim: int = 64
    """Channels per head: P in Mamba-2, the attention head size in Llama."""
    ngroups: int = 1
    """Mamba-2 only: groups that share B and C; must be a multiple of tensor parallel size."""
    d_conv: int = 4
    """Mamba-2 only: width of the causal depthwise convolution."""
    chunk_size: int = 128
    """Mamba-2 only: tokens per chunk of the SSD scan (speed, not results)."""

    n_heads: int = 0
    """Llama only: query heads."""
    n_kv_heads: int = 0
    """Llama only: key/value heads (grouped-query attention when fewer than n_heads)."""
    ffn_dim: int = 0
    """Llama only: width of the SwiGLU MLP."""
    rope_theta: float = 500_000.0
    """Llama only: base of the rotary position embedding."""

    def __post_init__(self) -> None:
        if self.family not in ("mamba2", "llama"):
            raise UserError(f"model.family is {self.family!r}: choose mamba2 or llama")
        sizes = ["vocab_size", "d_model", "n_layers", "max_seq_len_tokens", "head_dim", "norm_eps"]
        mamba = ["expand", "d_state", "d_conv", "chunk_size", "ngroups"]
        for name in sizes + (mamba if self.family == "mamba2" else ["rope_theta"]):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"model.{name} is {getattr(self, name)}: give a positive number")
        if self.family == "mamba2":
            if self.d_inner % self.head_dim:
                raise UserError(
                    f"model.head_dim {self.head_dim} does not divide d_inner "
                    f"{self.d_inner} (= expand {self.expand} * d_model {self.d_model})"
                )
            if self.n_ssm_heads % self.ngroups:
                raise UserError(
                    f"model.ngroups {self.ngroups} does not divide the {self.n_ssm_heads} heads"
                )
        else:
            if self.n_heads <= 0 or self.n_kv_heads <= 0 or self.ffn_dim <= 0:
                raise UserError("model.n_heads, model.n_kv_heads and model.ffn_dim: a llama needs")
            if self.n_heads % self.n_kv_heads:
                raise UserError(
                    f"model.n_kv_heads {self.n_kv_heads} does not divide n_heads {self.n_heads}"
                )
            if self.head_dim % 2:
                raise UserError(
                    f"model.head_dim {self.head_dim}: rotary embeddings turn pairs of channels; "
                    "give an even number"
                )

    @property
    def d_inner(self) -> int:
        """E = expand * D, the width inside a Mamba-2 mixer."""
        return self.expand * self.d_model

    @property
    def n_ssm_heads(self) -> int:
        """H = E / P, the heads (and gates) of one Mamba-2 layer."""
        return self.d_inner // self.head_dim

    def layer_parameters(self) -> int:
        """Return the parameters of one block, norms and biases included."""
        d = self.d_model
        if self.family == "mamba2":
            conv_dim = self.d_inner + 2 * self.ngroups * self.d_state  # [x | B | C]
            in_proj = d * (2 * self.d_inner + 2 * self.ngroups * self.d_state + self.n_ssm_heads)
            conv = conv_dim * (self.d_conv + 1)
            gates = 3 * self.n_ssm_heads  # A_log, D, dt_bias
            return in_proj + conv + gates + self.d_inner + self.d_inner * d + d
        q_dim, kv_dim = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        attention = d * (q_dim + 2 * kv_dim) + q_dim * d
        return attention + 3 * d * self.ffn_dim + 2 * d

    def parameters(self) -> int:
        """Return the parameters of the whole model, embeddings included."""
        embeddings = self.vocab_size * self.d_model * (1 if self.tie_embeddings else 2)
        return self.n_layers * self.layer_parameters() + embeddings + self.d_model

    def forward_flops_per_token(self, seq_len_tokens: int) -> dict[str, float]:
        """Return the multiply-add work of one token's forward pass, in FLOPs by part.

        A multiplication of (m, k) by (k, n) is 2mkn.  The embedding lookup, norms and
        pointwise functions are left out, as in every usual count of model FLOPs.

        `mixing` is what tokens do to each other.  Llama: scores and values over the
        (S + 1) / 2 tokens that a token sees on average.  Mamba-2: the state space duality
        algorithm (Dao & Gu 2024, section 6) in chunks of Q tokens: C B^T per group and its
        product with x inside a chunk, on average (Q + 1) / 2 tokens each; the chunk's state
        B^T x, and its readout C h.
        """
        d = self.d_model
        if self.family == "mamba2":
            bc_dim = self.ngroups * self.d_state
            projections = d * (2 * self.d_inner + 2 * bc_dim + self.n_ssm_heads) + self.d_inner * d
            seen = (min(self.chunk_size, seq_len_tokens) + 1) / 2
            mixing = 2 * seen * (bc_dim + self.d_inner) + 4 * self.d_state * self.d_inner
            mixing += 2 * self.d_conv * (self.d_inner + 2 * bc_dim)
        else:
            q_dim, kv_dim = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
            projections = d * (q_dim + 2 * kv_dim) + q_dim * d + 3 * d * self.ffn_dim
            mixing = 4 * q_dim * (seq_len_tokens + 1) / 2
        return {
            "projections": 2.0 * self.n_layers * projections,
            "mixing": float(self.n_layers * mixing),
            "output": 2.0 * d * self.vocab_size,
        }

    def training_flops_per_token(self, seq_len_tokens: int) -> float:
        """Return the model FLOPs of training on one token: forward, and twice that backward.

        Work that is only done again (recomputed activations) does not count.
        """
        return 3 * sum(self.forward_flops_per_token(seq_len_tokens).values())

    def with_vocab(self, vocab_size: int) -> ModelConfig:
        return dataclasses.replace(self, vocab_size=vocab_size)


def hf_config(config: ModelConfig, **token_ids: Any) -> PretrainedConfig:
    """Return the transformers configuration of the same model.

    Args:
        token_ids: `bos_token_id`, `eos_token_id`, `pad_token_id` of the tokenizer in use.
    """
    if config.family == "mamba2":
        from transformers import Mamba2Config

        return Mamba2Config(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            num_hidden_layers=config.n_layers,
            num_heads=config.n_ssm_heads,
            head_dim=config.head_dim,
            state_size=config.d_state,
            n_groups=config.ngroups,
            expand=config.expand,
            conv_kernel=config.d_conv,
            chunk_size=config.chunk_size,
            layer_norm_epsilon=config.norm_eps,
            tie_word_embeddings=config.tie_embeddings,
            use_bias=False,
            use_conv_bias=True,
            rms_norm=True,
            residual_in_fp32=False,
            **token_ids,
        )
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.d_model,
        num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_heads,
        num_key_value_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.ffn_dim,
        max_position_embeddings=config.max_seq_len_tokens,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tie_embeddings,
        attention_bias=False,
        mlp_bias=False,
        **token_ids,
    )


def from_hf_config(hf: PretrainedConfig, source: str) -> ModelConfig:
    """Return the ModelConfig of a transformers Mamba2 or Llama configuration.

    Raises:
        UserError: any other architecture, or a feature that the pretraining engine's models
            do not have; `source` (a path) is named in the message.
    """
    if hf.model_type in ("mamba2", "llama") and hf.hidden_act not in ("silu", "swish"):
        raise UserError(
            f"{source}: hidden_act is {hf.hidden_act!r}; only models with silu can be converted"
        )
    if hf.model_type == "mamba2":
        if hf.use_bias or not hf.use_conv_bias or not getattr(hf, "rms_norm", True):
            raise UserError(
                f"{source}: use_bias/use_conv_bias/rms_norm differ from plain Mamba-2; "
                "only use_bias=false, use_conv_bias=true, rms_norm=true can be converted"
            )
        limit = getattr(hf, "time_step_limit", (0.0, float("inf")))
        if len(limit) != 2:
            raise UserError(f"{source}: time_step_limit {limit!r} is not a pair of numbers")
        low, high = limit
        if low > 0 or high < float("inf"):
            raise UserError(
                f"{source}: time_step_limit [{low}, {high}] bounds dt, which the other formats "
                "cannot say; only [0, inf] can be converted"
            )
        return ModelConfig(
            family="mamba2",
            vocab_size=hf.vocab_size,
            d_model=hf.hidden_size,
            n_layers=hf.num_hidden_layers,
            tie_embeddings=hf.tie_word_embeddings,
            norm_eps=hf.layer_norm_epsilon,
            expand=int(hf.expand),
            d_state=hf.state_size,
            head_dim=hf.head_dim,
            ngroups=hf.n_groups,
            d_conv=hf.conv_kernel,
            chunk_size=hf.chunk_size,
        )
    if hf.model_type == "llama":
        rope = getattr(hf, "rope_parameters", None) or {}
        if rope.get("rope_type", "default") != "default" or hf.attention_bias or hf.mlp_bias:
            raise UserError(f"{source}: scaled RoPE or biased projections cannot be converted yet")
        return ModelConfig(
            family="llama",
            vocab_size=hf.vocab_size,
            d_model=hf.hidden_size,
            n_layers=hf.num_hidden_layers,
            max_seq_len_tokens=hf.max_position_embeddings,
            tie_embeddings=hf.tie_word_embeddings,
            norm_eps=hf.rms_norm_eps,
            head_dim=hf.head_dim or hf.hidden_size // hf.num_attention_heads,
            n_heads=hf.num_attention_heads,
            n_kv_heads=hf.num_key_value_heads,
            ffn_dim=hf.intermediate_size,
            rope_theta=float(rope.get("rope_theta", 10_000.0)),
        )
    raise UserError(f"{source}: model_type {hf.model_type!r} is neither mamba2 nor llama")


def load_hf_model(
    model_class: Any, folder: Path, *, named: str | None = None, **kwargs: Any
) -> PreTrainedModel:
    """Return the model of a Hugging Face folder, every weight of it read from there.

    transformers itself fills what a file lacks with random numbers and only prints so.

    Args:
        model_class: a model class of transformers, or AutoModelForCausalLM.
        folder: the model's folder.
        named: how errors call it; `--model FOLDER` unless given.
        kwargs: for `from_pretrained`.

    Raises:
        UserError: transformers cannot read the folder, its weights lack a tensor, or one has
            another shape than config.json says.
    """
    from safetensors import SafetensorError

    named = named or f"--model {folder}"
    try:
        model, found = model_class.from_pretrained(
            str(folder),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are told below, with their names
            **kwargs,
        )
    except SafetensorError as e:
        raise UserError(
            f"{named}: its weights are damaged ({e}); copy or make the folder again"
        ) from e
    except (OSError, ValueError, KeyError) as e:
        raise UserError(f"{named}: transformers cannot load it ({e})") from e
    except (EOFError, RuntimeError, AttributeError, pickle.UnpicklingError) as e:
        pickled = sorted(folder.glob("*.bin"))
        if not pickled:
            raise
        raise UserError(
            f"{named}: {pickled[0].name} holds no plain dictionary of tensors; copy the folder "
            "again, or save the model as safetensors"
        ) from e
    if found["mismatched_keys"]:
        name, stored, wanted = min(found["mismatched_keys"])  # a set: its order is chance
        raise UserError(
            f"{named}: its weights hold {name} of shape {list(stored)}, and its "
            f"config.json asks for {list(wanted)}; copy or make the folder again"
        )
    missing = set(found["missing_keys"]) - set(model.all_tied_weights_keys)
    if missing:
        raise UserError(
            f"{named}: its weights lack {len(missing)} of the tensors that its "
            f"config.json asks for, {min(missing)} among them; copy or make the folder again"
        )
    loaded: PreTrainedModel = model
    return loaded
