"""Put scored models side by side: tables, figures and one self-contained page."""

from __future__ import annotations

import csv
import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval_bfcl import ceiling, page, plots, tally
from eval_bfcl.outcomes import OUTCOMES
from gatewright import artifact, cli
from gatewright.errors import UserError

Run = tuple[dict[str, Any], list[dict[str, Any]]]


@dataclasses.dataclass
class Args:
    """Flags of `python -m eval_bfcl.report`."""

    scores: tuple[Path, ...]
    """Folders of eval_bfcl.score, one per model and pools folder."""
    out: Path
    """Folder to create."""
    title: str = "Tool pools on BFCL"
    """Heading of the page."""
    note: str = ""
    """A sentence for the page's head: what was trained, what the figures can and cannot say."""
    explorer_questions: int = 100
    """Questions per model and pool that the page's explorer holds (with prompts and answers)."""

    def __post_init__(self) -> None:
        if not self.scores:
            raise UserError("--scores: name at least one folder of eval_bfcl.score")
        if self.explorer_questions < 0:
            raise UserError(f"--explorer-questions {self.explorer_questions}: give 0 or more")


def headline(runs: Sequence[Run]) -> str:
    """Return the report's first line: how many of the split's questions were asked."""
    parts = []
    for split in dict.fromkeys(f["split"] for f, _ in runs):
        asked = {(f["questions"], f["of"]) for f, _ in runs if f["split"] == split}
        counts = " and ".join(f"{n} of {of}" for n, of in sorted(asked))
        whole = all(n == of for n, of in asked)
        parts.append(f"{counts} questions of {split}" + ("" if whole else " (a part: see --limit)"))
    return "; ".join(parts)


