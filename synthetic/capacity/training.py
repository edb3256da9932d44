"""How every model of this room is trained and scored: one loss, one loop, one accuracy.

A model is a dictionary of parameters with tied embeddings (`embedding`, E x V x D) and a
function that returns what it reads at the queries, (E, B, Q, D); the logits are that times the
embedding.  The loss works on the readout: all logits of a step never exist at once.

Shapes: E members, B batch, Q queries, V vocabulary, D model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gatewright.kernels.cross_entropy import linear_cross_entropy
from synthetic import ensemble
from synthetic.capacity.tasks import Batch, Stream, Task, sample, stack
from synthetic.ensemble import Parameters

BATCH_SEQUENCES = 128
LABEL_SMOOTHING = 0.1

Readout = Callable[[Parameters, Batch], Tensor]


def schedule(steps: int) -> ensemble.Schedule:
    """Return the paper's 100 warm-up + 400 flat + 1,500 cosine steps, scaled to `steps`."""
    return ensemble.Schedule(steps, warmup_steps=steps // 20, flat_steps=steps // 5)


def cross_entropy(readout: Tensor, table: Tensor, answers: Tensor, smoothing: float) -> Tensor:
    """Return each member's mean label-smoothed cross-entropy over its queries (E,).

    The logits are `readout table^T`.  Smoothing only adds the distance between the right logit
    and the mean of all, which need no logits of their own.

    Args:
        readout: (E, B, Q, D).
        table: (E, V, D), the tied embedding.
        answers: (E, B, Q).
        smoothing: share of the target that is spread over all V tokens.
    """
    readout, answers = readout.flatten(1, 2), answers.flatten(1)
    members = zip(readout, table, answers, strict=True)
    plain = torch.stack([linear_cross_entropy(*member) for member in members])
    above_mean = ensemble.embedding(table, answers) - table.mean(1, keepdim=True)
    return plain / answers.shape[1] + smoothing * (readout * above_mean).sum(2).mean(1)


def train(
    p: Parameters,
    readout: Readout,
    seeds: list[int],
    task: Task,
    steps: int,
    optimizer: ensemble.AdamW,
    desc: str,
    *,
    frozen: tuple[str, ...] = (),
) -> Parameters:
    """Train one member per seed in place, each on its own stream, and return the parameters."""
    streams = [Stream(task, BATCH_SEQUENCES, g) for g in ensemble.generators(seeds, stream=1)]

    def losses(_: int) -> Tensor:
        batch = stack([s.next() for s in streams])
        return cross_entropy(readout(p, batch), p["embedding"], batch.answers, LABEL_SMOOTHING)

    trained = {k: v for k, v in p.items() if k not in frozen}
    ensemble.train(trained, losses, optimizer, schedule(steps), desc=desc)
    return p


@torch.no_grad()
def accuracy(
    p: Parameters,
    readout: Readout,
    task: Task,
    sequences: int,
    *,
    seed: int = 0,
    chunk: int = 100,
) -> list[float]:
    """Return each member's share of right answers over the same fresh sequences."""
    members = len(p["embedding"])
    generator = ensemble.generators([seed], stream=2)[0]
    right, total = torch.zeros(members), 0
    for start in range(0, sequences, chunk):
        batch = stack([sample(task, min(chunk, sequences - start), generator)] * members)
        scores = ensemble.linear(readout(p, batch), p["embedding"])
        hits = scores.argmax(-1) == batch.answers
        right += hits.flatten(1).sum(1)
        total += hits[0].numel()
    return (right / total).tolist()
