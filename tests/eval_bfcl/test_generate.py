import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from eval_bfcl import generate, local_model, pools
from eval_bfcl.backend import Answer, Failure
from eval_bfcl.prompting import Request
from gatewright import artifact, bfcl
from gatewright.errors import UserError

ROOT = Path(generate.__file__).parent.parent


def run(model: Path | str, pools_folder: Path, out: Path, **flags: Any) -> None:
    flags = {"limit": 4, "max_new_tokens": 8, "name": "m", **flags}
    generate.main(generate.Args(model=str(model), pools=pools_folder, out=out, **flags))


def answers(out: Path, k: int = 4, name: str = "m") -> list[dict]:
    path = bfcl.result_file(out / pools.cell_name(k, 0) / "result", name, "simple_python")
    return pools.read_jsonl(path)


@pytest.mark.parametrize("family", ["mamba2", "llama"])
def test_a_model_answers_all_pool_sizes(
    family: str, models: dict[str, Path], pools_1_4: Path, tmp_path: Path
) -> None:
    run(models[family], pools_1_4, tmp_path / "r", name=None)
    label = {"mamba2": "mamba2-s0.5", "llama": "llama"}[family]
    for k in (1, 4):
        rows = answers(tmp_path / "r", k, label)
        assert [r["id"] for r in rows] == [f"simple_python_{n}" for n in range(4)]
        assert all(r["output_token_count"] <= 8 and r["latency"] > 0 for r in rows)
        prompts = [
            json.loads(line)
            for line in gzip.decompress(
                (tmp_path / "r" / pools.cell_name(k, 0) / "prompts.jsonl.gz").read_bytes()
            ).splitlines()
        ]
        assert len(prompts) == 4
        assert prompts[0]["prompt"].count('"name": ') >= k
        assert "area of a triangle" in prompts[0]["prompt"]
    extra = artifact.read_manifest(tmp_path / "r", "bfcl-results")["extra"]
    assert (extra["family"], extra["gate_scale"]) == (
        ("mamba2", 0.5) if family == "mamba2" else ("llama", None)
    )
    assert extra["base"] == family
    assert (extra["questions"], extra["of"]) == (4, 400)
    artifact.verify(tmp_path / "r")


def test_the_gate_scale_is_what_the_manifest_states(tmp_path: Path) -> None:
    """Also of families besides Mamba-2, which scale_gates edits too."""
    for family, stated, expected in (
        ("mamba2", {}, 1.0),
        ("jamba", {"gate_scale": 2.0}, 2.0),
        ("jamba", {}, None),
        ("mamba2", {"gate_scale": None}, None),  # heads scaled differently
    ):
        folder = tmp_path / f"{family}-{expected}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": family}))
        artifact.finish(folder, kind="hf-model", extra=stated)
        assert generate.model_facts(folder)["gate_scale"] == expected


class Flaky:
    """Fails at chosen questions a number of times, as a server would."""

    def __init__(self, times: dict[str, int]) -> None:
        self.times = times
        self.asked: list[str] = []

    def run(self, requests: Sequence[Request]) -> Iterator[tuple[Request, Answer | Failure]]:
        for r in requests:
            self.asked.append(r.id)
            if self.times.get(r.id, 0) > 0:
                self.times[r.id] -= 1
                yield r, Failure("HTTP 503: busy")
            else:
                yield r, Answer("text of " + r.id, 10, 3, 0.1, "stop")


def test_failures_are_retried_and_never_stored(
    models: dict[str, Path],
    pools_1_4: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    flaky = Flaky({"simple_python_1": 2, "simple_python_2": 99})
    monkeypatch.setattr(generate, "make_backend", lambda *a: flaky)
    with pytest.raises(UserError, match="1 of 4 requests failed .*simple_python_2.*HTTP 503"):
        run(models["llama"], pools_1_4, tmp_path / "r", pool_sizes="4", retries=8)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]
    assert flaky.asked[4:7] == ["simple_python_1", "simple_python_2", "simple_python_1"]
    assert flaky.asked.count("simple_python_2") == 9
    assert [r["id"] for r in answers(tmp_path / "r")] == [f"simple_python_{n}" for n in (0, 1, 3)]
    assert not (tmp_path / "r/manifest.json").exists()

    again = Flaky({})  # the same command asks only what is missing
    monkeypatch.setattr(generate, "make_backend", lambda *a: again)
    run(models["llama"], pools_1_4, tmp_path / "r", pool_sizes="4")
    assert again.asked == ["simple_python_2"]
    assert len(answers(tmp_path / "r")) == 4
    assert not (tmp_path / "r/pool_size=4/seed=0/failures.jsonl").exists()


