"""Damaged and hostile inputs: one clear line, nothing written, nothing executed."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gatewright import artifact
from gatewright.checkpoints import pickles
from gatewright.errors import UserError
from gatewright.gates import edits, find, rewrite
from gatewright.gates.edits import Edit
from tests.gatewright.gates import families


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    single = families.save("mamba2", root / "single")
    sharded = families.save("mamba2", root / "sharded", max_shard_size="6KB")
    binary = root / "bin"
    binary.mkdir()
    built = families.build("mamba2")
    built.config.save_pretrained(binary)
    torch.save(built.state_dict(), binary / "pytorch_model.bin")
    return {"single": single, "sharded": sharded, "bin": binary}


def copy(source: Path, target: Path) -> Path:
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def scale(source: Path, out: Path) -> None:
    gates = find.find_gates(source)
    rewrite.write_edits(gates, [edits.resolve(Edit("scale", 0.5), gates, {})], out, dts={})


def refused(source: Path, match: str) -> None:
    """The edit fails with one line and leaves nothing beside the input."""
    before = {p: p.read_bytes() for p in source.rglob("*") if p.is_file()}
    with pytest.raises(UserError, match=match) as caught:
        scale(source, source.parent / "out")
    assert "\n" not in str(caught.value)
    assert [p.name for p in source.parent.iterdir() if p != source] == []
    assert {p: p.read_bytes() for p in source.rglob("*") if p.is_file()} == before


def header_of(file: Path) -> dict[str, Any]:
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length])


def with_header(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Replace a safetensors file's header, keeping its data."""
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    changed = change(json.loads(data[8 : 8 + length]))
    text = changed if isinstance(changed, bytes) else json.dumps(changed).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def shifted(header: dict[str, Any], by: int) -> dict[str, Any]:
    name = next(n for n in header if n.endswith("A_log"))
    header[name]["data_offsets"] = [x + by for x in header[name]["data_offsets"]]
    return header


def resized(header: dict[str, Any]) -> dict[str, Any]:
    name = next(n for n in header if n.endswith("A_log"))
    header[name]["shape"] = [4096]
    return header


def doubled(header: dict[str, Any]) -> bytes:
    name = next(n for n in header if n.endswith("A_log"))
    entry = json.dumps(header[name])
    return json.dumps(header).encode()[:-1] + f', "{name}": {entry}}}'.encode()


HEADERS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "not json": (lambda h: b"{", "not valid JSON"),
    "a list": (lambda h: [], "not a JSON object"),
    "overlap": (lambda h: shifted(h, -4), "overlaps|leaves a hole"),
    "hole": (lambda h: shifted(h, 4), "leaves a hole|overlaps"),
    "far away": (lambda h: shifted(h, 1 << 60), "hole|overlaps|need"),
    "negative": (lambda h: shifted(h, -(1 << 60)), "whole numbers"),
    "wrong shape": (resized, "do not fit"),
    "a name twice": (doubled, "occurs twice"),
    "no offsets": (lambda h: h | {"x": {"dtype": "F32", "shape": [1]}}, "lacks"),
    "odd sizes": (
        lambda h: h | {"x": {"dtype": "F32", "shape": ["a"], "data_offsets": [0, 4]}},
        "whole numbers|lacks",
    ),
    "deep": (lambda h: b"[" * 100_000, "not valid JSON"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_wrong_headers(case: str, model: dict[str, Path], tmp_path: Path) -> None:
    folder = copy(model["single"], tmp_path / "in")
    change, match = HEADERS[case]
    with_header(folder / "model.safetensors", change)
    refused(folder, match)


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 0.5, 0.99])
@pytest.mark.parametrize("kind", ["single", "bin"])
def test_cut_short(keep: float, kind: str, model: dict[str, Path], tmp_path: Path) -> None:
    folder = copy(model[kind], tmp_path / "in")
    name = "model.safetensors" if kind == "single" else "pytorch_model.bin"
    data = (folder / name).read_bytes()
    size = int(keep * len(data)) if isinstance(keep, float) else keep
    (folder / name).write_bytes(data[:size])
    refused(folder, "not a sound safetensors file|torch.save wrote whole")


