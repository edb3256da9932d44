"""Pools on disk: a cell per (pool size, seed), each with `pools.jsonl` and `tools.jsonl`.

A cell's folder is `pool_size=24/seed=0`.  `pools.jsonl` holds a row per question; the schemas
are found by tool name and question id in `tools.jsonl` beside it: a row with that question's
id if its schema differs from the corpus's, else the row whose `question_id` is null.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gatewright import artifact, bfcl, json_lines
from gatewright.errors import UserError

MAYBE_TEXT: tuple[type, ...] = (str, type(None))
MAYBE_NUMBER: tuple[type, ...] = (float, type(None))
FACTS: Mapping[str, tuple[type, ...]] = {
    "split": (str,),
    "questions": (int,),
    "retriever": (str,),
    "beta": MAYBE_NUMBER,
    "utility": MAYBE_TEXT,
}
"""What a pools folder's manifest says in `extra`, and readers ask of it, with its JSON type."""

FIELDS: Mapping[str, tuple[type, ...]] = {
    "id": (str,),
    "k": (int,),
    "seed": (int,),
    "beta": MAYBE_NUMBER,
    "utility": MAYBE_TEXT,
    "names": (list,),
    "gold": MAYBE_TEXT,
    "gold_rank": (int, type(None)),
    "retrieved": (bool,),
    "injected": (bool,),
    "golds": (list,),
    "gold_ranks": (list,),
}
"""JSON types of a `Row`."""


@dataclasses.dataclass(frozen=True)
class Row:
    """The pool of one question.

    Attributes:
        id: BFCL's question id.
        k, seed: pool size and seed of the cell.
        beta: strength of a Plackett-Luce retriever, null for the others.
        utility: what beta multiplies (minmax, rank, score), null for the others.
        names: tool names in prompt order, best first.
        gold: name of the correct tool; null where no call is right.
        gold_rank: 1-based rank of the correct tool before injection (the worst, if several).
        retrieved: all correct tools stood among the first k.
        injected: a correct tool had to be put in.
        golds, gold_ranks: the same for questions with several correct tools.
    """

    id: str
    k: int
    seed: int
    beta: float | None
    utility: str | None
    names: list[str]
    gold: str | None
    gold_rank: int | None
    retrieved: bool
    injected: bool
    golds: list[str]
    gold_ranks: list[int]


@dataclasses.dataclass(frozen=True)
class Cell:
    """All pools of one (pool size, seed)."""

    name: str
    k: int
    seed: int
    rows: list[Row]
    schemas: dict[tuple[str, str | None], dict[str, Any]]

    def tools(self, row: Row) -> list[dict[str, Any]]:
        """Return the BFCL schemas of a row's pool, in prompt order."""
        return [
            self.schemas.get((name, row.id)) or self.schemas[(name, None)] for name in row.names
        ]


def cell_name(k: int, seed: int) -> str:
    return f"pool_size={k}/seed={seed}"


def write_jsonl(path: Path, rows: Iterable[Any]) -> None:
    with open(path, "w", encoding="utf-8") as f:
        for row in rows:
            value = dataclasses.asdict(row) if dataclasses.is_dataclass(row) else row  # type: ignore[arg-type]
            f.write(json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n")


def read_jsonl(path: Path, again: str = "make the folder again") -> list[dict[str, Any]]:
    """Return the rows of a JSON-lines file.

    Args:
        again: the way out, for the error message.

    Raises:
        UserError: the file is missing or a line is not a JSON object (the line is named).
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file; {again}")
    with open(path, "rb") as f:
        return [row for _, row in json_lines.rows(f, path, again)]


def load(folder: Path) -> tuple[dict[str, Any], list[Cell]]:
    """Return a pools folder's manifest and its cells, smallest pool first.

    Raises:
        UserError: the folder is not finished, not of pools, or a file in it is damaged.
    """
    manifest = artifact.read_manifest(folder, "pools", flag="--pools")
    artifact.require_extra(folder, manifest, FACTS)
    artifact.require_whole(folder, "--pools", (".jsonl",))
    known = {q.id for q in bfcl.load_split(manifest["extra"]["split"])}
    cells = [
        _read_cell(path, known)
        for path in sorted(Path(folder).glob("pool_size=*/seed=*/pools.jsonl"))
    ]
    if not cells:
        raise UserError(f"--pools {folder}: holds no pool_size=K/seed=S/pools.jsonl")
    return manifest, sorted(cells, key=lambda c: (c.k, c.seed))


def _read_cell(path: Path, known: Collection[str]) -> Cell:
    """Return the cell of a `pools.jsonl` and the `tools.jsonl` beside it.

    Raises:
        UserError: a line is not what build_pools writes, or asks a question that is not `known`.
    """
    again = f"build the pools again ({artifact.MAKERS['pools']})"
    schemas: dict[tuple[str, str | None], dict[str, Any]] = {}
    tools_file = path.with_name("tools.jsonl")
    for number, tool in enumerate(read_jsonl(tools_file, again), start=1):
        try:
            schemas[(tool["name"], tool["question_id"])] = tool["schema"]
        except (KeyError, TypeError) as e:
            raise UserError(f"{tools_file}:{number}: lacks a field ({e}); {again}") from e
        if wrong := artifact.wrong_type(tool["schema"], (dict,)):
            raise UserError(f"{tools_file}:{number}: schema is {wrong}; {again}")
    fields = {f.name for f in dataclasses.fields(Row)}
    name = path.parent.relative_to(path.parent.parent.parent).as_posix()
    rows = []
    for number, read in enumerate(read_jsonl(path, again), start=1):
        where = f"{path}:{number}"
        try:
            row = Row(**{k: v for k, v in read.items() if k in fields})
        except TypeError as e:
            raise UserError(f"{where}: lacks a field ({e}); {again}") from e
        for field, types in FIELDS.items():
            if wrong := artifact.wrong_type(getattr(row, field), types):
                raise UserError(f"{where}: {field} is {wrong}; {again}")
        if cell_name(row.k, row.seed) != name:
            raise UserError(f"{where}: k = {row.k!r}, seed = {row.seed!r} in {name}; {again}")
        if row.id not in known:
            raise UserError(f"{where}: the split has no question {row.id!r}; {again}")
        if not all(isinstance(n, str) for n in (*row.names, *row.golds)):
            raise UserError(f"{where}: names or golds is no list of tool names; {again}")
        if any(artifact.wrong_type(rank, (int,)) for rank in row.gold_ranks):
            raise UserError(f"{where}: gold_ranks is no list of whole numbers; {again}")
        for tool_name in row.names:
            if (tool_name, row.id) not in schemas and (tool_name, None) not in schemas:
                raise UserError(f"{where}: names {tool_name!r}, which {tools_file} lacks; {again}")
        rows.append(row)
    if not rows:
        raise UserError(f"{path}: holds no question; {again}")
    return Cell(name, rows[0].k, rows[0].seed, rows, schemas)


def recall_percent(ranks: Sequence[int | None], k: int) -> float:
    """Return the percentage of questions whose correct tools all rank within k."""
    ranked = [r for r in ranks if r is not None]
    return 100 * sum(r <= k for r in ranked) / max(len(ranked), 1)
