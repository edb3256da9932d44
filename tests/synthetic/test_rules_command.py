"""`python -m synthetic.rules`: from training to verdicts, and decoding by hand."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gatewright import cli
from gatewright.errors import UserError
from synthetic import sequence_models as sm
from synthetic.rules import __main__ as command
from synthetic.rules import examples as ex
from synthetic.rules import report, runs, settings, world
from synthetic.rules.world import Size

FILES = {"config.json", "results.jsonl", "summary.json", "manifest.json", "rules.svg", "rules.png"}

TINY = dataclasses.replace(
    settings.SMALL,
    world=Size(sets=3, propositions=12, clauses=14, symbols=2, digits=2),
    retrieval_world=Size(sets=3, propositions=10, clauses=12, symbols=2, digits=2),
    sizes={
        "mamba2": sm.Size("mamba2", d_model=16, layers=1, heads=2, head_dim=8, d_state=4),
        "llama": sm.Size("llama", d_model=16, layers=1, heads=2, head_dim=8, ffn=16),
    },
    recipe=dataclasses.replace(settings.SMALL.recipe, steps=4, batch=4, eval_every=2),
    lengths=(4, 8, 14),
    seeds=(0, 1),
    curve_examples=8,
    final_examples=8,
)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(settings.SIZES, "small", TINY)


def run(out: Path, *argv: str) -> dict[str, Any]:
    words = ["--processes", "1", *argv, "--out", str(out)]
    args = cli.parse(command.RunArgs, words, prog=command.PROG)
    command.small(args)
    return json.loads((out / "summary.json").read_text())


@pytest.mark.usefixtures("tiny")
def test_every_run_is_measured_and_every_claim_is_judged(tmp_path: Path) -> None:
    summary = run(tmp_path / "a")
    assert {p.name for p in (tmp_path / "a").iterdir()} == FILES
    found = [json.loads(x) for x in (tmp_path / "a" / "results.jsonl").read_text().splitlines()]
    assert len(found) == sum(len(TINY.seeds) * (len(o) + 1) for o in TINY.offsets.values())
    for r in found:
        if r["part"] == "length":
            assert [(w["beta"], w["k"]) for w in r["weak"]] == [
                (b, k) for b in (0.0, 1.0) for k in TINY.lengths
            ]
        else:
            assert {c["step"] for c in r["curve"]} == {2, 4}
            assert 0 <= r["no_oracle"] <= 1
    claims = [v["claim"] for v in summary["verdicts"]]
    for word in ("retrieve resampled", "memorise", "larger pools", "gate drift", "Transformer"):
        assert any(word in c for c in claims), word
    table = [s for s in summary["length"]["settings"] if s["model"] == "mamba2"]
    taus = [s["tau_initial_weights"] for s in table]
    assert taus == sorted(taus, reverse=True)


@pytest.mark.usefixtures("tiny")
def test_bad_input_is_named(tmp_path: Path) -> None:
    for argv, message in (
        (("--parts", "lenght"), "did you mean 'length'"),
        (("--models", "gpt_neox"), "--models: no 'gpt_neox'"),
        (("--steps", "0"), "--steps must be positive"),
        (("--device", "cuda"), "torch sees no GPU"),
    ):
        with pytest.raises(UserError, match=message):
            run(tmp_path / "x", *argv)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("right", ["shown", "renamed", "known"])
def test_right_answers_are_what_greedy_decoding_finds(
    monkeypatch: pytest.MonkeyPatch, right: ex.Right
) -> None:
    """Under a made-up model that says 4, then 7 after a 4, then 0, 3."""
    w = world.make(dataclasses.replace(TINY.world, digits=4), 0)
    rng = np.random.default_rng(0)
    asked = ex.questions(w, 40, rng, 0)
    e = ex.fill(w, asked, TINY.training("length"), np.full(40, 4), rng)
    greedy = 4703
    for i in range(0, 8, 2):  # some of the questions have that name among the right ones
        if right == "known":
            fine = w.levels(e.turn[i : i + 1], e.current[i : i + 1], e.goal[i : i + 1])[0] == 3
            w.names[0, fine.nonzero()[0][-1]] = greedy
        else:
            e.names[i, (e.levels[i] == 3).nonzero()[0][0]] = greedy

    def logits(model: Any, batch: Any) -> torch.Tensor:
        before = batch.tokens[batch.answer.roll(-1, dims=1)].view(len(batch), 4)
        out = torch.zeros(len(batch), 4, ex.VOCAB)
        out[:, 0, 4] = 1
        out[:, 1:].scatter_(2, ((before[:, 1:] + 3) % 10)[..., None], 1.0)
        return out.flatten(0, 1)

    monkeypatch.setattr(sm, "answer_logits", logits)
    found = runs.right_answers(torch.nn.Identity(), e, rows=7, device="cpu", right=right)
    wanted = (e.right_names(right) == greedy).any(axis=1)
    assert 4 <= wanted.sum() < 40
    assert (found == np.where(wanted, greedy, -1)).all()


def test_a_chain_goes_on_from_where_the_last_turn_led(monkeypatch: pytest.MonkeyPatch) -> None:
    w = world.make(TINY.world, 0)
    seen: list[ex.Examples] = []

    def right_answers(model: Any, e: ex.Examples, rows: int, device: str) -> np.ndarray:
        seen.append(e)
        wrong = np.arange(len(e.target)) % 4 == 0  # every fourth answer fails
        return np.where(wrong, -1, e.target)

    monkeypatch.setattr(runs, "right_answers", right_answers)
    pools = TINY.training("length")
    found = runs.chain_success(torch.nn.Identity(), w, pools, 4, 64, TINY, "cpu")
    first, second = seen
    assert len(first.turn) == 64
    assert len(second.turn) == 48
    assert found == 36 / 64
    assert set(second.turn) == {1}
    kept = np.arange(64) % 4 != 0
    assert (second.goal == first.goal[kept]).all()
    assert (second.current == first.after(first.target)[kept]).all()
    assert w.reach[1, second.current, second.goal].all()


def fake(part: str, offset: float, seed: int, y: float) -> dict[str, Any]:
    row: dict[str, Any] = {
        "part": part, "model": "mamba2", "offset": offset, "seed": seed, "steps": 100,
        "parameters": 1, "chain": 0.5, "cpu_seconds": 1.0, "data_seconds": 0.1,
    }  # fmt: skip
    for name in ("tau_initial", "tau_final", "delta_alpha"):
        row |= {f"{name}_{source}": 1 / (10 + offset) for source in ("weights", "data")}
    if part == "retrieval":
        row |= {
            "no_oracle": 1 - y, "random_oracle_name": y, "first_turn": 0.9,
            "curve": [
                {"step": 50, "no_oracle": 1 - y, "random_oracle_name": y - 0.2},
                {"step": 100, "no_oracle": 1 - y, "random_oracle_name": y},
            ],
        }  # fmt: skip
    else:
        row |= {
            "lengths": [2, 4, 8], "length_accuracy": [0.5, 0.95, y],
            "weak": [{"beta": 0.0, "k": 4, "accuracy": y}],
        }  # fmt: skip
    return row


def test_claims_are_told_apart_from_their_opposites() -> None:
    """On runs made up so that the truth is known."""
    offsets = (-5.0, 0.0, 3.0)

    def judged(falls: bool) -> dict[str, bool]:
        rows = []
        for seed in range(5):
            for i, o in enumerate(offsets):
                up, down = 0.3 + 0.2 * i, 0.8 - 0.25 * i
                retrieval, length = (down, up) if not falls else (up, down)
                rows.append(fake("retrieval", o, seed, retrieval + 0.01 * seed))
                rows.append(fake("length", o, seed, length + 0.01 * seed))
        return {v["claim"]: v["holds"] for v in report.summarise(rows, 4)["verdicts"]}

    assert set(judged(False).values()) == {True}
    opposite = judged(True)
    assert [c for c, holds in opposite.items() if holds] == [
        "gate drift: the gates' order survives training (median tau by weights)"
    ]
    assert report.onset(fake("retrieval", 0.0, 0, 0.6)) == 100
    assert report.onset(fake("retrieval", 0.0, 0, 0.4)) is None


def length_rows(*accuracies: float, seeds: int = 5) -> list[dict[str, Any]]:
    """Accuracies at pools of 4 and beyond, by offset."""
    return [
        fake("length", float(o), seed, 0.0)
        | {"length_accuracy": [0.0, y, y * (0.5 + 0.1 * o + 0.01 * seed)]}
        for seed in range(seeds)
        for o, y in enumerate(accuracies)
    ]


def kept_verdict(rows: list[dict[str, Any]]) -> dict[str, Any]:
    verdicts = report.summarise(rows, 4)["verdicts"]
    return next(v for v in verdicts if "keep more" in v["claim"])


def test_models_that_learned_nothing_keep_nothing() -> None:
    assert kept_verdict(length_rows(0.95, 0.95, 0.95))["holds"]
    # Chance is kept whole: the strong gates' failures must not count for them.
    found = kept_verdict(length_rows(0.95, 0.02, 0.02))
    assert not found["holds"]
    assert "too few learned" in found["detail"]
    assert "5 of 15 runs reached 0.9" in found["detail"]
    assert kept_verdict(length_rows(0.95, 0.02, 0.95))["holds"]  # two offsets learned
    assert not kept_verdict(length_rows(0.95, 0.95, 0.95, seeds=4))["holds"]
    assert "4 seeds, fewer than 5" in kept_verdict(length_rows(0.95, 0.95, seeds=4))["detail"]


def test_larger_pools_are_those_beyond_the_trainings() -> None:
    """At the paper's size the tests begin far below it."""
    s = settings.PAPER
    row = {"lengths": list(s.lengths), "length_accuracy": [0.1, 0.2, 0.3, 0.9, 0.5, 0.4, 0.3, 0.2]}
    assert report.within(row, s.length_pool) == 0.9
    assert report.beyond(row, s.length_pool) == pytest.approx(0.35)
    with pytest.raises(ValueError, match="lack pools of 8"):
        dataclasses.replace(TINY, length_pool=8, lengths=(4, 16))


def test_a_failed_run_is_counted_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from synthetic.conclusion import conclude

    rows = [{"offset": 1.0, "failed": "run x: the loss"}, {"offset": 0.0}]
    seen: list[Any] = []

    def summarise(measured: list[dict[str, Any]]) -> dict[str, Any]:
        seen.extend(measured)
        return {"verdicts": [], "cpu_seconds": 1.0}

    found = conclude(tmp_path, rows, summarise, lambda *_: None)
    assert found["failed"] == ["run x: the loss"]
    assert seen == rows[1:]
    assert "failed         run x: the loss" in capsys.readouterr().out
    with pytest.raises(UserError, match="all 1 runs failed, the first: run x.*--offsets"):
        conclude(tmp_path, rows[:1], summarise, lambda *_: None)