class Refusing:
    """A server that will never take some prompts."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def run(self, requests: Sequence[Request]) -> Iterator[tuple[Request, Answer | Failure]]:
        for r in requests:
            self.asked.append(r.id)
            late = self.asked.count(r.id) < 2 and r.id == "simple_python_3"
            if r.id == "simple_python_1":
                yield r, Failure("HTTP 400: too long", again=False)
            else:
                yield r, Failure("HTTP 503") if late else Answer("text", 1, 1, 0.1, "stop")


def test_what_is_refused_is_not_asked_again(
    models: dict[str, Path], pools_1_4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = Refusing()
    monkeypatch.setattr(generate, "make_backend", lambda *a: refusing)
    flags = {"pool_sizes": "4", "retry_wait_s": 0.0, "accept_failures": True}
    run(models["llama"], pools_1_4, tmp_path / "r", **flags)
    assert refusing.asked == [f"simple_python_{n}" for n in (0, 1, 2, 3, 3)]
    failures = pools.read_jsonl(tmp_path / "r/pool_size=4/seed=0/failures.jsonl")
    assert failures == [{"id": "simple_python_1", "error": "HTTP 400: too long"}]


def test_two_processes_do_not_fill_one_folder(
    models: dict[str, Path], pools_1_4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Nested(Flaky):
        def run(self, requests: Sequence[Request]) -> Iterator[tuple[Request, Answer | Failure]]:
            with pytest.raises(UserError, match="--out .*: another process is filling it"):
                run(models["llama"], pools_1_4, tmp_path / "r")
            yield from super().run(requests)

    monkeypatch.setattr(generate, "make_backend", lambda *a: Nested({}))
    run(models["llama"], pools_1_4, tmp_path / "r")
    assert len(answers(tmp_path / "r")) == 4


def test_failures_can_be_accepted_and_are_named(
    models: dict[str, Path],
    pools_1_4: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generate, "make_backend", lambda *a: Flaky({"simple_python_2": 99}))
    flags = {"pool_sizes": "4", "accept_failures": True, "retries": 0}
    run(models["llama"], pools_1_4, tmp_path / "r", **flags)
    failures = pools.read_jsonl(tmp_path / "r/pool_size=4/seed=0/failures.jsonl")
    assert failures == [{"id": "simple_python_2", "error": "HTTP 503: busy"}]
    assert artifact.read_manifest(tmp_path / "r")["extra"]["failed"] == 1


def test_a_killed_run_continues_and_keeps_its_answers(
    models: dict[str, Path], pools_1_4: Path, tmp_path: Path
) -> None:
    out = tmp_path / "r"
    argv = [sys.executable, "-m", "eval_bfcl.generate", "--model", str(models["llama"])]
    argv += ["--pools", str(pools_1_4), "--out", str(out), "--name", "m", "--limit", "12"]
    argv += ["--max-new-tokens", "8", "--batch-size", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(argv, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
    file = bfcl.result_file(out / "pool_size=4/seed=0/result", "m", "simple_python")
    deadline = time.monotonic() + 600
    while not (file.exists() and file.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = file.read_bytes()
    assert before
    kept = before.split(b"\n")[:-1]
    assert not (out / "manifest.json").exists()
    with open(file, "ab") as f:  # as if the crash had come in the middle of a line
        f.write(b'{"id": "simple_python_11", "resu')
    same = {"limit": 12, "batch_size": 1}
    run(models["llama"], pools_1_4, out, **same)
    rows = answers(out)
    assert [r["id"] for r in rows] == [f"simple_python_{n}" for n in range(12)]
    assert all(json.loads(line) in rows for line in kept)
    run(models["llama"], pools_1_4, tmp_path / "fresh", **same)
    assert [r["result"] for r in rows] == [r["result"] for r in answers(tmp_path / "fresh")]


def test_another_setting_does_not_continue_a_folder(
    models: dict[str, Path],
    pools_1_4: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "r"
    monkeypatch.setattr(generate, "make_backend", lambda *a: Flaky({"simple_python_0": 99}))
    with pytest.raises(UserError, match="requests failed"):
        run(models["llama"], pools_1_4, out, retries=0)
    with pytest.raises(UserError, match="was begun with max_new_tokens = 8, not 9"):
        run(models["llama"], pools_1_4, out, max_new_tokens=9)
    with pytest.raises(UserError, match="was begun with .* = "):
        run(models["mamba2"], pools_1_4, out)
    monkeypatch.setattr(generate, "make_backend", lambda *a: Flaky({}))
    run(models["llama"], pools_1_4, out)
    with pytest.raises(UserError, match="is already finished"):
        run(models["llama"], pools_1_4, out)


def interrupted(model: Path, pools_folder: Path, out: Path, patch: pytest.MonkeyPatch) -> None:
    """Begin a run whose first question fails, and let the next one answer all."""
    patch.setattr(generate, "make_backend", lambda *a: Flaky({"simple_python_0": 99}))
    with pytest.raises(UserError, match="requests failed"):
        run(model, pools_folder, out, retries=0)
    patch.setattr(generate, "make_backend", lambda *a: Flaky({}))


def test_a_run_is_not_continued_with_other_prompts(
    models: dict[str, Path], pools_1_4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest of the model's folder knows nothing of an edited chat template."""
    model = shutil.copytree(models["llama"], tmp_path / "model")
    interrupted(model, pools_1_4, tmp_path / "r", monkeypatch)
    kept = (tmp_path / "r/pool_size=4/seed=0/prompts.jsonl.gz").read_bytes()
    template = model / "chat_template.jinja"
    text = template.read_text()
    template.write_text(text.replace("You can call", "Never call"))
    assert template.read_text() != text
    with pytest.raises(UserError, match="was begun with other prompts, although"):
        run(model, pools_1_4, tmp_path / "r")
    assert (tmp_path / "r/pool_size=4/seed=0/prompts.jsonl.gz").read_bytes() == kept
    template.write_text(text)
    run(model, pools_1_4, tmp_path / "r")


