import json
from pathlib import Path

from eval_bfcl import ceiling


def test_a_state_is_read_where_the_law_describes_one(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 512}
    for config, want in (
        ({"model_type": "mamba2", "state_size": 16, "n_groups": 1, **sizes}, (64, 16, 2)),
        ({"model_type": "mamba2", "state_size": 16, "n_groups": 8, **sizes}, None),
        ({"model_type": "llama", "state_size": 16, **sizes}, None),
        (
            {"model_type": "mamba2", "n_groups": 1, **sizes},
            None,
        ),  # a size is left to transformers' default
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        state = ceiling.read_state(tmp_path)
        assert (state and (state["d"], state["n"], state["layers"])) == want
    assert set(ceiling.predict(None, 8).values()) == {None}


def test_a_ceiling_from_more_slots_than_channels_says_so() -> None:
    state = {"d": 16, "n": 32, "layers": 1, "vocab": 512, "model": "full", "task": None}
    assert "N > D: promises too much" in str(ceiling.predict(state, 4)["predicted_from"])
    wide = ceiling.predict({**state, "n": 16}, 4)["predicted_from"]
    assert wide == "predicted ceiling: D 16, N 16, 1 layer"
