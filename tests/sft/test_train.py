"""Training runs as a user starts them: results, resuming, what is refused."""

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gatewright import artifact
from gatewright.errors import UserError
from gatewright.runlog import read_metrics
from sft import train
from sft.recipes import RECIPES
from tests.sft.material import ROOT, python_m

SHORT = (
    "--train.context-tokens", "512", "--train.global-batch-packs", "2",
    "--train.lr-warmup-steps", "2",
)  # fmt: skip


def flags(model: Path, data: Path, out: Path, *more: object) -> list[object]:
    return ["--model", model, "--data", data, "--out", out, *SHORT, *more]


def train_here(recipe: str, model: Path, data: Path, out: Path, **changes: Any) -> Path:
    """Fine-tune in this process (with the `group` fixture); return the folder."""
    config = dataclasses.replace(
        RECIPES.get(recipe), context_tokens=512, global_batch_packs=2, lr_warmup_steps=2, **changes
    )
    args = train.Args(model, data, out, config)
    run = train.Run(args, recipe, train.check(recipe, args), torch.device("cpu"))
    run.finish(run.loop())
    return out


def losses(out: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(out / "metrics.jsonl")]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("family", ["mamba2", "llama"])
def test_a_run_learns_and_ends_in_a_usable_folder(
    family: str, models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    out = train_here(
        f"{family}_debug_cpu", models[family], data, tmp_path / "out",
        steps=14, lr=1e-2, eval_calls=4, eval_new_tokens=40, start_pool_size=1,
    )  # fmt: skip
    rows = list(read_metrics(out / "metrics.jsonl"))
    assert [row["step"] for row in rows] == list(range(1, 15))
    assert rows[-1]["loss"] < 0.7 * rows[0]["loss"]
    assert rows[-1]["held_out_loss"] < rows[0]["loss"]
    assert rows[0]["pool_size"] == 1
    assert rows[-1]["pool_size"] == 4
    assert 0 <= rows[-1]["call_right_tool"] <= 1
    assert all(row["grad_norm"] > 0 for row in rows)
    assert any((out / "tensorboard").iterdir())
    assert not (out / "checkpoints").exists()

    manifest = artifact.read_manifest(out, "hf-model")
    assert manifest["extra"]["gate_scale"] == (1.0 if family == "mamba2" else None)
    assert set(manifest["parents"]) == {"model", "data"}
    artifact.verify(out)

    from transformers import AutoModelForCausalLM

    from gatewright.chat import Renderer

    model = AutoModelForCausalLM.from_pretrained(out)
    renderer = Renderer.load(out)
    ids = torch.tensor([renderer.prompt_ids([{"role": "user", "content": "alpha the bravo"}])])
    made = model.generate(ids, max_new_tokens=3, do_sample=False)
    assert made.shape[1] > ids.shape[1]
    assert "gatewright" not in json.dumps(model.config.to_dict())

    again = train.Args(models[family], data, out, RECIPES.get(f"{family}_debug_cpu"))
    with pytest.raises(UserError, match="already finished"):
        train.main(f"{family}_debug_cpu", again)


def test_the_gate_scale_of_the_parent_is_passed_on(
    models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    from sft import parent

    shutil.copytree(models["mamba2"], tmp_path / "scaled")
    artifact.finish(tmp_path / "scaled", kind="hf-model", extra={"gate_scale": 0.5})
    assert parent.inspect(tmp_path / "scaled").gate_scale == 0.5
    assert parent.inspect(models["mamba2"]).gate_scale == 1.0
    assert parent.inspect(models["llama"]).gate_scale is None


@pytest.mark.usefixtures("group")
def test_an_early_stop_keeps_the_weights_of_the_lowest_loss(
    models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    """A rate so high that the held-out loss soon rises for good."""
    from sft import evaluate, parent
    from sft.dataset import Samples
    from sft.objective import PackedLoss

    out = train_here(
        "mamba2_debug_cpu", models["mamba2"], data, tmp_path / "out",
        steps=40, lr=0.1, eval_every=1, early_stop=3,
    )  # fmt: skip
    rows = list(read_metrics(out / "metrics.jsonl"))
    held_out = [row["held_out_loss"] for row in rows]
    best = held_out.index(min(held_out)) + 1
    said = artifact.read_manifest(out)["extra"]
    assert said["stopped_early"]
    assert said["steps"] == len(rows) == best + 3
    assert said["kept_step"] == best
    assert said["held_out_loss"] == min(held_out)
    assert not (out / "checkpoints").exists()
    saved = PackedLoss(parent.load(parent.inspect(out)))
    loss = evaluate.held_out_loss(
        saved, Samples(data / "held_out"), 512, 4, 0, (0, 1), torch.device("cpu")
    )
    assert loss == pytest.approx(min(held_out), rel=1e-5)
    assert loss < held_out[-1] - 1e-3


def kill_at_random(command: list[str], out: Path, chance: random.Random, env: dict) -> bool:
    """Start a run and kill -9 it while it trains; say whether it was, before it had finished."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    metrics = out / "metrics.jsonl"
    before = len(list(read_metrics(metrics))) if metrics.exists() else 0
    wanted = before + chance.randint(1, 3)
    deadline = time.monotonic() + 600
    while process.poll() is None and time.monotonic() < deadline:
        if metrics.exists() and len(list(read_metrics(metrics))) >= wanted:
            time.sleep(chance.random() * 0.05)  # anywhere inside a step or a save
            os.killpg(process.pid, signal.SIGKILL)
            break
        time.sleep(0.005)
    process.wait(timeout=300)
    return process.returncode == -signal.SIGKILL and not (out / artifact.MANIFEST).exists()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("family", "kills"), [("mamba2", 2), pytest.param("mamba2", 20, marks=pytest.mark.slow)]
)
def test_killed_and_resumed_ends_in_the_same_weights(
    family: str, kills: int, models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    steps = 10 if kills < 20 else 100

    def arguments(out: Path) -> list[str]:
        return [
            f"{family}_debug_cpu",
            *map(str, flags(models[family], data, out)),
            *("--train.steps", str(steps), "--train.checkpoint-every", "1"),
            *("--train.lr", "3e-3"),
        ]

    broken = tmp_path / "broken"
    whole = train_here(
        f"{family}_debug_cpu", models[family], data, tmp_path / "whole", steps=steps, lr=3e-3
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GATEWRIGHT_QUIET": "1"}
    chance = random.Random(7)
    command = [sys.executable, "-m", "sft.train", *arguments(broken)]
    for i in range(kills):
        assert kill_at_random(command, broken, chance, env), f"finished before kill {i + 1}"
    done = python_m("sft.train", *arguments(broken))
    assert done.returncode == 0, done.stderr
    assert losses(broken) == losses(whole)
    found, wanted = (load_file(d / "model.safetensors") for d in (broken, whole))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.usefixtures("group")
def test_asked_to_leave_it_saves_and_goes_on_as_if_nothing_had_happened(
    models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    """Slurm's warning of the time limit, with no checkpoint due for a long time."""
    out = tmp_path / "parted"
    values = ("--train.steps", "40", "--train.lr", "3e-3")
    command = [sys.executable, "-m", "sft.train", "mamba2_debug_cpu"]
    command += [*map(str, flags(models["mamba2"], data, out)), *values]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GATEWRIGHT_QUIET": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
    metrics = out / "metrics.jsonl"
    deadline = time.monotonic() + 600
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGUSR1)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 75
    assert "(SIGUSR1), saved in" in said
    done = len(losses(out))
    assert 0 < done < 40
    changes = {"steps": 40, "lr": 3e-3}
    train_here("mamba2_debug_cpu", models["mamba2"], data, out, **changes)
    whole = train_here("mamba2_debug_cpu", models["mamba2"], data, tmp_path / "whole", **changes)
    assert losses(out) == losses(whole)
    found, wanted = (load_file(d / "model.safetensors") for d in (out, whole))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def short_run(recipe: str, model: Path, data: Path, out: Path, **changes: Any) -> train.Run:
    config = dataclasses.replace(RECIPES.get(recipe), context_tokens=512, **changes)
    args = train.Args(model, data, out, config)
    return train.Run(args, recipe, train.check(recipe, args), torch.device("cpu"))


@pytest.mark.usefixtures("group")
def test_the_first_step_recomputes_and_drops_out_as_every_other(
    models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    """transformers hands out models in eval mode, which turns both off."""
    dropping = tmp_path / "dropping"
    shutil.copytree(models["llama"], dropping)
    config = json.loads((dropping / "config.json").read_text())
    (dropping / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    found = []
    for i, model in enumerate((models["llama"], dropping, dropping)):
        run = short_run(
            "llama_debug_cpu", model, data, tmp_path / f"out{i}", steps=1,
            gradient_checkpointing=True,
        )  # fmt: skip
        seen: list[int] = []
        run.engine.module.model.model.layers[0].mlp.register_forward_pre_hook(
            lambda *_, seen=seen: seen.append(1)
        )
        found.append(run.train_step()["loss"])
        assert len(seen) == 2 * run.config.global_batch_packs  # forward, and again in backward
    plain, one, two = found
    assert one == two != plain


@pytest.mark.usefixtures("group")
def test_a_kill_while_the_finished_folder_is_hashed_costs_no_training(
    models: dict[str, Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    asked = ("mamba2_debug_cpu", models["mamba2"], data, out)

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(artifact, "finish", killed)
        run = short_run(*asked, steps=3, checkpoint_every=1)
        last = run.loop()
        with pytest.raises(KeyboardInterrupt):
            run.finish(last)
    again = short_run(*asked, steps=3, checkpoint_every=1)
    assert again.step == 2
    again.finish(again.loop())
    assert not [p for p in tmp_path.iterdir() if "checkpoints" in p.name]
    assert not any("checkpoints" in name for name in artifact.read_manifest(out)["files"])
    train.aside(out).mkdir()  # killed between the manifest and the last removal
    with pytest.raises(UserError, match="already finished"):
        train.main("mamba2_debug_cpu", again.args)
    assert not train.aside(out).exists()


@pytest.mark.usefixtures("group")
def test_a_loss_that_is_not_finite_is_neither_saved_nor_finished(
    models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    run = short_run(
        "mamba2_debug_cpu", models["mamba2"], data, tmp_path / "out", steps=2, checkpoint_every=1
    )
    with torch.no_grad():
        run.engine.module.model.backbone.layers[0].mixer.A_log.fill_(torch.nan)
    with pytest.raises(train.BadLoss, match="step 1: loss nan"):
        run.loop()
    assert not (tmp_path / "out" / "checkpoints").exists()


@pytest.mark.usefixtures("group")
def test_zero_stages_with_two_processes_give_the_same_losses(
    models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    done = python_m("tests.sft.zero_worker", models["mamba2"], data, tmp_path, processes=2)
    assert done.returncode == 0, done.stderr[-3000:]
    alone = train_here("mamba2_debug_cpu", models["mamba2"], data, tmp_path / "one", steps=4)
    for stage in (0, 1, 2, 3):
        found = losses(tmp_path / f"zero{stage}")
        assert found == pytest.approx(losses(alone), rel=2e-6), stage
        weights = load_file(tmp_path / f"zero{stage}" / "model.safetensors")
        for name, wanted in load_file(alone / "model.safetensors").items():
            torch.testing.assert_close(weights[name], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("group")
def test_zero_stages_agree_for_llama_in_bf16_with_accumulation(
    models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    """Two processes of two passes each, and one of four: to bf16's own precision."""
    done = python_m("tests.sft.zero_worker", models["llama"], data, tmp_path, processes=2)
    assert done.returncode == 0, done.stderr[-3000:]
    alone = short_run(
        "llama_debug_cpu", models["llama"], data, tmp_path / "one", steps=4,
        global_batch_packs=4, lr_warmup_steps=2, precision="bf16",
    )  # fmt: skip
    alone.finish(alone.loop())
    for stage in (0, 1, 2, 3):
        found = losses(tmp_path / f"zero{stage}")
        # ZeRO-3 hands out rounded what autocast will round, and a tied embedding with it.
        first = 2e-6 if stage < 3 else 1e-4
        assert found[0] == pytest.approx(losses(tmp_path / "one")[0], rel=first), stage
        assert found == pytest.approx(losses(tmp_path / "one"), rel=1e-3), stage


@pytest.mark.usefixtures("group")
def test_a_gated_run_raises_k_on_what_it_measures(
    models: dict[str, Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def accuracy(*arguments: Any) -> dict[str, float]:
        asked.append(arguments[4])
        return {"right_tool": [0.6, 0.7, 0.9, 1.0, 1.0][len(asked) - 1]}

    monkeypatch.setattr("sft.evaluate.call_accuracy", accuracy)
    out = train_here(
        "mamba2_debug_cpu", models["mamba2"], data, tmp_path / "out", steps=5, eval_packs=0,
        curriculum="gated", gate_threshold=0.7, eval_every=1, eval_calls=2,
    )  # fmt: skip
    rows = list(read_metrics(out / "metrics.jsonl"))
    assert [row["pool_size"] for row in rows] == [1, 1, 2, 4, 4]
    assert asked == [row["call_pool_size"] for row in rows] == [1, 1, 2, 4, 4]


def test_bad_input_is_one_line(models: dict[str, Path], data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = python_m(
        "sft.train", "mamba2_debug_cpu", *flags(models["mamba2"], data, out),
        "--train.context-tokens", 64,
    )  # fmt: skip
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.strip()]
    assert "--train.context-tokens 64" in line
    assert "a sample of" in line
    assert not out.exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_what_rank_0_refuses_ends_every_process(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from sft.engine import first_for_all

    def refuse() -> None:
        assert rank == 0
        raise UserError("taken")

    def broadcast(held: list[UserError | None], src: int) -> None:
        if rank:
            held[0] = UserError("taken")

    monkeypatch.setattr("torch.distributed.get_rank", lambda: rank)
    monkeypatch.setattr("torch.distributed.broadcast_object_list", broadcast)
    with pytest.raises((UserError, SystemExit)) as caught:
        first_for_all(refuse)
    assert str(caught.value) == ("2" if rank else "taken")


def test_another_number_of_processes_does_not_resume(tmp_path: Path) -> None:
    from sft.engine import LATEST, latest_checkpoint

    assert latest_checkpoint(tmp_path, 2) is None
    artifact.write_json(tmp_path / LATEST, {"tag": "step_4", "step": 4, "processes": 2})
    assert latest_checkpoint(tmp_path, 2) == ("step_4", 4)
    with pytest.raises(UserError, match="by 2 processes and cannot be resumed by 1"):
        latest_checkpoint(tmp_path, 1)


def test_a_removed_runs_checkpoints_are_not_taken_over(tmp_path: Path) -> None:
    args = train.Args(tmp_path, tmp_path, tmp_path / "out", RECIPES.get("mamba2_debug_cpu"))
    train.aside(args.out).mkdir()
    train.claim(args, "mamba2_debug_cpu", {})
    assert not train.aside(args.out).exists()
    train.aside(args.out).mkdir()
    train.claim(args, "mamba2_debug_cpu", {})  # the same run, killed while it was hashed
    assert (args.out / train.CHECKPOINTS).is_dir()


def test_another_runs_folder_is_not_resumed_into(
    models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    config = RECIPES.get("mamba2_debug_cpu")
    args = train.Args(models["mamba2"], data, tmp_path / "out", config)
    hashes = {"model": "a", "data": "b"}
    train.claim(args, "mamba2_debug_cpu", hashes)
    train.claim(args, "mamba2_debug_cpu", hashes)  # the same run: to be resumed
    with pytest.raises(UserError, match="other settings"):
        train.claim(args, "mamba2_debug_cpu", hashes | {"data": "c"})
