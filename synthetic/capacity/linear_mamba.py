"""The simplified linear Mamba of the capacity paper, many members at once.

    e_t = E x_t;  z_t = w0 * (P_in e_{t-1}) + w1 * (P_in e_t);   B_t = S_B z_t,  C_t = S_C z_t
    h_t = h_{t-1} + z_t B_t^T;   y_t = h_t C_t;   logits_t = E^T P_out y_t

A = 1, no skip, expand 2, convolution of width 2, no norm, gate, nonlinearity, discretisation
or residual.  `reference_logits` is this recurrence.  `readout` is the same sum in another
order: P_out z, B and C are linear in the two tokens, so that the maps before them are
multiplied once a step, their results looked up in tables of V rows instead of computed for
B x L positions, the state never formed, and only the queries' readouts computed.

Shape suffixes: E members, B batch, L length, Q queries, V vocabulary, D model, N state.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from synthetic import ensemble
from synthetic.capacity import training
from synthetic.capacity.tasks import Batch, Task
from synthetic.ensemble import Parameters

EXPAND = 2
EMBEDDING_STD = 1.0
"""The law counts on embeddings as orthogonal as random ones.  AdamW moves every coordinate by
about the learning rate a step, so small ones soon point where training took them, all alike:
with std D^-1/2, AR at (D, N) = (16, 16) recalls .30 instead of .40."""
OPTIMIZER = ensemble.AdamW(lr=0.01, betas=(0.9, 0.95), clip_norm=1.5)


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
        "embedding": ensemble.normal(members, EMBEDDING_STD, vocab, d),
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
    """Return what a token adds as the previous and as the current one, each (E, V, D + 2N).

    A row is [P_out z (D) | B (N) | C (N)].
    """
    out = torch.cat([p["out_proj"], p["b_proj"], p["c_proj"]], dim=1)
    previous, current = (
        torch.bmm(out * p["conv"][:, None, :, tap], p["in_proj"]) for tap in (0, 1)
    )
    return ensemble.linear(p["embedding"], previous), ensemble.linear(p["embedding"], current)


def readout(p: Parameters, batch: Batch) -> Tensor:
    """Return P_out y at the queries (E, B, Q, D); batch fields have the leading member axis."""
    tokens, positions = batch.tokens, batch.positions
    members, sequences, length = tokens.shape
    d, n = p["out_proj"].shape[1], p["b_proj"].shape[1]
    previous, current = _tables(p)
    written = ensemble.embedding(current[..., : d + n], tokens)
    shifted = ensemble.embedding(previous[..., : d + n], tokens[..., :-1])
    written = (written + torch.nn.functional.pad(shifted, (0, 0, 1, 0))).flatten(0, 1)
    value, b = written[..., :d], written[..., d:]

    c = ensemble.embedding(current[..., d + n :], tokens.gather(2, positions))
    before = tokens.gather(2, (positions - 1).clamp_min(0))
    c = c + ensemble.embedding(previous[..., d + n :], before) * (positions > 0)[..., None]

    past = torch.arange(length) <= positions.flatten(0, 1)[..., None]  # (EB, Q, L)
    weights = torch.bmm(c.flatten(0, 1), b.transpose(1, 2)) * past
    return torch.bmm(weights, value).view(members, sequences, -1, d)


def logits(p: Parameters, batch: Batch) -> Tensor:
    """Return the queries' logits (E, B, Q, V)."""
    return ensemble.linear(readout(p, batch), p["embedding"])


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


def train(sizes: list[Size], seeds: list[int], task: Task, steps: int, desc: str) -> Parameters:
    """Train one member per (size, seed) pair on the task and return their parameters."""
    p = initial(sizes, seeds)
    mask = (p["b_proj"] != 0).float()  # slots that a smaller member does not have

    def masked(p: Parameters, batch: Batch) -> Tensor:
        return readout({**p, "b_proj": p["b_proj"] * mask, "c_proj": p["c_proj"] * mask}, batch)

    frozen = () if sizes[0].conv else ("conv",)
    training.train(p, masked, seeds, task, steps, OPTIMIZER, desc, frozen=frozen)
    p["b_proj"] *= mask
    p["c_proj"] *= mask
    return p


def accuracy(p: Parameters, task: Task, sequences: int, *, seed: int = 0) -> list[float]:
    """Return each member's share of right answers over the same fresh sequences."""
    return training.accuracy(p, readout, task, sequences, seed=seed)
