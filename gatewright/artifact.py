"""Folders that stages exchange: complete or absent, and traceable to their parents.

A finished folder holds `manifest.json`.  It is written last, inside a temporary sibling
folder that is then renamed, so a reader sees either nothing or everything.  A folder that
must live at its final path while it grows (a training run) has no manifest until it is
finished; readers refuse it in the same way.

The manifest records what the folder is (`kind`), the resolved configuration, the seed, the
command, package versions, the git revision, a SHA-256 of every file, one `content_hash`
over all of them, and each parent's path and content hash.  Any figure in a report can thus
be followed back to data, recipe and revision.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gatewright.errors import UserError

MANIFEST = "manifest.json"
UNHASHED = "ends:"
"""Begins the entry of a large file that was marked, not hashed whole (`gatewright.gates.marks`)."""
REVISION = "REVISION"
"""File in a copy of the checkout without .git that says which revision it is."""
MAKERS = {
    "text": "tools.demo_text",
    "chats": "tools.demo_chats",
    "tokenizer": "tokenizer.train or tokenizer.adopt",
    "corpus": "pretrain.prepare",
    "pretrain": "pretrain.train",
    "hf-model": "tools.convert --to hf or sft.train",
    "sft-data": "sft.prepare",
    "pools": "eval_bfcl.build_pools",
    "bfcl-results": "eval_bfcl.generate",
    "bfcl-scores": "eval_bfcl.score",
}
"""The commands that write a kind of folder, for error messages."""
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}
"""Errors of the disk that is written to, not of what the caller does."""
_VERSIONED = (
    "torch",
    "megatron-core",
    "transformers",
    "tokenizers",
    "deepspeed",
    "bfcl-eval",
    "rank-bm25",
    "numpy",
)


def sha256_file(path: Path) -> str:
    """Return the hex SHA-256 of a file's bytes, read in a stream."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _jsonable(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _jsonable(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): _jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_jsonable(v) for v in value]
    if isinstance(value, Path):
        return str(value)
    return value


