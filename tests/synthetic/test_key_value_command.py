"""`python -m synthetic.key_value`: from training to verdicts, gathered and resumed."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gatewright import cli
from gatewright.errors import UserError
from synthetic import sequence_models as sm
from synthetic.key_value import __main__ as command
from synthetic.key_value import report, settings

ROOT = Path(__file__).resolve().parents[2]
FILES = {"config.json", "results.jsonl", "summary.json", "manifest.json"}
FILES |= {"key_value.svg", "key_value.png"}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    small = dataclasses.replace(
        settings.SMALL,
        task=dataclasses.replace(settings.SMALL.task, entries=40, pairs=4),
        sizes={
            "mamba2": sm.Size("mamba2", d_model=16, layers=1, heads=2, head_dim=8, d_state=4),
            "gpt_neox": sm.Size("gpt_neox", d_model=16, layers=1, heads=2, head_dim=8, ffn=16),
        },
        recipe=dataclasses.replace(settings.SMALL.recipe, steps=4, batch=4, eval_every=2),
        offsets=dict.fromkeys(settings.ORDERS, (-3.0, -1.0, 1.0)),
        seeds=(0, 1),
        lengths=(4, 6),
        curve_sequences=8,
        final_sequences=16,
        length_sequences=8,
    )
    monkeypatch.setitem(settings.SIZES, "small", small)


def run(out: Path, *argv: str) -> dict[str, Any]:
    words = ["--processes", "1", *argv, "--out", str(out)]
    args = cli.parse(command.RunArgs, words, prog=command.PROG)
    command.small(args)
    return json.loads((out / "summary.json").read_text())


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


@pytest.mark.usefixtures("tiny")
def test_every_run_is_measured_and_every_claim_is_judged(tmp_path: Path) -> None:
    summary = run(tmp_path / "a")
    assert {p.name for p in (tmp_path / "a").iterdir()} == FILES
    found = rows(tmp_path / "a")
    assert len(found) == 2 * 2 * (3 + 1)
    assert all(len(r["length_accuracy"]) == 2 for r in found if r["order"] == "best_last")
    assert all(r["curve"][-1][0] == 4 for r in found)
    assert all(r["tau_initial_weights"] > 0 for r in found if r["model"] == "mamba2")
    claims = [v["claim"] for v in summary["verdicts"]]
    for word in ("escape memory sooner", "linear in e^offset", "longer contexts", "Transformer"):
        assert any(word in c for c in claims), word
    assert 0 < summary["data_share"] < 1
    assert [s["offset"] for s in summary["best_first"]["settings"]] == [-3, -1, 1, None]


@pytest.mark.usefixtures("tiny")
def test_seeds_run_apart_are_gathered_into_what_they_give_together(tmp_path: Path) -> None:
    argv = ("--orders", "best_first", "--models", "mamba2", "--offsets=-3,1,2")
    run(tmp_path / "all", *argv)
    for seed in ("0", "1"):
        run(tmp_path / seed, *argv, "--seeds", seed)
    command.gather(command.GatherArgs([tmp_path / "0", tmp_path / "1"], tmp_path / "joined"))
    measured = lambda r: {k: v for k, v in r.items() if "seconds" not in k}  # noqa: E731
    assert [measured(r) for r in rows(tmp_path / "joined")] == [
        measured(r) for r in rows(tmp_path / "all")
    ]
    with pytest.raises(UserError, match="repeats the run best_first mamba2 -3.0 0"):
        command.gather(command.GatherArgs([tmp_path / "0", tmp_path / "0"], tmp_path / "twice"))


@pytest.mark.usefixtures("tiny")
def test_bad_input_is_named(tmp_path: Path) -> None:
    for argv, message in (
        (("--orders", "best"), "--orders: no 'best'"),
        (("--models", "llama"), "--models: no 'llama'"),
        (("--offsets", "x"), "--offsets x"),
        (("--seeds", "-1"), "--seeds"),
        (("--seeds", "99999999999999999999"), "--seeds .*at most"),
        (("--offsets=95",), "--offsets 95: each must lie between -30 and 30"),
        (("--offsets=-60",), "--offsets -60: each must lie between"),
        (("--device", "gpu"), "--device.*'cpu'"),
        (("--steps", "0"), "--steps must be positive"),
        (("--device", "cuda"), "torch sees no GPU"),
    ):
        with pytest.raises(UserError, match=message):
            run(tmp_path / "x", *argv)
    assert not (tmp_path / "x").exists()


def fake(offset: float, seed: int, escape: int | None, **more: Any) -> dict[str, Any]:
    return {
        "order": "best_first",
        "model": "mamba2",
        "offset": offset,
        "seed": seed,
        "escape_step": escape,
        "cap_steps": 1000,
        "accuracy": 0.99 if escape else 0.44,
        "memory_accuracy": 0.436,
        "parameters": 10,
        "cpu_seconds": 1.0,
        "data_seconds": 0.1,
        "curve": [[step, 0.99 if escape and step >= escape else 0.44, 1.0] for step in (500, 1000)],
        **{
            f"{name}_{source}": 1 / (10 + offset)
            for name in ("tau_initial", "tau_final", "delta_alpha")
            for source in ("weights", "data")
        },
        **more,
    }


def judged(rows: list[dict[str, Any]]) -> dict[str, bool]:
    return {v["claim"]: v["holds"] for v in report.summarise(rows)["verdicts"]}


def test_claims_are_told_apart_from_their_opposites() -> None:
    """On runs made up so that the truth is known."""
    import math

    offsets = (-3.0, -2.0, 0.0, 2.0)

    def escape(offset: float, seed: int) -> int | None:
        return None if offset == 2 else int(100 + 800 * math.exp(offset) + 5 * seed)

    assert report.half_way(fake(0.0, 0, 700)) == 1000
    assert report.half_way(fake(0.0, 0, None)) is None
    true = [fake(o, s, escape(o, s)) for o in offsets for s in range(5)]
    assert set(judged(true).values()) == {True}
    summary = report.summarise(true)["best_first"]
    assert summary["escape"]["never_escaped"] == 5
    assert summary["escape"]["exp_offset"]["slope"] == pytest.approx(800, rel=0.01)
    assert [s["median_escape_steps"] for s in summary["settings"]][-1] is None
    turned = [fake(-o, s, escape(o, s)) for o in offsets for s in range(5)]
    claims = judged(turned)
    assert not claims["best-first: weaker gates escape memory sooner"]
    assert not claims["best-first: the strongest gates end at what memory alone reaches"]
    alike = [fake(o, s, 500) for o in offsets for s in range(5)]
    assert not judged(alike)["best-first: weaker gates escape memory sooner"]
    assert set(judged([r for r in true if r["seed"] < 4]).values()) == {False}
    backwards = report.summarise(true[::-1])["best_first"]  # runs side by side end in any order
    assert backwards["settings"] == summary["settings"]


def test_papers_runs_do_not_go_side_by_side(tmp_path: Path) -> None:
    argv = ["--processes", "2", "--out", str(tmp_path / "x")]
    with pytest.raises(UserError, match="--processes 2: .*leave the flag out"):
        command.paper(cli.parse(command.RunArgs, argv, prog=command.PROG))
    assert not (tmp_path / "x").exists()


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    """Gradients of parts of a batch are summed: the run is the one process's."""
    argv = [
        "--orders", "best_first", "--models", "mamba2", "--offsets=-3", "--seeds", "0",
        "--steps", "3",
    ]  # fmt: skip
    run(tmp_path / "one", *argv)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run(
        [*launch, "-m", "synthetic.key_value", "small", *argv, "--out", str(tmp_path / "two")],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GATEWRIGHT_QUIET": "1"},
        check=True,
        timeout=900,
        capture_output=True,
    )
    one, two = rows(tmp_path / "one")[0], rows(tmp_path / "two")[0]
    assert two["tau_final_data"] == pytest.approx(one["tau_final_data"], rel=1e-4)
    assert two["delta_alpha_weights"] == pytest.approx(one["delta_alpha_weights"], rel=1e-2)
    assert two["accuracy"] == pytest.approx(one["accuracy"], abs=0.01)
    assert two["curve"][-1][2] == pytest.approx(one["curve"][-1][2], abs=1e-3)  # the whole loss
