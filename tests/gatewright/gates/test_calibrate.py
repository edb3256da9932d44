"""Steps measured on a text equal the steps that the models take; states stay within the bound."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from gatewright.errors import UserError
from gatewright.gates import calibrate, edits, find, growth, statistics
from gatewright.gates.edits import Edit
from gatewright.kernels.transformers_binding import bind_transformers
from tests.gatewright.gates import families

WORDS = 97  # tokens of the text: a number that is no head or channel count
MEASURABLE = [f for f in families.FAMILIES if f != "kimi_linear"]


def add_tokenizer(folder: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {f"w{i}": i for i in range(families.VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"})
    )
    return folder


@pytest.fixture(autouse=True)
def transformers_own_kernels() -> None:
    """Another test of this process may have bound ours, which heed no chunk size."""
    bind_transformers().undo()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    rng = np.random.default_rng(0)
    file.write_text(" ".join(f"w{i}" for i in rng.integers(0, families.VOCAB, WORDS)))
    return file


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_tokenizer(families.save("mamba2", tmp_path_factory.mktemp("model") / "m"))


def tokens_of(text: Path) -> torch.Tensor:
    return torch.tensor([[int(w[1:]) for w in text.read_text().split()]])


def test_mamba2_steps_against_its_projection(text: Path, tmp_path: Path) -> None:
    folder = add_tokenizer(families.save("mamba2", tmp_path / "m"))
    measured = calibrate.measure(find.find_gates(folder), text)
    assert measured.tokens == WORDS
    model = families.build("mamba2")
    seen: dict[int, torch.Tensor] = {}
    for i, layer in enumerate(model.backbone.layers):
        layer.mixer.in_proj.register_forward_hook(lambda m, a, out, i=i: seen.update({i: out}))
    with torch.no_grad():
        model(input_ids=tokens_of(text))
    for i, layer in enumerate(model.backbone.layers):
        dt = torch.nn.functional.softplus(seen[i][0, :, -4:] + layer.mixer.dt_bias)
        np.testing.assert_allclose(measured.dt[i], dt.mean(dim=0).detach().numpy(), rtol=1e-5)


def test_mamba1_steps_against_its_projection(text: Path, tmp_path: Path) -> None:
    folder = add_tokenizer(families.save("mamba", tmp_path / "m"))
    measured = calibrate.measure(find.find_gates(folder), text)
    model = families.build("mamba")
    mixer = model.backbone.layers[0].mixer
    seen: list[torch.Tensor] = []
    mixer.x_proj.register_forward_hook(lambda m, a, out: seen.append(out))
    with torch.no_grad():
        model(input_ids=tokens_of(text))
        low_rank = seen[0][0, :, : mixer.time_step_rank]
        dt = torch.nn.functional.softplus(mixer.dt_proj(low_rank))
    np.testing.assert_allclose(measured.dt[0], dt.mean(dim=0).numpy(), rtol=1e-5)


@pytest.mark.parametrize("family", MEASURABLE)
def test_every_family_is_measured_where_it_computes_dt(
    family: str, text: Path, tmp_path: Path
) -> None:
    """With nothing but zeros coming in, the first gate's dt is that of its bias alone."""
    model = families.build(family)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed" in name or "conv1d.bias" in name:
                parameter.zero_()
    model.save_pretrained(tmp_path / "m")
    gates = find.find_gates(add_tokenizer(tmp_path / "m"))
    measured = calibrate.measure(gates, text)
    first = gates.gates[0]
    expected = first.dt(gates.checkpoint, gates.dt_limit)
    found = measured.dt[first.layer].reshape(first.n_heads, -1)
    np.testing.assert_allclose(found, np.broadcast_to(expected, found.shape), rtol=1e-5)
    for layer in statistics.layer_gates(gates, measured.dt):
        assert np.isfinite(layer.tau).all()


def test_what_cannot_be_measured_says_so(text: Path, tmp_path: Path) -> None:
    folder = families.save("mamba2", tmp_path / "m")
    with pytest.raises(UserError, match="tokenizer files"):
        calibrate.measure(find.find_gates(folder), text)
    add_tokenizer(folder)
    (tmp_path / "short.txt").write_text("w1 w2 w3")
    with pytest.raises(UserError, match="only 3 tokens"):
        calibrate.measure(find.find_gates(folder), tmp_path / "short.txt")
    with pytest.raises(UserError, match="cannot be read"):
        calibrate.measure(find.find_gates(folder), tmp_path / "none.txt")
    fused = add_tokenizer(families.save("kimi_linear", tmp_path / "kimi"))
    with pytest.raises(UserError, match="fused kernel"):
        calibrate.measure(find.find_gates(fused), text)


def with_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return change


def with_tokenizer(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "tokenizer.json").write_text(text) and None


