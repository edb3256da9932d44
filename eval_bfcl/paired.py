"""Paired tests of two models on the same pools: McNemar, or sign flips over questions.

Pool seeds ask the same questions, often with the very same pools, so several seeds of a
question are one observation: its difference summed over seeds.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from eval_bfcl import tally
from eval_bfcl.tally import Facts, Run, Score
from gatewright.statistics import holm, mcnemar_exact, sign_flip_test

TESTED = ("accuracy", "right_tool", "hallucination")

EXPLAINED = (
    "Two models on the same pools: `only A`, `only B` count the questions that show a rate more "
    "often in one of them. `p` is McNemar's exact test; with several pool seeds it flips signs "
    "by question (its seeds summed). `p Holm` adjusts it for all tests of the same rate here."
)


@dataclasses.dataclass(frozen=True)
class Paired:
    """Two models on the same pools: who shows something where the other does not.

    Attributes:
        only_a, only_b: questions that show it more often in one of them (over pool seeds).
        n: questions that both were judged on.
        seeds: pool seeds that both were asked.
        p: McNemar's exact test; of several pool seeds, the sign-flip test over questions.
        p_holm: `p` adjusted for all tests of the same rate in the report.
    """

    a: str
    b: str
    setting: str
    k: int
    rate: str
    only_a: int
    only_b: int
    n: int
    seeds: int
    p: float
    p_holm: float = 1.0


def other_pools(a: Sequence[Score], b: Sequence[Score], k: int) -> int:
    """Return how many pools of size k two runs were both asked that hold other tools."""
    names_a, names_b = (
        {(s["id"], s["seed"]): s["names"] for s in x if s["k"] == k} for x in (a, b)
    )
    return sum(names_a[key] != names_b[key] for key in names_a.keys() & names_b.keys())


def not_compared(a: str, b: str, setting: str, k: int, other: int) -> str:
    """Return the sentence for two runs whose pools are called alike and hold other tools."""
    return f"{a} and {b} are not compared on {setting}, k = {k}: {other} of their pools differ."


def by_question(a: tally.Hits, b: tally.Hits) -> dict[str, int]:
    """Return question -> how much oftener a shows a rate than b, over what both were judged on."""
    out: dict[str, int] = defaultdict(int)
    for key in a.keys() & b.keys():
        out[key[0]] += a[key] - b[key]
    return dict(out)


def adjusted(rates: Sequence[str], p_values: Sequence[float]) -> list[float]:
    """Return p values after Holm, tests of one rate being one family, in the same order."""
    out = list(p_values)
    for rate in set(rates):
        family = [i for i, r in enumerate(rates) if r == rate]
        for i, p in zip(family, holm([p_values[i] for i in family]), strict=True):
            out[i] = p
    return out


def paired_tests(
    runs: Sequence[Run], apart: Callable[[Facts, Facts, int], bool] = lambda a, b, k: False
) -> tuple[list[Paired], list[str]]:
    """Return a test for every two runs of the same pools, per k and rate, and what has none.

    Only questions that both models were judged on count.

    Args:
        apart: pairs of runs, and the pool size at which to leave them out.
    """
    tests: list[Paired] = []
    notes: list[str] = []
    sizes = [{s["k"] for s in scores} for _, scores in runs]
    shown = [
        {(k, rate): tally.hits(scores, rate, k) for k in ks for rate in TESTED}
        for (_, scores), ks in zip(runs, sizes, strict=True)
    ]
    for i, j in itertools.combinations(range(len(runs)), 2):
        (a, scores_a), (b, scores_b) = runs[i], runs[j]
        setting = tally.setting(a)
        if setting != tally.setting(b):
            continue
        for k in sorted(sizes[i] & sizes[j]):
            if apart(a, b, k):
                continue
            if other := other_pools(scores_a, scores_b, k):
                notes.append(not_compared(a["model"], b["model"], setting, k, other))
                continue
            for rate in TESTED:
                names = a["model"], b["model"], setting, k, rate
                if found := _test(shown[i][k, rate], shown[j][k, rate], names):
                    tests.append(found)
    p_holm = adjusted([t.rate for t in tests], [t.p for t in tests])
    tests = [dataclasses.replace(t, p_holm=p) for t, p in zip(tests, p_holm, strict=True)]
    return tests, notes


def _test(a: tally.Hits, b: tally.Hits, names: tuple[str, str, str, int, str]) -> Paired | None:
    differences = by_question(a, b)
    if not differences:
        return None
    only_a = sum(d > 0 for d in differences.values())
    only_b = sum(d < 0 for d in differences.values())
    seeds = len({seed for _, seed in a.keys() & b.keys()})
    p = mcnemar_exact(only_a, only_b)
    if seeds > 1:
        p = sign_flip_test([differences[id] for id in sorted(differences)])
    return Paired(*names, only_a, only_b, len(differences), seeds, p)


def p_text(p: float | None) -> str:
    """Return a p value as tables show it."""
    return "n/a" if p is None else f"{p:.3g}"


def to_json(tests: Sequence[Paired]) -> list[dict[str, object]]:
    return [dataclasses.asdict(t) for t in tests]


def rows(tests: Sequence[Paired], labels: Mapping[str, str]) -> list[dict[str, str]]:
    """Return a table's rows as text."""
    return [
        {
            "A": t.a,
            "B": t.b,
            "pools": t.setting,
            "k": str(t.k),
            "rate": labels[t.rate],
            "only A": str(t.only_a),
            "only B": str(t.only_b),
            "questions": str(t.n),
            "pool seeds": str(t.seeds),
            "p": p_text(t.p),
            "p Holm": p_text(t.p_holm),
        }
        for t in tests
    ]
