"""Make a small English corpus from documentation that is already on this machine.

    python -m tools.demo_text --out runs/text

Docstrings and .md/.rst/.txt files of the installed Python packages and of the standard
library become Nemotron-CC-style shards: rows with `warc_record_id`, `url`, `text` and
`language` in `quality=high/kind=actual/kind2=actual/*.jsonl.zstd`, several zstd frames each.
Code is cut away, repeated paragraphs are dropped.  The same environment gives the same bytes.

bfcl_eval is left out: what a model is measured on must not be in its pretraining text.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import sysconfig
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gatewright import artifact, cli
from gatewright.errors import UserError
from gatewright.runlog import progress
from tools.prose import Novelty, docstrings, html_paragraphs, paragraphs, quoted_share

PARTITION = "quality=high/kind=actual/kind2=actual"
LEFT_OUT = frozenset(
    ("bfcl_eval", "tests", "test", "testing", "__pycache__", "site-packages", "dist-packages")
)
SUFFIXES = frozenset((".py", ".md", ".rst", ".txt", ".html", ".htm"))
MAX_FILE_BYTES = 4 << 20
MIN_DOCUMENT_CHARS = 200
MIN_QUOTED_SHARE = 0.15  # parsing a file that is nearly all code costs more than it gives
FRAME_BYTES = 1 << 20
_NAMESPACE = uuid.UUID("6f2d3f1e-6d1c-4c55-9d49-6c3f5f0f7a10")


@dataclasses.dataclass(frozen=True)
class Args:
    """Flags of `python -m tools.demo_text`."""

    out: Path
    """Folder to make."""
    min_mb: float = 10.0
    """Least megabytes of text; less is an error."""
    max_mb: float = 12.0
    """Stop after this many megabytes; files are visited in a fixed, mixed order."""
    shards: int = 4
    """Files to spread the documents over."""
    debian: tuple[str, ...] = ()
    """Debian documentation packages to download and add (python3.11-doc, sqlite3-doc, ...)."""

    def __post_init__(self) -> None:
        if not 0 < self.min_mb <= self.max_mb:
            raise UserError(f"--min-mb {self.min_mb}: must be above 0 and at most --max-mb")
        if self.shards < 1:
            raise UserError(f"--shards {self.shards}: give at least 1")


@dataclasses.dataclass(frozen=True)
class Source:
    """A file to read, and its place in the world as it is written into `url`."""

    path: Path
    url: str

    @property
    def order(self) -> bytes:
        return hashlib.blake2b(self.url.encode(), digest_size=8).digest()


def _files(root: Path) -> Iterator[Path]:
    """Yield the documentation files below a folder, tests and private folders left out."""
    for path in root.iterdir():
        if path.name in LEFT_OUT or path.name.startswith((".", "bfcl_eval-")) or path.is_symlink():
            continue
        if path.is_dir():
            yield from _files(path)
        elif path.suffix in SUFFIXES or path.name == "METADATA":
            yield path


def installed_sources() -> list[Source]:
    """Return the files of the standard library and of this environment's packages."""
    found: list[Source] = []
    paths = sysconfig.get_paths()
    for name in dict.fromkeys(("stdlib", "purelib", "platlib")):
        root = Path(paths[name])
        if name == "platlib" and paths["platlib"] == paths["purelib"]:
            continue
        if root.is_dir():
            for path in _files(root):
                if path.suffix in (".html", ".htm"):
                    continue  # in packages these are widgets and templates, not manuals
                found.append(Source(path, f"file:///{name}/{path.relative_to(root).as_posix()}"))
    return found


def read_paragraphs(path: Path) -> Iterator[str]:
    """Yield the prose paragraphs of one file; nothing if it is huge or not UTF-8."""
    if path.stat().st_size > MAX_FILE_BYTES:
        return
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return
    if path.suffix == ".py":
        if quoted_share(text) >= MIN_QUOTED_SHARE:
            for docstring in docstrings(text):
                yield from paragraphs(docstring)
    elif path.suffix in (".html", ".htm"):
        yield from html_paragraphs(text)
    elif path.name == "METADATA":  # a mail: headers, a blank line, the project's README
        yield from paragraphs(text.partition("\n\n")[2])
    else:
        yield from paragraphs(text)


