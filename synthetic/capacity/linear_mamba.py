"""The simplified linear Mamba of the capacity paper, many members at once.

    e_t = E x_t;  z_t = w0 * (P_in e_{t-1}) + w1 * (P_in e_t);   B_t = S_B z_t,  C_t = S_C z_t
    h_t = h_{t-1} + z_t B_t^T;   y_t = h_t C_t;   logits_t = E^T P_out y_t

A = 1, no skip, expand 2, convolution of width 2, no norm, gate, nonlinearity, discretisation
or residual.  `reference_logits` is this recurrence.  `logits` is the same sum in another
order: z, B and C are linear in the two tokens, so they are looked up in tables of V rows
instead of computed for B x L positions, and only the queries' readouts are computed.

Shape suffixes: E members, B batch, L length, Q queries, V vocabulary, D model, N state.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from synthetic import ensemble
from synthetic.capacity.tasks import Batch, Stream, Task, sample, stack
from synthetic.ensemble import Parameters

EXPAND = 2
BATCH_SEQUENCES = 128
LABEL_SMOOTHING = 0.1
OPTIMIZER = ensemble.AdamW(lr=0.01, betas=(0.9, 0.95), clip_norm=1.5)


def schedule(steps: int) -> ensemble.Schedule:
    """Return the paper's 100 warm-up + 400 flat + 1,500 cosine steps, scaled to `steps`."""
    return ensemble.Schedule(steps, warmup_steps=steps // 20, flat_steps=steps // 5)


@dataclasses.dataclass(frozen=True)
class Size:
    """One member's sizes; members that train together share `vocab`, `d` and `conv`.

    Attributes:
        conv: with the width-2 convolution; without it a token sees itself only (ablation).
    """

    vocab: int
    d: int
    n: int
    conv: bool = True


def initial(sizes: list[Size], seeds: list[int]) -> Parameters:
    """Return fresh parameters; members with fewer than the most state slots keep zeros there."""
    members = ensemble.generators(seeds, stream=0)
    vocab, d = sizes[0].vocab, sizes[0].d
    inner, n_max = EXPAND * d, max(s.n for s in sizes)
    if any((s.vocab, s.d, s.conv) != (vocab, d, sizes[0].conv) for s in sizes):
        raise ValueError("members that train together share vocab, d and conv")
    mask = torch.stack([(torch.arange(n_max) < s.n).float() for s in sizes])  # (E, N)
    parameters = {
        "embedding": ensemble.normal(members, d**-0.5, vocab, d),
        "in_proj": ensemble.uniform(members, d**-0.5, inner, d),
        "conv": ensemble.uniform(members, 2**-0.5, inner, 2),
        "b_proj": ensemble.uniform(members, inner**-0.5, n_max, inner) * mask[..., None],
        "c_proj": ensemble.uniform(members, inner**-0.5, n_max, inner) * mask[..., None],
        "out_proj": ensemble.uniform(members, inner**-0.5, d, inner),
    }
    if not sizes[0].conv:
        parameters["conv"] = torch.stack(
            [torch.zeros(len(seeds), inner), torch.ones(len(seeds), inner)], dim=2
        )
    return parameters


def _tables(p: Parameters) -> tuple[Tensor, Tensor]:
    """Return what a token adds to z as the previous and as the current one, each (E, V, 2D)."""
    z = ensemble.linear(p["embedding"], p["in_proj"])
    return z * p["conv"][:, None, :, 0], z * p["conv"][:, None, :, 1]


def logits(p: Parameters, batch: Batch) -> Tensor:
    """Return the queries' logits (E, B, Q, V); batch fields have the leading member axis."""
    previous_EVZ, current_EVZ = _tables(p)
    tokens, positions = batch.tokens, batch.positions
    members, sequences, length = tokens.shape
    inner = current_EVZ.shape[2]
    # [z as previous | B as previous] and the same as current: one lookup each.
    wide0 = torch.cat([previous_EVZ, ensemble.linear(previous_EVZ, p["b_proj"])], 2)
    wide1 = torch.cat([current_EVZ, ensemble.linear(current_EVZ, p["b_proj"])], 2)
    wide = ensemble.embedding(wide1, tokens)
    wide = wide + torch.nn.functional.pad(ensemble.embedding(wide0, tokens[..., :-1]), (0, 0, 1, 0))
    z, b = wide[..., :inner].flatten(0, 1), wide[..., inner:].flatten(0, 1)

    asked = tokens.gather(2, positions)
    before = tokens.gather(2, (positions - 1).clamp_min(0))
    c0 = ensemble.embedding(ensemble.linear(previous_EVZ, p["c_proj"]), before)
    c1 = ensemble.embedding(ensemble.linear(current_EVZ, p["c_proj"]), asked)
    c = (c1 + c0 * (positions > 0)[..., None]).flatten(0, 1)  # (EB, Q, N)

    written = torch.arange(length) <= positions.flatten(0, 1)[..., None]
    scores = torch.bmm(c, b.transpose(1, 2)) * written
    y = torch.bmm(scores, z).view(members, sequences, -1, inner)
    return ensemble.linear(ensemble.linear(y, p["out_proj"]), p["embedding"])


def reference_logits(p: Parameters, member: int, tokens: Tensor) -> Tensor:
    """Return all logits (L, V) of one member and one sequence (L,) by the plain recurrence."""
    q = {name: value[member] for name, value in p.items()}
    inner = q["in_proj"].shape[0]
    h = torch.zeros(inner, q["b_proj"].shape[0])
    previous, out = torch.zeros(inner), []
    for token in tokens.tolist():
        current = q["in_proj"] @ q["embedding"][token]
        z = q["conv"][:, 0] * previous + q["conv"][:, 1] * current
        h = h + torch.outer(z, q["b_proj"] @ z)
        out.append(q["embedding"] @ (q["out_proj"] @ (h @ (q["c_proj"] @ z))))
        previous = current
    return torch.stack(out)


def cross_entropy(scores: Tensor, answers: Tensor, smoothing: float) -> Tensor:
    """Return each member's mean label-smoothed cross-entropy (E,)."""
    loss = torch.nn.functional.cross_entropy(
        scores.flatten(0, -2), answers.flatten(), label_smoothing=smoothing, reduction="none"
    )
    return loss.view(len(scores), -1).mean(1)


def train(sizes: list[Size], seeds: list[int], task: Task, steps: int, desc: str) -> Parameters:
    """Train one member per (size, seed) pair on the task and return their parameters."""
    p = initial(sizes, seeds)
    streams = [Stream(task, BATCH_SEQUENCES, g) for g in ensemble.generators(seeds, stream=1)]
    mask = (p["b_proj"] != 0).float()
    trained = {k: v for k, v in p.items() if k != "conv" or sizes[0].conv}

    def losses(_: int) -> Tensor:
        batch = stack([s.next() for s in streams])
        masked = {**p, "b_proj": p["b_proj"] * mask, "c_proj": p["c_proj"] * mask}
        return cross_entropy(logits(masked, batch), batch.answers, LABEL_SMOOTHING)

    ensemble.train(trained, losses, OPTIMIZER, schedule(steps), desc=desc)
    p["b_proj"] *= mask
    p["c_proj"] *= mask
    return p


@torch.no_grad()
def accuracy(
    p: Parameters, task: Task, sequences: int, *, seed: int = 0, chunk: int = 500
) -> list[float]:
    """Return each member's share of right answers over the same fresh sequences."""
    members = len(p["embedding"])
    generator = ensemble.generators([seed], stream=2)[0]
    right, total = torch.zeros(members), 0
    for _ in range(math.ceil(sequences / chunk)):
        one = sample(task, chunk, generator)
        batch = stack([one] * members)
        hits = logits(p, batch).argmax(-1) == batch.answers
        right += hits.flatten(1).sum(1)
        total += hits[0].numel()
    return (right / total).tolist()
