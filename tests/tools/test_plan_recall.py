"""The planner inverts the law, reads checkpoints, and refuses what has no state."""

import json
from pathlib import Path

import pytest

from gatewright import cli, recall_law
from gatewright.errors import UserError
from tools.plan_recall import PROG, Args, for_checkpoint, main, sizes


def parse(*argv: str) -> Args:
    return cli.parse(Args, list(argv), prog=PROG)


def write_config(folder: Path, **config: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


MAMBA = {
    **{"model_type": "mamba2", "hidden_size": 64, "state_size": 16, "num_hidden_layers": 2},
    "n_groups": 1,
}
HUGE = "9" * 400


def test_every_planned_size_reaches_the_target_and_one_slot_less_does_not() -> None:
    plan = sizes(parse("--vocab", "512", "--facts", "16,64", "--recall", "0.9", "--layers", "1,4"))
    a, b = plan["a"], plan["b"]
    assert {r["facts"] for r in plan["sizes"]} == {16, 64}
    for r in plan["sizes"]:
        assert r["d"] > plan["smallest_d"]
        assert r["n"] <= r["d"]  # with more slots than channels the law promises too much
        assert r["recall"] >= 0.9
        fewer = r["n"] - 1
        if fewer:
            less = recall_law.recall(r["d"], fewer, r["facts"], a, b, r["layers"])
            assert less < 0.9


def test_a_checkpoint_is_predicted_from_its_config(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "hf", vocab_size=8192, **MAMBA)
    found = for_checkpoint(parse("--checkpoint", str(folder), "--facts", "1,8,24"))
    recall = list(found["recall_at_facts"].values())
    assert recall == sorted(recall, reverse=True)
    b = recall_law.mean_of_max(8192)
    half = found["facts_at_half"]
    assert recall_law.recall(64, 16, half, 0.625, b, 2) == pytest.approx(0.5)


def test_a_synthetic_checkpoint_brings_its_own_task(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = write_config(
        tmp_path / "c",
        vocab_size=512,
        model_type="recall-linear",
        hidden_size=32,
        state_size=16,
        num_hidden_layers=1,
        task="mqar",
    )
    main(parse("--checkpoint", str(folder), "--facts", "16", "--json"))
    found = json.loads(capsys.readouterr().out)
    assert found["a"] == 1.25
    # The reference table: V 512, 16 facts, a 5/4, b = m_V at (32, 16).
    assert found["recall_at_facts"]["16"] == pytest.approx(0.804, abs=5e-4)
    main(parse("--checkpoint", str(folder), "--facts", "16", "--task", "mqar"))
    with pytest.raises(UserError, match=r"--task ar: .* was trained on mqar"):
        main(parse("--checkpoint", str(folder), "--facts", "16", "--task", "ar"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--facts", "8"), "--vocab is needed"),
        (("--facts", "0", "--vocab", "9"), "--facts 0"),
        (("--facts", "x", "--vocab", "9"), "whole numbers"),
        (("--facts", "8", "--recall", "1.5"), "strictly between 0 and 1"),
        (("--facts", "8", "--checkpoint", "/nowhere/at/all"), "no config.json"),
        (("--facts", HUGE, "--vocab", "9"), "each must be at most"),
        (("--facts", "8", "--vocab", "9", "--layers", HUGE), "each must be at most"),
        (("--facts", "8", "--vocab", HUGE), "--vocab must lie between"),
        (("--facts", "8", "--checkpoint", "n" * 300), "--checkpoint n.*: cannot read it"),
        (("--facts", "8", "--checkpoint", "x", "--layers", "2"), "--layers: --checkpoint says it"),
        (("--facts", "8", "--checkpoint", "x", "--layers", "1"), "--layers: --checkpoint says it"),
        (("--facts", "8", "--checkpoint", "x", "--model", "full"), "--model: --checkpoint says it"),
    ],
)
def test_bad_input_is_named(argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        main(parse(*argv))


def test_an_attention_model_has_no_fixed_state(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "llama", model_type="llama", hidden_size=8)
    with pytest.raises(UserError, match="'llama' has no fixed state"):
        main(parse("--checkpoint", str(folder), "--facts", "8"))
    grouped = write_config(tmp_path / "grouped", vocab_size=512, **{**MAMBA, "n_groups": 8})
    with pytest.raises(UserError, match="'mamba2' with n_groups 8 has no fixed state"):
        main(parse("--checkpoint", str(grouped), "--facts", "8"))
    broken = write_config(tmp_path / "broken", model_type="mamba2", n_groups=1, hidden_size=8)
    with pytest.raises(UserError, match="state_size"):
        main(parse("--checkpoint", str(broken), "--facts", "8"))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"state_size": 0}, "n must be at least 1, not 0"),
        ({"state_size": -8}, "n must be at least 1, not -8"),
        ({"vocab_size": 1}, "vocab must be at least 2, not 1"),
        ({"hidden_size": 64.7}, "d must be a whole number, not 64.7"),
        ({"hidden_size": float("inf")}, "d must be a whole number, not inf"),
        ({"hidden_size": 10**400}, "d must be at most"),
        ({"state_size": True}, "n must be a whole number, not True"),
        ({"task": "copy"}, "task must be ar or mqar, not 'copy'"),
    ],
)
def test_a_config_without_a_state_is_named(
    wrong: dict[str, object], message: str, tmp_path: Path
) -> None:
    folder = write_config(tmp_path / "hf", **{**MAMBA, "vocab_size": 512, **wrong})
    with pytest.raises(UserError, match=message) as e:
        for_checkpoint(parse("--checkpoint", str(folder), "--facts", "8"))
    assert str(folder / "config.json") in str(e.value)


def test_the_folder_of_an_experiment_and_a_file_name_the_way_out(tmp_path: Path) -> None:
    out = write_config(tmp_path / "t", experiment="capacity train")
    folder = write_config(out / "checkpoint", vocab_size=512, **MAMBA)
    with pytest.raises(UserError, match=f"give {folder}$"):
        main(parse("--checkpoint", str(out), "--facts", "8"))
    with pytest.raises(UserError, match="is a file; give the folder"):
        main(parse("--checkpoint", str(folder / "config.json"), "--facts", "8"))


def test_more_slots_than_channels_are_flagged_and_guessing_is_no_number(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    narrow = write_config(tmp_path / "n", vocab_size=512, **{**MAMBA, "hidden_size": 8})
    asked = ("--checkpoint", str(narrow), "--facts", "8", "--recall", "0.0001")
    main(parse(*asked))
    printed = capsys.readouterr().out
    assert "N > D: the law promises too much" in printed
    assert "the paper's value" in printed  # a of a full Mamba
    assert "predicted 0.01% at any number of facts" in printed
    main(parse(*asked, "--json"))
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["facts_at_target"] is None
    assert found["caution"].startswith("N > D")
    wide = write_config(tmp_path / "w", vocab_size=512, **MAMBA)
    assert for_checkpoint(parse("--checkpoint", str(wide), "--facts", "8"))["caution"] is None


def test_a_load_that_no_planned_size_holds_is_said(capsys: pytest.CaptureFixture) -> None:
    main(parse("--vocab", "512", "--facts", "16,1000000000"))
    printed = capsys.readouterr().out
    assert "1000000000      1  no D up to 4096 with N <= D reaches it" in printed
    assert "left out: sizes with N > D" in printed
