"""Several trainings of one setup: means over their seeds, and tests between setups.

Models of one base and gate scale that differ in the seed of fine-tuning only are one setup.
Its rates are means over seeds.  Their interval covers both doubts: Student's t over the seeds
(another training) and Wilson's over all answers (other questions); the wider bounds count,
because a few seeds can agree by chance.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from eval_bfcl import ceiling, tally
from eval_bfcl.outcomes import OUTCOMES
from gatewright.statistics import (
    holm,
    mcnemar_exact,
    sign_flip_test,
    student_interval,
    wilson_interval,
)

Run = tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]

RATES = ("accuracy", "right_tool", "valid_call", "hallucination")
"""What is compared between setups."""

EXPLAINED = (
    "Differences between setups, in percentage points with Student's 95 % interval over matched "
    "training seeds. `only A`, `only B`: (seed, question) pairs in which one of them shows it; "
    "`p McNemar` takes all pairs as independent, `p questions` flips signs by question (its "
    "seeds summed), `p Holm` adjusts that for all tests of the same rate here."
)


@dataclasses.dataclass(frozen=True)
class Setup:
    """Models that differ in their training seed only, asked the same pools."""

    name: str
    base: str
    gate_scale: float | None
    setting: str
    runs: dict[int, Run]


def setups(runs: Sequence[Run]) -> list[Setup]:
    """Return every setup of which several seeds were trained, in the order of the runs."""
    found: dict[tuple[Any, ...], list[Run]] = defaultdict(list)
    for facts, scores in runs:
        key = (tally.setting(facts), facts["base"], facts["gate_scale"], facts["questions"])
        found[key].append((facts, scores))
    out = []
    for (setting, base, scale, _), members in found.items():
        by_seed = {f["sft_seed"]: (f, s) for f, s in members if f["sft_seed"] is not None}
        if len(by_seed) < 2 or len(by_seed) < len(members):
            continue  # nothing to average, or seeds that do not tell the members apart
        shown = tally.scale_text(scale)
        name = base if shown == "-" else f"{base} s{shown}"
        out.append(Setup(name, base, scale, setting, dict(sorted(by_seed.items()))))
    return out


def hits(scores: Sequence[Mapping[str, Any]], rate: str, k: int) -> dict[tuple[str, int], bool]:
    """Return, by (question, pool seed), whether the judged answers at k count for a rate."""
    return {
        (s["id"], s["seed"]): tally.counts_for(s, rate)
        for s in scores
        if s["k"] == k and s["outcome"] != "error"
    }


def summarise(found: Sequence[Setup]) -> list[dict[str, Any]]:
    """Return a row per setup and pool size: mean rates over seeds, their intervals, outcomes."""
    rows = []
    for setup in found:
        some = next(iter(setup.runs.values()))
        facts = {n: v for n, v in some[0].items() if n not in ("state", "sft_seed")}
        sizes = set.intersection(*({s["k"] for s in scores} for _, scores in setup.runs.values()))
        for k in sorted(sizes):
            row: dict[str, Any] = {**facts, "model": setup.name, "k": k}
            row |= ceiling.predict(some[0].get("state"), k)
            row["training_seeds"] = list(setup.runs)
            all_scores = [s for _, scores in setup.runs.values() for s in scores if s["k"] == k]
            row["judged"] = sum(s["outcome"] != "error" for s in all_scores)
            for name in OUTCOMES:
                row[f"n_{name}"] = sum(s["outcome"] == name for s in all_scores)
            for rate in RATES:
                each = [list(hits(scores, rate, k).values()) for _, scores in setup.runs.values()]
                if not all(each):
                    row |= {rate: None, f"{rate}_low": None, f"{rate}_high": None}
                    continue
                values = [sum(x) / len(x) for x in each]
                over_seeds = student_interval(values)
                pooled = wilson_interval(sum(map(sum, each)), sum(map(len, each)))
                row[rate] = over_seeds.value
                row[f"{rate}_low"] = max(0.0, min(over_seeds.low, pooled.low))
                row[f"{rate}_high"] = min(1.0, max(over_seeds.high, pooled.high))
                row[f"{rate}_each"] = values
            rows.append(row)
    return rows


@dataclasses.dataclass(frozen=True)
class Difference:
    """How much more often setup a shows something than setup b, question by question.

    Attributes:
        points: mean difference a - b in percentage points over matched training seeds.
        low, high: its 95 % Student interval over those seeds.
        only_a, only_b: (seed, question) pairs in which only one of them shows it.
        p_mcnemar: McNemar's exact test, which takes all those pairs as independent.
        p_questions: sign-flip test over questions, each one's seeds summed first: seeds of one
            question may agree as they like.
        p_holm: `p_questions` adjusted for all tests of the same rate in the report.
    """

    a: str
    b: str
    setting: str
    k: int
    rate: str
    seeds: int
    points: float
    low: float
    high: float
    only_a: int
    only_b: int
    p_mcnemar: float
    p_questions: float
    p_holm: float = 1.0


def differences(found: Sequence[Setup]) -> list[Difference]:
    """Compare every setup with unscaled gates of its pools (or else the first setup), per k."""
    out: list[Difference] = []
    for setting in dict.fromkeys(s.setting for s in found):
        here = [s for s in found if s.setting == setting]
        reference = next((s for s in here if s.gate_scale == 1), here[0])
        for setup in here:
            if setup is reference:
                continue
            for rate in RATES:
                out += _compare(setup, reference, rate)
    adjusted: dict[int, float] = {}
    for rate in RATES:
        numbers = [i for i, d in enumerate(out) if d.rate == rate]
        adjusted |= dict(zip(numbers, holm([out[i].p_questions for i in numbers]), strict=True))
    return [dataclasses.replace(d, p_holm=adjusted[i]) for i, d in enumerate(out)]


def _compare(a: Setup, b: Setup, rate: str) -> list[Difference]:
    seeds = sorted(a.runs.keys() & b.runs.keys())
    if not seeds:
        return []
    sizes = {s["k"] for s in a.runs[seeds[0]][1]} & {s["k"] for s in b.runs[seeds[0]][1]}
    out = []
    for k in sorted(sizes):
        points: list[float] = []
        by_question: dict[str, int] = defaultdict(int)
        only_a = only_b = 0
        for seed in seeds:
            hits_a, hits_b = (hits(x.runs[seed][1], rate, k) for x in (a, b))
            both = hits_a.keys() & hits_b.keys()
            for key in both:
                by_question[key[0]] += hits_a[key] - hits_b[key]
                only_a += hits_a[key] and not hits_b[key]
                only_b += hits_b[key] and not hits_a[key]
            if both:
                points.append(100 * sum(hits_a[x] - hits_b[x] for x in both) / len(both))
        if not points:
            continue
        mean = student_interval(points)
        out.append(
            Difference(
                a.name,
                b.name,
                a.setting,
                k,
                rate,
                len(points),
                mean.value,
                max(-100.0, mean.low),
                min(100.0, mean.high),
                only_a,
                only_b,
                mcnemar_exact(only_a, only_b),
                sign_flip_test(list(by_question.values())),
            )
        )
    return out
