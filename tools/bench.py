"""Speed and memory as ratios against a named peer, both sides measured in turn in one run.

    python -m tools.bench NAME [--json FILE] [--threads 1,2] [--allocators default,tuned]
    python -m tools.bench list

How to add a benchmark: put a module `tools/benchmarks/<name>.py` beside the others.  Its
docstring's first line is what `list` shows, and it has

    def run(options: Options) -> Iterable[Result]

with `Options`, `Result` and the measuring functions of `tools.benchmarks.harness`.  Nothing is
registered by hand.  `run` is called once per allocator and thread count, each time in a fresh
process that was started with that allocator and number of threads, so it only has to measure.
A module may narrow the default settings with `THREADS = (2,)` or `ALLOCATORS = ("tuned",)`.

Each result is a row of the table and an object of the JSON file: `name`, `ours`, `peer`,
`ratio` (above 1: ours is better), `unit`, `threads`, `allocator`, `repeats`, `peer_name`.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from gatewright import artifact, cli, launch
from gatewright.errors import UserError

FOLDER = Path(__file__).parent / "benchmarks"
INFRASTRUCTURE = ("__init__", "__main__", "harness", "small_model")
ALLOCATORS = ("default", "tuned")


@dataclass
class Args:
    name: Annotated[str, tyro.conf.Positional]
    """Which benchmark, or `list`."""
    json: Path | None = None
    """Also write the results, with the machine's description, to this file."""
    threads: str = ""
    """Thread counts, comma-separated (default: 1 and all cores)."""
    allocators: str = ""
    """glibc's allocator as it comes (`default`) and as our launchers set it (`tuned`)."""
    repeats: int = 5
    """Measurements of each side, in turn, after a warm-up; the median counts."""

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise UserError(f"--repeats {self.repeats}: give 1 or more")


def names() -> list[str]:
    """Return every benchmark there is."""
    return sorted(p.stem for p in FOLDER.glob("*.py") if p.stem not in INFRASTRUCTURE)


def settings(args: Args) -> list[tuple[str, int]]:
    """Return the (allocator, threads) pairs that are asked for.

    Raises:
        UserError: an unknown benchmark (the nearest is named), allocator or thread count.
    """
    known = names()
    if args.name not in known:
        raise UserError(
            f"no benchmark {args.name!r}{cli.nearest(args.name, known)}; "
            "`python -m tools.bench list` shows all"
        )
    module = importlib.import_module(f"tools.benchmarks.{args.name}")
    default_threads: Sequence[int] = getattr(module, "THREADS", sorted({1, launch.cores()}))
    allocators = [a.strip() for a in args.allocators.split(",") if a.strip()]
    for a in allocators:
        if a not in ALLOCATORS:
            raise UserError(f"--allocators {a}: choose from {', '.join(ALLOCATORS)}")
    threads = cli.numbers("--threads", args.threads, int, least=1) if args.threads else None
    return [
        (a, t)
        for t in (threads or default_threads)
        for a in allocators or list(getattr(module, "ALLOCATORS", ALLOCATORS))
    ]


def environment(allocator: str, threads: int, base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of one measuring process."""
    env = {k: v for k, v in base.items() if k not in ("GLIBC_TUNABLES", "GATEWRIGHT_MALLOC")}
    if allocator == "tuned":
        env = launch.tuned_env(env)
    return env | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def measure(name: str, allocator: str, threads: int, repeats: int) -> list[dict[str, Any]]:
    """Run one benchmark in a process of its own; return its results."""
    with tempfile.TemporaryDirectory() as tmp:
        out = Path(tmp) / "results.json"
        command = [sys.executable, "-m", "tools.benchmarks", name, str(repeats), str(out)]
        env = environment(allocator, threads, os.environ)
        done = subprocess.run(command, env=env, check=False)
        if done.returncode:
            raise SystemExit(done.returncode)
        rows: list[dict[str, Any]] = json.loads(out.read_text())
    return rows


def machine() -> dict[str, Any]:
    """Describe the machine that a figure was measured on."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "system": platform.platform(),
        "versions": artifact.versions(),
        "git_revision": artifact.git_revision(),
    }


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return results as an aligned table, worst ratio visible at a glance."""
    head = ("name", "ours", "peer", "ratio", "unit", "threads", "allocator", "peer is")
    body = [
        (
            str(r["name"]),
            _number(r["ours"]),
            _number(r["peer"]),
            "-" if r["ratio"] is None else f"{r['ratio']:.2f}x",
            str(r["unit"]),
            str(r["threads"]),
            str(r["allocator"]),
            str(r["peer_name"] or "-"),
        )
        for r in rows
    ]
    widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
        for line in [head, *body]
    )


def _require_writable(path: Path) -> None:
    """Refuse a file that cannot be written, before minutes of measuring; makes its folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as e:
        raise UserError(
            f"--json {path}: {e.strerror}; give a file in a folder that can be written"
        ) from e
    if path.is_dir():
        raise UserError(f"--json {path}: is a folder; give a file")


def main(args: Args) -> None:
    """Measure one benchmark against its peer and print a table of ratios."""
    if args.name == "list":
        for name in names():
            doc = importlib.import_module(f"tools.benchmarks.{name}").__doc__ or ""
            print(f"{name:12} {doc.strip().splitlines()[0]}")
        return
    wanted = settings(args)
    if args.json is not None:
        _require_writable(args.json)
    rows: list[dict[str, Any]] = []
    for allocator, threads in wanted:
        print(f"{args.name}: allocator {allocator}, threads {threads}", file=sys.stderr)
        rows += measure(args.name, allocator, threads, args.repeats)
    print(table(rows))
    if args.json is not None:
        # the file's name only: where it lay is nobody's concern and makes two runs differ
        command = [args.json.name if a == str(args.json) else a for a in sys.argv[1:]]
        written = {"benchmark": args.name, "command": command, "machine": machine()}
        artifact.write_json(args.json, written | {"results": rows})


if __name__ == "__main__":
    cli.run(main, Args, prog="python -m tools.bench")
