"""Pools on disk: a cell per (pool size, seed), each with `pools.jsonl` and `tools.jsonl`.

A cell's folder is `pool_size=24/seed=0`.  `pools.jsonl` holds a row per question; the schemas
are found by tool name and question id in `tools.jsonl` beside it: a row with that question's
id if its schema differs from the corpus's, else the row whose `question_id` is null.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gatewright import artifact
from gatewright.errors import UserError


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


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSON-lines file.

    Raises:
        UserError: the file is missing or a line is not a JSON object (the line is named).
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    rows = []
    with open(path, encoding="utf-8") as f:
        for number, line in enumerate(f, start=1):
            try:
                row = json.loads(line)
            except json.JSONDecodeError as e:
                raise UserError(f"{path}:{number}: is not JSON ({e.msg})") from e
            if not isinstance(row, dict):
                raise UserError(f"{path}:{number}: is not a JSON object")
            rows.append(row)
    return rows


def load(folder: Path) -> tuple[dict[str, Any], list[Cell]]:
    """Return a pools folder's manifest and its cells, smallest pool first.

    Raises:
        UserError: the folder is not finished, not of pools, or a file in it is damaged.
    """
    manifest = artifact.read_manifest(folder, "pools", flag="--pools")
    cells = []
    for path in sorted(Path(folder).glob("pool_size=*/seed=*/pools.jsonl")):
        schemas = {
            (t["name"], t["question_id"]): t["schema"]
            for t in read_jsonl(path.with_name("tools.jsonl"))
        }
        fields = {f.name for f in dataclasses.fields(Row)}
        try:
            rows = [Row(**{k: v for k, v in r.items() if k in fields}) for r in read_jsonl(path)]
        except TypeError as e:
            raise UserError(f"{path}: a row lacks fields ({e}); build the pools again") from e
        k, seed = rows[0].k, rows[0].seed
        cells.append(Cell(cell_name(k, seed), k, seed, rows, schemas))
    if not cells:
        raise UserError(f"--pools {folder}: holds no pool_size=K/seed=S/pools.jsonl")
    return manifest, sorted(cells, key=lambda c: (c.k, c.seed))


def recall_percent(ranks: Sequence[int | None], k: int) -> float:
    """Return the percentage of questions whose correct tools all rank within k."""
    ranked = [r for r in ranks if r is not None]
    return 100 * sum(r <= k for r in ranked) / max(len(ranked), 1)
