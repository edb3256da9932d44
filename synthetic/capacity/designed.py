"""The circuits of theorems 3.1 and 3.2: recall without training.

A linear Mamba whose first D channels carry the previous token and whose last D carry the
current one writes, at every step, the pair (previous token as key, current token as value):

    H_t = sum_tau v'(x_tau) k'(x_{tau-1})^T,    logits = E H_t k'(x_t)

Theorem 3.1: with one-hot tokens (D = N = V) recall is perfect.  Theorem 3.2: with random
values E in D dimensions and random keys (hashes) E~ in N dimensions it succeeds with the
law's probability; every adjacent pair is written, so a = 2 (AR) and 3 (MQAR).

Embeddings are random signs, so that a fact's own signal is exactly 1 and only interference
is random.  Inside a Mamba of width D the hashes are linear in a D-dimensional embedding and
so independent only while N <= D; `score` takes any two tables, `as_linear_mamba` builds
weights and needs N <= D.
"""

from __future__ import annotations

import torch
from torch import Tensor

from synthetic.capacity import linear_mamba
from synthetic.capacity.tasks import Batch, Task, sample, stack
from synthetic.ensemble import Parameters


def random_signs(vocab: int, width: int, generator: torch.Generator) -> Tensor:
    """Return (V, width) of entries +-1/sqrt(width): unit vectors, nearly orthogonal."""
    signs = torch.randint(0, 2, (vocab, width), generator=generator).float() * 2 - 1
    return signs / width**0.5


def score(values: Tensor, keys: Tensor, batch: Batch) -> Tensor:
    """Return the queries' logits (B, Q, V) of the circuit with these tables.

    Args:
        values: E (V, D).
        keys: E~ (V, N).
        batch: tokens (B, L), positions (B, Q), without a member axis.
    """
    tokens, positions = batch.tokens, batch.positions
    written = keys[tokens[:, :-1]]  # the pair completed at position tau + 1
    asked = keys[tokens.gather(1, positions)]
    past = torch.arange(1, tokens.shape[1]) <= positions[..., None]
    weights = torch.bmm(asked, written.transpose(1, 2)) * past
    return torch.bmm(weights, values[tokens[:, 1:]]) @ values.T


def accuracy(
    task: Task, d: int, n: int, *, draws: int, sequences: int, seed: int, chunk: int = 250
) -> list[float]:
    """Return the circuit's accuracy for each of several draws of random embeddings."""
    found = []
    for draw in range(draws):
        g = torch.Generator().manual_seed(104_729 * seed + 31 * draw + 1_000 * d + n)
        values, keys = random_signs(task.vocab, d, g), random_signs(task.vocab, n, g)
        right = total = 0
        for start in range(0, sequences, chunk):
            batch = sample(task, min(chunk, sequences - start), g)
            hits = score(values, keys, batch).argmax(-1) == batch.answers
            right, total = right + int(hits.sum()), total + hits.numel()
        found.append(right / total)
    return found


def as_linear_mamba(values: Tensor, hash_rows: Tensor) -> Parameters:
    """Return weights of `linear_mamba` (one member) that compute the circuit.

    Args:
        values: embedding E (V, D); the keys are `E hash_rows^T`.
        hash_rows: S (N, D), N <= D.
    """
    d = values.shape[1]
    eye, none = torch.eye(d), torch.zeros_like(hash_rows)
    ones, zeros = torch.ones(d), torch.zeros(d)
    return {
        "embedding": values[None],
        "in_proj": torch.cat([eye, eye])[None],
        # channels: [previous token (D) | current token (D)]
        "conv": torch.stack([torch.cat([ones, zeros]), torch.cat([zeros, ones])], 1)[None],
        "b_proj": torch.cat([hash_rows, none], 1)[None],
        "c_proj": torch.cat([none, hash_rows], 1)[None],
        "out_proj": torch.cat([torch.zeros(d, d), eye], 1)[None],
    }


def non_compressive(vocab: int) -> Parameters:
    """Return theorem 3.1's weights: D = N = V, one-hot tokens."""
    return as_linear_mamba(torch.eye(vocab), torch.eye(vocab))


def non_compressive_accuracy(task: Task, sequences: int, seed: int = 0) -> dict[str, float]:
    """Return how often theorem 3.1's circuit, run through the linear Mamba, answers right.

    `among_values` lets values answer only, `among_all` every token.  They differ in MQAR: a
    random token may repeat a key, and the circuit then remembers what follows, a query's key,
    beside the value.
    """
    p = non_compressive(task.vocab)
    batch = stack([sample(task, sequences, torch.Generator().manual_seed(seed))])
    scores = linear_mamba.logits(p, batch)
    half = task.vocab // 2
    values = scores[..., half:].argmax(-1) + half == batch.answers
    return {
        "among_values": float(values.float().mean()),
        "among_all": float((scores.argmax(-1) == batch.answers).float().mean()),
    }
