"""Conversion in every direction: equal logits in the engines, equal bytes on the way back."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gatewright import artifact
from gatewright.checkpoints import convert, opening, parity, safetensors_files
from gatewright.checkpoints.models_on_disk import model_config
from gatewright.errors import UserError
from gatewright.gates import edits, find, rewrite
from tests.gatewright.checkpoints import small_models
from tests.gatewright.checkpoints.small_models import VARIANTS

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A Hugging Face folder and a Megatron run of every variant."""
    root = tmp_path_factory.mktemp("models")
    folders = {}
    for name, model in VARIANTS.items():
        folders[f"hf/{name}"] = small_models.save_huggingface(root / "hf" / name, model)
        folders[f"megatron/{name}"] = small_models.save_megatron(root / "meg" / name, model)
    return folders


def raw_tensors(folder: Path) -> dict[str, bytes]:
    """Name -> type, shape and bytes of every tensor of a Hugging Face folder."""
    opened = opening.open_checkpoint(folder)
    return {
        n: f"{t.dtype}{t.shape}".encode() + opened.read(t).tobytes()
        for n, t in opened.tensors.items()
    }


def megatron_logits(run: Path) -> torch.Tensor:
    opened = opening.open_checkpoint(run / (run / "latest").read_text().strip())
    return parity.logits(opened, model_config(opened))


def transformers_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(input_ids=tokens).logits


@pytest.mark.parametrize("variant", VARIANTS)
def test_megatron_to_hugging_face_keeps_the_logits(
    variant: str, made: dict[str, Path], tmp_path: Path
) -> None:
    source = made[f"megatron/{variant}"]
    done = convert.convert(source, "hf", tmp_path / "out", check=False)
    expected = megatron_logits(source)
    found = transformers_logits(tmp_path / "out", parity.check_tokens(VARIANTS[variant]))
    assert expected.std() > 1e-3  # a model that says nothing would agree with anything
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert done.model == VARIANTS[variant]
    manifest = artifact.read_manifest(tmp_path / "out", "hf-model")
    assert manifest["extra"]["parameters"] == VARIANTS[variant].parameters()
    artifact.verify(tmp_path / "out")


@pytest.mark.parametrize("variant", VARIANTS)
def test_hugging_face_to_megatron_keeps_the_logits_and_comes_back_byte_for_byte(
    variant: str, made: dict[str, Path], tmp_path: Path
) -> None:
    source = made[f"hf/{variant}"]
    convert.convert(source, "megatron", tmp_path / "run", check=False)
    artifact.read_manifest(tmp_path / "run", "pretrain")
    expected = transformers_logits(source, parity.check_tokens(VARIANTS[variant]))
    torch.testing.assert_close(megatron_logits(tmp_path / "run"), expected, atol=1e-4, rtol=0)
    convert.convert(tmp_path / "run", "hf", tmp_path / "back", check=False, max_shard_bytes=20_000)
    assert raw_tensors(tmp_path / "back") == raw_tensors(source)
    shards = list((tmp_path / "back").glob("model-*-of-*.safetensors"))
    assert len(shards) > 2
    assert all(s.stat().st_size < 24_000 for s in shards)


def test_the_check_is_on_by_default_and_records_the_difference(
    made: dict[str, Path], tmp_path: Path
) -> None:
    done = convert.convert(made["hf/mamba2-g2"], "megatron", tmp_path / "run")
    assert done.parity is not None
    assert done.parity.max_difference < 1e-4
    manifest = artifact.read_manifest(tmp_path / "run")
    assert manifest["extra"]["max_logit_difference"] == done.parity.max_difference


