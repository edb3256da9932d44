"""The official `bfcl evaluate`, in an environment of its own, on the same result files.

bfcl-eval's pins cannot share an environment with current libraries, so it gets a virtual
environment, made on first use.  A driver there registers the model with a handler that only
decodes text into calls (every BFCL model brings its own); loading, checking, counting and
score files are the official code.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval_bfcl import pools
from eval_bfcl.prompting import NameMap
from eval_bfcl.results import Results
from gatewright import bfcl
from gatewright.errors import UserError

# The CLI does not start without the last two, which bfcl-eval forgets to ask for.
REQUIREMENTS = ("bfcl-eval==2026.3.23", "pyarrow<23", "soundfile")
DRIVER = Path(__file__).with_name("official_driver.py")
ROOT = Path(__file__).resolve().parent.parent


def python_of(env: Path) -> Path:
    return env / "bin" / "python"


def ready(env: Path) -> bool:
    """Return whether the environment is there and complete."""
    return (env / ".ready").is_file() and python_of(env).is_file()


def prepare(env: Path) -> None:
    """Make the environment if it is not there (about four minutes, 2 GB).

    Raises:
        UserError: the packages cannot be installed.
    """
    if ready(env):
        return
    print(f"making {env} for the official evaluator: {', '.join(REQUIREMENTS)}", file=sys.stderr)
    try:
        subprocess.run([sys.executable, "-m", "venv", str(env)], check=True)
        pip = [str(python_of(env)), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "--disable-pip-version-check", *REQUIREMENTS], check=True)
    except (subprocess.CalledProcessError, OSError) as e:
        raise UserError(f"--official-env {env}: cannot be made ({e}); remove it and retry") from e
    (env / ".ready").write_text("\n".join(REQUIREMENTS) + "\n")


def evaluate(
    env: Path, result_dir: Path, label: str, split: str, style: str, names: Mapping[str, str]
) -> tuple[dict[str, Any], set[str]]:
    """Return the official score file's header and the ids it counts as wrong.

    Args:
        result_dir: folder in the official layout.
        names: shown tool name -> the data's name, where they differ.

    Raises:
        UserError: the official evaluator failed; the last line it wrote is quoted.
    """
    with tempfile.TemporaryDirectory(prefix="bfcl_official_") as scratch:
        score_dir = Path(scratch) / "score"
        names_file = Path(scratch) / "names.json"
        names_file.write_text(json.dumps(dict(names)))
        command = [str(python_of(env)), "-P", str(DRIVER), str(ROOT), str(result_dir.resolve())]
        command += [str(score_dir), label, split, style, str(names_file)]
        environment = {**os.environ, "BFCL_PROJECT_ROOT": scratch}
        done = subprocess.run(
            command, cwd=scratch, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
            raise UserError(f"the official evaluator failed on {result_dir}: {said}")
        path = bfcl.result_file(score_dir, label, split)
        path = path.with_name(path.name.replace("_result.json", "_score.json"))
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return lines[0], {line["id"] for line in lines[1:]}


def compare(
    results: Results,
    cells: Sequence[pools.Cell],
    scores: Sequence[Mapping[str, Any]],
    run: Mapping[str, Any],
    env: Path,
) -> list[dict[str, Any]]:
    """Return official and own accuracy of every cell.

    Raises:
        UserError: they differ in a single question, or the evaluator failed.
    """
    prepare(env)
    all_names = {t["name"] for q in bfcl.load_split(results.split) for t in q.tools}
    table = NameMap(sorted(all_names), run["dots"])
    names = {table.shown(n): n for n in all_names if table.shown(n) != n}
    compared = []
    for cell in cells:
        rows = [
            s
            for s in scores
            if (s["k"], s["seed"]) == (cell.k, cell.seed) and s["outcome"] != "error"
        ]
        if not rows:
            continue
        header, wrong = evaluate(
            env,
            results.file(cell.name).parents[2],
            results.label,
            results.split,
            run["style"],
            names,
        )
        ours_wrong = {s["id"] for s in rows if not s["official_valid"]}
        ours = (len(rows) - len(ours_wrong)) / len(rows)
        if wrong != ours_wrong or header["accuracy"] != ours:
            odd = sorted(wrong ^ ours_wrong)[:3]
            raise UserError(
                f"{cell.name}: the official accuracy is {header['accuracy']}, ours {ours}; they "
                f"differ on {', '.join(odd) or 'the number of questions'}"
            )
        compared.append(
            {"cell": cell.name, "official_accuracy": header["accuracy"], "our_accuracy": ours}
        )
    return compared
