"""The key-value figure: curves, escape times against e^offset, length generalisation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from synthetic import plots
from synthetic.key_value import report
from synthetic.key_value.settings import ESCAPE
from synthetic.sweep import Row


def _name(model: str, offset: float | None) -> str:
    return "GPT-NeoX" if offset is None else f"offset {offset:+g}"


def draw(out: Path, rows: list[Row], summary: Mapping[str, Any]) -> None:
    """Draw the panels that the rows have as key_value.svg and key_value.png."""
    first = [r for r in rows if r["order"] == "best_first"]
    last = [r for r in rows if r["order"] == "best_last"]
    panels: list[tuple[Any, list[Row]]] = []
    if first:
        panels += [(_curves, first), (_escape, first)]
    if last:
        panels += [(_lengths, last)]
    with plots.style() as plt:
        figure, axes = plt.subplots(1, len(panels), figsize=(4.6 * len(panels), 3.8), squeeze=False)
        for axis, (panel, chosen) in zip(axes[0], panels, strict=True):
            panel(axis, chosen, summary)
        figure.tight_layout()
        plots.save(figure, out, "key_value")


def _colours(rows: list[Row]) -> dict[tuple[str, float | None], Any]:
    """Weak gates dark, strong gates light, the Transformer black."""
    settings = report.groups(rows)
    gated = [k for k in settings if k[1] is not None]
    shades = plots.shades(len(gated))
    found = {(m, o): c for (m, o, _), c in zip(gated, shades, strict=True)}
    return found | {(m, o): "k" for m, o, _ in settings if o is None}


def _curves(axis: Any, rows: list[Row], summary: Mapping[str, Any]) -> None:
    colours = _colours(rows)
    for model, offset, runs in report.groups(rows):
        # By escape time; runs that never escaped, by how far they came.
        order = sorted(runs, key=lambda r: (report.waited(r), -r["accuracy"]))
        curve = order[len(order) // 2]["curve"]  # the run of median escape time
        axis.plot(
            [c[0] for c in curve],
            [c[1] for c in curve],
            color=colours[model, offset],
            ls="-" if offset is not None else "--",
            label=_name(model, offset),
        )
    axis.axhline(rows[0]["memory_accuracy"], color=plots.GREY, ls=":", lw=1)
    axis.axhline(ESCAPE, color=plots.GREY, ls=":", lw=1)
    axis.set(
        xlabel="step",
        ylabel="accuracy of whole values",
        title="a  Leaving memory (best-first), median runs",
        ylim=(0, 1.02),
    )
    axis.legend()


def _escape(axis: Any, rows: list[Row], summary: Mapping[str, Any]) -> None:
    colours = _colours(rows)
    for model, offset, runs in report.groups(rows):
        if offset is None:
            continue
        for escaped, marker in ((True, "o"), (False, "^")):
            some = [r for r in runs if (r["escape_step"] is not None) == escaped]
            axis.plot(
                [math.exp(offset)] * len(some),
                [report.waited(r) for r in some],
                marker,
                mfc="none" if not escaped else None,
                color=colours[model, offset],
                label=None if escaped or not some else f"{_name(model, offset)}: not yet",
            )
    line = summary["best_first"]["escape"].get("exp_offset")
    if line is not None:
        swept = [r["offset"] for r in rows if r["offset"] is not None]
        x = np.geomspace(math.exp(min(swept)), math.exp(max(swept)), 80)
        y = line["slope"] * x + line["intercept"]
        shown = (y > 0) & (y <= rows[0]["cap_steps"])
        axis.plot(
            x[shown], y[shown], "k:", label=f"line in $e^{{offset}}$, $R^2$ = {line['r2']:.2f}"
        )
    axis.set(
        xscale="log",
        xlabel=r"$e^{\mathrm{offset}}$",
        ylabel="escape time (steps)",
        title="b  Escape time of every seed",
        ylim=(0, rows[0]["cap_steps"] * 1.05),
    )
    axis.legend()


def _lengths(axis: Any, rows: list[Row], summary: Mapping[str, Any]) -> None:
    colours = _colours(rows)
    for one in summary["best_last"]["settings"]:
        key = (one["model"], one["offset"])
        axis.plot(
            one["lengths"],
            one["length_accuracy"],
            "o-" if one["offset"] is not None else "o--",
            color=colours[key],
            label=_name(*key),
        )
        low, high = np.array(one["length_accuracy_interval"]).T
        axis.fill_between(one["lengths"], low, high, color=colours[key], alpha=0.15, lw=0)
    axis.axvline(rows[0]["lengths"][0], color=plots.GREY, ls=":", lw=1)
    axis.set(
        xlabel="pairs in the context",
        ylabel="accuracy of whole values",
        title="c  Longer contexts (best-last)",
        ylim=(0, 1.02),
    )
    axis.legend()
