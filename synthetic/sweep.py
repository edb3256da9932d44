"""Results of an experiment as they grow: one JSON line per run, resumable after any stop.

out/config.json     the settings, written before work starts
out/results.jsonl   a row per run: settings, seed, metrics
out/summary.json    the numbers that the figure and the verdicts quote
out/*.svg, *.png    the figure
out/manifest.json   last: without it the folder is unfinished and may be resumed
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from gatewright import artifact
from gatewright.errors import UserError

Row = dict[str, Any]


class Sweep:
    """The growing folder of one experiment.

    Opening a folder again continues it: rows that are there are kept (a last line cut short
    by a crash is dropped), and the experiment asks `missing` what is left to do.

    Args:
        out: the folder; new, empty, or an unfinished sweep with the same settings.
        experiment: its name, for example `theory`.
        config: the settings that must be the same for the rows to be comparable.
        free: names in it that only say which runs to do, so that a sweep may be continued with
            more or fewer of them.

    Raises:
        UserError: the folder is finished, belongs to something else, or to other settings.
    """

    def __init__(
        self,
        out: Path,
        experiment: str,
        config: Mapping[str, Any],
        free: Iterable[str] = (),
    ) -> None:
        self.out = Path(out)
        self.experiment = experiment
        self.config = json.loads(json.dumps({"experiment": experiment, **config}, default=str))
        self.path = self.out / "results.jsonl"
        try:
            self._open_folder(set(free))
            self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115
            self._lock()
            artifact.write_json(self.out / "config.json", self.config)
            _cut_broken_line(self.path)
            self.rows = whole_rows(self.path)
        except OSError as e:
            raise UserError(f"--out {out}: cannot create or write it ({e.strerror})") from e
        self.resumed = bool(self.rows)
        self._start = time.monotonic()

    def _open_folder(self, free: set[str]) -> None:
        out, config_path = self.out, self.out / "config.json"
        if (out / artifact.MANIFEST).exists():
            raise UserError(f"--out {out} is already finished: remove it or choose another folder")
        if out.exists() and not out.is_dir():
            raise UserError(f"--out {out} is a file: choose a folder")
        if config_path.exists():
            self._check_same(config_path, free)
        elif out.exists() and any(out.iterdir()):
            raise UserError(f"--out {out} holds other files: choose a new or empty folder")
        else:
            out.mkdir(parents=True, exist_ok=True)
            artifact.write_json(config_path, self.config)

    def _lock(self) -> None:
        """Keep other processes out until this one closes the rows or ends, however it ends."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            self._file.close()
            raise UserError(
                f"--out {self.out}: another process is writing there: wait for it or choose "
                "another folder"
            ) from e
        except OSError:
            pass  # this file system has no locks

    def _check_same(self, path: Path, free: set[str]) -> None:
        try:
            found = json.loads(path.read_text())
        except ValueError as e:  # not JSON, or not text
            raise UserError(f"{path}: is damaged; remove the folder") from e
        if not isinstance(found, dict) or "experiment" not in found:
            raise UserError(
                f"--out {self.out} holds another program's files: choose a new or empty folder"
            )
        for name in sorted({*found, *self.config} - free):
            if found.get(name) != self.config.get(name):
                raise UserError(
                    f"--out {self.out} was started with {name}={found.get(name)!r}, not "
                    f"{self.config.get(name)!r}: use the same settings or another folder"
                )

    def add(self, row: Row) -> None:
        """Append one finished run and bring it to disk."""
        self.add_all([row])

    def add_all(self, rows: Iterable[Row]) -> None:
        """Append runs that were trained together; a crash leaves whole lines only."""
        rows = [_rounded(row) for row in rows]
        self._file.write("".join(json.dumps(row) + "\n" for row in rows))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.rows.extend(rows)

    def has(self, **settings: Any) -> bool:
        """Return whether a row with these settings is already there."""
        return any(all(r.get(k) == v for k, v in settings.items()) for r in self.rows)

    def select(self, **settings: Any) -> list[Row]:
        """Return the rows with these settings."""
        return [r for r in self.rows if all(r.get(k) == v for k, v in settings.items())]

    def seconds(self) -> float | None:
        """Return how long the sweep has taken; None if it was resumed and nobody knows."""
        return None if self.resumed else round(time.monotonic() - self._start, 1)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json and, last, the manifest."""
        artifact.write_json(self.out / "summary.json", dict(summary))
        artifact.finish(self.out, kind="synthetic", config=self.config)
        self._file.close()

    def __enter__(self) -> Sweep:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()


def _rounded(value: Any) -> Any:
    """Round floats to seven digits: more than any metric carries, half the file's size."""
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else value
    if isinstance(value, Mapping):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(v) for v in value]
    return value


def _cut_broken_line(path: Path) -> None:
    """Cut off a last line that a crash broke."""
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole != len(data):
        with open(path, "r+b") as f:
            f.truncate(whole)


def whole_rows(path: Path) -> list[Row]:
    """Return the rows of a results file.

    Raises:
        UserError: a line is no JSON object, or the last one was cut short.
    """
    data = path.read_bytes()
    rows: list[Row] = []
    for number, line in enumerate(data.splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError as e:  # not JSON, or not text
            raise UserError(f"{path}: line {number} is damaged ({e}); remove the folder") from e
        if not isinstance(row, dict):
            raise UserError(f"{path}: line {number} is no row of results; remove the folder")
        rows.append(row)
    if data and not data.endswith(b"\n"):
        raise UserError(f"{path}: its last line was cut short; make or copy the folder again")
    return rows


def by_run(rows: Iterable[Row], names: Sequence[str], path: Path) -> dict[str, Row]:
    """Return rows by the run they are of, in words.

    Args:
        names: the fields of a row that name its run.
        path: the file they are from, for error messages.

    Raises:
        UserError: a row lacks one, or two rows are of one run.
    """
    found: dict[str, Row] = {}
    for number, row in enumerate(rows, 1):
        lacking = [n for n in names if n not in row]
        if lacking:
            raise UserError(f"{path}: line {number} has no {lacking[0]}; remove the folder")
        name = " ".join(str(row[n]) for n in names)
        if name in found:
            raise UserError(f"{path}: line {number} repeats the run {name}; remove one of the two")
        found[name] = row
    return found


def verdict(claim: str, holds: bool, number: float | None, detail: str) -> dict[str, Any]:
    """Return one line of a summary's `verdicts`: the claim, whether it holds, the number."""
    return {"claim": claim, "holds": bool(holds), "number": number, "detail": detail}


def print_verdicts(verdicts: Iterable[Mapping[str, Any]]) -> None:
    """Print a line per claim."""
    for v in verdicts:
        mark = "holds        " if v["holds"] else "does not hold"
        number = "" if v["number"] is None else f" [{v['number']:.4g}]"
        print(f"{mark}  {v['claim']}{number}: {v['detail']}")
