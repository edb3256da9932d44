"""The copy of the code that a submission's jobs run, so that later edits change nothing."""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from gatewright import artifact
from slurm import plan

_IGNORED = shutil.ignore_patterns(".*", "runs", "build", "__pycache__", "*.egg-info", "*.partial-*")


def _listed(code: Path, *flags: str) -> list[str]:
    """Return what `git ls-files` says; nothing without git."""
    if not (code / ".git").exists() or shutil.which("git") is None:
        return []
    argv = ["git", "-C", str(code), "ls-files", "-z", *flags]
    done = subprocess.run(argv, capture_output=True, check=False)
    return sorted({name for name in done.stdout.decode().split("\0") if name})


def _no_code(code: Path, others: Sequence[Path]) -> Callable[[Path], bool]:
    """Return a test of paths below `code`: is it of a run, of a stage's output, or in `others`?"""
    apart = {path.resolve() for path in others}

    @functools.cache
    def test(path: Path) -> bool:
        if path == code:
            return False
        run = any((path / plan.RECORDS / name).exists() for name in ("lock", "tasks"))
        made = run or (path / artifact.MANIFEST).is_file() or path == code / plan.RECORDS
        return made or path.resolve() in apart or test(path.parent)

    return test


def freeze_code(code: Path, target: Path, others: Sequence[Path]) -> None:
    """Copy the checkout: what git tracks or would track, or without git all but caches.

    Files that git does not track are left out where they are no code: runs, folders that stages
    made, and `others` (the run's folder; the site file, which may hold tokens).
    """
    no_code = _no_code(code, others)
    tracked = _listed(code, "-c")
    if not tracked:

        def ignored(folder: str, names: list[str]) -> set[str]:
            return {*_IGNORED(folder, names), *(n for n in names if no_code(Path(folder, n)))}

        shutil.copytree(code, target, ignore=ignored)
    names = [n for n in _listed(code, "-o", "--exclude-standard") if not no_code(code / n)]
    for name in [*tracked, *names] if tracked else []:
        source = code / name
        if source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)
    (target / artifact.REVISION).write_text((artifact.git_revision() or "unknown") + "\n")
