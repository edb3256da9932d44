"""The rules figure: memory and retrieval while training, larger pools, weak retrievers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from synthetic import plots
from synthetic.rules import report
from synthetic.sweep import Row

Key = tuple[str, float | None]


def _name(key: Key) -> str:
    return "Llama" if key[1] is None else f"offset {key[1]:+g}"


def _line(key: Key) -> str:
    return "--" if key[1] is None else "-"


def draw(out: Path, rows: list[Row], summary: Mapping[str, Any]) -> None:
    """Draw the panels that the rows have as rules.svg and rules.png."""
    retrieval = [r for r in rows if r["part"] == "retrieval"]
    length = [r for r in rows if r["part"] == "length"]
    panels: list[tuple[Any, Any]] = []
    if retrieval:
        panels += [(_memory, retrieval), (_resampled, retrieval)]
    if length:
        settings = summary["length"]["settings"]
        panels += [(_lengths, settings)]
        panels += [(_weak(beta), settings) for beta in settings[0]["weak_retriever"]]
    with plots.style() as plt:
        figure, axes = plt.subplots(1, len(panels), figsize=(3.9 * len(panels), 3.7), squeeze=False)
        for letter, axis, (panel, data) in zip("abcdefg", axes[0], panels, strict=False):
            panel(axis, data)
            axis.set(ylim=(0, 1.02), ylabel="accuracy")
            axis.set_title(f"{letter}  {axis.get_title(loc='left')}")
            axis.legend()
        figure.tight_layout()
        plots.save(figure, out, "rules")


def _colours(keys: list[Key]) -> dict[Key, Any]:
    """Weak gates dark, strong gates light, the Transformer black."""
    gated = [k for k in keys if k[1] is not None]
    found: dict[Key, Any] = dict(zip(gated, plots.shades(len(gated)), strict=True))
    return found | {k: "k" for k in keys if k[1] is None}


def _curves(axis: Any, rows: list[Row], metric: str, title: str) -> None:
    groups = report.groups(rows)
    colours = _colours([(m, o) for m, o, _ in groups])
    for model, offset, runs in groups:
        key = (model, offset)
        steps = [c["step"] for c in runs[0]["curve"]]
        values = np.array([[c[metric] for c in r["curve"]] for r in runs])
        axis.plot(steps, values.mean(0), _line(key), color=colours[key], label=_name(key))
        axis.fill_between(steps, values.min(0), values.max(0), color=colours[key], alpha=0.12, lw=0)
    axis.set(xlabel="step", title=title)


def _memory(axis: Any, rows: list[Row]) -> None:
    _curves(axis, rows, "no_oracle", "No oracle: memory")


def _resampled(axis: Any, rows: list[Row]) -> None:
    _curves(axis, rows, "random_oracle_name", "Oracle under a new name: retrieval")


def _lengths(axis: Any, settings: list[Mapping[str, Any]]) -> None:
    colours = _colours([(s["model"], s["offset"]) for s in settings])
    for s in settings:
        key = (s["model"], s["offset"])
        axis.plot(
            s["lengths"],
            s["length_accuracy"],
            f"o{_line(key)}",
            color=colours[key],
            label=_name(key),
        )
        low, high = np.array(s["length_accuracy_interval"]).T
        axis.fill_between(s["lengths"], low, high, color=colours[key], alpha=0.15, lw=0)
    axis.set(xscale="log", xlabel="pool size k", title="Larger pools")


def _weak(beta: str) -> Any:
    def panel(axis: Any, settings: list[Mapping[str, Any]]) -> None:
        colours = _colours([(s["model"], s["offset"]) for s in settings])
        for s in settings:
            key = (s["model"], s["offset"])
            points = np.array(s["weak_retriever"][beta])
            axis.plot(*points.T, f"o{_line(key)}", color=colours[key], label=_name(key))
        axis.set(xscale="log", xlabel="pool size k", title=rf"Retriever with $\beta$ = {beta}")

    return panel
