"""Scaling the gates of a 3 GB checkpoint: ours, `cp -r`, and load-edit-save with safetensors.

A Mamba-2 of random bf16 weights in 8 shards is written into a temporary folder under the
working directory and removed at the end (3 GB, plus one copy at a time).  Every side is a
process of its own, timed from start to exit with the input in the page cache: ours with its
hashes and manifest, the peer with its import of torch.  `cp` neither hashes nor checks.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from gatewright import artifact
from gatewright.checkpoints.safetensors_files import Planned, write_folder
from gatewright.checkpoints.views import hf_shapes
from gatewright.errors import UserError
from gatewright.models import ModelConfig
from tools.benchmarks.harness import Options, Result, result

THREADS = (2,)
ALLOCATORS = ("default",)

MODEL = ModelConfig(
    family="mamba2", vocab_size=50_288, d_model=2048, n_layers=50, head_dim=64, tie_embeddings=True
)
SHARD_BYTES = 400_000_000
NEEDED_BYTES = 8_000_000_000
MOST_REPEATS = 3

LOAD_EDIT_SAVE = """
import math, shutil, sys
from pathlib import Path
from safetensors.torch import load_file, save_file
source, out = map(Path, sys.argv[1:])
out.mkdir()
for file in source.iterdir():
    if file.suffix != ".safetensors":
        shutil.copyfile(file, out / file.name)
        continue
    state = load_file(file)
    for name in state:
        if name.endswith("A_log"):
            state[name] = state[name] + math.log(0.5)
    save_file(state, out / file.name, metadata={"format": "pt"})
"""


def make_checkpoint(folder: Path) -> int:
    """Write the checkpoint; returns its bytes."""
    folder.mkdir()
    noise = np.random.default_rng(0).integers(0, 2**15, 1 << 20, dtype=np.uint16)

    def produce(shape: tuple[int, ...], small: bool) -> Callable[[], np.ndarray]:
        if small:  # gates and steps must be numbers that a model could have
            return lambda: np.full(shape, 0x3F80, "<u2")  # 1.0 in bf16
        return lambda: np.resize(noise, shape)

    planned = [
        Planned(name, "BF16", shape, produce(shape, small=len(shape) == 1))
        for name, shape in hf_shapes(MODEL).items()
    ]
    write_folder(folder, planned, SHARD_BYTES)
    (folder / "config.json").write_text(json.dumps({"model_type": "mamba2", "dtype": "bfloat16"}))
    return sum(p.stat().st_size for p in folder.iterdir())


def timed(command: list[str], out: Path) -> tuple[float, int]:
    """Return seconds and peak resident bytes of a process; what it wrote is removed again."""
    start = time.perf_counter()
    pid = os.posix_spawn(command[0], command, os.environ)
    _, status, usage = os.wait4(pid, 0)
    took = time.perf_counter() - start
    if status:
        raise SystemExit(f"failed: {' '.join(command)}")
    shutil.rmtree(out)
    return took, usage.ru_maxrss * 1024


def run(options: Options) -> Iterator[Result]:
    """Measure all sides in turn, so that a slow moment of the disk hits all of them."""
    with tempfile.TemporaryDirectory(prefix="bench-gates-", dir=".") as tmp:
        if shutil.disk_usage(tmp).free < NEEDED_BYTES:
            raise UserError(f"{Path(tmp).resolve()}: the benchmark needs 8 GB free here")
        yield from _run(options, Path(tmp))


def _run(options: Options, tmp: Path) -> Iterator[Result]:
    foreign, known, out = tmp / "foreign", tmp / "known", tmp / "out"
    size = make_checkpoint(foreign)
    known.mkdir()
    for file in foreign.iterdir():
        os.link(file, known / file.name)
    artifact.finish(known, kind="hf-model")
    script = tmp / "load_edit_save.py"
    script.write_text(LOAD_EDIT_SAVE)
    ours = [sys.executable, "-m", "tools.scale_gates"]
    gate = ["--scale", "0.5", "--out", str(out)]
    sides = {
        "cp -r": [shutil.which("cp") or "cp", "-r", str(foreign), str(out)],
        "load-edit-save": [sys.executable, str(script), str(foreign), str(out)],
        "copy": [*ours, str(known), *gate],
        "copy, foreign": [*ours, str(foreign), *gate],
        "one layer, --link": [*ours, str(known), *gate, "--layers", "0", "--link"],
        "all layers, --link": [*ours, str(known), *gate, "--link"],
    }
    os.environ["GATEWRIGHT_QUIET"] = "1"
    with open(os.devnull, "w") as quiet:
        saved = os.dup(1)
        os.dup2(quiet.fileno(), 1)
        try:
            times, peaks = _measure(sides, out, min(options.repeats, MOST_REPEATS))
        finally:
            os.dup2(saved, 1)
    about = f"{size / 1e9:.1f} GB"
    for name in ("copy", "copy, foreign"):
        for peer in ("cp -r", "load-edit-save"):
            yield result(options, f"{name}, {about}", times[name], times[peer], "s", peer)
    for name in ("one layer, --link", "all layers, --link"):
        yield result(
            options, f"{name}, {about}", times[name], times["load-edit-save"], "s", "load-edit-save"
        )
    yield result(
        options,
        f"peak memory, {about}",
        peaks["copy, foreign"] / 1e6,
        peaks["load-edit-save"] / 1e6,
        "MB",
        "load-edit-save",
    )


def _measure(
    sides: dict[str, list[str]], out: Path, repeats: int
) -> tuple[dict[str, float], dict[str, int]]:
    for command in sides.values():
        timed(command, out)
    times: dict[str, list[float]] = {name: [] for name in sides}
    peaks: dict[str, int] = {}
    for _ in range(repeats):
        for name, command in sides.items():
            took, peaks[name] = timed(command, out)
            times[name].append(took)
    return {name: statistics.median(kept) for name, kept in times.items()}, peaks
