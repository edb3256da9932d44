"""The model that fine-tuning starts from: configurations that cannot be are told before loading."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gatewright.errors import UserError
from sft import parent


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("mamba2", b"[]", "is not a JSON object"),
        ("mamba2", b"{", "is not valid JSON"),
        ("mamba2", b"\xff\xfe{", "is not valid JSON"),
        ("mamba2", {"model_type": ["x"] * 1000}, "is neither mamba2 nor llama"),
        ("mamba2", {"vocab_size": "x"}, "vocab_size"),
        ("mamba2", {"vocab_size": None}, "vocab_size"),
        ("mamba2", {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ("mamba2", {"num_heads": 3}, "config.json: "),
        ("mamba2", {"n_groups": 3}, "n_groups 3 does not divide num_heads 4"),
        ("mamba2", {"state_size": -1}, "state_size is -1"),
        ("mamba2", {"hidden_act": "none"}, "hidden_act 'none' is not known"),
        ("llama", {"num_key_value_heads": 3}, "config.json: "),
        ("llama", {"num_attention_heads": 0}, "config.json: "),
        ("llama", {"intermediate_size": 0}, "intermediate_size is 0"),
    ],
)
def test_a_broken_configuration_is_one_line(
    models: dict[str, Path], tmp_path: Path, family: str, change: Any, message: str
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(models[family], broken)
    file = broken / "config.json"
    if isinstance(change, dict):
        change = json.dumps(json.loads(file.read_text()) | change).encode()
    file.write_bytes(change)
    with pytest.raises(UserError) as caught:
        parent.inspect(broken)
    assert message in str(caught.value)
    assert str(broken) in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 3}, r"lack \d+ of the tensors .* backbone.layers.2"),
        ({"state_size": 8}, r"of shape \[.*\], and its config.json asks for"),
    ],
)
def test_a_parent_whose_weights_do_not_fit_its_config_is_refused(
    models: dict[str, Path], tmp_path: Path, change: dict[str, int], message: str
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(models["mamba2"], broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UserError, match=message):
        parent.load(parent.inspect(broken))
