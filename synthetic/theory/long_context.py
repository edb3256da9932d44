"""Long contexts of fresh Gaussian points (panels c and d): hidden states sampled exactly.

With eps = 1/2 and P -> infinity each example needs new points, l x d numbers.  Yet given the
query x_q (norm r) the model meets its distractors x_j only through

    s_j = (x_q . x_j) y_j        iid Gaussian, variance r^2 / d, and
    x_j = s_j y_j x_q / r^2 + (a Gaussian vector orthogonal to x_q),

so that, given the s_j, the orthogonal parts' sum `Z = sum_j alpha_j s_j x_j^perp` is one
Gaussian vector of variance `sum_j alpha_j^2 s_j^2 / d`.  Sampling (x_q, s, Z) costs O(l + d)
per example and has exactly the distribution of the explicit tokens; the gate's gradient
needs one more Gaussian number, correlated with Z.  All settings share their examples, and
the sums over positions are matrix products of (batch, l) with (l, settings).

Shape suffixes: M settings, B batch, L context length, D dimension.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass
class Examples:
    """What M models see of a batch, before their parameters enter.

    Attributes:
        query_BD: query vectors x_q.
        target_B: label +-1 of the query's context token.
        signal_BL: `s_j y_target` at each distance, 0 at the query's own; squares are exact.
        distance_B: Delta of each example, 1-based.
        noise_BD: standard normal, projected orthogonal to x_q: the direction of Z.
        gate_noise_B: standard normal: the part of the gate's gradient independent of Z.
    """

    query_BD: Tensor
    target_B: Tensor
    signal_BL: Tensor
    distance_B: Tensor
    noise_BD: Tensor
    gate_noise_B: Tensor


def sample(
    batch: int, dim: int, length: int, generator: torch.Generator, distance: int | None = None
) -> Examples:
    """Draw a batch; the query's distance is uniform in 1..length unless it is given."""
    query = torch.randn(batch, dim, generator=generator) / dim**0.5
    target = torch.randint(0, 2, (batch,), generator=generator).float() * 2 - 1
    norm = query.norm(dim=1)
    signal = torch.randn(batch, length, generator=generator) * (norm / dim**0.5)[:, None]
    if distance is None:
        where = torch.randint(1, length + 1, (batch,), generator=generator)
    else:
        where = torch.full((batch,), distance)
    signal.scatter_(1, where[:, None] - 1, 0.0)
    noise = torch.randn(batch, dim, generator=generator)
    noise -= query * ((noise * query).sum(1) / norm**2)[:, None]
    return Examples(query, target, signal, where, noise, torch.randn(batch, generator=generator))


class Readouts:
    """M models: readout `w` (M, D), label weight `v` (M,), log decay rate `lam` (M,).

    Args:
        tau: initial effective lengths `e^-lam` in tokens (M,).
        train_gate: whether lam learns (M,).
    """

    def __init__(self, tau: Tensor, train_gate: Tensor, dim: int, length: int) -> None:
        self.w = torch.zeros(len(tau), dim)
        self.v = torch.zeros(len(tau))
        self.lam = -torch.log(tau.double())
        self.gate = train_gate.double()
        self.ages = torch.arange(1, length + 1, dtype=torch.float64)

    def _alphas(self) -> tuple[Tensor, Tensor]:
        """Return decay factors (L, M) and their derivatives with respect to lam."""
        rate = self.lam.exp()
        alpha = torch.exp(-self.ages[:, None] * rate)
        return alpha.float(), (-self.ages[:, None] * rate * alpha).float()

    def forward(self, e: Examples) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return `f`, `df/dv`, `df/dlam` and h_x's factors `along` (of x_q) and `spread` (of Z).

        All (B, M).
        """
        alpha_LM, slope_LM = self._alphas()
        dim = e.query_BD.shape[1]
        square_BL = e.signal_BL**2
        norm2_B1 = (e.query_BD**2).sum(1, keepdim=True)
        target_B1 = e.target_B[:, None]

        hit, hit_slope = alpha_LM[e.distance_B - 1], slope_LM[e.distance_B - 1]  # (B, M)
        label = target_B1 * (hit * norm2_B1 + e.signal_BL @ alpha_LM)
        label_slope = target_B1 * (hit_slope * norm2_B1 + e.signal_BL @ slope_LM)
        along = 1 + hit * norm2_B1 + square_BL @ alpha_LM / norm2_B1
        along_slope = hit_slope * norm2_B1 + square_BL @ slope_LM / norm2_B1
        spread = (square_BL @ alpha_LM**2 / dim).sqrt()
        shared = square_BL @ (alpha_LM * slope_LM) / dim
        slope_spread2 = square_BL @ slope_LM**2 / dim

        memory = e.query_BD @ self.w.T  # w . x_q
        across = e.noise_BD @ self.w.T  # w . (direction of Z)
        f = along * memory + spread * across + self.v * label
        # Given Z, the sum with alpha's derivatives in place of alpha has mean (shared /
        # spread^2) Z and a remaining variance per orthogonal direction.
        safe = spread.clamp_min(1e-30)
        rest = (slope_spread2 - (shared / safe) ** 2).clamp_min(0).sqrt()
        w_across2 = (self.w**2).sum(1) - memory**2 / norm2_B1
        gate_noise = rest * w_across2.clamp_min(0).sqrt() * e.gate_noise_B[:, None]
        df_dlam = (
            along_slope * memory + (shared / safe) * across + gate_noise + self.v * label_slope
        )
        return f, label, df_dlam, along, spread

    def step(self, e: Examples, lr: float) -> None:
        """Take one step of SGD on the mean logistic loss of a batch."""
        f, df_dv, df_dlam, along, spread = self.forward(e)
        target = e.target_B[:, None]
        slope = -target * torch.sigmoid(-target * f) / len(target)
        d_w = (slope * along).T @ e.query_BD + (slope * spread).T @ e.noise_BD
        d_v = (slope * df_dv).sum(0)
        d_lam = (slope * df_dlam).sum(0)
        self.w -= lr * d_w
        self.v -= lr * d_v
        self.lam -= lr * self.gate * d_lam

    def tau(self) -> Tensor:
        """Return the effective lengths now, in tokens (M,)."""
        return torch.exp(-self.lam)

    def accuracy(self, e: Examples) -> Tensor:
        """Return the share of examples whose output has the target's sign (M,)."""
        f = self.forward(e)[0]
        return (torch.sign(f) == e.target_B[:, None]).double().mean(0)
