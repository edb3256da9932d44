"""Which tools a training example shows: its own plus distractors, in a pool of random size.

The paper (section 5) trains on pools of a size drawn uniformly from 1..k.  An example's pool
holds the tools that its calls need; then the other tools it came with and, beyond those,
distractors from the tools of the whole corpus, both by BM25 rank for the first user turn.
Order is best first by default.  A called tool that BM25 does not place within the pool's
size stands at a uniformly random position, as in evaluation.
"""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gatewright import bm25
from gatewright.plackett_luce import generator

Order = Literal["best-first", "random", "best-last"]


class ToolCorpus:
    """The distinct tools of a data set, bounded in number, each name's first schema.

    When there are more than `limit` names, those with the smallest keyed hashes stay: a
    uniform sample that does not depend on the rows' order and needs memory for `limit` tools
    only.

    Args:
        limit: most tools to hold.
        seed: which sample.

    Attributes:
        seen_over_limit: how often a tool came that there was no room for (the same one may
            come again: their names are not kept).
    """

    def __init__(self, limit: int, seed: int = 0) -> None:
        self.limit = limit
        self._key = f"tools:{seed}".encode()
        self._held: dict[str, tuple[int, str]] = {}  # name -> (arrival, JSON of the tool)
        self._largest: list[tuple[int, str]] = []  # heap of (-hash, name)
        self.seen_over_limit = 0
        self._arrivals = 0

    def add(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Take in OpenAI tools; a name that is held keeps its first schema."""
        for tool in tools:
            name = tool["function"]["name"]
            if name in self._held:
                continue
            digest = hashlib.blake2b(name.encode(), key=self._key, digest_size=8).digest()
            rank = int.from_bytes(digest, "big")
            if len(self._held) >= self.limit:
                self.seen_over_limit += 1
                if rank >= -self._largest[0][0]:
                    continue
                _, evicted = heapq.heappop(self._largest)
                del self._held[evicted]
            heapq.heappush(self._largest, (-rank, name))
            self._held[name] = (self._arrivals, json.dumps(tool, ensure_ascii=False))
            self._arrivals += 1

    def __len__(self) -> int:
        return len(self._held)

    def tools(self) -> list[dict[str, Any]]:
        """Return the tools in the order in which they first came."""
        return [json.loads(text) for _, text in sorted(self._held.values())]


@dataclasses.dataclass(frozen=True)
class Pool:
    """The tools of one example.

    Attributes:
        tools: OpenAI tools in prompt order.
        drawn: the size drawn from 1..k.
        own_left_out: own tools that no call needs and that the drawn size had no room for.
        injected: a called tool stood outside the first `len(tools)` of the ranking.
    """

    tools: list[dict[str, Any]]
    drawn: int
    own_left_out: int
    injected: bool


class PoolBuilder:
    """Draws pools for examples from one tool corpus.

    Args:
        corpus: OpenAI tools with distinct names.
        max_pool_size: k; sizes are uniform in 1..k.
        order: best-first, random or best-last.
        seed: with an example's id and copy number it fixes everything random about it.

    Raises:
        ValueError: `max_pool_size` is not in 1..len(corpus).
    """

    def __init__(
        self,
        corpus: Sequence[dict[str, Any]],
        max_pool_size: int,
        order: Order = "best-first",
        seed: int = 0,
    ) -> None:
        if not 1 <= max_pool_size <= len(corpus):
            raise ValueError(f"max_pool_size {max_pool_size} is not in 1..{len(corpus)}")
        self.corpus = list(corpus)
        self.max_pool_size = max_pool_size
        self.order = order
        self.seed = seed
        counts = [_counts(tool) for tool in self.corpus]
        self._index = bm25.BM25(counts)
        self._average_length = max(sum(c.total() for c in counts), 1) / len(counts)
        self._slot = {tool["function"]["name"]: i for i, tool in enumerate(self.corpus)}

    def rank(
        self, query: str, own: Sequence[dict[str, Any]]
    ) -> tuple[NDArray[np.int64], list[int]]:
        """Return the ranking of all tools and where the example's own tools stand in it.

        Slots below `len(corpus)` are the corpus's, an own tool takes its name's slot; own
        tools that the corpus does not hold get further slots.  An own tool is scored by its
        own schema, with the corpus's statistics.

        Returns:
            slots, best first, shape (slots,); the slot of each own tool.
        """
        words = bm25.tokenize(query)
        scores = self._index.scores(words)
        slots: list[int] = []
        further: list[float] = []
        for tool in own:
            score = self._score(words, tool)
            slot = self._slot.get(tool["function"]["name"])
            if slot is None:
                slot = len(self.corpus) + len(further)
                further.append(score)
            else:
                scores[slot] = score
            slots.append(slot)
        return bm25.ranking(np.concatenate([scores, np.array(further)])), slots

    def _score(self, words: Sequence[str], tool: Mapping[str, Any]) -> float:
        count = _counts(tool)
        norm = bm25.K1 * (1 - bm25.B + bm25.B * count.total() / self._average_length)
        total = 0.0
        for word in words:
            idf = self._index.idf.get(word)
            if idf is not None and count[word]:
                total += idf * (count[word] * (bm25.K1 + 1) / (count[word] + norm))
        return total

    def draw(
        self,
        query: str,
        own: Sequence[dict[str, Any]],
        called: Sequence[str],
        key: Sequence[object],
        size: int | None = None,
    ) -> Pool:
        """Return the pool of one example.

        Args:
            query: the text that tools are ranked by.
            own: the example's tools, with distinct names.
            called: names that its calls need, each among `own`.
            key: the example's id (and copy number).
            size: the pool's size instead of a drawn one.
        """
        random = generator("sft-pool", self.seed, *key)
        drawn = int(random.integers(1, self.max_pool_size + 1)) if size is None else size
        k = max(drawn, len(called))
        ranking, own_slots = self.rank(query, own)
        by_slot = dict(zip(own_slots, own, strict=True))
        needed = [s for s, tool in by_slot.items() if tool["function"]["name"] in set(called)]
        place = {slot: int(np.flatnonzero(ranking == slot)[0]) for slot in own_slots}
        own_best_first = sorted(own_slots, key=place.__getitem__)
        members = dict.fromkeys(needed)
        for rank, slot in enumerate([*own_best_first, *ranking[: k + len(own)].tolist()]):
            if len(members) >= k:
                break
            members.setdefault(slot)
            place.setdefault(slot, rank - len(own))
        pool = sorted(members, key=place.__getitem__)
        late = [slot for slot in needed if place[slot] >= k]
        if self.order == "random":
            random.shuffle(pool)
        else:
            if self.order == "best-last":
                pool.reverse()
            for slot in late:
                pool.remove(slot)
                pool.insert(int(random.integers(0, len(pool) + 1)), slot)
        return Pool(
            [by_slot.get(slot) or self.corpus[slot] for slot in pool],
            drawn,
            len(set(own_slots) - set(members)),
            bool(late),
        )


def _counts(tool: Mapping[str, Any]) -> Counter[str]:
    return Counter(bm25.tokenize(bm25.document_text(tool)))
