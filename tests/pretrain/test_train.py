"""`python -m pretrain.train` end to end: a run, its files, and what it refuses."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import time
from pathlib import Path

import pytest

from gatewright import artifact
from gatewright.errors import UserError
from pretrain import train
from tests.gatewright.megatron import tiny
from tests.pretrain.training import LLAMA, MAMBA, STEPS, TORCHRUN, command, finish, start


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
    theirs = tmp_path / "mamba_ssm"
    convert.convert(whole, "mamba_ssm", theirs, check=False)
    losses = []
    for source in (whole, hf, theirs):
        out = tmp_path / f"from-{source.name}"
        finish(start([*command(inputs, out, again), "--init-from", str(source)]))
        manifest = artifact.read_manifest(out, "pretrain")
        assert manifest["parents"]["init_from"]["content_hash"] == artifact.content_hash(source)
        assert not list(out.glob(".init*"))
        losses.append(tiny.losses(out))
    assert losses[0] == losses[1] == losses[2]  # bit for bit
    old = tiny.losses(whole)
    assert losses[0][0] == pytest.approx(sum(old[-7:]) / 7, abs=0.25)
    assert losses[0][0] < old[0] - 0.3

    out = tmp_path / "two"
    two = [*command(inputs, out, again), "--parallel.tensor", "2", "--init-from"]
    finish(start([*two, str(hf)], TORCHRUN))
    assert tiny.losses(out) == pytest.approx(losses[0], abs=1e-5)
    assert not list(out.glob(".init*"))

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


def test_processes_do_not_wait_for_one_that_could_not_convert(
    whole: Path, inputs: dict[str, Path], tmp_path: Path
) -> None:
    import safetensors.torch as st

    from gatewright.checkpoints import convert

    hf = tmp_path / "hf"
    convert.convert(whole, "hf", hf, tokenizer=None, check=False)
    (hf / "manifest.json").unlink()
    tensors = st.load_file(hf / "model.safetensors")
    missing = next(name for name in tensors if name.endswith("A_log"))
    del tensors[missing]
    st.save_file(tensors, hf / "model.safetensors", metadata={"format": "pt"})
    whole_model = [*MAMBA, "--parallel.tensor", "2"]
    arguments = [*command(inputs, tmp_path / "run", whole_model), "--init-from", str(hf)]
    started = time.monotonic()
    printed = finish(start(arguments, TORCHRUN), code=1)  # torchrun's own code for a failure
    assert time.monotonic() - started < 300  # gloo would wait for ten minutes
    assert printed.count(f"error: --init-from {hf}: ") == 2
    assert missing in printed


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
    for flags, message in (
        (["--train.global-batch-sequences", "6"], "6 is not a multiple of micro batch 4"),
        (["--parallel.tensor", "2"], "1 processes cannot hold copies"),
        (["--parallel.pipeline", "3"], "model.n_layers 2 is not a multiple"),
        (["--train.seq-len-tokens", "4096"], "raise that"),
    ):
        assert message in error([*good, *flags])
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
    faster = dataclasses.replace(resolved, train=dataclasses.replace(resolved.train, lr=0.1))
    deeper = dataclasses.replace(resolved, model=dataclasses.replace(resolved.model, n_layers=3))
    train.open_run(parsed, faster, hashes)
    (out / "data-index").mkdir()
    train.open_run(parsed, resolved, hashes)  # nothing was trained with the other rate
    kept = (out / "config.json").read_text()
    (out / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(UserError, match="holds a run with another architectures"):
        train.open_run(parsed, resolved, hashes)  # not one of ours
    (out / "config.json").write_text(kept)
    (out / "metrics.jsonl").touch()
    train.open_run(parsed, resolved, hashes)  # the same run may go on
    for other, name in ((faster, "train.lr"), (deeper, "model.n_layers")):
        with pytest.raises(UserError, match=f"another {name}:"):
            train.open_run(parsed, other, hashes)
    for damaged in ("{", "[]", '"config"'):
        (out / "config.json").write_text(damaged)
        with pytest.raises(UserError, match=r"config\.json: is damaged"):
            train.open_run(parsed, resolved, hashes)
