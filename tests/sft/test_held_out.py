"""What asking a model about held-out chats needs."""

import os
import shutil
from pathlib import Path

import pytest

from gatewright import artifact
from gatewright.errors import UserError
from sft import held_out


def test_the_renderer_draws_reasoning_if_it_was_kept(data: Path) -> None:
    manifest = artifact.read_manifest(data)
    assert not held_out.load_renderer(data, manifest).reasoning
    manifest["config"]["reasoning"] = "keep"
    assert held_out.load_renderer(data, manifest).reasoning


def test_a_damaged_file_is_named(data: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(data, damaged)
    os.truncate(damaged / "held_out.jsonl", 100)
    with pytest.raises(UserError, match=r"held_out.jsonl: is missing or damaged"):
        held_out.load_questions(damaged, 5)
    (damaged / "tools.jsonl").unlink()
    with pytest.raises(UserError, match=r"tools.jsonl: is missing or damaged"):
        held_out.pool_builder(damaged, artifact.read_manifest(damaged))
