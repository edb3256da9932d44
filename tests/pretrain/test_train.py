"""`python -m pretrain.train` end to end: a run, its files, its death and its return."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gatewright import artifact
from gatewright.errors import UserError
from pretrain import train
from tests.gatewright.megatron import tiny

ROOT = Path(__file__).resolve().parents[2]
STEPS = 64
FLAGS = {
    "--train.steps": STEPS,
    "--train.lr-warmup-steps": 2,
    "--train.seq-len-tokens": 32,
    "--checkpoint.every-steps": 8,
    "--train.lr": 0.01,
    "--train.init-std": 0.1,
    "--model.d-model": 32,
    "--model.n-layers": 2,
    "--model.head-dim": 8,
}


def flags(recipe: str, **more: int) -> list[str]:
    """Return the recipe's name and the flags that make its model tiny."""
    named = {f"--model.{name.replace('_', '-')}": value for name, value in more.items()}
    return [recipe, *(str(part) for pair in (FLAGS | named).items() for part in pair)]


MAMBA = flags("mamba2_debug_cpu", d_state=8, chunk_size=16)
LLAMA = flags("llama_debug_cpu", n_heads=4, n_kv_heads=2, ffn_dim=64)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tokenizer folder and a corpus folder with the manifests that their stages write."""
    from tokenizers import Tokenizer, models

    folder = tmp_path_factory.mktemp("inputs")
    tokenizer, corpus = folder / "tokenizer", folder / "corpus"
    with artifact.create(tokenizer, kind="tokenizer") as tmp:
        vocabulary = {f"t{i}": i for i in range(tiny.VOCAB)}
        Tokenizer(models.WordLevel(vocabulary, unk_token="t0")).save(str(tmp / "tokenizer.json"))
    extra = {"eod_id": tiny.EOD, "unigram_entropy_nats": 5.5, "vocab_size": tiny.VOCAB}
    with artifact.create(
        corpus, kind="corpus", parents={"tokenizer": tokenizer}, extra=extra
    ) as tmp:
        tiny.write_corpus(tmp)
    return {"tokenizer": tokenizer, "corpus": corpus}


def command(inputs: dict[str, Path], out: Path, recipe_and_flags: list[str]) -> list[str]:
    recipe, *rest = recipe_and_flags
    folders = ["--data", str(inputs["corpus"]), "--tokenizer", str(inputs["tokenizer"])]
    return [recipe, *folders, "--out", str(out), *rest]


def start(
    arguments: list[str], launcher: tuple[str, ...] = (), **more: Any
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", *launcher, "-m", "pretrain.train", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GATEWRIGHT_QUIET": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **more,
    )


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, err[-4000:]
    return out if code == 0 else out + err


def wait_for_step(out: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline and process.poll() is None:
        metrics = out / "metrics.jsonl"
        if metrics.exists() and metrics.read_text().count("\n") >= step:
            return
        time.sleep(0.01)
    raise AssertionError(f"never reached step {step}: {process.communicate()}")


@pytest.fixture(scope="module")
def whole(inputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted Mamba-2 run."""
    out = tmp_path_factory.mktemp("whole") / "run"
    printed = finish(start(command(inputs, out, MAMBA)))
    assert "final loss" in printed
    assert "unigram entropy of the corpus 5.500" in printed
    return out


def test_a_run_leaves_what_the_next_stages_read(whole: Path, inputs: dict[str, Path]) -> None:
    manifest = artifact.read_manifest(whole, "pretrain")
    assert manifest["parents"]["data"]["content_hash"] == artifact.content_hash(inputs["corpus"])
    assert manifest["extra"]["unigram_entropy_nats"] == 5.5
    assert manifest["extra"]["tokens"] == STEPS * 4 * 32
    losses = tiny.losses(whole)
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 0.3
    assert manifest["extra"]["final_loss_nats"] == pytest.approx(sum(losses[-7:]) / 7)
    config = json.loads((whole / "config.json").read_text())
    assert config["model"]["vocab_size"] == tiny.VOCAB  # from the tokenizer, not the recipe
    assert (whole / "latest").read_text() == "iter_0000064\n"
    assert (whole / "iter_0000064" / "metadata.json").is_file()
    assert list((whole / "tensorboard").iterdir())


