"""Figures as SVG text: lines with intervals against pool size or beta, and outcome bars.

Written by hand rather than by a plotting library, so that one file follows the reader's light
or dark setting, inside the report page and alone, and its words stay words.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 560, 340
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 34, 46
CHAR_WIDTH = 6.8
"""Pixels that a character of a name takes at most, on average: letters and digits at 12 px."""
LEGEND_MARK = 28
"""Pixels of a legend's line or marker, before its name."""
LABEL_WIDTHS = 120, 380
"""Narrowest and widest column of names beside bars."""

# Series colours (light, dark): distinguishable for colour-blind readers, and told apart by
# marker and dash as well.
COLOURS = (
    ("#0b6cb8", "#5ab4ff"),
    ("#c2500a", "#ff9d5c"),
    ("#12795a", "#3fd6a6"),
    ("#8a2f8f", "#e08be6"),
    ("#6b6b00", "#d8d04a"),
    ("#b01e4f", "#ff7fa6"),
    ("#3d4b5c", "#b9c4d0"),
    ("#5a3fc0", "#a996ff"),
)
MARKERS = ("circle", "square", "triangle", "diamond")
DASHES = ("", "6 3", "2 3", "8 3 2 3")

OUTCOME_COLOURS = {
    "correct": ("#12795a", "#3fd6a6"),
    "wrong_arguments": ("#8fae1b", "#c3dd5b"),
    "wrong_tool": ("#d9a400", "#f2c94c"),
    "hallucinated": ("#c2500a", "#ff8a4c"),
    "several_calls": ("#8a2f8f", "#d28be0"),
    "missing_calls": ("#5a3fc0", "#a996ff"),
    "no_call": ("#7c8794", "#9aa5b1"),
    "unparseable": ("#4a5058", "#68717c"),
    "error": ("#b01e4f", "#ff5c8d"),
}


@dataclasses.dataclass(frozen=True)
class Point:
    """A value in [0, 1] at the i-th place of the axis, with its interval."""

    place: int
    value: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Series:
    """A line of the chart, or points that no line joins.

    Attributes:
        points: at most one per place if they are joined.
        predicted: drawn faint, dotted and without markers.
    """

    name: str
    points: Sequence[Point]
    predicted: bool = False
    joined: bool = True


def _style() -> str:
    light = "".join(f"--c{i}:{a};" for i, (a, _) in enumerate(COLOURS))
    dark = "".join(f"--c{i}:{b};" for i, (_, b) in enumerate(COLOURS))
    light += "".join(f"--o-{n.replace('_', '-')}:{a};" for n, (a, _) in OUTCOME_COLOURS.items())
    dark += "".join(f"--o-{n.replace('_', '-')}:{b};" for n, (_, b) in OUTCOME_COLOURS.items())
    return (
        f"svg.figure{{--ink:#1b1f24;--faint:#d6dade;--paper:#ffffff;{light}}}"
        "@media (prefers-color-scheme: dark){svg.figure{"
        f"--ink:#e6e9ec;--faint:#3a4149;--paper:#15191e;{dark}"
        "}}"
        "svg.figure{font:12px system-ui,sans-serif;background:var(--paper);color:var(--ink)}"
        "svg.figure text{fill:var(--ink)}"
        "svg.figure .grid{stroke:var(--faint);stroke-width:1}"
        "svg.figure .axis{stroke:var(--ink);stroke-width:1}"
    )


def _open(width: int, height: int, title: str, description: str) -> str:
    return (
        f'<svg class="figure" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title><desc>{escape(description)}</desc>"
        f"<style>{_style()}</style>"
    )


def _name(name: str, width: float) -> str:
    """Return a name as the content of a text element; what exceeds a width is in its title."""
    fits = int(width / CHAR_WIDTH)
    if len(name) <= fits:
        return escape(name)
    return f"{escape(name[: fits - 1])}…<title>{escape(name)}</title>"


