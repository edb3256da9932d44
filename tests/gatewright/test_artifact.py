import json
from pathlib import Path

import pytest

from gatewright import artifact
from gatewright.errors import UserError


def make(out: Path, text: str = "hello", **kwargs: object) -> Path:
    with artifact.create(out, kind="note", **kwargs) as tmp:  # type: ignore[arg-type]
        (tmp / "a.txt").write_text(text)
    return out


def test_a_folder_appears_complete_with_its_manifest(tmp_path: Path) -> None:
    parent = make(tmp_path / "parent")
    child = make(tmp_path / "sub" / "child", parents={"from": parent}, seed=3, config={"x": 1})
    manifest = artifact.read_manifest(child, "note")
    assert manifest["parents"]["from"]["content_hash"] == artifact.content_hash(parent)
    assert manifest["seed"] == 3
    assert manifest["config"] == {"x": 1}
    assert manifest["files"]["a.txt"]["bytes"] == 5
    artifact.verify(child)


def test_nothing_is_left_when_the_work_fails(tmp_path: Path) -> None:
    def work() -> None:
        with artifact.create(tmp_path / "out", kind="note") as tmp:
            (tmp / "a.txt").write_text("half")
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        work()
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_not_overwritten(tmp_path: Path) -> None:
    out = make(tmp_path / "out")
    with pytest.raises(UserError, match="already finished"):
        make(out, "other")
    assert (out / "a.txt").read_text() == "hello"


def test_equal_content_has_an_equal_hash_and_other_content_another(tmp_path: Path) -> None:
    a, b, c = make(tmp_path / "a"), make(tmp_path / "b"), make(tmp_path / "c", "HELLO")
    assert artifact.content_hash(a) == artifact.content_hash(b) != artifact.content_hash(c)
    (a / artifact.MANIFEST).unlink()  # a foreign folder is hashed from its files
    assert artifact.content_hash(a) == artifact.content_hash(b)


@pytest.mark.parametrize("damage", ["missing", "unfinished", "garbled", "other kind"])
def test_what_is_not_finished_is_refused_in_one_line(tmp_path: Path, damage: str) -> None:
    out = make(tmp_path / "out")
    manifest = out / artifact.MANIFEST
    if damage == "missing":
        out = tmp_path / "nowhere"
    elif damage == "unfinished":
        manifest.unlink()
    elif damage == "garbled":
        manifest.write_text("{")
    else:
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "kind": "poem"}))
    with pytest.raises(UserError) as error:
        artifact.read_manifest(out, "note", flag="--data")
    assert str(out) in str(error.value)
    assert "\n" not in str(error.value)


def test_changed_bytes_are_noticed(tmp_path: Path) -> None:
    out = make(tmp_path / "out")
    (out / "a.txt").write_text("jello")
    with pytest.raises(UserError, match=r"a\.txt: differs"):
        artifact.verify(out)


def test_a_frozen_copy_of_the_checkout_knows_its_revision(tmp_path: Path) -> None:
    assert artifact.git_revision(tmp_path) is None
    (tmp_path / artifact.REVISION).write_text("abc+dirty\n")
    assert artifact.git_revision(tmp_path) == "abc+dirty"


def test_files_cut_short_are_noticed_without_reading_them(tmp_path: Path) -> None:
    out = make(tmp_path / "out")
    size = (out / "a.txt").stat().st_size
    artifact.require_whole(out, "--data", (".txt",))
    (out / "a.txt").write_text("h")
    with pytest.raises(UserError, match=rf"--data .*a\.txt: has 1 bytes, not the {size} that"):
        artifact.require_whole(out, "--data", (".txt",))
    artifact.require_whole(out, "--data", (".bin",))  # what may be edited is not compared
    (out / "a.txt").unlink()
    with pytest.raises(UserError, match="has 0 bytes"):
        artifact.require_whole(out, "--data", (".txt",))
