"""What a run is given: what cannot be trained on is refused before its folder is made."""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gatewright import artifact
from gatewright.chat import TEMPLATE
from gatewright.errors import UserError
from sft import train
from sft.dataset import Writer
from sft.recipes import RECIPES
from tests.sft.material import build_model, build_tokenizer


def reseal(data: Path) -> None:
    """Write a manifest that agrees with a folder's changed files."""
    manifest = artifact.read_manifest(data)
    artifact.finish(data, kind="sft-data", config=manifest["config"], extra=manifest["extra"])


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
    none_held = tmp_path / "none_held"
    shutil.copytree(data, none_held)
    (none_held / "held_out.jsonl").write_text("")
    with Writer(tmp_path / "empty"):
        pass
    for file in (tmp_path / "empty").iterdir():
        shutil.copy2(file, none_held / "held_out" / file.name)
    reseal(none_held)
    gated = {"curriculum": "gated", "eval_every": 1, "eval_calls": 2}
    assert "larger --held-out" in told(model, none_held, context_tokens=512, **gated)
    stopping = {"early_stop": 1, "eval_every": 1}
    assert "larger --held-out" in told(model, none_held, context_tokens=512, **stopping)
    with Writer(tmp_path / "wide") as writer:
        writer.add([1, 2], [0, 1], pool_size=2, row=0)
    for file in (tmp_path / "wide").iterdir():
        shutil.copy2(file, none_held / "train" / file.name)
    reseal(none_held)
    for curriculum in ("ramp", "gated"):
        wide = gated | {"curriculum": curriculum}
        assert "--train.start-pool-size 1: the smallest" in told(model, none_held, **wide)
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


def shift(data: Path) -> None:
    index = np.load(data / "train/samples.npy")
    index["start"] += 7
    np.save(data / "train/samples.npy", index)


def foreign_id(data: Path) -> None:
    ids = np.fromfile(data / "train/tokens.bin", "<i4")
    ids[5] = 99_999
    ids.tofile(data / "train/tokens.bin")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty index": (lambda d: (d / "train/samples.npy").write_bytes(b""), "npy: is damaged"),
    "foreign index": (lambda d: (d / "train/samples.npy").write_bytes(b"x" * 200), "is damaged"),
    "shifted index": (shift, "do not follow each other"),
    "cut tokens": (lambda d: os.truncate(d / "train/tokens.bin", 100), "does not match"),
    "id beyond the vocabulary": (foreign_id, "holds the token id 99999, and ids end at 499"),
    "cut questions": (lambda d: os.truncate(d / "held_out.jsonl", 100), "missing or damaged"),
    "no tokenizer": (lambda d: shutil.rmtree(d / "tokenizer"), "no such folder"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_data_is_refused_before_the_folder_is_made(
    name: str, models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    damage, message = DAMAGES[name]
    damaged = tmp_path / "damaged"
    shutil.copytree(data, damaged)
    damage(damaged)
    config = dataclasses.replace(
        RECIPES.get("mamba2_debug_cpu"), context_tokens=512, eval_calls=2, eval_every=1
    )
    args = train.Args(models["mamba2"], damaged, tmp_path / "out", config)
    if name not in ("id beyond the vocabulary", "shifted index"):  # of the same size
        with pytest.raises(UserError, match=r"that manifest.json recorded"):
            train.check("mamba2_debug_cpu", args)
    reseal(damaged)
    with pytest.raises(UserError, match=message):
        train.check("mamba2_debug_cpu", args)


def test_a_manifest_that_lacks_a_fact_is_named(
    models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(data, damaged)
    manifest = artifact.read_manifest(damaged)
    del manifest["extra"]["vocab_size"]
    (damaged / artifact.MANIFEST).write_text(json.dumps(manifest))
    args = train.Args(models["mamba2"], damaged, tmp_path, RECIPES.get("mamba2_debug_cpu"))
    with pytest.raises(UserError, match=r"manifest.json: is damaged .*vocab_size"):
        train.check("mamba2_debug_cpu", args)
