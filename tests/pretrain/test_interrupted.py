"""Runs that are killed or told to leave, alone and in twos, and what becomes of them."""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gatewright.megatron import tiny
from tests.pretrain.training import LLAMA, MAMBA, STEPS, command, finish, start, wait_for_step


@pytest.mark.parametrize(
    ("more", "kills"),
    [([], 1), (["--checkpoint.asynchronous", "--checkpoint.every-steps", "1"], 2)],
    ids=["between saves", "while saving"],
)
def test_killed_and_started_again_equals_never_killed(
    more: list[str], kills: int, whole: Path, inputs: dict[str, Path], tmp_path: Path
) -> None:
    """kill -9 at random moments; with a save in flight at every step, also during a save."""
    out = tmp_path / "run"
    arguments = [*command(inputs, out, MAMBA), *more]
    rng = random.Random(kills)
    done = 0
    for _ in range(kills):
        process = start(arguments)
        wait_for_step(out, done + rng.randint(8, 13), process)
        time.sleep(rng.uniform(0, 0.05))
        process.kill()
        process.communicate()
        done = len(tiny.losses(out))
        assert done < STEPS
        assert not (out / "manifest.json").exists()
    finish(start(arguments))
    assert tiny.losses(out) == tiny.losses(whole)  # bit for bit
    assert not list(out.glob(".iter_*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_and_leaves_with_the_documented_code(
    number: int, inputs: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    endless = [*LLAMA, "--train.steps", "100000", "--checkpoint.every-steps", "90000"]
    process = start(command(inputs, out, endless))
    wait_for_step(out, 3, process)
    process.send_signal(number)
    printed = finish(process, code=75)
    assert signal.Signals(number).name in printed
    saved = (out / "latest").read_text().strip()
    assert f"iter_{tiny.metrics(out)[-1]['step']:07d}" == saved


KILLED = """
import os, signal, sys
from gatewright.megatron import checkpoints
from pretrain import train

owner = checkpoints.Saver if sys.argv[1] == "_publish" else checkpoints
setattr(owner, sys.argv[1], lambda *args: os.kill(os.getpid(), signal.SIGKILL))
train.run(sys.argv[2:])
"""


def test_killed_in_the_middle_of_a_save_equals_never_killed(
    whole: Path, inputs: dict[str, Path], tmp_path: Path
) -> None:
    """kill -9 when all is written, when it has its name, and when `latest` names it."""
    out = tmp_path / "run"
    arguments = command(inputs, out, MAMBA)
    left = (
        ("_publish", False, None),
        ("_point_latest_at", True, None),
        ("prune", True, "iter_0000008\n"),
    )
    for function, named, latest in left:
        finish(start([function, *arguments], program=("-c", KILLED)), code=-signal.SIGKILL)
        assert (out / "iter_0000008" / "metadata.json").is_file() == named
        assert bool(list(out.glob(".iter_*"))) != named
        pointer = out / "latest"
        assert (pointer.read_text() if pointer.exists() else None) == latest
    finish(start(arguments))
    assert tiny.losses(out) == tiny.losses(whole)  # bit for bit
    assert not list(out.glob(".iter_*"))


@contextlib.contextmanager
def two(arguments: list[str]) -> Iterator[list[subprocess.Popen[str]]]:
    """Start rank 0 and rank 1 as srun would; neither outlives the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [start(arguments, env={**world, "RANK": r, "LOCAL_RANK": r}) for r in "01"]
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def test_two_processes_leave_go_on_and_change_their_layout(
    inputs: dict[str, Path], tmp_path: Path
) -> None:
    """A signal to rank 1; the same layout goes on bit for bit, another to 1e-5."""
    together, out = tmp_path / "together", tmp_path / "run"
    short = [*MAMBA, "--train.steps", "24", "--checkpoint.every-steps", "12"]
    tensor = ["--parallel.tensor", "2"]
    with two([*command(inputs, together, short), *tensor]) as ranks:
        for process in ranks:
            finish(process)
    expected = tiny.losses(together)
    assert len(expected) == 24

    with two([*command(inputs, out, short), *tensor]) as ranks:
        wait_for_step(out, 2, ranks[0])
        ranks[1].send_signal(signal.SIGUSR1)
        said = [finish(process, code=75) for process in ranks]
    assert "(SIGUSR1), saved in" in said[0]
    step = tiny.metrics(out)[-1]["step"]
    assert (out / "latest").read_text() == f"iter_{step:07d}\n"
    assert 2 <= step < 24 - 5
    shutil.copytree(out, tmp_path / "pipeline")

    with two([*command(inputs, out, short), *tensor]) as ranks:
        for process in ranks:
            finish(process)
    assert tiny.losses(out) == expected  # bit for bit

    out = tmp_path / "pipeline"
    with two([*command(inputs, out, short), "--parallel.pipeline", "2"]) as ranks:
        wait_for_step(out, step + 5, ranks[0])
    assert tiny.losses(out)[: step + 5] == pytest.approx(expected[: step + 5], abs=1e-5)
