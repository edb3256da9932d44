"""`python -m synthetic.recall`: a run that learns, the table's bookkeeping, refusals."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gatewright import cli
from synthetic.arguments import dispatch
from synthetic.recall import __main__ as recall
from synthetic.recall import arms, runs, timing
from synthetic.recall.flags import RunArgs

Execute = Callable[..., dict]
FEW = ("fixed/gated_deltanet+conv", "fixed/gated_deltanet", "lift/dense-4 only")
FEW = (*FEW, "lift/dense-1 curriculum", "s5/gated_deltanet 2")
TINY = ("--pairs", "4", "--scale-steps", "0.0005", "--sequences", "64", "--processes", "1")
UNTRAINED = ("run", "--cell", "mamba2", "--no-conv", "--pairs", "4", "--steps", "1")
UNTRAINED = (*UNTRAINED, "--batch", "4", "--sequences", "256")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make a table of a few arms; return their names."""
    chosen = {n: a for n, a in arms.all_arms(4).items() if n in FEW}
    monkeypatch.setattr(arms, "all_arms", lambda pairs: chosen)
    return list(chosen)


def lines_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def measures(out: Path) -> list[dict[str, Any]]:
    """Return rows without their cost, in an order that does not tell which ended first."""
    kept = [{k: v for k, v in r.items() if "seconds" not in k} for r in lines_of(out)]
    return sorted(kept, key=lambda r: (r["arm"], r["seed"]))


def test_an_armed_cell_binds_two_pairs_and_says_so(tmp_path: Path, execute: Execute) -> None:
    flags = "--cell gated_deltanet --conv --pairs 2 --width 16 --seeds 2 --steps 120 --batch 64"
    more = "--sequences 512 --lr 0.01"
    s = execute(recall, tmp_path / "r", "run", *flags.split(), *more.split())
    assert s["mean"] > s["floors"]["floor"] + 0.2
    assert s["rebinding"] < s["mean"] - 0.2
    assert s["nothing_bound"] == 0
    assert s["n"] == 2
    curve = lines_of(tmp_path / "r")[0]["curve"]
    assert len(curve) == 3
    assert curve[-1] > curve[0] + 0.2


def test_an_untrained_run_is_marked_as_binding_nothing(tmp_path: Path, execute: Execute) -> None:
    s = execute(recall, tmp_path / "r", *UNTRAINED, "--seeds", "2")
    assert s["nothing_bound"] == 2


def test_an_unfinished_run_goes_on_with_the_seeds_it_lacks(
    tmp_path: Path, execute: Execute, capsys: pytest.CaptureFixture
) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    execute(recall, whole, *UNTRAINED, "--seeds", "3")
    first = (whole / "results.jsonl").read_text().splitlines(keepends=True)[0]
    part.mkdir()
    (part / "results.jsonl").write_text(first)
    config = json.loads((whole / "config.json").read_text())
    (part / "config.json").write_text(json.dumps(config | {"seeds": 1}))
    assert execute(recall, part, *UNTRAINED, "--seeds", "3")["n"] == 3
    assert (part / "results.jsonl").read_text().startswith(first)
    assert measures(part) == measures(whole)
    (part / "manifest.json").unlink()
    with pytest.raises(SystemExit):
        dispatch(recall.PROG, recall.COMMANDS, [*UNTRAINED, "--lr", "1", "--out", str(part)])
    assert "was started with lr=0.003, not 1.0" in capsys.readouterr().err