@pytest.mark.parametrize(
    ("more", "kills"),
    [([], 1), (["--checkpoint.asynchronous", "--checkpoint.every-steps", "1"], 2)],
    ids=["between saves", "while saving"],
)
def test_killed_and_started_again_equals_never_killed(
    more: list[str], kills: int, whole: Path, inputs: dict[str, Path], tmp_path: Path
) -> None:
    """kill -9 at random moments; with a save in flight at every step, also during a save."""
    out = tmp_path / "run"
    arguments = [*command(inputs, out, MAMBA), *more]
    rng = random.Random(kills)
    done = 0
    for _ in range(kills):
        process = start(arguments)
        wait_for_step(out, done + rng.randint(8, 13), process)
        time.sleep(rng.uniform(0, 0.05))
        process.kill()
        process.communicate()
        done = len(tiny.losses(out))
        assert done < STEPS
        assert not (out / "manifest.json").exists()
    finish(start(arguments))
    assert tiny.losses(out) == tiny.losses(whole)  # bit for bit
    assert not list(out.glob(".iter_*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_and_leaves_with_the_documented_code(
    number: int, inputs: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    endless = [*LLAMA, "--train.steps", "100000", "--checkpoint.every-steps", "90000"]
    process = start(command(inputs, out, endless))
    wait_for_step(out, 3, process)
    process.send_signal(number)
    printed = finish(process, code=75)
    assert signal.Signals(number).name in printed
    saved = (out / "latest").read_text().strip()
    assert f"iter_{tiny.metrics(out)[-1]['step']:07d}" == saved


def test_the_gate_offset_shifts_what_training_starts_from(
    whole: Path, inputs: dict[str, Path], tmp_path: Path
) -> None:
    """Any recipe takes `--init-gate-offset`; the time limit leaves after a first step."""
    out = tmp_path / "run"
    more = ["--init-gate-offset=-2", "--exit-duration-minutes", "0"]
    printed = finish(start([*command(inputs, out, MAMBA), *more]), code=75)
    assert "the time limit" in printed
    before, after = (json.loads((p / "gates_at_start.json").read_text()) for p in (whole, out))
    for layer in before:
        A_log, shifted = before[layer][0], after[layer][0]
        assert [a - 2 for a in A_log] == pytest.approx(shifted, abs=1e-5)


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def test_torchrun_starts_it_and_splits_the_model(
    whole: Path, inputs: dict[str, Path], tmp_path: Path
) -> None:
    """The README's second launch line: tensor parallel over two processes, one run folder."""
    out = tmp_path / "run"
    short = ["--train.steps", "4", "--parallel.tensor", "2"]
    process = start(command(inputs, out, [*MAMBA, *short]), TORCHRUN, start_new_session=True)
    try:
        printed = finish(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert printed.count("final loss") == 1  # one process speaks
    assert artifact.read_manifest(out, "pretrain")["config"]["parallel"]["tensor"] == 2
    losses = tiny.losses(out)
    assert len(losses) == 4
    # Initial weights differ between layouts, their distribution does not.
    assert losses[0] == pytest.approx(tiny.losses(whole)[0], abs=0.3)
    assert (out / "iter_0000004" / "metadata.json").is_file()


def test_a_run_starts_from_another_checkpoints_weights(
    whole: Path, inputs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A Megatron run and its Hugging Face conversion start alike, where the first run ended."""
    from gatewright.checkpoints import convert

    hf = tmp_path / "hf"
    convert.convert(whole, "hf", hf, tokenizer=None, check=False)
    again = [*MAMBA, "--train.steps", "3", "--train.lr", "0.001", "--train.min-lr", "0"]
    losses = []
    for source in (whole, hf):
        out = tmp_path / f"from-{source.name}"
        finish(start([*command(inputs, out, again), "--init-from", str(source)]))
        manifest = artifact.read_manifest(out, "pretrain")
        assert manifest["parents"]["init_from"]["content_hash"] == artifact.content_hash(source)
        assert not list(out.glob(".init*"))
        losses.append(tiny.losses(out))
    assert losses[0] == losses[1]  # bit for bit
    old = tiny.losses(whole)
    assert losses[0][0] == pytest.approx(sum(old[-7:]) / 7, abs=0.25)
    assert losses[0][0] < old[0] - 0.3

    def error(*more: str) -> str:
        arguments = [*command(inputs, tmp_path / "out", again), "--init-from", str(hf), *more]
        with pytest.raises(SystemExit) as caught:
            train.run(arguments)
        assert caught.value.code == 2
        printed = capsys.readouterr().err
        assert printed.count("\n") == 1, printed
        assert not (tmp_path / "out").exists()
        return printed

    assert "its model.n_layers is 2, but this run's is 3; give --model.n-layers 2" in error(
        "--model.n-layers", "3"
    )
    assert "shifts freshly initialised gates" in error("--init-gate-offset", "1")
    (hf / "model.safetensors").unlink()
    assert "model.safetensors: has 0 bytes" in error()


def test_bad_input_is_one_line_and_touches_nothing(
    inputs: dict[str, Path], tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error(arguments: list[str]) -> str:
        with pytest.raises(SystemExit) as caught:
            train.run(arguments)
        assert caught.value.code == 2
        printed = capsys.readouterr().err
        assert printed.count("\n") == 1, printed
        return printed

    out = tmp_path / "out"
    good = command(inputs, out, MAMBA)
    assert "did you mean 'mamba2_debug_cpu'" in error(["mamba2_debug_cp", *good[1:]])
    assert "did you mean '--train.steps'" in error([*good, "--train.step", "3"])
    assert "no manifest.json" in error([*good[:2], str(tmp_path), *good[3:]])
    other_kind = error([*good[:2], str(inputs["tokenizer"]), *good[3:]])
    assert "kind tokenizer, but kind corpus" in other_kind
    assert "pretrain.prepare makes one" in other_kind
    assert "--train.lr-warmup-steps" in error([*good, "--train.lr-warmup-steps", "99"])
    too_small = [*good, "--no-vocab-follows-tokenizer", "--model.vocab-size", "128"]
    assert "has 256 tokens, more than --model.vocab-size 128" in error(too_small)
    assert "has no gates" in error([*command(inputs, out, LLAMA), "--init-gate-offset", "1"])
    assert "must be finite" in error([*good, "--init-gate-offset", "inf"])
    assert "already finished" in error(command(inputs, whole, MAMBA))
    assert not out.exists()


def test_a_corpus_of_another_tokenizer_is_refused(inputs: dict[str, Path], tmp_path: Path) -> None:
    other = tmp_path / "other"
    with artifact.create(other, kind="tokenizer") as tmp:
        text = (inputs["tokenizer"] / "tokenizer.json").read_text()
        (tmp / "tokenizer.json").write_text(text + "\n")
    arguments = command({**inputs, "tokenizer": other}, tmp_path / "out", MAMBA)
    assert "another tokenizer" in finish(start(arguments), code=2)


def test_another_configuration_is_not_mixed_into_a_run(
    inputs: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    args = command(inputs, out, MAMBA)
    parsed = train.cli.parse(
        train.Args,
        args[1:],
        prog="test",
        default=train.Args.of_recipe(train.RECIPES.get(args[0])),
    )
    resolved, _ = train.check_inputs(parsed)
    hashes = {"data": artifact.content_hash(inputs["corpus"])}
    hashes["tokenizer"] = artifact.content_hash(inputs["tokenizer"])
    out.mkdir()
    (out / "somebody's").touch()
    with pytest.raises(UserError, match="is not empty"):
        train.open_run(parsed, resolved, hashes)
    (out / "somebody's").unlink()
    train.open_run(parsed, resolved, hashes)
    train.open_run(parsed, resolved, hashes)  # the same run may go on
    for flag, value in (("--train.lr", "0.1"), ("--model.n-layers", "3")):
        printed = finish(start([*args, flag, value]), code=2)
        assert f"another {flag.lstrip('-').replace('-', '_')}" in printed
