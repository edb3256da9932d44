"""The recall figure: every arm's seeds as points, floors and the paper's values beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from synthetic import plots
from synthetic.sweep import Row


def draw(out: Path, rows: Sequence[Row], lines: Sequence[Mapping[str, Any]]) -> None:
    """Draw recall.svg and recall.png: one axis per part of the table.

    Args:
        rows: measured ones (no seed that diverged).
    """
    parts = list(dict.fromkeys(x["arm"].split("/")[0] for x in lines))
    heights = [sum(x["arm"].startswith(p + "/") for x in lines) for p in parts]
    with plots.style() as plt:
        figure, axes = plt.subplots(
            len(parts),
            1,
            figsize=(7.5, 0.32 * sum(heights) + 0.9 * len(parts)),
            squeeze=False,
            height_ratios=heights,
            sharex=True,
        )
        for axis, part in zip(axes.flat, parts, strict=True):
            mine = [x for x in lines if x["arm"].startswith(part + "/")]
            for y, x in enumerate(mine):
                for r in rows:
                    if r["arm"] == x["arm"]:
                        fill = "none" if r.get("nothing_bound", False) else plots.COLOURS[0]
                        axis.plot(
                            r["accuracy"], y, "o", color=plots.COLOURS[0], mfc=fill, alpha=0.8
                        )
                axis.plot([x["mean"]] * 2, [y - 0.3, y + 0.3], color=plots.COLOURS[0])
                axis.plot([x["floor"]] * 2, [y - 0.3, y + 0.3], ":", color=plots.GREY)
                paper = x["paper"]
                if isinstance(paper, (tuple, list)):
                    counts = f"{x['locked_in']}/{x['n']} (paper {paper[0]}/{paper[1]})"
                    axis.text(1.03, y, counts, va="center", fontsize=7.5, clip_on=False)
                elif paper is not None:
                    axis.plot(paper, y, "x", color=plots.COLOURS[1])
            axis.set_yticks(range(len(mine)), [x["arm"].split("/", 1)[1] for x in mine])
            axis.set_ylim(len(mine) - 0.5, -0.5)
            axis.set_xlim(-0.02, 1.02)
            axis.set_title(part)
        axes.flat[-1].set_xlabel(
            "accuracy (dots: seeds, hollow: nothing bound; bar: mean; dotted: floor; x: paper;\n"
            "at the right: seeds that lock in)"
        )
        figure.tight_layout()
        plots.save(figure, out, "recall")
