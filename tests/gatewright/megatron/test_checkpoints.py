"""Which checkpoint is chosen, and what is refused."""

from __future__ import annotations

import shutil
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest

from gatewright.errors import UserError
from gatewright.megatron import build, checkpoints, distributed, telemetry
from gatewright.megatron.config import CheckpointConfig, ParallelConfig
from tests.gatewright.megatron import tiny


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    with distributed.processes(ParallelConfig()):
        yield


def fake(out: Path, step: int) -> Path:
    folder = out / checkpoints.folder_name(step)
    folder.mkdir()
    (folder / "metadata.json").write_text("{}")
    return folder


def test_only_latest_decides(tmp_path: Path) -> None:
    """A complete-looking newer folder that `latest` does not name is not taken."""
    assert checkpoints.latest(tmp_path) is None
    fake(tmp_path, 5)
    fake(tmp_path, 10)
    (tmp_path / "latest").write_text("iter_0000005\n")
    assert checkpoints.latest(tmp_path) == tmp_path / "iter_0000005"


def test_a_pointer_to_nothing_names_the_way_out(tmp_path: Path) -> None:
    fake(tmp_path, 5)
    (tmp_path / "iter_0000010").mkdir()  # no metadata.json: half written or half removed
    (tmp_path / "latest").write_text("iter_0000010\n")
    with pytest.raises(UserError, match="missing or damaged; .*iter_0000005"):
        checkpoints.latest(tmp_path)


def test_what_a_killed_save_left_is_removed(tmp_path: Path) -> None:
    fake(tmp_path, 5)
    (tmp_path / ".iter_0000010.partial-1f").mkdir()
    checkpoints.remove_partial(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["iter_0000005"]


def test_a_full_disk_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build.build_model(tiny.MODELS["llama"])
    need = checkpoints.checkpoint_bytes(model)
    assert need == 16 * tiny.MODELS["llama"].parameters()  # fp32: weights, master, two moments
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1, 1, int(need * 1.2)))
    checkpoints.require_space(tmp_path, model)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1, 1, need))
    with pytest.raises(UserError, match="GB are free"):
        checkpoints.require_space(tmp_path, model)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with one real checkpoint of a Llama."""
    out = tmp_path_factory.mktemp("saved")
    saver = checkpoints.Saver(out, CheckpointConfig(), {})
    saver.save(build.build_model(tiny.MODELS["llama"]), None, None, step=3, consumed_samples=12)
    saver.close()
    return out


@pytest.mark.parametrize("content", [b"junk", b"", b"{", b"[]", None])
@pytest.mark.parametrize("file", ["common.pt", "metadata.json", ".metadata", "__0_0.distcp"])
def test_a_damaged_checkpoint_names_the_way_out(
    file: str, content: bytes | None, saved: Path, tmp_path: Path
) -> None:
    """Whichever file it is, and whether it is junk or cut in half."""
    out = tmp_path / "run"
    shutil.copytree(saved, out)
    path = out / "iter_0000003" / file
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if content is None else content)
    fake(out, 2)
    found = checkpoints.latest(out)
    assert found is not None
    with pytest.raises(UserError, match=r"iter_0000003: is damaged.*\(complete: iter_0000002\)"):
        checkpoints.load(found, build.build_model(tiny.MODELS["llama"]))


def test_another_models_checkpoint_names_where_its_sizes_are(saved: Path) -> None:
    with pytest.raises(UserError, match=r"not of this model .*iter_0000003/config\.json"):
        checkpoints.load(saved / "iter_0000003", build.build_model(tiny.MODELS["mamba2"]))


@pytest.mark.parametrize("content", ["{", "[]", '{"1": 5}', '{"x": [[0], [0]]}', '{"1": ["a"]}'])
def test_damaged_gates_at_the_start_are_named(content: str, tmp_path: Path) -> None:
    (tmp_path / telemetry.INITIAL).write_text(content)
    model = build.build_model(tiny.MODELS["mamba2"])
    with pytest.raises(UserError, match="gates_at_start.json: is damaged"):
        telemetry.GateTelemetry(model, tmp_path, fresh=False)


@pytest.mark.parametrize("name", ["", "run", "iter_0000005/../..", "\0"])
def test_a_pointer_that_is_no_checkpoints_name(name: str, tmp_path: Path) -> None:
    fake(tmp_path, 5)
    (tmp_path / "metadata.json").write_text("{}")
    (tmp_path / "latest").write_text(name)
    with pytest.raises(UserError, match="missing or damaged"):
        checkpoints.latest(tmp_path)


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no complete torch_dist checkpoint"):
        checkpoints.load(tmp_path, build.build_model(tiny.MODELS["llama"]))
