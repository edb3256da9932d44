"""The command line of convert, once through the real process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gatewright import artifact, cli
from tests.gatewright.checkpoints import small_models
from tools import convert

ROOT = Path(__file__).resolve().parents[2]


def test_convert_checks_itself_and_says_what_it_wrote(tmp_path: Path) -> None:
    source = small_models.save_huggingface(tmp_path / "hf", small_models.LLAMA)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tools.convert", str(source)),
            *("--to", "megatron", "--out", str(tmp_path / "run")),
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "logits differ by at most" in done.stdout
    manifest = artifact.read_manifest(tmp_path / "run", "pretrain")
    assert manifest["extra"]["max_logit_difference"] <= 1e-4
    assert (tmp_path / "run" / "latest").read_text() == "iter_0000000\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--to", "hf"], "holds no weights"),
        (["--to", "gguf"], "gguf"),
        (["--to", "hf", "--max-shard-size", "huge"], "--max-shard-size"),
        (["--to", "hf", "--tokeniser", "x"], "did you mean '--tokenizer'?"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [str(tmp_path), *words, "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as left:
        cli.run(convert.main, convert.Args, prog="convert", argv=argv)
    assert left.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert not (tmp_path / "out").exists()
