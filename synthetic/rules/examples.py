"""Examples of the rules task: which clauses a turn shows, in which order, under which names.

    1234:r_ab12->r_x9q0|5678:r_kk31->r_77ab|r_ab12,r_g0al<START>1234

The current proposition stands first in the last field, the goal after it, and the answer is
the name of a clause that is applicable and from whose result the goal can be reached.

Two ways to fill a pool of k clauses: `random` order with an oracle (a class 1 clause) put at
a random place, or left out; and `ranked`, the top k of a Plackett-Luce ranking by class, the
most relevant last, next to the question.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np
import torch

from gatewright import plackett_luce
from synthetic.rules.world import SYMBOLS, Ints, World, distinct_rows
from synthetic.sequences import Batch

PUNCTUATION = ("_", "-", ">", ":", "|", ",", "<START>")
TOKENS = (*SYMBOLS, *PUNCTUATION)
VOCAB = len(TOKENS)
_ID = {t: i for i, t in enumerate(TOKENS)}

Oracle = Literal["anywhere", "resampled", "absent"]
Right = Literal["shown", "renamed", "known"]


@dataclasses.dataclass(frozen=True)
class Pools:
    """How contexts are made.

    Attributes:
        kind: `random` order with an oracle, or `ranked` with the most relevant clause last.
        oracle: of random pools: at any place; among the clauses with resampled names ("random
            oracle name"); or absent, with every other class 1 clause ("no oracle").
        beta: of ranked pools, the ranking's inverse temperature.
        inject: of ranked pools: put a class 1 clause in the last rank if there is none.
        resampled: share of the clauses, from the front, whose names are drawn anew.
    """

    kind: Literal["random", "ranked"]
    oracle: Oracle = "anywhere"
    beta: float = 10.0
    inject: bool = True
    resampled: float = 0.1


@dataclasses.dataclass(frozen=True)
class Examples:
    """Turns of the task before they are text.

    Attributes:
        turn, current, goal: (B,) the transition, the proposition, and the last set's goal.
        sizes: (B,) clauses shown.
        clauses: (B, k) their numbers within the transition; -1 beyond a row's size.
        names: (B, k) the names shown.
        levels: (B, k) class levels.
        target: (B,) the name to learn: the oracle's, or the best-ranked class 1 clause's; where
            none is shown, the fixed name of one.
    """

    world: World
    turn: Ints
    current: Ints
    goal: Ints
    sizes: Ints
    clauses: Ints
    names: Ints
    levels: Ints
    target: Ints

    def right_names(self, right: Right = "shown") -> Ints:
        """Return (B, c) every name that is right, the target first, -1 where there are fewer.

        Several paths may lead to the goal, so several clauses may be of class 1.

        Args:
            right: those of class 1 that are `shown`; of these, the ones that are `renamed` here,
                whose names no memory tells; or all that are `known`, shown or not, by their
                fixed names.
        """
        fixed = self.world.names[self.turn]  # (B, K)
        if right == "known":
            fine = self.world.levels(self.turn, self.current, self.goal) == 3
            names = np.where(fine, fixed, -1)
        else:
            fine = self.levels == 3
            if right == "renamed":
                fine &= self.names != np.take_along_axis(fixed, np.maximum(self.clauses, 0), axis=1)
            names = np.where(fine, self.names, -1)
        order = (names == self.target[:, None]) * 2 + (names >= 0)
        names = np.take_along_axis(names, (-order).argsort(axis=1, kind="stable"), axis=1)
        return names[:, : max(1, int((names >= 0).sum(axis=1).max()))]

    def after(self, answer: Ints) -> Ints:
        """Return (B,) the proposition that the answer leads to; -1 if it does not apply."""
        match = (self.names == answer[:, None]) & (self.clauses >= 0) & (self.levels >= 2)
        clause = np.where(match.any(1), self.clauses[np.arange(len(answer)), match.argmax(1)], -1)
        return np.where(clause < 0, -1, self.world.outputs[self.turn, clause])


def questions(world: World, count: int, rng: np.random.Generator, turn: int | None) -> Ints:
    """Return (count, 3) turns, current propositions and goals that can be reached from them."""
    turns = rng.integers(world.size.sets - 1, size=count) if turn is None else np.full(count, turn)
    out = np.empty((count, 3), dtype=np.int64)
    for t in np.unique(turns):
        rows = (turns == t).nonzero()[0]
        pairs = np.argwhere(world.reach[t])
        out[rows, 0] = t
        out[rows, 1:] = pairs[rng.integers(len(pairs), size=len(rows))]
    return out


def fill(
    world: World,
    asked: Ints,
    pools: Pools,
    sizes: Ints,
    rng: np.random.Generator,
) -> Examples:
    """Choose and order the clauses of each question and name them.

    Args:
        asked: (B, 3) turn, current proposition, goal.
        sizes: (B,) clauses to show, at most K.
    """
    turn, current, goal = asked.T
    count, k = len(asked), int(sizes.max())
    levels = world.levels(turn, current, goal)  # (B, K)
    rows = np.arange(count)[:, None]
    slot = np.arange(k)[None]
    oracle = (rng.random(levels.shape) * (levels == 3)).argmax(axis=1)
    q = np.maximum(1, np.ceil(pools.resampled * sizes - 1e-9)).astype(np.int64)
    if pools.kind == "ranked":
        noise = rng.gumbel(size=levels.shape)
        ranking = plackett_luce.ranking(levels, pools.beta, noise)
        if pools.inject:
            shown = np.arange(levels.shape[1])[None] < sizes[:, None]
            found = ((levels[rows, ranking] == 3) & shown).any(axis=1)
            last = sizes[~found] - 1
            at = (ranking[~found] == oracle[~found][:, None]).argmax(axis=1)
            some = (~found).nonzero()[0]
            ranking[some, at], ranking[some, last] = ranking[some, last], ranking[some, at]
        clauses = ranking[rows, np.maximum(sizes[:, None] - 1 - slot, 0)]
    else:
        draw = rng.random(levels.shape)
        if pools.oracle == "absent":
            draw[levels == 3] = 2.0
            clauses = draw.argsort(axis=1)[:, :k]
            sizes = np.minimum(sizes, (levels != 3).sum(axis=1))
        else:
            draw[rows[:, 0], oracle] = 2.0
            others = draw.argsort(axis=1)[:, :k]
            places = q if pools.oracle == "resampled" else sizes
            place = (rng.random(count) * places).astype(np.int64)[:, None]
            before = others[rows, np.maximum(slot - 1, 0)]
            clauses = np.where(slot < place, others, before)
            clauses[rows[:, 0], place[:, 0]] = oracle
    inside = slot < sizes[:, None]
    names = world.names[turn[:, None], clauses]
    fresh = distinct_rows(rng, world.free, count, k)
    names = np.where(slot < q[:, None], fresh, names)
    shown_levels = np.where(inside, levels[rows, clauses], -1)
    best = shown_levels == 3
    if pools.kind == "ranked":
        index = k - 1 - best[:, ::-1].argmax(axis=1)  # nearest to the question
    else:
        index = (clauses == oracle[:, None]).argmax(axis=1)
    target = np.where(best.any(axis=1), names[rows[:, 0], index], world.names[turn, oracle])
    clauses = np.where(inside, clauses, -1)
    return Examples(world, turn, current, goal, sizes, clauses, names, shown_levels, target)


def tokens_per_clause(world: World) -> int:
    """Return the tokens of `name:clause|`."""
    return world.size.digits + 2 * (world.size.symbols + 2) + 4


def prompt_tokens(world: World, k: int) -> int:
    """Return the tokens of a prompt with k clauses and its answer."""
    return k * tokens_per_clause(world) + 2 * (world.size.symbols + 2) + 2 + world.size.digits


def _digits(world: World, names: Ints) -> Ints:
    powers = 10 ** np.arange(world.size.digits - 1, -1, -1)
    return names[..., None] // powers % 10  # the numerals are the first ten symbols


def _proposition(world: World, which: Ints, number: Ints) -> Ints:
    symbols = world.text[which, number]
    head = np.broadcast_to([_ID["r"], _ID["_"]], (*symbols.shape[:-1], 2))
    return np.concatenate([head, symbols], axis=-1)


def encode(examples: Examples) -> Batch:
    """Return the examples as token sequences, answers included."""
    w, e = examples.world, examples
    count, k = e.clauses.shape
    turn = np.broadcast_to(e.turn[:, None], (count, k))
    clause = np.maximum(e.clauses, 0)

    def mark(*text: str) -> Ints:
        return np.broadcast_to([_ID[t] for t in text], (count, k, len(text)))

    block = np.concatenate(
        [
            _digits(w, e.names),
            mark(":"),
            _proposition(w, turn, w.inputs[turn, clause]),
            mark("-", ">"),
            _proposition(w, turn + 1, w.outputs[turn, clause]),
            mark("|"),
        ],
        axis=-1,
    )
    comma, start = (np.full((count, 1), _ID[t]) for t in (",", "<START>"))
    last = np.full(count, w.size.sets - 1)
    tail = np.concatenate(
        [
            _proposition(w, e.turn, e.current),
            comma,
            _proposition(w, last, e.goal),
            start,
            _digits(w, e.target),
        ],
        axis=-1,
    )
    # Each row's tail goes right behind its last clause.
    width, length = block.shape[-1], tail.shape[-1]
    tokens = np.zeros((count, k * width + length), dtype=np.int64)
    tokens[:, : k * width] = block.reshape(count, -1)
    begin = (e.sizes * width)[:, None]
    np.put_along_axis(tokens, begin + np.arange(length)[None], tail, axis=1)
    at = np.arange(tokens.shape[1])[None]
    valid = at < begin + length
    answer = valid & (at >= begin + length - w.size.digits)
    return Batch(
        torch.from_numpy(tokens), torch.from_numpy(valid), torch.from_numpy(answer), w.size.digits
    )


def text(tokens: list[int]) -> str:
    """Return tokens as the prompt's text."""
    return "".join(TOKENS[t] for t in tokens)


def parse(prompt: str) -> tuple[list[tuple[str, str, str]], str, str, str]:
    """Read a prompt back: clauses (name, input, output), current proposition, goal, answer.

    Raises:
        ValueError: it does not have the task's form.
    """
    body, mark, answer = prompt.partition("<START>")
    *fields, question = body.split("|")
    current, comma, goal = question.partition(",")
    if not mark or not comma or not fields:
        raise ValueError(f"not a prompt: {prompt}")
    clauses = []
    for field in fields:
        name, colon, clause = field.partition(":")
        start, arrow, end = clause.partition("->")
        if not colon or not arrow or not name.isdigit():
            raise ValueError(f"not a clause: {field}")
        clauses.append((name, start, end))
    return clauses, current, goal, answer
