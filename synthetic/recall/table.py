"""Every number of the summary as a row, ours beside the paper's, with a test and a verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gatewright.statistics import bootstrap_interval, fisher_exact, permutation_test
from synthetic.recall.arms import mqar_name
from synthetic.sweep import Row, verdict

LOCK_IN = 0.8  # the paper's threshold of a seed that "locks in"
LEVEL = 0.05


@dataclasses.dataclass(frozen=True)
class Claim:
    """A comparison of two arms' means.

    Attributes:
        text: what the paper claims.
        a, b: names of the arms; the claim is about `mean(a) - mean(b)`.
        expect: `greater` (a clearly above b), `equal` (no clear difference), `less`.
        paper: the paper's means of a and b.
    """

    text: str
    a: str
    b: str
    expect: str
    paper: tuple[float, float]


@dataclasses.dataclass(frozen=True)
class LockIn:
    """A comparison of two arms' lock-in counts; `paper` holds (count, of) of each."""

    text: str
    a: str
    b: str
    expect: str
    paper: tuple[tuple[int, int], tuple[int, int]]


PAPER_MQAR = {
    ("gated_deltanet", True): 0.983,
    ("gated_deltanet", False): 0.518,
    ("deltanet", False): 0.561,
    ("rwkv7", True): 0.992,
    ("rwkv7", False): 0.653,
    ("rwkv7_diagonal", True): 0.958,
    ("rwkv7_diagonal", False): 0.390,
    ("mamba2", True): 0.592,
    ("mamba2", False): 0.151,
}
PAPER_ARMS = {
    **{mqar_name(c, v, "fixed"): x for (c, v), x in PAPER_MQAR.items()},
    "wall/gated_deltanet+conv": 0.018,
    "wall/mamba2+conv": 0.018,
    "wall/rwkv7": 0.018,
    "wall/attention": 1.0,
    **{
        f"s5/gated_deltanet+conv {d}": x
        for d, x in zip((2, 4, 8, 16), (1, 0.524, 0.214, 0.087), strict=True)
    },
    **{
        f"s5/gated_deltanet {d}": x
        for d, x in zip((2, 4, 8, 16), (0.98, 0.389, 0.152, 0.071), strict=True)
    },
}


def mqar_claims(layout: str) -> list[Claim]:
    """Return the summary's three axes for one layout (the paper's numbers are for `fixed`)."""

    def claim(text: str, a: tuple[str, bool], b: tuple[str, bool], expect: str) -> Claim:
        return Claim(
            f"{text} [{layout}]",
            mqar_name(*a, layout),
            mqar_name(*b, layout),
            expect,
            (PAPER_MQAR[a], PAPER_MQAR[b]),
        )

    return [
        claim(
            "convolution lifts the delta-rule cell",
            ("gated_deltanet", True),
            ("gated_deltanet", False),
            "greater",
        ),
        claim(
            "convolution lifts the diagonal cell", ("mamba2", True), ("mamba2", False), "greater"
        ),
        claim(
            "rank one beats its diagonal ablation without convolution",
            ("rwkv7", False),
            ("rwkv7_diagonal", False),
            "greater",
        ),
        claim(
            "rank one still beats it with convolution",
            ("rwkv7", True),
            ("rwkv7_diagonal", True),
            "greater",
        ),
        claim("decay costs nothing", ("deltanet", False), ("gated_deltanet", False), "equal"),
        claim(
            "no class claim: Mamba-2 with convolution is not below the unarmed rank-one cell",
            ("mamba2", True),
            ("rwkv7", False),
            "not_less",
        ),
    ]


CLAIMS = [
    *mqar_claims("fixed"),
    *mqar_claims("shuffled"),
    Claim(
        "the wall: attention passes where the armed cell does not",
        "wall/attention",
        "wall/gated_deltanet+conv",
        "greater",
        (1.0, 0.018),
    ),
    Claim(
        "the wall is the same for Mamba-2",
        "wall/mamba2+conv",
        "wall/gated_deltanet+conv",
        "equal",
        (0.018, 0.018),
    ),
    *(
        Claim(
            f"arming is free on S5 at depth {d}",
            f"s5/gated_deltanet+conv {d}",
            f"s5/gated_deltanet {d}",
            "not_less",
            (PAPER_ARMS[f"s5/gated_deltanet+conv {d}"], PAPER_ARMS[f"s5/gated_deltanet {d}"]),
        )
        for d in (2, 4, 8, 16)
    ),
]
LOCK_INS = [
    LockIn(
        "the curriculum lifts lock-in at L = 64",
        "lift/dense-1 curriculum",
        "lift/dense-4 only",
        "greater",
        ((7, 10), (1, 10)),
    ),
    LockIn(
        "dense supervision adds nothing to the curriculum",
        "lift/dense-4 curriculum",
        "lift/dense-1 curriculum",
        "equal",
        ((6, 10), (7, 10)),
    ),
    LockIn(
        "collision keys: direction does not matter",
        "collision/bidirectional uniform",
        "collision/causal uniform",
        "equal",
        ((3, 10), (1, 10)),
    ),
    LockIn(
        "collision keys: the ramp stabilises the causal model",
        "collision/causal ramp",
        "collision/causal uniform",
        "greater",
        ((9, 10), (1, 10)),
    ),
    LockIn(
        "collision keys: without convolution no lock-in",
        "collision/bidirectional ramp",
        "collision/no conv ramp",
        "greater",
        ((9, 10), (0, 10)),
    ),
]


