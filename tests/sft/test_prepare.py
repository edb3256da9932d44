"""From chats to samples: masks, cutting, determinism, memory, and what is refused."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gatewright import artifact
from gatewright.chat import TEMPLATE, Renderer
from gatewright.errors import UserError
from sft import prepare
from sft.dataset import Samples
from sft.rows import read_row
from tests.sft.material import ROOT, build_tokenizer, call, chat_rows, python_m, tool, write_jsonl


def run(rows: Path, tokenizer: Path, out: Path, **changes: Any) -> Path:
    settings: dict[str, Any] = {"max_pool_size": 4, "context_tokens": 1024, "held_out": 0.0}
    prepare.main(prepare.Args(input=(rows,), tokenizer=tokenizer, out=out, **(settings | changes)))
    return out


def conversation(turns: int) -> dict[str, Any]:
    """Alternating questions, calls, results and answers."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
    for i in range(turns):
        messages += [
            {"role": "user", "content": f"alpha number {i}"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [call("alpha", {"item": str(i)}), call("bravo", {"item": "x"})],
            },
            {"role": "tool", "content": "one"},
            {"role": "tool", "content": "two"},
            {"role": "assistant", "content": f"It is {i}."},
        ]
    return {"messages": messages, "tools": [tool("alpha", "item"), tool("bravo", "item")]}


def spans(ids: Any, mask: Any) -> list[list[int]]:
    """Return the runs of token ids whose mask is 1."""
    found: list[list[int]] = []
    previous = 0
    for token, one in zip(ids, mask, strict=True):
        if one:
            if not previous:
                found.append([])
            found[-1].append(int(token))
        previous = one
    return found


def test_masked_tokens_decode_to_exactly_what_the_assistant_says(
    tokenizer: Path, tmp_path: Path
) -> None:
    rows = [*chat_rows(8), conversation(3)]
    out = run(write_jsonl(tmp_path / "rows.jsonl", rows), tokenizer, tmp_path / "out")
    renderer = Renderer.load(tokenizer)
    samples = Samples(out / "train")
    assert len(samples) == 9
    for i, row in enumerate(rows):
        chat = read_row(json.dumps(row).encode())
        said = [m for m in chat.messages if m["role"] == "assistant"]
        texts = [renderer.tokenizer.decode(s) for s in spans(*samples[i])]
        assert len(texts) == len(said)
        for text, message in zip(texts, said, strict=True):
            assert text.endswith("<|im_end|>")
            parsed = renderer.parse(text)
            wanted = [
                (c["function"]["name"], c["function"]["arguments"])
                for c in message.get("tool_calls", ())
            ]
            assert [(c.name, c.arguments) for c in parsed.calls] == wanted
            if not wanted:
                assert text == message["content"] + "<|im_end|>"


