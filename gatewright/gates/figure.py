"""A figure of effective lengths as plain SVG: a dot per head over layers, a histogram beside.

Written by hand rather than with matplotlib, so that looking at a checkpoint costs no import.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from html import escape

import numpy as np

from gatewright.gates.statistics import CONTEXTS, LayerGates
from gatewright.gates.tables import context_name

COLOURS = ("#1f6feb", "#d1242f")
"""First and second checkpoint."""

_WIDTH, _HEIGHT = 860, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 640, 40, 370
_HISTOGRAM = (665, 845)
MAX_DOTS_PER_LAYER = 512
DRAWN = (1e-6, 1e12)
"""tau outside this range (in tokens), 0 and inf among them, are drawn at its ends."""
BINS = 24


class _Scale:
    """tau (log) -> y; layer -> x."""

    def __init__(self, taus: Sequence[np.ndarray], layers: Sequence[int]) -> None:
        every = np.concatenate(taus)
        self.low = np.floor(np.log10(every.min()))
        self.high = max(np.ceil(np.log10(every.max())), self.low + 1)
        self.first, self.last = min(layers), max(layers)

    def y(self, tau: float) -> float:
        part = (np.log10(tau) - self.low) / (self.high - self.low)
        return float(_BOTTOM - part * (_BOTTOM - _TOP))

    def x(self, layer: float) -> float:
        span = self.last - self.first + 1
        return float(_LEFT + (layer - self.first + 0.5) / span * (_RIGHT - _LEFT))


def tau_svg(
    checkpoints: Sequence[tuple[str, Sequence[LayerGates]]],
    dt_from: str,
    contexts: Sequence[int] = CONTEXTS,
) -> str:
    """Return an SVG of one or two checkpoints' effective lengths.

    Args:
        checkpoints: (title, layers) each.
        dt_from: `weights` or `data`, said in the axis label.
    """
    medians = [np.median(np.concatenate([x.tau for x in layers])) for _, layers in checkpoints]
    checkpoints = [
        (title, [dataclasses.replace(x, tau=np.clip(x.tau, *DRAWN)) for x in layers])
        for title, layers in checkpoints
    ]
    taus = [np.concatenate([x.tau for x in layers]) for _, layers in checkpoints]
    scale = _Scale(taus, [x.layer for _, layers in checkpoints for x in layers])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        *_axes(scale, dt_from, contexts),
    ]
    edges = np.linspace(scale.low, scale.high, BINS + 1)
    counts = [np.histogram(np.log10(tau), bins=edges)[0] for tau in taus]
    most = max(int(c.max()) for c in counts)
    for i, (title, layers) in enumerate(checkpoints):
        parts += _dots(scale, layers, COLOURS[i], shift=(i - (len(checkpoints) - 1) / 2) * 0.3)
        parts += _bars(scale, counts[i], most, COLOURS[i])
        parts.append(
            f'<text x="{_LEFT + i * 285}" y="22" fill="{COLOURS[i]}">{escape(title[-24:])}: '
            f"median {medians[i]:.3g}</text>"
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _axes(scale: _Scale, dt_from: str, contexts: Sequence[int]) -> list[str]:
    parts = []
    for power in range(int(scale.low), int(scale.high) + 1):
        y = scale.y(10.0**power)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{_HISTOGRAM[1]}" stroke="#ddd"/>')
        parts.append(
            f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>'
        )
    for context in contexts:
        if 10**scale.low < context < 10**scale.high:
            y = scale.y(context)
            parts.append(
                f'<path d="M{_LEFT} {y:.1f}H{_HISTOGRAM[1]}" stroke="#888" stroke-dasharray="4 3"/>'
                f'<text x="{_RIGHT - 2}" y="{y - 3:.1f}" text-anchor="end" fill="#555">'
                f"{context_name(context)}</text>"
            )
    step = max(1, (scale.last - scale.first + 1) // 12)
    for layer in range(scale.first, scale.last + 1, step):
        parts.append(
            f'<text x="{scale.x(layer):.1f}" y="{_BOTTOM + 16}" text-anchor="middle">{layer}</text>'
        )
    middle = (_TOP + _BOTTOM) / 2
    parts.append(
        f'<text x="{(_LEFT + _RIGHT) / 2}" y="{_HEIGHT - 12}" text-anchor="middle">layer</text>'
    )
    parts.append(
        f'<text x="16" y="{middle}" text-anchor="middle" transform="rotate(-90 16 {middle})">'
        f"tau in tokens (dt from {escape(dt_from)})</text>"
    )
    parts.append(
        f'<text x="{sum(_HISTOGRAM) / 2}" y="{_BOTTOM + 16}" text-anchor="middle">heads</text>'
    )
    return parts


def _dots(scale: _Scale, layers: Sequence[LayerGates], colour: str, shift: float) -> list[str]:
    parts = []
    for x in layers:
        tau = np.sort(x.tau)
        if tau.size > MAX_DOTS_PER_LAYER:  # Mamba-1 has thousands of channels
            tau = tau[np.linspace(0, tau.size - 1, MAX_DOTS_PER_LAYER).astype(int)]
        centre = scale.x(x.layer + shift)
        parts += [
            f'<circle cx="{centre:.1f}" cy="{scale.y(t):.1f}" r="2" fill="{colour}" '
            'fill-opacity="0.45"/>'
            for t in tau
        ]
        y = scale.y(float(np.median(x.tau)))
        parts.append(f'<path d="M{centre - 5:.1f} {y:.1f}h10" stroke="{colour}" stroke-width="2"/>')
    return parts


def _bars(scale: _Scale, counts: np.ndarray, most: int, colour: str) -> list[str]:
    """Draw a histogram sideways; `most` is the count that fills the width."""
    left, right = _HISTOGRAM
    height = (_BOTTOM - _TOP) / BINS
    edges = np.linspace(scale.low, scale.high, BINS + 1)
    return [
        f'<rect x="{left}" y="{scale.y(10 ** edges[i + 1]):.1f}" height="{height:.1f}" '
        f'width="{(right - left) * n / most:.1f}" fill="{colour}" fill-opacity="0.4"/>'
        for i, n in enumerate(counts)
        if n
    ]