def test_header_length_beyond_the_file(model: dict[str, Path], tmp_path: Path) -> None:
    folder = copy(model["single"], tmp_path / "in")
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", 1 << 63) + file.read_bytes()[8:])
    refused(folder, "does not fit")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda m: dict.fromkeys(m, "gone.safetensors"), "missing"),
        (lambda m: dict.fromkeys(m, "../../etc/passwd"), "not at a file beside it"),
        (lambda m: dict.fromkeys(m, 7), "not at a file beside it"),
        (lambda m: m | {"backbone.layers.9.mixer.A_log": next(iter(m.values()))}, "but it is not"),
        (lambda m: [], "not a valid index"),
    ],
)
def test_wrong_index(
    change: Callable[[Any], Any], match: str, model: dict[str, Path], tmp_path: Path
) -> None:
    folder = copy(model["sharded"], tmp_path / "in")
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] = change(content["weight_map"])
    index.write_text(json.dumps(content))
    refused(folder, match)


def test_links_that_lead_round_or_nowhere(model: dict[str, Path], tmp_path: Path) -> None:
    folder = copy(model["single"], tmp_path / "in")
    (folder / "loop").symlink_to(folder)
    refused_links(folder, "round in a circle")
    (folder / "loop").unlink()
    (folder / "a").symlink_to(folder / "b")
    (folder / "b").symlink_to(folder / "a")
    refused_links(folder, "cannot be read")
    (folder / "a").unlink()
    (folder / "b").unlink()
    os.mkfifo(folder / "pipe")
    refused_links(folder, "neither a file nor a folder")


def refused_links(folder: Path, match: str) -> None:
    with pytest.raises(UserError, match=match):
        scale(folder, folder.parent / "out")
    assert not (folder.parent / "out").exists()


def test_read_only_target(
    model: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write anywhere, so the refusal is that of a read-only filesystem."""

    def refuse(*args: object, **kwargs: object) -> str:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(UserError, match=r"--out .*out: cannot create it \(Read-only file system"):
        scale(model["single"], tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_target_that_cannot_be_made(model: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot create it"):
        scale(model["single"], tmp_path / "file" / "out")


class Bomb:
    """What a hostile checkpoint holds: unpickling it would write a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.target}",)


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_pickles_that_would_run_code(protocol: int, model: dict[str, Path], tmp_path: Path) -> None:
    fired = tmp_path / "in" / "fired"
    folder = copy(model["bin"], tmp_path / "in")
    torch.save(
        {"a.A_log": torch.zeros(2), "bomb": Bomb(fired)},
        folder / "pytorch_model.bin",
        pickle_protocol=max(protocol, 2),
    )
    refused(folder, "posix.system.*nothing of it was run")
    assert not fired.exists()
    meg = tmp_path / "in"
    for file in meg.iterdir():
        file.unlink()
    (meg / ".metadata").write_bytes(pickle.dumps(Bomb(fired), protocol=protocol))
    refused(meg, "posix.system.*nothing of it was run")
    assert not fired.exists()


def test_a_pickle_bomb_is_bounded() -> None:
    """References that double thirty times cost thirty instructions, not 2^30."""
    program = b"\x80\x02]q\x00" + b"".join(
        b"]q" + bytes([i + 1]) + b"h" + bytes([i]) + b"a" + b"h" + bytes([i]) + b"a"
        for i in range(30)
    )
    nested = pickles.read(program + b"0" * 31 + b"h\x1e.", "x", allowed=())
    assert nested[0] is nested[1]
    huge_memo = b"\x80\x02Nr\xff\xff\xff\xff."  # a list-backed memo would take 32 GB
    assert pickles.read(huge_memo, "x", allowed=()) is None


