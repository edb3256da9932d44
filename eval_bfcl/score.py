"""Judge a model's answers with the official checker and sort them into exclusive outcomes."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from eval_bfcl import pools, scored, tally
from eval_bfcl.outcomes import Judged, judge
from eval_bfcl.prompting import Dots
from eval_bfcl.results import Results, read_answers
from gatewright import artifact, bfcl, cli
from gatewright.chat import STYLES
from gatewright.errors import UserError

KEPT_CHARS = 20_000
"""Longer raw outputs are cut in scores.jsonl (the results folder keeps them whole)."""

AGAIN = "run eval_bfcl.generate again"

FACTS: Mapping[str, tuple[type, ...]] = {
    **scored.FACTS,
    "pools_hash": (str,),
    "cells": (list,),
    "style": (str,),
    "dots": (str,),
    "failed": (int,),
}
"""What a results folder's manifest says in `extra` and is asked of it here, with its JSON type."""

ANSWER: Mapping[str, tuple[type, ...]] = {
    "input_token_count": (float, type(None)),
    "output_token_count": (float, type(None)),
    "latency": (float, type(None)),
}
"""JSON types of what a stored answer may have beside its text."""


@dataclasses.dataclass
class Args:
    """Flags of `python -m eval_bfcl.score`."""

    results: Path
    """Folder of eval_bfcl.generate."""
    pools: Path
    """The pools folder that was asked."""
    out: Path
    """Folder to create."""
    official: bool = False
    """Also run the official `bfcl evaluate` on the same result files, in an environment of its
    own (see --official-env), and demand the same accuracy to the digit.  Our scores are kept if
    they differ, and the exit code is 2."""
    official_env: Path = Path("runs/bfcl_official_env")
    """Virtual environment with bfcl-eval and all its pins; made on first use (minutes, 2 GB)."""


def score_row(
    row: pools.Row, cell: pools.Cell, answer: dict[str, Any] | None, judged: Judged
) -> dict[str, Any]:
    """Return one line of scores.jsonl."""
    answer = answer or {}
    called = judged.calls[0].name if judged.calls else None
    text = answer.get("result")
    out: dict[str, Any] = {
        "id": row.id,
        "k": cell.k,
        "seed": cell.seed,
        "outcome": judged.outcome,
        "called": called,
        "official_valid": judged.official_valid,
        "retrieved": row.retrieved,
        "injected": row.injected,
        "gold": row.gold,
        "gold_rank": row.gold_rank,
        "valid_call": judged.valid_call,
        "defaults_valid": judged.defaults_valid,
        "calls": [dataclasses.asdict(c) for c in judged.calls],
        "error_type": judged.error_type,
        "error": judged.error,
        "names": row.names,
        "raw": text[:KEPT_CHARS] if isinstance(text, str) else None,
        "raw_chars": len(text) if isinstance(text, str) else None,  # more than `raw` if it is cut
        "prompt_tokens": answer.get("input_token_count"),
        "new_tokens": answer.get("output_token_count"),
        "latency_s": answer.get("latency"),
        "finish": answer.get("finish"),
        "over_context": bool(answer.get("over_context")),
    }
    return out


def stored_answers(
    results: Results, cell: pools.Cell, rows: list[pools.Row]
) -> dict[str, dict[str, Any]]:
    """Return the answers of one (pool size, seed) by question id.

    Raises:
        UserError: an answer belongs to no question of the pools, or a line is damaged.
    """
    path = results.file(cell.name)
    answers: dict[str, dict[str, Any]] = {}
    asked = {row.id for row in rows}
    for number, answer in enumerate(read_answers(path)[0] if path.is_file() else [], start=1):
        if answer["id"] not in asked:
            raise UserError(f"{path}:{number}: answers {answer['id']}, which the pools do not ask")
        for name, types in ANSWER.items():
            if wrong := artifact.wrong_type(answer.get(name), types):
                raise UserError(f"{path}:{number}: {name} is {wrong}; remove the line")
        answers[answer["id"]] = answer
    return answers


def stored_failures(results: Results, cell: pools.Cell) -> dict[str, str]:
    """Return the errors of one (pool size, seed) by question id.

    Raises:
        UserError: a line is not what eval_bfcl.generate writes.
    """
    path = results.out / cell.name / "failures.jsonl"
    failures = {}
    for number, row in enumerate(pools.read_jsonl(path, AGAIN) if path.is_file() else [], start=1):
        for name in ("id", "error"):
            if wrong := artifact.wrong_type(row.get(name), (str,)):
                raise UserError(f"{path}:{number}: {name} is {wrong}; remove the line")
        failures[row["id"]] = row["error"]
    return failures


def judge_cell(
    results: Results,
    cell: pools.Cell,
    rows: list[pools.Row],
    run: Mapping[str, Any],
    answers: Mapping[str, dict[str, Any]],
) -> list[dict[str, Any]]:
    """Return the scores of one (pool size, seed).

    Raises:
        UserError: the list of failures is damaged.
    """
    questions = {q.id: q for q in bfcl.load_split(results.split)}
    failures = stored_failures(results, cell)
    out = []
    for row in rows:
        answer = answers.get(row.id)
        if answer is None:
            reason = failures.get(row.id, "no answer is stored")
            judged = Judged("error", None, False, [], "machinery", reason)
        elif not isinstance(answer.get("result"), str):
            judged = Judged("error", None, False, [], "machinery", "the result is not text")
        else:
            judged = judge(questions[row.id], row, answer["result"], run["style"], run["dots"])
        out.append(score_row(row, cell, answer, judged))
    return out


