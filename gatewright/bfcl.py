"""The Berkeley Function Calling Leaderboard: its questions, gold answers and official checker.

Everything comes from the installed `bfcl_eval` package: the data files, and the unmodified
`ast_checker` that gives the verdict.  The package's heavy modules are never imported: the
checker needs one of them for a single lookup (does this model write `_` for `.`?), so that
module is replaced by a small stand-in while the checker is imported.  Nothing is created in
site-packages.

Multi-turn, memory and web-search categories are out of scope: their pools are not tool pools.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib.util
import json
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from gatewright import cli, cpu_limit, json_lines
from gatewright.errors import UserError

Language = Literal["python", "java", "javascript"]
Expect = Literal["call", "calls", "no_call", "any_call"]

# split -> (folder of the official result layout, language of values, what a right answer is)
SPLITS: dict[str, tuple[str, Language, Expect]] = {
    "simple_python": ("non_live", "python", "call"),
    "simple_java": ("non_live", "java", "call"),
    "simple_javascript": ("non_live", "javascript", "call"),
    "multiple": ("non_live", "python", "call"),
    "parallel": ("non_live", "python", "calls"),
    "parallel_multiple": ("non_live", "python", "calls"),
    "irrelevance": ("non_live", "python", "no_call"),
    "live_simple": ("live", "python", "call"),
    "live_multiple": ("live", "python", "call"),
    "live_parallel": ("live", "python", "calls"),
    "live_parallel_multiple": ("live", "python", "calls"),
    "live_irrelevance": ("live", "python", "no_call"),
    "live_relevance": ("live", "python", "any_call"),
}

_TO_JSON_SCHEMA = {
    "dict": "object",
    "hashmap": "object",
    "hashtable": "object",
    "float": "number",
    "double": "number",
    "tuple": "array",
    "list": "array",
    "arraylist": "array",
    "set": "array",
    "queue": "array",
    "stack": "array",
    "any": "string",  # the checker takes only strings for "any"
    "char": "string",
    "": "string",
    "bool": "boolean",
    "byte": "integer",
    "short": "integer",
    "long": "integer",
    "bigint": "integer",
}
_LANGUAGE_NAMES = {"java": "Java", "javascript": "JavaScript"}


class CallLike(Protocol):
    """Anything with a function name and named arguments (see `gatewright.chat.Call`)."""

    @property
    def name(self) -> str: ...
    @property
    def arguments(self) -> dict[str, Any]: ...


class GoldCall(NamedTuple):
    """One call of a published answer, each parameter at an acceptable value."""

    name: str
    arguments: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Question:
    """One BFCL question.

    Attributes:
        id: BFCL's id, for example `simple_python_17`.
        split: BFCL category.
        messages: the conversation in OpenAI form, ending with the user's turn.
        tools: the question's own functions as BFCL schemas, in BFCL's order.
        gold: the published answer, a call per item: `{name: {parameter: [acceptable, ...]}}`;
            empty for the (ir)relevance splits, which have none.
    """

    id: str
    split: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    gold: list[dict[str, dict[str, list[Any]]]]

    @property
    def query(self) -> str:
        """The text that a retriever ranks tools by: the last user turn."""
        users = [m["content"] for m in self.messages if m["role"] == "user"]
        return str(users[-1]) if users else ""

    @property
    def language(self) -> Language:
        return SPLITS[self.split][1]

    @property
    def expect(self) -> Expect:
        return SPLITS[self.split][2]

    @property
    def gold_names(self) -> list[str]:
        """Names of the correct tools, each once, in the answer's order."""
        return list(dict.fromkeys(name for call in self.gold for name in call))


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the official checker says of one answer."""

    valid: bool
    error_type: str | None = None
    error: str | None = None


class GoldAnswerError(Exception):
    """The checker cannot judge this question at all: it fails on the published answer too."""


def data_folder() -> Path:
    """Return the data folder of the installed bfcl_eval package, without importing it.

    Raises:
        UserError: bfcl_eval is not installed.
    """
    spec = importlib.util.find_spec("bfcl_eval")
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            "bfcl_eval is not installed: pip install --no-deps bfcl-eval==2026.3.23 "
            "(make install does it)"
        )
    return Path(next(iter(spec.submodule_search_locations))) / "data"


@functools.cache
def load_split(name: str) -> list[Question]:
    """Return all questions of a BFCL split with their published answers.

    Raises:
        UserError: no such split (the nearest name is suggested), or bfcl_eval is missing or
            damaged.
    """
    if name not in SPLITS:
        raise UserError(
            f"no BFCL split {name!r} with tool pools{cli.nearest(name, SPLITS)}; splits: "
            f"{', '.join(SPLITS)} (multi-turn, memory and web search are out of scope)"
        )
    folder = data_folder()
    file = f"BFCL_v4_{name}.json"
    gold: dict[str, Any] = {}
    if (folder / "possible_answer" / file).is_file():
        gold = {row["id"]: row["ground_truth"] for row in _rows(folder / "possible_answer" / file)}
    questions = []
    for row in _rows(folder / file):
        (turn,) = row["question"]  # every split of SPLITS has a single turn
        questions.append(Question(row["id"], name, turn, row["function"], gold.get(row["id"], [])))
    return questions


def _rows(path: Path) -> list[dict[str, Any]]:
    again = "install bfcl-eval again (make install does it)"
    try:
        with open(path, "rb") as f:
            return [row for _, row in json_lines.rows(f, path, again)]
    except OSError as e:
        raise UserError(f"{path}: cannot be read ({e.strerror}); {again}") from e


def result_file(folder: Path, model: str, split: str) -> Path:
    """Return where BFCL's own evaluator looks for a model's answers to a split."""
    return folder / model.replace("/", "_") / SPLITS[split][0] / f"BFCL_v4_{split}_result.json"


def score_file(folder: Path, model: str, split: str) -> Path:
    """Return where BFCL's own evaluator writes a model's score on a split."""
    path = result_file(folder, model, split)
    return path.with_name(f"BFCL_v4_{split}_score.json")


def to_openai_tool(schema: Mapping[str, Any], language: Language = "python") -> dict[str, Any]:
    """Return a BFCL function schema in OpenAI's tool form, with JSON-schema types.

    BFCL's `dict`, `float`, `tuple`, `any` become `object`, `number`, `array`, `string`.  For
    Java and JavaScript every parameter is a string that holds a literal of that language,
    because that is what the checker parses; the description says so.
    """
    function = copy.deepcopy({k: schema[k] for k in ("name", "description") if k in schema})
    parameters = schema.get("parameters") or {"type": "object", "properties": {}}
    if language == "python":
        function["parameters"] = _json_schema(parameters)
    else:
        function["parameters"] = {
            "type": "object",
            "properties": {
                name: _as_literal(value, _LANGUAGE_NAMES[language])
                for name, value in parameters["properties"].items()
            },
            "required": list(parameters.get("required", [])),
        }
    return {"type": "function", "function": function}


def _json_schema(node: Any) -> Any:
    if not isinstance(node, Mapping):
        return node
    out: dict[str, Any] = {}
    for key, value in node.items():
        if key == "type" and isinstance(value, str):
            out[key] = _TO_JSON_SCHEMA.get(value.lower(), value.lower())
        elif key == "properties" and isinstance(value, Mapping):
            out[key] = {name: _json_schema(sub) for name, sub in value.items()}
        elif key in ("items", "additionalProperties"):
            out[key] = _json_schema(value)
        elif key == "optional":
            continue  # BFCL's own word; `required` says it in JSON schema
        else:
            out[key] = copy.deepcopy(value)
    return out


def _as_literal(schema: Mapping[str, Any], language: str) -> dict[str, Any]:
    kind = str(schema.get("type") or "any")
    inner = schema.get("items")
    if isinstance(inner, Mapping) and inner.get("type"):
        kind += f" of {inner['type']}"
    said = f"{schema.get('description', '')} A string holding a {language} literal of type {kind}."
    return {"type": "string", "description": said.strip()}


def gold_calls(question: Question) -> list[GoldCall]:
    """Return the published answer as calls, each parameter at its first acceptable value.

    Parameters that may be left out (`""` among their values) take their first real value, or
    are left out if they have none.  Java and JavaScript values become literals.
    """
    schemas = {tool["name"]: tool for tool in question.tools}
    calls = []
    for item in question.gold:
        for name, parameters in item.items():
            properties = schemas[name]["parameters"]["properties"]
            arguments = {}
            for key, acceptable in parameters.items():
                values = [v for v in acceptable if v != ""]
                required = key in schemas[name]["parameters"].get("required", ())
                if key not in properties and not required and "" in acceptable:
                    continue  # two answers name a parameter that the schema lacks
                if not values and not (required and acceptable):
                    continue
                value = _first_of(values[0]) if values else ""
                if question.language != "python":
                    value = _literal(value, properties[key], question.language)
                arguments[key] = value
            calls.append(GoldCall(name, arguments))
    return calls


def _first_of(value: Any) -> Any:
    """Dictionaries inside an answer list acceptable values per key; take the first of each."""
    if isinstance(value, dict):
        out = {}
        for key, acceptable in value.items():
            options = acceptable if isinstance(acceptable, list) else [acceptable]
            real = [v for v in options if v != ""]
            if real:
                out[key] = _first_of(real[0]) if isinstance(real[0], list) else real[0]
        return out
    if isinstance(value, list):
        return [_first_of(v) for v in value]
    return value


def _literal(value: Any, schema: Mapping[str, Any], language: Language) -> str:
    """Write a value the way the checker's Java and JavaScript converters read it."""
    kind = schema.get("type", "any")
    nested = (schema.get("items") or {}).get("type", "String")
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return f"{value}{_suffix(kind, language)}"
    if language == "javascript":
        return json.dumps(value)
    if isinstance(value, dict):
        puts = "".join(f' put("{k}", {_java_item(v, "any")});' for k, v in value.items())
        return f"new HashMap<String, Object>() {{{{{puts} }}}}"
    # The checker strips quotes inside an ArrayList<String> only: elsewhere they would count.
    quoted = kind == "ArrayList" and nested in ("String", "char")
    items = ", ".join(_java_item(v, nested, quoted) for v in value)
    if kind == "ArrayList":
        return f"new ArrayList<>(Arrays.asList({items}))" if value else "new ArrayList<>()"
    return f"new {nested}[]{{{items}}}"