def write_json(path: Path, value: Any, *, sync: bool = True) -> None:
    """Write JSON so that a reader sees the old file or the new one, never half of it.

    Args:
        sync: so that not even a loss of power shows half of it.
    """
    path = Path(path)
    fd, tmp = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        # What is not UTF-8 in a path becomes \\udcXX, which JSON reads as what it was.
        with os.fdopen(fd, "w", encoding="utf-8", errors="backslashreplace") as f:
            json.dump(_jsonable(value), f, indent=2, ensure_ascii=False)
            f.write("\n")
            f.flush()
            if sync:
                os.fsync(f.fileno())
        os.chmod(tmp, 0o644)
        os.replace(tmp, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(tmp)
        raise


def git_revision(root: Path | None = None) -> str | None:
    """Return the revision of the checkout this package runs from, `+dirty` when edited.

    Results under docs/results do not count as edits: measuring again writes them, and no code
    reads them.  A frozen copy (slurm.submission) answers from its REVISION file.
    """
    root = Path(__file__).resolve().parent.parent if root is None else root
    if not (root / ".git").exists():
        with contextlib.suppress(OSError):
            return (root / REVISION).read_text().strip()
        return None
    try:
        rev = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout.strip()
        dirty = subprocess.run(
            [
                *("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"),
                *("--", ".", ":(exclude)docs/results"),
            ],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return rev + ("+dirty" if dirty else "")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the engines that are installed."""
    found = {"python": platform.python_version()}
    for name in _VERSIONED:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _file_table(folder: Path, hashes: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
    known = hashes or {}
    table: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.rglob("*")):
        rel = path.relative_to(folder).as_posix()
        if rel == MANIFEST or not path.is_file():
            continue
        digest = known[rel] if rel in known else sha256_file(path)
        table[rel] = {"bytes": path.stat().st_size, "sha256": digest}
    return table


def _content_hash(files: Mapping[str, Mapping[str, Any]]) -> str:
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{files[name]['sha256']}\n".encode())
    return digest.hexdigest()


def content_hash_of(hashes: Mapping[str, str]) -> str:
    """Return the content hash of a folder whose files (relative path -> SHA-256) are given."""
    return _content_hash({name: {"sha256": digest} for name, digest in hashes.items()})


def content_hash(path: Path) -> str:
    """Return one hash over a file, or over all files of a folder.

    A folder with a manifest answers from it; a foreign folder or a plain file is hashed.

    Raises:
        UserError: nothing exists at `path`.
    """
    path = Path(path)
    if path.is_file():
        return sha256_file(path)
    if not path.is_dir():
        raise UserError(f"{path}: no such file or folder")
    manifest = path / MANIFEST
    if manifest.is_file():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return str(json.loads(manifest.read_text())["content_hash"])
    return _content_hash(_file_table(path))


def finish(
    folder: Path,
    *,
    kind: str,
    config: Any = None,
    parents: Mapping[str, Path] | None = None,
    seed: int | None = None,
    extra: Mapping[str, Any] | None = None,
    hashes: Mapping[str, str] | None = None,
    parent_hashes: Mapping[str, str] | None = None,
    sync: bool = True,
) -> dict[str, Any]:
    """Hash everything in `folder` and write its manifest: from now on it is finished.

    Args:
        kind: what the folder is, for example `tokenizer`, `corpus`, `hf-model`, `pools`.
        config: resolved configuration (dataclass or mapping).
        parents: name -> path of every input; each is recorded with its content hash.
        seed: the seed that fixes the folder's randomness, if any.
        extra: facts worth keeping beside the above (counts, gate edits, ...).
        hashes: SHA-256 of files (relative path -> hex) that the caller computed while writing
            them, so that large files are not read a second time.
        parent_hashes: content hash of parents (by name) that the caller knows already.
        sync: write the manifest through to the disk.  The kernel then writes much of what the
            caller has written first, which can take longer than writing it did.
    """
    folder = Path(folder)
    files = _file_table(folder, hashes)
    parent_hash = dict(parent_hashes or {})
    manifest = {
        "kind": kind,
        "content_hash": _content_hash(files),
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "git_revision": git_revision(),
        "versions": versions(),
        "seed": seed,
        "config": _jsonable(config),
        "parents": {
            name: {
                "path": str(p),
                "content_hash": parent_hash.get(name) or content_hash(Path(p)),
            }
            for name, p in (parents or {}).items()
        },
        "extra": _jsonable(dict(extra or {})),
        "files": files,
    }
    write_json(folder / MANIFEST, manifest, sync=sync)
    return manifest


@contextlib.contextmanager
def create(
    out: Path,
    *,
    kind: str,
    config: Any = None,
    parents: Mapping[str, Path] | None = None,
    seed: int | None = None,
    extra: dict[str, Any] | None = None,
    hashes: Mapping[str, str] | None = None,
    parent_hashes: Mapping[str, str] | None = None,
    sync: bool = True,
) -> Iterator[Path]:
    """Yield a temporary folder that becomes `out`, manifest included, when the block ends.

    If the block raises (or the process dies) nothing appears at `out`.  `extra`, `hashes` and
    `parent_hashes` may be filled inside the block; see `finish` for what they and `sync` hold.

    Raises:
        UserError: `out` already exists (remove it or choose another), or its parent folder
            cannot be written, or the disk is full.
    """
    out = Path(out)
    if os.path.lexists(out):  # a link that leads nowhere is in the way too
        state = "is already finished" if (out / MANIFEST).is_file() else "exists"
        raise UserError(f"--out {out} {state}: remove it or choose another folder")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        tmp = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}.partial-"))
    except OSError as e:
        raise UserError(f"--out {out}: cannot create it ({e.strerror})") from e
    os.chmod(tmp, 0o755)
    try:
        try:
            yield tmp
        except OSError as e:
            if e.errno not in _NO_ROOM:
                raise
            raise UserError(
                f"--out {out}: cannot be written ({e.strerror}); nothing was left there"
            ) from e
        try:
            finish(
                tmp,
                kind=kind,
                config=config,
                parents=parents,
                seed=seed,
                extra=extra,
                hashes=hashes,
                parent_hashes=parent_hashes,
                sync=sync,
            )
            os.rename(tmp, out)
        except OSError as e:
            raise UserError(
                f"--out {out}: cannot be finished ({e.strerror}); nothing was written there"
            ) from e
    except BaseException:
        shutil.rmtree(tmp, ignore_errors=True)
        raise


def read_manifest(folder: Path, kind: str | None = None, flag: str | None = None) -> dict[str, Any]:
    """Return the manifest of a finished folder.

    Args:
        kind: refuse a folder of any other kind.
        flag: the command-line flag that named the folder, for the error message.

    Raises:
        UserError: the folder is missing, unfinished (no manifest), damaged, or of another kind.
    """
    folder = Path(folder)
    named = f"{flag} {folder}" if flag else str(folder)
    if not folder.is_dir():
        raise UserError(f"{named}: no such folder")
    path = folder / MANIFEST
    if not path.is_file():
        raise UserError(
            f"{named}: has no {MANIFEST}, so it is unfinished or was not made by gatewright; "
            "run the stage that makes it again"
        )
    try:
        manifest = json.loads(path.read_text())
        found = manifest["kind"]
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise UserError(
            f"{path}: is damaged ({type(e).__name__}); make the folder again, or rename the file "
            "if it is another program's"
        ) from e
    if kind is not None and found != kind:
        raise UserError(
            f"{named}: is a folder of kind {found}, but kind {kind} is needed here; "
            f"{MAKERS.get(kind, 'another stage')} makes one"
        )
    return dict(manifest)


_KINDS = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


def wrong_type(value: Any, types: tuple[type, ...]) -> str | None:
    """Return what is wrong with a value read from JSON, or None if it is of one of the types.

    A truth value is no number, and a number is finite; whole numbers are numbers too.

    Args:
        types: of str, int, float, bool, list, dict and NoneType; object takes anything.
    """
    if object in types:
        return None
    if isinstance(value, bool):
        fits = bool in types
    elif isinstance(value, int):
        fits = int in types or float in types
    else:
        fits = isinstance(value, types) and value not in (math.inf, -math.inf) and value == value
    return None if fits else f"{value!r:.60}, not {' or '.join(_KINDS[t] for t in types)}"


def require_extra(
    folder: Path, manifest: Mapping[str, Any], facts: Mapping[str, tuple[type, ...]]
) -> None:
    """Refuse a folder whose manifest lacks a fact that the reader needs, or has it damaged.

    Args:
        facts: name in `extra` -> types, as for `wrong_type`; `pools.beta` lies in object `pools`.

    Raises:
        UserError: `extra` lacks one, or it is of another type: the manifest was edited, or
            another version wrote it.
    """
    again = f"make the folder again with {MAKERS.get(manifest['kind'], 'its stage')}"
    for name, types in facts.items():
        value = manifest.get("extra")
        for part in name.split("."):
            if not isinstance(value, Mapping) or part not in value:
                raise UserError(
                    f"{Path(folder) / MANIFEST}: has no extra.{name} (edited, or of another "
                    f"version); {again}"
                )
            value = value[part]
        if wrong := wrong_type(value, types):
            raise UserError(f"{Path(folder) / MANIFEST}: extra.{name} is {wrong}; {again}")


def require_whole(folder: Path, flag: str, suffixes: tuple[str, ...]) -> None:
    """Compare the sizes of a finished folder's files with its manifest: cheap, unlike `verify`.

    A file cut short by a full disk or a broken copy else ends deep inside a reader.

    Args:
        suffixes: which files to compare; others (a chat template) may be edited by hand.

    Raises:
        UserError: a file is missing or has another size than when the folder was finished.
    """
    try:
        files = read_manifest(folder, flag=flag)["files"]
        sizes = {name: entry["bytes"] for name, entry in files.items() if name.endswith(suffixes)}
    except (KeyError, TypeError, AttributeError) as e:
        raise UserError(
            f"{flag} {folder}: the files in {MANIFEST} are damaged ({type(e).__name__}); copy or "
            "make the folder again"
        ) from e
    for name, recorded in sizes.items():
        path = Path(folder) / name
        size = path.stat().st_size if path.is_file() else 0
        if size != recorded:
            raise UserError(
                f"{flag} {path}: has {size:,} bytes, not the {recorded:,} that {MANIFEST} "
                "recorded; copy or make the folder again"
            )


def verify(folder: Path) -> None:
    """Check every file of a finished folder against its manifest.

    Raises:
        UserError: a file is missing or its bytes changed since the folder was finished.
    """
    manifest = read_manifest(folder)
    for name, entry in manifest["files"].items():
        path = Path(folder) / name
        if not path.is_file():
            raise UserError(f"{path}: is missing although {MANIFEST} lists it; make it again")
        if str(entry["sha256"]).startswith(UNHASHED):
            same = path.stat().st_size == entry["bytes"]  # all that was recorded to compare
        else:
            same = sha256_file(path) == entry["sha256"]
        if not same:
            raise UserError(f"{path}: differs from what {MANIFEST} recorded; make it again")
