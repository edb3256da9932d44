import errno
import json
import subprocess
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


@pytest.mark.parametrize("kind", ["dangling", "loop", "long"])
def test_places_that_cannot_be_are_refused_before_the_work(kind: str, tmp_path: Path) -> None:
    out = tmp_path / ("x" * 300 if kind == "long" else "out")
    if kind != "long":
        out.symlink_to(tmp_path / ("nowhere" if kind == "dangling" else "out"))
    before = list(tmp_path.iterdir())

    def work() -> None:
        with artifact.create(out, kind="note"):
            pytest.fail("the work has begun")

    with pytest.raises(UserError, match=r"--out .* (exists: remove it|cannot create it)"):
        work()
    assert list(tmp_path.iterdir()) == before


def test_a_disk_that_is_full_at_the_end_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(artifact, "write_json", full)
    with pytest.raises(UserError, match=r"--out .*out: cannot be finished \(No space left"):
        make(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    def work() -> None:
        with artifact.create(tmp_path / "out", kind="note") as tmp:
            (tmp / "a.txt").write_text("half")
            Path("/dev/full").write_text("the other half")

    with pytest.raises(UserError, match=r"--out .*out: cannot be written \(No space left on dev"):
        work()
    assert list(tmp_path.iterdir()) == []


def test_what_the_work_cannot_read_is_no_fault_of_the_disk(tmp_path: Path) -> None:
    def work() -> None:
        with artifact.create(tmp_path / "out", kind="note"):
            (tmp_path / "absent").read_text()

    with pytest.raises(FileNotFoundError):
        work()


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


def test_results_written_again_are_no_edit_of_the_code(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True, capture_output=True)

    git("init", "--quiet")
    (tmp_path / "docs/results").mkdir(parents=True)
    for name in ("code.py", "docs/results/table.json"):
        (tmp_path / name).write_text("old")
    git("add", ".")
    git("-c", "user.name=n", "-c", "user.email=e", "commit", "--quiet", "-m", "all")
    (tmp_path / "docs/results/table.json").write_text("new")
    assert "+dirty" not in str(artifact.git_revision(tmp_path))
    (tmp_path / "code.py").write_text("new")
    assert "+dirty" in str(artifact.git_revision(tmp_path))


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


@pytest.mark.parametrize("files", [None, [], {"a.txt": {}}, {"a.txt": 5}])
def test_a_damaged_table_of_files_is_one_line(files: object, tmp_path: Path) -> None:
    out = make(tmp_path / "out")
    manifest = json.loads((out / "manifest.json").read_text())
    (out / "manifest.json").write_text(json.dumps({**manifest, "files": files}))
    with pytest.raises(UserError, match="--data .*out: the files in manifest.json are damaged"):
        artifact.require_whole(out, "--data", (".txt",))


def test_facts_that_a_manifest_lacks_are_named(tmp_path: Path) -> None:
    manifest = artifact.read_manifest(make(tmp_path / "out", extra={"split": "x"}))
    artifact.require_extra(tmp_path / "out", manifest, {"split": (str,)})
    for damaged in (manifest, {**manifest, "extra": None}):
        with pytest.raises(UserError, match="manifest.json: has no extra.dots .* again with its"):
            artifact.require_extra(tmp_path / "out", damaged, {"dots": (str,)})


def test_facts_of_another_type_are_named(tmp_path: Path) -> None:
    extra = {"split": 5, "pools": {"beta": "x"}, "limit": None}
    manifest = artifact.read_manifest(make(tmp_path / "out", extra=extra))
    maybe = (float, type(None))
    artifact.require_extra(tmp_path / "out", manifest, {"pools": (dict,), "limit": maybe})
    for facts, message in (
        ({"split": (str,)}, "extra.split is 5, not text; make the folder again"),
        ({"pools.beta": maybe}, "extra.pools.beta is 'x', not a number or null; make"),
        ({"pools.k": maybe}, "has no extra.pools.k "),
        ({"split.k": maybe}, "has no extra.split.k "),
    ):
        with pytest.raises(UserError, match=f"manifest.json: {message}"):
            artifact.require_extra(tmp_path / "out", manifest, facts)


@pytest.mark.parametrize(
    ("value", "types", "fits"),
    [
        *((1, (int,), True), (1, (float,), True), (1.5, (float,), True), (1.5, (int,), False)),
        *((True, (int,), False), (True, (float,), False), (True, (bool,), True)),
        *((float("nan"), (float,), False), (float("-inf"), (float,), False)),
        *((None, (str, type(None)), True), (None, (str,), False), ([], (dict,), False)),
        *(([1], (list,), True), ({"a": 1}, (dict,), True), (float("nan"), (object,), True)),
    ],
)
def test_types_are_those_of_json(value: object, types: tuple[type, ...], fits: bool) -> None:
    assert (artifact.wrong_type(value, types) is None) == fits
