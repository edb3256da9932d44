"""Rules results as numbers, and each of the paper's claims as a test over the seeds."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from gatewright.statistics import permutation_test
from synthetic import trends
from synthetic.sweep import Row, verdict

ONSET = 0.5  # retrieval has begun: accuracy with the oracle's name resampled
LEARNED = 0.9  # a length model that this share of its training-size pools are right for

DRIFT = [
    f"{n}_{s}" for n in ("tau_initial", "tau_final", "delta_alpha") for s in ("weights", "data")
]


def fields(row: Row) -> list[str]:
    """Return the measures that the row of a run must have."""
    found = ["steps", "parameters", "cpu_seconds", "data_seconds", "curve", "chain"]
    if row["part"] == "retrieval":
        found += ["no_oracle", "random_oracle_name", "first_turn"]
    else:
        found += ["lengths", "length_accuracy", "weak"]
    return found + DRIFT * (row["model"] == "mamba2")


def groups(rows: list[Row]) -> list[tuple[str, float | None, list[Row]]]:
    """Return (model, offset, rows by seed) of every setting, weakest gates first, baseline last."""
    keys = sorted(
        {(r["model"], r["offset"]) for r in rows},
        key=lambda k: (k[0] != "mamba2", k[1] if k[1] is not None else 0.0),
    )
    rows = sorted(rows, key=lambda r: int(r["seed"]))  # runs side by side end in any order
    return [(m, o, [r for r in rows if r["model"] == m and r["offset"] == o]) for m, o in keys]


def onset(row: Row) -> int | None:
    """Return the first evaluation step at which retrieval has begun; None if it has not."""
    return next((c["step"] for c in row["curve"] if c["random_oracle_name"] > ONSET), None)


def _mean(runs: Sequence[Row], key: str) -> dict[str, Any]:
    found = trends.interval([float(r[key]) for r in runs])
    return {key: found.value, f"{key}_interval": [found.low, found.high]}


def _common(model: str, offset: float | None, runs: list[Row]) -> dict[str, Any]:
    one: dict[str, Any] = {
        "model": model,
        "offset": offset,
        "seeds": len(runs),
        "parameters": runs[0]["parameters"],
        **_mean(runs, "chain"),
    }
    if model == "mamba2":  # the paper's gate drift table: medians over heads, then over seeds
        for key in DRIFT:
            one[key] = float(np.median([r[key] for r in runs]))
    return one


def _retrieval(rows: list[Row]) -> tuple[dict[str, Any], list[Row]]:
    settings = []
    for model, offset, runs in groups(rows):
        onsets = [onset(r) for r in runs]
        settings.append(
            {
                **_common(model, offset, runs),
                **_mean(runs, "no_oracle"),
                **_mean(runs, "random_oracle_name"),
                **_mean(runs, "first_turn"),
                "peak_no_oracle": float(
                    np.mean([max(c["no_oracle"] for c in r["curve"]) for r in runs])
                ),
                "onset_steps": onsets,
            }
        )
    gated = [
        {
            **r,
            "wait": float(onset(r) or r["steps"] + 1),
            "peak": max(c["no_oracle"] for c in r["curve"]),
        }
        for r in rows
        if r["model"] == "mamba2"
    ]
    found = []
    for key, claim, falls in (
        ("random_oracle_name", "weaker gates retrieve resampled names better", True),
        ("wait", "weaker gates begin to retrieve sooner", False),
        ("peak", "stronger gates memorise names better", False),
    ):
        trend = trends.rises(gated, "offset", key, falls=falls)
        means = [
            float(np.mean([r[key] for r in gated if r["offset"] == level]))
            for level in trend.levels
        ]
        found.append(
            verdict(
                f"in-context retrieval: {claim}",
                trend.holds,
                trend.rho,
                f"rank correlation with the offset, mean of {trend.blocks} seeds; "
                f"{trend.said()}; means by offset "
                + ", ".join(f"{o:g}: {m:.3g}" for o, m in zip(trend.levels, means, strict=True)),
            )
        )
    baseline = [r for r in rows if r["model"] == "llama"]
    if baseline and gated:
        weakest = min(r["offset"] for r in gated)
        ours = [r["random_oracle_name"] for r in gated if r["offset"] == weakest]
        theirs = [r["random_oracle_name"] for r in baseline]
        p, seeds = permutation_test(ours, theirs), min(len(ours), len(theirs))
        found.append(
            verdict(
                "in-context retrieval: the Transformer retrieves better than the weakest gates",
                float(np.mean(theirs)) > float(np.mean(ours))
                and p < trends.LEVEL
                and seeds >= trends.SEEDS,
                float(np.mean(theirs) - np.mean(ours)),
                f"difference of accuracies with resampled names, permutation p = {p:.2g}"
                + trends.few(seeds),
            )
        )
    return {"settings": settings}, found


def within(row: Row, pool: int) -> float:
    """Return the accuracy at the training's largest pool."""
    return float(row["length_accuracy"][row["lengths"].index(pool)])


