"""BM25 over tool schemas: what a tool's document is, how it is split, and its scores.

The formula is Okapi BM25 with k1 = 1.5, b = 0.75 and an IDF floor of 0.25 times the mean IDF
(BM25Okapi of rank-bm25, Trotman et al. 2014).  Scores here are those of rank-bm25 to the last
bit, because every sum runs in the same order; only the documents that hold a query term are
visited, so ten thousand tools cost milliseconds a query.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

K1 = 1.5
B = 0.75
EPSILON = 0.25
ROUNDED_TO = 9
"""Decimals kept before sorting, so that equal documents tie in every implementation."""

MAX_DEPTH = 32
"""Deeper parameters of a schema are left out of its document."""

_WORD = re.compile(r"[a-z0-9]+")


def tokenize(text: str) -> list[str]:
    """Split lower-cased text into runs of ASCII letters and digits."""
    return _WORD.findall(text.lower())


def document_text(tool: Mapping[str, Any]) -> str:
    """Return the text a tool is found by: name, description, parameter names and descriptions.

    Parameters come in the schema's order, each followed by those nested inside it (the
    properties of an object, or of an array's items).

    Args:
        tool: a BFCL or JSON schema, or one in OpenAI's `{"type": "function", ...}` wrapping.
    """
    function = tool.get("function", tool)
    parts = [str(function.get("name", "")), str(function.get("description") or "")]
    _parameters(function.get("parameters"), parts)
    return " ".join(parts)


def _parameters(schema: Any, parts: list[str], depth: int = 0) -> None:
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return
    properties = schema.get("properties")
    if isinstance(properties, Mapping):
        for name, inner in properties.items():
            parts.append(str(name))
            if isinstance(inner, Mapping):
                parts.append(str(inner.get("description") or ""))
            _parameters(inner, parts, depth + 1)
    _parameters(schema.get("items"), parts, depth + 1)


class BM25:
    """An inverted index over tokenised documents.

    Args:
        documents: a token list (or its counts, in order of first occurrence) per document.

    Raises:
        ValueError: there is no document.
    """

    def __init__(self, documents: Iterable[Sequence[str] | Counter[str]]) -> None:
        counts = [d if isinstance(d, Counter) else Counter(d) for d in documents]
        if not counts:
            raise ValueError("BM25 needs at least one document")
        self.size = len(counts)
        lengths = np.array([c.total() for c in counts])
        # Without any token every score is 0, and ranking keeps the documents' order.
        average_length = max(int(lengths.sum()), 1) / self.size

        postings: dict[str, tuple[list[int], list[int]]] = {}
        for document, count in enumerate(counts):
            for word, frequency in count.items():
                where = postings.get(word)
                if where is None:
                    where = postings[word] = ([], [])
                where[0].append(document)
                where[1].append(frequency)

        self.idf = _idf({word: len(where[0]) for word, where in postings.items()}, self.size)
        self._postings = postings
        self._norm = K1 * (1 - B + B * lengths / average_length)
        self._weights: dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]] = {}

    def _weight(self, word: str) -> tuple[NDArray[np.int64], NDArray[np.float64]] | None:
        """Return the documents that hold `word` and what it adds to each one's score."""
        if word not in self._postings:
            return None
        if word not in self._weights:
            where, frequency = (np.array(x) for x in self._postings[word])
            gain = self.idf[word] * (frequency * (K1 + 1) / (frequency + self._norm[where]))
            self._weights[word] = (where, gain)
        return self._weights[word]

    def scores(self, query: Sequence[str]) -> NDArray[np.float64]:
        """Return the score of every document, shape (documents,).

        A word that stands twice in the query counts twice.
        """
        total = np.zeros(self.size)
        for word in query:
            found = self._weight(word)
            if found is not None:
                total[found[0]] += found[1]
        return total


def _idf(document_frequency: Mapping[str, int], size: int) -> dict[str, float]:
    idf: dict[str, float] = {}
    total = 0.0
    negative = []
    for word, frequency in document_frequency.items():
        value = math.log(size - frequency + 0.5) - math.log(frequency + 0.5)
        idf[word] = value
        total += value
        if value < 0:
            negative.append(word)
    floor = EPSILON * (total / max(len(idf), 1))
    for word in negative:
        idf[word] = floor
    return idf


def ranking(scores: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return document numbers, best first; scores equal to 9 decimals keep document order."""
    return np.argsort(-np.round(scores, ROUNDED_TO), kind="stable")