def test_a_run_is_not_continued_in_other_numbers(
    models: dict[str, Path], pools_1_4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    interrupted(models["llama"], pools_1_4, tmp_path / "r", monkeypatch)
    begun = json.loads((tmp_path / "r/run.json").read_text())
    assert (begun["dtype"], begun["device"]) == ("float32", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UserError, match="was begun with device = 'cpu', not 'cuda'"):
        run(models["llama"], pools_1_4, tmp_path / "r")


@pytest.mark.parametrize(
    ("config", "backend", "asked", "expected"),
    [
        ({"dtype": "bfloat16"}, "transformers", "auto", "bfloat16"),
        ({"torch_dtype": "float16"}, "transformers", "auto", "float16"),
        ({}, "transformers", "auto", "float32"),
        ({"dtype": "bfloat16"}, "transformers", "float32", "float32"),
        ({"dtype": "float32"}, "vllm", "auto", "bfloat16"),
        ({"dtype": "float16"}, "vllm", "auto", "float16"),
        ({"dtype": "float32"}, "vllm", "float32", "float32"),
    ],
)
def test_auto_numbers_on_cuda_are_the_checkpoints(
    config: dict[str, str],
    backend: str,
    asked: str,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = local_model.numbers_and_device(tmp_path, backend, asked)
    assert found == (expected, "cuda")


def test_what_config_says_of_the_state_is_read_before_anything_is_asked(
    models: dict[str, Path], pools_1_4: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(models["mamba2"], tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "state_size": 0}))
    with pytest.raises(UserError, match="config.json: its sizes make no state"):
        run(model, pools_1_4, tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_prompts_beyond_the_models_positions(
    models: dict[str, Path],
    pools_1_4: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generate, "make_backend", lambda *a: Flaky({}))
    short = {**generate.model_facts(models["llama"]), "context_tokens": 600}
    monkeypatch.setattr(generate, "model_facts", lambda folder: short)
    with pytest.raises(
        UserError, match=r"of 8 prompts do not fit the model's 600 .* at pool_size=4"
    ):
        run(
            models["llama"],
            pools_1_4,
            tmp_path / "refuse",
            over_context="refuse",
            max_new_tokens=100,
        )
    assert not (tmp_path / "refuse").exists()

    run(models["llama"], pools_1_4, tmp_path / "skip", over_context="skip", max_new_tokens=100)
    failures = pools.read_jsonl(tmp_path / "skip/pool_size=4/seed=0/failures.jsonl")
    assert failures
    assert all("exceeds the context" in f["error"] for f in failures)
    assert len(answers(tmp_path / "skip")) + len(failures) == 4

    run(models["llama"], pools_1_4, tmp_path / "run", max_new_tokens=100)
    rows = answers(tmp_path / "run")
    assert {r["id"] for r in rows if r.get("over_context")} == {f["id"] for f in failures}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"backend": "transfomers"}, "did you mean 'transformers'"),
        ({"limit": 0}, "--limit 0"),
        ({"pool_sizes": "8"}, "--pool-sizes 8: --pools has 1, 4"),
        ({"prompt": "sistem"}, "--prompt sistem .*'system'"),
        ({"style": "xml"}, "--style xml"),
        ({"dtype": "int8"}, "--dtype int8"),
        ({"over_context": "cut"}, "--over-context cut"),
        ({"retries": -1}, "--retries -1"),
        ({"retry_wait_s": float("nan")}, "--retry-wait-s nan"),
        ({"model": "/nowhere"}, "--model /nowhere: no such folder"),
        ({"backend": "openai", "base_url": "localhost"}, "--base-url localhost"),
        (
            {"backend": "openai", "prompt": "system"},
            "--prompt: only --backend transformers or vllm",
        ),
        ({"name": ".."}, "--name '..': is no name for a file"),
        ({"timeout_s": 0.0}, "--timeout-s 0.0"),
        ({"timeout_s": float("inf")}, "--timeout-s inf"),
        ({"concurrency": 2}, "--concurrency: only --backend openai takes it, not transformers"),
    ],
)
def test_bad_flags_are_one_line(
    flags: dict[str, Any],
    message: str,
    models: dict[str, Path],
    pools_1_4: Path,
    tmp_path: Path,
) -> None:
    model = flags.pop("model", models["llama"])
    with pytest.raises(UserError, match=message):
        run(model, pools_1_4, tmp_path / "r", **flags)
    assert not (tmp_path / "r/manifest.json").exists()


