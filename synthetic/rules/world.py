"""The world of the rules task: sets of propositions and Horn clauses between them.

M sets hold P propositions each; K clauses `A -> B` lead from each set to the next.  All are
drawn once and stay fixed.  A goal is reachable from a proposition if a chain of clauses leads
there.  Every clause has a fixed name, a number, which examples may resample.

Shape suffix: M sets, P propositions a set, K clauses a transition; B examples.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

SYMBOLS = "0123456789abcdefghijklmnopqrstuvwxyz"

Ints = NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of a world (paper: 3 sets of 128 propositions, 128 clauses, 4 symbols, 4 digits).

    Attributes:
        symbols: alphanumeric symbols of a proposition, `r_abcd` having 4.
        digits: numerals of a name.
    """

    sets: int
    propositions: int
    clauses: int
    symbols: int = 4
    digits: int = 4

    def __post_init__(self) -> None:
        if self.clauses > self.propositions**2:
            raise ValueError(f"{self.propositions} propositions make fewer clauses")
        if self.sets * self.propositions > len(SYMBOLS) ** self.symbols:
            raise ValueError(f"{self.symbols} symbols make too few propositions")
        if (self.sets + 1) * self.clauses > 10**self.digits:
            raise ValueError(f"{self.digits} digits make too few names")


@dataclasses.dataclass(frozen=True)
class World:
    """One draw of propositions, clauses and names.

    Attributes:
        text: (M, P, symbols) indices into `SYMBOLS`.
        inputs, outputs: (M-1, K) propositions' numbers within their sets.
        names: (M-1, K) each clause's fixed name.
        free: names that no clause owns, for resampling.
        reach: (M, P, P) bool, is goal g of the last set reachable from proposition p of set i.
    """

    size: Size
    text: Ints
    inputs: Ints
    outputs: Ints
    names: Ints
    free: Ints
    reach: NDArray[np.bool_]

    def levels(self, turn: Ints, current: Ints, goal: Ints) -> Ints:
        """Return (B, K) class levels of a turn's clauses, 3 for class 1 down to 0 for class 4.

        Class 1: applicable, and the goal is reachable from the result; 2: applicable only;
        3: the goal is reachable from the result only; 4: neither (paper, appendix "Ranking
        clauses").
        """
        applicable = self.inputs[turn] == current[:, None]
        leads = self.reach[turn[:, None] + 1, self.outputs[turn], goal[:, None]]
        return 2 * applicable + leads


def make(size: Size, seed: int) -> World:
    """Draw a world; the same seed gives the same one."""
    rng = np.random.default_rng([20_260_611, seed])
    m, p, k = size.sets, size.propositions, size.clauses
    base = len(SYMBOLS)
    strings = rng.choice(base**size.symbols, m * p, replace=False)
    powers = base ** np.arange(size.symbols - 1, -1, -1)
    text = (strings[:, None] // powers % base).reshape(m, p, size.symbols)
    pairs = np.stack([rng.choice(p * p, k, replace=False) for _ in range(m - 1)])
    inputs, outputs = pairs // p, pairs % p
    order = rng.permutation(10**size.digits)
    reach = np.zeros((m, p, p), dtype=bool)
    reach[-1] = np.eye(p, dtype=bool)
    for i in range(m - 2, -1, -1):
        np.logical_or.at(reach[i], inputs[i], reach[i + 1][outputs[i]])
    return World(
        size,
        text,
        inputs,
        outputs,
        names=order[: (m - 1) * k].reshape(m - 1, k),
        free=order[(m - 1) * k :],
        reach=reach,
    )


def distinct_rows(rng: np.random.Generator, pool: Ints, rows: int, count: int) -> Ints:
    """Return (rows, count) draws from `pool`, different within each row."""
    if count > len(pool):
        raise ValueError(f"{count} different draws from {len(pool)}")
    if count * count > len(pool):  # most rows would repeat one
        return pool[rng.permuted(np.tile(np.arange(len(pool)), (rows, 1)), axis=1)[:, :count]]
    found = rng.integers(len(pool), size=(rows, count))
    while True:
        ordered = np.sort(found, axis=1)
        again = (ordered[:, 1:] == ordered[:, :-1]).any(axis=1)
        if not again.any():
            return pool[found]
        found[again] = rng.integers(len(pool), size=(int(again.sum()), count))
