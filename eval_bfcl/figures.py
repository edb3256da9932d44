"""The report's figures: rates against pool size, gate scale and retriever strength; outcomes.

Where several seeds of one setup were trained, its figures show the setup (mean and interval
over seeds) instead of every model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from eval_bfcl import plots, tally, trainings
from eval_bfcl.outcomes import OUTCOMES

Row = Mapping[str, Any]

LABELS = {
    "accuracy": "Accuracy",
    "right_tool": "Right tool called",
    "valid_call": "Well-formed call",
    "hallucination": "Hallucination rate",
}


def name_of(facts: Row) -> str:
    """Return a model's name in figures, with its gate scale if the name does not show it."""
    scale = tally.scale_text(facts["gate_scale"])
    shown = f"s{scale}" in str(facts["model"])
    return str(facts["model"]) + ("" if scale == "-" or shown else f" (scale {scale})")


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def shown_rows(summary: Sequence[Row], setups: Sequence[trainings.Setup]) -> list[Row]:
    """Return a row per line of a figure and pool size: setups first, then all other models."""
    inside = {(s.setting, f["model"]) for s in setups for f, _ in s.runs.values()}
    alone = [r for r in summary if r["seed"] == "all"]
    alone = [r for r in alone if (tally.setting(r), r["model"]) not in inside]
    return [*trainings.summarise(setups), *alone]


def draw(summary: Sequence[Row], setups: Sequence[trainings.Setup]) -> dict[str, str]:
    """Return file name -> SVG text, most important first."""
    pooled = shown_rows(summary, setups)
    settings = list(dict.fromkeys(tally.setting(r) for r in pooled))
    out: dict[str, str] = {}
    for setting in settings:
        rows = [r for r in pooled if tally.setting(r) == setting]
        end = "" if len(settings) == 1 else "_" + slug(setting)
        sizes = sorted({r["k"] for r in rows})
        for rate, label in LABELS.items():
            series = [
                plots.Series(
                    model,
                    [
                        _point(sizes.index(r["k"]), r, rate)
                        for r in rows
                        if name_of(r) == model and r[rate] is not None
                    ],
                )
                for model in dict.fromkeys(map(name_of, rows))
            ]
            if rate == "accuracy":
                series += _ceilings(rows, sizes)
            out[f"{rate}{end}.svg"] = plots.lines(
                f"{label}: {setting}",
                "pool size k",
                f"{label} (%)",
                [str(k) for k in sizes],
                series,
            )
        bars = [
            (f"{name_of(r)}, k={r['k']}", {str(n): int(r[f"n_{n}"]) for n in OUTCOMES})
            for r in rows
        ]
        out |= _against_scale(rows, setting, end)
        out[f"outcomes{end}.svg"] = plots.outcome_bars(f"Outcomes: {setting}", bars)
    return out | _against_beta(pooled)


def _against_scale(rows: Sequence[Row], setting: str, end: str) -> dict[str, str]:
    """Return every rate against gate scale, a line per base and pool size."""
    gated = [r for r in rows if isinstance(r["gate_scale"], (int, float))]
    scales = sorted({r["gate_scale"] for r in gated})
    per_base = [len({r["gate_scale"] for r in gated if r["base"] == x["base"]}) for x in gated]
    if max(per_base, default=0) < 3:
        return {}  # two points are no curve
    out = {}
    bases = list(dict.fromkeys(r["base"] for r in gated))
    for rate, label in LABELS.items():
        series = []
        for base, k in dict.fromkeys((r["base"], r["k"]) for r in gated):
            points = [
                _point(scales.index(r["gate_scale"]), r, rate)
                for r in gated
                if (r["base"], r["k"]) == (base, k) and r[rate] is not None
            ]
            name = f"k = {k}" if len(bases) == 1 else f"{base}, k = {k}"
            series.append(plots.Series(name, sorted(points, key=lambda p: p.place)))
        out[f"{rate}_against_scale{end}.svg"] = plots.lines(
            f"{label} by gate scale: {setting}",
            "gate scale (< 1 remembers longer)",
            f"{label} (%)",
            [f"{s:g}" for s in scales],
            series,
        )
    return out


def _ceilings(rows: Sequence[Row], sizes: Sequence[int]) -> list[plots.Series]:
    """Return a predicted curve for every size of state among the models."""
    curves: dict[str, dict[int, float]] = {}
    for r in rows:
        if r["predicted_ceiling"] is not None:
            curves.setdefault(r["predicted_from"], {})[r["k"]] = r["predicted_ceiling"]
    return [
        plots.Series(
            name,
            [plots.Point(sizes.index(k), p, p, p) for k, p in sorted(curve.items())],
            predicted=True,
        )
        for name, curve in curves.items()
    ]


def _point(place: int, row: Row, rate: str) -> plots.Point:
    return plots.Point(place, row[rate], row[f"{rate}_low"], row[f"{rate}_high"])


def _beta(row: Row) -> float:
    return float("inf") if row["beta"] is None else float(row["beta"])


def _against_beta(pooled: Sequence[Row]) -> dict[str, str]:
    """Return accuracy against retriever strength, a figure per split, utility and pool size.

    BM25 without noise is beta = infinity.
    """
    out: dict[str, str] = {}
    noisy = [r for r in pooled if r["retriever"] == "plackett_luce"]
    for split, utility in dict.fromkeys((r["split"], r["utility"]) for r in noisy):
        rows = [
            r
            for r in pooled
            if r["split"] == split
            and (r["retriever"] == "bm25" or (r["beta"] is not None and r["utility"] == utility))
        ]
        betas = sorted({_beta(r) for r in rows})
        if len(betas) < 2:
            continue
        for k in sorted({r["k"] for r in noisy if r["split"] == split}):
            series = []
            for model in dict.fromkeys(map(name_of, rows)):
                points = [
                    _point(
                        betas.index(float("inf") if r["beta"] is None else r["beta"]), r, "accuracy"
                    )
                    for r in rows
                    if name_of(r) == model and r["k"] == k and r["accuracy"] is not None
                ]
                series.append(plots.Series(model, sorted(points, key=lambda p: p.place)))
            ticks = ["BM25" if b == float("inf") else f"{b:g}" for b in betas]
            out[f"accuracy_against_beta_{slug(split)}_{utility}_k{k}.svg"] = plots.lines(
                f"Weak retriever: {split}, k = {k}",
                f"beta ({utility})",
                "Accuracy (%)",
                ticks,
                series,
            )
    return out
