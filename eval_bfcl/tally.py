"""From scored answers to figures: rates with Wilson intervals, paired tests, the table.

Errors of the machinery are counted apart and are in no rate's denominator.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eval_bfcl import ceiling
from eval_bfcl.outcomes import OUTCOMES
from eval_bfcl.pools import read_jsonl
from gatewright import artifact
from gatewright.statistics import Interval, mcnemar_exact, wilson_interval

Score = Mapping[str, Any]
Facts = Mapping[str, Any]


def run_facts(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is the same for all answers of one results folder."""
    return {
        "model": run["label"],
        "base": run["base"],
        "family": run["family"],
        "gate_scale": run["gate_scale"],
        "sft_seed": run.get("sft_seed"),
        "state": run.get("state"),
        "split": run["split"],
        "questions": run["questions"],
        "of": run["of"],
        **run["pools"],
    }


def load(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the facts and the scores of a folder of eval_bfcl.score.

    Raises:
        UserError: the folder is not finished, of another kind, or damaged.
    """
    manifest = artifact.read_manifest(folder, "bfcl-scores", flag="--scores")
    return run_facts(manifest["extra"]), read_jsonl(Path(folder) / "scores.jsonl")


def counts_for(score: Score, rate: str) -> bool:
    """Return whether a judged answer counts for a rate.

    `right_tool` is an answer that called just what was wanted, whatever its arguments.
    """
    if rate == "valid_call":
        return bool(score["valid_call"])
    outcomes = {
        "accuracy": ("correct",),
        "right_tool": ("correct", "wrong_arguments"),
        "hallucination": ("hallucinated",),
    }
    return score["outcome"] in outcomes[rate]


def _rates(scores: Sequence[Score]) -> dict[str, Any]:
    counts = Counter(s["outcome"] for s in scores)
    judged = [s for s in scores if s["outcome"] != "error"]
    n = len(judged)
    valid_calls = sum(counts_for(s, "valid_call") for s in judged)
    right_tool = sum(counts_for(s, "right_tool") for s in judged)
    retrieved = [s for s in judged if s["retrieved"]]
    with_gold = [s for s in scores if s["gold"] is not None]
    out: dict[str, Any] = {"n": len(scores), "judged": n}
    out |= {f"n_{name}": counts[name] for name in OUTCOMES}
    for name, part, whole in (
        ("accuracy", counts["correct"], n),
        ("hallucination", counts["hallucinated"], n),
        ("right_tool", right_tool, n),
        ("valid_call", valid_calls, n),
        ("hallucination_of_valid_calls", counts["hallucinated"], valid_calls),
        ("accuracy_official", sum(bool(s["official_valid"]) for s in judged), n),
        ("accuracy_with_defaults", sum(bool(s["defaults_valid"]) for s in judged), n),
        (
            "accuracy_given_retrieved",
            sum(s["outcome"] == "correct" for s in retrieved),
            len(retrieved),
        ),
        ("recall", sum(s["retrieved"] for s in with_gold), len(with_gold)),
    ):
        out |= _flat(name, wilson_interval(part, whole))
    tokens = [s["new_tokens"] for s in judged if s["new_tokens"] is not None]
    prompt = [s["prompt_tokens"] for s in judged if s["prompt_tokens"] is not None]
    out["mean_prompt_tokens"] = sum(prompt) / len(prompt) if prompt else None
    out["mean_new_tokens"] = sum(tokens) / len(tokens) if tokens else None
    out["over_context"] = sum(s["over_context"] for s in scores)
    return out


def _flat(name: str, interval: Interval) -> dict[str, float | None]:
    known = not math.isnan(interval.value)
    return {
        name: interval.value if known else None,
        f"{name}_low": interval.low if known else None,
        f"{name}_high": interval.high if known else None,
    }


def summarise(runs: Iterable[tuple[Facts, Sequence[Score]]]) -> list[dict[str, Any]]:
    """Return a row per (model, pools, k) and seed, and one with all seeds pooled.

    Pooled rows take each (question, seed) as one trial; `accuracy_sd_over_seeds` says how much
    the seeds differ.
    """
    rows: list[dict[str, Any]] = []
    for facts, scores in runs:
        by_k: dict[int, dict[int, list[Score]]] = defaultdict(lambda: defaultdict(list))
        for score in scores:
            by_k[score["k"]][score["seed"]].append(score)
        for k, by_seed in sorted(by_k.items()):
            head = {n: v for n, v in facts.items() if n != "state"} | {"k": k}
            head |= ceiling.predict(facts.get("state"), k)
            each = [
                {**head, "seed": seed, **_rates(part)} for seed, part in sorted(by_seed.items())
            ]
            pooled = {
                **head,
                "seed": "all",
                **_rates([s for part in by_seed.values() for s in part]),
                "seeds": len(by_seed),
                "accuracy_sd_over_seeds": _sd([r["accuracy"] for r in each]),
            }
            rows += [*each, pooled]
    return rows


def _sd(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    if len(known) < 2:
        return None
    mean = sum(known) / len(known)
    return math.sqrt(sum((v - mean) ** 2 for v in known) / (len(known) - 1))


TESTED = ("accuracy", "right_tool", "hallucination")


@dataclasses.dataclass(frozen=True)
class Paired:
    """Two models on the same pools: who shows something where the other does not."""

    a: str
    b: str
    setting: str
    k: int
    rate: str
    only_a: int
    only_b: int
    n: int
    p: float


def paired_tests(
    runs: Sequence[tuple[Facts, Sequence[Score]]],
    apart: Callable[[Facts, Facts], bool] = lambda a, b: False,
) -> list[Paired]:
    """Return McNemar's exact test for every two runs of the same pools, per k.

    Always of accuracy; of the right tool and of hallucination where the two differ at all.
    Only questions that both models were judged on count; several seeds of one question are
    pairs of their own.

    Args:
        apart: pairs of runs to leave out.
    """
    shown: list[tuple[Facts, dict[int, dict[tuple[str, int], Score]]]] = []
    for facts, scores in runs:
        by_k: dict[int, dict[tuple[str, int], Score]] = defaultdict(dict)
        for s in scores:
            if s["outcome"] != "error":
                by_k[s["k"]][(s["id"], s["seed"])] = s
        shown.append((facts, by_k))
    tests = []
    for i, (a, of_a) in enumerate(shown):
        for b, of_b in shown[i + 1 :]:
            if setting(a) != setting(b) or apart(a, b):
                continue
            for k, rate in itertools.product(sorted(of_a.keys() & of_b.keys()), TESTED):
                both = of_a[k].keys() & of_b[k].keys()
                pairs = [(counts_for(of_a[k][x], rate), counts_for(of_b[k][x], rate)) for x in both]
                only_a, only_b = pairs.count((True, False)), pairs.count((False, True))
                if rate == "accuracy" or only_a or only_b:
                    p = mcnemar_exact(only_a, only_b)
                    names = a["model"], b["model"], setting(a), k, rate
                    tests.append(Paired(*names, only_a, only_b, len(both), p))
    return tests


def setting(facts: Facts) -> str:
    """Return the name of what a model was asked: split, retriever and its strength."""
    name = f"{facts['split']}, {facts['retriever']}"
    if facts["beta"] is not None:
        name += f" beta {facts['beta']:g} ({facts['utility']})"
    return name


def scale_text(scale: Any) -> str:
    return "-" if scale is None else f"{scale:g}" if isinstance(scale, (int, float)) else str(scale)


def percent(row: Mapping[str, Any], name: str) -> str:
    """Return a rate with its interval, in per cent."""
    value = row[name]
    if value is None:
        return "n/a"
    return f"{100 * value:5.1f} [{100 * row[name + '_low']:.1f}, {100 * row[name + '_high']:.1f}]"


def table(summary: Sequence[Mapping[str, Any]]) -> str:
    """Return the pooled rows as a text table: accuracy and hallucination with 95% intervals."""
    header = ["model", "gate scale", "setting", "k", "n", "errors", "accuracy %", "hallucination %"]
    header += ["recall %"]
    lines = [header]
    for row in summary:
        if row["seed"] != "all":
            continue
        recall = "n/a" if row["recall"] is None else f"{100 * row['recall']:.2f}"
        lines.append(
            [
                str(row["model"]),
                scale_text(row["gate_scale"]),
                setting(row),
                str(row["k"]),
                str(row["judged"]),
                str(row["n_error"]),
                percent(row, "accuracy"),
                percent(row, "hallucination"),
                recall,
            ]
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def to_json(tests: Sequence[Paired]) -> list[dict[str, Any]]:
    return json.loads(json.dumps([dataclasses.asdict(t) for t in tests]))
