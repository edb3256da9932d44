"""Scaling the gates of a 3 GB checkpoint: ours, `cp -r`, and load-edit-save with safetensors.

A Mamba-2 of random bf16 weights in 8 shards is written into a temporary folder under $TMPDIR
(else the working directory) and removed at the end (3 GB, plus one copy at a time); which
filesystem that is decides what `--link` can share.  Every side is a
process of its own, timed from start to exit with the input in the page cache: ours with its
hashes and manifest, the peer with its import of torch.  `cp` neither hashes nor checks.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from gatewright import artifact
from gatewright.checkpoints.safetensors_files import Planned, write_folder
from gatewright.checkpoints.views import hf_shapes
from gatewright.errors import UserError
from gatewright.models import ModelConfig
from tools.benchmarks.harness import Options, Result, result, seconds

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


WATCHED = """
import atexit, runpy, sys
from pathlib import Path

def note():
    status = dict(x.split(":", 1) for x in open("/proc/self/status"))
    Path(note_file).write_text(status["VmHWM"].split()[0])

kind, what, note_file, *sys.argv[1:] = sys.argv[1:]
sys.argv[0] = note_file
atexit.register(note)
if kind == "-m":
    runpy.run_module(what, run_name="__main__", alter_sys=True)
else:
    runpy.run_path(what, run_name="__main__")
"""
"""Runs a module or script and notes the process's high-water mark (getrusage would report
that of the process that started it)."""


def timed(command: list[str], out: Path) -> float:
    """Return how many seconds a process takes; what it wrote is removed again."""
    took = seconds(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL))
    shutil.rmtree(out)
    return took


def peak_megabytes(kind: str, what: str, arguments: list[str], out: Path) -> float:
    """Return the peak resident memory of a Python module (`-m`) or script (`-f`)."""
    note = out.with_name("peak")
    watched = [sys.executable, "-c", WATCHED, kind, what, str(note), *arguments]
    timed(watched, out)
    return int(note.read_text()) / 1000


def run(options: Options) -> Iterator[Result]:
    """Measure all sides in turn, so that a slow moment of the disk hits all of them."""
    with tempfile.TemporaryDirectory(
        prefix=".bench-gates.partial-", dir=os.environ.get("TMPDIR", ".")
    ) as tmp:
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
    linked = ["--link", "--no-hash"]
    sides = {
        "cp -r": [shutil.which("cp") or "cp", "-r", str(foreign), str(out)],
        "load-edit-save": [sys.executable, str(script), str(foreign), str(out)],
        "copy": [*ours, str(known), *gate],
        "copy, foreign": [*ours, str(foreign), *gate],
        "copy, --no-hash": [*ours, str(foreign), *gate, "--no-hash"],
        "one layer, --link --no-hash": [*ours, str(foreign), *gate, *linked, "--layers", "0"],
        "all layers, --link --no-hash": [*ours, str(foreign), *gate, *linked],
    }
    os.environ["GATEWRIGHT_QUIET"] = "1"
    times = _measure(sides, out, min(options.repeats, MOST_REPEATS))
    about = f"{size / 1e9:.1f} GB"
    for name in ("copy", "copy, foreign", "copy, --no-hash"):
        for peer in ("cp -r", "load-edit-save"):
            yield result(options, f"{name}, {about}", times[name], times[peer], "s", peer)
    for name in ("one layer, --link --no-hash", "all layers, --link --no-hash"):
        yield result(
            options, f"{name}, {about}", times[name], times["load-edit-save"], "s", "load-edit-save"
        )
    yield result(
        options,
        f"peak memory, {about}",
        peak_megabytes("-m", "tools.scale_gates", [str(foreign), *gate], out),
        peak_megabytes("-f", str(script), [str(foreign), str(out)], out),
        "MB",
        "load-edit-save",
    )


def _measure(sides: dict[str, list[str]], out: Path, repeats: int) -> dict[str, float]:
    for command in sides.values():
        timed(command, out)
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, command in sides.items():
            times[name].append(timed(command, out))
    return {name: statistics.median(kept) for name, kept in times.items()}
