"""The house's walls: which package may import which, and what `import gatewright` costs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
STAGES = ("tokenizer", "pretrain", "tools", "sft", "eval_bfcl", "synthetic", "slurm")
HEAVY = ("transformers", "megatron", "deepspeed", "datasets", "bfcl_eval", "matplotlib")
FORBIDDEN_NAMES = ("utils.py", "misc.py", "helpers.py", "common.py")


def imports(path: Path) -> set[str]:
    """Return the dotted names of everything a file imports, at any depth."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_imports_no_other_stage(stage: str) -> None:
    others = set(STAGES) - {stage}
    assert files(stage), f"{stage}/ has no Python files"
    for path in files(stage):
        crossing = {name for name in imports(path) if name.split(".")[0] in others}
        assert not crossing, f"{path.relative_to(ROOT)} reaches into {crossing}"


def test_the_library_imports_no_stage() -> None:
    for path in files("gatewright"):
        crossing = {name for name in imports(path) if name.split(".")[0] in STAGES}
        assert not crossing, f"{path.relative_to(ROOT)} reaches into {crossing}"


def test_only_the_library_imports_megatron() -> None:
    for stage in STAGES:
        for path in files(stage):
            assert not any(name.split(".")[0] == "megatron" for name in imports(path)), path


def test_importing_the_library_is_light() -> None:
    code = "import gatewright, sys; print(' '.join(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in out.stdout.split()}
    assert not loaded & {*HEAVY, "torch"}


def test_heavy_packages_are_imported_where_they_are_used() -> None:
    """No module of the library pulls in an engine at its top level, engines' own rooms apart."""
    rooms = ("megatron", "kernels")
    for path in files("gatewright"):
        if path.relative_to(ROOT / "gatewright").parts[0] in rooms:
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                names = [a.name for a in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            else:
                continue
            assert not {n.split(".")[0] for n in names} & set(HEAVY), path


def test_no_file_without_a_reason_to_exist() -> None:
    for package in ("gatewright", *STAGES):
        for path in files(package):
            assert path.name not in FORBIDDEN_NAMES, path