def test_random_damage_never_does_worse_than_one_line(
    model: dict[str, Path], tmp_path: Path
) -> None:
    """Flip bytes anywhere: the edit works on what is still sound, or says what is not."""
    rng = random.Random(0)
    for kind, name in (("single", "model.safetensors"), ("bin", "pytorch_model.bin")):
        folder = copy(model[kind], tmp_path / kind)
        sound = (folder / name).read_bytes()
        front = 4000 if kind == "single" else len(sound)
        done = {"edited": 0, "refused": 0}
        for i in range(60):
            data = bytearray(sound)
            for _ in range(rng.choice((1, 1, 8, 64))):
                data[rng.randrange(front)] = rng.randrange(256)
            (folder / name).write_bytes(data)
            out = tmp_path / f"{kind}-{i}"
            message = attempt(folder, out)
            done["edited" if message is None else "refused"] += 1
            assert message is None or ("\n" not in message and not out.exists())
        assert done["refused"] > 10, done


def attempt(source: Path, out: Path) -> str | None:
    """Return the refusal's message, None when the edit went through."""
    try:
        scale(source, out)
    except UserError as e:
        return str(e)
    return None


def test_a_llama_is_refused_with_what_was_looked_for(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "in")
    refused(tmp_path / "in", r"a llama with no gate.*A_log \(H,\) with dt_bias.*found for example")


def test_bounded_decay_is_refused(model: dict[str, Path], tmp_path: Path) -> None:
    folder = copy(model["single"], tmp_path / "in")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "bailing_hybrid"}))
    refused(folder, "bounds its decay")


@pytest.mark.parametrize(
    ("limit", "match"),
    [([1, 0], "not a range"), ("x", "not a pair"), ([0], "not a pair"), ([0, {}], "not a pair")],
)
def test_wrong_dt_limit(limit: Any, match: str, model: dict[str, Path], tmp_path: Path) -> None:
    folder = copy(model["single"], tmp_path / "in")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"time_step_limit": limit}))
    refused(folder, match)


def test_folders_that_are_no_checkpoint(model: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    refused(folder, "holds no weights; looked for model.safetensors")
    (folder / "config.json").write_text("{")
    (folder / "model.safetensors").write_bytes((model["single"] / "model.safetensors").read_bytes())
    refused(folder, "config.json: is not valid JSON")
    (folder / "config.json").unlink()
    refused(folder, "has no config.json")
    with pytest.raises(UserError, match="no such folder"):
        find.find_gates(tmp_path / "nowhere")
    with pytest.raises(UserError, match="hf download state-spaces/mamba2-130m"):
        find.find_gates("state-spaces/mamba2-130m")
    with pytest.raises(UserError, match="is a file"):
        find.find_gates(model["single"] / "model.safetensors")


@pytest.mark.parametrize("limit", [[0, 10**400], [0, {"__float__": []}]])
def test_limits_that_no_float_holds(limit: Any, model: dict[str, Path], tmp_path: Path) -> None:
    folder = copy(model["single"], tmp_path / "in")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"time_step_limit": limit}))
    refused(folder, "not a pair")


def test_a_mamba_ssm_layer_that_is_no_name(model: dict[str, Path], tmp_path: Path) -> None:
    folder = copy(model["single"], tmp_path / "in")
    (folder / "config.json").write_text(json.dumps({"ssm_cfg": {"layer": []}}))
    assert find.find_gates(folder).model_type == "mamba"


def test_a_name_that_is_not_utf8_is_refused_before_copying(
    model: dict[str, Path], tmp_path: Path
) -> None:
    folder = copy(model["single"], tmp_path / "in")
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff.txt")).write_text("")
    refused(folder, r"xff\.txt': its name is not UTF-8; rename it")
    with tempfile.TemporaryDirectory(dir=tmp_path, prefix="\udcff") as other:  # names above pass
        scale(copy(model["single"], Path(other) / "in"), Path(other) / "out")
        manifest = json.loads((Path(other) / "out" / "manifest.json").read_text())
        assert manifest["parents"]["model"]["path"] == str(Path(other) / "in")


