"""The sweep's plan, its flags and its table."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from gatewright import artifact, cli
from gatewright.errors import UserError
from sft import measure, sweep, train
from sft.recipes import RECIPES


def test_every_cell_has_a_file_of_its_own() -> None:
    scales = (0.25, 0.5, 1.0, 2.0, 4.0)
    names = {sweep.Cell(s, seed, "ramp").name for s in scales for seed in (0, 1, 2)}
    assert len(names) == 15
    assert "s0.25-ramp-seed1" in names


def test_flags_state_the_whole_configuration() -> None:
    config = dataclasses.replace(
        RECIPES.get("mamba2_debug_cpu"), seed=3, gradient_checkpointing=True, lr=0.25
    )
    base = train.Args(Path("m"), Path("d"), Path("o"), RECIPES.get("llama_2b_8xh100"))
    parsed = cli.parse(train.Args, sweep.train_flags(config), prog="x", default=base)
    assert parsed.train == config


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


def test_the_table_is_mean_and_deviation_over_seeds() -> None:
    rows = [
        {
            "scale": 1.0, "curriculum": "ramp", "k": 8, "held_out_loss": 2.0 + seed,
            "right_tool": 0.5, "exact": 0.25, "hallucinated": 0.0,
        }
        for seed in (0, 1, 2)
    ]  # fmt: skip
    line = sweep.table(rows).splitlines()[1]
    assert line.split()[:4] == ["1", "ramp", "8", "3"]
    assert "3.000 ± 1.000" in line
    assert "0.500 ± 0.000" in line


def test_no_questions_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    recipe = RECIPES.get("mamba2_debug_cpu")
    none = sweep.Args(tmp_path / "m", tmp_path / "d", tmp_path / "out", recipe, questions=0)
    with pytest.raises(UserError, match="--questions 0: give a positive number"):
        sweep.main("mamba2_debug_cpu", none)
    with pytest.raises(UserError, match="--questions 0: give a positive number"):
        measure.main(measure.Args(tmp_path / "m", tmp_path / "d", questions=0))