def test_out_of_time_the_table_stays_unfinished_and_goes_on(
    tmp_path: Path,
    few: list[str],
    execute: Execute,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    out, done = tmp_path / "t", runs.execute
    begun: list[str] = []

    def two_arms(sequences: int, deadline: float, job: tuple) -> list[dict]:
        begun.append(job[0])
        return done(sequences, None if len(begun) <= 2 else 0.0, job)

    monkeypatch.setattr(runs, "execute", two_arms)
    argv = ("table", *TINY, "--seeds", "2")
    s = execute(recall, out, *argv, "--parts", "fixed,lift")
    assert begun[:2] == ["lift/dense-1 curriculum", "lift/dense-4 only"]  # the longest first
    assert s["not_run"] == ["fixed/gated_deltanet+conv", "fixed/gated_deltanet"]
    assert not (out / "manifest.json").exists()
    assert (out / "recall.svg").exists()
    assert "start again to go on" in capsys.readouterr().out
    before = (out / "results.jsonl").read_text()
    assert len(before.splitlines()) == 4

    monkeypatch.setattr(runs, "execute", done)
    s = execute(recall, out, *argv, "--minutes", "0")  # reports what there is
    assert len(s["not_run"]) == 3
    assert (out / "results.jsonl").read_text() == before
    s = execute(recall, out, *argv, "--parts", "fixed,lift,s5")  # and more parts than it began with
    assert s["not_run"] == []
    assert [x["arm"] for x in s["arms"]] == few
    assert (out / "manifest.json").exists()
    assert (out / "results.jsonl").read_text().startswith(before)
    assert s["seconds"] is None
    assert s["arms_seconds"] == pytest.approx(sum(r["seconds"] for r in lines_of(out)), abs=0.1)
    assert all(0 < x["floor"] < 1 for x in s["arms"])
    verdicts = {v["claim"]: v["verdict"] for v in s["verdicts"]}
    assert verdicts["convolution lifts the delta-rule cell [fixed]"] == "undecided"
    assert verdicts["the wall: attention passes it"] == "not run"
    beside = tmp_path / "beside"
    execute(recall, beside, *argv, "--parts", "fixed,lift,s5", "--processes", "2")
    assert measures(beside) == measures(out)


def test_missing_seeds_of_an_arm_are_trained_and_more_may_be_asked_for(
    tmp_path: Path, few: list[str], execute: Execute, capsys: pytest.CaptureFixture
) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    argv = ("table", *TINY, "--parts", "fixed")
    execute(recall, whole, *argv, "--seeds", "3")
    rows = (whole / "results.jsonl").read_text().splitlines(keepends=True)
    part.mkdir()
    config = json.loads((whole / "config.json").read_text())
    (part / "config.json").write_text(json.dumps(config | {"seeds": 2}))
    (part / "results.jsonl").write_text(rows[0] + rows[1] + rows[4])
    s = execute(recall, part, *argv, "--seeds", "3")
    assert [x["n"] for x in s["arms"]] == [3, 3]
    assert measures(part) == measures(whole)

    (part / "manifest.json").unlink()
    for flags, message in (
        (("--seeds", "2"), "holds seed 2 of fixed/gated_deltanet"),
        (("--seeds", "3", "--scale-steps", "0.01"), "scale_steps=0.0005, not 0.01"),
    ):
        with pytest.raises(SystemExit) as refused:
            dispatch(recall.PROG, recall.COMMANDS, [*argv, *flags, "--out", str(part)])
        assert refused.value.code == 2
        assert message in capsys.readouterr().err
    assert len(lines_of(part)) == 6


def test_the_table_goes_on_without_a_diverged_seed(
    tmp_path: Path,
    few: list[str],
    execute: Execute,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    train = runs.train

    def diverging(arm: runs.Arm, seeds: list[int], desc: str) -> runs.Trained:
        done = train(arm, seeds, desc)
        if arm.cell.conv:
            done.diverged[1] = 0
        return done

    monkeypatch.setattr(runs, "train", diverging)
    s = execute(recall, tmp_path / "t", "table", *TINY, "--seeds", "3", "--parts", "fixed")
    assert [(x["n"], x["failed"]) for x in s["arms"]] == [(2, 1), (3, 0)]
    assert s["failed"] == ["fixed/gated_deltanet+conv, seed 1: not finite at step 0"]
    assert "diverged: fixed/gated_deltanet+conv, seed 1" in capsys.readouterr().out


def test_a_table_of_nothing_but_diverged_seeds_is_one_line(
    tmp_path: Path, few: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    train = runs.train

    def diverging(arm: runs.Arm, seeds: list[int], desc: str) -> runs.Trained:
        done = train(arm, seeds, desc)
        done.diverged[0] = 0
        return done

    monkeypatch.setattr(runs, "train", diverging)
    argv = ["table", *TINY, "--seeds", "1", "--parts", "fixed", "--out", str(tmp_path / "t")]
    with pytest.raises(SystemExit) as refused:
        dispatch(recall.PROG, recall.COMMANDS, argv)
    assert refused.value.code == 2
    assert "every seed diverged" in capsys.readouterr().err.splitlines()[-1]


def test_few_seeds_are_warned_of(
    tmp_path: Path, few: list[str], execute: Execute, capsys: pytest.CaptureFixture
) -> None:
    execute(recall, tmp_path / "t", "table", *TINY, "--seeds", "2", "--parts", "s5")
    assert "--seeds 2: no test of fewer than 4 seeds" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "want"),
    [
        ("", {"layers": 1, "width": 32, "bidirectional": True, "pairs": 32, "layout": "fixed"}),
        ("--task haystack", {"layers": 2, "width": 32, "length": 64, "dense": 1}),
        ("--task collision --curriculum ramp", {"layers": 2, "curriculum": "ramp"}),
        ("--task s5", {"layers": 2, "width": 64, "bidirectional": False, "length": 16}),
        ("--task s5 --width 32 --layers 1 --direction both", {"width": 32, "layers": 1}),
    ],
)
def test_what_no_flag_says_comes_from_the_task(flags: str, want: dict) -> None:
    argv = ["--out", "x", "--cell", "deltanet", *flags.split()]
    settings = cli.parse(RunArgs, argv, prog="run").arm().settings()
    assert want.items() <= settings.items()


RUN = ["run", "--out", "x", "--cell", "deltanet"]
MAMBA = ["run", "--out", "x", "--cell", "mamba2"]
TABLE = ["table", "--out", "x"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "name what to run"),
        (["tabel"], "did you mean 'table'"),
        (["run", "--out", "x", "--cell", "deltanat", "--conv"], "did you mean 'deltanet'"),
        (["run", "--out", "x"], "--cell"),
        ([*RUN, "--pairs", "60"], "--pairs"),
        (["run", "--out", "x", "--cell", "attention", "--conv"], "unarmed control"),
        ([*RUN, "--curriculum", "ramp"], "--curriculum belongs to --task haystack or collision"),
        ([*RUN, "--curriculum", "none"], "--curriculum belongs to --task haystack or collision"),
        ([*RUN, "--dense", "1"], "--dense belongs to --task haystack or collision, not mqar"),
        ([*RUN, "--length", "64"], "--length belongs to --task haystack or collision or s5"),
        ([*RUN, "--task", "haystack", "--pairs", "4"], "--pairs belongs to --task mqar"),
        ([*RUN, "--task", "s5", "--layout", "fixed"], "--layout belongs to --task mqar, not s5"),
        ([*RUN, "--task", "s5", "--dense", "2"], "--dense belongs"),
        ([*RUN, "--task", "s5", "--length", "7"], "--length of s5 is even"),
        ([*RUN, "--lr", "nan"], "--lr must be positive, not nan"),
        ([*RUN, "--lr", "inf"], "--lr must be positive, not inf"),
        *[([*MAMBA, "--width", w], f"--width {w}: mamba2") for w in ("10", "6", "1")],
        ([*TABLE, "--parts", "fixd"], "did you mean 'fixed'"),
        ([*TABLE, "--seeds", "0"], "--seeds must be positive"),
        ([*TABLE, "--pairs", "57"], "--pairs lies between"),
        ([*TABLE, "--scale-steps", "nan"], "--scale-steps must be positive, not nan"),
        ([*TABLE, "--scale-steps", "inf"], "--scale-steps must be positive, not inf"),
        ([*TABLE, "--minutes", "-1"], "--minutes -1"),
        ([*TABLE, "--minutes", "nan"], "--minutes nan"),
        ([*TABLE, "--minutes", "inf"], "--minutes inf"),
        ([*TABLE, "--minutes", "0"], "--minutes 0 reports what is there, and --out x has no arm"),
    ],
)
def test_bad_input_is_named(
    argv: list[str],
    message: str,
    capsys: pytest.CaptureFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as done:
        dispatch(recall.PROG, recall.COMMANDS, argv)
    assert done.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--cell", "foo"], "--cell: no 'foo'"),
        (["--cell", "attention"], "unarmed control"),
        (["--cell", "deltanet", "--pairs", "60"], "--pairs lies between"),
        (["--cell", "deltanet", "--steps", "0"], "--steps must be positive"),
    ],
)
def test_the_timer_names_bad_input(
    argv: list[str], message: str, capsys: pytest.CaptureFixture
) -> None:
    threads = torch.get_num_threads()
    with pytest.raises(SystemExit) as done:
        cli.run(timing.main, timing.Args, prog="timing", argv=argv)
    assert done.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert torch.get_num_threads() == threads


def test_a_run_without_flags_is_the_tables_arm(tmp_path: Path) -> None:
    s5 = RunArgs(tmp_path, "rwkv7", conv=False, task="s5", length=8)
    assert s5.arm() == arms.s5("rwkv7", False, 4)
    mqar = RunArgs(tmp_path, "deltanet", pairs=8, steps=arms.FAST_STEPS)
    assert mqar.arm() == arms.mqar("deltanet", True, 8)
