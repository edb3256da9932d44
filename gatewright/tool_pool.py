"""Tool pools: rank a corpus of tools for a query, cut at k, make sure the right tool is in.

A pool is always cut from one full ranking, so pools of growing k are nested.  When the right
tool is not among the first k it replaces the last of them and then moves to a random place
(paper, section 5): whether it was `retrieved` or `injected` is kept apart.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gatewright import bm25
from gatewright.plackett_luce import generator


class ToolPool:
    """A ranked corpus of tools.

    Args:
        tools: BFCL or OpenAI schemas; their order breaks ties.

    Raises:
        ValueError: there are no tools.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self.tools = list(tools)
        self._counts = [_counts(tool) for tool in self.tools]
        self._index = bm25.BM25(self._counts)

    def __len__(self) -> int:
        return len(self.tools)

    def scores(
        self, query: str, instead: Mapping[int, Mapping[str, Any]] | None = None
    ) -> NDArray[np.float64]:
        """Return every tool's BM25 score for the query, shape (tools,).

        Args:
            instead: tool number -> schema that stands in its place for this query.  If any
                differs from the corpus's, the whole index is built again for this query,
                because document lengths and frequencies change.
        """
        index = self._index
        counts = {i: _counts(tool) for i, tool in (instead or {}).items()}
        if any(list(c.items()) != list(self._counts[i].items()) for i, c in counts.items()):
            index = bm25.BM25([counts.get(i, own) for i, own in enumerate(self._counts)])
        return index.scores(bm25.tokenize(query))

    def rank(self, query: str, instead: Mapping[int, Mapping[str, Any]] | None = None) -> list[int]:
        """Return all tool numbers, most relevant first (ties: corpus order)."""
        return self.order(self.scores(query, instead))

    @staticmethod
    def order(scores: NDArray[np.float64]) -> list[int]:
        """Return tool numbers by falling score (ties: corpus order)."""
        return [int(i) for i in bm25.ranking(scores)]


def _counts(tool: Mapping[str, Any]) -> Counter[str]:
    return Counter(bm25.tokenize(bm25.document_text(tool)))


@dataclasses.dataclass(frozen=True)
class Cut:
    """The pool of one query at one k.

    Attributes:
        items: the pool in prompt order, best first.
        ranks: 1-based rank of each correct item in the full ranking, before injection.
        retrieved: every correct item stood among the first k.
        injected: a correct item had to be put in.
    """

    items: list[int]
    ranks: list[int]
    retrieved: bool
    injected: bool


def cut(ranking: Sequence[int], k: int, correct: Sequence[int], key: Sequence[object]) -> Cut:
    """Take the first k of a ranking and inject what is correct but missing.

    Missing items replace the last ones that are not correct themselves, then each moves to a
    uniformly random place that depends on `key` (question id and seed) alone.

    Args:
        ranking: all items, best first.
        correct: the items that must be in the pool; may be empty.

    Raises:
        ValueError: k is smaller than the number of correct items.
    """
    if k < max(len(correct), 1):
        raise ValueError(f"a pool of {k} cannot hold {len(correct)} correct tools")
    place = {item: rank for rank, item in enumerate(ranking, start=1)}
    items = [int(i) for i in ranking[:k]]
    missing = [c for c in correct if c not in items]
    for _ in missing:
        last = max(i for i, item in enumerate(items) if item not in correct)
        del items[last]
    random = generator("injection", *key)
    for item in missing:
        # One uniform draw decides the place at every k, so pools of different k are paired.
        # The pool is one short of full here, so it has len + 1 places.
        items.insert(int(random.random() * (len(items) + 1)), item)
    return Cut(items, [place[c] for c in correct], not missing, bool(missing))
