"""What a sweep's table says: means over seeds, and which differences from a baseline are real.

A seed is the unit: it fixes the order of the samples, the same in every arm, so arms are
compared seed by seed.  The exact sign-flip test of n seeds has no p value below 2 / 2^n (0.0625
for five, 0.25 for three); the permutation test forgets the pairing and goes down to 2 in 252 for
five against five, and is the one that is adjusted for the number of comparisons (Holm).
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gatewright.statistics import holm, permutation_test, sign_flip_test, student_interval

Row = Mapping[str, Any]
Arm = tuple[float, str]
"""(gate scale, curriculum)"""

TABLED = ("held_out_loss", "first_tool", "right_tool", "exact", "hallucinated")
COMPARED = ("held_out_loss", "first_tool", "right_tool", "exact")
COLUMNS = (
    "scale", "curriculum", "seed", "k", "questions", "held_out_loss", "parsed", "first_tool",
    "right_tool", "exact", "hallucinated",
)  # fmt: skip
COMPARISON_COLUMNS = (
    "measure", "k", "scale", "curriculum", "baseline_scale", "baseline_curriculum", "seeds",
    "mean", "baseline_mean", "difference", "low", "high", "p_sign_flip", "p_permutation",
    "p_holm",
)  # fmt: skip


def by_arm(rows: Sequence[Row]) -> dict[tuple[Arm, int], list[Row]]:
    """Return the rows of each (scale, curriculum) and k, ordered by seed."""
    groups: dict[tuple[Arm, int], list[Row]] = {}
    for row in rows:
        groups.setdefault(((row["scale"], row["curriculum"]), row["k"]), []).append(row)
    return {key: sorted(g, key=lambda r: r["seed"]) for key, g in sorted(groups.items())}


def table(rows: Sequence[Row]) -> str:
    """Return mean and standard deviation over seeds, a line per scale, curriculum and k."""
    lines = [
        f"{'scale':>6} {'curriculum':<10} {'k':>3} {'seeds':>5}"
        + "".join(f" {name.replace('_', ' '):>15}" for name in TABLED)
    ]
    for ((scale, curriculum), k), group in by_arm(rows).items():
        line = f"{scale:>6g} {curriculum:<10} {k:>3} {len(group):>5}"
        for name in TABLED:
            values = [row[name] for row in group if row[name] is not None]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            shown = f"{statistics.fmean(values):.3f} ± {spread:.3f}" if values else "-"
            line += f" {shown:>15}"
        lines.append(line)
    return "\n".join(lines)


def baseline_of(arms: Sequence[Arm]) -> Arm:
    """Return the arm that the others are compared with: unscaled gates, the fixed curriculum."""
    return min(arms, key=lambda arm: (arm[0] != 1, arm[1] != "fixed", arms.index(arm)))


def pairs(arms: Sequence[Arm]) -> list[tuple[Arm, Arm]]:
    """Return who is compared with whom: all with the baseline, three also with each other."""
    baseline = baseline_of(arms)
    others = [arm for arm in arms if arm != baseline]
    found = [(arm, baseline) for arm in others]
    if len(others) == 2:
        found.append((others[1], others[0]))
    return found


def comparisons(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Compare arms over the seeds that both have, per measure and k.

    Returns:
        a row of COMPARISON_COLUMNS each: `difference` is the mean over seeds of arm minus
        baseline with its 95% Student interval `low..high` (infinite for one seed).  The held-out
        loss does not depend on k and stands once, with k = 0.  `p_holm` adjusts for the number
        of comparisons of the same measure.
    """
    groups = by_arm(rows)
    sizes = list(dict.fromkeys(k for _, k in groups))
    pairings = pairs(list(dict.fromkeys(arm for arm, _ in groups)))
    found: list[dict[str, Any]] = []
    for measure in COMPARED:
        same: list[dict[str, Any]] = []
        for k in sizes[:1] if measure == "held_out_loss" else sizes:
            for arm, other in pairings:
                ours: dict[int, Any] = {r["seed"]: r[measure] for r in groups.get((arm, k), ())}
                theirs: dict[int, Any] = {r["seed"]: r[measure] for r in groups.get((other, k), ())}
                seeds = [s for s in ours if ours[s] is not None and theirs.get(s) is not None]
                if not seeds:
                    continue
                a: list[float] = [ours[s] for s in seeds]
                b: list[float] = [theirs[s] for s in seeds]
                differences = [x - y for x, y in zip(a, b, strict=True)]
                interval = student_interval(differences)
                values = (
                    measure, 0 if measure == "held_out_loss" else k, *arm, *other, len(seeds),
                    statistics.fmean(a), statistics.fmean(b), interval.value, interval.low,
                    interval.high, sign_flip_test(differences), permutation_test(a, b),
                )  # fmt: skip
                same.append(dict(zip(COMPARISON_COLUMNS[:-1], values, strict=True)))
        p_values: list[float] = [row["p_permutation"] for row in same]
        for row, adjusted in zip(same, holm(p_values), strict=True):
            row["p_holm"] = adjusted
        found += same
    return found


def comparison_table(found: Sequence[Row]) -> str:
    """Return the comparisons as text."""
    if not found:
        return "one arm: nothing to compare"
    lines = [
        "differences (mean over seeds, 95% interval, exact p of sign flips and of permutations, "
        "the latter also by Holm over the lines of its measure)",
        f"{'measure':<14} {'k':>3} {'arm':>13} {'minus':>13} {'seeds':>5} {'difference':>27} "
        f"{'p flip':>7} {'p perm':>7} {'p Holm':>7}",
    ]
    for r in found:
        arm = f"{r['scale']:g} {r['curriculum']}"
        other = f"{r['baseline_scale']:g} {r['baseline_curriculum']}"
        lines.append(
            f"{r['measure']:<14} {r['k'] or '-':>3} {arm:>13} {other:>13} {r['seeds']:>5} "
            f"{r['difference']:>+9.4f} [{r['low']:+.3f}, {r['high']:+.3f}] "
            f"{r['p_sign_flip']:>7.3f} {r['p_permutation']:>7.3f} {r['p_holm']:>7.3f}"
        )
    return "\n".join(lines)


def write(rows: Sequence[Row], folder: Path) -> str:
    """Write table.csv, comparisons.csv and table.txt; return the text."""
    found = comparisons(rows)
    for name, columns, content in (
        ("table.csv", COLUMNS, rows),
        ("comparisons.csv", COMPARISON_COLUMNS, found),
    ):
        with open(folder / name, "w", encoding="utf-8", newline="") as f:
            writer = csv.DictWriter(f, columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(content)
    text = f"{table(rows)}\n\n{comparison_table(found)}"
    (folder / "table.txt").write_text(text + "\n")
    return text
