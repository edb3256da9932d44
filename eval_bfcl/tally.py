"""From scored answers to figures: rates with Wilson intervals, and their table.

Errors of the machinery are counted apart and are in no rate's denominator.  Pool seeds ask the
same questions, so an interval counts each question once, however many seeds asked it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from eval_bfcl import ceiling
from eval_bfcl.outcomes import OUTCOMES
from gatewright.errors import UserError
from gatewright.statistics import Interval, wilson_interval

Score = Mapping[str, Any]
Facts = Mapping[str, Any]
Run = tuple[Facts, Sequence[Score]]
Hits = Mapping[tuple[str, int], bool]
"""By (question, pool seed): whether a judged answer counts for a rate."""

SETTINGS = ("backend", "prompt", "style", "dots", "max_new_tokens", "dtype")
"""How a model was asked, beside the pools: None where the scores folder does not say."""


NO_COLUMNS = ("state", "official")
"""Facts that hold several values: in no row of a summary."""


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
        **{name: run.get(name) for name in SETTINGS},
        "official": official_run(run),
    }


def official_run(run: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return how the official run compares with ours; None where `--official` was not given.

    `failed` is why it could not confirm our accuracy, else None; `left_out` counts the answers
    that it cannot judge.

    Raises:
        UserError: the manifest's `official` is not as eval_bfcl.score writes it.
    """
    lines, failed = run.get("official"), run.get("official_failed")
    if lines is None and failed is None:
        return None
    try:
        left_out = sum(len(dict(line).get("left_out", ())) for line in lines or ())
    except (TypeError, ValueError) as e:
        raise UserError(
            f"--scores: extra.official in the manifest of {run['label']} is damaged ({e}); run "
            "eval_bfcl.score again"
        ) from e
    return {"failed": None if failed is None else str(failed), "left_out": left_out}


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


def hits(scores: Iterable[Score], rate: str, k: int) -> dict[tuple[str, int], bool]:
    """Return whether the judged answers at k count for a rate.

    Where no tool is right (a null gold), none can be the right one: those do not count.
    """
    return {
        (s["id"], s["seed"]): counts_for(s, rate)
        for s in scores
        if s["k"] == k
        and s["outcome"] != "error"
        and (rate != "right_tool" or s["gold"] is not None)
    }


def interval(mean_times_n: float, n: int) -> Interval:
    """Return Wilson's interval of a mean over n questions, each of which may be a fraction.

    Args:
        mean_times_n: the sum of the questions' means over their seeds.
    """
    return wilson_interval(mean_times_n, n)


def _rates(scores: Sequence[Score]) -> dict[str, Any]:
    counts = Counter(s["outcome"] for s in scores)
    judged = [s for s in scores if s["outcome"] != "error"]
    with_gold = [s for s in scores if s["gold"] is not None]
    judged_gold = [s for s in judged if s["gold"] is not None]
    retrieved = [s for s in judged_gold if s["retrieved"]]
    valid_calls = [s for s in judged if s["valid_call"]]
    out: dict[str, Any] = {"n": len(scores), "judged": len(judged)}
    out["judged_questions"] = len({s["id"] for s in judged})
    out |= {f"n_{name}": counts[name] for name in OUTCOMES}

    def add(name: str, rows: Sequence[Score], hit: Callable[[Score], Any]) -> None:
        part, questions = sum(bool(hit(s)) for s in rows), len({s["id"] for s in rows})
        out.update(_flat(name, interval(part * questions / max(len(rows), 1), questions)))

    add("accuracy", judged, lambda s: counts_for(s, "accuracy"))
    add("hallucination", judged, lambda s: counts_for(s, "hallucination"))
    add("right_tool", judged_gold, lambda s: counts_for(s, "right_tool"))
    add("valid_call", judged, lambda s: counts_for(s, "valid_call"))
    add("hallucination_of_valid_calls", valid_calls, lambda s: counts_for(s, "hallucination"))
    add("accuracy_official", judged, lambda s: s["official_valid"])
    add("accuracy_with_defaults", judged, lambda s: s["defaults_valid"])
    add("accuracy_given_retrieved", retrieved, lambda s: counts_for(s, "accuracy"))
    add("recall", with_gold, lambda s: s["retrieved"])
    tokens = [s["new_tokens"] for s in judged if s["new_tokens"] is not None]
    prompt = [s["prompt_tokens"] for s in judged if s["prompt_tokens"] is not None]
    out["mean_prompt_tokens"] = sum(prompt) / len(prompt) if prompt else None
    out["mean_new_tokens"] = sum(tokens) / len(tokens) if tokens else None
    out["over_context"] = sum(s["over_context"] for s in scores)
    return out | variety(judged)


def variety(judged: Sequence[Score]) -> dict[str, Any]:
    """Return how much answers vary with what was asked, which no rate tells.

    `different_answers` counts distinct raw texts (as kept: the longest are cut, see
    `score.KEPT_CHARS`), `different_names` the distinct names in well-formed calls,
    `top_name_outside` is the name outside its pool that most answers call, and
    `top_name_outside_answers` how many do; of several such names, the first in the alphabet.
    """
    outside = Counter(
        name for s in judged for name in {c["name"] for c in s["calls"]} - set(s["names"])
    )
    top = min(outside, key=lambda name: (-outside[name], name), default=None)
    # A model may write half a surrogate pair, which no file in UTF-8 holds: as its escape.
    said = None if top is None else top.encode("utf-8", "backslashreplace").decode()
    return {
        "different_answers": len({s["raw"] for s in judged}),
        "different_names": len({c["name"] for s in judged for c in s["calls"]}),
        "top_name_outside": said,
        "top_name_outside_answers": 0 if top is None else outside[top],
    }


def varieties(runs: Iterable[Run]) -> list[dict[str, Any]]:
    """Return the variety of a model's answers over all pool sizes and seeds, a row per setting.

    The counts of single pool sizes do not add up to it: an answer may repeat at another size.
    """
    judged: dict[tuple[str, str], list[Score]] = defaultdict(list)
    for facts, scores in runs:
        of_run = judged[facts["model"], setting(facts)]
        of_run += (s for s in scores if s["outcome"] != "error")
    return [
        {"model": model, "setting": where, "judged": len(rows), **variety(rows)}
        for (model, where), rows in judged.items()
    ]


def _flat(name: str, interval: Interval) -> dict[str, float | None]:
    known = not math.isnan(interval.value)
    return {
        name: interval.value if known else None,
        f"{name}_low": interval.low if known else None,
        f"{name}_high": interval.high if known else None,
    }


def summarise(runs: Iterable[tuple[Facts, Sequence[Score]]]) -> list[dict[str, Any]]:
    """Return a row per (model, pools, k) and seed, and one with all seeds pooled.

    Pooled rows hold means over all (question, seed) pairs; their intervals take each question
    as one observation.  `accuracy_sd_over_seeds` says how much the seeds differ.
    """
    rows: list[dict[str, Any]] = []
    for facts, scores in runs:
        by_k: dict[int, dict[int, list[Score]]] = defaultdict(lambda: defaultdict(list))
        for score in scores:
            by_k[score["k"]][score["seed"]].append(score)
        for k, by_seed in sorted(by_k.items()):
            head = {n: v for n, v in facts.items() if n not in NO_COLUMNS} | {"k": k}
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
