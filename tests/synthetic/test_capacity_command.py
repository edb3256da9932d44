"""`python -m synthetic.capacity`: small runs end to end, and refusals."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gatewright.recall_law import recall
from synthetic.arguments import dispatch
from synthetic.capacity import __main__ as capacity
from synthetic.capacity.report import Cell, facts_at_half, fit_law, form_lines, summarise_heads

Execute = Callable[..., dict]


def test_a_trained_cell_beats_guessing_and_leaves_a_checkpoint(
    tmp_path: Path, execute: Execute
) -> None:
    sizes = "--task ar --vocab 32 --facts 2 --d 16 --n 8 --seeds 2 --steps 150 --sequences 300"
    out = tmp_path / "t"
    s = execute(capacity, out, "train", *sizes.split(), "--curve", "1,2,4", "--retrain", "--save")
    assert s["accuracy"] > 0.6  # answering either value of the context gives 0.5
    assert len(s["accuracy_seeds"]) == 2
    assert [c["facts"] for c in s["curve"]] == [1, 2, 4]
    assert s["curve"][0]["retrained"] > 0.6
    assert 0 < s["law"] <= 1
    config = json.loads((out / "checkpoint" / "config.json").read_text())
    assert (config["hidden_size"], config["state_size"], config["task"]) == (16, 8, "ar")
    assert (out / "curve.svg").exists()


def test_the_grid_reports_every_part_beside_the_law(
    tmp_path: Path, execute: Execute, capsys: pytest.CaptureFixture
) -> None:
    sizes = "--vocab 32 --facts 2 --d 4,8 --n 2,4 --pattern-vocab 16 --pattern-facts 2"
    more = "--pattern-d 4 --stacks 1x4,2x2 --heads 2 --heads-n 2 --steps 20 --sequences 100"
    s = execute(capacity, tmp_path / "g", "grid", *sizes.split(), *more.split())
    forms = {
        "remark_4_3/mean_of_max",
        "remark_4_3/sqrt_2_log_v",
        "theorem_4_2/mean_of_max",
        "theorem_4_2/sqrt_2_log_v",
    }
    for task in ("ar", "mqar"):
        assert set(s[f"{task}_32_2"]["forms"]) == forms
        assert [(c["d"], c["n"]) for c in s[f"{task}_32_2"]["cells"]] == [
            *((4, 2), (4, 4), (8, 2), (8, 4))
        ]
        assert {"accuracy", "with_convolution", "tap_removed"} <= s["ablation"][task].keys()
    assert len(s["inside"]["cells"]) == 8
    assert all(0 <= c["explained"] <= 1 for c in s["inside"]["cells"])
    assert [(c["layers"], c["n"]) for c in s["layers"]["cells"]] == [(1, 4), (2, 2)]
    assert set(s["heads"]["mean"]) == {"single", "mha", "mva", "mqa", "mka"}
    rows = (tmp_path / "g" / "results.jsonl").read_text().splitlines()
    assert len(rows) == 2 * (2 * 4 + 2 + 2 + 5)
    printed = capsys.readouterr().out
    assert all(line in printed for line in form_lines(s))
    assert "theorem 4.2 as printed, b = sqrt(2 ln V)" in printed
    assert (tmp_path / "g" / "grid.svg").exists()


def test_the_designed_circuits_stay_within_the_tolerance_of_the_law(
    tmp_path: Path, execute: Execute
) -> None:
    sizes = "--regimes 512:16 --d 16,32 --n 4,16 --draws 2 --sequences 150"
    s = execute(capacity, tmp_path / "d", "designed", *sizes.split())
    # Tolerances of the reference: .17 a cell, .08 rms.
    for group in ("ar_512_16", "mqar_512_16"):
        form = s[group]["forms"]["remark_4_3/mean_of_max"]
        assert form["max_abs_error"] < 0.17
        assert form["rms"] < 0.08
    assert s["non_compressive"]["ar"]["among_all"] == 1.0
    assert s["non_compressive"]["mqar"]["among_values"] == 1.0


def test_a_fit_finds_the_law_it_was_given() -> None:
    cells = [
        Cell({"facts": 16, "d": d, "n": n}, recall(d, n, 16, 1.7, 2.6), [])
        for d in (8, 16, 32)
        for n in (2, 8, 32)
    ]
    fit = fit_law(cells)
    assert (fit["a"], fit["b"]) == pytest.approx((1.7, 2.6), abs=1e-3)


def test_the_half_point_of_a_curve_is_interpolated() -> None:
    curve = [{"facts": f, "accuracy": a} for f, a in ((64, 0.25), (16, 0.75), (4, 1.0))]
    assert facts_at_half(curve, "accuracy") == pytest.approx(32)
    assert facts_at_half(curve[1:], "accuracy") is None
    assert facts_at_half(curve, "retrained") is None


def test_heads_are_ordered_with_a_test_statistic() -> None:
    rows = [
        {
            "part": "heads",
            "pattern": p,
            "heads": 2,
            "d": 4,
            "n": 2,
            "facts": 2,
            "vocab": 8,
            "seed": s,
            "accuracy": a + 0.001 * s,
        }
        for p, a in (("single", 0.5), ("mha", 0.4), ("mva", 0.5), ("mqa", 0.3), ("mka", 0.3))
        for s in range(3)
    ]
    _, verdicts = summarise_heads(rows)
    holds = {v["claim"]: v["holds"] for v in verdicts}
    assert holds["heads: p_mqa = p_mka"]
    assert holds["heads: p_mqa <= p_single"]
    assert not holds["heads: p_mva <= p_mha"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "name what to run"),
        (["gird"], "did you mean 'grid'"),
        (["grid", "--out", "x", "--parts", "cell"], "did you mean 'cells'"),
        (["grid", "--out", "x", "--vocab", "15"], "--vocab 15"),
        (["grid", "--out", "x", "--stacks", "2by3"], "--stacks 2by3"),
        (["grid", "--out", "x", "--heads", "5"], "--heads 5: must divide"),
        (["train", "--out", "x", "--task", "ar", "--d", "4", "--n", "2", "--retrain"], "--curve"),
        (["train", "--out", "x", "--task", "ar", "--d", "4", "--n", "0"], "--n must be"),
        (
            [
                "train",
                "--out",
                "x",
                "--task",
                "mqar",
                "--d",
                "4",
                "--n",
                "2",
                "--model",
                "full",
                "--save",
            ],
            "for --model linear",
        ),
        (["designed", "--out", "x", "--regimes", "512"], "--regimes 512"),
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
        dispatch(capacity.PROG, capacity.COMMANDS, argv)
    assert done.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "x").exists()
