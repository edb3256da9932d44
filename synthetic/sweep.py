"""Results of an experiment as they grow: one JSON line per run, resumable after any stop.

out/config.json     the settings, written before work starts
out/results.jsonl   a row per run: settings, seed, metrics
out/summary.json    the numbers that the figure and the verdicts quote
out/*.svg, *.png    the figure
out/manifest.json   last: without it the folder is unfinished and may be resumed
"""

from __future__ import annotations

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
        if (self.out / artifact.MANIFEST).exists():
            raise UserError(f"--out {out} is already finished: remove it or choose another folder")
        if self.out.exists() and not self.out.is_dir():
            raise UserError(f"--out {out} is a file: choose a folder")
        config_path = self.out / "config.json"
        if config_path.exists():
            self._check_same(config_path, set(free))
            artifact.write_json(config_path, self.config)
        elif self.out.exists() and any(self.out.iterdir()):
            raise UserError(f"--out {out} holds other files: choose a new or empty folder")
        else:
            try:
                self.out.mkdir(parents=True, exist_ok=True)
            except OSError as e:
                raise UserError(f"--out {out}: cannot create it ({e.strerror})") from e
            artifact.write_json(config_path, self.config)
        self.path = self.out / "results.jsonl"
        self.rows: list[Row] = _complete_rows(self.path)
        self.resumed = bool(self.rows)
        self._start = time.monotonic()
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115

    def _check_same(self, path: Path, free: set[str]) -> None:
        try:
            found = json.loads(path.read_text())
        except json.JSONDecodeError as e:
            raise UserError(f"{path}: is damaged; remove the folder") from e
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
        self._file.close()
        artifact.write_json(self.out / "summary.json", dict(summary))
        artifact.finish(self.out, kind="synthetic", config=self.config)

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


def _complete_rows(path: Path) -> list[Row]:
    """Return the whole rows of a results file and cut off a last line that a crash broke."""
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) != len(data):
        with open(path, "r+b") as f:
            f.truncate(len(whole))
    try:
        return [json.loads(line) for line in whole.splitlines()]
    except json.JSONDecodeError as e:
        raise UserError(f"{path}: has a damaged line ({e}); remove the folder") from e


def verdict(claim: str, holds: bool, number: float | None, detail: str) -> dict[str, Any]:
    """Return one line of a summary's `verdicts`: the claim, whether it holds, the number."""
    return {"claim": claim, "holds": bool(holds), "number": number, "detail": detail}


def print_verdicts(verdicts: Iterable[Mapping[str, Any]]) -> None:
    """Print a line per claim."""
    for v in verdicts:
        mark = "holds        " if v["holds"] else "does not hold"
        number = "" if v["number"] is None else f" [{v['number']:.4g}]"
        print(f"{mark}  {v['claim']}{number}: {v['detail']}")


def gathered(
    folders: Iterable[Path],
    out: Path,
    experiment: str,
    names: Sequence[str],
    *,
    replace: bool = False,
) -> Sweep:
    """Return a new sweep that holds the rows of finished folders of one experiment.

    Its configuration is what theirs have in common.

    Args:
        names: the fields of a row that name its run.
        replace: of a run that several folders hold, take the last one's row.

    Raises:
        UserError: a folder is unfinished, of another experiment or size, or repeats a run.
    """
    rows: list[Row] = []
    configs = []
    folders = list(folders)
    for folder in folders:
        manifest = artifact.read_manifest(folder, "synthetic", flag="--runs")
        config = manifest["config"]
        if config.get("experiment") != experiment:
            raise UserError(f"--runs {folder}: holds {config.get('experiment')}, not {experiment}")
        configs.append(config)
        rows += _complete_rows(folder / "results.jsonl")
    named: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        name = tuple(row[n] for n in names)
        if name in named and not replace:
            raise UserError(
                f"--runs: repeats the run {' '.join(map(str, name))}; name folders with different "
                "runs, or give --replace to take the last folder's"
            )
        named[name] = row
    sizes = sorted({str(c.get("size")) for c in configs})
    if len(sizes) > 1:
        raise UserError(f"--runs: mixes the sizes {', '.join(sizes)}")
    shared = {k: v for k, v in configs[0].items() if all(c.get(k) == v for c in configs)}
    sweep = Sweep(out, experiment, {**shared, "gathered": [str(f) for f in folders]})
    if not sweep.resumed:
        sweep.add_all(named.values())
    return sweep
