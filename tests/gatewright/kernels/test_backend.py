"""Choice of the implementation, and the compilation on first use."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gatewright import processor
from gatewright.errors import UserError
from gatewright.kernels import active_backend, backend
from gatewright.kernels.native import build

needs_compiler = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache and a process that has not looked for kernels yet."""
    monkeypatch.setenv("GATEWRIGHT_CACHE", str(tmp_path))
    monkeypatch.delenv("GATEWRIGHT_KERNELS", raising=False)
    backend._load.cache_clear()
    yield tmp_path
    backend._load.cache_clear()


def test_an_unknown_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATEWRIGHT_KERNELS", "fortran")
    with pytest.raises(UserError, match="GATEWRIGHT_KERNELS=fortran: choose one of auto, cpp"):
        active_backend()


def test_pytorch_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATEWRIGHT_KERNELS", "torch")
    assert active_backend() == "torch"
    assert backend.why() == "plain PyTorch, because GATEWRIGHT_KERNELS=torch"


def test_without_a_compiler_pytorch_takes_over_quietly(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "compiler", lambda: None)
    assert active_backend() == "torch"
    assert "no C++ compiler" in backend.why()
    assert capfd.readouterr() == ("", "")
    monkeypatch.setenv("GATEWRIGHT_KERNELS", "cpp")
    with pytest.raises(UserError, match="GATEWRIGHT_KERNELS=cpp, but no C\\+\\+ compiler"):
        active_backend()


def test_a_failing_compiler_says_so_and_leaves_nothing(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = fresh / "c++"
    bad.write_text("#!/bin/sh\necho 'error: no such machine' >&2\nexit 1\n")
    bad.chmod(0o755)
    monkeypatch.setenv("CXX", str(bad))
    assert active_backend() == "torch"
    assert "error: no such machine" in backend.why()
    assert not list((fresh / "kernels").glob("*.so"))
    assert not list((fresh / "kernels").glob(".building*"))


def test_an_unwritable_cache_is_no_error(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fresh / "file").write_text("")
    monkeypatch.setenv("GATEWRIGHT_CACHE", str(fresh / "file"))
    assert active_backend() == "torch"


@needs_compiler
def test_processes_that_start_together_compile_once(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = fresh / "calls"
    wrapper = fresh / "c++"
    wrapper.write_text(
        f'#!/bin/sh\ncase "$*" in *--version*) ;; *) echo x >> {log};; esac\n'
        f'exec {build.compiler()} "$@"\n'
    )
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    code = (
        "from gatewright.kernels.native import build; build._SOURCES = ('conv.cpp',);"
        "build._FLAGS = tuple(f for f in build._FLAGS if f != '-O3'); print(build.library_path())"
    )
    found: list[str] = []

    def start() -> None:
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
        )
        found.append(run.stdout.strip())

    threads = [threading.Thread(target=start) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == 2
    assert len(set(found)) == 1
    assert Path(found[0]).exists()
    assert log.read_text().count("x") == 1


@needs_compiler
def test_the_cache_key_follows_sources_flags_and_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    cxx = build.compiler()
    assert cxx is not None
    key = build._key(cxx)
    assert key == build._key(cxx)
    monkeypatch.setattr(processor, "features", lambda: "another machine")
    other = build._key(cxx)
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-g"))
    assert len({key, other, build._key(cxx)}) == 3
