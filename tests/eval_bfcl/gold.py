"""Answers written by hand or from the published ones, as a finished results folder."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from eval_bfcl import pools
from eval_bfcl.results import Results
from gatewright import artifact, bfcl


def call_text(*calls: tuple[str, dict[str, Any]]) -> str:
    """Write calls as our models do."""
    return "\n".join(
        f"<tool_call>\n{json.dumps({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls
    )


def gold_text(question: bfcl.Question) -> str:
    return call_text(*((c.name, c.arguments) for c in bfcl.gold_calls(question)))


def write_results(
    out: Path,
    pools_folder: Path,
    answer: Callable[[bfcl.Question, pools.Row], str | None],
    *,
    label: str = "gold",
    limit: int | None = None,
    failures: Mapping[str, str] | None = None,
    **run: Any,
) -> Path:
    """Finish a results folder as eval_bfcl.generate would, with the answers of a function.

    Where the function returns None nothing is stored.
    """
    manifest, cells = pools.load(pools_folder)
    split = manifest["extra"]["split"]
    questions = {q.id: q for q in bfcl.load_split(split)}
    results = Results(out, label, split)
    facts = {
        "label": label,
        "base": label,
        "family": "mamba2",
        "gate_scale": 1.0,
        "split": split,
        "questions": limit or manifest["extra"]["questions"],
        "of": manifest["extra"]["questions"],
        "pools": {k: manifest["extra"][k] for k in ("retriever", "beta", "utility")},
        "pools_hash": manifest["content_hash"],
        "cells": [c.name for c in cells],
        "style": "hermes",
        "dots": "keep",
        **run,
    }
    results.begin(facts)
    failed = 0
    for cell in cells:
        rows = []
        for n, row in enumerate(cell.rows[:limit]):
            text = answer(questions[row.id], row)
            if text is not None:
                rows.append({"id": row.id, "result": text, "latency": 0.25 + n})
        failed += len(cell.rows[:limit]) - len(rows)
        results.append(cell.name, rows)
        results.write_failures(cell.name, failures or {})
    extra = {**facts, "failed": failed}
    artifact.finish(out, kind="bfcl-results", parents={"pools": pools_folder}, extra=extra)
    return out