def test_long_chats_are_cut_after_an_assistant_turn(tokenizer: Path, tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl", [conversation(12)])
    whole = Samples(
        run(file, tokenizer, tmp_path / "whole", max_pool_size=2, context_tokens=8192) / "train"
    )
    wanted = spans(*whole[0])
    assert len(wanted) == 24
    renderer = Renderer.load(tokenizer)
    for context in (500, 777, 1000):
        out = run(file, tokenizer, tmp_path / str(context), max_pool_size=2, context_tokens=context)
        ids, mask = Samples(out / "train")[0]
        assert len(ids) <= context
        assert mask[-1] == 1
        found = spans(ids, mask)
        assert 1 <= len(found) < 24
        # Token for token the beginning of the whole chat, ending with a complete turn.
        assert found == wanted[: len(found)]
        assert ids.tolist() == whole[0][0][: len(ids)].tolist()
        assert renderer.tokenizer.decode(found[-1]).endswith("<|im_end|>")
        repairs = artifact.read_manifest(out)["extra"]["rows"]["repairs"]
        assert repairs["cut after an assistant turn to fit the context"] == 1


def test_a_pool_shrinks_before_a_chat_is_lost(tokenizer: Path, tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl", chat_rows(40))
    out = run(file, tokenizer, tmp_path / "out", max_pool_size=12, context_tokens=400)
    extra = artifact.read_manifest(out)["extra"]
    assert extra["rows"]["kept"] == 40
    assert extra["rows"]["repairs"]["pool made smaller to fit the context"] > 5
    assert Samples(out / "train").index["length"].max() <= 400


def test_a_pool_that_shrinks_keeps_its_best_in_either_order(
    tokenizer: Path, tmp_path: Path
) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl", chat_rows(20))
    renderer = Renderer.load(tokenizer)
    shown = []
    for order in ("best-first", "best-last"):
        out = run(
            file, tokenizer, tmp_path / order, max_pool_size=12, context_tokens=400, order=order
        )
        assert "pool made smaller to fit the context" in str(artifact.read_manifest(out)["extra"])
        samples = Samples(out / "train")
        texts = [renderer.tokenizer.decode(samples[i][0]) for i in range(len(samples))]
        shown.append(
            [sorted(re.findall(r'"name": "(\w+)"', t.split("</tools>")[0])) for t in texts]
        )
    assert shown[0] == shown[1]


def test_pools_do_not_change_with_a_files_name(tokenizer: Path, tmp_path: Path) -> None:
    rows = [{k: v for k, v in row.items() if k != "uuid"} for row in chat_rows(20)]
    outs = [
        run(write_jsonl(tmp_path / f"{name}.jsonl", rows), tokenizer, tmp_path / name)
        for name in ("one", "two")
    ]
    assert len({(out / "train/tokens.bin").read_bytes() for out in outs}) == 1


def test_the_same_samples_with_any_number_of_workers(tokenizer: Path, tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl", chat_rows(100))
    one = run(file, tokenizer, tmp_path / "one", held_out=0.1, copies=2)
    two = run(file, tokenizer, tmp_path / "two", held_out=0.1, copies=2, workers=2)
    for name in ("train/tokens.bin", "train/mask.bin", "train/samples.npy", "held_out.jsonl"):
        assert (one / name).read_bytes() == (two / name).read_bytes()
    other = run(file, tokenizer, tmp_path / "other", held_out=0.1, copies=2, seed=1)
    assert (one / "train/tokens.bin").read_bytes() != (other / "train/tokens.bin").read_bytes()


def test_held_out_rows_are_never_trained_on(tokenizer: Path, tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl", chat_rows(100))
    out = run(file, tokenizer, tmp_path / "out", held_out=0.2, copies=3)
    train, held = Samples(out / "train"), Samples(out / "held_out")
    rows = set(train.index["row"].tolist()), set(held.index["row"].tolist())
    assert not rows[0] & rows[1]
    assert len(rows[0] | rows[1]) == 100
    assert 8 <= len(rows[1]) <= 35
    assert len(train) == 3 * len(rows[0])
    with open(out / "held_out.jsonl") as f:
        questions = [json.loads(line) for line in f]
    assert len(questions) == len(rows[1])
    assert all(q["gold"] and q["messages"][-1]["role"] == "user" for q in questions)


def test_pool_sizes_are_recorded_per_sample(tokenizer: Path, tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl", chat_rows(100))
    out = run(file, tokenizer, tmp_path / "out", copies=4)
    sizes = Samples(out / "train").index["pool_size"]
    renderer = Renderer.load(tokenizer)
    ids, _ = Samples(out / "train")[7]
    shown = renderer.tokenizer.decode(ids).split("</tools>")[0].count('"parameters"')
    assert shown == sizes[7]
    assert sorted(set(sizes.tolist())) == [1, 2, 3, 4]
    assert (np.bincount(sizes)[1:] > 60).all()


def test_what_prepare_refuses(tokenizer: Path, tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl", chat_rows(10))
    out = tmp_path / "out"

    def told(**changes: Any) -> str:
        with pytest.raises(UserError) as caught:
            run(changes.pop("rows", file), changes.pop("tokenizer", tokenizer), out, **changes)
        assert not out.exists()
        return str(caught.value)

    assert "--max-pool-size 24" in told(max_pool_size=24)
    assert "10 distinct tools" in told(max_pool_size=24)
    assert "no such file" in told(rows=tmp_path / "none.jsonl")
    bare = build_tokenizer(tmp_path / "bare", None)
    assert "has no chat template" in told(tokenizer=bare)
    unmarked = TEMPLATE.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
    assert "generation" in told(tokenizer=build_tokenizer(tmp_path / "unmarked", unmarked))
    silent = "{% for m in messages %}{% generation %}{% endgeneration %}{{ m.content }}{% endfor %}"
    mute = build_tokenizer(tmp_path / "silent", silent)
    assert "do not hold what the assistant says" in told(tokenizer=mute)
    callless = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    assert "draws no tool call" in told(tokenizer=build_tokenizer(tmp_path / "callless", callless))
    slow = tmp_path / "slow"
    slow.mkdir()
    (slow / "tokenizer.model").touch()
    assert "holds no tokenizer.json" in told(tokenizer=slow)
    answer = {"role": "assistant", "content": "Yes."}
    talk = [{"messages": [row["messages"][0], answer]} for row in chat_rows(2)]
    assert "no usable row offers a tool" in told(rows=write_jsonl(tmp_path / "talk.jsonl", talk))
    tiny = write_jsonl(tmp_path / "tiny.jsonl", chat_rows(1))
    too_long = told(rows=tiny, max_pool_size=1, context_tokens=64)
    assert "first assistant turn beyond the context" in too_long
    assert f"{tiny}:1" in too_long
    bad = chat_rows(1)
    bad[0]["messages"][1]["tool_calls"][0]["function"]["arguments"] = '{"item": '
    broken = write_jsonl(tmp_path / "bad.jsonl", [*chat_rows(3), *bad])
    strict = told(rows=broken, strict=True, max_pool_size=1)
    assert f"{broken}:4: call arguments are not valid JSON" in strict


def test_one_line_and_exit_code_2(tokenizer: Path, tmp_path: Path) -> None:
    bad = chat_rows(1)
    bad[0]["messages"][1]["tool_calls"][0]["function"]["arguments"] = "{item}"
    file = write_jsonl(tmp_path / "bad.jsonl", bad)
    done = python_m(
        "sft.prepare", "--input", file, "--tokenizer", tokenizer, "--max-pool-size", "1",
        "--out", tmp_path / "out",
    )  # fmt: skip
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert len(errors) == 1
    assert f"{file}:1" in errors[0]
    assert "not valid JSON" in errors[0]
    assert not (tmp_path / "out").exists()


def test_embeddings_need_a_row_for_the_largest_id_whatever_the_number_of_tokens(
    tokenizer: Path, tmp_path: Path
) -> None:
    gapped = tmp_path / "gapped"
    shutil.copytree(tokenizer, gapped)
    content = json.loads((gapped / "tokenizer.json").read_text())
    added = content["added_tokens"][-1] | {"id": 700, "content": "<far>"}
    content["added_tokens"].append(added)
    content["model"]["vocab"]["<far>"] = 700
    (gapped / "tokenizer.json").write_text(json.dumps(content))
    loaded = Renderer.load(gapped).tokenizer
    assert len(loaded) < 701
    assert prepare.ids_needed(loaded) == 701
    assert prepare.ids_needed(Renderer.load(tokenizer).tokenizer) == 500


PEAK = """
import resource, sys
from pathlib import Path
from sft import prepare
rows, tokenizer, out = map(Path, sys.argv[1:])
prepare.main(prepare.Args(input=(rows,), tokenizer=tokenizer, out=out, max_pool_size=4))
print("peak", 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_rows(tokenizer: Path, tmp_path: Path) -> None:
    """Ten times the rows, the same tools: whoever kept rows or samples would need 90 MB more."""
    peaks, sizes = [], []
    for factor in (1, 10):
        file = tmp_path / f"{factor}.jsonl"
        with open(file, "w") as f:
            for copy in range(factor):
                for row in chat_rows(500):
                    ballast = {"uuid": f"{row['uuid']}-{copy}", "license": "x" * 20_000}
                    f.write(json.dumps(row | ballast) + "\n")
        done = subprocess.run(
            [sys.executable, "-c", PEAK, file, tokenizer, tmp_path / f"out{factor}"],
            cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "GATEWRIGHT_QUIET": "1"},
            capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout.split()[-1]))
        sizes.append(file.stat().st_size)
    assert sizes[1] - sizes[0] > 90e6
    assert peaks[1] - peaks[0] < 0.2 * (sizes[1] - sizes[0]), peaks
