"""Text corpora on disk, read as a stream: JSONL (plain, .gz, .zst) and parquet.

A corpus is a set of shard files whose rows hold a document under one field (`text`), as
Nemotron-CC, FineWeb and most others are published.  One shard is read in bounded memory,
whatever its size: bytes are decompressed a megabyte at a time and split on "\\n" only
(documents may hold U+2028 and other characters that `str.splitlines` would cut at).

Decompression goes through Arrow, because python-zstandard's stream reader takes a file that
was cut short for a complete one.
"""

from __future__ import annotations

import dataclasses
import glob
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gatewright.artifact import MANIFEST
from gatewright.errors import UserError

COMPRESSION = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
ROWS = (".jsonl", ".ndjson", ".json")
READ_BYTES = 1 << 20
HASHED_BYTES = 1 << 30
"""Inputs up to this size are hashed whole for the manifest of what is made of them."""
MAX_LINE_BYTES = 1 << 26
"""Longest line that is held in memory (64 MiB); a longer one is a bad line."""


@dataclasses.dataclass
class BadLines:
    """How many lines of a shard may be skipped, and which were.

    Past `limit` the next bad line is an error that names the file and the line.
    """

    limit: int = 0
    """Most lines to skip; 0 refuses the first one."""
    flag: str = "--skip-bad-lines"
    """The flag that raises the limit, for the error message."""
    found: list[str] = dataclasses.field(default_factory=list)
    """`file:line: what is wrong` for each skipped line."""

    def add(self, path: Path, number: int, reason: str, unit: str = "line") -> None:
        """Note a bad line, counted from 1.

        Raises:
            UserError: there are now more than `limit`.
        """
        named = f"{path}: {unit} {number}: {reason}"
        if len(self.found) >= self.limit:
            more = f" ({self.limit} others were skipped)" if self.limit else ""
            raise UserError(f"{named}{more}; mend it or allow more with {self.flag} N")
        self.found.append(named)


def is_parquet(path: Path) -> bool:
    return path.suffix == ".parquet"


def is_shard(path: Path) -> bool:
    """Say whether a file's name is one that `documents` can read."""
    if is_parquet(path):
        return True
    name = Path(path.stem) if path.suffix in COMPRESSION else path
    return name.suffix in ROWS


def find_shards(patterns: Sequence[str | Path], flag: str) -> list[Path]:
    """Return the shard files that globs, files and folders name, sorted, each once.

    A folder stands for every shard anywhere below it.

    Raises:
        UserError: a pattern matches nothing, or a named file is of an unknown format; `flag`
            is the command-line flag that holds the patterns.
    """
    shards: dict[Path, None] = {}
    for pattern in map(str, patterns):
        # A path that exists is taken as it is, even if its name holds [ or *.
        named = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))
        if not named:
            raise UserError(f"{flag} {pattern}: matches no file")
        found: list[Path] = []
        for path in map(Path, named):
            if path.is_dir():
                inside = (p for p in sorted(path.rglob("*")) if p.is_file() and is_shard(p))
                found.extend(p for p in inside if p.name != MANIFEST)
            elif is_shard(path):
                found.append(path)
            else:
                raise UserError(
                    f"{flag} {path}: unknown format; .jsonl, .jsonl.gz, .jsonl.zst(d) and "
                    ".parquet can be read"
                )
        if not found:
            raise UserError(f"{flag} {pattern}: holds no .jsonl[.gz|.zst|.zstd] or .parquet file")
        shards.update(dict.fromkeys(found))
    return list(shards)


def input_parents(patterns: Sequence[str | Path]) -> dict[str, Path]:
    """Return the inputs whose content a manifest can afford to name by hash.

    Finished folders answer from their own manifest; other files and folders are hashed if
    they are small.  A published corpus of terabytes is left to its list of shards.
    """
    parents: dict[str, Path] = {}
    for i, path in enumerate(map(Path, patterns)):
        if (path / "manifest.json").is_file():
            parents[f"input/{i}"] = path
        elif path.exists():
            files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
            if sum(p.stat().st_size for p in files) <= HASHED_BYTES:
                parents[f"input/{i}"] = path
    return parents