def _java_item(value: Any, kind: str, quoted: bool = True) -> str:
    if isinstance(value, str):
        quote = "" if not quoted else "'" if kind == "char" else '"'
        return f"{quote}{value}{quote}"
    return _literal(value, {"type": kind}, "java")


def _suffix(kind: str, language: Language) -> str:
    if kind in ("long", "Bigint"):
        return "L" if language == "java" else "n"
    return "f" if kind == "float" and language == "java" else ""


class _KeepsNames(dict[str, Any]):
    """Stands for bfcl_eval's model table: whoever asks, names keep their dots."""

    def __missing__(self, name: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(underscore_to_dot=False)


@functools.cache
def official_checker() -> tuple[Callable[..., dict[str, Any]], Any]:
    """Return bfcl_eval's own `ast_checker` and its `Language` enumeration, unmodified.

    Raises:
        UserError: bfcl_eval is not installed.
    """
    data_folder()
    table = "bfcl_eval.constants.model_config"
    stand_in = types.ModuleType(table)
    stand_in.MODEL_CONFIG_MAPPING = _KeepsNames()  # type: ignore[attr-defined]
    before = sys.modules.get(table)
    wrote_bytecode = sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    sys.modules[table] = stand_in
    try:
        from bfcl_eval.constants.enums import Language as OfficialLanguage
        from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker
    finally:
        sys.dont_write_bytecode = wrote_bytecode
        if before is None:
            del sys.modules[table]
        else:
            sys.modules[table] = before
    return ast_checker, OfficialLanguage


def check(question: Question, calls: Sequence[CallLike]) -> Verdict:
    """Return the official verdict on an answer.

    The checker is given the question's own schemas, never the pool.  For the irrelevance
    splits any call is wrong, for live_relevance any call is right, as in the official runner.
    An answer that makes the checker raise, or take more than LONGEST_CHECK_S, is wrong, with an
    error type that `broke_checker` recognises.

    Raises:
        GoldAnswerError: the checker fails on the published answer of this question too.
    """
    if question.expect == "no_call":
        if calls:
            return Verdict(False, "irrelevance_error:decoder_success", "made a call")
        return Verdict(True)
    if question.expect == "any_call":
        return (
            Verdict(True)
            if calls
            else Verdict(False, "relevance_error:decoder_failed", "made no call")
        )
    try:
        return cpu_limit.within(LONGEST_CHECK_S, lambda: _judge(question, calls))
    except cpu_limit.CPUTimeError as e:
        return Verdict(False, _TIMEOUT, f"the official checker {e} on this answer")
    except _CHECKER_FAILS as e:
        try:
            _judge(question, gold_calls(question))
        except _CHECKER_FAILS as gold_error:
            raise GoldAnswerError(
                f"{question.id}: the official checker raises {gold_error!r} on the published answer"
            ) from gold_error
        # The official runner would stop here; the answer is what broke it, so it is wrong.
        return Verdict(False, f"{_RAISED}{type(e).__name__}", str(e)[:500])


def broke_checker(error_type: str | None) -> bool:
    """Return whether a verdict's error type says that the checker gave none of its own."""
    return error_type is not None and error_type.startswith(_RAISED)


def timed_out(error_type: str | None) -> bool:
    """Return whether a verdict's error type says that the checker was stopped by its clock."""
    return error_type == _TIMEOUT


LONGEST_CHECK_S = 1.0
"""CPU time for one answer; ordinary ones take a thousandth of it."""
_RAISED = "checker_raised:"
_TIMEOUT = f"{_RAISED}timeout"
_CHECKER_FAILS = (
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
    IndexError,
    RecursionError,
    NotImplementedError,
)


def _judge(question: Question, calls: Sequence[CallLike]) -> Verdict:
    ast_checker, language = official_checker()
    answer = ast_checker(
        question.tools,
        [{call.name: copy.deepcopy(call.arguments)} for call in calls],
        question.gold,
        language[question.language.upper()],
        question.split,
        "gatewright",
    )
    if answer["valid"]:
        return Verdict(True)
    return Verdict(False, str(answer["error_type"]), str(answer["error"])[:2000])