def chosen_cells(
    args: Args,
    manifest: Mapping[str, Any],
    pools_manifest: Mapping[str, Any],
    cells: Sequence[pools.Cell],
) -> list[pools.Cell]:
    """Return the cells of the pools that a results folder answers.

    Raises:
        UserError: they are other pools than it was asked, or its manifest names what is none.
    """
    run, named = manifest["extra"], args.results / artifact.MANIFEST
    for name, known in (("style", (*STYLES, "python")), ("dots", get_args(Dots))):
        if run[name] not in known:
            raise UserError(
                f"{named}: extra.{name} is {run[name]!r}, not one of {', '.join(known)}; {AGAIN}"
            )
    if run["pools_hash"] != pools_manifest["content_hash"]:
        asked = manifest.get("parents", {}).get("pools", {}).get("path", "others")
        raise UserError(
            f"--pools {args.pools}: these are not the pools that {args.results} was asked ({asked})"
        )
    split = pools_manifest["extra"]["split"]
    if run["split"] != split:
        raise UserError(f"{named}: extra.split is {run['split']!r}, its pools' {split!r}; {AGAIN}")
    if not run["cells"] or not all(isinstance(name, str) for name in run["cells"]):
        raise UserError(f"{named}: extra.cells is no list of pool cells; {AGAIN}")
    absent = set(run["cells"]) - {c.name for c in cells}
    if absent:
        raise UserError(f"--pools {args.pools}: lacks {min(absent)}, which {args.results} answers")
    chosen = [c for c in cells if c.name in run["cells"]]
    most = min(len(c.rows) for c in chosen)
    if not 1 <= run["questions"] <= most:
        raise UserError(
            f"{named}: extra.questions is {run['questions']}, and --pools holds {most}; {AGAIN}"
        )
    return chosen


def main(args: Args) -> None:
    """Judge a model's answers with the official checker."""
    manifest = artifact.read_manifest(args.results, "bfcl-results", flag="--results")
    pools_manifest, cells = pools.load(args.pools)
    artifact.require_extra(args.results, manifest, FACTS)
    facts = scored.read_facts(args.results, manifest)
    run = manifest["extra"]
    cells = chosen_cells(args, manifest, pools_manifest, cells)
    results = Results(args.results, run["label"], run["split"])
    scores: list[dict[str, Any]] = []
    missing = 0
    for cell in cells:
        rows = cell.rows[: run["questions"]]
        answers = stored_answers(results, cell, rows)
        missing += len(rows) - len(answers)
        scores += judge_cell(results, cell, rows, run, answers)
    # A lost answer would count as an error of the machinery, in no denominator.
    artifact.require_whole(args.results, "--results", (".json", ".jsonl"))
    if missing != run["failed"]:
        raise UserError(
            f"--results {args.results}: its {artifact.MANIFEST} says {run['failed']} failed, but "
            f"{missing} answers are missing; copy the folder again, or {AGAIN}"
        )
    summary = [s for s in tally.summarise([(facts, scores)]) if s["seed"] == "all"]
    extra: dict[str, Any] = {**run, "summary": summary}
    parents = {"results": args.results, "pools": args.pools}
    with artifact.create(
        args.out, kind="bfcl-scores", config=args, parents=parents, extra=extra
    ) as tmp:
        with open(tmp / "scores.jsonl", "w", encoding="utf-8") as f:
            f.writelines(json.dumps(row) + "\n" for row in scores)
        for cell in cells:
            prompts = args.results / cell.name / "prompts.jsonl.gz"
            if prompts.is_file():
                (tmp / cell.name).mkdir(parents=True)
                shutil.copyfile(prompts, tmp / cell.name / prompts.name)
        write_official_layout(tmp, results, cells, scores)
        if args.official:
            extra |= compare(results, cells, scores, run, args.official_env)
    print(tally.table(summary))
    print(args.out)
    if "official_failed" in extra:
        raise UserError(f"--official: {extra['official_failed']} (our scores are in {args.out})")


def compare(
    results: Results,
    cells: list[pools.Cell],
    scores: list[dict[str, Any]],
    run: dict[str, Any],
    env: Path,
) -> dict[str, Any]:
    """Return what the manifest says of the comparison, also if it failed: scores outlive that."""
    from eval_bfcl import official

    try:
        lines = official.compare(results, cells, scores, run, env)
    except UserError as e:
        return {"official_failed": str(e)}
    for line in lines:
        print(official.said(line))
    return {"official": lines}


def write_official_layout(
    folder: Path, results: Results, cells: list[pools.Cell], scores: list[dict[str, Any]]
) -> None:
    """Write a score file per cell as the official runner does: a header line, then failures."""
    for cell in cells:
        rows = [s for s in scores if (s["k"], s["seed"]) == (cell.k, cell.seed)]
        judged = [s for s in rows if s["outcome"] != "error"]
        right = sum(bool(s["official_valid"]) for s in judged)
        path = bfcl.score_file(folder / cell.name / "score", results.label, results.split)
        path.parent.mkdir(parents=True)
        header = {
            "accuracy": right / len(judged) if judged else 0.0,
            "correct_count": right,
            "total_count": len(judged),
        }
        wrong = [
            {
                "id": s["id"],
                "model_name": results.label,
                "test_category": results.split,
                "valid": False,
                "error": [s["error"]],
                "error_type": s["error_type"],
                "model_result_raw": s["raw"],
                "model_result_decoded": [{c["name"]: c["arguments"]} for c in s["calls"]],
            }
            for s in judged
            if not s["official_valid"]
        ]
        with open(path, "w", encoding="utf-8") as f:
            f.writelines(json.dumps(line) + "\n" for line in [header, *wrong])


if __name__ == "__main__":
    cli.run(main, Args, prog="python -m eval_bfcl.score")
