"""One plotting style for every experiment, and figures that are the same bytes each time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Okabe-Ito: told apart by colour-blind readers and in print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
GREY = "#777777"


@contextmanager
def style() -> Iterator[Any]:
    """Yield matplotlib.pyplot with the house style, drawing without a display."""
    import matplotlib
    from cycler import cycler

    matplotlib.use("Agg", force=True)
    from matplotlib import pyplot

    settings: Any = {
        "axes.prop_cycle": cycler(color=COLOURS),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.titlesize": 10,
        "axes.titlelocation": "left",
        "axes.labelsize": 9,
        "grid.alpha": 0.25,
        "grid.linewidth": 0.6,
        "figure.dpi": 110,
        "font.size": 9,
        "legend.fontsize": 7.5,
        "legend.frameon": False,
        "lines.linewidth": 1.4,
        "lines.markersize": 4.5,
        "savefig.bbox": "tight",
        "svg.fonttype": "none",
        "svg.hashsalt": "gatewright",
    }
    with matplotlib.rc_context(settings):
        yield pyplot
        pyplot.close("all")


def save(figure: Any, folder: Path, name: str) -> None:
    """Write `name.svg` and `name.png` without dates, so that equal results give equal files."""
    figure.savefig(Path(folder) / f"{name}.svg", metadata={"Date": None})
    figure.savefig(Path(folder) / f"{name}.png", metadata={"Software": None}, dpi=130)


def shades(count: int) -> list[Any]:
    """Return colours of an ordered setting, dark first, told apart in grey print too."""
    import matplotlib

    colour_map = matplotlib.colormaps["viridis"]
    return [colour_map(0.92 * i / max(1, count - 1)) for i in range(count)]
