"""Scores of two gated models, a Llama and two weak retrievers, whose rates are known beforehand."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eval_bfcl import pools, score
from eval_bfcl.results import Results
from gatewright import bfcl, recall_law
from tests.eval_bfcl.gold import call_text, gold_text, write_results

EVIL = (
    "</script><script>document.title='PWNED'</script><img src=x onerror=\"document.title='PWNED'\">"
)

STATE = dataclasses.asdict(recall_law.State(d=16, n=4, layers=1, vocab=512))


def n(question: bfcl.Question) -> int:
    return int(question.id.rsplit("_", 1)[1])


def model(level: int) -> Callable[[bfcl.Question, pools.Row], str]:
    """A model that is right on `level` of every 10 questions, fewer in larger pools."""

    def answer(q: bfcl.Question, row: pools.Row) -> str:
        if n(q) % 10 < level - (row.k > 1):
            return gold_text(q)
        return call_text(("made_up", {})) if n(q) % 2 else EVIL

    return answer


def write_scores(root: Path, make_pools: Callable[..., Path]) -> list[Path]:
    """Return scores of two gated models and a Llama with BM25, and of one with weak retrievers."""
    flags: dict[str, Any] = {"split": "simple_python", "pool_sizes": "1,4"}
    bm25 = make_pools(retriever="bm25", **flags)
    weak = [make_pools(retriever="plackett_luce", beta=b, **flags) for b in (0.05, 10.0)]
    runs: list[tuple[str, float | None, int, Path]] = [
        ("mamba2-s2", 2.0, 3, bm25),
        ("mamba2-s0.5", 0.5, 7, bm25),
        ("llama", None, 5, bm25),
        ("mamba2-s0.5", 0.5, 4, weak[0]),
        ("mamba2-s0.5", 0.5, 6, weak[1]),
    ]
    out = []
    for i, (label, scale, level, folder) in enumerate(runs):
        state = None if label == "llama" else STATE
        results = write_results(
            root / f"r{i}",
            folder,
            model(level),
            label=label,
            limit=40,
            gate_scale=scale,
            state=state,
        )
        prompts = {f"simple_python_{i}": f"tools\nshared line\nquestion {i}\n" for i in range(40)}
        for cell in ("pool_size=1/seed=0", "pool_size=4/seed=0"):
            Results(results, label, "simple_python").write_prompts(cell, prompts)
        score.main(score.Args(results=results, pools=folder, out=root / f"s{i}"))
        out.append(root / f"s{i}")
    return out