def name_of(facts: Mapping[str, Any]) -> str:
    """Return a model's name in figures, with its gate scale if the name does not show it."""
    scale = tally.scale_text(facts["gate_scale"])
    shown = f"s{scale}" in str(facts["model"])
    return str(facts["model"]) + ("" if scale == "-" or shown else f" (scale {scale})")


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def figures(summary: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return file name -> SVG text, most important first."""
    pooled = [r for r in summary if r["seed"] == "all"]
    settings = list(dict.fromkeys(tally.setting(r) for r in pooled))
    out: dict[str, str] = {}
    for setting in settings:
        rows = [r for r in pooled if tally.setting(r) == setting]
        end = "" if len(settings) == 1 else "_" + slug(setting)
        sizes = sorted({r["k"] for r in rows})
        for rate, label in (("accuracy", "Accuracy"), ("hallucination", "Hallucination rate")):
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
        out[f"outcomes{end}.svg"] = plots.outcome_bars(f"Outcomes: {setting}", bars)
    return out | _against_beta(pooled)


def _ceilings(rows: Sequence[Mapping[str, Any]], sizes: Sequence[int]) -> list[plots.Series]:
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


def _point(place: int, row: Mapping[str, Any], rate: str) -> plots.Point:
    return plots.Point(place, row[rate], row[f"{rate}_low"], row[f"{rate}_high"])


def _beta(row: Mapping[str, Any]) -> float:
    return float("inf") if row["beta"] is None else float(row["beta"])


def _against_beta(pooled: Sequence[Mapping[str, Any]]) -> dict[str, str]:
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


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows of one shape; nulls become empty cells."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with open(path, "w", encoding="utf-8", newline="") as f:
        writer = csv.DictWriter(f, columns)
        writer.writeheader()
        writer.writerows(rows)


def leaderboard(summary: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return rows in the style of the official leaderboard's CSV: names and per cents."""
    ranked = sorted(
        (r for r in summary if r["seed"] == "all"), key=lambda r: -(r["accuracy_official"] or 0)
    )
    return [
        {
            "Rank": str(rank),
            "Model": str(r["model"]),
            "Gate Scale": tally.scale_text(r["gate_scale"]),
            "Category": str(r["split"]),
            "Retriever": tally.setting(r).partition(", ")[2],
            "Pool Size": str(r["k"]),
            "Seeds": str(r["seeds"]),
            "Overall Acc": _percent(r["accuracy_official"]),
            "Overall Acc 95% Low": _percent(r["accuracy_official_low"]),
            "Overall Acc 95% High": _percent(r["accuracy_official_high"]),
            "Hallucination": _percent(r["hallucination"]),
            "Hallucination of Valid Calls": _percent(r["hallucination_of_valid_calls"]),
            "Acc Given Retrieved": _percent(r["accuracy_given_retrieved"]),
            "Acc With Schema Defaults": _percent(r["accuracy_with_defaults"]),
            "Recall": _percent(r["recall"]),
            "Predicted Ceiling": _percent(r["predicted_ceiling"]),
            "Predicted Tools At 50%": _tools(r["predicted_tools_at_half"]),
            "Total Count": str(r["judged"]),
            "Errors": str(r["n_error"]),
        }
        for rank, r in enumerate(ranked, start=1)
    ]


def _tools(value: float | None) -> str:
    return "N/A" if value is None else f"{value:.0f}"


def _percent(value: float | None) -> str:
    return "N/A" if value is None else f"{100 * value:.2f}%"


def markdown(
    first_line: str, note: str, rows: Sequence[Mapping[str, str]], tests: Sequence[tally.Paired]
) -> str:
    """Return the leaderboard and the paired tests as Markdown."""
    out = [first_line, ""]
    if note:
        out += [note, ""]
    columns = list(rows[0]) if rows else []
    out += ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    out += [
        "| " + " | ".join(str(row[c]).replace("|", "\\|") for c in columns) + " |" for row in rows
    ]
    if any(row["Predicted Ceiling"] != "N/A" for row in rows):
        out += ["", ceiling.EXPLAINED]
    if tests:
        out += [
            "",
            "McNemar's exact test, questions that only one of two models answers right:",
            "",
        ]
        out += ["| A | B | setting | k | only A | only B | pairs | p |", "|" + " --- |" * 8]
        out += [
            f"| {t.a} | {t.b} | {t.setting} | {t.k} | {t.only_a} | {t.only_b} | {t.n} | {t.p:.3g} |"
            for t in tests
        ]
    return "\n".join(out) + "\n"


def refuse_twins(runs: Sequence[Run]) -> None:
    """Refuse two runs of one name on the same pools; other pool sizes of a run may be apart.

    Raises:
        UserError: a model, setting and pool size is given twice.
    """
    seen: set[tuple[str, str, int]] = set()
    for facts, scores in runs:
        keys = {(facts["model"], tally.setting(facts), s["k"]) for s in scores}
        if twins := keys & seen:
            model, setting, k = min(twins)
            raise UserError(
                f"--scores: {model} on {setting}, k = {k} is given twice; name models apart with "
                "eval_bfcl.generate --name"
            )
        seen |= keys


def _order(facts: Mapping[str, Any]) -> tuple[Any, ...]:
    """Gated models first, weakest gates first, then the others by name."""
    scale = facts["gate_scale"]
    number = scale if isinstance(scale, (int, float)) else 1.0
    return (tally.setting(facts), scale is None, facts["base"], number, facts["model"])


def main(args: Args) -> None:
    """Put scored models side by side: tables, figures and one self-contained page."""
    loaded = [(*tally.load(folder), folder) for folder in args.scores]
    loaded.sort(key=lambda item: _order(item[0]))
    runs = [(facts, scores) for facts, scores, _ in loaded]
    refuse_twins(runs)
    summary = tally.summarise(runs)
    tests = tally.paired_tests(runs)
    first_line = headline(runs)
    drawn = figures(summary)
    board = leaderboard(summary)
    parents = {f"scores/{i}": folder for i, folder in enumerate(args.scores)}
    with artifact.create(args.out, kind="report", config=args, parents=parents) as tmp:
        write_csv(tmp / "results.csv", summary)
        write_csv(tmp / "leaderboard.csv", board)
        (tmp / "leaderboard.md").write_text(
            markdown(first_line, args.note, board, tests), encoding="utf-8"
        )
        artifact.write_json(
            tmp / "summary.json",
            {
                "headline": first_line,
                "note": args.note,
                "results": summary,
                "mcnemar": tally.to_json(tests),
            },
        )
        for name, svg in drawn.items():
            (tmp / name).write_text(svg + "\n", encoding="utf-8")
        (tmp / "index.html").write_text(
            page.build(
                args.title,
                first_line,
                args.note,
                runs,
                [folder for *_, folder in loaded],
                summary,
                tests,
                drawn,
                args.explorer_questions,
            ),
            encoding="utf-8",
        )
    print(first_line)
    print(tally.table(summary))
    print(f"report: {args.out / 'index.html'}")


if __name__ == "__main__":
    cli.run(main, Args, prog="python -m eval_bfcl.report")