def chunks(path: Path, consumed: Callable[[int], None] | None = None) -> Iterator[bytes]:
    """Yield the decompressed bytes of a file, at most a megabyte at a time.

    Args:
        consumed: called with the file's position (compressed bytes read so far).

    Raises:
        UserError: the file cannot be opened, or its compressed data is damaged or cut short.
    """
    import pyarrow as pa

    try:
        with pa.OSFile(str(path), "rb") as raw:
            codec = COMPRESSION.get(path.suffix)
            stream: Any = raw if codec is None else pa.CompressedInputStream(raw, codec)
            if codec is not None and path.stat().st_size == 0:
                return
            while data := stream.read(READ_BYTES):
                if consumed is not None:
                    consumed(raw.tell())
                yield data
    except OSError as e:
        raise UserError(f"{path}: cannot be read to its end ({e}); fetch it again") from e


def lines(
    path: Path, consumed: Callable[[int], None] | None = None
) -> Iterator[tuple[int, bytes | None]]:
    """Yield (line number from 1, bytes without the newline) of a JSONL file.

    None stands for a line longer than `MAX_LINE_BYTES`, whose bytes are passed over.
    """
    pieces: list[bytes] = []  # of a line that is not finished yet
    number, held, too_long = 1, 0, False
    for data in chunks(path, consumed):
        *ended, rest = data.split(b"\n")
        for tail in ended:
            if too_long or held + len(tail) > MAX_LINE_BYTES:
                yield number, None
            else:
                yield number, b"".join([*pieces, tail]) if pieces else tail
            number, pieces, held, too_long = number + 1, [], 0, False
        if rest and not too_long:
            pieces.append(rest)
            held += len(rest)
            if held > MAX_LINE_BYTES:
                pieces, too_long = [], True
    if too_long:
        yield number, None
    elif pieces:
        yield number, b"".join(pieces)


def _reason(line: bytes | None, field: str) -> tuple[str, str | None]:
    """Return (text, None), or ("", what is wrong with the line)."""
    if line is None:
        return "", f"is longer than {MAX_LINE_BYTES >> 20} MiB"
    try:
        row = json.loads(line)
    except UnicodeDecodeError:
        return "", "is not UTF-8"
    except (ValueError, RecursionError) as e:
        return "", f"is not JSON ({e.msg if isinstance(e, json.JSONDecodeError) else 'refused'})"
    if not isinstance(row, dict):
        return "", f"is a JSON {type(row).__name__}, not an object"
    text = row.get(field)
    if not isinstance(text, str):
        kind = "has no" if field not in row else f"has {type(text).__name__}, not text, in"
        return "", f"{kind} field {field!r}"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return "", f"has a broken UTF-16 surrogate in {field!r}"
    return text, None


def _jsonl(
    path: Path, field: str, bad: BadLines, consumed: Callable[[int], None] | None
) -> Iterator[str]:
    for number, line in lines(path, consumed):
        if line is not None and not line.strip():
            continue
        text, wrong = _reason(line, field)
        if wrong is not None:
            bad.add(path, number, wrong)
        else:
            yield text


def _parquet(
    path: Path, field: str, bad: BadLines, consumed: Callable[[int], None] | None
) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, pre_buffer=False, buffer_size=READ_BYTES) as file:
            if field not in file.schema_arrow.names:
                known = ", ".join(file.schema_arrow.names)
                raise UserError(f"{path}: has no column {field!r}; its columns: {known}")
            kind = file.schema_arrow.field(field).type
            if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
                raise UserError(f"{path}: column {field!r} holds {kind}, not text")
            size, rows, done = path.stat().st_size, max(file.metadata.num_rows, 1), 0
            for batch in file.iter_batches(batch_size=256, columns=[field]):
                for i, text in enumerate(batch.column(0).to_pylist()):
                    if text is None:
                        bad.add(path, done + i + 1, f"has no {field!r} (null)", unit="row")
                    else:
                        yield text
                done += batch.num_rows
                if consumed is not None:
                    consumed(size * done // rows)
    except (OSError, pa.ArrowInvalid) as e:
        raise UserError(f"{path}: cannot be read as parquet ({e})") from e
    except UnicodeDecodeError as e:
        raise UserError(f"{path}: column {field!r} is not UTF-8") from e


def documents(
    path: Path,
    *,
    field: str = "text",
    bad: BadLines | None = None,
    consumed: Callable[[int], None] | None = None,
) -> Iterator[str]:
    """Yield the documents of one shard, in order; blank lines are passed over.

    Args:
        field: the JSON key or parquet column that holds the text.
        bad: what to do with bad lines; refuses the first one by default.
        consumed: called now and then with the bytes of the file read so far.

    Raises:
        UserError: a bad line beyond the limit, a damaged file, a missing parquet column.
    """
    bad = BadLines() if bad is None else bad
    reader = _parquet if is_parquet(path) else _jsonl
    return reader(path, field, bad, consumed)
