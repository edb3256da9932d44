"""What a real Slurm accepts and refuses, and the README's section tried on it as written."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm.loopback import ROOT, Cluster

pytestmark = [pytest.mark.slurm]


def readme_commands() -> list[str]:
    text = (ROOT / "README.md").read_text().split("<!-- slurm: executed by tests/slurm -->")[1]
    block = text.split("```")[1]
    return [line.partition("  #")[0].strip() for line in block.strip().splitlines()]


def test_the_readmes_section_on_slurm_works_as_written(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "slurm").symlink_to(ROOT / "slurm")
    (tmp_path / "text.jsonl").write_text('{"text": "a short text"}\n')
    commands = readme_commands()
    assert commands[0] == "cp slurm/site.example.toml site.toml"
    said = []
    for command in commands:
        words = [sys.executable if w == "python" else w for w in command.split()]
        env = {**cluster.env, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        said.append(done.stdout)
        if words[0] == "cp":  # "then fill it in"
            example = (tmp_path / "site.toml").read_text()
            filled = example.replace('account = "my-account"', 'account = ""')
            filled = filled.replace('partition = "gpu"', 'partition = "cluster"', 1)
            assert filled != example
            text = tmp_path / "text.jsonl"
            params = f'[params]\nnemotron_cc = "{text}"\nnemotron_agentic = "{text}"\n'
            (tmp_path / "site.toml").write_text(filled + params)
    _, dry, submitted, status, cancelled = said
    assert "nothing was submitted" in dry
    assert "16 nodes x 8 GPU" in submitted
    assert "pretrain-mamba2" in status
    assert "cancelled" in cancelled or "nothing of it is in the queue" in cancelled


PIPELINES = sorted((ROOT / "slurm" / "pipelines").glob("*.toml"))


@pytest.mark.parametrize("file", PIPELINES, ids=lambda p: p.stem)
def test_slurm_would_take_every_shipped_pipeline(
    cluster: Cluster, file: Path, tmp_path: Path
) -> None:
    site = tmp_path / "site.toml"
    site.write_text('account = ""\npartition = "cluster"\n')
    args = [file, "--submit", "--dry-run", "--site", site, "--run", tmp_path / "run"]
    cluster.module("slurm.pipeline", *args)
    scripts = sorted((tmp_path / "run" / "pipeline").glob("submissions/dry-run/*.sbatch"))
    assert scripts
    for script in scripts:
        cluster.call("sbatch", "--test-only", str(script))


def test_what_slurm_refuses_is_said_before_anything_is_submitted(
    cluster: Cluster, tmp_path: Path
) -> None:
    file, run = tmp_path / "p.toml", tmp_path / "run"
    file.write_text(
        'name = "p"\n[step.a]\ncommand = "true"\nout = "a"\n'
        '[step.b]\ncommand = "true"\nout = "b"\npartition = "nowhere"\n'
    )
    said = cluster.submit(file, run, code=2)
    assert "step 'b': Slurm would refuse it: Invalid partition" in said
    assert cluster.call("squeue", "-h", "-n", "p.a").stdout == ""
