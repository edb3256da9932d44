"""Put scored models side by side: tables, figures and one self-contained page."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval_bfcl import ceiling, figures, page, tally, trainings
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
            "Right Tool": _percent(r["right_tool"]),
            "Well-Formed Call": _percent(r["valid_call"]),
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
    first_line: str,
    note: str,
    rows: Sequence[Mapping[str, str]],
    tests: Sequence[tally.Paired],
    means: Sequence[Mapping[str, Any]] = (),
    differences: Sequence[trainings.Difference] = (),
) -> str:
    """Return the leaderboard, the means over training seeds and the tests as Markdown."""
    out = [first_line, ""]
    if note:
        out += [note, ""]
    if means:
        out += ["Means over training seeds, per cent [95 % interval]:", ""]
        out += _table(
            [
                {
                    "setup": r["model"],
                    "pools": tally.setting(r),
                    "k": str(r["k"]),
                    "seeds": str(len(r["training_seeds"])),
                    **{figures.LABELS[rate]: tally.percent(r, rate) for rate in trainings.RATES},
                }
                for r in means
            ]
        )
        out.append("")
    out += _table(rows)
    if any(row["Predicted Ceiling"] != "N/A" for row in rows):
        out += ["", ceiling.EXPLAINED]
    if tests:
        said = "McNemar's exact test, questions on which only one of two models shows it:"
        out += ["", said, ""]
        out += _table(
            [
                {
                    "A": t.a,
                    "B": t.b,
                    "pools": t.setting,
                    "k": str(t.k),
                    "rate": figures.LABELS[t.rate],
                    "only A": str(t.only_a),
                    "only B": str(t.only_b),
                    "pairs": str(t.n),
                    "p": f"{t.p:.3g}",
                }
                for t in tests
            ]
        )
    if differences:
        out += ["", trainings.EXPLAINED, ""]
        out += _table(
            [
                {
                    "A": d.a,
                    "B": d.b,
                    "pools": d.setting,
                    "k": str(d.k),
                    "rate": figures.LABELS[d.rate],
                    "A - B, points": f"{d.points:.1f} [{d.low:.1f}, {d.high:.1f}]",
                    "seeds": str(d.seeds),
                    "only A": str(d.only_a),
                    "only B": str(d.only_b),
                    "p McNemar": f"{d.p_mcnemar:.3g}",
                    "p questions": f"{d.p_questions:.3g}",
                    "p Holm": f"{d.p_holm:.3g}",
                }
                for d in differences
            ]
        )
    return "\n".join(out) + "\n"


def _table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    columns = list(rows[0]) if rows else []
    return [
        "| " + " | ".join(columns) + " |",
        "|" + " --- |" * len(columns),
        *(
            "| " + " | ".join(str(row[c]).replace("|", "\\|") for c in columns) + " |"
            for row in rows
        ),
    ]


def _brief(summary: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rows as they are written: six decimals, and none per pool seed if there is one."""
    alone = {
        (r["model"], tally.setting(r), r["k"])
        for r in summary
        if r["seed"] == "all" and r["seeds"] == 1
    }
    return [
        {k: round(v, 6) if isinstance(v, float) else v for k, v in row.items()}
        for row in summary
        if row["seed"] == "all" or (row["model"], tally.setting(row), row["k"]) not in alone
    ]


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
    summary = _brief(tally.summarise(runs))
    setups = trainings.setups(runs)
    means, differences = trainings.summarise(setups), trainings.differences(setups)
    inside = {id(facts) for s in setups for facts, _ in s.runs.values()}
    tests = tally.paired_tests(runs, apart=lambda a, b: id(a) in inside and id(b) in inside)
    first_line = headline(runs)
    drawn = figures.draw(summary, setups)
    board = leaderboard(summary)
    parents = {f"scores/{i}": folder for i, folder in enumerate(args.scores)}
    with artifact.create(args.out, kind="report", config=args, parents=parents) as tmp:
        write_csv(tmp / "results.csv", summary)
        write_csv(tmp / "leaderboard.csv", board)
        (tmp / "leaderboard.md").write_text(
            markdown(first_line, args.note, board, tests, means, differences), encoding="utf-8"
        )
        artifact.write_json(
            tmp / "summary.json",
            {
                "headline": first_line,
                "note": args.note,
                "results": summary,
                "mcnemar": tally.to_json(tests),
                "setups": means,
                "differences": [dataclasses.asdict(d) for d in differences],
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
                means,
                differences,
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
