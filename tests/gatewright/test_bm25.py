import random

import numpy as np
import pytest
from rank_bm25 import BM25Okapi

from gatewright import bm25


def test_tokens_are_lower_case_letters_and_digits() -> None:
    assert bm25.tokenize("Find_the AREA, of 3.5m² (naïve)") == [
        *("find", "the", "area", "of", "3", "5m", "na", "ve")
    ]


def test_document_text_follows_the_schema_into_nested_parameters() -> None:
    tool = {
        "name": "db.query",
        "description": "Query.",
        "parameters": {
            "type": "dict",
            "properties": {
                "table": {"type": "string", "description": "Table name."},
                "where": {
                    "type": "array",
                    "description": "Conditions.",
                    "items": {
                        "type": "dict",
                        "properties": {"field": {"type": "string", "description": "Column."}},
                    },
                },
                "bare": {"type": "integer"},
            },
        },
    }
    assert bm25.tokenize(bm25.document_text(tool)) == [
        *("db", "query", "query", "table", "table", "name", "where", "conditions"),
        *("field", "column", "bare"),
    ]
    assert bm25.document_text({"type": "function", "function": tool}) == bm25.document_text(tool)
    assert bm25.document_text({"name": "f"}).split() == ["f"]


def corpus(size: int, seed: int, vocabulary: int = 900) -> tuple[list[list[str]], list[list[str]]]:
    """Return documents and queries with Zipf words, some of which are in most documents."""
    rng = random.Random(seed)
    words = [f"w{i}" for i in range(vocabulary)]
    weights = [1 / (i + 1) for i in range(vocabulary)]

    def text(length: int) -> list[str]:
        return rng.choices(words, weights, k=length)

    docs = [text(rng.randint(3, 60)) for _ in range(size)]
    docs[1] = list(docs[0])  # equal documents tie
    return docs, [[*text(12), "unheard", "w0"] for _ in range(25)]


@pytest.mark.parametrize(("size", "seed"), [(2, 0), (40, 1), (700, 2)])
def test_scores_equal_rank_bm25_bit_for_bit(size: int, seed: int) -> None:
    docs, queries = corpus(size, seed)
    ours, peer = bm25.BM25(docs), BM25Okapi(docs)
    assert any(v < 0.3 for v in ours.idf.values())  # the IDF floor is in play
    for query in queries:
        np.testing.assert_array_equal(ours.scores(query), peer.get_scores(query))


def test_ten_thousand_tools_are_ranked_as_by_rank_bm25() -> None:
    docs, queries = corpus(10_000, 3, vocabulary=5000)
    ours, peer = bm25.BM25(docs), BM25Okapi(docs)
    for query in queries[:4]:
        expected = np.argsort(-np.round(peer.get_scores(query), 9), kind="stable")
        np.testing.assert_array_equal(bm25.ranking(ours.scores(query)), expected)


def test_ties_keep_document_order() -> None:
    assert bm25.ranking(np.array([1.0, 2.0, 2.0 + 1e-12, 1.0])).tolist() == [1, 2, 0, 3]


def test_no_documents_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        bm25.BM25([])


def test_documents_without_a_word_tie() -> None:
    index = bm25.BM25([[], []])
    assert index.scores(["alpha"]).tolist() == [0, 0]
