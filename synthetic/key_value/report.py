"""Key-value results as numbers, and each of the paper's claims as a test over the seeds."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from gatewright.statistics import linear_fit, permutation_test
from synthetic import trends
from synthetic.key_value.settings import ESCAPE
from synthetic.sweep import Row, verdict

DRIFT = [
    f"{n}_{s}" for n in ("tau_initial", "tau_final", "delta_alpha") for s in ("weights", "data")
]


def fields(row: Row) -> list[str]:
    """Return the measures that the row of a run must have."""
    found = ["accuracy", "escape_step", "cap_steps", "memory_accuracy", "parameters", "curve"]
    found += ["cpu_seconds", "data_seconds"]
    if row["order"] == "best_last":
        found += ["lengths", "length_accuracy", "length_accuracy_same_queries"]
    return found + DRIFT * (row["model"] == "mamba2")


def groups(rows: list[Row]) -> list[tuple[str, float | None, list[Row]]]:
    """Return (model, offset, rows by seed) of every setting, weakest gates first, baseline last."""
    keys = sorted(
        {(r["model"], r["offset"]) for r in rows},
        key=lambda k: (k[0] != "mamba2", k[1] if k[1] is not None else 0.0),
    )
    rows = sorted(rows, key=lambda r: int(r["seed"]))  # runs side by side end in any order
    return [(m, o, [r for r in rows if r["model"] == m and r["offset"] == o]) for m, o in keys]


def waited(row: Row) -> float:
    """Return the escape step, or the cap of a run that never escaped."""
    return float(row["escape_step"] or row["cap_steps"])


def half_way(row: Row) -> float | None:
    """Return the first evaluated step half way from memory's accuracy to 1; None if none was."""
    level = (1 + row["memory_accuracy"]) / 2
    return next((float(step) for step, accuracy, _ in row["curve"] if accuracy > level), None)


def _settings(rows: list[Row]) -> list[dict[str, Any]]:
    found = []
    for model, offset, runs in groups(rows):
        accuracy = trends.interval([r["accuracy"] for r in runs])
        one: dict[str, Any] = {
            "model": model,
            "offset": offset,
            "seeds": len(runs),
            "accuracy": accuracy.value,
            "accuracy_interval": [accuracy.low, accuracy.high],
            "escaped": sum(r["escape_step"] is not None for r in runs),
            "escape_steps": [r["escape_step"] for r in runs],
            "median_escape_steps": _median(runs),
            "half_way_steps": [half_way(r) for r in runs if "curve" in r],
            "parameters": runs[0]["parameters"],
        }
        if model == "mamba2":
            for key in DRIFT:
                one[key] = float(np.median([r[key] for r in runs]))
        if "length_accuracy" in runs[0]:
            one["lengths"] = runs[0]["lengths"]
            for key in ("length_accuracy", "length_accuracy_same_queries"):
                table = np.array([r[key] for r in runs])
                spread = [trends.interval(column) for column in table.T]
                one[key] = [i.value for i in spread]
                one[f"{key}_interval"] = [[i.low, i.high] for i in spread]
        found.append(one)
    return found


def _median(runs: list[Row]) -> float | None:
    """Return the median escape step; None if that run never escaped."""
    median = float(np.median([r["escape_step"] or math.inf for r in runs]))
    return median if math.isfinite(median) else None


def escape_fits(rows: list[Row]) -> dict[str, Any]:
    """Return lines of escape steps in e^offset and in the offset, over the runs that escaped."""
    runs = [r for r in rows if r["model"] == "mamba2" and r["escape_step"] is not None]
    offsets = sorted({r["offset"] for r in runs})
    out: dict[str, Any] = {
        "runs": len(runs),
        "never_escaped": sum(r["model"] == "mamba2" and r["escape_step"] is None for r in rows),
        "offsets": offsets,
    }
    if len(offsets) < 3:
        return out
    steps = [float(r["escape_step"]) for r in runs]
    for name, x in (
        ("exp_offset", [math.exp(r["offset"]) for r in runs]),
        ("offset", [r["offset"] for r in runs]),
    ):
        out[name] = dataclasses.asdict(linear_fit(x, steps))
    return out


