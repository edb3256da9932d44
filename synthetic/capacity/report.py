"""Capacity results as numbers and verdicts, the law's prediction beside every accuracy."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np

from gatewright import recall_law
from gatewright.statistics import r_squared
from synthetic.sweep import Row, verdict

MAIN = "remark_4_3/mean_of_max"
Kind = Literal["linear", "full", "designed"]


@dataclasses.dataclass(frozen=True)
class Cell:
    """Mean accuracy of one setting over its seeds."""

    settings: Row
    accuracy: float
    seeds: list[float]


def cells_of(rows: Iterable[Row], *fields: str) -> list[Cell]:
    """Group rows by the named settings, in order of first appearance."""
    groups: dict[tuple[Any, ...], list[float]] = {}
    for r in rows:
        groups.setdefault(tuple(r[f] for f in fields), []).append(float(r["accuracy"]))
    return [
        Cell(dict(zip(fields, k, strict=True)), float(np.mean(v)), v) for k, v in groups.items()
    ]


def compare(measured: Sequence[float], law: Sequence[float]) -> dict[str, float | None]:
    """Return correlation, RMS error and R^2 of a prediction (correlation None if constant)."""
    x, y = np.asarray(law), np.asarray(measured)
    flat = len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0
    return {
        "correlation": None if flat else float(np.corrcoef(x, y)[0, 1]),
        "rms": float(np.sqrt(((x - y) ** 2).mean())),
        "max_abs_error": float(np.abs(x - y).max()),
        "r2": None if flat else r_squared(y, x),
    }


def predictions(cell: Row, kind: Kind) -> dict[str, float]:
    """Return the law for one cell in its four forms: remark 4.3 / theorem 4.2, m_V / sqrt.

    Args:
        cell: its settings; without a `length`, MQAR has the usual 4 facts.
    """
    task, d, n = cell["task"], cell["d"], cell["n"]
    facts, vocab = cell["facts"], cell["vocab"]
    a = recall_law.PAIRS_PER_FACT[kind, task]
    length = 4 * facts if task == "mqar" else None
    if kind != "designed" and "length" in cell:
        length = cell["length"]
        a = recall_law.pairs_per_fact(kind, task, facts, length)
    out = {}
    for name, reach in recall_law.REACH.items():
        b = reach(vocab)
        out[f"remark_4_3/{name}"] = recall_law.recall(d, n, facts, a, b)
        out[f"theorem_4_2/{name}"] = recall_law.recall_as_printed(d, n, facts, b, task, length)
    return out


def fit_law(cells: Sequence[Cell]) -> dict[str, float | None]:
    """Fit a and b of `Phi(1/sqrt(a F/(N D) + 1/D) - b)` to accuracies, by least squares."""
    from scipy.optimize import least_squares
    from scipy.special import ndtr

    load = np.array([c.settings["facts"] / (c.settings["n"] * c.settings["d"]) for c in cells])
    width = np.array([1 / c.settings["d"] for c in cells])
    seen = np.array([c.accuracy for c in cells])

    def residuals(ab: np.ndarray) -> np.ndarray:
        return np.asarray(ndtr(1 / np.sqrt(np.abs(ab[0]) * load + width) - ab[1]) - seen)

    best = least_squares(residuals, [1.0, 2.5])
    return {
        "a": float(abs(best.x[0])),
        "b": float(best.x[1]),
        **compare(seen.tolist(), (seen + best.fun).tolist()),
    }


FORMS = {
    "remark_4_3/mean_of_max": "remark 4.3, b = m_V",
    "remark_4_3/sqrt_2_log_v": "remark 4.3, b = sqrt(2 ln V)",
    "theorem_4_2/mean_of_max": "theorem 4.2 as printed, b = m_V",
    "theorem_4_2/sqrt_2_log_v": "theorem 4.2 as printed, b = sqrt(2 ln V)",
}


def summarise_grid(rows: list[Row], part: str, kind: Kind) -> tuple[Row, list[Row]]:
    """Compare every cell with every form of the law, per task; fit a and b."""
    out: Row = {}
    every = cells_of([r for r in rows if r["part"] == part], "task", "vocab", "facts", "d", "n")
    regimes: dict[tuple[str, int, int], list[Cell]] = {}
    for c in every:
        key = (c.settings["task"], c.settings["vocab"], c.settings["facts"])
        regimes.setdefault(key, []).append(c)
    for (task, vocab, facts), cells in regimes.items():
        measured = [c.accuracy for c in cells]
        laws = [predictions(c.settings, kind) for c in cells]
        # A key's hash is linear in D numbers: slots beyond D cannot be independent.
        kept = [i for i, c in enumerate(cells) if c.settings["n"] <= c.settings["d"]]
        out[f"{task}_{vocab}_{facts}"] = {
            "cells": [
                {**c.settings, "accuracy": c.accuracy, "law": law[MAIN], "seeds": c.seeds}
                for c, law in zip(cells, laws, strict=True)
            ],
            "forms": {name: compare(measured, [law[name] for law in laws]) for name in FORMS},
            "n_up_to_d": compare([measured[i] for i in kept], [laws[i][MAIN] for i in kept]),
            "fit": fit_law(cells) if len(cells) >= 4 else None,
            "fit_n_up_to_d": fit_law([cells[i] for i in kept]) if len(kept) >= 4 else None,
            "a": recall_law.PAIRS_PER_FACT[kind, task],
            "mean_of_max": recall_law.mean_of_max(vocab),
            "sqrt_2_log_v": recall_law.sqrt_2_log_v(vocab),
        }
    limit = 0.08 if kind == "designed" else 0.1
    return out, [
        verdict(
            f"{name}: remark 4.3 with b = m_V predicts recall",
            group["forms"][MAIN]["rms"] < limit,
            group["forms"][MAIN]["rms"],
            f"rms over {len(group['cells'])} cells, largest "
            f"{group['forms'][MAIN]['max_abs_error']:.3f}",
        )
        for name, group in out.items()
    ]


def form_lines(summary: Row) -> list[str]:
    """Return a line per task and form of the law: correlation, RMS and largest difference."""
    lines = [f"{'task_V_facts':14} {'law':44} {'correlation':>11} {'rms':>6} {'largest':>8}"]
    for name, group in summary.items():
        if not isinstance(group, dict) or "forms" not in group:
            continue
        shown = {FORMS[f]: v for f, v in group["forms"].items()}
        shown[f"{FORMS[MAIN]}; N <= D"] = group["n_up_to_d"]
        for name_of_fit, cells in (("fit", ""), ("fit_n_up_to_d", "; N <= D")):
            if fit := group[name_of_fit]:
                shown[f"remark 4.3, fitted a = {fit['a']:.2f}, b = {fit['b']:.2f}{cells}"] = fit
        for form, v in shown.items():
            correlation = "n/a" if v["correlation"] is None else f"{v['correlation']:.3f}"
            lines.append(
                f"{name:14} {form:44} {correlation:>11} {v['rms']:6.3f} {v['max_abs_error']:8.3f}"
            )
    return lines


def facts_at_half(curve: Sequence[Row], name: str) -> float | None:
    """Return where a curve falls through one half, linear in log facts; None if nowhere."""
    points = sorted((float(c["facts"]), float(c[name])) for c in curve if name in c)
    for (facts, high), (more, low) in itertools.pairwise(points):
        if high >= 0.5 > low:
            return float(facts * (more / facts) ** ((high - 0.5) / (high - low)))
    return None


def summarise_layers(rows: list[Row]) -> tuple[Row, list[Row]]:
    """Does accuracy depend on layers x N alone, and as theorem 4.6 says?"""
    cells = cells_of(
        [r for r in rows if r["part"] == "layers"], "task", "vocab", "facts", "d", "n", "layers"
    )
    if not cells:
        return {}, []
    table, laws = [], []
    for c in cells:
        s = c.settings
        law = recall_law.recall(
            s["d"], s["n"], s["facts"], 1.25, recall_law.mean_of_max(s["vocab"]), s["layers"]
        )
        laws.append(law)
        table.append(
            {
                **s,
                "n_effective": s["layers"] * s["n"],
                "accuracy": c.accuracy,
                "law": law,
                "seeds": c.seeds,
            }
        )
    groups: dict[int, list[float]] = {}
    for row in table:
        groups.setdefault(row["n_effective"], []).append(row["accuracy"])
    gaps = [max(v) - min(v) for v in groups.values() if len(v) > 1]
    measured = [c.accuracy for c in cells]
    worst = max(gaps) if gaps else math.nan
    theorem = compare(measured, laws)
    rms = theorem["rms"] or 0.0
    above = [c.accuracy - p for c, p in zip(cells, laws, strict=True)]
    return {"cells": table, "law": theorem, "largest_gap_at_equal_n": worst}, [
        verdict(
            "layers: recall depends on layers x N only",
            bool(gaps) and worst < 0.1,
            worst if gaps else None,
            "largest accuracy gap at equal layers x N",
        ),
        verdict(
            "layers: theorem 4.6 predicts recall",
            rms < 0.1,
            rms,
            f"rms over {len(cells)} stacks; measured minus predicted {min(above):+.3f} to "
            f"{max(above):+.3f}",
        ),
    ]


def _paired_gaps(rows: list[Row], low: str, high: str) -> dict[tuple[int, int], list[float]]:
    """Return, per (N, heads), how much more `high` recalls than `low`, seed by seed.

    The single head is the partner at every number of heads.
    """
    found: dict[str, dict[tuple[int, int, int], float]] = {low: {}, high: {}}
    counts = sorted({r["heads"] for r in rows if r["pattern"] != "single"})
    for r in rows:
        if r["pattern"] in found:
            for heads in counts if r["pattern"] == "single" else [r["heads"]]:
                found[r["pattern"]][r["n"], heads, r["seed"]] = float(r["accuracy"])
    gaps: dict[tuple[int, int], list[float]] = {}
    for key in sorted(found[low].keys() & found[high].keys()):
        gaps.setdefault(key[:2], []).append(found[high][key] - found[low][key])
    return gaps


def summarise_heads(rows: list[Row]) -> tuple[Row, list[Row]]:
    """Order the patterns: p_MQA = p_MKA <= p_single = p_MVA <= p_MHA (theorem 4.7).

    Patterns are compared at the same N and number of heads, where alone the theorem orders
    them; a claim holds if it holds in the worst of these cells.
    """
    part = [r for r in rows if r["part"] == "heads"]
    if not part:
        return {}, []
    cells = cells_of(part, "pattern", "heads", "d", "n", "facts", "vocab")
    by = {
        p: [r["accuracy"] for r in part if r["pattern"] == p]
        for p in ("single", "mha", "mva", "mqa", "mka")
    }
    verdicts = []
    for low, high, relation in (
        ("mqa", "single", "<="),
        ("mka", "single", "<="),
        ("mqa", "mka", "="),
        ("single", "mva", "="),
        ("mva", "mha", "<="),
    ):
        gaps = _paired_gaps(part, low, high)
        if not gaps:
            continue
        mean = {cell: float(np.mean(v)) for cell, v in gaps.items()}
        if relation == "=":
            cell, gap = max(mean.items(), key=lambda item: abs(item[1]))
        else:
            cell, gap = min(mean.items(), key=lambda item: item[1])
        each = [x for v in gaps.values() for x in v]
        verdicts.append(
            verdict(
                f"heads: p_{low} {relation} p_{high}",
                abs(gap) < 0.05 if relation == "=" else gap > -0.02,
                gap,
                f"p_{high} - p_{low} in the worst of {len(gaps)} cells, N = {cell[0]} with "
                f"{cell[1]} heads, paired by seed; {min(each):+.3f} to {max(each):+.3f} over all "
                f"cells and seeds",
            )
        )
    return {
        "mean": {p: float(np.mean(v)) for p, v in by.items() if v},
        "cells": [{**c.settings, "accuracy": c.accuracy, "seeds": c.seeds} for c in cells],
    }, verdicts


INSIDE = (
    ("G_vv_contrast", ("operators", "G_vv", "contrast")),
    ("G_kq_contrast", ("operators", "G_kq", "contrast")),
    ("G_vv_retrieved", ("operators", "G_vv", "retrieved")),
    ("G_kq_retrieved", ("operators", "G_kq", "retrieved")),
    ("G_vv_diagonal_spread", ("operators", "G_vv", "diagonal_spread")),
    ("G_kq_diagonal_spread", ("operators", "G_kq", "diagonal_spread")),
    ("G_vv_shift", ("operators", "shift", "G_vv")),
    ("G_kq_shift", ("operators", "shift", "G_kq")),
    ("explained", ("state", "explained")),
    ("inverted", ("state", "inverted")),
    ("tap_removed", ("accuracy_tap_removed",)),
)


def _at(row: Row, path: Sequence[str]) -> float:
    node: Any = row
    for key in path:
        node = node[key]
    return float(node)


def summarise_inside(rows: list[Row]) -> tuple[Row, list[Row]]:
    """Average over the seeds of a cell what was seen inside its models."""
    part = [r for r in rows if r["part"] == "cell"]
    if not part:
        return {}, []
    cells = []
    for c in cells_of(part, "task", "vocab", "facts", "d", "n"):
        own = [r for r in part if c.settings.items() <= r.items()]
        seen = {k: float(np.mean([_at(r["inside"], path) for r in own])) for k, path in INSIDE}
        cells.append({**c.settings, "accuracy": c.accuracy, **seen})
    # Random embeddings in r dimensions have contrast sqrt(r), and a K x K matrix of rank r has at
    # most sqrt(r (K - 1) / (K - r)): 1 is the identity as far as there is room.  G_vv has rank D;
    # G_kq the smaller of N and D, as keys are computed from D numbers.
    ratios = {
        "G_vv": [c["G_vv_contrast"] / c["d"] ** 0.5 for c in cells],
        "G_kq": [c["G_kq_contrast"] / min(c["n"], c["d"]) ** 0.5 for c in cells],
    }
    lowest = min(min(c["G_vv_shift"], c["G_kq_shift"]) for c in cells)
    # Over models, not cells: a mean would hide the model that is not the circuit.
    own_largest, blurred = min(
        (_at(r["inside"], ("operators", g, "retrieved")), f"{g} of {r['task']} {r['d'], r['n']}")
        for r in part
        for g in ("G_vv", "G_kq")
    )
    agree = [
        _at(r["inside"], ("operators", "G_vv", "sign"))
        * _at(r["inside"], ("operators", "G_kq", "sign"))
        == 1
        for r in part
    ]
    able = [c for c in cells if c["accuracy"] > 0.5]
    which = "cells that recall more than half" if able else "cells (none recalls half)"
    able = able or cells
    explained = float(np.mean([c["explained"] for c in able]))
    return {"cells": cells, "contrast_over_random": ratios}, [
        verdict(
            "G_vv and G_kq are as close to identities as D and N dimensions allow",
            all(0.75 < r < 1.5 for v in ratios.values() for r in v),
            min(min(v) for v in ratios.values()),
            f"smallest contrast (mean diagonal over rms of the rest) against random embeddings'; "
            f"mean {np.mean(ratios['G_vv']):.2f} sqrt(D) and {np.mean(ratios['G_kq']):.2f} "
            f"sqrt(min(N, D)) over {len(cells)} cells",
        ),
        verdict(
            "an operator's own entries are the largest of their columns, in every model",
            own_largest > 0.95,
            own_largest,
            f"smallest share of columns, {blurred}",
        ),
        verdict(
            "G_vv and G_kq have the same sign, so that a fact adds to its value's logit",
            all(agree),
            sum(agree) / len(agree),
            f"share of {len(agree)} models",
        ),
        verdict(
            "the convolution shifts: values are current, keys are previous tokens",
            lowest > 0.95,
            lowest,
            "smallest share of an operator's diagonal weight in the block that the shift predicts",
        ),
        verdict(
            "the state is the facts' hash table",
            explained > 0.5,
            explained,
            f"mean squared cosine with the ideal table over the {len(able)} {which}; inversion "
            f"finds {np.mean([c['inverted'] for c in able]):.3f} of their facts, the model recalls "
            f"{np.mean([c['accuracy'] for c in able]):.3f}",
        ),
    ]


def summarise_ablation(rows: list[Row]) -> tuple[Row, list[Row]]:
    """Set the models trained without the convolution beside guessing and their intact twins.

    Without it the state knows which values were in the context but not whose they are: a guess
    among them is right once in `facts`.  With one fact that is always, and nothing is claimed.
    """
    out: Row = {}
    verdicts = []
    part = [r for r in rows if r["part"] == "ablation"]
    for c in cells_of(part, "task", "vocab", "facts", "d", "n"):
        whole = [r for r in rows if r["part"] == "cell" and c.settings.items() <= r.items()]
        chance = 1 / c.settings["facts"]
        row = {
            **c.settings,
            "accuracy": c.accuracy,
            "seeds": c.seeds,
            "guess_among_context_values": chance,
        }
        detail = f"a guess among the context's values {chance:.3f}"
        if whole:
            row["with_convolution"] = float(np.mean([r["accuracy"] for r in whole]))
            removed = [_at(r["inside"], ("accuracy_tap_removed",)) for r in whole]
            row["tap_removed"] = float(np.mean(removed))
            detail += (
                f"; with it {row['with_convolution']:.3f}, its previous-token tap removed after "
                f"training {row['tap_removed']:.3f}"
            )
        name = c.settings["task"]
        out[name] = row
        if c.settings["facts"] < 2:
            continue
        claim = f"{name}: trained without the convolution, no better than guessing"
        verdicts.append(verdict(claim, c.accuracy < 1.2 * chance, c.accuracy, detail))
    return out, verdicts
