"""Foreign models that cannot be said in another format, or are damaged, are named and left."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from gatewright import artifact
from gatewright.checkpoints import convert, opening, parity
from gatewright.errors import UserError
from gatewright.megatron import build, distributed, initial
from gatewright.megatron.config import ParallelConfig
from tests.gatewright.checkpoints import small_models
from tests.gatewright.checkpoints.small_models import VARIANTS


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A Hugging Face folder or a Megatron run of some variants."""
    root = tmp_path_factory.mktemp("models")
    savers = {"hf": small_models.save_huggingface, "megatron": small_models.save_megatron}
    names = ("hf/mamba2-g2", "hf/mamba2-g2-tied", "hf/llama-gqa", "megatron/mamba2-g1")
    folders = {}
    for name in (*names, "megatron/llama-gqa"):
        kind, variant = name.split("/")
        folders[name] = savers[kind](root / name, VARIANTS[variant])
    return folders


def transformers_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder).eval()(input_ids=tokens).logits


def edited(source: Path, folder: Path, **changes: object) -> Path:
    """Copy a foreign folder with other values in its config.json (`ssm_cfg` is merged)."""
    shutil.copytree(source, folder)
    (folder / artifact.MANIFEST).unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text())
    ssm = changes.pop("ssm_cfg", None)
    if ssm is not None:
        config["ssm_cfg"] = {**config["ssm_cfg"], **ssm}  # type: ignore[dict-item]
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.fixture(scope="module")
def mamba_ssm(made: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mamba_ssm") / "model"
    convert.convert(made["hf/mamba2-g2"], "mamba_ssm", folder, check=False)
    return folder


def test_bounds_on_dt_come_along_where_they_can_be_said(mamba_ssm: Path, tmp_path: Path) -> None:
    """Bounds that change every logit: dropped ones would not pass the check."""
    bounded = edited(mamba_ssm, tmp_path / "bounded", ssm_cfg={"dt_limit": [0.5, 0.6]})
    done = convert.convert(bounded, "hf", tmp_path / "hf")
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert written["time_step_limit"] == [0.5, 0.6]
    tokens = parity.check_tokens(done.model)
    plain = parity.logits(opening.open_checkpoint(mamba_ssm), done.model)
    assert (transformers_logits(tmp_path / "hf", tokens) - plain).abs().max() > 1e-3
    convert.convert(bounded, "mamba_ssm", tmp_path / "again")
    ssm = json.loads((tmp_path / "again" / "config.json").read_text())["ssm_cfg"]
    assert ssm["dt_limit"] == [0.5, 0.6]
    with pytest.raises(UserError, match=r"dt_limit \[0.5, 0.6\] bounds dt, which Megatron-Core"):
        convert.convert(bounded, "megatron", tmp_path / "x", check=False)
    with pytest.raises(UserError, match=r"dt_limit \[0.5, 0.6\] bounds dt, which Megatron-Core"):
        initial.check(bounded, done.model, tmp_path)
    open_ended = edited(mamba_ssm, tmp_path / "open", ssm_cfg={"dt_limit": [0.0, float("inf")]})
    convert.convert(open_ended, "megatron", tmp_path / "run", check=False)
    for limit in ("x", [0.1], [2, 1], ["a", "b"], [float("nan"), 1]):
        wrong = edited(mamba_ssm, tmp_path / f"wrong{limit}", ssm_cfg={"dt_limit": limit})
        with pytest.raises(UserError, match="is not a pair of numbers"):
            convert.convert(wrong, "hf", tmp_path / "x", check=False)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("source", "changes", "message"),
    [
        ("hf", {"vocab_size": "abc"}, "config.json: .*vocab_size"),
        ("hf", {"time_step_limit": "x"}, "config.json: .*time_step_limit"),
        ("hf", {"time_step_limit": [0.0]}, "time_step_limit .* is not a pair"),
        ("hf", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; only models with silu"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; only models with silu"),
        ("hf", {"num_hidden_layers": 1}, r"1 layers\) has no place for"),
        ("llama", {"num_hidden_layers": 2}, r"2 layers\) has no place for"),
        ("mamba_ssm", {"pad_vocab_size_multiple": 0}, "not a mamba_ssm configuration"),
        ("mamba_ssm", {"n_layer": 1}, r"1 layers\) has no place for"),
        ("mamba_ssm", {"vocab_size": "abc"}, "not a mamba_ssm configuration"),
    ],
)
def test_a_configuration_that_does_not_fit_is_one_line(
    source: str,
    changes: dict[str, object],
    message: str,
    made: dict[str, Path],
    mamba_ssm: Path,
    tmp_path: Path,
) -> None:
    folders = {"hf": made["hf/mamba2-g2"], "llama": made["hf/llama-gqa"], "mamba_ssm": mamba_ssm}
    wrong = edited(folders[source], tmp_path / "wrong", **changes)
    with pytest.raises(UserError, match=message):
        convert.convert(wrong, "hf", tmp_path / "x", check=False)
    assert not (tmp_path / "x").exists()


def test_weights_that_would_be_dropped_are_refused(made: dict[str, Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = edited(made["hf/mamba2-g2-tied"], tmp_path / "more")
    state = load_file(folder / "model.safetensors")
    save_file({**state, "lm_head.weight": torch.zeros(96, 32)}, folder / "model.safetensors")
    convert.convert(folder, "megatron", tmp_path / "tied", check=False)  # a copy, as some write it
    bias = "backbone.layers.0.mixer.out_proj.bias"
    save_file({**state, bias: torch.zeros(32)}, folder / "model.safetensors")
    with pytest.raises(UserError, match=f"more: holds {bias} and 0 other tensors"):
        convert.convert(folder, "megatron", tmp_path / "x", check=False)
    run = tmp_path / "run"
    shutil.copytree(made["megatron/mamba2-g1"], run)
    config = json.loads((run / "iter_0000003" / "config.json").read_text())
    config["model"]["n_layers"] = 1
    (run / "iter_0000003" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"holds decoder\.layers\.1\..*1 layers"):
        convert.convert(run, "hf", tmp_path / "x", check=False)


def test_weights_that_are_not_finite_are_named_with_a_way_out(
    made: dict[str, Path], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    folder = edited(made["hf/mamba2-g2"], tmp_path / "nan")
    state = load_file(folder / "model.safetensors")
    state["backbone.norm_f.weight"][0] = float("nan")
    save_file(state, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"nan: its model gives NaN .* with --no-check"):
        convert.convert(folder, "megatron", tmp_path / "run")
    convert.convert(folder, "megatron", tmp_path / "run", check=False)
    model = VARIANTS["mamba2-g2"]
    with distributed.processes(ParallelConfig()):
        built = build.build_model(model)
        for source in (folder, tmp_path / "run"):
            (out := tmp_path / f"out-{source.name}").mkdir()
            with pytest.raises(
                UserError, match=rf"--init-from {source}: decoder\.final_norm\.weight holds"
            ):
                initial.load_weights(source, out, built, None)
            assert not list(out.iterdir())


@pytest.mark.parametrize("file", ["common.pt", "metadata.json", ".metadata"])
def test_a_damaged_megatron_checkpoint_is_one_line(
    file: str, made: dict[str, Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(made["megatron/llama-gqa"], run)
    (run / "iter_0000003" / file).write_bytes(b"junk")
    with pytest.raises(UserError, match=r"iter_0000003.*damaged|\.metadata: "):
        convert.convert(run, "hf", tmp_path / "x")
    assert not (tmp_path / "x").exists()
