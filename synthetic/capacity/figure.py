"""Capacity figures: predicted against trained, collapse onto one curve, layers and heads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gatewright import recall_law
from synthetic import plots


def draw_grid(out: Path, summary: Mapping[str, Any], name: str, kind: str) -> None:
    """Draw what a summary holds: accuracy against the law and its collapse, layers, heads."""
    groups = [(k, v) for k, v in summary.items() if isinstance(v, Mapping) and "forms" in v]
    extras = [k for k in ("layers", "heads") if summary.get(k)]
    count = (2 if groups else 0) + len(extras)
    if not count:
        return
    with plots.style() as plt:
        figure, axes = plt.subplots(1, count, figsize=(4.3 * count, 3.8), squeeze=False)
        left = list(axes[0])
        if groups:
            _prediction(left.pop(0), groups, kind)
            _collapse(left.pop(0), groups)
        for axis, extra in zip(left, extras, strict=True):
            (_layers if extra == "layers" else _heads)(axis, summary[extra])
        figure.tight_layout()
        plots.save(figure, out, name)


def _points(
    axis: Any,
    cells: Sequence[Mapping[str, Any]],
    x: Sequence[float],
    *,
    label: str,
    colour: str,
) -> None:
    """Plot accuracies at x; cells with N > D, which the law does not know, are hollow."""
    for wide in (False, True):
        some = [i for i, c in enumerate(cells) if (c["n"] > c["d"]) == wide]
        axis.plot(
            [x[i] for i in some],
            [cells[i]["accuracy"] for i in some],
            "o",
            fillstyle="none" if wide else "full",
            color=colour,
            alpha=0.7,
            label=None if wide else label,
        )


def _prediction(axis: Any, groups: Sequence[tuple[str, Mapping[str, Any]]], kind: str) -> None:
    for i, (label, group) in enumerate(groups):
        law = [c["law"] for c in group["cells"]]
        rms = group["forms"]["remark_4_3/mean_of_max"]["rms"]
        colour = plots.COLOURS[i % len(plots.COLOURS)]
        _points(axis, group["cells"], law, colour=colour, label=f"{label}: rms {rms:.3f}")
    axis.plot([0, 1], [0, 1], "--", color=plots.GREY, lw=1)
    axis.set(
        xlabel="predicted recall (remark 4.3, $b = m_V$)",
        ylabel="measured recall",
        title=f"Prediction, {kind} models (hollow: N > D)",
    )
    axis.legend()


def _collapse(axis: Any, groups: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    for i, (label, group) in enumerate(groups):
        cells, a = group["cells"], group["a"]
        x = [1 / math.sqrt(recall_law.noise_variance(c["d"], c["n"], c["facts"], a)) for c in cells]
        colour = plots.COLOURS[i % len(plots.COLOURS)]
        _points(axis, cells, x, colour=colour, label=label)
    _curves(axis, groups)
    axis.set(xlabel=r"$1/\sigma$", ylabel="recall", title="Collapse onto one curve")
    axis.legend()


def _curves(axis: Any, groups: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    from scipy.special import ndtr

    x = np.linspace(0, max(axis.get_xlim()[1], 5), 100)
    for b, style, label in (
        (groups[0][1]["mean_of_max"], "-", r"$\Phi(x - m_V)$"),
        (groups[0][1]["sqrt_2_log_v"], ":", r"$\Phi(x - \sqrt{2 \ln V})$"),
    ):
        axis.plot(x, ndtr(x - b), style, color="k", lw=1, label=label)


def _layers(axis: Any, part: Mapping[str, Any]) -> None:
    depths = sorted({c["layers"] for c in part["cells"]})
    for i, depth in enumerate(depths):
        cells = [c for c in part["cells"] if c["layers"] == depth]
        axis.plot(
            [c["n_effective"] for c in cells],
            [c["accuracy"] for c in cells],
            "o-",
            color=plots.COLOURS[i],
            label=f"{depth} layers",
        )
    cells = sorted(part["cells"], key=lambda c: int(c["n_effective"]))
    axis.plot(
        [c["n_effective"] for c in cells],
        [c["law"] for c in cells],
        "--",
        color=plots.GREY,
        label="theorem 4.6",
    )
    axis.set(xscale="log", xlabel=r"layers $\times$ N", ylabel="recall", title="Layers")
    axis.legend()


def _heads(axis: Any, part: Mapping[str, Any]) -> None:
    for i, pattern in enumerate(("mha", "mva", "single", "mka", "mqa")):
        cells = [c for c in part["cells"] if c["pattern"] == pattern]
        if cells:
            axis.plot(
                [i] * len(cells),
                [c["accuracy"] for c in cells],
                "o",
                color=plots.COLOURS[i],
                alpha=0.7,
            )
            axis.plot([i - 0.25, i + 0.25], [part["mean"][pattern]] * 2, color=plots.COLOURS[i])
    axis.set_xticks(range(5), ["MHA", "MVA", "single", "MKA", "MQA"])
    axis.set(ylabel="recall", title="Heads")


def draw_curve(out: Path, summary: Mapping[str, Any]) -> None:
    """Draw one trained model's recall against the number of facts, law beside it."""
    curve = summary["curve"]
    with plots.style() as plt:
        figure, axis = plt.subplots(figsize=(4.8, 3.6))
        facts = [c["facts"] for c in curve]
        axis.plot(facts, [c["accuracy"] for c in curve], "o-", label="measured as trained")
        if "retrained" in curve[0]:
            axis.plot(facts, [c["retrained"] for c in curve], "s-", label="trained at each load")
        axis.plot(
            facts, [c["law"] for c in curve], "--", color=plots.GREY, label="law (prediction)"
        )
        axis.axvline(
            summary["predicted_facts_at_half"],
            color="k",
            ls=":",
            lw=1,
            label=f"predicted 50% at {summary['predicted_facts_at_half']:.1f} facts",
        )
        axis.set(
            xscale="log",
            xlabel="facts in the context",
            ylabel="recall",
            title="How many facts this state holds",
        )
        axis.legend()
        figure.tight_layout()
        plots.save(figure, out, "curve")
