"""Measures one benchmark in this process, for `tools.bench`: NAME REPEATS OUT."""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
from pathlib import Path

from gatewright import artifact, cli, launch
from gatewright.errors import UserError
from tools.benchmarks.harness import Options


def main(name: str, repeats: int, out: Path) -> None:
    """Run the benchmark and write its results as JSON."""
    import torch

    threads = int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads()))
    torch.set_num_threads(threads)
    options = Options(threads=threads, allocator=launch.allocator(), repeats=repeats)
    results = importlib.import_module(f"tools.benchmarks.{name}").run(options)
    artifact.write_json(out, [dataclasses.asdict(r) for r in results])


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
    except UserError as e:  # a peer that is missing, a disk that is full
        cli.fail(e)
