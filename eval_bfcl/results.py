"""Answers on disk, in BFCL's own result layout, growing line by line and resumable by id.

OUT/run.json                                what is being asked, of which model
OUT/pool_size=24/seed=0/result/<model>/non_live/BFCL_v4_simple_python_result.json
OUT/pool_size=24/seed=0/prompts.jsonl.gz    the prompts as the model saw them
OUT/pool_size=24/seed=0/failures.jsonl      what the machinery failed at, never an answer
OUT/run.lock                                held by the process that fills the folder
OUT/manifest.json                           last of all
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from gatewright import artifact, bfcl, json_lines
from gatewright.errors import UserError

RUN = "run.json"
LOCK = "run.lock"


def label_of(model: str) -> str:
    """Return a model's name for the result layout: without `_`, which BFCL reads as `/`."""
    return Path(model).name.replace("_", "-") or "model"


def check_label(label: str) -> None:
    """Refuse a name that would lead out of the result folder.

    Raises:
        UserError: the label is no file name.
    """
    if label in ("", ".", "..") or any(c in label for c in "/\0\n"):
        raise UserError(
            f"--name {label!r}: is no name for a file; give one without slashes, like my-model"
        )


def model_facts(folder: Path) -> dict[str, Any]:
    """Return what the report needs to know of a Hugging Face model folder.

    `gate_scale` is what the folder's manifest records; if it records none, 1.0 for a Mamba-2 and
    null for other models.  `sft_seed` is the seed of the stage that wrote the folder.

    Raises:
        UserError: the folder has no config.json, or its manifest is of another kind or damaged.
    """
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise UserError(
            f"--model {folder}: has no config.json; give a Hugging Face model folder "
            "(python -m tools.convert CKPT --to hf makes one)"
        )
    config = _read_object(config_file, "--model")
    family = str(config.get("model_type", "unknown"))
    manifest: Mapping[str, Any] = {}
    if (folder / artifact.MANIFEST).is_file():
        manifest = artifact.read_manifest(folder, "hf-model", flag="--model")
        artifact.require_whole(folder, "--model", (".safetensors",))
    context = config.get("max_position_embeddings")
    if context is not None and (not isinstance(context, int) or context < 1):
        raise UserError(
            f"--model {config_file}: max_position_embeddings {context!r} is no positive number"
        )
    scale = 1.0 if family == "mamba2" else None
    if "gate_scale" in (manifest.get("extra") or {}):
        artifact.require_extra(folder, manifest, {"gate_scale": (float, type(None))})
        scale = manifest["extra"]["gate_scale"]
    if wrong := artifact.wrong_type(seed := manifest.get("seed"), (int, type(None))):
        raise UserError(f"--model {folder / artifact.MANIFEST}: seed is {wrong}")
    return {
        "family": family,
        "gate_scale": scale,
        "sft_seed": seed,
        "context_tokens": context,
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
        with self.writing():
            self.out.mkdir(parents=True, exist_ok=True)
            self._refuse_finished()
            held = {path.name for path in self.out.iterdir()}
            if held and not held & {RUN, LOCK}:
                raise UserError(f"--out {self.out} is not empty: choose another folder")
            # Only who holds the lock looks at run.json: two that begin at once are told apart.
            self._lock()
            self._refuse_finished()
            path = self.out / RUN
            if path.is_file():
                self._compare(_read_object(path, "--out"), json.loads(json.dumps(run)))
            else:
                artifact.write_json(path, run)

    def _refuse_finished(self) -> None:
        if (self.out / artifact.MANIFEST).is_file():
            raise UserError(
                f"--out {self.out} is already finished: remove it or choose another folder"
            )

    def _compare(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        keys = dict.fromkeys([*now, *before])  # causes before the hashes that follow from them
        for key in sorted(keys, key=lambda key: key.endswith("_hash")):
            if before.get(key) != now.get(key):
                what = f"{key} = {before.get(key)!r}, not {now.get(key)!r}"
                if key == "prompts_hash":
                    what = (
                        "other prompts, although all flags are the same: the model's chat "
                        "template or tokenizer, or this program, has changed"
                    )
                raise UserError(
                    f"--out {self.out} was begun with {what}: remove it or choose another folder"
                )

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turn what the disk refuses into one line; what is written so far stays resumable."""
        try:
            yield
        except OSError as e:
            raise UserError(
                f"--out {self.out}: cannot be written ({e.strerror}); what it holds stays as it "
                "is: mend that and run the same command again, or choose another folder"
            ) from e

    def _lock(self) -> None:
        """Keep a second process from answering the same questions into the same files.

        The lock ends with the process, however it ends; its file stays and is never replaced.
        """
        path = self.out / LOCK
        self._held = open(path, "ab")  # noqa: SIM115 (closed by `close`)
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

    def done(self, cell: str, asked: Collection[str]) -> set[str]:
        """Return the ids that are answered, after cutting off a line that a crash left short.

        Raises:
            UserError: an answer belongs to no question that is asked.
        """
        path = self.file(cell)
        if not path.is_file():
            return set()
        rows, whole = read_answers(path)
        for number, row in enumerate(rows, start=1):
            if row["id"] not in asked:
                raise UserError(
                    f"{path}:{number}: answers {row['id']}, which is not asked; remove the line"
                )
        if not whole:
            self._replace(path, _lines(rows))
        return {row["id"] for row in rows}

    def append(self, cell: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add answers; each line is on its way to the disk before the next batch begins."""
        path = self.file(cell)
        with self.writing():
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "ab") as f:
                f.write(_lines(rows))

    def write_prompts(self, cell: str, prompts: Mapping[str, str]) -> None:
        lines = _lines([{"id": i, "prompt": p} for i, p in prompts.items()])
        self._replace(self.out / cell / "prompts.jsonl.gz", gzip.compress(lines, mtime=0))

    def write_failures(self, cell: str, failures: Mapping[str, str]) -> None:
        path = self.out / cell / "failures.jsonl"
        if failures:
            self._replace(path, _lines([{"id": i, "error": e} for i, e in failures.items()]))
        else:
            path.unlink(missing_ok=True)

    def sort(self, cell: str, order: Sequence[str]) -> None:
        """Put a finished cell's answers into the order of its questions."""
        path = self.file(cell)
        if path.is_file():
            place = {id: i for i, id in enumerate(order)}
            rows, _ = read_answers(path)
            self._replace(path, _lines(sorted(rows, key=lambda r: place[r["id"]])))

    def _replace(self, path: Path, content: bytes) -> None:
        """Write a file so that a full disk leaves the one before, not half of this one."""
        tmp = path.with_suffix(".tmp")
        with self.writing():
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                tmp.write_bytes(content)
                os.replace(tmp, path)
            finally:
                tmp.unlink(missing_ok=True)


def _lines(rows: Sequence[Mapping[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _read_object(path: Path, flag: str) -> dict[str, Any]:
    """Return the object that a JSON file holds.

    Args:
        flag: what named its folder, for the error message.

    Raises:
        UserError: the file holds something else.
    """
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as e:
        raise UserError(f"{flag} {path}: is not JSON ({e}); make the folder again") from e
    if not isinstance(value, dict):
        raise UserError(f"{flag} {path}: is not a JSON object; make the folder again")
    return value


def read_answers(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """Return the rows of a result file, and whether its last line is whole.

    Raises:
        UserError: a line other than the last is damaged, or an id stands twice.
    """
    *lines, rest = path.read_bytes().split(b"\n")
    rows: list[dict[str, Any]] = []
    seen: set[str] = set()
    for number, row in json_lines.rows(lines, path, "remove the line"):
        id = row.get("id")
        if not isinstance(id, str):
            raise UserError(f"{path}:{number}: is no result row with an id; remove the line")
        if id in seen:
            raise UserError(f"{path}:{number}: answers {id} a second time; remove one")
        seen.add(id)
        rows.append(row)
    return rows, not rest
