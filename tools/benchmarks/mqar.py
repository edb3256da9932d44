"""Training seeds of a recall cell together against one after the other, seconds.

Both sides are `python -m synthetic.recall run` with the same steps; ours trains three seeds in
one process, the peer three processes of one seed, start-up included on both sides.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tools.benchmarks.harness import Options, Result, in_turn, result

ALLOCATORS = ("tuned",)
SEEDS, STEPS = 3, 60
MOST_REPEATS = 2


def run(options: Options) -> Iterator[Result]:
    root = Path(__file__).resolve().parents[2]

    def train(seeds: int) -> None:
        with tempfile.TemporaryDirectory() as tmp:
            command = [
                *(sys.executable, "-m", "synthetic.recall", "run"),
                *("--cell", "gated_deltanet", "--conv", "--pairs", "32", "--sequences", "256"),
                *("--seeds", str(seeds), "--steps", str(STEPS)),
                *("--threads", str(options.threads), "--out", str(Path(tmp) / "run")),
            ]
            quiet = {**os.environ, "GATEWRIGHT_QUIET": "1"}
            subprocess.run(command, cwd=root, env=quiet, check=True, stdout=subprocess.DEVNULL)

    def together() -> None:
        train(SEEDS)

    def one_by_one() -> None:
        for _ in range(SEEDS):
            train(1)

    repeats = min(options.repeats, MOST_REPEATS)
    ours, peer = in_turn(repeats, together, one_by_one)
    yield result(
        options,
        f"{SEEDS} seeds of gated DeltaNet, MQAR K = 32, {STEPS} steps",
        ours,
        peer,
        "s",
        "one seed at a time",
    )
