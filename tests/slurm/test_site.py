from pathlib import Path

import pytest

from gatewright.errors import UserError
from slurm import site

EXAMPLE = Path(__file__).resolve().parents[2] / site.EXAMPLE


SOUND = 'account = ""\npartition = ""\n'


def load(tmp_path: Path, text: str) -> site.Site:
    path = tmp_path / "site.toml"
    path.write_text(text)
    return site.load(path)


def test_the_example_is_sound_also_with_every_comment_taken_away(tmp_path: Path) -> None:
    assert site.load(EXAMPLE).account == "my-account"
    lines = EXAMPLE.read_text().splitlines()
    keys = "\n".join(
        line.removeprefix("# ")
        for line in lines
        if line.startswith(("# [", "account", "partition")) or " = " in line[:24]
    )
    full = load(tmp_path, keys)
    assert full.gpu_option.format(n=8) == "--gres=gpu:h100:8"
    assert full.env == {"NCCL_SOCKET_IFNAME": "ib0"}
    assert full.container_mounts == ("/data:/data",)
    assert full.params["nemotron_agentic"].endswith("tool_calling.jsonl")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('partition = "gpu"', "no account: write account"),
        ('account = ""', "no partition"),
        ('account = ""\npartition = ""\nacount = "x"', "'acount'.*did you mean 'account'"),
        ('account = 3\npartition = ""', "account = 3: give a string"),
        ('account = ""\npartition = ""\nsetup = "module"', "setup = .*array of strings"),
        ('account = ""\npartition = ""\nsave_seconds = 0', "positive whole number"),
        (SOUND + 'gpu_option = "{x}"', "write {n} for the number of GPUs"),
        (SOUND + 'gpu_option = "{n[0]}"', "write {n} for the number of GPUs"),
        (SOUND + 'gpu_option = "--gpus={n} {m}"', "write {n} for the number of GPUs"),
        (SOUND + 'gpu_option = "--gpus=8"', "write {n} for the number of GPUs"),
        (SOUND + 'gpu_option = "--gpus={n"', "write {n} for the number of GPUs"),
        (SOUND + 'python = ".venv/bin/python"', "python = .*an absolute path"),
        (SOUND + 'python = ""', "python = '': give an absolute path"),
        (SOUND + 'container_python = "bin/python"', "container_python = .*an absolute path"),
        (SOUND + 'sbatch = ["-C h100"]', "sbatch = '-C h100': .*long form"),
        (SOUND + 'memory = "lots"', "memory = 'lots': write it as 16G"),
        (SOUND + 'container_mounts = ["/data"]', "container_mounts = '/data': write it as"),
        (SOUND + 'container_mounts = [":/data"]', "container_mounts = ':/data': write it as"),
        (SOUND + "save_seconds = 65536", "save_seconds = 65536: Slurm warns 65535 s at most"),
        (SOUND + "[params]\ntext = [1]", r"params.text = \[1\]: give a string"),
        (SOUND + "[env.A]\nb = 1", "env.A = .*: give a string"),
        (SOUND + 'cpu_partition = "a\\nb"', "cpu_partition = .*a line break"),
        (SOUND + 'sbatch = ["--qos=a\\nrm x"]', "sbatch = .*a line break"),
        ('account = "a b"\npartition = ""', "account = 'a b': has a space"),
        ("account = x", "not valid TOML.*line 1"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as e:
        load(tmp_path, text)
    assert "site.toml" in str(e.value)
    assert "\n" not in str(e.value)


def test_true_is_a_word_as_in_the_pipeline_file(tmp_path: Path) -> None:
    found = load(tmp_path, SOUND + "[env]\nA = true\nB = 2\n[params]\nc = false\n")
    assert (found.env, found.params) == ({"A": "true", "B": "2"}, {"c": "false"})


def test_a_missing_site_file_says_where_to_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GATEWRIGHT_SITE", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"copy slurm/site.example.toml"):
        site.load(None)
