"""The loop's conduct in one process: bad losses, gates in bf16, telemetry, time limits."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import math
import multiprocessing
import multiprocessing.queues
import os
import signal
import time
import weakref
from pathlib import Path

import pytest
import torch

from gatewright import gates
from gatewright.megatron import checkpoints, data, distributed, health, loop
from gatewright.megatron.config import PretrainConfig
from tests.gatewright.megatron import tiny


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> data.Corpus:
    return data.Corpus.of_folder(
        tiny.write_corpus(tmp_path_factory.mktemp("loop") / "corpus"), tiny.EOD
    )


def train(config: PretrainConfig, corpus: data.Corpus, out: Path) -> loop.Outcome:
    out.mkdir(exist_ok=True)
    return loop.train(config, corpus, out)


@pytest.mark.parametrize("family", ["mamba2", "llama"])
def test_bf16_with_fp32_gates_trains_saves_and_resumes_exactly(
    family: str, corpus: data.Corpus, tmp_path: Path
) -> None:
    bf16 = {"dtype": "bf16", "steps": 12}
    whole = tiny.config(family, train=bf16)
    assert train(whole, corpus, tmp_path / "whole").finished
    losses = tiny.losses(tmp_path / "whole")
    assert losses[-1] < losses[0] - 0.1
    short = dataclasses.replace(whole, exit_duration_minutes=0.0)
    outcome = train(short, corpus, tmp_path / "parts")
    assert (outcome.step, outcome.reason) == (1, "the time limit")
    assert train(whole, corpus, tmp_path / "parts").finished
    assert tiny.losses(tmp_path / "parts") == losses


def test_gates_have_an_optimizer_group_of_their_own_without_decay(
    corpus: data.Corpus, tmp_path: Path
) -> None:
    config = tiny.config("mamba2", train={"dtype": "bf16"})
    with distributed.processes(config.parallel) as data_parallel:
        run = loop.Run(config, corpus, tmp_path, data_parallel)
        names = {id(p): n for n, p in run.model.named_parameters()}
        [inner] = run.optimizer.chained_optimizers
        decay: dict[str, float] = {}
        groups: dict[str, int] = {}
        for number, (group, sharded) in enumerate(
            zip(inner.param_groups, inner.opt_group_ranges, strict=True)
        ):
            for parameter in sharded["params"]:
                decay[names[id(parameter)]] = group["wd_mult"]
                groups[names[id(parameter)]] = number
    assert len(decay) == len(names)
    kinds = ("A_log", "D", "dt_bias")
    gate_groups = {g for n, g in groups.items() if n.endswith(kinds)}
    assert len(gate_groups) == 1
    assert not {g for n, g in groups.items() if not n.endswith(kinds)} & gate_groups
    for name, multiple in decay.items():
        vector = name.endswith((*kinds, "bias", "norm.weight"))
        assert multiple == (0.0 if vector else 1.0), name


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_documents(
    corpus: data.Corpus, tmp_path: Path
) -> None:
    config = tiny.config("llama", train={"lr": 1e30, "lr_warmup_steps": 0})
    outcome = train(config, corpus, tmp_path)
    assert not outcome.finished
    assert outcome.reason == loop.BAD_LOSS
    [row] = [json.loads(line) for line in (tmp_path / health.FILE).read_text().splitlines()]
    assert row["kind"] == "not_finite"
    assert row["reproduced"] is True  # the same batch gave the same again
    assert row["step"] == outcome.step + 1
    first = outcome.step * 4
    assert [d["sample"] for d in row["documents"]] == list(range(first, first + 4))
    assert all(d["documents"] for d in row["documents"])


def test_a_bad_step_can_be_skipped(
    corpus: data.Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights do not move, the data and the schedule do."""
    config = tiny.config("llama", train={"on_bad_loss": "skip"})
    seen: list[torch.Tensor] = []

    def judge(self: health.LossHealth, loss: float, grad_norm: float) -> str | None:
        return "not_finite" if len(seen) == 3 else None

    original = loop.Run.update_weights

    def update(self: loop.Run, found: loop.Found, *, skip: bool = False) -> float:
        rate = original(self, found, skip=skip)
        seen.append(self.model.embedding.word_embeddings.weight.detach().clone())
        return rate

    monkeypatch.setattr(health.LossHealth, "judge", judge)
    monkeypatch.setattr(loop.Run, "update_weights", update)
    assert train(config, corpus, tmp_path).finished
    moved = [not torch.equal(a, b) for a, b in itertools.pairwise(seen)]
    assert moved == [True, True, False, *[True] * 6]


