import dataclasses
import re
from pathlib import Path
from typing import Literal

import pytest
import tyro

from gatewright import cli
from gatewright.config import Recipes, split_recipe
from gatewright.errors import UserError


@dataclasses.dataclass
class Train:
    steps: int = 10
    """Steps to run."""
    fast: bool = False
    warmup: int | None = None
    lr: float | None = None

    def __post_init__(self) -> None:
        if self.steps <= 0:
            raise UserError(f"--train.steps {self.steps}: give a positive number")


@dataclasses.dataclass
class Args:
    ckpt: tyro.conf.Positional[Path]
    data: Path
    """Folder of the corpus."""
    train: Train = dataclasses.field(default_factory=Train)


def parse(*argv: str) -> Args:
    return cli.parse(Args, argv, prog="python -m demo")


def test_a_list_of_numbers_keeps_its_order() -> None:
    assert cli.numbers("--k", " 8, 1,8", int) == [8, 1, 8]
    assert cli.numbers("--x", "0.5,-1", float) == [0.5, -1.0]


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("", int, "--k '': give at least one whole number"),
        (",", float, "--k ',': give at least one number"),
        ("1,x", float, "--k 1,x: 'x' is not a number; give numbers separated by commas"),
        ("1,1.5", int, "--k 1,1.5: '1.5' is not a whole number; give whole numbers"),
        ("8,0", int, "--k 8,0: each must be at least 1"),
        ("nan", float, "--k nan: each must be at least 1"),
        ("8,99", int, "--k 8,99: each must be at most 90"),
        ("1,,", int, "--k 1,,: '' is not a whole number"),
        ("1_0", int, "--k 1_0: '1_0' is not a whole number"),
        ("1_0", float, "--k 1_0: '1_0' is not a number"),
        ("9" * 5000, int, f"--k {'9' * 5000}: '{'9' * 5000}' is not a whole number"),
    ],
)
def test_a_list_of_numbers_is_checked(text: str, kind: type, message: str) -> None:
    with pytest.raises(UserError, match="^" + re.escape(message)):
        cli.numbers("--k", text, kind, least=1, most=90)


def test_dotted_flags_and_switches() -> None:
    args = parse("ckpt", "--data", "d", "--train.steps=3", "--train.fast")
    assert args == Args(Path("ckpt"), Path("d"), Train(3, True))
    assert not parse("ckpt", "--data", "d", "--train.no-fast").train.fast


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["c", "--data", "d", "--train.stpes", "3"],
            "unknown flag --train.stpes .*'--train.steps'",
        ),
        (["c", "--train.steps", "3"], "missing from .*--data"),
        (["c", "--data", "d", "--train.steps", "x"], "^--train.steps: .*'x'"),
        (["c", "--data", "d", "extra"], "unexpected argument 'extra'"),
        (["c", "--data", "d", "--train.steps", "0"], "--train.steps 0: give a positive"),
        (["c", "--data"], "--data"),
        (
            ["c", "--data", "d", "--train.warmup", "a.c"],
            "^--train.warmup: 'a.c' is no whole number;",
        ),
        (["c", "--data", "d", "--train.lr", ""], "^--train.lr: '' is no number;"),
    ],
)
def test_mistakes_are_one_line(argv: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        parse(*argv)
    assert "\n" not in str(error.value)


def test_run_turns_user_errors_into_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.run(lambda args: None, Args, prog="python -m demo", argv=["c", "--dta", "d"])
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("error: unknown flag --dta (did you mean '--data'?)")
    assert err.count("\n") == 1


def test_a_full_disk_is_one_line_wherever_it_is_met(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(args: Args) -> None:
        Path("/dev/full").write_text("half")

    with pytest.raises(SystemExit) as stop:
        cli.run(main, Args, prog="python -m demo", argv=["c", "--data", "d"])
    assert stop.value.code == 2
    assert capsys.readouterr().err == (
        "error: writing: No space left on device; make room, then give the command again\n"
    )


def test_a_wrong_choice_is_said_once() -> None:
    @dataclasses.dataclass
    class Choice:
        to: Literal["hf", "megatron"]

    with pytest.raises(UserError, match="^invalid choice 'hff' for argument '--to'"):
        cli.parse(Choice, ["--to", "hff"], prog="python -m demo")


def test_help_teaches_and_exits_0(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.run(lambda args: None, Args, prog="python -m demo", argv=["--help"])
    assert stop.value.code == 0
    assert "Folder of the corpus." in capsys.readouterr().out


def test_recipes_suggest_the_nearest_name() -> None:
    recipes: Recipes[Train] = Recipes("demo")

    @recipes.register
    def mamba2_debug_cpu() -> Train:
        """Tiny."""
        return Train(2)

    assert recipes.get("mamba2_debug_cpu").steps == 2
    with pytest.raises(UserError, match="did you mean 'mamba2_debug_cpu'"):
        recipes.get("mamba_debug_cpu")
    with pytest.raises(UserError, match="name a recipe first"):
        split_recipe(["--train.steps", "3"], recipes, "python -m demo")
