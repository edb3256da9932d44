"""A full Mamba-1 layer, many members at once: what the linear model leaves out is here.

    u = RMSNorm(e);  [x | z] = P_in u;  x = SiLU(conv4(x));  [dt | B | C] = P_x x
    dt = softplus(P_dt dt + bias);  h_t = exp(dt A) h_{t-1} + dt x_t B_t^T
    y = h C + D x;  out = e + P_out (y * SiLU(z));  logits = E RMSNorm(out)

A is diagonal per channel and slot, `A_log = log(1..N)`.  The scan is the plain recurrence
over time, vectorised over members, sequences, channels and slots: at recall sizes (N <= 32,
L <= 64) it is as fast on a CPU as an associative scan and half the memory.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import torch
from torch import Tensor
from torch.nn.functional import pad, silu, softplus

from synthetic import ensemble
from synthetic.capacity import training
from synthetic.capacity.linear_mamba import EXPAND
from synthetic.capacity.tasks import Batch, Task
from synthetic.ensemble import Parameters

CONV_WIDTH = 4
OPTIMIZER = ensemble.AdamW(
    lr=0.003, betas=(0.9, 0.95), clip_norm=0.75, no_decay=("A_log", "skip", "dt_bias")
)


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes shared by the members of a run."""

    vocab: int
    d: int
    n: int

    @property
    def dt_rank(self) -> int:
        return max(1, math.ceil(self.d / 16))


def initial(size: Size, seeds: list[int]) -> Parameters:
    """Return fresh parameters with Mamba's own initial A and dt (dt in [1e-3, 1e-1])."""
    g = ensemble.generators(seeds, stream=0)
    inner, rank, members = EXPAND * size.d, size.dt_rank, len(seeds)
    dt = torch.exp(
        (ensemble.uniform(g, 0.5, inner) + 0.5) * (math.log(0.1) - math.log(1e-3)) + math.log(1e-3)
    )
    slots = torch.arange(1, size.n + 1, dtype=torch.float32).log()
    return {
        "embedding": ensemble.normal(g, size.d**-0.5, size.vocab, size.d),
        "norm": torch.ones(members, size.d),
        "in_proj": ensemble.uniform(g, size.d**-0.5, 2 * inner, size.d),
        "conv": ensemble.uniform(g, CONV_WIDTH**-0.5, inner, CONV_WIDTH),
        "conv_bias": torch.zeros(members, inner),
        "x_proj": ensemble.uniform(g, inner**-0.5, rank + 2 * size.n, inner),
        "dt_proj": ensemble.uniform(g, rank**-0.5, inner, rank),
        "dt_bias": dt + torch.log(-torch.expm1(-dt)),  # softplus of it is dt
        "A_log": slots.repeat(members, inner, 1),
        "skip": torch.ones(members, inner),
        "out_proj": ensemble.uniform(g, inner**-0.5, size.d, inner),
        "norm_out": torch.ones(members, size.d),
    }


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight[:, None, None]


def selective_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return y (E, B, L, I) of `h_t = exp(dt a) h + dt x b^T`, `y = h c`, from h = 0.

    x, dt (E, B, L, I); a (E, I, N) negative; b, c (E, B, L, N).
    """
    decay = torch.exp(dt[..., None] * a[:, None, None])  # (E, B, L, I, N)
    write = (dt * x)[..., None] * b[..., None, :]
    h = torch.zeros_like(write[:, :, 0])
    out = []
    for decay_t, write_t, c_t in zip(decay.unbind(2), write.unbind(2), c.unbind(2), strict=True):
        h = decay_t * h + write_t
        out.append((h @ c_t[..., None])[..., 0])
    return torch.stack(out, dim=2)


def readout(size: Size, p: Parameters, batch: Batch) -> Tensor:
    """Return the normalised stream at the queries (E, B, Q, D)."""
    e = ensemble.embedding(p["embedding"], batch.tokens)
    x, z = ensemble.linear(_rms_norm(e, p["norm"]), p["in_proj"]).chunk(2, dim=-1)
    length = x.shape[2]
    wide = pad(x, (0, 0, CONV_WIDTH - 1, 0))
    taps = p["conv"][:, None, None]
    x = sum(wide[:, :, k : k + length] * taps[..., k] for k in range(CONV_WIDTH))
    x = silu(x + p["conv_bias"][:, None, None])
    # x_proj: [dt | B | C]
    dt, b, c = ensemble.linear(x, p["x_proj"]).split([size.dt_rank, size.n, size.n], dim=-1)
    dt = softplus(ensemble.linear(dt, p["dt_proj"]) + p["dt_bias"][:, None, None])
    y = selective_scan(x, dt, -p["A_log"].exp(), b, c) + p["skip"][:, None, None] * x
    out = e + ensemble.linear(y * silu(z), p["out_proj"])
    out = out.gather(2, batch.positions[..., None].expand(-1, -1, -1, size.d))
    return _rms_norm(out, p["norm_out"])


def train(size: Size, seeds: list[int], task: Task, steps: int, desc: str) -> Parameters:
    """Train one member per seed (the paper: 20,000 steps) and return their parameters."""
    read = functools.partial(readout, size)
    return training.train(initial(size, seeds), read, seeds, task, steps, OPTIMIZER, desc)


def accuracy(p: Parameters, size: Size, task: Task, sequences: int) -> list[float]:
    """Return each member's accuracy over the same fresh sequences."""
    return training.accuracy(p, functools.partial(readout, size), task, sequences)
