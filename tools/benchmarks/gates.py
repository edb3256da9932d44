"""Scaling the gates of a 3 GB checkpoint: ours, `cp -r`, and load-edit-save with safetensors.

A Mamba-2 of random bf16 weights is written into a temporary folder under $TMPDIR (else the
working directory), in 8 shards that all hold gates and again in one file, and removed at the
end (9 GB with a copy).  Which filesystem that is decides what `--link` can share: the rows say
whether it has reflinks.  Every side is a process of its own, timed from start to exit with the
input in the page cache: ours with its manifest, the peer with its import of torch.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from gatewright.checkpoints.safetensors_files import Planned, write_folder
from gatewright.checkpoints.views import hf_shapes
from gatewright.errors import UserError
from gatewright.gates.copying import share
from gatewright.models import ModelConfig
from tools.benchmarks.harness import Options, Result, result, seconds

THREADS = (2,)
ALLOCATORS = ("default",)

MODEL = ModelConfig(
    family="mamba2", vocab_size=50_288, d_model=2048, n_layers=50, head_dim=64, tie_embeddings=True
)
SHARD_BYTES = 400_000_000
NEEDED_BYTES = 9_000_000_000
MOST_REPEATS = 3
SETTLE_SECONDS = 1.0

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


def make_checkpoint(folder: Path, shard_bytes: int) -> int:
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
    write_folder(folder, planned, shard_bytes)
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
    os.sync()  # nobody pays for what the one before left to be written back,
    time.sleep(SETTLE_SECONDS)  # or for the blocks that its removal gave back to the disk
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
            raise UserError(f"{Path(tmp).resolve()}: the benchmark needs 9 GB free here")
        yield from _run(options, Path(tmp))


def _run(options: Options, tmp: Path) -> Iterator[Result]:
    sharded, single, out = tmp / "sharded", tmp / "single", tmp / "out"
    size = make_checkpoint(sharded, SHARD_BYTES)
    make_checkpoint(single, 1 << 40)
    script = tmp / "load_edit_save.py"
    script.write_text(LOAD_EDIT_SAVE)
    gate = ["--scale", "0.5", "--out", str(out)]

    def ours(source: Path, *flags: str) -> list[str]:
        return [sys.executable, "-m", "tools.scale_gates", str(source), *gate, *flags]

    def cp(source: Path) -> list[str]:
        return [shutil.which("cp") or "cp", "-r", str(source), str(out)]

    edit_saved = "load-edit-save"
    sides = {
        "cp -r": cp(sharded),
        "cp -r, one file": cp(single),
        edit_saved: [sys.executable, str(script), str(sharded), str(out)],
        "copy": ours(sharded),
        "copy, one file": ours(single),
        "copy, --hash": ours(sharded, "--hash"),
        "one layer, --link": ours(sharded, "--link", "--layers", "0"),
        "all layers, --link": ours(sharded, "--link"),
    }
    os.environ["GATEWRIGHT_QUIET"] = "1"
    times = _measure(sides, out, min(options.repeats, MOST_REPEATS))
    about = f"{size / 1e9:.1f} GB, {'reflinks' if _has_reflinks(tmp) else 'no reflinks'}"
    for name, peer in (
        ("copy", "cp -r"),
        ("copy, one file", "cp -r, one file"),
        ("copy, --hash", "cp -r"),
        ("copy", edit_saved),
        ("one layer, --link", edit_saved),
        ("all layers, --link", edit_saved),
    ):
        yield result(options, f"{name}, {about}", times[name], times[peer], "s", peer)
    yield result(
        options,
        f"peak memory, {about}",
        peak_megabytes("-m", "tools.scale_gates", [str(sharded), *gate], out),
        peak_megabytes("-f", str(script), [str(sharded), str(out)], out),
        "MB",
        edit_saved,
    )


def _has_reflinks(folder: Path) -> bool:
    (folder / "probe").write_bytes(b"x" * 8192)
    return share(folder / "probe", folder / "probe-clone", may_link=False)


def _measure(sides: dict[str, list[str]], out: Path, repeats: int) -> dict[str, float]:
    for command in sides.values():
        timed(command, out)
    times: dict[str, list[float]] = {name: [] for name in sides}
    order, rng = list(sides), random.Random(0)
    for _ in range(repeats):
        rng.shuffle(order)  # so that no side always follows the same one
        for name in order:
            times[name].append(timed(sides[name], out))
    return {name: statistics.median(kept) for name, kept in times.items()}
