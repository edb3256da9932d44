import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval_bfcl import report, score, scored
from eval_bfcl.results import Results
from gatewright import artifact
from gatewright.errors import UserError
from tests.eval_bfcl.gold import gold_text, write_results


@pytest.fixture(scope="module")
def whole(pools_1_4: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("scored")
    results = write_results(root / "r", pools_1_4, lambda q, row: gold_text(q), limit=5)
    for cell in ("pool_size=1/seed=0", "pool_size=4/seed=0"):
        prompts = {f"simple_python_{i}": f"prompt {i}\n" for i in range(5)}
        Results(results, "gold", "simple_python").write_prompts(cell, prompts)
    score.main(score.Args(results=results, pools=pools_1_4, out=root / "s"))
    return root / "s"


def damage(folder: Path, change: Callable[[bytes], bytes], name: str = "scores.jsonl") -> None:
    """Change a file, and its size in the manifest: only its content can tell."""
    path = folder / name
    path.write_bytes(change(path.read_bytes()))
    manifest = json.loads((folder / artifact.MANIFEST).read_text())
    manifest["files"][name]["bytes"] = path.stat().st_size
    (folder / artifact.MANIFEST).write_text(json.dumps(manifest))


def test_a_whole_folder_is_read(whole: Path) -> None:
    facts, rows = scored.load(whole)
    assert facts["model"] == "gold"
    assert (facts["style"], facts["max_new_tokens"]) == ("hermes", None)
    assert len(rows) == 10
    assert set(scored.FIELDS) <= set(rows[0])
    assert scored.read_prompts(whole, 4, 0)["simple_python_3"] == "prompt 3\n"
    assert scored.read_prompts(whole, 8, 0) == {}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda b: b"".join(b.splitlines(keepends=True)[:7]), None),
        (lambda b: b"", "scores.jsonl: is empty"),
        (
            lambda b: b + b.splitlines()[0] + b"\n",
            r"jsonl:11: .*'simple_python_0', 1, 0\) a second",
        ),
        (lambda b: b.replace(b'"correct"', b'"korrect"', 1), "jsonl:1: unknown outcome 'korrect'"),
        (
            lambda b: b.replace(b'"outcome": "correct", ', b"", 1),
            "jsonl:1: lacks the field outcome",
        ),
        (lambda b: b.replace(b'"k": 1', b'"k": "1"', 1), "jsonl:1: k is '1', not a whole number"),
        (lambda b: b.replace(b'"seed": 0', b'"seed": false', 1), "jsonl:1: seed is False, not a"),
        (lambda b: b.replace(b'"k": 1', b'"k": -1', 1), "jsonl:1: k is -1, not a pool size"),
        (
            lambda b: b.replace(b'"prompt_tokens": null', b'"prompt_tokens": NaN', 1),
            r"jsonl:1: is not JSON \(NaN is not JSON\)",
        ),
        (
            lambda b: re.sub(rb'"raw_chars": \d+', b'"raw_chars": "9"', b, count=1),
            "jsonl:1: raw_chars is '9', not a whole number",
        ),
        (
            lambda b: b.replace(b'"calls": [', b'"calls": [3, ', 1),
            "jsonl:1: calls holds what is no",
        ),
        (lambda b: b.replace(b'"names": [', b'"names": [7, ', 1), "jsonl:1: names holds what is"),
        (
            lambda b: b.replace(b"python_0", b"python_900", 1),
            "'simple_python_900' is not in simple",
        ),
        (lambda b: b + b'{"id": "\xff"}\n', r"jsonl:11: is not JSON \('utf-8' codec"),
        (lambda b: b + b'{"id": ' + b"[" * 100_000 + b"\n", r"jsonl:11: is not JSON"),
        (lambda b: b"\n" + b, r"jsonl:1: is not JSON \(Expecting value\)"),
        (lambda b: b + b"[]\n", r"jsonl:11: is not a JSON object"),
    ],
)
def test_damaged_scores_are_refused_in_one_line(
    whole: Path, tmp_path: Path, change: Callable[[bytes], bytes], said: str | None
) -> None:
    folder = tmp_path / "s"
    shutil.copytree(whole, folder)
    if said is None:
        path = folder / "scores.jsonl"
        path.write_bytes(change(path.read_bytes()))
        with pytest.raises(UserError, match=r"--scores .*scores.jsonl: has .* bytes, not the"):
            scored.load(folder)
        return
    damage(folder, change)
    with pytest.raises(UserError, match=said) as e:
        scored.load(folder)
    assert str(e.value).endswith("run eval_bfcl.score again")
    assert "\n" not in str(e.value)


def test_a_damaged_prompt_file_leaves_no_report_behind(whole: Path, tmp_path: Path) -> None:
    folder, name = tmp_path / "s", "pool_size=1/seed=0/prompts.jsonl.gz"
    shutil.copytree(whole, folder)
    damage(folder, lambda b: b[:-12], name)
    with pytest.raises(UserError, match=r"prompts.jsonl.gz: is damaged .*eval_bfcl.score again"):
        report.main(report.Args(scores=(folder,), out=tmp_path / "r"))
    assert [p.name for p in tmp_path.iterdir()] == ["s"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda extra: extra.pop("base"), "has no extra.base "),
        (lambda extra: extra.pop("pools"), "has no extra.pools "),
        (lambda extra: extra["pools"].pop("beta"), "has no extra.pools.beta "),
        (lambda extra: extra.update(pools="x"), "extra.pools is 'x', not an object"),
        (lambda extra: extra.update(base=None), "extra.base is None, not text"),
        (lambda extra: extra.update(gate_scale=[1]), r"extra.gate_scale is \[1\], not a number"),
        (lambda extra: extra.update(gate_scale=math.nan), "extra.gate_scale is nan, not a number"),
        (lambda extra: extra.update(sft_seed="0"), "extra.sft_seed is '0', not a whole number"),
        (lambda extra: extra.update(backend=["x"]), r"extra.backend is \['x'\], not text or null"),
        (lambda extra: extra.update(state=[4]), r"extra.state is \[4\], not an object"),
        (lambda extra: extra.update(state={"d": 4}), ".*extra.state is damaged"),
    ],
)
def test_a_manifest_without_a_field_is_named(
    whole: Path, tmp_path: Path, change: Callable[[dict[str, Any]], Any], said: str
) -> None:
    folder = tmp_path / "s"
    shutil.copytree(whole, folder)
    manifest = json.loads((folder / artifact.MANIFEST).read_text())
    change(manifest["extra"])
    (folder / artifact.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=rf"manifest.json: {said}.*eval_bfcl.score"):
        scored.load(folder)
