"""The doctor's page: it looks, it does not guess, and it survives what it finds."""

import json
import os
import subprocess
import sys

import pytest

from gatewright.errors import UserError
from tools import doctor


def test_every_part_is_examined_and_drawn_on_one_page() -> None:
    findings = doctor.examine()
    parts = [f.part for f in findings]
    assert len(set(parts)) == len(parts) == len(doctor.CHECKS)
    drawn = doctor.page(findings)
    assert all(part in drawn for part in parts)
    assert len(drawn.splitlines()) <= 40
    assert all(len(line) < 220 for line in drawn.splitlines())


def test_an_absent_package_says_what_it_would_change() -> None:
    found = doctor.package("Nothing", "no-such-distribution", "flies to the moon")
    assert found.state == "absent"
    assert "flies to the moon" in doctor.page([found])


def test_the_kernels_in_use_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATEWRIGHT_KERNELS", "torch")
    found = doctor.kernels()
    assert found.found == "torch: plain PyTorch, because GATEWRIGHT_KERNELS=torch"


def test_a_check_that_fails_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATEWRIGHT_KERNELS", "fortran")
    findings = doctor.examine()
    assert len(findings) == len(doctor.CHECKS)
    broken = [f for f in findings if f.state == "broken"]
    assert any("GATEWRIGHT_KERNELS=fortran" in f.found for f in broken)


def test_missing_needs_give_exit_code_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def gone(name: str) -> None:
        raise UserError("bfcl_eval is not installed")

    monkeypatch.setattr("gatewright.bfcl.load_split", gone)
    monkeypatch.setattr(doctor, "CHECKS", (doctor.bfcl_data, doctor.allocator))
    assert doctor.main(doctor.Args()) == 1
    assert "cannot run without: BFCL data" in capsys.readouterr().out


def test_json_from_the_command_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.doctor", "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ | {"GATEWRIGHT_KERNELS": "torch"},
    )
    assert done.returncode == 0, done.stderr
    parts = {f["part"]: f for f in json.loads(done.stdout)}
    assert parts["torch"]["state"] == "ok"
    assert parts["BFCL data"]["found"].endswith("400 simple_python questions")