@pytest.mark.parametrize(
    ("manifest", "match"),
    [
        ({"extra": {"gate_scale": "a"}}, "extra.gate_scale 'a', which is no scale; correct it"),
        ({"extra": {"gate_scale": -1}}, "extra.gate_scale -1, which is no scale"),
        ({"extra": {"gate_scale": True}}, "extra.gate_scale True, which is no scale"),
        ({"extra": {"gate_scale": 10**400}}, "which is no scale"),
        ({"extra": [1]}, "`extra` is not an object; make the folder again"),
        ("[" * 100_000, "is damaged"),
        ({"files": {"config.json": {"bytes": 1, "sha256": 5}}}, ""),
        ({"files": {"x" * 5000: {"bytes": 1, "sha256": "5"}}}, ""),
    ],
)
def test_damaged_manifests_of_the_input(
    manifest: Any, match: str, model: dict[str, Path], tmp_path: Path
) -> None:
    folder = copy(model["single"], tmp_path / "in")
    if isinstance(manifest, dict):
        manifest = json.dumps({"kind": "hf-model", "content_hash": "x", "files": {}} | manifest)
    (folder / "manifest.json").write_text(manifest)
    if match:
        refused(folder, match)
    else:
        scale(folder, tmp_path / "out")
        artifact.verify(tmp_path / "out")


def test_deepspeed_with_model_parallelism_says_the_way_out(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / "zero").mkdir(parents=True)
    for rank in range(2):
        torch.save({"module": {}}, folder / f"mp_rank_{rank:02}_model_states.pt")
    refused(folder, r"split by model parallelism \(2 ranks\).*zero_to_fp32")
    for rank in range(2):
        (folder / f"mp_rank_{rank:02}_model_states.pt").unlink()
    torch.save(
        {"param_shapes": [{"a.A_log": 3}]}, folder / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    )
    refused(folder, "`param_shapes` are not names and shapes")
    torch.save(
        {"param_shapes": [{"../x.A_log": torch.Size([3])}]},
        folder / "zero_pp_rank_0_mp_rank_00_model_states.pt",
    )
    refused(folder, "no gate to scale")


@pytest.mark.parametrize("ending", ["A_log", "dt_bias"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_gates_that_are_not_finite(
    ending: str, value: float, model: dict[str, Path], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    folder = copy(model["single"], tmp_path / "in")
    state = load_file(folder / "model.safetensors")
    name = next(n for n in state if n.endswith(ending))
    state[name][0] = value
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    refused(folder, rf"{name} holds values that are not finite; fetch it again")


@pytest.mark.parametrize("fault", ["a tensor twice", "the other shard", "no shard"])
def test_shards_of_pickles_and_their_index_agree(
    fault: str, model: dict[str, Path], tmp_path: Path
) -> None:
    """Else the gate that is edited is not the one that a loader takes."""
    folder = copy(model["bin"], tmp_path / "in")
    state = torch.load(folder / "pytorch_model.bin", weights_only=True)
    (folder / "pytorch_model.bin").unlink()
    shards = {n: f"{'ab'[i % 2]}.bin" for i, n in enumerate(state)}
    parts = {s: {n: t.clone() for n, t in state.items() if shards[n] == s} for s in shards.values()}
    gate = next(n for n in state if n.endswith("A_log"))
    index = dict(shards)

    def write() -> None:
        for name, part in parts.items():
            torch.save(part, folder / name)
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))

    write()
    assert len(find.find_gates(folder).gates) == 3
    if fault == "a tensor twice":
        parts["a.bin"][gate] = parts["b.bin"][gate] = state[gate].clone()
    elif fault == "the other shard":
        index[gate] = "b.bin" if shards[gate] == "a.bin" else "a.bin"
    else:
        index["backbone.layers.9.mixer.A_log"] = "a.bin"
    write()
    refused(folder, "is in a.bin and b.bin|but it is not; fetch it again")
