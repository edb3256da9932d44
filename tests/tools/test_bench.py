"""The benchmark registry, its rows, and one real measurement."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gatewright import launch
from gatewright.errors import UserError
from tools import bench
from tools.benchmarks.harness import Options, in_turn, peak_bytes, result

OPTIONS = Options(threads=1, allocator="default", repeats=1)
FIELDS = {"name", "ours", "peer", "ratio", "unit", "threads", "allocator", "repeats"}


def test_every_benchmark_says_what_it_is_and_can_be_run() -> None:
    import importlib

    assert {"ssd", "machine"} <= set(bench.names())
    for name in bench.names():
        module = importlib.import_module(f"tools.benchmarks.{name}")
        assert module.__doc__, name
        assert module.__doc__.strip().splitlines()[0].endswith("."), name
        assert callable(module.run), name
        assert set(getattr(module, "ALLOCATORS", bench.ALLOCATORS)) <= set(bench.ALLOCATORS)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (bench.Args("sdd"), "did you mean 'ssd'"),
        (bench.Args("ssd", allocators="jemalloc"), "--allocators jemalloc"),
        (bench.Args("ssd", threads="0"), "--threads 0"),
        (bench.Args("ssd", threads="two"), "--threads two"),
    ],
)
def test_bad_input_is_named(args: bench.Args, message: str) -> None:
    with pytest.raises(UserError, match=message):
        bench.settings(args)


def test_settings_are_every_pair_and_a_module_may_narrow_them() -> None:
    both = bench.Args("ssd", threads="1,2", allocators="tuned,default")
    assert set(bench.settings(both)) == {(a, t) for a in ("tuned", "default") for t in (1, 2)}
    assert {a for a, _ in bench.settings(bench.Args("machine"))} == {"default"}


def test_the_measuring_process_gets_its_allocator_and_threads() -> None:
    base = {"GLIBC_TUNABLES": launch.tuned_env({})["GLIBC_TUNABLES"], "PATH": "/bin"}
    plain = bench.environment("default", 3, base)
    assert launch.allocator(plain) == "default"
    assert plain["OMP_NUM_THREADS"] == "3"
    assert plain["PATH"] == "/bin"
    assert launch.allocator(bench.environment("tuned", 1, {})) == "tuned"


def test_a_ratio_above_one_means_ours_is_better() -> None:
    assert result(OPTIONS, "time", 2.0, 10.0, "ms").ratio == 5.0
    assert result(OPTIONS, "speed", 10.0, 2.0, "tokens/s", more_is_better=True).ratio == 5.0
    assert result(OPTIONS, "limit", 10.0, None, "GB/s").ratio is None


def test_sides_are_measured_in_turn_after_a_warm_up() -> None:
    calls: list[str] = []
    medians = in_turn(2, lambda: calls.append("a"), lambda: calls.append("b"))
    assert calls == ["a", "b", "a", "b", "a", "b"]
    assert all(m >= 0 for m in medians)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_peak_memory_sees_what_is_freed_again() -> None:
    def spike() -> None:
        block = bytearray(96 << 20)
        block[::4096] = b"x" * len(block[::4096])

    peak = peak_bytes(spike)
    assert peak is not None
    assert 90 << 20 < peak < 140 << 20


def test_a_measurement_from_the_command_line(tmp_path: Path) -> None:
    out = tmp_path / "machine.json"
    flags = ["--threads", "1", "--repeats", "1", "--json", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "tools.bench", "machine", *flags],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "sgemm" in done.stdout
    written = json.loads(out.read_text())
    assert written["machine"]["cpu"]
    assert written["command"] == ["machine", *flags[:-1], "machine.json"]
    for row in written["results"]:
        assert row.keys() >= FIELDS
        assert row["ours"] > 0
        assert row["threads"] == 1


def test_a_file_that_cannot_be_written_is_refused_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "measure", lambda *_: pytest.fail("measured"))
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "results.json", tmp_path):
        with pytest.raises(UserError, match=f"--json {path}"):
            bench.main(bench.Args("machine", json=path))
