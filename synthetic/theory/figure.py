"""The theory figure: predictions as lines, trained models as points."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from synthetic import plots
from synthetic.sweep import Sweep
from synthetic.theory import flow, settings


def draw(out: Path, sweep: Sweep, summary: Mapping[str, Any]) -> None:
    """Draw the panels that the summary holds, side by side, as theory.svg and theory.png."""
    letters = [p for p in "abcd" if p in summary]
    with plots.style() as plt:
        columns = min(2, len(letters))
        rows = -(-len(letters) // columns)
        figure, axes = plt.subplots(
            rows, columns, figsize=(5.2 * columns, 3.7 * rows), squeeze=False
        )
        for axis in axes.flat[len(letters) :]:
            axis.set_visible(False)
        for axis, letter in zip(axes.flat, letters, strict=False):
            DRAW[letter](axis, sweep, summary[letter])
        figure.tight_layout()
        plots.save(figure, out, "theory")


def _draw_a(axis: Any, sweep: Sweep, s: Mapping[str, Any]) -> None:
    alphas = np.array(s["alpha0"])
    for name, label, colour in (
        ("delta_m", "memorisation $\\delta_m$", 1),
        ("delta_r", "retrieval $\\delta_r$", 0),
    ):
        values = np.array(
            [[r[name] for r in sweep.select(panel="a", gate="trained", alpha0=a)] for a in alphas]
        )
        axis.plot(alphas, values.mean(1), "o-", color=plots.COLOURS[colour], label=label)
        axis.fill_between(
            alphas,
            *np.quantile(values, [0.05, 0.95], axis=1),
            alpha=0.2,
            color=plots.COLOURS[colour],
            lw=0,
        )
    axis.axvline(s["predicted_exact"], color="k", ls="--", lw=1, label="root of proposition 1")
    axis.axvline(
        s["predicted_approximate"],
        color=plots.GREY,
        ls=":",
        lw=1,
        label=r"$\sqrt{(1-2\epsilon)/P}$",
    )
    axis.set(
        xscale="log",
        yscale="log",
        xlabel=r"initial decay $\alpha$",
        ylabel=f"margin after {s['steps']} steps",
        title="a  Initial bias",
    )
    axis.xaxis.set_minor_formatter("")
    axis.legend()


def _draw_b(axis: Any, sweep: Sweep, s: Mapping[str, Any]) -> None:
    lr = settings.LR["b"]
    for gate, colour, marker in (("trained", 0, "o"), ("frozen", 1, "s")):
        rows = [
            r for r in sweep.select(panel="b", gate=gate, points="gaussian") if r["escape_steps"]
        ]
        axis.plot(
            [flow.escape_scale(r["alpha0"]) for r in rows],
            [r["escape_steps"] for r in rows],
            marker,
            alpha=0.6,
            color=plots.COLOURS[colour],
            label=f"SGD, gate {gate}",
        )
    line = np.geomspace(min(s["alpha0"]), max(s["alpha0"]), 40)
    x = [flow.escape_scale(a) for a in line]
    axis.plot(
        x,
        [flow.full_flow(a, settings.POINTS, settings.NOISE) / lr for a in line],
        color=plots.COLOURS[0],
        label="full gradient flow",
    )
    axis.plot(
        x,
        [flow.full_flow(a, settings.POINTS, settings.NOISE, train_gate=False) / lr for a in line],
        color=plots.COLOURS[1],
        lw=1,
        label="full flow, gate frozen",
    )
    axis.plot(
        x,
        [flow.reduced_flow(a, settings.NOISE) / lr for a in line],
        "--",
        color=plots.GREY,
        label="reduced flow on the plateau",
    )
    if s["slope"] is not None:
        intercept = s["fits"][0]["intercept"]
        fitted = [(u, s["slope"] * u + intercept) for u in x if s["slope"] * u + intercept > 0]
        axis.plot(
            *zip(*fitted, strict=True),
            ":",
            color="k",
            label=f"line, $R^2$ = {s['r2']:.3f} on [{s['fit_range'][0]:g}, {s['fit_range'][1]:g}]",
        )
    axis.set(
        xscale="log",
        yscale="log",
        xlabel=r"$1/(\alpha_0 \log(1/\alpha_0))$",
        ylabel="escape time (steps)",
        title="b  Escape from memorisation",
    )
    axis.set_ylim(top=20 * s["cap_steps"])
    axis.legend()


def _draw_c(axis: Any, sweep: Sweep, s: Mapping[str, Any]) -> None:
    line = np.geomspace(min(s["tau"]), max(s["tau"]), 60)
    axis.plot(
        line,
        [flow.bayes_accuracy_uniform(t, settings.LONG_DIM, settings.LENGTH_C) for t in line],
        "--",
        color=plots.GREY,
        label="Bayes (label coordinate)",
    )
    axis.axhline(
        s["limit_accuracy"], color="k", ls=":", lw=1, label=r"no decay: $\Phi(\sqrt{d/(\ell-1)})$"
    )
    axis.plot(
        s["tau"], s["trained_accuracy"], "o", color=plots.COLOURS[0], label="SGD, gate frozen"
    )
    axis.plot(
        s["tau"],
        s["trained_accuracy_free_gate"],
        "s",
        mfc="none",
        color=plots.COLOURS[1],
        label=r"SGD, gate trained (at its initial $\tau$)",
    )
    axis.plot(
        s["final_tau_free_gate"],
        s["trained_accuracy_free_gate"],
        "x",
        color=plots.COLOURS[1],
        label=r"the same at its final $\tau$",
    )
    axis.set(
        xscale="log",
        xlabel=r"effective length $\tau$ (tokens)",
        ylabel="accuracy",
        title="c  Long contexts",
    )
    axis.legend()


def _draw_d(axis: Any, sweep: Sweep, s: Mapping[str, Any]) -> None:
    taus, distances = np.array(s["tau"]), np.array(s["distance"])
    mesh = axis.pcolormesh(
        taus,
        distances,
        np.array(s["trained_accuracy"]).T,
        vmin=0.5,
        vmax=1,
        cmap="viridis",
        shading="nearest",
    )
    axis.figure.colorbar(mesh, ax=axis, label="accuracy (gate frozen)")
    reach = [(t, r) for t, r in zip(taus, s["reach"], strict=True) if r is not None]
    if reach:
        axis.plot(
            *zip(*reach, strict=True),
            "o",
            color="w",
            mec="k",
            label=f"measured, error {s['contour_error']}",
        )
    axis.plot(taus, s["bayes_reach"], "-", color="w", label="Bayes")
    if "contour_slope" in s:
        line = np.geomspace(taus.min(), min(taus.max(), 0.9 * settings.LONG_DIM), 60)
        axis.plot(
            line,
            s["contour_slope"] * line * np.log(settings.LONG_DIM / line),
            "--",
            color=plots.COLOURS[1],
            label=rf"{s['contour_slope']:.2f} $\tau\,\log(d/\tau)$",
        )
    axis.set(
        xscale="log",
        yscale="log",
        xlabel=r"effective length $\tau$ (tokens)",
        ylabel=r"distance $\Delta$ (tokens)",
        title="d  Decay makes retrieval local",
    )
    axis.set_ylim(distances[0] * 0.8, distances[-1] * 1.25)
    axis.grid(False)
    axis.legend(facecolor="#888888", frameon=True, framealpha=0.6)


DRAW = {"a": _draw_a, "b": _draw_b, "c": _draw_c, "d": _draw_d}
