"""`python -m synthetic.recall`: a run that learns, the table's bookkeeping, refusals."""

import json
from pathlib import Path

import pytest

from synthetic.arguments import dispatch
from synthetic.recall import arms, cells, runs, table, tasks
from synthetic.recall.__main__ import COMMANDS, PROG


def execute(out: Path, *argv: str) -> dict:
    with pytest.raises(SystemExit) as done:
        dispatch(PROG, COMMANDS, [*argv, "--out", str(out), "--threads", "1"])
    assert done.value.code == 0
    return json.loads((out / "summary.json").read_text())


def test_an_armed_cell_binds_two_pairs_and_says_so(tmp_path: Path) -> None:
    s = execute(
        tmp_path / "r",
        "run",
        "--cell",
        "gated_deltanet",
        "--conv",
        "--pairs",
        "2",
        "--width",
        "16",
        "--seeds",
        "2",
        "--steps",
        "120",
        "--batch",
        "64",
        "--sequences",
        "512",
        "--lr",
        "0.01",
    )
    assert s["mean"] > s["floors"]["floor"] + 0.2
    assert s["rebinding"] < s["mean"] - 0.2
    assert s["nothing_bound"] == 0
    assert s["n"] == 2


def test_an_untrained_run_is_marked_as_binding_nothing(tmp_path: Path) -> None:
    s = execute(
        tmp_path / "r",
        "run",
        "--cell",
        "mamba2",
        "--no-conv",
        "--pairs",
        "4",
        "--seeds",
        "2",
        "--steps",
        "1",
        "--batch",
        "4",
        "--sequences",
        "256",
    )
    assert s["nothing_bound"] == 2


def test_seeds_that_train_together_train_as_if_alone() -> None:
    arm = runs.Arm(
        tasks.Task("haystack", length=24),
        cells.Cell("rwkv7", 8),
        layers=2,
        curriculum="gated",
        steps=12,
        batch=8,
    )
    together, _ = runs.train(arm, [1, 2], "x")
    alone, _ = runs.train(arm, [2], "x")
    for name, value in together.items():
        assert (value[1] - alone[name][0]).abs().max() < 1e-4, name


def test_the_table_resumes_reports_floors_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {
        n: a
        for n, a in arms.all_arms(4).items()
        if n
        in (
            "fixed/gated_deltanet+conv",
            "fixed/gated_deltanet",
            "lift/dense-4 only",
            "lift/dense-1 curriculum",
            "s5/gated_deltanet 2",
        )
    }
    monkeypatch.setattr(arms, "all_arms", lambda pairs: few)
    out = tmp_path / "t"
    argv = (
        "table",
        "--pairs",
        "4",
        "--seeds",
        "2",
        "--scale-steps",
        "0.0005",
        "--sequences",
        "64",
        "--parts",
        "fixed,lift,s5",
    )
    s = execute(out, *argv)
    assert {x["arm"] for x in s["arms"]} == set(few)
    assert all(0 < x["floor"] < 1 for x in s["arms"])
    claims = {v["claim"] for v in s["verdicts"]}
    assert "convolution lifts the delta-rule cell [fixed]" in claims
    assert "the curriculum lifts lock-in at L = 64" in claims
    assert (out / "recall.svg").exists()
    rows = (out / "results.jsonl").read_text().splitlines()
    assert len(rows) == 10
    # Without its manifest and last arm the folder is unfinished and picks up where it was.
    (out / "manifest.json").unlink()
    (out / "results.jsonl").write_text("\n".join(rows[:8]) + "\n")
    # Out of time it reports what it has and names the rest.
    assert execute(out, *argv, "--minutes", "0")["not_run"] == ["s5/gated_deltanet 2"]
    (out / "manifest.json").unlink()
    assert execute(out, *argv)["not_run"] == []
    again = (out / "results.jsonl").read_text().splitlines()
    assert again[:8] == rows[:8]
    assert len(again) == 10


def test_every_arm_of_the_table_can_be_built_and_every_claim_names_arms() -> None:
    every = arms.all_arms(32)
    for name, arm in every.items():
        assert arm.settings()["steps"] >= 1000, name
    assert {n.split("/")[0] for n in every} == set(arms.PARTS)
    for claim in (*table.CLAIMS, *table.LOCK_INS):
        assert claim.a in every, claim
        assert claim.b in every, claim
    assert set(table.PAPER_ARMS) <= set(every)


def test_verdicts_follow_the_statistics() -> None:
    def rows(arm: str, values: list[float]) -> list[dict]:
        return [{"arm": arm, "accuracy": v} for v in values]

    armed, bare = "fixed/gated_deltanet+conv", "fixed/gated_deltanet"
    clear = table.verdicts(
        rows(armed, [0.9, 0.92, 0.95, 0.97, 0.99]) + rows(bare, [0.4, 0.5, 0.55, 0.45, 0.5])
    )
    assert [v["holds"] for v in clear if "delta-rule" in v["claim"]] == [True]
    assert clear[0]["p"] == pytest.approx(2 / 252)
    close = table.verdicts(rows(armed, [0.5, 0.4, 0.6]) + rows(bare, [0.5, 0.45, 0.55]))
    assert [v["holds"] for v in close if "delta-rule" in v["claim"]] == [False]
    locks = table.verdicts(
        rows("lift/dense-1 curriculum", [1.0] * 7 + [0.02] * 3)
        + rows("lift/dense-4 only", [1.0] + [0.02] * 9)
    )
    assert locks[0]["p"] == pytest.approx(0.02, abs=0.001)
    assert locks[0]["holds"]
    assert table.judge("equal", 0.3, 0.2)
    assert not table.judge("equal", 0.3, 0.01)
    assert table.judge("not_less", -0.3, 0.2)
    assert not table.judge("not_less", -0.3, 0.01)


def test_what_binds_nothing_is_told_from_what_binds() -> None:
    assert runs.nothing_bound(0.12, 0.13, 2048)
    assert runs.nothing_bound(0.12, 0.11, 2048)
    assert not runs.nothing_bound(0.34, 0.05, 2048)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "name what to run"),
        (["tabel"], "did you mean 'table'"),
        (["run", "--out", "x", "--cell", "deltanat", "--conv"], "did you mean 'deltanet'"),
        (["run", "--out", "x"], "--cell"),
        (["run", "--out", "x", "--cell", "deltanet", "--conv", "--pairs", "60"], "--pairs"),
        (["run", "--out", "x", "--cell", "attention", "--conv"], "unarmed control"),
        (
            ["run", "--out", "x", "--cell", "deltanet", "--conv", "--curriculum", "ramp"],
            "--curriculum belongs",
        ),
        (["table", "--out", "x", "--parts", "fixd"], "did you mean 'fixed'"),
        (["table", "--out", "x", "--seeds", "0"], "--seeds must be positive"),
        (["table", "--out", "x", "--minutes", "-1"], "--minutes -1"),
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
        dispatch(PROG, COMMANDS, argv)
    assert done.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "x").exists()