def test_the_check_refuses_a_wrong_conversion(
    made: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Swap two gates on the way: the logits differ, nothing is written."""
    right = convert.hf_views

    def swapped(*args: object) -> dict:  # type: ignore[type-arg]
        views = right(*args)  # type: ignore[arg-type]
        a, b = "backbone.layers.0.mixer.D", "backbone.layers.0.mixer.A_log"
        views[a], views[b] = views[b], views[a]
        return views

    monkeypatch.setattr(convert, "hf_views", swapped)
    with pytest.raises(UserError, match="logits of the converted model differ"):
        convert.convert(made["megatron/mamba2-g1"], "hf", tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("variant", ["mamba2-g2", "mamba2-g2-tied"])
def test_mamba_ssm_both_ways(variant: str, made: dict[str, Path], tmp_path: Path) -> None:
    source = made[f"hf/{variant}"]
    convert.convert(source, "mamba_ssm", tmp_path / "ssm", check=False)
    state = torch.load(tmp_path / "ssm" / "pytorch_model.bin", weights_only=True)
    config = json.loads((tmp_path / "ssm" / "config.json").read_text())
    assert config["ssm_cfg"]["layer"] == "Mamba2"
    assert config["ssm_cfg"]["ngroups"] == 2
    assert state["backbone.embedding.weight"].shape == (96, 32)
    assert "lm_head.weight" in state  # mamba_ssm's loader is strict, tied or not
    if VARIANTS[variant].tie_embeddings:
        assert torch.equal(state["lm_head.weight"], state["backbone.embedding.weight"])
    convert.convert(tmp_path / "ssm", "hf", tmp_path / "back", check=False)
    assert raw_tensors(tmp_path / "back") == raw_tensors(source)
    convert.convert(tmp_path / "ssm", "megatron", tmp_path / "run", check=False)
    expected = transformers_logits(source, parity.check_tokens(VARIANTS[variant]))
    torch.testing.assert_close(megatron_logits(tmp_path / "run"), expected, atol=1e-4, rtol=0)


def test_a_published_mamba_ssm_checkpoint_is_read_as_its_engine_reads_it(
    made: dict[str, Path], tmp_path: Path
) -> None:
    """state-spaces' own config: defaults left out, vocabulary padded to a multiple."""
    from safetensors.torch import load_file

    state = load_file(made["hf/mamba2-g2-tied"] / "model.safetensors")
    state["backbone.embedding.weight"] = state.pop("backbone.embeddings.weight")
    state["lm_head.weight"] = state["backbone.embedding.weight"]
    folder = tmp_path / "mamba2"
    folder.mkdir()
    torch.save(state, folder / "pytorch_model.bin")
    config = {
        "d_model": 32,
        "d_intermediate": 0,
        "n_layer": 2,
        "vocab_size": 91,
        "ssm_cfg": {"layer": "Mamba2", "d_state": 8, "headdim": 16, "ngroups": 2},
        "attn_layer_idx": [],
        "attn_cfg": {},
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 16,
        "tie_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    convert.convert(folder, "hf", tmp_path / "out", check=False)
    assert raw_tensors(tmp_path / "out") == raw_tensors(made["hf/mamba2-g2-tied"])
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["vocab_size"] == 96
    assert written["residual_in_fp32"] is True
    assert written["chunk_size"] == 256


def test_bf16_weights_stay_bf16_and_gates_become_fp32_for_training(tmp_path: Path) -> None:
    source = small_models.save_huggingface(
        tmp_path / "hf", VARIANTS["mamba2-g2"], dtype=torch.bfloat16
    )
    convert.convert(source, "megatron", tmp_path / "run", check=False)
    opened = opening.open_checkpoint(tmp_path / "run" / "iter_0000000")
    kinds = {n: opened.shape_and_dtype(n)[1] for n in opened.tensors}  # type: ignore[index]
    assert kinds["decoder.layers.0.mixer.A_log"] == "F32"
    assert kinds["decoder.layers.0.mixer.dt_bias"] == "F32"
    assert kinds["decoder.layers.0.mixer.in_proj.weight.B"] == "BF16"
    original = opening.open_checkpoint(source)
    assert (
        opened.read_float("decoder.layers.1.mixer.A_log").tolist()
        == original.read_float("backbone.layers.1.mixer.A_log").tolist()
    )


LAYOUTS = (("mamba2-g2", 2, 1), ("mamba2-g2", 1, 2), ("llama-gqa", 2, 1))
"""(variant, tensor parallel, pipeline parallel) for two processes."""

RESAVE = """
import json, sys, torch.distributed
from pathlib import Path
from gatewright.models import ModelConfig
from gatewright.megatron import build, checkpoints, distributed
from gatewright.megatron.config import CheckpointConfig, ParallelConfig

def main():
    torch.distributed.init_process_group("gloo")
    for source, out, tensor, pipeline in json.loads(sys.argv[1]):
        sizes = json.loads((Path(source) / "config.json").read_text())
        layout = ParallelConfig(tensor=tensor, pipeline=pipeline)
        with distributed.processes(layout):
            model = build.build_model(ModelConfig(**sizes["model"]), parallel=layout)
            checkpoints.load(Path(source), model)
            saver = checkpoints.Saver(Path(out), CheckpointConfig(), sizes)
            saver.save(model, None, None, step=5, consumed_samples=40)
            saver.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":  # saving starts processes that import this file again
    main()
"""


def test_any_layout_loads_and_is_read_back_byte_for_byte(
    made: dict[str, Path], tmp_path: Path
) -> None:
    """HF -> Megatron, loaded and saved by two processes, -> HF: not a bit changed."""
    cases = []
    for i, (variant, tensor, pipeline) in enumerate(LAYOUTS):
        convert.convert(made[f"hf/{variant}"], "megatron", tmp_path / f"run{i}", check=False)
        (tmp_path / f"split{i}").mkdir()
        source, out = tmp_path / f"run{i}" / "iter_0000000", tmp_path / f"split{i}"
        cases.append([str(source), str(out), tensor, pipeline])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = tmp_path / "resave.py"
    script.write_text(RESAVE)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--master-addr", "127.0.0.1", "--master-port", str(port)),
            *(str(script), json.dumps(cases)),
        ],
        timeout=900,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for i, (variant, _, _) in enumerate(LAYOUTS):
        convert.convert(tmp_path / f"split{i}", "hf", tmp_path / f"back{i}", check=False)
        assert raw_tensors(tmp_path / f"back{i}") == raw_tensors(made[f"hf/{variant}"])


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    """Peak of what numpy and the reader allocate stays near the largest tensor, not the model."""
    import tracemalloc

    model = dataclasses.replace(
        VARIANTS["llama-gqa"], d_model=256, ffn_dim=512, n_layers=12, n_heads=8, vocab_size=512
    )
    source = small_models.save_huggingface(tmp_path / "hf", model)
    total = safetensors_files.SINGLE
    size = (source / total).stat().st_size
    tracemalloc.start()
    convert.convert(source, "megatron", tmp_path / "run", check=False)
    convert.convert(tmp_path / "run", "hf", tmp_path / "back", check=False)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size > 15_000_000
    assert peak < size / 2


def test_a_conversion_keeps_the_stated_gate_scale(made: dict[str, Path], tmp_path: Path) -> None:
    gates = find.find_gates(made["hf/mamba2-g2"])
    half = edits.resolve(edits.Edit("scale", 0.5), gates, {})
    rewrite.write_edits(gates, [half], tmp_path / "half", dts={})
    convert.convert(tmp_path / "half", "megatron", tmp_path / "run", check=False)
    convert.convert(tmp_path / "run", "hf", tmp_path / "of-run", check=False)
    convert.convert(tmp_path / "run" / "iter_0000000", "hf", tmp_path / "of-iter", check=False)
    for name in ("run", "of-run", "of-iter"):
        assert artifact.read_manifest(tmp_path / name)["extra"]["gate_scale"] == 0.5
    again = find.find_gates(tmp_path / "run" / "iter_0000000")
    assert rewrite.gate_scale(again, edits.resolve(edits.Edit("scale", 0.5), again, {})) == 0.25
    convert.convert(made["hf/mamba2-g2"], "megatron", tmp_path / "plain", check=False)
    assert "gate_scale" not in artifact.read_manifest(tmp_path / "plain")["extra"]


def test_bad_inputs_are_one_line(made: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs a Mamba-2"):
        convert.convert(made["hf/llama-gqa"], "mamba_ssm", tmp_path / "x")
    with pytest.raises(UserError, match="holds no weights"):
        convert.convert(tmp_path, "hf", tmp_path / "x")
    with pytest.raises(UserError, match="--to vllm"):
        convert.convert(made["hf/llama-gqa"], "vllm", tmp_path / "x")
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    for name in ("config.json", "model.safetensors"):
        (wrong / name).write_bytes((made["hf/llama-gqa"] / name).read_bytes())
    config = json.loads((wrong / "config.json").read_text())
    (wrong / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    with pytest.raises(UserError, match=r"gate_proj.weight has shape \(48, 32\).*\(64, 32\)"):
        convert.convert(wrong, "megatron", tmp_path / "x", check=False)
    (wrong / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    with pytest.raises(UserError, match="neither mamba2 nor llama"):
        convert.convert(wrong, "megatron", tmp_path / "x")
    assert not (tmp_path / "x").exists()
    for text in ("", "0", "5 parsecs", "-1GB"):
        with pytest.raises(UserError, match="--max-shard-size"):
            convert.parse_size(text)
    assert convert.parse_size("1.5GB") == 1_500_000_000


def test_tokenizer_files_come_along_and_must_fit(made: dict[str, Path], tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    folder = tmp_path / "tokenizer"
    folder.mkdir()
    vocab = {f"t{i}": i for i in range(90)} | {"<|end|>": 90}
    Tokenizer(models.WordLevel(vocab, unk_token="t0")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    source = made["megatron/mamba2-g1"]
    convert.convert(source, "hf", tmp_path / "out", tokenizer=folder, check=False)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eos_token_id"] == 90
    assert config.get("bos_token_id") is None
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"
    manifest = artifact.read_manifest(tmp_path / "out")
    assert set(manifest["parents"]) == {"model", "tokenizer"}
    vocab |= {f"extra{i}": 91 + i for i in range(10)}
    Tokenizer(models.WordLevel(vocab, unk_token="t0")).save(str(folder / "tokenizer.json"))
    with pytest.raises(UserError, match="101 tokens, but the checkpoint has 96"):
        convert.convert(source, "hf", tmp_path / "x", tokenizer=folder, check=False)


def test_another_vocabulary_than_the_run_s_is_refused(
    made: dict[str, Path], tmp_path: Path
) -> None:
    from tokenizers import Tokenizer, models

    def tokenizer(name: str, first: str, template: str = "") -> Path:
        with artifact.create(tmp_path / name, kind="tokenizer") as folder:
            vocab = {f"{first}{i}": i for i in range(80)}
            Tokenizer(models.WordLevel(vocab, unk_token=f"{first}0")).save(
                str(folder / "tokenizer.json")
            )
            (folder / "tokenizer_config.json").write_text("{}")
            (folder / "chat_template.jinja").write_text(template)
        return tmp_path / name

    own, other = tokenizer("own", "t"), tokenizer("other", "u")
    run = tmp_path / "run"
    shutil.copytree(made["megatron/mamba2-g1"], run)
    (run / artifact.MANIFEST).unlink(missing_ok=True)
    artifact.finish(run, kind="pretrain", parents={"tokenizer": own})
    with pytest.raises(UserError, match=r"--tokenizer .*other: its vocabulary.*; name .*own"):
        convert.convert(run, "hf", tmp_path / "x", tokenizer=other, check=False)
    assert not (tmp_path / "x").exists()
    chatty = tokenizer("chatty", "t", "{{ messages }}")
    convert.convert(run, "hf", tmp_path / "out", tokenizer=chatty, check=False)
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"
