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
from gatewright.chat import TEMPLATE
from gatewright.errors import UserError
from gatewright.runlog import read_metrics
from sft import train
from sft.recipes import RECIPES
from tests.sft.material import ROOT, build_model, build_tokenizer, python_m

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


def kill_at_random(command: list[str], out: Path, chance: random.Random, env: dict) -> int:
    """Start a run and kill -9 it while it trains; return the step it had reached."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    metrics = out / "metrics.jsonl"
    before = len(list(read_metrics(metrics))) if metrics.exists() else 0
    wanted = before + chance.randint(1, 3)
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if metrics.exists() and len(list(read_metrics(metrics))) >= wanted:
            time.sleep(chance.random() * 0.05)  # anywhere inside a step or a save
            os.killpg(process.pid, signal.SIGKILL)
            break
        time.sleep(0.005)
    process.wait(timeout=60)
    return len(list(read_metrics(metrics))) if metrics.exists() else 0


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("family", "kills"), [("mamba2", 2), pytest.param("mamba2", 20, marks=pytest.mark.slow)]
)
def test_killed_and_resumed_ends_in_the_same_weights(
    family: str, kills: int, models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    steps = 8 if kills < 20 else 60

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
    reached = []
    for _ in range(kills):
        if (broken / artifact.MANIFEST).exists():
            break
        command = [sys.executable, "-m", "sft.train", *arguments(broken)]
        reached.append(kill_at_random(command, broken, chance, env))
    assert reached[0] < steps, "the first run finished before it was killed"
    if not (broken / artifact.MANIFEST).exists():
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
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGUSR1)
    said, _ = process.communicate(timeout=60)
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


def test_what_cannot_be_trained_on_is_refused(
    models: dict[str, Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = "mamba2_debug_cpu"

    def told(model: Path, folder: Path = data, **changes: Any) -> str:
        config = dataclasses.replace(RECIPES.get("mamba2_debug_cpu"), **changes)
        with pytest.raises(UserError) as caught:
            train.check(recipe, train.Args(model, folder, tmp_path / "out", config))
        return str(caught.value)

    model = models["mamba2"]
    assert "--data" in told(model, tmp_path)
    assert "manifest" in told(model, tmp_path)
    assert "no such folder" in told(tmp_path / "none")
    assert "config.json" in told(data.parent)
    small = build_model(tmp_path / "small", "mamba2", vocab_size=300)
    assert "vocabulary of 300 is smaller" in told(small)
    other = build_tokenizer(tmp_path / "other", TEMPLATE, vocab_size=490)
    foreign = build_model(tmp_path / "foreign", "mamba2", tokenizer=other)
    assert "another tokenizer" in told(foreign)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "4 processes" in told(model, global_batch_packs=2)
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(UserError, match="--train.eval-calls"):
        dataclasses.replace(RECIPES.get("mamba2_debug_cpu"), curriculum="gated")
    bert = tmp_path / "bert"
    bert.mkdir()
    (bert / "config.json").write_text('{"model_type": "bert", "vocab_size": 9999}')
    assert "'bert' is neither" in told(bert)
    assert "is a llama, and recipe mamba2_debug_cpu is for mamba2" in told(models["llama"])
    assert "choose llama_2b_8xh100, llama_debug_cpu" in told(models["llama"])
    cut = tmp_path / "cut"
    shutil.copytree(model, cut)
    os.truncate(cut / "model.safetensors", 1000)
    assert f"{cut}/model.safetensors: not a sound safetensors file" in told(cut)
    (cut / "model.safetensors").unlink()
    assert "holds no weights" in told(cut)


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
