"""The command line of show_gates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gatewright import cli
from gatewright.gates import edits, find, rewrite
from gatewright.gates.edits import Edit
from tests.gatewright.gates import families
from tools import show_gates


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("m")
    before = families.save("mamba2", root / "before")
    gates = find.find_gates(before)
    plan = edits.resolve(Edit("scale", 2.0), gates, {})
    rewrite.write_edits(gates, [plan], root / "after", dts={})
    return before, root / "after"


def shown(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as left:
        cli.run(show_gates.main, show_gates.Args, prog="show_gates", argv=argv)
    assert left.value.code == 0
    return capsys.readouterr().out


def test_the_table_and_the_json_say_the_same(
    models: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    table = shown([str(models[0])], capsys)
    found = json.loads(shown([str(models[0]), "--json"], capsys))
    assert found["model_type"] == "mamba2"
    assert found["dt_from"] == "weights"
    assert [row["layer"] for row in found["layers"]] == [0, 1, 2]
    for row in found["layers"]:
        line = next(x for x in table.splitlines() if x.split()[:2] == [str(row["layer"]), "4"])
        assert float(line.split()[4].replace(",", "")) == pytest.approx(row["median_tau"], rel=6e-3)
    assert ">64K" in table
    assert list(found["summary"]["share_beyond"]) == ["4096", "16384", "65536"]
    other = ["--context-lengths", "3,2048"]
    assert ">2K" in shown([str(models[0]), *other], capsys)
    shares = json.loads(shown([str(models[0]), *other, "--json"], capsys))["summary"]
    taus = [tau for row in found["layers"] for tau in row["tau"]]
    assert shares["share_beyond"]["3"] == sum(tau > 3 for tau in taus) / len(taus)
    assert "heads by tau" in table


def test_two_checkpoints_give_the_drift_table_and_a_figure(
    models: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(m) for m in models]
    text = shown([*words, "--svg", str(tmp_path / "gates.svg")], capsys)
    assert "|delta alpha|" in text
    assert (tmp_path / "gates.svg").read_text().count("<circle") == 24
    found = json.loads(shown([*words, "--json"], capsys))
    assert found["drift"]["tau_after"] == pytest.approx(found["drift"]["tau_before"] / 2, rel=1e-5)
    assert found["before"]["layers"][0]["tau"] != found["after"]["layers"][0]["tau"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "name one checkpoint folder, or two"),
        (["a", "b", "c"], "name one checkpoint folder, or two"),
        (["nowhere"], "nowhere: no such folder"),
        (["{model}", "--context-lengths", "0"], "--context-lengths 0: each must be at least 1"),
        (["{model}", "--context-lengths", "9" * 400], "each must be at most"),
        ([""], "the checkpoint's path is empty; name its folder"),
        (["{model}", "--svg", ""], "--svg: is empty"),
        (["{model}", "--calibrate", ""], "--calibrate: is empty"),
        (["{model}", "--svg", "/nowhere/x.svg"], "--svg /nowhere/x.svg: cannot be written"),
    ],
)
def test_mistakes_are_one_line(
    argv: list[str],
    message: str,
    models: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = [word.replace("{model}", str(models[0])) for word in argv]
    with pytest.raises(SystemExit) as left:
        cli.run(show_gates.main, show_gates.Args, prog="show_gates", argv=argv)
    assert left.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
