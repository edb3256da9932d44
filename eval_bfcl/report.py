"""Put scored models side by side: tables, figures and one self-contained page.

results.csv and `results` of summary.json hold a row per model, pools, pool size k and pool seed
("all": all seeds pooled).  Of every rate they hold the value and `_low` and `_high` of its 95 %
interval, of every outcome `n_...`, and how much the answers vary: `different_answers`,
`different_names`, `top_name_outside` and `top_name_outside_answers` (see `tally.variety`).
`variety` of summary.json counts the same over all pool sizes of a model.
"""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval_bfcl import ceiling, figures, page, paired, scored, tally, trainings
from eval_bfcl.tally import Run
from gatewright import artifact, cli
from gatewright.errors import UserError


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


def official_said(official: Mapping[str, Any] | None) -> str:
    """Return in a word or two how the official run compares with our accuracy."""
    if official is None:
        return "N/A"
    if official["failed"] is not None:
        return "failed"
    return "same" + (f", {official['left_out']} left out" if official["left_out"] else "")


def official_notes(runs: Sequence[Run]) -> list[str]:
    """Return a sentence for every run whose accuracy the official run did not confirm whole."""
    notes = []
    for facts, _ in runs:
        official, name = facts["official"], f"{facts['model']} on {tally.setting(facts)}"
        if official is None:
            continue
        if official["failed"] is not None:
            notes.append(
                f"The official run did not confirm the accuracy of {name}: {official['failed']}."
            )
        elif n := official["left_out"]:
            notes.append(
                f"The official run cannot judge {n} answers of {name}; on all others its verdicts "
                "are ours."
            )
    return list(dict.fromkeys(notes))


def leaderboard(
    summary: Sequence[Mapping[str, Any]], runs: Sequence[Run] = ()
) -> list[dict[str, str]]:
    """Return rows in the style of the official leaderboard's CSV: names and per cents.

    Args:
        runs: what `summary` was made from; they say how the official run compares.
    """
    official = {
        (facts["model"], tally.setting(facts), k): official_said(facts["official"])
        for facts, scores in runs
        for k in {s["k"] for s in scores}
    }
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
            "Official Run": official.get((r["model"], tally.setting(r), r["k"]), "N/A"),
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
            "Over Context": str(r["over_context"]),
        }
        for rank, r in enumerate(ranked, start=1)
    ]


def _tools(value: float | None) -> str:
    return "N/A" if value is None else f"{value:.0f}"


def _percent(value: float | None) -> str:
    return "N/A" if value is None else f"{100 * value:.2f}%"


def asked_apart(runs: Sequence[Run]) -> list[str]:
    """Return a sentence for every setting in which the runs differ: who was asked how."""
    notes = []
    for name in tally.SETTINGS:
        by_value: dict[str, list[str]] = {}
        for facts, _ in runs:
            value = facts.get(name)
            models = by_value.setdefault("not recorded" if value is None else str(value), [])
            if facts["model"] not in models:
                models.append(facts["model"])
        if len(by_value) > 1:
            said = "; ".join(f"{value}: {_names(models)}" for value, models in by_value.items())
            notes.append(f"Models were not all asked alike, {name} differs ({said}).")
    return notes


def _names(models: Sequence[str]) -> str:
    more = f" and {len(models) - 3} more" if len(models) > 3 else ""
    return ", ".join(models[:3]) + more


def markdown(
    first_line: str,
    note: str,
    rows: Sequence[Mapping[str, str]],
    tests: Sequence[paired.Paired],
    means: Sequence[Mapping[str, Any]] = (),
    differences: Sequence[trainings.Difference] = (),
    notes: Sequence[str] = (),
) -> str:
    """Return the leaderboard, the means over training seeds and the tests as Markdown."""
    out = [first_line, ""]
    if note:
        out += [note, ""]
    if notes:
        out += [*(f"- {text}" for text in notes), ""]
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
        out += ["", paired.EXPLAINED, "", *_table(paired.rows(tests, figures.LABELS))]
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
                    "p McNemar": paired.p_text(d.p_mcnemar),
                    "p seeds": paired.p_text(d.p_seeds),
                    "p questions": paired.p_text(d.p_questions),
                    "p Holm": paired.p_text(d.p_holm),
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


def _written(summary: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
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


def compared_models(
    setups: Sequence[trainings.Setup], differences: Sequence[trainings.Difference]
) -> set[tuple[str, str, int]]:
    """Return (setting, model, k) of the models whose setups are compared as wholes there."""
    members = {(s.setting, s.name): [f["model"] for f, _ in s.runs.values()] for s in setups}
    return {
        (d.setting, model, d.k)
        for d in differences
        for name in (d.a, d.b)
        for model in members[d.setting, name]
    }


def paired_tests(
    runs: Sequence[Run],
    setups: Sequence[trainings.Setup],
    differences: Sequence[trainings.Difference],
) -> tuple[list[paired.Paired], list[str]]:
    """Return the paired tests of models where their setups are not compared, and what has none."""
    inside = compared_models(setups, differences)
    return paired.paired_tests(
        runs,
        apart=lambda a, b, k: {(tally.setting(f), f["model"], k) for f in (a, b)} <= inside,
    )


def main(args: Args) -> None:
    """Put scored models side by side: tables, figures and one self-contained page."""
    loaded = [(*scored.load(folder), folder) for folder in args.scores]
    loaded.sort(key=lambda item: _order(item[0]))
    runs: list[Run] = [(facts, scores) for facts, scores, _ in loaded]
    refuse_twins(runs)
    summary = _written(tally.summarise(runs))
    setups, not_averaged = trainings.setups(runs)
    means = trainings.summarise(setups)
    differences, not_compared = trainings.differences(setups)
    tests, not_tested = paired_tests(runs, setups, differences)
    notes = [*asked_apart(runs), *official_notes(runs), *not_averaged, *not_compared, *not_tested]
    first_line = headline(runs)
    drawn = figures.draw(summary, means)
    board = leaderboard(summary, runs)
    sources = [scored.source(f, page.run_name(facts, s)) for facts, s, f in loaded]
    parents = {f"scores/{i}": folder for i, folder in enumerate(args.scores)}
    with artifact.create(args.out, kind="report", config=args, parents=parents) as tmp:
        write_csv(tmp / "results.csv", summary)
        write_csv(tmp / "leaderboard.csv", board)
        (tmp / "leaderboard.md").write_text(
            markdown(first_line, args.note, board, tests, means, differences, notes),
            encoding="utf-8",
        )
        artifact.write_json(
            tmp / "summary.json",
            {
                "headline": first_line,
                "note": args.note,
                "notes": notes,
                "sources": [dataclasses.asdict(s) for s in sources],
                "results": summary,
                "variety": tally.varieties(runs),
                "mcnemar": paired.to_json(tests),
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
                notes,
                runs,
                [folder for *_, folder in loaded],
                summary,
                tests,
                means,
                differences,
                drawn,
                sources,
                args.explorer_questions,
            ),
            encoding="utf-8",
        )
    print(first_line)
    print(tally.table(summary))
    print(f"report: {args.out / 'index.html'}")


if __name__ == "__main__":
    cli.run(main, Args, prog="python -m eval_bfcl.report")