def _first(rows: list[Row]) -> tuple[dict[str, Any], list[Row]]:
    gated = [
        {**r, "waited": waited(r), "half": half_way(r) or r["cap_steps"]}
        for r in rows
        if r["model"] == "mamba2"
    ]
    found: list[Row] = []
    tests = {}
    fits = escape_fits(rows)
    if gated:
        for key, falls, claim in (
            ("waited", False, "weaker gates escape memory sooner"),
            ("half", False, "weaker gates come half way from memory to 1 sooner"),
            ("accuracy", True, "weaker gates are more accurate after as many steps"),
        ):
            trend = trends.rises(gated, "offset", key, falls=falls)
            tests[key] = dataclasses.asdict(trend)
            found.append(
                verdict(
                    f"best-first: {claim}",
                    trend.holds,
                    trend.rho,
                    f"rank correlation with the offset, mean of {trend.blocks} seeds at offsets "
                    f"{', '.join(f'{x:g}' for x in trend.levels)}; {trend.said()}"
                    + ("" if falls else "; runs that never came there count as the cap"),
                )
            )
        line = fits.get("exp_offset")
        good = line is not None and line["r2"] >= 0.8 and line["slope"] > 0
        seeds = len({r["seed"] for r in gated})
        found.append(
            verdict(
                "best-first: the escape time is linear in e^offset (R^2 of at least 0.8)",
                good and seeds >= trends.SEEDS,
                None if line is None else line["r2"],
                f"{fits['runs']} runs escaped, {fits['never_escaped']} did not; R^2 on offsets "
                f"{fits['offsets']}"
                + ("" if line is None else f"; a line in the offset: {fits['offset']['r2']:.3f}")
                + trends.few(seeds),
            )
        )
        strongest = max(r["offset"] for r in gated)
        stuck = [r for r in gated if r["offset"] == strongest]
        mean = float(np.mean([r["accuracy"] for r in stuck]))
        memory = stuck[0]["memory_accuracy"]
        found.append(
            verdict(
                "best-first: the strongest gates end at what memory alone reaches",
                all(r["escape_step"] is None for r in stuck)
                and abs(mean - memory) < 0.1
                and len(stuck) >= trends.SEEDS,
                mean,
                f"mean accuracy at offset {strongest:g} after {stuck[0]['cap_steps']} steps; "
                f"memory alone {memory:.3f}; {sum(r['escape_step'] is not None for r in stuck)} "
                f"of {len(stuck)} escaped{trends.few(len(stuck))}",
            )
        )
        levels = trends.rises(gated, "offset", "tau_final_weights", falls=True)
        found.append(
            verdict(
                "the gates' order survives training (median tau by weights)",
                levels.holds,
                levels.rho,
                f"rank correlation of the final tau with the offset; {levels.said()}",
            )
        )
    baseline = [r for r in rows if r["model"] == "gpt_neox"]
    if baseline:
        escaped = sum(r["escape_step"] is not None for r in baseline)
        found.append(
            verdict(
                "best-first: the Transformer leaves memory",
                escaped == len(baseline) >= trends.SEEDS,
                float(np.mean([r["accuracy"] for r in baseline])),
                f"mean accuracy; {escaped} of {len(baseline)} seeds exceeded {ESCAPE}"
                + trends.few(len(baseline)),
            )
        )
    return {"settings": _settings(rows), "escape": fits, "tests": tests}, found


def beyond(row: Row, key: str) -> float:
    """Return the mean accuracy over the lengths beyond the training length."""
    return float(np.mean(row[key][1:]))


def _last(rows: list[Row]) -> tuple[dict[str, Any], list[Row]]:
    gated = [r for r in rows if r["model"] == "mamba2"]
    found: list[Row] = []
    tests: dict[str, Any] = {}
    for key, name in (
        ("length_accuracy", "with q n queries"),
        ("length_accuracy_same_queries", "with as many queries as in training"),
    ):
        every = [{**r, "beyond": beyond(r, key)} for r in gated]
        trend = trends.rises(every, "offset", "beyond")
        tests[key] = dataclasses.asdict(trend)
        learned = [r for r in every if r["length_accuracy"][0] > ESCAPE]
        offsets = sorted({r["offset"] for r in learned})
        detail = (
            f"rank correlation with the offset of the accuracy beyond the training length, mean "
            f"of {trend.blocks} seeds, {trend.said()}"
        )
        if len(offsets) >= 2:
            weak = [r["beyond"] for r in learned if r["offset"] == offsets[0]]
            strong = [r["beyond"] for r in learned if r["offset"] == offsets[-1]]
            p = permutation_test(weak, strong)
            tests[key] |= {"learned": len(learned), "ends": [offsets[0], offsets[-1]], "p_ends": p}
            detail += (
                f"; runs that learned the task only, offset {offsets[0]:g} ({len(weak)}) against "
                f"{offsets[-1]:g} ({len(strong)}): {np.mean(weak):.3f} and "
                f"{np.mean(strong):.3f}, p = {p:.2g}"
            )
        found.append(
            verdict(
                f"best-last: stronger gates generalise to longer contexts ({name})",
                trend.holds,
                trend.rho,
                detail,
            )
        )
    baseline = [r for r in rows if r["model"] == "gpt_neox"]
    if baseline and gated:
        strongest = max(r["offset"] for r in gated)
        ours = [beyond(r, "length_accuracy") for r in gated if r["offset"] == strongest]
        theirs = [beyond(r, "length_accuracy") for r in baseline]
        p, seeds = permutation_test(ours, theirs), min(len(ours), len(theirs))
        found.append(
            verdict(
                "best-last: the strongest gates generalise further than the Transformer",
                float(np.mean(ours)) > float(np.mean(theirs))
                and p < trends.LEVEL
                and seeds >= trends.SEEDS,
                float(np.mean(ours)) - float(np.mean(theirs)),
                "difference of the accuracies beyond the training length, permutation "
                f"p = {p:.2g}{trends.few(seeds)}",
            )
        )
    return {"settings": _settings(rows), "tests": tests}, found


def summarise(rows: list[Row]) -> dict[str, Any]:
    """Return the numbers and verdicts of every part that has rows."""
    summary: dict[str, Any] = {}
    verdicts: list[Row] = []
    for order, part in (("best_first", _first), ("best_last", _last)):
        chosen = [r for r in rows if r["order"] == order]
        if chosen:
            summary[order], claims = part(chosen)
            verdicts += claims
    cpu, data = (sum(r[k] for r in rows) for k in ("cpu_seconds", "data_seconds"))
    summary |= {"cpu_seconds": cpu, "data_share": data / cpu if cpu else None}
    return {**summary, "verdicts": verdicts}
