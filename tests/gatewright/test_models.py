import pickle
from pathlib import Path
from typing import Any

import pytest

from gatewright.errors import UserError
from gatewright.models import ModelConfig, from_hf_config, hf_config, load_hf_model

SMALL = [
    ModelConfig("mamba2", 1000, 64, 2, d_state=16, head_dim=16),
    ModelConfig("mamba2", 1000, 64, 3, d_state=16, head_dim=16, ngroups=2, tie_embeddings=True),
    ModelConfig("llama", 1000, 64, 2, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=96),
    ModelConfig(
        "llama", 1000, 64, 2, n_heads=4, n_kv_heads=4, head_dim=8, ffn_dim=96, tie_embeddings=True
    ),
]


@pytest.mark.parametrize("config", SMALL, ids=lambda c: f"{c.family}-{c.parameters()}")
def test_parameter_formula_equals_the_real_model(config: ModelConfig) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(hf_config(config))
    assert sum(p.numel() for p in model.parameters()) == config.parameters()


@pytest.mark.parametrize("config", SMALL, ids=lambda c: f"{c.family}-{c.parameters()}")
def test_hf_config_round_trip(config: ModelConfig) -> None:
    assert from_hf_config(hf_config(config), "test") == config


def test_misfits_name_the_field() -> None:
    with pytest.raises(UserError, match=r"model\.head_dim 48"):
        ModelConfig("mamba2", 1000, 64, 2, head_dim=48)
    with pytest.raises(UserError, match=r"model\.n_kv_heads 3"):
        ModelConfig("llama", 1000, 64, 2, n_heads=4, n_kv_heads=3, head_dim=16, ffn_dim=96)


def test_a_bound_on_dt_that_would_be_lost_is_refused() -> None:
    bounded = hf_config(SMALL[0])
    bounded.time_step_limit = (0.001, 0.1)
    with pytest.raises(UserError, match=r"my-model: time_step_limit \[0.001, 0.1\]"):
        from_hf_config(bounded, "my-model")


@pytest.mark.parametrize("config", [c for c in SMALL if c.tie_embeddings])
def test_tied_embeddings_are_no_missing_weight(config: ModelConfig, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(hf_config(config))
    model.save_pretrained(tmp_path)
    loaded = load_hf_model(AutoModelForCausalLM, tmp_path)
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert loaded.get_input_embeddings().weight.equal(model.get_input_embeddings().weight)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(UserError, match=f"--model {tmp_path}: transformers cannot load it"):
        load_hf_model(AutoModelForCausalLM, tmp_path)


class Code:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return pytest.fail, ("code of a checkpoint was run",)


def damage(file: Path, how: str) -> None:
    import torch

    if how == "cut short":
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    elif how == "empty":
        file.write_bytes(b"")
    elif how == "text":
        file.write_text("hello")
    elif how == "code":
        file.write_bytes(pickle.dumps(Code(), protocol=2))
    else:
        torch.save({"numbers": {"a": 1}, "a list": [1, 2]}[how], file)


@pytest.mark.parametrize("how", ["cut short", "empty", "text", "code", "numbers", "a list"])
def test_damaged_pickled_weights_are_one_line(how: str, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(hf_config(SMALL[0]))
    model.config.save_pretrained(tmp_path)
    weights = tmp_path / "pytorch_model.bin"
    torch.save(model.state_dict(), weights)
    assert load_hf_model(AutoModelForCausalLM, tmp_path)
    damage(weights, how)
    with pytest.raises(UserError, match=f"--model {tmp_path}: ") as refused:
        load_hf_model(AutoModelForCausalLM, tmp_path)
    assert "\n" not in str(refused.value)
