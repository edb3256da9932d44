"""Answers on disk, in BFCL's own result layout, growing line by line and resumable by id.

OUT/run.json                                what is being asked, of which model
OUT/pool_size=24/seed=0/result/<model>/non_live/BFCL_v4_simple_python_result.json
OUT/pool_size=24/seed=0/prompts.jsonl.gz    the prompts as the model saw them
OUT/pool_size=24/seed=0/failures.jsonl      what the machinery failed at, never an answer
OUT/manifest.json                           last of all
"""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from eval_bfcl.pools import write_jsonl
from gatewright import artifact, bfcl
from gatewright.errors import UserError

RUN = "run.json"


def label_of(model: str) -> str:
    """Return a model's name for the result layout: without `_`, which BFCL reads as `/`."""
    return Path(model).name.replace("_", "-") or "model"


def model_facts(folder: Path) -> dict[str, Any]:
    """Return what the report needs to know of a Hugging Face model folder.

    `gate_scale` is what the folder's manifest records; if it records none, 1.0 for a Mamba-2 and
    null for other models.  `sft_seed` is the seed of the stage that wrote the folder.

    Raises:
        UserError: the folder has no config.json, or its manifest is of another kind.
    """
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise UserError(
            f"--model {folder}: has no config.json; give a Hugging Face model folder "
            "(python -m tools.convert CKPT --to hf makes one)"
        )
    try:
        config = json.loads(config_file.read_text())
    except json.JSONDecodeError as e:
        raise UserError(f"{config_file}: is not JSON ({e.msg})") from e
    family = str(config.get("model_type", "unknown"))
    manifest: Mapping[str, Any] = {}
    if (folder / artifact.MANIFEST).is_file():
        manifest = artifact.read_manifest(folder, "hf-model", flag="--model")
        artifact.require_whole(folder, "--model", (".safetensors",))
    unscaled = 1.0 if family == "mamba2" else None
    scale = manifest.get("extra", {}).get("gate_scale", unscaled)
    return {
        "family": family,
        "gate_scale": scale,
        "sft_seed": manifest.get("seed"),
        "context_tokens": config.get("max_position_embeddings"),
    }


def base_name(label: str) -> str:
    """Return a label without its gate scale and seed (`mamba2-s0.5-seed1` -> `mamba2`)."""
    return re.sub(r"-(s\d+(\.\d+)?|seed\d+|sft)(?=-|$)", "", label) or label


class Results:
    """The growing folder of one model's answers to one pools folder."""

    def __init__(self, out: Path, label: str, split: str) -> None:
        self.out = out
        self.label = label
        self.split = split
        self._held: BinaryIO | None = None

    def begin(self, run: Mapping[str, Any]) -> None:
        """Make the folder, or continue one that was begun with the same settings.

        Raises:
            UserError: the folder is finished, foreign, was begun with other settings, or another
                process is filling it.
        """
        text = json.loads(json.dumps(run))
        path = self.out / RUN
        if (self.out / artifact.MANIFEST).is_file():
            raise UserError(
                f"--out {self.out} is already finished: remove it or choose another folder"
            )
        if path.is_file():
            before = json.loads(path.read_text())
            for key in {*before, *text}:
                if before.get(key) != text.get(key):
                    raise UserError(
                        f"--out {self.out} was begun with {key} = {before.get(key)!r}, not "
                        f"{text.get(key)!r}: remove it or choose another folder"
                    )
        elif self.out.exists() and any(self.out.iterdir()):
            raise UserError(f"--out {self.out} is not empty: choose another folder")
        else:
            self.out.mkdir(parents=True, exist_ok=True)
            artifact.write_json(path, run)
        self._lock(path)

    def _lock(self, path: Path) -> None:
        """Keep a second process from answering the same questions into the same files.

        The lock ends with the process, however it ends.
        """
        self._held = open(path, "rb")  # noqa: SIM115 (closed by `close`)
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise UserError(
                f"--out {self.out}: another process is filling it; wait for its end"
            ) from e
        except OSError as e:  # a file system without locks
            print(f"{path}: cannot be locked ({e}); start no second run with this --out")

    def close(self) -> None:
        """Let other processes continue the folder."""
        if self._held is not None:
            self._held.close()

    def file(self, cell: str) -> Path:
        return bfcl.result_file(self.out / cell / "result", self.label, self.split)

    def done(self, cell: str) -> set[str]:
        """Return the ids that are answered, after cutting off a line that a crash left short."""
        path = self.file(cell)
        if not path.is_file():
            return set()
        rows, whole = read_answers(path)
        if not whole:
            _replace(path, rows)
        return {row["id"] for row in rows}

    def append(self, cell: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add answers; each line is on its way to the disk before the next batch begins."""
        path = self.file(cell)
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8") as f:
            f.writelines(json.dumps(row) + "\n" for row in rows)

    def write_prompts(self, cell: str, prompts: Mapping[str, str]) -> None:
        folder = self.out / cell
        folder.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps({"id": i, "prompt": p}) + "\n" for i, p in prompts.items())
        (folder / "prompts.jsonl.gz").write_bytes(gzip.compress(text.encode(), mtime=0))

    def write_failures(self, cell: str, failures: Mapping[str, str]) -> None:
        path = self.out / cell / "failures.jsonl"
        path.unlink(missing_ok=True)
        if failures:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_jsonl(path, ({"id": i, "error": e} for i, e in failures.items()))

    def sort(self, cell: str, order: Sequence[str]) -> None:
        """Put a finished cell's answers into the order of its questions."""
        path = self.file(cell)
        if path.is_file():
            place = {id: i for i, id in enumerate(order)}
            rows, _ = read_answers(path)
            _replace(path, sorted(rows, key=lambda r: place[r["id"]]))


def read_answers(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """Return the rows of a result file, and whether its last line is whole.

    Raises:
        UserError: a line other than the last is damaged, or an id stands twice.
    """
    lines = path.read_bytes().split(b"\n")
    whole = lines[-1] == b""
    rows: list[dict[str, Any]] = []
    seen: set[str] = set()
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = json.loads(line)
            id = row["id"]
        except (ValueError, KeyError, TypeError) as e:
            raise UserError(f"{path}:{number}: is not a result row; remove the line") from e
        if id in seen:
            raise UserError(f"{path}:{number}: answers {id} a second time; remove one")
        seen.add(id)
        rows.append(row)
    return rows, whole


def _replace(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    tmp = path.with_suffix(".tmp")
    tmp.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    os.replace(tmp, path)
