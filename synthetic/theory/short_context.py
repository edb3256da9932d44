"""Short contexts over P fixed points (panels a and b), trained exactly in the points' span.

SGD from w = 0 only ever adds multiples of the points, so `w = sum_p c_p x_p` and every
inner product is an entry of the P x P Gram matrix: a step costs O(l) per example instead of
O(l d), and nothing is approximated.  All settings (M) and seeds (S) train together; the
settings of one seed see the same examples.

Shape suffixes: M settings, S seeds, B batch, L context length, P points.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Task:
    """Points, labels and label noise of section 2.1.

    Attributes:
        dim: d, the dimension of the points.
        points: P, how many points there are.
        length: l, the context length in tokens.
        distance: Delta >= 1, how many tokens before the query its point stands.
        noise: eps, the probability that a context label is flipped.
    """

    dim: int
    points: int
    length: int
    distance: int
    noise: float

    def __post_init__(self) -> None:
        if not 1 <= self.distance <= self.length <= self.points:
            raise ValueError("need 1 <= distance <= length <= points (contexts hold each once)")


class Dictionaries:
    """The fixed points and labels of S seeds, and their streams of examples.

    Each seed has its own generator, so a seed's run does not depend on which others train
    beside it.
    """

    def __init__(self, task: Task, seeds: list[int], *, orthonormal: bool = False) -> None:
        self.task = task
        self.generators = [torch.Generator().manual_seed(1_000_003 * s + 17) for s in seeds]
        size = (task.points, task.dim)
        points = [torch.randn(size, generator=g, dtype=torch.float64) for g in self.generators]
        self.points = torch.stack(points) / task.dim**0.5  # (S, P, d)
        if orthonormal:
            self.points = torch.linalg.qr(self.points.mT).Q.mT.contiguous()
        self.gram_SPP = self.points @ self.points.mT
        labels = [torch.randint(0, 2, size[:1], generator=g) * 2 - 1 for g in self.generators]
        self.labels_SP = torch.stack(labels).to(torch.float64)

    def sample(self, batch: int) -> tuple[Tensor, Tensor]:
        """Return context points and perturbed labels, each (S, B, L), by distance from the query.

        Column j holds the token at distance j + 1; the query's own point is column
        `distance - 1`.  A context's points are distinct.
        """
        task = self.task
        orders, flips = [], []
        for g in self.generators:
            keys = torch.rand(batch, task.points, generator=g)
            orders.append(keys.topk(task.length, dim=1).indices)
            flips.append(torch.rand(batch, task.length, generator=g) < task.noise)
        context = torch.stack(orders)
        clean = self.labels_SP.gather(1, context.flatten(1)).view(context.shape)
        return context, torch.where(torch.stack(flips), -clean, clean)


class Readouts:
    """The trainable parameters of M x S models: `c` (M,S,P), `v` and `lam` (M,S).

    Args:
        alpha0: initial decay factor between the query and its context token, one per
            setting (M,); `lam = log(-log(alpha0) / distance)`.
        train_gate: whether lam learns, one per setting (M,).
    """

    def __init__(self, data: Dictionaries, alpha0: Tensor, train_gate: Tensor) -> None:
        if bool(((alpha0 <= 0) | (alpha0 >= 1)).any()):
            raise ValueError("alpha0 must lie strictly between 0 and 1")
        self.data, task = data, data.task
        seeds = data.labels_SP.shape[0]
        alpha = alpha0.to(torch.float64)
        self.lam_MS = torch.log(-torch.log(alpha) / task.distance)[:, None].repeat(1, seeds)
        self.v_MS = torch.zeros_like(self.lam_MS)
        self.c_MSP = torch.zeros(len(alpha0), seeds, task.points, dtype=torch.float64)
        self.gate_M1 = train_gate.to(torch.float64)[:, None]
        self.ages_L = torch.arange(1, task.length + 1, dtype=torch.float64)

    def gradients(self, context: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mean loss's gradients with respect to `c` (as w's coordinates), `v`, `lam`.

        The first is the vector `r` with `dLoss/dw = sum_p r_p x_p`, so that the step
        `c -= lr * r` is SGD on w.
        """
        task = self.data.task
        seeds, batch, length = context.shape
        settings = len(self.v_MS)
        q = task.distance - 1
        query = context[:, :, q : q + 1]  # (S, B, 1)
        gram = torch.gather(self.data.gram_SPP, 1, query.expand(seeds, batch, task.points))
        gram_SBL = gram.gather(2, context)
        memory_MSP = torch.einsum("msp,spr->msr", self.c_MSP, self.data.gram_SPP)  # w . x_p
        index = context.reshape(1, seeds, -1).expand(settings, -1, -1)
        memory_MSBL = memory_MSP.gather(2, index).view(settings, seeds, batch, length)

        rate_MS = self.lam_MS.exp()
        alpha_MSL = torch.exp(-rate_MS[..., None] * self.ages_L)
        write_MSBL = memory_MSBL + self.v_MS[..., None, None] * labels
        label_MSB = torch.einsum("msl,sbl->msb", alpha_MSL, gram_SBL * labels)
        f = memory_MSBL[..., q] + torch.einsum("msl,sbl,msbl->msb", alpha_MSL, gram_SBL, write_MSBL)

        target = labels[..., q]
        slope_MSB = -target * torch.sigmoid(-target * f) / batch  # dLoss/df
        slope_alpha_MSL = -self.ages_L * rate_MS[..., None] * alpha_MSL  # dalpha/dlam
        d_lam = torch.einsum(
            "msb,msl,sbl,msbl->ms", slope_MSB, slope_alpha_MSL, gram_SBL, write_MSBL
        )
        d_v = (slope_MSB * label_MSB).sum(-1)
        weight_MSBL = alpha_MSL[:, :, None] * gram_SBL
        weight_MSBL[..., q] += 1  # the query token enters the hidden state itself
        weight_MSBL *= slope_MSB[..., None]
        d_c = torch.zeros_like(self.c_MSP).scatter_add_(2, index, weight_MSBL.flatten(2))
        return d_c, d_v, d_lam

    def step(self, batch: int, lr: float) -> None:
        """Take one step of SGD on freshly sampled examples."""
        d_c, d_v, d_lam = self.gradients(*self.data.sample(batch))
        self.c_MSP -= lr * d_c
        self.v_MS -= lr * d_v
        self.lam_MS -= lr * self.gate_M1 * d_lam

    def alpha(self) -> Tensor:
        """Return the decay factor at the query's distance now (M, S)."""
        return torch.exp(-self.data.task.distance * self.lam_MS.exp())

    def margins(self) -> tuple[Tensor, Tensor]:
        """Return the memorisation margin `(1 + alpha) u` and the retrieval margin `alpha v`.

        Both (M, S); `u = y(x_p) (w . x_p)` is averaged over the P points (section 2.3).
        """
        memory_MSP = torch.einsum("msp,spr->msr", self.c_MSP, self.data.gram_SPP)
        u = (memory_MSP * self.data.labels_SP).mean(-1)
        alpha = self.alpha()
        return (1 + alpha) * u, alpha * self.v_MS
