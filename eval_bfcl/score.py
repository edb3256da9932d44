"""Judge a model's answers with the official checker and sort them into exclusive outcomes."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

from eval_bfcl import pools, tally
from eval_bfcl.outcomes import Judged, judge
from eval_bfcl.results import Results, read_answers
from gatewright import artifact, bfcl, cli
from gatewright.errors import UserError

KEPT_CHARS = 20_000
"""Longer raw outputs are cut in scores.jsonl (the results folder keeps them whole)."""


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
    own (see --official-env), and demand the same accuracy to the digit."""
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
        "prompt_tokens": answer.get("input_token_count"),
        "new_tokens": answer.get("output_token_count"),
        "latency_s": answer.get("latency"),
        "finish": answer.get("finish"),
        "over_context": bool(answer.get("over_context")),
    }
    return out


def judge_cell(
    results: Results, cell: pools.Cell, rows: list[pools.Row], run: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the scores of one (pool size, seed).

    Raises:
        UserError: an answer belongs to no question of the pools.
    """
    questions = {q.id: q for q in bfcl.load_split(results.split)}
    path = results.file(cell.name)
    answers = {a["id"]: a for a in read_answers(path)[0]} if path.is_file() else {}
    failures = {}
    failed_file = results.out / cell.name / "failures.jsonl"
    if failed_file.is_file():
        failures = {f["id"]: f["error"] for f in pools.read_jsonl(failed_file)}
    strange = answers.keys() - {row.id for row in rows}
    if strange:
        raise UserError(f"{path}: answers {min(strange)}, which the pools do not ask")
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


def main(args: Args) -> None:
    """Judge a model's answers with the official checker."""
    manifest = artifact.read_manifest(args.results, "bfcl-results", flag="--results")
    pools_manifest, cells = pools.load(args.pools)
    run = manifest["extra"]
    if run["pools_hash"] != pools_manifest["content_hash"]:
        raise UserError(
            f"--pools {args.pools}: these are not the pools that {args.results} was asked "
            f"({manifest['parents']['pools']['path']})"
        )
    results = Results(args.results, run["label"], run["split"])
    cells = [c for c in cells if c.name in run["cells"]]
    scores: list[dict[str, Any]] = []
    for cell in cells:
        scores += judge_cell(results, cell, cell.rows[: run["questions"]], run)
    # A lost answer would count as an error of the machinery, in no denominator.
    artifact.require_whole(args.results, "--results", (".json", ".jsonl"))
    facts = tally.run_facts(run)
    summary = [s for s in tally.summarise([(facts, scores)]) if s["seed"] == "all"]
    extra: dict[str, Any] = {**run, "summary": summary}
    parents = {"results": args.results, "pools": args.pools}
    with artifact.create(
        args.out, kind="bfcl-scores", config=args, parents=parents, extra=extra
    ) as tmp:
        if args.official:
            from eval_bfcl import official

            extra["official"] = official.compare(results, cells, scores, run, args.official_env)
            for line in extra["official"]:
                print(f"official {line['cell']}: {line['official_accuracy']} = ours")
        with open(tmp / "scores.jsonl", "w", encoding="utf-8") as f:
            f.writelines(json.dumps(row) + "\n" for row in scores)
        for cell in cells:
            prompts = args.results / cell.name / "prompts.jsonl.gz"
            if prompts.is_file():
                (tmp / cell.name).mkdir(parents=True)
                shutil.copyfile(prompts, tmp / cell.name / prompts.name)
        write_official_layout(tmp, results, cells, scores)
    print(tally.table(summary))
    print(args.out)


def write_official_layout(
    folder: Path, results: Results, cells: list[pools.Cell], scores: list[dict[str, Any]]
) -> None:
    """Write a score file per cell as the official runner does: a header line, then failures."""
    for cell in cells:
        rows = [s for s in scores if (s["k"], s["seed"]) == (cell.k, cell.seed)]
        judged = [s for s in rows if s["outcome"] != "error"]
        right = sum(bool(s["official_valid"]) for s in judged)
        path = bfcl.result_file(folder / cell.name / "score", results.label, results.split)
        path = path.with_name(path.name.replace("_result.json", "_score.json"))
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