def test_folders_of_another_kind_are_refused(pools_1_4: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no config.json"):
        run(pools_1_4, pools_1_4, tmp_path / "r")
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "config.json").write_text('{"model_type": "llama"}')
    artifact.finish(corpus, kind="corpus")
    with pytest.raises(UserError, match="--model .*: is a folder of kind corpus, but kind"):
        run(corpus, pools_1_4, tmp_path / "r")


def test_vllm_is_asked_for_only_where_it_is(
    models: dict[str, Path], pools_1_4: Path, tmp_path: Path
) -> None:
    try:
        import vllm  # noqa: F401
    except ImportError:
        with pytest.raises(UserError, match="--backend vllm: vLLM is not installed"):
            run(models["llama"], pools_1_4, tmp_path / "r", backend="vllm")
        pytest.skip("vLLM is not installed here (extra `gpu`)")
    import torch

    if not torch.cuda.is_available():
        pytest.skip("vLLM needs a CUDA device")
    run(models["llama"], pools_1_4, tmp_path / "v", backend="vllm")
    run(models["llama"], pools_1_4, tmp_path / "t", backend="transformers")
    same = [
        a["result"] == b["result"]
        for a, b in zip(answers(tmp_path / "v"), answers(tmp_path / "t"), strict=True)
    ]
    assert sum(same) >= 3  # bfloat16 kernels may turn a near tie
