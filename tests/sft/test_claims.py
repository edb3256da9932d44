"""Output folders: whose they are, and where none can be."""

from pathlib import Path

import pytest

from gatewright import artifact
from gatewright.errors import UserError
from sft import claims, sweep, train
from sft.recipes import RECIPES


def test_a_folder_says_whose_it_is(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    assert claims.held(out, "run.json") is None
    claims.begin(out, "run.json", {"a": 1})
    assert claims.held(out, "run.json") == {"a": 1}
    with pytest.raises(UserError, match="is not empty"):
        claims.begin(out, "run.json", {"a": 1})
    for damage in ("{", "[]x", "5", "\xff"):
        (out / "run.json").write_text(damage, encoding="latin-1")
        with pytest.raises(UserError, match=r"run.json: is damaged"):
            claims.held(out, "run.json")
    (out / artifact.MANIFEST).touch()
    with pytest.raises(UserError, match="already finished"):
        claims.require_unfinished(out)


@pytest.mark.parametrize("place", ["file", "file/under", "/proc/none/out", "x" * 300])
def test_where_no_folder_can_be_is_one_line(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "data").mkdir()
    out, data, recipe = tmp_path / place, tmp_path / "data", "mamba2_debug_cpu"
    with pytest.raises(UserError, match=r"--out .*: cannot be made"):
        train.claim(train.Args(data, data, out, RECIPES.get(recipe)), recipe, {})
    with pytest.raises(UserError, match=r"--out .*: cannot be made"):
        sweep.claim(sweep.Args(data, data, out, RECIPES.get(recipe)), recipe)