def collect(sources: list[Source], max_bytes: int) -> Iterator[dict[str, str]]:
    """Yield rows until they hold `max_bytes` of text, new paragraphs only.

    Sources are visited in the order of a hash of their names, so that a cut corpus still
    holds something of every package.
    """
    novelty = Novelty()
    total = 0
    with progress(total=max_bytes, desc="demo text", unit="B", scale=True) as bar:
        for source in sorted(sources, key=lambda s: (s.order, s.url)):
            kept = [p for p in read_paragraphs(source.path) if novelty.admit(p)]
            text = "\n\n".join(kept)
            if len(text) < MIN_DOCUMENT_CHARS:
                continue
            size = len(text.encode("utf-8"))
            total += size
            bar.update(min(size, max_bytes - bar.n))
            yield {
                "warc_record_id": f"<urn:uuid:{uuid.uuid5(_NAMESPACE, source.url)}>",
                "url": source.url,
                "text": text,
                "language": "eng",
            }
            if total >= max_bytes:
                return


class ShardWriter:
    """Writes rows round-robin to .jsonl.zstd files, starting a new frame every megabyte."""

    def __init__(self, folder: Path, shards: int) -> None:
        import zstandard

        folder.mkdir(parents=True)
        self._compressor = zstandard.ZstdCompressor(level=6)
        self._files = [
            open(folder / f"installed-docs-part-{i:05d}.jsonl.zstd", "wb")  # noqa: SIM115
            for i in range(shards)
        ]
        self._held: list[list[bytes]] = [[] for _ in range(shards)]
        self._next = 0

    def write(self, row: dict[str, str]) -> None:
        held = self._held[self._next]
        held.append(json.dumps(row, ensure_ascii=False).encode("utf-8") + b"\n")
        if sum(map(len, held)) >= FRAME_BYTES:
            self._flush(self._next)
        self._next = (self._next + 1) % len(self._files)

    def _flush(self, i: int) -> None:
        if self._held[i]:
            self._files[i].write(self._compressor.compress(b"".join(self._held[i])))
            self._held[i].clear()

    def close(self) -> None:
        for i, file in enumerate(self._files):
            self._flush(i)
            file.close()


def main(args: Args) -> None:
    """Write English prose from installed documentation as Nemotron-CC-style shards."""
    # Syntax trees are freed by reference counts; the cycle collector would only walk them,
    # for a quarter of the time.
    gc.disable()
    sources = installed_sources()
    extra: dict[str, Any] = {}
    with artifact.create(args.out, kind="text", config=args, extra=extra) as folder:
        if args.debian:
            from tools.debian_docs import unpack

            scratch = folder / "debian"
            for package in args.debian:
                root = unpack(package, scratch)
                sources += [
                    Source(p, f"file:///debian/{package}/{p.relative_to(root).as_posix()}")
                    for p in _files(root)
                ]
        writer = ShardWriter(folder / PARTITION, args.shards)
        size = count = 0
        for row in collect(sources, int(args.max_mb * 1e6)):
            writer.write(row)
            count += 1
            size += len(row["text"].encode("utf-8"))
        writer.close()
        if args.debian:
            import shutil

            shutil.rmtree(folder / "debian")
        if size < args.min_mb * 1e6:
            raise UserError(
                f"--min-mb {args.min_mb:g}: the documentation installed here gives only "
                f"{size / 1e6:.1f} MB; add some with --debian python3.11-doc"
            )
        extra.update(text_bytes=size, documents=count, files_considered=len(sources))
    print(f"{args.out}: {size / 1e6:.1f} MB of prose, {count} documents, {args.shards} shards")


if __name__ == "__main__":
    cli.run(main, Args, prog="python -m tools.demo_text")
