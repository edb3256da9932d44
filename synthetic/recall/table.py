"""The summary's values and claims beside ours: a line per arm, per value and per claim."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from gatewright.statistics import fisher_exact, holm, permutation_test
from synthetic.recall import judge
from synthetic.recall.claims import Claim, Number, Value, claims, mqar_claims
from synthetic.recall.judge import FEWEST_SEEDS, LOCK_IN, NOT_RUN, UNDECIDED
from synthetic.sweep import Row, verdict

Line = dict[str, Any]


def measured(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of seeds that did not diverge."""
    return [r for r in rows if "failed" not in r]


def _by_arm(rows: Iterable[Row]) -> dict[str, list[Row]]:
    by: dict[str, list[Row]] = {}
    for row in measured(rows):
        by.setdefault(row["arm"], []).append(row)
    return by


def _accuracy(rows: Iterable[Row]) -> list[float]:
    return [float(r["accuracy"]) for r in rows]


def _mean(rows: Sequence[Row], field: str) -> float | None:
    found = [float(r[field]) for r in rows if field in r]
    return float(np.mean(found)) if found else None


def arm_rows(rows: Sequence[Row], numbers: Sequence[Number] = ()) -> list[Line]:
    """Return a line per arm: mean, interval, range, floor, rebinding, what bound nothing.

    Seeds that diverged are counted, and left out of everything else.
    """
    paper: dict[str, Value | None] = {}
    for number in numbers:
        if number.arm and not number.best:
            paper.setdefault(number.arm, number.paper)
    lines = []
    for name, mine in _by_arm(rows).items():
        accuracy = _accuracy(mine)
        interval = judge.mean_interval(accuracy)
        lines.append(
            {
                "arm": name,
                "mean": interval.value,
                "interval": [interval.low, interval.high],
                "range": [min(accuracy), max(accuracy)],
                "n": len(mine),
                "failed": sum("failed" in r for r in rows if r["arm"] == name),
                "locked_in": sum(a > LOCK_IN for a in accuracy),
                "floor": mine[0]["floor"],
                "one_query": _mean(mine, "accuracy_one_query"),
                "rebinding": _mean(mine, "rebinding"),
                "nothing_bound": sum(bool(r.get("nothing_bound")) for r in mine),
                "paper": paper.get(name),
                "parameters": mine[0]["parameters"],
                "steps": mine[0]["steps"],
            }
        )
    return lines


def number_rows(numbers: Sequence[Number], lines: Sequence[Line]) -> list[Line]:
    """Return a line per value of the summary; `ours` is None and `instead` says how, if not run."""
    by = {x["arm"]: x for x in lines}
    found = []
    for number in numbers:
        ours: Value | None = number.ours
        instead = number.instead
        if number.arm in by:
            x = by[number.arm]
            count = isinstance(number.paper, tuple)
            ours = (
                (x["locked_in"], x["n"]) if count else x["range"][1] if number.best else x["mean"]
            )
        elif number.arm:
            instead = _parts([number.arm])
        found.append(
            {
                "value": number.text,
                "ours": ours,
                "paper": number.paper,
                "arm": number.arm or None,
                "instead": instead if ours is None else "",
            }
        )
    return found


def _parts(arms: Iterable[str]) -> str:
    return f"table --parts {','.join(dict.fromkeys(a.split('/')[0] for a in arms))}"


def _shown(value: Value | None) -> str:
    if value is None:
        return ""
    if isinstance(value, (tuple, list)):
        return f"{value[0]} of {value[1]}"
    return f"{value:.3f}" if value <= 1 else f"{value:,.0f}"


def _against(values: Sequence[Value]) -> str:
    return " against ".join(map(_shown, values))


def _neither_learnt(claim: Claim, by: Mapping[str, Sequence[Row]]) -> bool:
    """Return whether a claim compares two arms that both do hardly better than the floor."""
    if not claim.b or claim.at_floor:
        return False
    arms = [by[arm] for arm in (claim.a, claim.b)]
    return all(float(np.mean(_accuracy(x))) < x[0]["floor"] + judge.BARELY for x in arms)


def _p_value(claim: Claim, a: Sequence[float], b: Sequence[float]) -> float:
    if not claim.lock_in:
        return permutation_test(a, b)
    (ka, na), (kb, nb) = _count(a), _count(b)
    return fisher_exact(ka, na, kb, nb)


def _count(accuracy: Sequence[float]) -> tuple[int, int]:
    return sum(x > LOCK_IN for x in accuracy), len(accuracy)


