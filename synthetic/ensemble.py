"""Many small models trained at once: every parameter has a leading axis, one slice a member.

Members differ in seed or in a setting.  Each has its own generator for initial weights and
data, its own gradient norm for clipping, and no term of the loss couples them, so a member's
run is what it would be alone (a test holds this), only faster: a step's fixed costs are paid
once for all.

Shape suffix: E members, always first.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gatewright.runlog import progress

Parameters = dict[str, Tensor]


def generators(seeds: Sequence[int], stream: int) -> list[torch.Generator]:
    """Return a generator per member; `stream` tells weights, data and evaluation apart."""
    return [torch.Generator().manual_seed(1_000_003 * s + 7_919 * stream + 12_345) for s in seeds]


def uniform(members: list[torch.Generator], bound: float, *shape: int) -> Tensor:
    """Return (E, *shape) uniform in [-bound, bound], each member from its own generator."""
    return torch.stack([(torch.rand(shape, generator=g) * 2 - 1) * bound for g in members])


def normal(members: list[torch.Generator], std: float, *shape: int) -> Tensor:
    """Return (E, *shape) Gaussian, each member from its own generator."""
    return torch.stack([torch.randn(shape, generator=g) * std for g in members])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply each member's own linear map: x (E, ..., i), weight (E, o, i), bias (E, o)."""
    flat = x.reshape(x.shape[0], -1, x.shape[-1])
    if bias is None:
        out = torch.bmm(flat, weight.transpose(1, 2))
    else:
        out = torch.baddbmm(bias[:, None], flat, weight.transpose(1, 2))
    return out.view(*x.shape[:-1], weight.shape[1])


def embedding(table: Tensor, tokens: Tensor) -> Tensor:
    """Look up each member's own table: tokens (E, ...), table (E, V, d) -> (E, ..., d)."""
    members, vocab, _ = table.shape
    shift = torch.arange(members, device=tokens.device) * vocab
    index = tokens + shift.view(-1, *[1] * (tokens.dim() - 1))
    return torch.nn.functional.embedding(index, table.flatten(0, 1))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Normalise the last axis; weight and bias (E, d)."""
    shape = (len(weight), *[1] * (x.dim() - 2), weight.shape[1])
    y = torch.nn.functional.layer_norm(x, x.shape[-1:])
    return y * weight.view(shape) + bias.view(shape)


def clip_each(parameters: Parameters, max_norm: float) -> Tensor:
    """Scale each member's gradient to at most `max_norm`; return the norms before (E,)."""
    grads = [p.grad for p in parameters.values() if p.grad is not None]
    norm = torch.stack([g.flatten(1).square().sum(1) for g in grads]).sum(0).sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for g in grads:
        g.mul_(scale.view(-1, *[1] * (g.dim() - 1)))
    return norm


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Linear warm-up, a flat stretch, then a cosine down to `floor` of the peak."""

    steps: int
    warmup_steps: int = 0
    flat_steps: int = 0
    floor: float = 0.0

    def __post_init__(self) -> None:
        if self.steps < 1 or self.warmup_steps + self.flat_steps > self.steps:
            raise ValueError("warm-up and flat steps must fit into at least one step")

    def factor(self, step: int) -> float:
        """Return the learning rate at a step (0-based) over its peak."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        decay = self.steps - self.warmup_steps - self.flat_steps
        done = step - self.warmup_steps - self.flat_steps
        if done < 0 or decay <= 0:
            return 1.0
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * done / decay))


@dataclasses.dataclass(frozen=True)
class AdamW:
    """AdamW's settings; vectors and the names in `no_decay` take no weight decay."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    no_decay: tuple[str, ...] = ()


def train(
    parameters: Parameters,
    losses: Callable[[int], Tensor],
    optimizer: AdamW,
    schedule: Schedule,
    *,
    desc: str,
    after: Callable[[int], None] | None = None,
    tolerant: bool = False,
) -> dict[int, int]:
    """Train all members in place; return the members that diverged and the step where it showed.

    A member that diverged stays so, and changes nothing for the others.

    Args:
        parameters: tensors (E, ...); their `requires_grad` is set here.
        losses: step -> each member's loss (E,) on its own fresh batch.
        after: called after each step (schedules that react to progress).
        tolerant: go on with the others when a member diverges, instead of raising.

    Raises:
        ArithmeticError: a member's loss, or a weight at the end, is not finite.
    """
    diverged: dict[int, int] = {}

    def look(finite: Tensor, step: int) -> None:
        for member in (~finite).nonzero().flatten().tolist():
            diverged.setdefault(member, step)
        if diverged and not tolerant:
            raise ArithmeticError(f"{desc}: a loss is not finite at step {step}")

    for p in parameters.values():
        p.requires_grad_(True)
    plain = [
        p for k, p in parameters.items() if p.dim() <= 2 or k.split(".")[-1] in optimizer.no_decay
    ]
    skip = {id(p) for p in plain}
    decayed = [p for p in parameters.values() if id(p) not in skip]
    groups = [
        {"params": decayed, "weight_decay": optimizer.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=optimizer.lr, betas=optimizer.betas, fused=True
    )
    bar = progress(range(schedule.steps), desc=desc, unit="step")
    for step in bar:
        loss = losses(step)
        adamw.zero_grad(set_to_none=True)
        loss.sum().backward()
        clip_each(parameters, optimizer.clip_norm)
        for group in adamw.param_groups:
            group["lr"] = optimizer.lr * schedule.factor(step)
        adamw.step()
        if step % 50 == 0 or step == schedule.steps - 1:
            value = loss.detach()
            look(torch.isfinite(value), step)
            bar.set_postfix(loss=f"{float(value.mean()):.3f}", refresh=False)
        if after is not None:
            after(step)
    for p in parameters.values():
        p.requires_grad_(False)
        look(torch.isfinite(p).flatten(1).all(1), schedule.steps - 1)  # after the last update
    return diverged