def beyond(row: Row, pool: int) -> float:
    """Return the mean accuracy over the pools larger than the training's largest."""
    pairs = zip(row["lengths"], row["length_accuracy"], strict=True)
    return float(np.mean([accuracy for size, accuracy in pairs if size > pool]))


def _length(rows: list[Row], pool: int) -> tuple[dict[str, Any], list[Row]]:
    settings = []
    for model, offset, runs in groups(rows):
        spread = [
            trends.interval(column) for column in np.array([r["length_accuracy"] for r in runs]).T
        ]
        weak = {
            f"{w['beta']:g}": [
                [x["k"], float(np.mean([r["weak"][i]["accuracy"] for r in runs]))]
                for i, x in enumerate(runs[0]["weak"])
                if x["beta"] == w["beta"]
            ]
            for w in runs[0]["weak"]
        }
        settings.append(
            {
                **_common(model, offset, runs),
                "lengths": runs[0]["lengths"],
                "length_accuracy": [i.value for i in spread],
                "length_accuracy_interval": [[i.low, i.high] for i in spread],
                "weak_retriever": weak,
            }
        )
    gated = [{**r, "beyond": beyond(r, pool)} for r in rows if r["model"] == "mamba2"]
    trend = trends.rises(gated, "offset", "beyond")
    # A model that learned nothing has nothing to keep.
    learned = [
        {**r, "kept": r["beyond"] / within(r, pool)} for r in gated if within(r, pool) >= LEARNED
    ]
    share = trends.rises(learned, "offset", "kept")
    reached = f"{len(learned)} of {len(gated)} runs reached {LEARNED} at the training's pools"
    found = [
        verdict(
            "length generalisation: stronger gates answer better from larger pools",
            trend.holds,
            trend.rho,
            f"rank correlation of the accuracy at the larger pools with the offset, mean of "
            f"{trend.blocks} seeds, {trend.said()}; {reached}",
        ),
        verdict(
            "length generalisation: stronger gates keep more of their accuracy",
            share.holds,
            share.rho,
            ("too few learned: " if share.p is None or share.blocks < trends.SEEDS else "")
            + f"the same for the accuracy at larger pools over that at the training's, of the runs "
            f"that learned the task, at offsets {', '.join(f'{x:g}' for x in share.levels)}; "
            f"{share.said()}; {reached}",
        ),
    ]
    tau = trends.rises(gated, "offset", "tau_final_weights", falls=True)
    found.append(
        verdict(
            "gate drift: the gates' order survives training (median tau by weights)",
            tau.holds,
            tau.rho,
            f"rank correlation of the final tau with the offset; {tau.said()}",
        )
    )
    baseline = [r for r in rows if r["model"] == "llama"]
    if baseline and gated:
        strongest = max(r["offset"] for r in gated)
        ours = [beyond(r, pool) for r in gated if r["offset"] == strongest]
        theirs = [beyond(r, pool) for r in baseline]
        p, seeds = permutation_test(ours, theirs), min(len(ours), len(theirs))
        found.append(
            verdict(
                "length generalisation: the strongest gates go further than the Transformer",
                float(np.mean(ours)) > float(np.mean(theirs))
                and p < trends.LEVEL
                and seeds >= trends.SEEDS,
                float(np.mean(ours) - np.mean(theirs)),
                f"difference of accuracies at larger pools, permutation p = {p:.2g}"
                + trends.few(seeds),
            )
        )
    tests = {"beyond": dataclasses.asdict(trend), "kept": dataclasses.asdict(share)}
    return {"settings": settings, "tests": tests}, found


def summarise(rows: list[Row], pool: int) -> dict[str, Any]:
    """Return the numbers and verdicts of every part that has rows.

    Args:
        pool: the largest pool that length models were trained with (`Settings.length_pool`).
    """
    summary: dict[str, Any] = {}
    verdicts: list[Row] = []
    for name, part in (
        ("retrieval", _retrieval),
        ("length", functools.partial(_length, pool=pool)),
    ):
        chosen = [r for r in rows if r["part"] == name]
        if chosen:
            summary[name], claims = part(chosen)
            verdicts += claims
    cpu, data = (sum(r[k] for r in rows) for k in ("cpu_seconds", "data_seconds"))
    summary |= {"cpu_seconds": cpu, "data_share": data / cpu if cpu else None}
    return {**summary, "verdicts": verdicts}