def test_a_step_that_does_not_go_wrong_again_counts_as_it_went_then(
    corpus: data.Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hardware that slipped once: the second pass's loss, norm and gradients are the step's."""
    config = tiny.config("llama")
    assert train(config, corpus, tmp_path / "whole").finished
    original = loop.Run.forward_backward
    passes = []

    def slipping(self: loop.Run) -> loop.Found:
        passes.append(self.step)
        found = original(self)
        return loop.Found(math.nan, math.nan) if len(passes) == 4 else found

    monkeypatch.setattr(loop.Run, "forward_backward", slipping)
    assert train(config, corpus, tmp_path / "slipped").finished
    assert passes == [0, 1, 2, 3, 3, 4, 5, 6, 7, 8, 9]
    assert tiny.losses(tmp_path / "slipped") == tiny.losses(tmp_path / "whole")
    [row] = [json.loads(line) for line in (tmp_path / "slipped" / health.FILE).open()]
    assert (row["step"], row["kind"], row["reproduced"]) == (4, "not_finite", False)


def test_spikes_are_judged_by_the_losses_before_them() -> None:
    judge = health.LossHealth(spike_factor=1.5)
    assert [judge.judge(9.0 - 0.1 * i, 1.0) for i in range(40)] == [None] * 40
    assert judge.judge(6.0, 1.0) is None
    assert judge.judge(14.0, 1.0) == "spike"
    assert judge.judge(6.0, math.inf) == "not_finite"
    assert judge.judge(math.nan, 1.0) == "not_finite"
    assert health.LossHealth(spike_factor=0).judge(1e9, 1.0) is None


def test_a_jump_that_lasts_becomes_the_new_level() -> None:
    """Its first ten steps are reported; later ones are not run twice, later jumps are seen."""
    judge = health.LossHealth(spike_factor=1.5)
    for level, reported in ((3.0, 0), (6.0, 10), (12.0, 10)):
        kinds = [judge.judge(level, 1.0) for _ in range(60)]
        assert kinds == ["spike"] * reported + [None] * (60 - reported), level
    assert judge.judge(40.0, 1.0) == "spike"
    assert judge.judge(12.0, 1.0) is None


@pytest.mark.parametrize("every", [1, 10])
def test_what_was_written_down_tells_a_later_start_what_is_a_spike(every: int) -> None:
    before, after = health.LossHealth(1.5), health.LossHealth(1.5)
    losses = [9.0 - 0.05 * i for i in range(60)]
    for loss in losses:
        before.judge(loss, 1.0)
    rows = [
        {"step": step, "loss": losses[step - 1], "grad_norm": 1.0}
        for step in range(1, 61)
        if step % every == 0 or step == 1
    ]
    after.replay([*rows, {"step": 61, "loss": 1e9, "grad_norm": 1.0}], until_step=60)
    if every == 1:
        assert vars(after) == vars(before)
    assert after.judge(10.0, 1.0) is None
    assert after.judge(14.0, 1.0) == "spike"
    late = health.LossHealth(1.5)
    late.replay([*rows[:-1], {**rows[-1], "loss": 99.0}], until_step=60)
    assert late.judge(7.0, 1.0) is None  # one spike is one spike, however far lines are apart
    assert late.judge(14.0, 1.0) == "spike"


def test_a_run_that_goes_on_remembers_its_losses(corpus: data.Corpus, tmp_path: Path) -> None:
    config = tiny.config("llama", train={"spike_factor": 1.5, "steps": 30})
    started = dataclasses.replace(config, exit_duration_minutes=0.0)
    assert train(started, corpus, tmp_path).step == 1
    [row] = tiny.metrics(tmp_path)
    with (
        distributed.processes(config.parallel) as data_parallel,
        loop.Run(config, corpus, tmp_path, data_parallel) as run,
    ):
        assert vars(run._health) == {**vars(run._health), "_steps": 1, "_mean": row["loss"]}


def test_gate_telemetry_reports_what_the_definitions_say(
    corpus: data.Corpus, tmp_path: Path
) -> None:
    config = tiny.config("mamba2", log={"gates_every_steps": 4}, train={"steps": 8})
    train(config, corpus, tmp_path)
    rows = {row["step"]: row for row in tiny.metrics(tmp_path)}
    assert {s for s, row in rows.items() if "gates/layer00/tau_data_median" in row} == {1, 4, 8}
    assert rows[1]["gates/layer03/alpha_drift"] == 0  # measured before the first update
    assert rows[8]["gates/layer03/alpha_drift"] != 0
    # The weights of the last report are those after step 7; step 8 moved them once more.
    start = json.loads((tmp_path / "gates_at_start.json").read_text())
    A_log, dt_bias = (torch.tensor(v) for v in start["1"])
    tau = gates.tau_from_weights(A_log, dt_bias)
    assert rows[1]["gates/layer00/tau_weights_median"] == pytest.approx(
        tau.median().item(), rel=0.2
    )
    assert rows[1]["gates/layer00/tau_weights_q1"] == pytest.approx(tau.quantile(0.25).item())
    # dt of the data is near dt of the weights at first, but not the same.
    ratio = rows[1]["gates/layer00/tau_data_median"] / rows[1]["gates/layer00/tau_weights_median"]
    assert 0.3 < ratio < 3
    assert ratio != 1


def test_only_the_newest_and_every_mth_checkpoint_are_kept(
    corpus: data.Corpus, tmp_path: Path
) -> None:
    config = tiny.config(
        "llama", checkpoint={"every_steps": 1, "keep_last": 2, "keep_every_steps": 4}
    )
    assert train(config, corpus, tmp_path).finished
    assert [checkpoints.step_of(p) for p in checkpoints.complete(tmp_path)] == [4, 8, 9, 10]
    assert not list(tmp_path.glob(".iter_*"))


def test_a_run_that_went_back_writes_its_own_checkpoints(
    corpus: data.Corpus, tmp_path: Path
) -> None:
    """`latest` set to an older checkpoint by hand: what was saved after it is replaced."""
    config = tiny.config("llama", checkpoint={"every_steps": 2, "keep_last": 9})
    assert train(config, corpus, tmp_path).finished
    (tmp_path / "iter_0000010" / "of the first start").touch()
    (tmp_path / "latest").write_text("iter_0000002\n")
    back = dataclasses.replace(
        config, checkpoint=dataclasses.replace(config.checkpoint, keep_last=1)
    )
    assert train(back, corpus, tmp_path).finished
    assert checkpoints.latest(tmp_path) == tmp_path / "iter_0000010"
    assert not (tmp_path / "iter_0000010" / "of the first start").exists()
    assert [p.name for p in checkpoints.complete(tmp_path)] == ["iter_0000010"]


def test_a_run_ends_with_its_last_user(corpus: data.Corpus, tmp_path: Path) -> None:
    config = tiny.config("llama")
    with distributed.processes(config.parallel) as data_parallel:
        with loop.Run(config, corpus, tmp_path, data_parallel) as run:
            run.update_weights(run.forward_backward())
        model = weakref.ref(run.model)
    del run
    gc.collect()
    assert model() is None  # else it stays, and its process groups' threads with it


def test_asynchronous_saves_are_the_same_checkpoints(corpus: data.Corpus, tmp_path: Path) -> None:
    for asynchronous in (False, True):
        config = tiny.config("mamba2", checkpoint={"every_steps": 4, "asynchronous": asynchronous})
        train(config, corpus, tmp_path / str(asynchronous))
    with distributed.processes(config.parallel) as data_parallel:
        weights = []
        for kind in ("False", "True"):
            run = loop.Run(config, corpus, tmp_path / kind, data_parallel)
            checkpoints.load(tmp_path / kind / "iter_0000008", run.model)
            weights.append({n: p.clone() for n, p in run.model.named_parameters()})
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]), name


class Stop(Exception):
    pass


def wait_for_the_writer() -> None:
    deadline = time.monotonic() + 300
    while multiprocessing.active_children():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("step", [6, 7])
def test_an_asynchronous_save_is_published_when_it_is_written(
    step: int, corpus: data.Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at the next save; a run that ends in an error publishes what is written, too."""
    config = tiny.config("llama", checkpoint={"every_steps": 5, "asynchronous": True})
    original = loop.Run.write_down

    def write_down(self: loop.Run, found: loop.Found, lr: float) -> None:
        original(self, found, lr)
        if self.step == 6:
            assert checkpoints.latest(tmp_path) is None
            wait_for_the_writer()
        if self.step == 7:
            assert (tmp_path / "latest").read_text() == "iter_0000005\n"
        if self.step == step:
            raise Stop

    monkeypatch.setattr(loop.Run, "write_down", write_down)
    with pytest.raises(Stop):
        train(config, corpus, tmp_path)
    assert (tmp_path / "latest").read_text() == "iter_0000005\n"
    assert not list(tmp_path.glob(".iter_*"))


@pytest.mark.parametrize("steps", [8, 5], ids=["while training", "at the end"])
def test_a_killed_writer_is_made_up_for(
    steps: int,
    corpus: data.Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = tiny.config(
        "llama", checkpoint={"every_steps": 5, "asynchronous": True}, train={"steps": steps}
    )
    original = loop.Run.save
    feed = multiprocessing.queues.Queue._feed  # type: ignore[attr-defined]

    def feed_late(*args: object) -> None:  # the thread of a queue, on a busy machine
        time.sleep(0.2)
        feed(*args)

    def save(self: loop.Run, *, at_once: bool = False) -> None:
        original(self, at_once=at_once)
        if self.step == 5 and not at_once:
            for writer in multiprocessing.active_children():
                os.kill(writer.pid or 0, signal.SIGKILL)
            wait_for_the_writer()

    monkeypatch.setattr(multiprocessing.queues.Queue, "_feed", staticmethod(feed_late))
    monkeypatch.setattr(loop.Run, "save", save)
    assert train(config, corpus, tmp_path).finished
    printed = capsys.readouterr().err
    assert printed.count("warning: writing ") == 1
    assert ".iter_0000005.partial-" in printed
    saved = [checkpoints.step_of(p) for p in checkpoints.complete(tmp_path)]
    assert saved == [6, 8] if steps == 8 else [5]
    assert not list(tmp_path.glob(".iter_*"))
