"""`python -m synthetic.theory`: values of the reference, resuming, and refusals."""

import json
from pathlib import Path

import pytest

from gatewright import cli
from gatewright.errors import UserError
from synthetic.sweep import Sweep
from synthetic.theory import long_panels, settings, short_panels
from synthetic.theory.__main__ import PROG, Args, main


def run(out: Path, *argv: str) -> dict:
    main(cli.parse(Args, [*argv, "--out", str(out), "--threads", "1"], prog=PROG))
    return json.loads((out / "summary.json").read_text())


def test_panel_a_finds_the_critical_alpha(tmp_path: Path) -> None:
    summary = run(tmp_path / "a", "a", "--seeds", "12", "--alpha0", "0.05,0.1,0.15,0.18,0.21,0.3")
    # Measured with an independent implementation: 0.179 +- 0.006 over 40 seeds.
    assert summary["crossover_alpha"] == pytest.approx(0.179, abs=0.006)
    assert summary["a"]["crossover_alpha"] == summary["crossover_alpha"]
    assert {p.name for p in (tmp_path / "a").iterdir()} == {
        "config.json",
        "results.jsonl",
        "summary.json",
        "manifest.json",
        "theory.svg",
        "theory.png",
    }


def test_panel_b_escapes_when_the_independent_implementation_does(tmp_path: Path) -> None:
    summary = run(
        tmp_path / "b", "b", "--seeds", "4", "--steps", "900", "--alpha0", "1.04e-3,3.8e-3,0.05"
    )
    assert summary["alpha0"] == [1.04e-3, 3.8e-3, 0.05]
    for got, want in zip(summary["escape_steps"], (772, 350, 70), strict=True):
        assert got == pytest.approx(want, rel=0.02)
    assert summary["escape_steps_frozen"] == [None, None, None]
    assert summary["r2"] == summary["fits"][0]["r2"]
    assert summary["slope"] > 0


def test_panels_c_and_d_report_every_field(tmp_path: Path) -> None:
    common = ("--steps", "400", "--seeds", "1", "--eval-examples", "20000")
    c = run(tmp_path / "c", "c", "--tau", "30,100", *common)
    assert c["tau"] == [30.0, 100.0]
    for got, bayes in zip(c["trained_accuracy"], c["bayes_accuracy"], strict=True):
        assert got == pytest.approx(bayes, abs=0.02)
    assert c["limit_accuracy"] == pytest.approx(0.638, abs=0.001)
    d = run(tmp_path / "d", "d", "--tau", "8,16,32", *common)
    assert d["max_abs_error"] < 0.1
    assert d["r2"] > 0.95


def test_an_interrupted_sweep_is_continued(tmp_path: Path) -> None:
    two = settings.Settings((30.0,), seeds=2, steps=3, eval_examples=100)
    with Sweep(tmp_path / "x", "theory", {}) as sweep:
        long_panels.run_c(sweep, settings.Settings((30.0,), seeds=1, steps=3, eval_examples=100))
        first = list(sweep.rows)
    with Sweep(tmp_path / "x", "theory", {}) as sweep:
        long_panels.run_c(sweep, two)
        assert sweep.rows[: len(first)] == first
        assert {r["seed"] for r in sweep.rows} == {0, 1}
    with Sweep(tmp_path / "y", "theory", {}) as sweep:
        long_panels.run_c(sweep, two)
        assert sweep.rows == [*first, *sweep.rows[len(first) :]]


def test_the_crossover_is_interpolated_or_absent() -> None:
    assert short_panels.crossover([0.1, 0.4], [-1.0, 1.0]) == pytest.approx(0.2)
    assert short_panels.crossover([0.1, 0.4], [1.0, 1.0]) is None
    assert short_panels.crossover([0.1, 0.4], [-1.0, -1.0]) is None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("e",), "a,b,c,d,all|invalid choice"),
        (("a", "--alpha0", "0.1,2"), r"--alpha0 \(panel a\) 0.1,2: each"),
        (("a", "--alpha0", "x"), "numbers separated by commas"),
        (("a", "--tau", "3"), "--tau belongs to panels c and d"),
        (("c", "--alpha0", "0.3"), "--alpha0 belongs to panels a and b"),
        (("a", "--seeds", "0"), "--seeds must be positive"),
        (("a", "--seeds", "100000000000000000000"), "--seeds 1000.*at most"),
        (("b", "--alpha0", "1e-15"), r"--alpha0 \(panel b\) 1e-15: .*between 1e-05 and 0.18"),
        (("b", "--alpha0", "0.3"), r"--alpha0 \(panel b\) 0.3: each"),
        (("a", "--alpha0", ""), r"--alpha0 \(panel a\) '': give at least one"),
        (("c", "--tau", ""), "--tau '': give at least one"),
        (("c", "--alpha0", ""), "--alpha0 belongs to panels a and b"),
        (("a", "--sedes", "3"), "did you mean '--seeds'"),
    ],
)
def test_bad_input_is_named(tmp_path: Path, argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(tmp_path / "x", *argv)
    assert not (tmp_path / "x").exists()


def test_the_ends_of_panel_bs_range_escape() -> None:
    from synthetic.theory import flow

    for alpha0 in settings.ALPHA0_RANGE["b"]:
        for train_gate in (True, False):
            assert flow.full_flow(alpha0, 32, 0.1, train_gate=train_gate) > 0


def test_seeds_without_a_crossing_are_not_counted(tmp_path: Path) -> None:
    three = settings.Settings((0.1, 0.3), seeds=3, steps=2)
    with Sweep(tmp_path / "x", "theory", {}) as sweep:
        for seed in range(3):
            for alpha0, gap in ((0.1, -1.0), (0.3, 1.0 if seed else -1.0)):
                for gate in settings.GATES:
                    sweep.add(
                        {"panel": "a", "alpha0": alpha0, "gate": gate, "seed": seed,
                         "delta_m": 2.0, "delta_r": 2.0 + gap}
                    )  # fmt: skip
        _, (claim,) = short_panels.summarise_a(sweep, three)
    assert "2 of 3 seeds" in claim["detail"]
