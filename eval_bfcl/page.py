"""The report's page: one HTML file that needs no network and no other file.

Everything that a model wrote reaches the page as JSON inside a script element that is not
run, and from there only as text, so no output can become markup.  Prompts share most of their
lines (tool schemas, instructions): each distinct line is stored once.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from eval_bfcl import paired, scored, tally, trainings
from eval_bfcl.figures import LABELS
from eval_bfcl.score import KEPT_CHARS
from gatewright import artifact, bfcl

TEMPLATE = Path(__file__).with_name("page.html")

_ROW_KEYS = (
    *("model", "gate_scale", "split", "retriever", "beta", "utility", "k", "seeds"),
    *("judged", "n_error", "over_context", "predicted_ceiling"),
)
_RATES = (
    "accuracy",
    "right_tool",
    "valid_call",
    "hallucination",
    "hallucination_of_valid_calls",
    "accuracy_given_retrieved",
    "accuracy_with_defaults",
    "recall",
)
_ITEM_KEYS = (
    *("id", "k", "seed", "outcome", "called", "gold", "gold_rank", "injected", "raw"),
    *("error_type", "error", "prompt_tokens", "new_tokens", "finish", "over_context"),
)


class LineTable:
    """Texts as lists of line numbers, equal texts and equal lines stored once."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.texts: list[list[int]] = []
        self._line_number: dict[str, int] = {}
        self._text_number: dict[str, int] = {}

    def add(self, text: str) -> int:
        """Return the number of a text."""
        if text not in self._text_number:
            numbers = []
            for line in text.split("\n"):
                if line not in self._line_number:
                    self._line_number[line] = len(self.lines)
                    self.lines.append(line)
                numbers.append(self._line_number[line])
            self._text_number[text] = len(self.texts)
            self.texts.append(numbers)
        return self._text_number[text]


def run_name(facts: Mapping[str, Any], scores: Sequence[Mapping[str, Any]]) -> str:
    """Return the name of a scores folder on the page: model, pools and their sizes."""
    sizes = ", ".join(map(str, sorted({s["k"] for s in scores})))
    return f"{facts['model']} · {tally.setting(facts)} · k = {sizes}"


def explorer(
    runs: Sequence[tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]],
    folders: Sequence[Path],
    questions_per_run: int,
) -> dict[str, Any]:
    """Return what the page's explorer shows of each answer."""
    table = LineTable()
    items: list[dict[str, Any]] = []
    names, texts, gold = [], {}, {}
    pools: dict[tuple[str, ...], int] = {}  # models that are compared share theirs
    for number, ((facts, scores), folder) in enumerate(zip(runs, folders, strict=True)):
        names.append(run_name(facts, scores))
        by_id = {q.id: q for q in bfcl.load_split(facts["split"])}
        kept = list(dict.fromkeys(s["id"] for s in scores))[:questions_per_run]
        cells = dict.fromkeys((s["k"], s["seed"]) for s in scores)
        prompts = {cell: scored.read_prompts(folder, *cell) for cell in cells}
        wanted = set(kept)
        for s in scores:
            if s["id"] not in wanted:
                continue
            item = {key: s[key] for key in _ITEM_KEYS}
            text = prompts[(s["k"], s["seed"])].get(s["id"])
            item |= {"run": number, "prompt": None if text is None else table.add(text)}
            # As text: a browser's numbers would show 5.0 as 5 and round long integers.
            item["calls"] = [json.dumps(call, ensure_ascii=False) for call in s["calls"]]
            chars = len(s["raw"] or "")
            # Without `raw_chars`, in older folders: a text of the greatest length was cut.
            is_cut = s["raw_chars"] > chars if s.get("raw_chars") else chars >= KEPT_CHARS
            item["cut"] = chars if is_cut else None
            item["pool"] = pools.setdefault(tuple(s["names"]), len(pools))
            items.append(item)
            texts[s["id"]] = by_id[s["id"]].query
            gold[s["id"]] = json.dumps(by_id[s["id"]].gold, ensure_ascii=False)
    return {
        "runs": names,
        "items": items,
        "pools": list(pools),
        "questions": texts,
        "gold": gold,
        "lines": table.lines,
        "prompts": table.texts,
    }


def _fields(row: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """Return some fields, rounded to what the page can show (the JSON and CSV hold all)."""
    return {k: _rounded(k, row[k]) for k in keys}


def _rounded(key: str, value: Any) -> Any:
    if not isinstance(value, float):
        return value
    # Six decimals would show the smallest p values as 0.
    return float(f"{value:.3g}") if key.startswith("p_") else round(value, 6)


def script_json(value: Any) -> str:
    """Return JSON that cannot end the script element it stands in."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def foot(sources: Sequence[scored.Source]) -> str:
    """Return HTML that names what the page was made from, so that it can be traced."""
    items = "".join(
        f"<li>{escape(s.name)}: sha256 {escape(s.content_hash)}, "
        f"revision {escape(s.git_revision or 'unknown')}</li>"
        for s in sources
    )
    revision = escape(artifact.git_revision() or "unknown")
    return f"<p>Made by gatewright, git revision {revision}, from:</p><ul>{items}</ul>"


def build(
    title: str,
    first_line: str,
    note: str,
    notes: Sequence[str],
    runs: Sequence[tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]],
    folders: Sequence[Path],
    summary: Sequence[Mapping[str, Any]],
    tests: Sequence[paired.Paired],
    means: Sequence[Mapping[str, Any]],
    differences: Sequence[trainings.Difference],
    drawn: Mapping[str, str],
    sources: Sequence[scored.Source],
    questions_per_run: int,
) -> str:
    """Return the page's HTML."""
    ends = ("", "_low", "_high")
    keys = [*_ROW_KEYS, *(r + end for r in _RATES for end in ends)]
    mean_keys = ["model", "gate_scale", "k", "judged"]
    mean_keys += [r + end for r in trainings.RATES for end in ends]
    data = {
        "rows": [_fields(r, keys) for r in summary if r["seed"] == "all"],
        "tests": [dataclasses.asdict(t) | {"rate": LABELS[t.rate]} for t in tests],
        "testsMean": paired.EXPLAINED.replace("`", ""),
        "setups": [
            _fields(r, mean_keys) | {"n": len(r["training_seeds"]), "pools": tally.setting(r)}
            for r in means
        ],
        "differences": [
            _fields(d, list(d)) | {"rate": LABELS[d["rate"]]}
            for d in map(dataclasses.asdict, differences)
        ],
        "differencesMean": trainings.EXPLAINED.replace("`", ""),
        "explorer": explorer(runs, folders, questions_per_run),
    }
    figures = "".join(f"<figure>{svg}</figure>" for svg in drawn.values())
    fields = {
        "%TITLE%": escape(title),
        "%HEADLINE%": escape(first_line),
        "%NOTE%": f'<p class="note">{escape(note)}</p>' if note else "",
        "%NOTES%": "".join(f'<p class="note">{escape(text)}</p>' for text in notes),
        "%FIGURES%": figures,
        "%FOOT%": foot(sources),
        "%DATA%": script_json(data),
    }
    html = TEMPLATE.read_text(encoding="utf-8")
    parts = []
    while fields:  # each field once, in the template's order: a value is never searched
        at, key = min((html.index(key), key) for key in fields if key in html)
        parts += [html[:at], fields[key]]
        html = html[at + len(key) :]
        if key not in html:
            del fields[key]
    return "".join([*parts, html])