def verdicts(rows: Sequence[Row], pairs: int = 32) -> list[Line]:
    """Return a line per claim of the summary: tested where its arms have run, else `not run`.

    Holm's adjustment is over all comparisons tested here, each counted once.
    """
    by, every = _by_arm(rows), claims(pairs)
    tests: dict[tuple[str, str, bool], float] = {}
    for c in every:
        if c.b and c.a in by and c.b in by:
            tests[c.a, c.b, c.lock_in] = _p_value(c, _accuracy(by[c.a]), _accuracy(by[c.b]))
    adjusted = dict(zip(tests, holm(list(tests.values())), strict=True))
    out = []
    for c in every:
        paper = f"paper {_against(c.paper)}" if c.paper else ""
        paper = ", ".join(x for x in (paper, c.note) if x)
        line: Line = {"paper": list(c.paper), "interval": None, "p": None, "p_holm": None}
        key = (c.a, c.b, c.lock_in)
        lacking = [arm for arm in (c.a, c.b) if arm and arm not in by]
        if not c.a or lacking:
            found, number, ours = NOT_RUN, None, c.instead or _parts(lacking)
        elif not c.b:
            a = _accuracy(by[c.a])
            interval = judge.mean_interval(a)
            found, number = judge.alone(c.expect, a, by[c.a][0]["floor"]), interval.value
            line["interval"] = [interval.low, interval.high]
            k, n = _count(a)
            ours = (
                f"{k} of {n} lock in, mean {number:.3f} [{interval.low:.3f}, {interval.high:.3f}]"
            )
        else:
            a, b = _accuracy(by[c.a]), _accuracy(by[c.b])
            means = (float(np.mean(a)), float(np.mean(b)))
            values: tuple[Value, ...] = (_count(a), _count(b)) if c.lock_in else means
            interval = (
                judge.newcombe_interval(_count(a), _count(b))
                if c.lock_in
                else judge.welch_interval(a, b)
            )
            p = tests[key]
            found, number = judge.compared(c.expect, interval, p, c.margin), interval.value
            line |= {"interval": [interval.low, interval.high], "p": p, "p_holm": adjusted[key]}
            what = "lock in, Fisher" if c.lock_in else f"n = {len(a)}, {len(b)}, permutation"
            ours = (
                f"{_against(values)} ({what} p = {p:.3g}, Holm {adjusted[key]:.3g}; difference "
                f"in [{interval.low:.3f}, {interval.high:.3f}])"
            )
        few = any(len(by[arm]) < FEWEST_SEEDS for arm in (c.a, c.b) if arm in by)
        if found != NOT_RUN and (few or _neither_learnt(c, by)):
            found = UNDECIDED
        detail = "; ".join(x for x in (ours, paper) if x)
        out.append(
            {**verdict(c.text, found == judge.HOLDS, number, detail), "verdict": found, **line}
        )
    return out


def survivors(found: Sequence[Mapping[str, Any]], pairs: int = 32) -> list[Line]:
    """Return, for each MQAR claim that both layouts test, its verdict in either."""
    by = {v["claim"]: v for v in found}
    out = []
    for claim in mqar_claims("fixed", pairs):
        plain = by[claim.text]
        honest = by.get(claim.text.replace("[fixed]", "[shuffled]"))
        if honest is None or NOT_RUN in (plain["verdict"], honest["verdict"]):
            continue
        out.append(
            {
                "claim": claim.text.replace(" [fixed]", ""),
                **{
                    f"{field}_{layout}": v[name]
                    for field, name in (("verdict", "verdict"), ("gap", "number"), ("p", "p"))
                    for layout, v in (("fixed", plain), ("shuffled", honest))
                },
            }
        )
    return out


def print_table(lines: Sequence[Mapping[str, Any]]) -> None:
    """Print the arms, floors beside every accuracy; the paper's lock-in counts as `7 of 10`."""
    print(
        f"{'arm':36} {'ours':>6} {'95% interval':>14} {'lock in':>8} {'floor':>6} {'rebind':>6} "
        f"{'paper':>8}"
    )
    for x in lines:
        low, high = x["interval"]
        notes = [f"one query {x['one_query']:.3f}"] if x["one_query"] is not None else []
        if x["nothing_bound"]:
            notes.append(f"nothing bound in {x['nothing_bound']} of {x['n']}")
        if x["failed"]:
            notes.append(f"{x['failed']} diverged")
        print(
            f"{x['arm']:36} {x['mean']:6.3f} [{low:.3f}, {high:.3f}] "
            f"{_shown((x['locked_in'], x['n'])):>8} {x['floor']:6.3f} "
            f"{_shown(x['rebinding']):>6} {_shown(x['paper']):>8}  {', '.join(notes)}".rstrip()
        )


def print_verdicts(found: Sequence[Mapping[str, Any]]) -> None:
    """Print a line per claim."""
    for v in found:
        number = "" if v["number"] is None else f" [{v['number']:.4g}]"
        print(f"{v['verdict']:12}  {v['claim']}{number}: {v['detail']}")


def print_survivors(found: Sequence[Mapping[str, Any]]) -> None:
    """Print which MQAR claims survive the honest layout."""
    if found:
        print("MQAR claims, the authors' layout and the honest one:")
    for x in found:
        print(
            f"{x['verdict_fixed']:12}  {x['verdict_shuffled']:12}  {x['claim']} "
            f"[{x['gap_fixed']:+.3f}, {x['gap_shuffled']:+.3f}]"
        )


def print_numbers(found: Sequence[Mapping[str, Any]]) -> None:
    """Print the summary's values that are not lines of the arms' table: computed, or not run."""
    for x in found:
        if x["ours"] is None:
            print(f"{NOT_RUN:12}  {x['value']}, paper {_shown(x['paper']) or '-'}: {x['instead']}")
        elif x["arm"] is None:
            print(f"{'computed':12}  {x['value']}: {_shown(x['ours'])}, paper {_shown(x['paper'])}")
