"""Read a folder of eval_bfcl.score: checked line by line, because every figure rests on it."""

from __future__ import annotations

import dataclasses
import gzip
import io
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eval_bfcl import ceiling, tally
from eval_bfcl.outcomes import OUTCOMES
from gatewright import artifact, bfcl, json_lines
from gatewright.errors import UserError

AGAIN = "run eval_bfcl.score again"

_TEXT: tuple[type, ...] = (str,)
_MAYBE_TEXT: tuple[type, ...] = (str, type(None))
_NUMBER: tuple[type, ...] = (float, type(None))
_WHOLE: tuple[type, ...] = (int, type(None))
_FLAG: tuple[type, ...] = (bool,)
_ANY: tuple[type, ...] = (object,)
FIELDS: Mapping[str, tuple[type, ...]] = {
    "id": _TEXT,
    "k": (int,),
    "seed": (int,),
    "outcome": _TEXT,
    "called": _MAYBE_TEXT,
    "official_valid": (bool, type(None)),
    "retrieved": _FLAG,
    "injected": _FLAG,
    "gold": _MAYBE_TEXT,
    "gold_rank": _NUMBER,
    "valid_call": _FLAG,
    "defaults_valid": (bool, type(None)),
    "calls": (list,),
    "error_type": _ANY,
    "error": _ANY,
    "names": (list,),
    "raw": _MAYBE_TEXT,
    "prompt_tokens": _NUMBER,
    "new_tokens": _NUMBER,
    "finish": _ANY,
    "over_context": _FLAG,
}
"""What the report reads of a line of scores.jsonl, and its JSON type."""

FACTS: Mapping[str, tuple[type, ...]] = {
    "label": _TEXT,
    "base": _TEXT,
    "family": _TEXT,
    "gate_scale": _NUMBER,
    "split": _TEXT,
    "questions": (int,),
    "of": (int,),
    "pools": (dict,),
    "pools.retriever": _TEXT,
    "pools.beta": _NUMBER,
    "pools.utility": _MAYBE_TEXT,
}
"""What the report reads of the manifest's `extra`, and its JSON type."""
LATER_FACTS: Mapping[str, tuple[type, ...]] = {
    "sft_seed": _WHOLE,
    "state": (dict, type(None)),
    **{name: _MAYBE_TEXT for name in tally.SETTINGS if name != "max_new_tokens"},
    "max_new_tokens": _WHOLE,
}
"""The same for what older folders may lack."""


def load(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the facts and the scores of a folder of eval_bfcl.score.

    Raises:
        UserError: the folder is not finished, of another kind, or damaged.
    """
    folder = Path(folder)
    manifest = artifact.read_manifest(folder, "bfcl-scores", flag="--scores")
    artifact.require_whole(folder, "--scores", ("scores.jsonl",))
    facts = read_facts(folder, manifest)
    known = {q.id for q in bfcl.load_split(facts["split"])}
    path = folder / "scores.jsonl"
    scores: list[dict[str, Any]] = []
    seen: set[tuple[Any, ...]] = set()
    with open(path, "rb") as f:
        for number, row in json_lines.rows(f, path, AGAIN):
            where = f"{path}:{number}"
            _check(row, where)
            key = (row["id"], row["k"], row["seed"])
            if row["id"] not in known:
                raise UserError(f"{where}: id {row['id']!r} is not in {facts['split']}; {AGAIN}")
            if key in seen:
                raise UserError(f"{where}: scores id, k, seed {key} a second time; {AGAIN}")
            seen.add(key)
            row["names"] = list(map(sys.intern, row["names"]))  # runs repeat them
            scores.append(row)
    if not scores:
        raise UserError(f"{path}: is empty; {AGAIN}")
    return facts, scores


def read_facts(folder: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is the same for all answers of a folder of eval_bfcl.generate or .score.

    Raises:
        UserError: its manifest lacks a fact, or has one that was edited or is of another version.
    """
    artifact.require_extra(folder, manifest, FACTS)
    later = {name: types for name, types in LATER_FACTS.items() if name in manifest["extra"]}
    artifact.require_extra(folder, manifest, later)
    facts = tally.run_facts(manifest["extra"])
    try:
        ceiling.predict(facts["state"], 1)
    except (KeyError, TypeError, ValueError, ArithmeticError) as e:
        raise UserError(
            f"{folder / artifact.MANIFEST}: extra.state is damaged ({e}); make the folder again "
            f"with {artifact.MAKERS[manifest['kind']]}"
        ) from e
    return facts


def _check(row: Mapping[str, Any], where: str) -> None:
    for name, types in FIELDS.items():
        if name not in row:
            raise UserError(f"{where}: lacks the field {name}; {AGAIN}")
        if wrong := artifact.wrong_type(row[name], types):
            raise UserError(f"{where}: {name} is {wrong}; {AGAIN}")
    if wrong := artifact.wrong_type(row.get("raw_chars"), _WHOLE):  # older folders lack it
        raise UserError(f"{where}: raw_chars is {wrong}; {AGAIN}")
    if row["k"] < 1:
        raise UserError(f"{where}: k is {row['k']}, not a pool size; {AGAIN}")
    if not all(isinstance(c, dict) and isinstance(c.get("name"), str) for c in row["calls"]):
        raise UserError(f"{where}: calls holds what is no call; {AGAIN}")
    if not all(isinstance(name, str) for name in row["names"]):
        raise UserError(f"{where}: names holds what is not text; {AGAIN}")
    if row["outcome"] not in OUTCOMES:
        raise UserError(f"{where}: unknown outcome {row['outcome']!r}; {AGAIN}")


def read_prompts(folder: Path, k: int, seed: int) -> dict[str, str]:
    """Return question id -> prompt of a scores folder's cell; empty if none were kept.

    Raises:
        UserError: the file is damaged.
    """
    path = folder / f"pool_size={k}" / f"seed={seed}" / "prompts.jsonl.gz"
    if not path.is_file():
        return {}
    try:
        data = gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as e:
        raise UserError(f"{path}: is damaged ({e}); copy the folder again, or {AGAIN}") from e
    out: dict[str, str] = {}
    for number, row in json_lines.rows(io.BytesIO(data), path, AGAIN):
        for name in ("id", "prompt"):
            if not isinstance(row.get(name), str):
                raise UserError(f"{path}:{number}: lacks the field {name}; {AGAIN}")
        out[row["id"]] = row["prompt"]
    return out


@dataclasses.dataclass(frozen=True)
class Source:
    """A scores folder as a report names it: by what it holds, never by where it lay."""

    name: str
    content_hash: str
    git_revision: str | None


def source(folder: Path, name: str) -> Source:
    """Return what makes a report's figures traceable to a scores folder."""
    manifest = artifact.read_manifest(folder, "bfcl-scores", flag="--scores")
    return Source(name, artifact.content_hash(Path(folder)), manifest.get("git_revision"))
