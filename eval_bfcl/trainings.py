"""Several trainings of one setup: means over their seeds, and tests between setups.

Models of one base and gate scale that differ in the seed of fine-tuning only are one setup.
Its rates are means over seeds.  Their interval covers both doubts: Student's t over the seeds
(another training) and Wilson's over the questions (other questions: the seeds share theirs, so
each question counts once); the wider bounds count, because a few seeds can agree by chance.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from eval_bfcl import ceiling, paired, tally
from eval_bfcl.outcomes import OUTCOMES
from eval_bfcl.tally import Run
from gatewright.statistics import mcnemar_exact, sign_flip_test, student_interval, student_test

RATES = ("accuracy", "right_tool", "valid_call", "hallucination")
"""What is compared between setups."""

EXPLAINED = (
    "Differences between setups, in percentage points with Student's 95 % interval over matched "
    "training seeds. `p seeds` is the interval's own paired t test: would another training, asked "
    "these questions, show the difference? `p questions` flips signs by question (its seeds "
    "summed): would these very models show it on other questions? `p Holm` adjusts the larger of "
    "the two for all tests of the same rate here; with one matched seed there is neither "
    "`p seeds` nor `p Holm` (n/a). `only A`, `only B`: (seed, question) pairs in which one of "
    "them shows it; `p McNemar` takes all those pairs as independent."
)


@dataclasses.dataclass(frozen=True)
class Setup:
    """Models that differ in their training seed only, asked the same pools.

    Attributes:
        runs: training seed -> facts and scores of all pool sizes.
        sizes: pool sizes at which every seed was asked the same pools.
    """

    name: str
    base: str
    gate_scale: float | None
    setting: str
    runs: dict[int, Run]
    sizes: tuple[int, ...]


def setups(runs: Sequence[Run]) -> tuple[list[Setup], list[str]]:
    """Return every setup of which several seeds were trained, in the order of the runs.

    Folders of one model that hold other pool sizes are one run.

    Returns:
        The setups, and a sentence for everything that belongs to one and was not averaged.
    """
    found: dict[tuple[str, str, float | None], dict[tuple[str, int | None], list[Run]]] = {}
    for facts, scores in runs:
        group = found.setdefault((tally.setting(facts), facts["base"], facts["gate_scale"]), {})
        group.setdefault((facts["model"], facts["sft_seed"]), []).append((facts, scores))
    out, notes = [], []
    for (setting, base, scale), members in found.items():
        shown = tally.scale_text(scale)
        name = base if shown == "-" else f"{base} s{shown}"
        by_seed: dict[int, list[tuple[str, list[Run]]]] = defaultdict(list)
        unseeded = []
        for (model, seed), parts in members.items():
            if seed is None:
                unseeded.append(model)
            else:
                by_seed[seed].append((model, parts))
        where = f"of {name} on {setting}"
        twins = {seed: m for seed, m in by_seed.items() if len(m) > 1}
        for seed, models in twins.items():
            several = " and ".join(model for model, _ in models)
            notes.append(f"Seeds {where} are not averaged: {several} share training seed {seed}.")
        if twins or len(by_seed) < 2:
            continue
        for model in unseeded:
            notes.append(f"{model} has no training seed and is in no mean {where}.")
        merged = {seed: _merged(models[0][1]) for seed, models in sorted(by_seed.items())}
        sizes, why = _sizes(merged, where)
        notes += why
        out.append(Setup(name, base, scale, setting, merged, sizes))
    return out, notes


def _merged(parts: Sequence[Run]) -> Run:
    return parts[0][0], [s for _, scores in parts for s in scores]


def _sizes(runs: Mapping[int, Run], where: str) -> tuple[tuple[int, ...], list[str]]:
    """Return the pool sizes at which all seeds were asked the same, and why not the others."""
    kept, notes = [], []
    for k in sorted({s["k"] for _, scores in runs.values() for s in scores}):
        asked = {
            seed: {(s["id"], s["seed"]): s["names"] for s in scores if s["k"] == k}
            for seed, (_, scores) in runs.items()
        }
        missing = [str(seed) for seed, pools in asked.items() if not pools]
        first, *others = asked.values()
        if missing:
            seeds = ", ".join(missing)
            notes.append(f"k = {k} {where} is not averaged: training seeds {seeds} lack it.")
        elif any(pools != first for pools in others):
            notes.append(f"k = {k} {where} is not averaged: seeds were asked different pools.")
        else:
            kept.append(k)
    return tuple(kept), notes


def summarise(found: Sequence[Setup]) -> list[dict[str, Any]]:
    """Return a row per setup and pool size: mean rates over seeds, their intervals, outcomes."""
    rows = []
    for setup in found:
        some = next(iter(setup.runs.values()))
        facts = {n: v for n, v in some[0].items() if n not in (*tally.NO_COLUMNS, "sft_seed")}
        for k in setup.sizes:
            row: dict[str, Any] = {**facts, "model": setup.name, "k": k}
            row |= ceiling.predict(some[0].get("state"), k)
            row["training_seeds"] = list(setup.runs)
            row["models"] = [f["model"] for f, _ in setup.runs.values()]
            all_scores = [s for _, scores in setup.runs.values() for s in scores if s["k"] == k]
            row["judged"] = sum(s["outcome"] != "error" for s in all_scores)
            for name in OUTCOMES:
                row[f"n_{name}"] = sum(s["outcome"] == name for s in all_scores)
            for rate in RATES:
                row |= _mean_rate(rate, [tally.hits(x, rate, k) for _, x in setup.runs.values()])
            rows.append(row)
    return rows


def _mean_rate(rate: str, each: Sequence[tally.Hits]) -> dict[str, Any]:
    if not all(each):
        return {rate: None, f"{rate}_low": None, f"{rate}_high": None}
    values = [sum(x.values()) / len(x) for x in each]
    over_seeds = student_interval(values)
    questions = len({id for x in each for id, _ in x})
    over_questions = tally.interval(over_seeds.value * questions, questions)
    return {
        rate: over_seeds.value,
        f"{rate}_low": max(0.0, min(over_seeds.low, over_questions.low)),
        f"{rate}_high": min(1.0, max(over_seeds.high, over_questions.high)),
        f"{rate}_each": values,
    }


@dataclasses.dataclass(frozen=True)
class Difference:
    """How much more often setup a shows something than setup b, question by question.

    Attributes:
        points: mean difference a - b in percentage points over matched training seeds.
        low, high: its 95 % Student interval over those seeds.
        only_a, only_b: (seed, question) pairs in which only one of them shows it.
        p_mcnemar: McNemar's exact test, which takes all those pairs as independent.
        p_questions: sign-flip test over questions, each one's seeds summed first: seeds of one
            question may agree as they like.  It speaks of other questions to these very models.
        p_seeds: the paired t test that belongs to the interval, which speaks of other trainings;
            None with one matched seed.
        p_holm: the larger of `p_seeds` and `p_questions`, adjusted for all tests of the same
            rate in the report: a difference of setups must hold for both.  None without `p_seeds`.
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
    p_seeds: float | None
    p_holm: float | None = None


