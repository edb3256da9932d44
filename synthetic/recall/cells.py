"""The cells, each a function of normalised inputs, all with 1,024 elements of state.

Every recurrent cell exists with and without the width-4 causal depthwise convolution ("armed")
on its interaction projections; SiLU follows either way, as in Mamba-2.  The convolution adds no
recurrent state beyond the last three tokens' projections, which the paper does not count.
Attention, the control, has neither: it is plain softmax attention.

RWKV-7's rank-one term is the summary's equation 3, `S (diag(w) - (a kappa) kappa^T)`: it reads
with a kappa and writes along kappa.  The published RWKV-7 code has the transpose (it reads with
kappa and writes along a kappa) and scales k by a as replacement key, which is left out here.

| cell | transition | state |
|---|---|---|
| `deltanet` | I - beta k k^T | 32 x 32 |
| `gated_deltanet` | diag(alpha) (I - beta k k^T), alpha by key channel (as coded) | 32 x 32 |
| `gated_deltanet_scalar` | the same with one alpha (equation 2 of the summary) | 32 x 32 |
| `rwkv7` | diag(w) - (a kappa) kappa^T (equation 3), output gate | 32 x 32 |
| `rwkv7_diagonal` | diag(w): the rank-one term set to zero | 32 x 32 |
| `mamba2` | one decay a head, 8 heads of 8, d_state 16 | 64 x 16 |
| `attention` | softmax over all tokens: the control, no fixed state | none |
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad, silu, softplus

from gatewright.rank_one_scan import MIN_LOG_DECAY, recurrence, scan
from synthetic import ensemble
from synthetic.ensemble import Parameters
from synthetic.recall.fused import at

Name = Literal[
    "deltanet",
    "gated_deltanet",
    "gated_deltanet_scalar",
    "rwkv7",
    "rwkv7_diagonal",
    "mamba2",
    "attention",
]
NAMES: tuple[str, ...] = get_args(Name)
CONV_WIDTH = 4
MAMBA_HEAD_DIM, MAMBA_STATE = 8, 16


@dataclasses.dataclass(frozen=True)
class Cell:
    """One cell's choice and width.

    Attributes:
        width: d, the model dimension; delta-rule cells have one head of d x d state.
        conv: armed with the short convolution.
        heads: attention heads.
        fast: use the fast forms (C++ or chunked); otherwise the token-by-token recurrence.
    """

    name: Name
    width: int = 32
    conv: bool = True
    heads: int = 2
    fast: bool = True

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ValueError(f"no cell {self.name!r}; cells: {', '.join(NAMES)}")
        if self.name == "attention" and (self.conv or self.width % self.heads):
            raise ValueError(
                "attention is the unarmed control: give --no-conv, and a width its heads divide"
            )
        if self.name == "mamba2" and self.inner % MAMBA_HEAD_DIM:
            raise ValueError(
                f"--width {self.width}: mamba2 has heads of {MAMBA_HEAD_DIM} in twice the width; "
                "give a multiple of 4"
            )

    @property
    def inner(self) -> int:
        """d_inner of Mamba-2: twice the width, in heads of 8."""
        return 2 * self.width

    @property
    def mamba_heads(self) -> int:
        return self.inner // MAMBA_HEAD_DIM

    @property
    def state_elements(self) -> int:
        """Elements of recurrent state per direction."""
        if self.name == "attention":
            return 0
        return self.inner * MAMBA_STATE if self.name == "mamba2" else self.width**2


def initial(cell: Cell, members: list[torch.Generator]) -> Parameters:
    """Return a cell's fresh parameters (one direction of one layer)."""
    d, size = cell.width, len(members)

    def matrix(rows: int, columns: int = d) -> Tensor:
        return ensemble.uniform(members, columns**-0.5, rows, columns)

    def filled(value: float, *shape: int) -> Tensor:
        return torch.full((size, *shape), value)

    if cell.name == "mamba2":
        heads = cell.mamba_heads
        mixed = cell.inner + 2 * MAMBA_STATE
        p = {
            "in_proj": matrix(mixed + cell.inner + heads),  # [x | B | C | z | dt]
            "A_log": filled(0.0, heads),
            "dt_bias": filled(0.0, heads),
            "skip": filled(1.0, heads),
            "out_proj": matrix(d, cell.inner),
        }
    else:
        mixed = 3 * d
        p = {"qkv": matrix(3 * d), "out_proj": matrix(d)}
    if cell.name in ("deltanet", "gated_deltanet", "gated_deltanet_scalar"):
        p |= {"beta": matrix(1), "beta_bias": filled(0.0, 1)}
    if cell.name in ("gated_deltanet", "gated_deltanet_scalar"):
        axis = d if cell.name == "gated_deltanet" else 1
        p |= {"gate": matrix(axis), "gate_bias": filled(4.0, axis)}  # alpha starts near 0.98
    if cell.name in ("rwkv7", "rwkv7_diagonal"):
        p |= {"decay": matrix(d), "decay_bias": filled(-3.0, d), "out_gate": matrix(d)}
    if cell.name == "rwkv7":
        p |= {"rate": matrix(d), "rate_bias": filled(0.0, d), "removal": filled(1.0, d)}
    if cell.conv:
        p |= {
            "conv": ensemble.uniform(members, CONV_WIDTH**-0.5, mixed, CONV_WIDTH),
            "conv_bias": filled(0.0, mixed),
        }
    return p


