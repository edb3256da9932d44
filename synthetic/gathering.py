"""Finished folders of one gate experiment, joined into a new one.

Their rows are as comparable as one folder's: every setting must be the same, except those
that only say which runs to do.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gatewright import artifact
from gatewright.errors import UserError
from synthetic.ranks import WHICH
from synthetic.sweep import Row, by_run, whole_rows


@dataclasses.dataclass(frozen=True)
class Joined:
    """What finished folders hold together.

    Attributes:
        rows: in the folders' order.
        config: the settings that all have in common.
    """

    rows: list[Row]
    config: dict[str, Any]
    folders: list[Path]


def read(
    folders: Iterable[Path],
    experiment: str,
    names: Sequence[str],
    fields: Callable[[Row], Iterable[str]],
    *,
    replace: bool = False,
) -> Joined:
    """Read and check the folders; nothing in them is changed.

    Args:
        names: the fields of a row that name its run.
        fields: of a row with these, the other fields that it must have.
        replace: of a run that several folders hold, take the last one's row.

    Raises:
        UserError: a folder is unfinished, damaged, of another experiment or other settings,
            or repeats a run.
    """
    folders = list(folders)
    if not folders:
        raise UserError("--runs: name at least one finished folder")
    found: dict[str, Row] = {}
    configs: list[dict[str, Any]] = []
    for folder in folders:
        configs.append(_config(folder, experiment))
        _same_settings(folders[0], configs[0], folder, configs[-1])
        path = folder / "results.jsonl"
        for name, row in by_run(whole_rows(path), names, path).items():
            if name in found and not replace:
                raise UserError(
                    f"--runs {folder}: repeats the run {name}; name folders with different "
                    "runs, or give --replace to take the last folder's"
                )
            lacking = [] if "failed" in row else [f for f in fields(row) if f not in row]
            if lacking:
                raise UserError(f"{path}: the run {name} has no {lacking[0]}; measure it again")
            found[name] = row
    if not found:
        raise UserError(f"--runs {folders[0]}: holds no runs; name a folder with some")
    shared = {k: v for k, v in configs[0].items() if all(c.get(k) == v for c in configs)}
    return Joined(list(found.values()), shared, folders)


def _config(folder: Path, experiment: str) -> dict[str, Any]:
    manifest = artifact.read_manifest(folder, "synthetic", flag="--runs")
    config, files = manifest.get("config"), manifest.get("files")
    if not isinstance(config, dict) or not isinstance(files, dict) or "results.jsonl" not in files:
        raise UserError(
            f"--runs {folder}: its {artifact.MANIFEST} lists no settings or no results.jsonl, so "
            "it is no folder of this command; make it again"
        )
    if config.get("experiment") != experiment:
        raise UserError(f"--runs {folder}: holds {config.get('experiment')}, not {experiment}")
    artifact.verify(folder)
    return config


def _same_settings(
    first: Path, wanted: Mapping[str, Any], folder: Path, config: Mapping[str, Any]
) -> None:
    for key in sorted({*wanted, *config} - {*WHICH, "gathered"}):
        difference = _difference(key, wanted.get(key), config.get(key))
        if difference is not None:
            name, a, b = difference
            raise UserError(
                f"--runs {folder}: has {name}={b!r}, but {first} has {a!r}; name folders of the "
                "same settings"
            )


def _difference(name: str, a: Any, b: Any) -> tuple[str, Any, Any] | None:
    """Return the dotted name of the first setting that differs, and both values."""
    if isinstance(a, dict) and isinstance(b, dict):
        inside = (_difference(f"{name}.{k}", a.get(k), b.get(k)) for k in sorted({*a, *b}))
        return next((d for d in inside if d is not None), None)
    return None if a == b else (name, a, b)


def write(
    out: Path,
    joined: Joined,
    conclude: Callable[[Path, list[Row], Mapping[str, Any]], Mapping[str, Any]],
) -> None:
    """Write a finished folder with the joined rows, whole or not at all.

    Args:
        conclude: folder, rows, settings -> summary; writes the figure.

    Raises:
        UserError: `out` exists or cannot be written.
    """
    config = {**joined.config, "gathered": [str(f) for f in joined.folders]}
    parents = {str(f): f for f in joined.folders}
    with artifact.create(out, kind="synthetic", config=config, parents=parents) as folder:
        artifact.write_json(folder / "config.json", config)
        lines = (json.dumps(row) + "\n" for row in joined.rows)
        (folder / "results.jsonl").write_text("".join(lines), encoding="utf-8")
        summary = conclude(folder, joined.rows, config)
        artifact.write_json(folder / "summary.json", dict(summary))