def judge(expect: str, gap: float, p: float) -> bool:
    """Return whether a difference and its p value bear a claim out."""
    return {
        "greater": gap > 0 and p < LEVEL,
        "less": gap < 0 and p < LEVEL,
        "equal": p >= LEVEL,
        "not_less": not (gap < 0 and p < LEVEL),
    }[expect]


def arm_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return a line per arm: mean, interval, range, floor, rebinding, what bound nothing."""
    lines = []
    for name in dict.fromkeys(r["arm"] for r in rows):
        mine = [r for r in rows if r["arm"] == name]
        accuracy = [float(r["accuracy"]) for r in mine]
        interval = bootstrap_interval(accuracy)
        rebinding = [r["rebinding"] for r in mine if "rebinding" in r]
        lines.append(
            {
                "arm": name,
                "mean": interval.value,
                "interval": [interval.low, interval.high],
                "range": [min(accuracy), max(accuracy)],
                "n": len(mine),
                "locked_in": sum(a > LOCK_IN for a in accuracy),
                "floor": mine[0]["floor"],
                "rebinding": float(np.mean(rebinding)) if rebinding else None,
                "nothing_bound": sum(bool(r.get("nothing_bound")) for r in mine),
                "paper": PAPER_ARMS.get(name),
                "parameters": mine[0]["parameters"],
                "steps": mine[0]["steps"],
            }
        )
    return lines


def verdicts(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Test every claim whose two arms have run."""
    by: dict[str, list[float]] = {}
    for r in rows:
        by.setdefault(r["arm"], []).append(float(r["accuracy"]))
    out = []
    for claim in CLAIMS:
        if claim.a not in by or claim.b not in by:
            continue
        a, b = by[claim.a], by[claim.b]
        gap, p = float(np.mean(a) - np.mean(b)), permutation_test(a, b)
        out.append(
            {
                **verdict(
                    claim.text,
                    judge(claim.expect, gap, p),
                    gap,
                    f"{np.mean(a):.3f} against {np.mean(b):.3f} (n = {len(a)}, {len(b)}; "
                    f"permutation p = {p:.3g}); paper {claim.paper[0]:.3f} against "
                    f"{claim.paper[1]:.3f}",
                ),
                "p": p,
                "paper": list(claim.paper),
            }
        )
    for lock in LOCK_INS:
        if lock.a not in by or lock.b not in by:
            continue
        counts = [(sum(x > LOCK_IN for x in by[arm]), len(by[arm])) for arm in (lock.a, lock.b)]
        (ka, na), (kb, nb) = counts
        gap, p = ka / na - kb / nb, fisher_exact(ka, na, kb, nb)
        (pa, qa), (pb, qb) = lock.paper
        out.append(
            {
                **verdict(
                    lock.text,
                    judge(lock.expect, gap, p),
                    gap,
                    f"{ka} of {na} against {kb} of {nb} lock in (Fisher p = {p:.3g}); paper "
                    f"{pa} of {qa} against {pb} of {qb}",
                ),
                "p": p,
                "paper": [list(x) for x in lock.paper],
            }
        )
    return out


def survivors(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each MQAR claim, whether it holds in the authors' and the honest layout."""
    by = {v["claim"]: v for v in found}
    out = []
    for claim in mqar_claims("fixed"):
        honest = claim.text.replace("[fixed]", "[shuffled]")
        if claim.text in by and honest in by:
            out.append(
                {
                    "claim": claim.text.replace(" [fixed]", ""),
                    "fixed": by[claim.text]["holds"],
                    "shuffled": by[honest]["holds"],
                    "gap_fixed": by[claim.text]["number"],
                    "gap_shuffled": by[honest]["number"],
                    "p_fixed": by[claim.text]["p"],
                    "p_shuffled": by[honest]["p"],
                }
            )
    return out


def print_table(lines: Sequence[Mapping[str, Any]]) -> None:
    """Print the arms, floors beside every accuracy."""
    print(f"{'arm':44} {'ours':>6} {'95% interval':>15} {'floor':>6} {'rebind':>6} {'paper':>6}")
    for x in lines:
        low, high = x["interval"]
        rebinding = "" if x["rebinding"] is None else f"{x['rebinding']:.3f}"
        paper = "" if x["paper"] is None else f"{x['paper']:.3f}"
        note = f"  nothing bound in {x['nothing_bound']} of {x['n']}" if x["nothing_bound"] else ""
        print(
            f"{x['arm']:44} {x['mean']:6.3f} [{low:.3f}, {high:.3f}]".ljust(67)
            + f" {x['floor']:6.3f} {rebinding:>6} {paper:>6}{note}"
        )
