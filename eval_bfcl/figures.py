"""The report's figures: rates against pool size, gate scale and retriever strength; outcomes.

Where several seeds of one setup were trained, its figures show the setup (mean and interval
over seeds) instead of every model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from eval_bfcl import plots, tally
from eval_bfcl.outcomes import OUTCOMES

Row = Mapping[str, Any]

LABELS = {
    "accuracy": "Accuracy",
    "right_tool": "Right tool called",
    "valid_call": "Well-formed call",
    "hallucination": "Hallucination rate",
}


def name_of(facts: Row) -> str:
    """Return a row's name in figures: a setup says so, as a model may have the same name.

    A gate scale is added if the name does not show it.
    """
    scale = tally.scale_text(facts["gate_scale"])
    shown = f"s{scale}" in str(facts["model"])
    name = str(facts["model"]) + ("" if scale == "-" or shown else f" (scale {scale})")
    return name + (f" (mean of {len(facts['models'])} seeds)" if "models" in facts else "")


def by_line(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Return the rows of every line of a figure, under its name: a model's or a setup's."""
    lines: dict[Any, list[Row]] = {}
    for row in rows:
        key = row["model"], tally.scale_text(row["gate_scale"]), "models" in row
        lines.setdefault(key, []).append(row)
    return [(name_of(line[0]), line) for line in lines.values()]


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def shown_rows(summary: Sequence[Row], means: Sequence[Row]) -> list[Row]:
    """Return a row per line of a figure and pool size: setups first, then all other models."""
    inside = {(tally.setting(r), model, r["k"]) for r in means for model in r["models"]}
    alone = [r for r in summary if r["seed"] == "all"]
    return [*means, *(r for r in alone if (tally.setting(r), r["model"], r["k"]) not in inside)]


def draw(summary: Sequence[Row], means: Sequence[Row]) -> dict[str, str]:
    """Return file name -> SVG text, most important first.

    Args:
        means: rows of `trainings.summarise`.
    """
    pooled = shown_rows(summary, means)
    settings = list(dict.fromkeys(tally.setting(r) for r in pooled))
    out: dict[str, str] = {}
    for setting in settings:
        rows = [r for r in pooled if tally.setting(r) == setting]
        end = "" if len(settings) == 1 else "_" + slug(setting)
        sizes = sorted({r["k"] for r in rows})
        for rate, label in LABELS.items():
            if all(r[rate] is None for r in rows):
                continue  # no tool is right anywhere
            series = []
            for name, line in by_line(rows):
                points = [_point(sizes.index(r["k"]), r, rate) for r in line if r[rate] is not None]
                series.append(_series(name, points))
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


def _tuned(row: Row) -> bool:
    """Return whether a row's models were fine-tuned here: older scores say it by name only."""
    named = re.search(r"-sft(-|$)", str(row["model"])) is not None
    return "models" in row or row.get("sft_seed") is not None or named


def _against_scale(rows: Sequence[Row], setting: str, end: str) -> dict[str, str]:
    """Return every rate against gate scale: a line per base, before or after tuning, and k."""
    gated = [r for r in rows if isinstance(r["gate_scale"], (int, float))]
    scales = sorted({r["gate_scale"] for r in gated})
    groups: dict[tuple[str, bool], list[Row]] = {}
    for r in gated:
        groups.setdefault((r["base"], _tuned(r)), []).append(r)
    if max((len({r["gate_scale"] for r in g}) for g in groups.values()), default=0) < 3:
        return {}  # two points are no curve
    out = {}
    bases = {base for base, _ in groups}
    kinds = {tuned for _, tuned in groups}
    for rate, label in LABELS.items():
        if all(r[rate] is None for r in gated):
            continue
        series = []
        for (base, tuned), group in groups.items():
            head = [base] if len(bases) > 1 else []
            head += ["fine-tuned" if tuned else "before fine-tuning"] if len(kinds) > 1 else []
            for k in dict.fromkeys(r["k"] for r in group):
                points = [
                    _point(scales.index(r["gate_scale"]), r, rate)
                    for r in group
                    if r["k"] == k and r[rate] is not None
                ]
                series.append(_series(", ".join([*head, f"k = {k}"]), points))
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


def _series(name: str, points: Sequence[plots.Point]) -> plots.Series:
    """Return a line from left to right: its pool sizes may come from several folders.

    Several models at one place, which nothing averages, are points that no line joins.
    """
    joined = len({p.place for p in points}) == len(points)
    return plots.Series(name, sorted(points, key=lambda p: p.place), joined=joined)


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
            for name, line in by_line(rows):
                points = [
                    _point(betas.index(_beta(r)), r, "accuracy")
                    for r in line
                    if r["k"] == k and r["accuracy"] is not None
                ]
                series.append(_series(name, points))
            ticks = ["BM25" if b == float("inf") else f"{b:g}" for b in betas]
            out[f"accuracy_against_beta_{slug(split)}_{utility}_k{k}.svg"] = plots.lines(
                f"Weak retriever: {split}, k = {k}",
                f"beta ({utility})",
                "Accuracy (%)",
                ticks,
                series,
            )
    return out
