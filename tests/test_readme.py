"""The README tells the truth: its commands are those of the demo, or run here."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def block(marker: str) -> list[str]:
    """Return the commands of the fenced block that follows `<!-- marker ...`."""
    text = (ROOT / "README.md").read_text()
    match = re.search(rf"<!-- {marker}[^>]*-->\n+```\n(.*?)```", text, re.DOTALL)
    assert match, f"README.md has no block marked {marker!r}"
    commands = [line.partition(" #")[0].strip() for line in match[1].splitlines()]
    return [c for c in commands if c]


def run(command: str, cwd: Path) -> str:
    words = command.split()
    assert words[0] == "python"
    done = subprocess.run(
        [sys.executable, *words[1:]],
        cwd=cwd,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_every_stage_command_is_one_of_the_demo() -> None:
    plan = run("python -m slurm.pipeline slurm/pipelines/demo.toml --local --dry-run", ROOT)
    demo = {" ".join(line.split()) for line in plan.splitlines()}
    stages = block("stages")
    assert len(stages) >= 12
    for command in stages:
        assert command in demo, command


def test_the_commands_for_ones_own_checkpoint_run(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from gatewright.models import ModelConfig, hf_config

    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "A gate decides how long a state remembers what it has read."}\n')
    run(f"python -m tokenizer.train --corpus {text} --vocab-size 300 --out my-mamba2", tmp_path)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "my-mamba2")
    torch.manual_seed(0)
    sizes = ModelConfig("mamba2", len(tokenizer), 32, 1, d_state=8, head_dim=16)
    model = AutoModelForCausalLM.from_config(hf_config(sizes, eos_token_id=tokenizer.eos_token_id))
    model.save_pretrained(tmp_path / "my-mamba2")
    (tmp_path / "my-mamba2" / "manifest.json").unlink()  # somebody else's folder has none

    commands = block("own checkpoint")
    assert [c.split()[2] for c in commands[:2]] == ["tools.show_gates", "tools.scale_gates"]
    outputs = [run(command, tmp_path) for command in commands]
    assert "tau" in outputs[0]
    assert (tmp_path / "report" / "index.html").is_file()
    before, after = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
        for name in ("my-mamba2", "my-mamba2-s0.5")
    )
    for name, tensor in before.items():
        if name.endswith("A_log"):
            torch.testing.assert_close(after[name].exp(), tensor.exp() / 2)
        else:
            assert torch.equal(after[name], tensor), name


@pytest.mark.parametrize("name", ["stages", "own checkpoint", "slurm"])
def test_every_module_that_the_readme_names_exists(name: str) -> None:
    modules = [c.split()[2] for c in block(name) if c.startswith("python -m ")]
    assert modules
    for module in modules:
        assert (ROOT / (module.replace(".", "/") + ".py")).is_file(), module
