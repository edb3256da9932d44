"""The sweep's plan, its flags and its table."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from gatewright import artifact
from gatewright.errors import UserError
from sft import measure, sweep
from sft.recipes import RECIPES
from tests.sft.material import python_m


def test_every_cell_has_a_file_of_its_own() -> None:
    scales = (0.25, 0.5, 1.0, 2.0, 4.0)
    names = {sweep.Cell(s, seed, "ramp").name for s in scales for seed in (0, 1, 2)}
    assert len(names) == 15
    assert "s0.25-ramp-seed1" in names


def test_scaled_parents_carry_their_scale(models: dict[str, Path], tmp_path: Path) -> None:
    from sft import parent

    args = sweep.Args(models["mamba2"], tmp_path, tmp_path, RECIPES.get("mamba2_debug_cpu"))
    folders = sweep.scaled_parents(args, [0.5, 2.0])
    assert {s: parent.inspect(f).gate_scale for s, f in folders.items()} == {0.5: 0.5, 2.0: 2.0}
    before = artifact.content_hash(folders[0.5])
    assert sweep.scaled_parents(args, [0.5]) == {0.5: folders[0.5]}
    assert artifact.content_hash(folders[0.5]) == before


def test_a_folder_holds_one_sweep(models: dict[str, Path], tmp_path: Path) -> None:
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    args = sweep.Args(models["mamba2"], data, out, RECIPES.get("mamba2_debug_cpu"))
    sweep.claim(args, "mamba2_debug_cpu")
    sweep.claim(dataclasses.replace(args, scales="0.5", seeds="7"), "mamba2_debug_cpu")
    changes: list[tuple[str, dict[str, Any]]] = [
        ("pool_sizes", {"pool_sizes": "1,4"}),
        ("train", {"train": dataclasses.replace(args.train, lr=0.5)}),
        ("model", {"model": models["llama"]}),
    ]
    for name, change in changes:
        with pytest.raises(UserError, match=f"another {name}"):
            sweep.claim(dataclasses.replace(args, **change), "mamba2_debug_cpu")
    with pytest.raises(UserError, match="another recipe"):
        sweep.claim(args, "llama_debug_cpu")
    (data / "foreign").touch()
    with pytest.raises(UserError, match="is not empty"):
        sweep.claim(dataclasses.replace(args, out=data), "mamba2_debug_cpu")


@pytest.mark.parametrize(
    ("model", "scales", "message"),
    [
        ("mamba2", "1,0", "scale 0"),
        ("llama", "1", "no gate to scale"),
        ("none", "1", "no such folder"),
    ],
)
def test_what_cannot_be_scaled_leaves_nothing(
    models: dict[str, Path], data: Path, tmp_path: Path, model: str, scales: str, message: str
) -> None:
    args = sweep.Args(
        models.get(model, tmp_path / "none"),
        data,
        tmp_path / "out",
        RECIPES.get("mamba2_debug_cpu"),
        scales=scales,
    )
    with pytest.raises(UserError, match=message):
        sweep.main("mamba2_debug_cpu", args)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seeds": "0,1,0"}, "--seeds: 0 occurs twice"),
        ({"scales": "0.1,0.1000001"}, "--scales: 0.1 occurs twice"),
        ({"pool_sizes": "1,1"}, "--pool-sizes: 1 occurs twice"),
        ({"curricula": "ramp,ramp"}, "--curricula: ramp occurs twice"),
        ({"pool_sizes": "999"}, "--pool-sizes 999"),
        ({"context_tokens": 16}, "--train.context-tokens 16"),
    ],
)
def test_what_no_cell_could_do_is_told_before_the_first(
    models: dict[str, Path], data: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    out = tmp_path / "out"
    flags: dict[str, Any] = {"scales": "1,2", "seeds": "1000000,1000001", "pool_sizes": "1"}
    flags |= change
    context = flags.pop("context_tokens", 512)
    config = dataclasses.replace(RECIPES.get("mamba2_debug_cpu"), context_tokens=context)
    with pytest.raises(UserError, match=message):
        sweep.main("mamba2_debug_cpu", sweep.Args(models["mamba2"], data, out, config, **flags))
    assert not out.exists()


def test_one_command_trains_measures_and_compares(
    models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    config = dataclasses.replace(
        RECIPES.get("mamba2_debug_cpu"), steps=2, lr_warmup_steps=1, context_tokens=512
    )
    args = sweep.Args(
        models["mamba2"], data, tmp_path / "out", config, scales="1,2", seeds="3",
        pool_sizes="1,2", questions=2, keep_models=True,
    )  # fmt: skip
    flags = ["--model", args.model, "--data", data, "--out", args.out, "--scales", "1,2"]
    flags += ["--seeds", "3", "--pool-sizes", "1,2", "--questions", "2", "--keep-models"]
    flags += ["--train.steps", "2", "--train.lr-warmup-steps", "1"]
    flags += ["--train.context-tokens", "512"]
    done = python_m("sft.sweep", "mamba2_debug_cpu", *flags)
    assert done.returncode == 0, done.stderr[-2000:]
    text = (args.out / "table.txt").read_text()
    assert done.stdout.endswith(text)
    rows = [json.loads(line) for line in (args.out / "results.jsonl").read_text().splitlines()]
    assert [(r["scale"], r["seed"], r["k"]) for r in rows] == [
        (1, 3, 1), (1, 3, 2), (2, 3, 1), (2, 3, 2),
    ]  # fmt: skip
    kept = [artifact.read_manifest(args.out / "cells" / f"s{s}-ramp-seed3") for s in (1, 2)]
    assert [m["extra"]["gate_scale"] for m in kept] == [1.0, 2.0]
    assert [m["extra"]["held_out_loss"] for m in kept] == [r["held_out_loss"] for r in rows[::2]]
    assert kept[0]["seed"] == 3
    assert "2 ramp        1 ramp" in text
    # A finished sweep is refused, an unfinished one takes its done cells from disk.
    with pytest.raises(UserError, match="already finished"):
        sweep.main("mamba2_debug_cpu", args)
    assert sweep.run_cell(args, "x", sweep.Cell(1.0, 3, "ramp"), tmp_path, "fork") == rows[:2]


def test_a_cell_that_fails_or_is_asked_to_leave_ends_the_sweep(
    models: dict[str, Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = sweep.Args(models["mamba2"], data, tmp_path, RECIPES.get("mamba2_debug_cpu"))
    cell = sweep.Cell(1.0, 0, "ramp")
    short = dataclasses.replace(args, train=dataclasses.replace(args.train, context_tokens=16))
    with pytest.raises(UserError, match=r"s1-ramp-seed0 failed \(exit code 2\)"):
        sweep.run_cell(short, "mamba2_debug_cpu", cell, models["mamba2"], "fork")
    monkeypatch.setattr(sweep.train, "main", lambda *_: 75)
    with pytest.raises(SystemExit, match="75"):
        sweep.run_cell(args, "mamba2_debug_cpu", cell, models["mamba2"], "fork")


def test_no_questions_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    recipe = RECIPES.get("mamba2_debug_cpu")
    none = sweep.Args(tmp_path / "m", tmp_path / "d", tmp_path / "out", recipe, questions=0)
    with pytest.raises(UserError, match="--questions 0: give a positive number"):
        sweep.main("mamba2_debug_cpu", none)
    for name in ("questions", "new_tokens", "batch_size"):
        for value in (0, -1):
            args = measure.Args(tmp_path / "m", tmp_path / "d", **{name: value})
            flag = name.replace("_", "-")
            with pytest.raises(UserError, match=f"--{flag} {value}: give a positive number"):
                measure.main(args)