def lines(
    title: str, x_label: str, y_label: str, ticks: Sequence[str], series: Sequence[Series]
) -> str:
    """Return a line chart of rates in per cent over evenly spaced places, as SVG text.

    Args:
        ticks: the label of each place on the x axis.
        series: their intervals are drawn as whiskers.
    """
    for s in series:
        assert not s.joined or len({p.place for p in s.points}) == len(s.points), s.name
    inner_w, inner_h = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    longest = max((len(s.name) for s in series), default=0)
    columns = 2 if longest * CHAR_WIDTH <= inner_w / 2 - LEGEND_MARK else 1
    height = HEIGHT + 18 * math.ceil(len(series) / columns)
    top = _ceiling(max((p.high for s in series for p in s.points), default=1.0))

    def x_of(place: int, shift: float) -> float:
        return LEFT + inner_w * (place + 0.5) / max(len(ticks), 1) + shift

    def y_of(value: float) -> float:
        return TOP + inner_h * (1 - value / top)

    out = [_open(WIDTH, height, title, f"{y_label} against {x_label}")]
    out.append(f'<text x="{LEFT}" y="18" font-weight="600">{escape(title)}</text>')
    for i in range(5):
        value = top * i / 4
        y = y_of(value)
        out.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        label = f"{100 * value:.3g}"
        out.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    base = y_of(0)
    out.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>')
    for place, tick in enumerate(ticks):
        x = x_of(place, 0)
        out.append(f'<text x="{x:.1f}" y="{base + 16}" text-anchor="middle">{escape(tick)}</text>')
    middle = LEFT + inner_w / 2
    out.append(f'<text x="{middle}" y="{base + 34}" text-anchor="middle">{escape(x_label)}</text>')
    out.append(
        f'<text transform="translate(14 {TOP + inner_h / 2}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_label)}</text>"
    )
    for i, s in enumerate(series):
        shift = 5 * (i - (len(series) - 1) / 2)
        spots = [(x_of(p.place, shift), y_of(p.value), p) for p in s.points]
        colour, dash = f"var(--c{i % len(COLOURS)})", DASHES[i // len(COLOURS) % len(DASHES)]
        if s.predicted:
            colour, dash = "var(--ink)", f"1 {3 + 2 * i}"
        out.append(f'<g style="stroke:{colour};fill:{colour}">')
        stroke = f'stroke-width="2" stroke-dasharray="{dash}"'
        if s.joined:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in spots)
            out.append(f'<polyline points="{path}" fill="none" {stroke}/>')
        for x, y, p in spots:
            low, high = y_of(p.low), y_of(p.high)
            said = f"{escape(s.name)}, {escape(ticks[p.place])}: {100 * p.value:.1f} %"
            if s.predicted:
                out.append(
                    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2"><title>{said}</title></circle>'
                )
                continue
            out.append(
                f'<g><line x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}" opacity=".55"/>'
                f"{_marker(i, x, y)}"
                f"<title>{said} [{100 * p.low:.1f}, {100 * p.high:.1f}]</title></g>"
            )
        out.append("</g>")
        room = inner_w / columns
        lx, ly = LEFT + (i % columns) * room, HEIGHT + 4 + 18 * (i // columns)
        marker = "" if s.predicted else _marker(i, lx + 11, ly)
        line = f'<line x1="{lx}" x2="{lx + 22}" y1="{ly}" y2="{ly}" {stroke}/>' if s.joined else ""
        out.append(
            f'<g style="stroke:{colour};fill:{colour}">{line}{marker}</g>'
            f'<text x="{lx + LEGEND_MARK}" y="{ly + 4}">{_name(s.name, room - LEGEND_MARK)}</text>'
        )
    out.append("</svg>")
    return "".join(out)


def _ceiling(value: float) -> float:
    """Return a round top of the axis at or above a rate."""
    for top in (0.02, 0.04, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0):
        if value <= top:
            return top
    return 1.0


def _marker(i: int, x: float, y: float) -> str:
    kind = MARKERS[i % len(MARKERS)]
    if kind == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
    if kind == "square":
        return f'<rect x="{x - 3.6:.1f}" y="{y - 3.6:.1f}" width="7.2" height="7.2"/>'
    corners: tuple[tuple[float, float], ...] = ((0, -5), (5, 0), (0, 5), (-5, 0))
    if kind == "triangle":
        corners = ((0, -5), (4.6, 3.6), (-4.6, 3.6))
    return f'<polygon points="{" ".join(f"{x + a:.1f},{y + b:.1f}" for a, b in corners)}"/>'


def outcome_bars(title: str, bars: Sequence[tuple[str, Mapping[str, int]]]) -> str:
    """Return stacked bars of outcome counts, one bar per label, as SVG text."""
    longest = max((len(label) for label, _ in bars), default=0)
    narrowest, widest = LABEL_WIDTHS
    label_width = min(widest, max(narrowest, math.ceil(longest * CHAR_WIDTH) + 14))
    row = 24
    legend_top = TOP + row * len(bars) + 12
    shown = [n for n in OUTCOME_COLOURS if any(counts.get(n) for _, counts in bars)]
    width = 760
    height = legend_top + 20 * math.ceil(len(shown) / 4) + 8
    out = [_open(width, height, title, "Share of each outcome per model and pool size")]
    out.append(f'<text x="8" y="18" font-weight="600">{escape(title)}</text>')
    inner = width - label_width - 16
    for i, (label, counts) in enumerate(bars):
        y = TOP + row * i
        total = sum(counts.values()) or 1
        out.append(
            f'<text x="{label_width - 6}" y="{y + 14}" text-anchor="end">'
            f"{_name(label, label_width - 14)}</text>"
        )
        x = float(label_width)
        for name in OUTCOME_COLOURS:
            n = counts.get(name, 0)
            if not n:
                continue
            w = inner * n / total
            out.append(
                f'<rect x="{x:.2f}" y="{y}" width="{w:.2f}" height="{row - 6}" '
                f'style="fill:var(--o-{name.replace("_", "-")});stroke:var(--paper)">'
                f"<title>{escape(label)}: {escape(name)} {n} of {total}</title></rect>"
            )
            x += w
    for i, name in enumerate(shown):
        lx, ly = 8 + (i % 4) * (width / 4), legend_top + 20 * (i // 4)
        out.append(
            f'<rect x="{lx:.0f}" y="{ly}" width="12" height="12" '
            f'style="fill:var(--o-{name.replace("_", "-")})"/>'
            f'<text x="{lx + 18:.0f}" y="{ly + 11}">{escape(name.replace("_", " "))}</text>'
        )
    out.append("</svg>")
    return "".join(out)