def _short_conv(x: Tensor, p: Parameters) -> Tensor:
    """Apply the causal depthwise convolution if the cell has one, then SiLU: x (E, B, L, C)."""
    if "conv" in p:
        length, wide = x.shape[2], pad(x, (0, 0, CONV_WIDTH - 1, 0))
        taps = p["conv"][:, None, None]
        y = p["conv_bias"][:, None, None]
        for i in range(CONV_WIDTH):
            y = torch.addcmul(y, wide[:, :, i : i + length], taps[..., i])
        x = y
    return silu(x)


def forward(
    cell: Cell, p: Parameters, x: Tensor, *, causal: bool, read: Tensor | None = None
) -> Tensor:
    """Return the cell's output (E, B, L, d) for inputs x (E, B, L, d).

    Args:
        causal: only attention needs to be told; recurrences are causal by construction.
        read: (E, B, Q) tokens whose outputs are wanted: the result is then (E, B, Q, d).
    """
    if cell.name == "mamba2":
        return _mamba2(cell, p, x, read)
    qkv = ensemble.linear(x, p["qkv"])
    if cell.name == "attention":
        q, k, v = qkv.chunk(3, dim=-1)
        if read is not None and not causal:
            q, read = at(q, read), None
        o = _attend(q, k, v, cell.heads, causal)
        return ensemble.linear(at(o, read), p["out_proj"])
    q, k, v = _short_conv(qkv, p).chunk(3, dim=-1)
    q, k = normalize(q, dim=-1), normalize(k, dim=-1)
    a = b = None
    if cell.name in ("rwkv7", "rwkv7_diagonal"):
        # RWKV-7's bound: w = exp(-e^-0.5 sigmoid(.)) lies in (0.545, 1).
        raw = ensemble.linear(x, p["decay"], p["decay_bias"])
        log_w = -math.exp(-0.5) * torch.sigmoid(raw)
        if cell.name == "rwkv7":
            b = normalize(k * p["removal"][:, None, None], dim=-1)
            a = torch.sigmoid(ensemble.linear(x, p["rate"], p["rate_bias"])) * b
    else:
        beta = torch.sigmoid(ensemble.linear(x, p["beta"], p["beta_bias"]))
        log_w = torch.zeros_like(beta)
        if cell.name != "deltanet":
            raw = ensemble.linear(x, p["gate"], p["gate_bias"])
            log_w = torch.nn.functional.logsigmoid(raw).clamp_min(MIN_LOG_DECAY)
        a, b, v = beta * k * log_w.exp(), k, beta * v
    form = scan if cell.fast else recurrence
    flat = [None if t is None else t.flatten(0, 1) for t in (q, k, v, log_w, a, b)]
    o = at(form(*flat).view(v.shape), read)  # type: ignore[arg-type]
    if "out_gate" in p:
        o = o * silu(ensemble.linear(at(x, read), p["out_gate"]))
    return ensemble.linear(o, p["out_proj"])


def _mamba2(cell: Cell, p: Parameters, x: Tensor, read: Tensor | None) -> Tensor:
    """Mamba-2 without norms: `H = exp(-dt e^A_log) H + dt x B^T`, `y = (H C + D x) SiLU(z)`."""
    inner, heads = cell.inner, cell.mamba_heads
    # in_proj: [x | B | C | z | dt]
    mixed, z, dt = ensemble.linear(x, p["in_proj"]).split(
        [inner + 2 * MAMBA_STATE, inner, heads], dim=-1
    )
    xs, b, c = _short_conv(mixed, p).split([inner, MAMBA_STATE, MAMBA_STATE], dim=-1)
    dt = softplus(dt + p["dt_bias"][:, None, None])
    log_w = (-dt * p["A_log"].exp()[:, None, None]).clamp_min(MIN_LOG_DECAY)

    def by_head(t: Tensor) -> Tensor:  # (E, B, L, H, n) -> (E B H, L, n)
        return t.transpose(2, 3).flatten(0, 2)

    members, sequences, length = x.shape[:3]
    values = xs.unflatten(-1, (heads, MAMBA_HEAD_DIM))
    shared = (members, sequences, length, heads, MAMBA_STATE)
    form = scan if cell.fast else recurrence
    y = form(
        by_head(c[..., None, :].expand(shared)),
        by_head(b[..., None, :].expand(shared)),
        by_head(values * dt[..., None]),
        by_head(log_w[..., None]),
    )
    y = y.view(members, sequences, heads, length, MAMBA_HEAD_DIM).transpose(2, 3)
    y = (y + p["skip"][:, None, None, :, None] * values).flatten(3)
    return ensemble.linear(at(y * silu(z), read), p["out_proj"])


def _attend(q: Tensor, k: Tensor, v: Tensor, heads: int, causal: bool) -> Tensor:
    def split(t: Tensor) -> Tensor:
        return t.unflatten(-1, (heads, -1)).transpose(2, 3).flatten(0, 1)

    o = torch.nn.functional.scaled_dot_product_attention(
        split(q), split(k), split(v), is_causal=causal
    )
    return o.unflatten(0, q.shape[:2]).transpose(2, 3).flatten(3)