def with_a_far_token(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"] = {w: i + 5000 for w, i in content["model"]["vocab"].items()}
    (folder / "tokenizer.json").write_text(json.dumps(content))


def without_convolution(folder: Path) -> None:  # else random, as transformers fills it in
    weights = load_file(folder / "model.safetensors")
    kept = {name: value for name, value in weights.items() if not name.endswith("conv1d.bias")}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            with_config(vocab_size=50),
            r"hold \S*embeddings.weight of shape \[96, 16\].*; copy or make the folder again",
        ),
        (without_convolution, r"weights lack 3 of the tensors .*layers.0.mixer.conv1d.bias among"),
        (
            with_config(hidden_size=64),
            "cannot read config.json .*; is config.json the",
        ),
        (
            with_config(hidden_size="a"),
            "cannot read config.json .*; is config.json the",
        ),
        (with_config(chunk_size=0), "its model does not run .*; is config.json the one"),
        (with_tokenizer("{"), "tokenizer cannot be loaded .*; fetch the tokenizer files again"),
        (with_tokenizer("{}"), "tokenizer cannot be loaded .*; fetch the tokenizer files again"),
        (with_tokenizer("[]"), "tokenizer cannot be loaded .*; fetch the tokenizer files again"),
        (with_a_far_token, r"answers token \d+, but the model embeds only 96; fetch the tokenizer"),
    ],
)
def test_files_that_do_not_belong_together(
    change: Callable[[Path], None], match: str, model: Path, text: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "m"))
    change(folder)
    with pytest.raises(UserError, match=match) as caught:
        calibrate.measure(find.find_gates(folder), text)
    assert len(str(caught.value)) < 700


def test_only_the_beginning_of_a_long_text_is_read(model: Path, tmp_path: Path) -> None:
    words = b"w1 " * (calibrate.MAX_CHARACTERS // 3 + 10_000)
    (tmp_path / "long.txt").write_bytes(words + b"\xff" * 10)  # never seen, so never decoded
    assert len(calibrate._tokens(model, tmp_path / "long.txt")) == 4096


def test_a_checkpoints_own_code_is_not_run(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would ask on the terminal, and a "y" in the input would run it."""
    folder = add_tokenizer(families.save("mamba2", tmp_path / "m"))
    gates = find.find_gates(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.C"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\ny\ny\n"))
    with pytest.raises(UserError, match=r"transformers cannot read config\.json"):
        calibrate.measure(gates, text)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("family", ["mamba2", "mamba"])
def test_a_state_stays_within_the_bound_of_its_updates(
    family: str, text: Path, tmp_path: Path
) -> None:
    """The bound that warnings rest on, against the states that the model really reaches."""
    folder = add_tokenizer(families.save(family, tmp_path / "m"))
    gates = find.find_gates(folder)
    measured = calibrate.measure(gates, text, updates=True)
    model = families.build(family)
    tokens = tokens_of(text)[:, -calibrate.UPDATE_TOKENS :]
    with torch.no_grad():
        cache = model(input_ids=tokens, use_cache=True).past_key_values
    for gate in gates.gates:
        update = measured.update[gate.layer]
        assert update.shape == (gate.n_heads,)
        assert (update > 0).all()
        state = calibrate._state(cache, gate)
        assert state is not None
        held = growth.growth(np.full(gate.n_heads, 1.0), calibrate.UPDATE_TOKENS)
        reached = np.abs(state).reshape(gate.n_heads, -1).max(axis=1)
        assert (reached <= 3 * update * held).all()
        assert (reached > 0.01 * update).all()


def test_growth_is_the_sum_of_powers() -> None:
    for alpha in (0.0, 0.3, 0.999, 1.0 - 1e-12, 1.0):
        expected = sum(alpha**k for k in range(500))
        assert growth.growth(np.array([alpha]), 500)[0] == pytest.approx(expected, rel=1e-6)


def test_warns_only_where_the_state_can_outgrow_its_type(tmp_path: Path) -> None:
    folder = families.save("mamba2", tmp_path / "m", dtype=torch.float16)
    gates = find.find_gates(folder)
    assert growth.stored_type(gates.checkpoint.config) == "float16"
    weak = edits.resolve(Edit("offset", -30.0), gates, {}, force=True)
    plain = edits.resolve(Edit("scale", 1.0), gates, {})
    assert growth.warnings(plain, gates, 512, None) == []
    (overflow, stuck) = growth.warnings(weak, gates, 100_000, None)
    assert "12 of 12 heads can reach states of 1e+05" in overflow
    assert "float16 holds (6.55e+04)" in overflow
    assert "rounds a new one away" in stuck
    measured = calibrate.Measured(
        dt={g.layer: np.full(g.n_heads, 0.01) for g in gates.gates},
        update={g.layer: np.full(g.n_heads, 1e-3) for g in gates.gates},
        tokens=1,
    )
    assert len(growth.warnings(weak, gates, 100_000, measured)) == 1  # only the rounding remains
    with pytest.raises(UserError, match="--context-length"):
        growth.warnings(weak, gates, 0, None)
