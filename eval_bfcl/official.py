"""The official `bfcl evaluate`, in an environment of its own, on the same answers.

bfcl-eval's pins cannot share an environment with current libraries, so it gets a virtual
environment, made on first use.  A driver there registers the model with a handler that only
decodes text into calls (every BFCL model brings its own); loading, checking, counting and
score files are the official code.

It works on a copy of the result file that holds the answers alone: it stops at an answer that
its checker raises or hangs on or that is no UTF-8, which the copy leaves out by name, and at a
single latency.
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
from eval_bfcl.results import Results, read_answers
from gatewright import bfcl
from gatewright.errors import UserError

# The CLI does not start without the last two, which bfcl-eval forgets to ask for.
REQUIREMENTS = ("bfcl-eval==2026.3.23", "pyarrow<23", "soundfile")
DRIVER = Path(__file__).with_name("official_driver.py")
ROOT = Path(__file__).resolve().parent.parent


def python_of(env: Path) -> Path:
    """Return the environment's interpreter; a link that is resolved would leave it."""
    return env.absolute() / "bin" / "python"


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
        (env / ".ready").write_text("\n".join(REQUIREMENTS) + "\n")
    except (subprocess.CalledProcessError, OSError) as e:
        raise UserError(f"--official-env {env}: cannot be made ({e}); remove it and retry") from e


def evaluate(
    env: Path, answers: Sequence[Mapping[str, Any]], label: str, split: str, style: str
) -> tuple[dict[str, Any], set[str]]:
    """Return the official score file's header and the ids it counts as wrong.

    Args:
        answers: rows of a result file, `id` and `result` as official_driver.py takes it.

    Raises:
        UserError: the official evaluator failed; the last line it wrote is quoted.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="bfcl_official_") as scratch:
            result_dir, score_dir = Path(scratch) / "result", Path(scratch) / "score"
            results_file = bfcl.result_file(result_dir, label, split)
            results_file.parent.mkdir(parents=True)
            results_file.write_text("".join(json.dumps(row) + "\n" for row in answers))
            command = [str(python_of(env)), "-P", str(DRIVER), str(ROOT), str(result_dir)]
            command += [str(score_dir), label, split, style]
            environment = {**os.environ, "BFCL_PROJECT_ROOT": scratch}
            done = subprocess.run(
                command, cwd=scratch, env=environment, capture_output=True, text=True, check=False
            )
            if done.returncode != 0:
                said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
                raise UserError(f"the official evaluator of --official-env {env} failed: {said}")
            header, *failures = pools.read_jsonl(bfcl.score_file(score_dir, label, split))
    except (OSError, ValueError) as e:
        raise UserError(f"--official-env {env}: cannot be run ({e}); remove it and retry") from e
    return header, {line["id"] for line in failures}


def compare(
    results: Results,
    cells: Sequence[pools.Cell],
    scores: Sequence[Mapping[str, Any]],
    run: Mapping[str, Any],
    env: Path,
) -> list[dict[str, Any]]:
    """Return official and own accuracy of every cell, and the answers that were left out.

    Raises:
        UserError: they differ in a single question, or the evaluator failed.
    """
    prepare(env)
    compared = []
    for cell in cells:
        path = results.file(cell.name)
        texts = {a["id"]: a["result"] for a in read_answers(path)[0]} if path.is_file() else {}
        rows = {
            s["id"]: s
            for s in scores
            if (s["k"], s["seed"]) == (cell.k, cell.seed)
            and s["outcome"] != "error"
            and not bfcl.broke_checker(s["error_type"])
            and is_utf8(texts[s["id"]])
        }
        line: dict[str, Any] = {
            "cell": cell.name,
            "questions": len(rows),
            "left_out": sorted(texts.keys() - rows.keys()),
            "official_accuracy": None,
            "our_accuracy": None,
        }
        compared.append(line)
        if not rows:
            continue
        answers = []
        for row in cell.rows:
            if row.id in rows:
                names = NameMap(row.names, run["dots"]).renamed()
                text = texts[row.id]
                answers.append(
                    {"id": row.id, "result": {"text": text, "names": names} if names else text}
                )
        header, wrong = evaluate(env, answers, results.label, results.split, run["style"])
        ours_wrong = {id for id, s in rows.items() if not s["official_valid"]}
        ours = (len(rows) - len(ours_wrong)) / len(rows)
        if wrong != ours_wrong or header["accuracy"] != ours:
            odd = sorted(wrong ^ ours_wrong)[:3]
            raise UserError(
                f"{cell.name}: the official accuracy is {header['accuracy']}, ours {ours}; they "
                f"differ on {', '.join(odd) or 'the number of questions'}"
            )
        line |= {"official_accuracy": header["accuracy"], "our_accuracy": ours}
    return compared


def is_utf8(text: str) -> bool:
    """Return whether a text can be written to the official score file."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def said(line: Mapping[str, Any]) -> str:
    """Return a line of `compare` in words."""
    if line["questions"]:
        text = f"{line['cell']}: {line['official_accuracy']} = ours on {line['questions']} answers"
    else:
        text = f"{line['cell']}: no answer to compare"
    if line["left_out"]:
        text += f"; left out, as the official run fails on them: {', '.join(line['left_out'])}"
    return f"official {text}"
