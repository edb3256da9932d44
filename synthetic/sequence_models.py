"""The transformers models of the key-value and rules experiments: sizes, initial gates, logits.

Mamba-2 runs on the project's kernels.  Its sequences are packed end to end (`seq_idx` keeps
them apart), so padding costs nothing; the Transformer baselines take padded rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gatewright import gates
from synthetic.sequences import Batch

Family = Literal["mamba2", "gpt_neox", "llama"]


@dataclasses.dataclass(frozen=True)
class Size:
    """A model's sizes, except its vocabulary.

    Attributes:
        heads: SSM heads of a Mamba-2 layer (the width inside is heads * head_dim), or
            attention heads.
        ffn: width of the Transformers' MLP.
    """

    family: Family
    d_model: int
    layers: int
    heads: int
    head_dim: int
    d_state: int = 0
    ffn: int = 0

    def __post_init__(self) -> None:
        inner = self.heads * self.head_dim
        if self.family == "mamba2" and inner % self.d_model:
            raise ValueError(f"{inner} channels are no multiple of d_model {self.d_model}")


def config_of(size: Size, vocab: int, max_tokens: int) -> Any:
    """Return the transformers configuration; embeddings are tied, nothing is dropped out."""
    import transformers

    common: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": size.d_model,
        "num_hidden_layers": size.layers,
        "tie_word_embeddings": True,
        "use_cache": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if size.family == "mamba2":
        return transformers.Mamba2Config(
            **common,
            num_heads=size.heads,
            head_dim=size.head_dim,
            state_size=size.d_state,
            n_groups=1,
            expand=size.heads * size.head_dim // size.d_model,
            conv_kernel=4,
            chunk_size=128,
            residual_in_fp32=False,
        )
    if size.family == "gpt_neox":
        return transformers.GPTNeoXConfig(
            **common,
            num_attention_heads=size.heads,
            intermediate_size=size.ffn,
            rotary_pct=1.0,
            max_position_embeddings=max_tokens,
            attention_dropout=0.0,
            hidden_dropout=0.0,
        )
    return transformers.LlamaConfig(
        **common,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        head_dim=size.head_dim,
        intermediate_size=size.ffn,
        max_position_embeddings=max_tokens,
    )


def build(size: Size, vocab: int, max_tokens: int, *, seed: int, offset: float = 0.0) -> nn.Module:
    """Return a fresh model.

    Args:
        seed: weights and gates; the same seed draws the same ones at every offset.
        offset: added to every Mamba-2 head's A_log ~ log U(1, 16) (paper, appendix
            "Model Architecture and Initialization"); 0 for the Transformers.
    """
    import transformers

    if size.family == "mamba2":
        from gatewright import kernels

        kernels.bind_transformers()
    elif offset:
        raise ValueError(f"a {size.family} model has no gates to offset")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = config_of(size, vocab, max_tokens)
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert isinstance(model, nn.Module)
    generator = torch.Generator().manual_seed(7_654_321 + seed)
    for mixer in mixers(model):
        A_log = gates.initial_A_log(mixer.A_log.shape, offset=offset, generator=generator)
        with torch.no_grad():
            mixer.A_log.copy_(A_log)
    return model


def mixers(model: nn.Module) -> list[Any]:
    """Return the modules that own gates, in order of the layers."""
    return [m for m in model.modules() if hasattr(m, "A_log") and hasattr(m, "dt_bias")]


def parameter_count(model: nn.Module) -> int:
    """Return the number of parameters, tied ones once."""
    return sum(p.numel() for p in model.parameters())


def hidden(model: Any, batch: Batch) -> Tensor:
    """Return the last layer's output where the next token is an answer, (answers * group, d)."""
    before = batch.answer.roll(-1, dims=1)  # an answer is never a sequence's first token
    if model.config.model_type != "mamba2":
        # Padding stands on the right, where a causal mask hides it from every valid token.
        return model.base_model(input_ids=batch.tokens.where(batch.valid, 0))[0][before]
    row = torch.arange(len(batch), device=batch.tokens.device)[:, None].expand_as(batch.tokens)
    packed = batch.tokens[batch.valid][None]
    out = model.base_model(input_ids=packed, seq_idx=row[batch.valid][None].int())[0][0]
    return out[before[batch.valid]]


def answer_logits(model: Any, batch: Batch) -> Tensor:
    """Return fp32 logits of the answers' tokens, (answers * group, vocab)."""
    return model.get_output_embeddings()(hidden(model, batch)).float()


@torch.no_grad()
def right_answers(model: nn.Module, batch: Batch, rows: int) -> Tensor:
    """Return (answers,) bool: is every token of an answer the most likely one.

    The tokens before it are the right ones; greedy decoding gives the whole answer exactly
    when this is true.

    Args:
        rows: sequences per forward pass.
    """
    found = []
    for start in range(0, len(batch), rows):
        part = batch.rows(slice(start, start + rows))
        hits = answer_logits(model, part).argmax(-1) == part.targets()
        found.append(hits.view(-1, batch.group).all(1))
    return torch.cat(found)


@contextlib.contextmanager
def _recorded_dt(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collect each mixer's mean step (H,) during a forward pass, in order of the layers."""
    found: list[Tensor] = []
    handles = []
    for mixer in mixers(model):

        def keep(_: nn.Module, __: Any, out: Tensor, mixer: Any = mixer) -> None:
            raw = out[..., -mixer.num_heads :].float() + mixer.dt_bias.float()
            found.append(nn.functional.softplus(raw).flatten(0, -2).mean(0))

        handles.append(mixer.in_proj.register_forward_hook(keep))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@dataclasses.dataclass(frozen=True)
class Gates:
    """Every head's decay per token and effective length in tokens, (layers * heads,) each."""

    alpha: NDArray[np.float64]
    tau: NDArray[np.float64]


@torch.no_grad()
def gate_state(model: nn.Module, batch: Batch) -> dict[str, Gates]:
    """Return the gates with the step of a zero input (`weights`) and the measured mean (`data`)."""
    with _recorded_dt(model) as steps:
        hidden(model, batch)
    A_log = torch.cat([m.A_log.detach().float().cpu() for m in mixers(model)]).double().numpy()
    dt_bias = torch.cat([m.dt_bias.detach().float().cpu() for m in mixers(model)]).double().numpy()
    measured = torch.cat([s.cpu() for s in steps]).double().numpy()
    return {
        source: Gates(gates.alpha(A_log, dt), gates.tau_from_dt(A_log, dt))
        for source, dt in (("weights", gates.dt_from_weights(dt_bias)), ("data", measured))
    }


def drift(before: dict[str, Gates], after: dict[str, Gates]) -> dict[str, float]:
    """Return the gate drift table's row: median tau before and after, median |delta alpha|.

    `tau = -1 / log(alpha)` (paper, appendix "How representative is a static gate?"), finite also
    where alpha rounds to 1.
    """
    out: dict[str, float] = {}
    for source in ("weights", "data"):
        a, b = before[source], after[source]
        out[f"tau_initial_{source}"] = float(np.median(a.tau))
        out[f"tau_final_{source}"] = float(np.median(b.tau))
        out[f"delta_alpha_{source}"] = float(np.median(np.abs(b.alpha - a.alpha)))
    return out
