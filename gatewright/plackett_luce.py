"""Plackett-Luce rankings by Gumbel noise: a retriever whose strength is one number, beta.

Sorting `beta * x + G` in descending order, with G independent standard Gumbel noise, draws a
ranking in which each next item is chosen among those left with probability proportional to
`exp(beta * x)`.  beta = 0 is a uniformly random order, beta -> infinity sorts by x (paper,
appendix "Weak Tool Retrieval").  Noise is drawn once per (query, seed), so rankings at
different beta, and pools of different size, are paired.
"""

from __future__ import annotations

import hashlib
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gatewright.bm25 import ROUNDED_TO
from gatewright.errors import UserError

Utility = Literal["minmax", "rank", "score"]


def generator(*key: object) -> np.random.Generator:
    """Return a random generator that depends on the key alone, not on process or platform."""
    text = "\0".join(map(str, key)).encode()
    words = np.frombuffer(hashlib.sha256(text).digest(), dtype="<u4")
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([int(w) for w in words])))


def gumbel_noise(n: int, *key: object) -> NDArray[np.float64]:
    """Return n draws of standard Gumbel noise that belong to the key, shape (n,)."""
    return generator("gumbel", *key).gumbel(size=n)


def utilities(scores: ArrayLike, kind: Utility = "minmax") -> NDArray[np.float64]:
    """Turn one query's retrieval scores into the utilities x of the ranking model.

    Args:
        scores: a score per item, shape (n,).
        kind: `minmax` scales them to [0, 1] (all 0 if they are equal), so beta has the same
            meaning for every query; `rank` is -(rank of the item)/(n-1), best 0, worst -1;
            `score` takes them as they are.

    Raises:
        UserError: no such utility.
    """
    s: NDArray[np.float64] = np.asarray(scores, dtype=np.float64).round(ROUNDED_TO)
    if kind == "score":
        return s
    if kind == "minmax":
        low, high = s.min(), s.max()
        return np.zeros_like(s) if high == low else (s - low) / (high - low)
    if kind == "rank":
        position = np.empty(len(s))
        position[np.argsort(-s, kind="stable")] = np.arange(len(s))
        return -position / max(len(s) - 1, 1)
    raise UserError(f"--utility {kind}: choose one of {', '.join(get_args(Utility))}")


def ranking(x: ArrayLike, beta: float, noise: ArrayLike) -> NDArray[np.int64]:
    """Return item numbers, best first, of one Plackett-Luce draw.

    Args:
        x: utilities, shape (n,) or (queries, n).
        beta: inverse temperature, >= 0; infinity sorts by x alone, ties in item order.
        noise: standard Gumbel draws of the same shape.

    Raises:
        UserError: beta is negative or not a number.
    """
    if not beta >= 0:
        raise UserError(f"--beta {beta}: give a number >= 0")
    x = np.asarray(x, dtype=np.float64)
    key = x if np.isinf(beta) else beta * x + np.asarray(noise)
    return np.argsort(-key, axis=-1, kind="stable")


def log_probability(order: ArrayLike, x: ArrayLike, beta: float) -> float:
    """Return the log-probability of a full ranking, best first, under the model."""
    u = beta * np.asarray(x, dtype=np.float64)[np.asarray(order)]
    left = np.logaddexp.accumulate(u[::-1])[::-1]  # log-sum-exp over the items still left
    return float((u - left).sum())