def differences(found: Sequence[Setup]) -> tuple[list[Difference], list[str]]:
    """Compare setups per pool size, and say what cannot be.

    Every setup is compared with its base's reference on its pools: unscaled gates, or else the
    base's first setup.  Other bases' references are compared with the first base's.
    """
    out: list[Difference] = []
    notes: list[str] = []
    for setting in dict.fromkeys(s.setting for s in found):
        here = [s for s in found if s.setting == setting]
        references: list[Setup] = []
        for base in dict.fromkeys(s.base for s in here):
            of_base = [s for s in here if s.base == base]
            reference = next((s for s in of_base if s.gate_scale == 1), of_base[0])
            references.append(reference)
            pairs = [(s, reference) for s in of_base if s is not reference]
            pairs += [(reference, references[0])] if len(references) > 1 else []
            for a, b in pairs:
                compared, why = _compare(a, b)
                out += compared
                notes += why
    return _adjusted(out), notes


def _adjusted(found: Sequence[Difference]) -> list[Difference]:
    both = {i: max(d.p_seeds, d.p_questions) for i, d in enumerate(found) if d.p_seeds is not None}
    p_holm = paired.adjusted([found[i].rate for i in both], list(both.values()))
    of = dict(zip(both, p_holm, strict=True))
    return [dataclasses.replace(d, p_holm=of.get(i)) for i, d in enumerate(found)]


def _compare(a: Setup, b: Setup) -> tuple[list[Difference], list[str]]:
    out: list[Difference] = []
    notes: list[str] = []
    seeds = sorted(a.runs.keys() & b.runs.keys())
    if not seeds:
        notes.append(
            f"{a.name} and {b.name} are not compared on {a.setting}: they share no training seed."
        )
        return out, notes
    for k in (k for k in a.sizes if k in b.sizes):
        # All seeds of a setup were asked the same pools (`Setup.sizes`), so one tells.
        if other := paired.other_pools(a.runs[seeds[0]][1], b.runs[seeds[0]][1], k):
            notes.append(paired.not_compared(a.name, b.name, a.setting, k, other))
            continue
        out += filter(None, (_difference(a, b, seeds, rate, k) for rate in RATES))
    return out, notes


def _difference(a: Setup, b: Setup, seeds: Sequence[int], rate: str, k: int) -> Difference | None:
    points: list[float] = []
    of_question: dict[str, int] = defaultdict(int)
    only_a = only_b = 0
    for seed in seeds:
        hits_a, hits_b = (tally.hits(x.runs[seed][1], rate, k) for x in (a, b))
        both = hits_a.keys() & hits_b.keys()
        for id, difference in paired.by_question(hits_a, hits_b).items():
            of_question[id] += difference
        only_a += sum(hits_a[x] and not hits_b[x] for x in both)
        only_b += sum(hits_b[x] and not hits_a[x] for x in both)
        if both:
            points.append(100 * sum(hits_a[x] - hits_b[x] for x in both) / len(both))
    if not points:
        return None
    mean = student_interval(points)
    return Difference(
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
        sign_flip_test([of_question[id] for id in sorted(of_question)]),
        student_test(points),
    )
