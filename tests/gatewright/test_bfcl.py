import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gatewright import bfcl
from gatewright.bfcl import GoldCall
from gatewright.chat import Call, Parsed, parse_calls
from gatewright.errors import UserError
from gatewright.python_calls import parse_python_calls


def question(id: str) -> bfcl.Question:
    return next(q for q in bfcl.load_split(id.rsplit("_", 1)[0]) if q.id == id)


def hermes(calls: list[GoldCall]) -> str:
    return "\n".join(
        f"<tool_call>\n{json.dumps({'name': c.name, 'arguments': c.arguments})}\n</tool_call>"
        for c in calls
    )


def python_style(calls: list[GoldCall]) -> str:
    written = (
        f"{c.name}({', '.join(f'{k}={v!r}' for k, v in c.arguments.items())})" for c in calls
    )
    return f"[{', '.join(written)}]"


# Questions whose published answer the official checker itself rejects (values that no literal
# reaches, parameters that the schema lacks): nobody can win them.
UNWINNABLE = {
    "simple_java": {"simple_java_36", "simple_java_64", "simple_java_65"},
    "live_simple": {"live_simple_106-63-0", "live_simple_112-68-0"},
    "live_multiple": {"live_multiple_862-181-3", "live_multiple_964-207-0"},
}


@pytest.mark.parametrize(
    ("write", "parse"), [(hermes, parse_calls), (python_style, parse_python_calls)]
)
def test_the_gold_answers_of_simple_python_score_400_of_400(
    write: Callable[[list[GoldCall]], str], parse: Callable[[str], Parsed]
) -> None:
    questions = bfcl.load_split("simple_python")
    valid = 0
    for q in questions:
        parsed = parse(write(bfcl.gold_calls(q)))
        assert parsed.kind == "calls"
        valid += bfcl.check(q, parsed.calls).valid
    assert (len(questions), valid) == (400, 400)


@pytest.mark.parametrize("split", list(bfcl.SPLITS))
def test_the_gold_answers_of_every_split(split: str) -> None:
    wrong = set()
    for q in bfcl.load_split(split):
        assert q.messages[-1]["role"] == "user"
        assert q.query
        if q.expect == "no_call":
            assert bfcl.check(q, []).valid
            assert not bfcl.check(q, [Call("any_tool", {})]).valid
        elif q.expect == "any_call":
            assert not bfcl.check(q, []).valid
        else:
            text = hermes(bfcl.gold_calls(q))
            if not bfcl.check(q, parse_calls(text).calls).valid:
                wrong.add(q.id)
            assert not bfcl.check(q, []).valid
    assert wrong == UNWINNABLE.get(split, set())


def test_sizes_of_the_splits() -> None:
    sizes = {s: len(bfcl.load_split(s)) for s in bfcl.SPLITS}
    assert sizes["simple_python"] == 400
    assert sizes["live_multiple"] == 1053
    assert sum(sizes.values()) == 3641


def test_verdicts_name_the_official_error() -> None:
    q = question("simple_python_0")
    good = {"base": 10, "height": 5}
    assert bfcl.check(q, [Call("calculate_triangle_area", good)]).valid
    cases = {
        "simple_function_checker:wrong_func_name": [Call("calculate_area", good)],
        "simple_function_checker:missing_required": [Call("calculate_triangle_area", {"base": 1})],
        "type_error:simple": [Call("calculate_triangle_area", {"base": "10", "height": 5})],
        "value_error:others": [Call("calculate_triangle_area", {"base": 11, "height": 5})],
        "simple_function_checker:wrong_count": [Call("calculate_triangle_area", good)] * 2,
    }
    for error_type, calls in cases.items():
        verdict = bfcl.check(q, calls)
        assert (verdict.valid, verdict.error_type) == (False, error_type)
        assert verdict.error


def test_dotted_names_keep_their_dots() -> None:
    dotted = [q for q in bfcl.load_split("simple_python") if "." in q.gold_names[0]]
    assert len(dotted) == 167
    q = dotted[0]
    (call,) = bfcl.gold_calls(q)
    assert bfcl.check(q, [call]).valid
    assert not bfcl.check(q, [Call(call.name.replace(".", "_"), call.arguments)]).valid


def test_an_answer_that_breaks_the_checker_is_wrong_but_a_broken_gold_answer_is_no_answer() -> None:
    q = question("simple_python_0")
    schema = json.loads(json.dumps(q.tools[0]))
    schema["parameters"]["properties"]["odd"] = {"type": "number"}  # unknown to the checker
    gold = [{"calculate_triangle_area": {**q.gold[0]["calculate_triangle_area"], "odd": [1, ""]}}]
    strange = bfcl.Question(q.id, q.split, q.messages, [schema], gold)
    call = Call("calculate_triangle_area", {"base": 10, "height": 5, "odd": 1})
    with pytest.raises(bfcl.GoldAnswerError, match="simple_python_0.*KeyError"):
        bfcl.check(strange, [call])

    listed = question("simple_python_11")  # any question: arguments of a hostile shape
    verdict = bfcl.check(listed, [Call(listed.gold_names[0], {"x": [[[[]]]]})])
    assert not verdict.valid


def test_checking_changes_neither_the_call_nor_the_data() -> None:
    q = question("simple_python_0")
    before = json.dumps([q.tools, q.gold])
    arguments = {"base": 10, "height": 5, "unit": "units"}
    bfcl.check(q, [Call("calculate_triangle_area", arguments)])
    assert arguments == {"base": 10, "height": 5, "unit": "units"}
    assert json.dumps([q.tools, q.gold]) == before


def test_schemas_become_json_schemas() -> None:
    types: set[str] = set()

    def walk(node: object) -> None:
        if isinstance(node, dict):
            if isinstance(node.get("type"), str):
                types.add(node["type"])
            for value in node.values():
                walk(value)

    for split in bfcl.SPLITS:
        for q in bfcl.load_split(split):
            for schema in q.tools:
                tool = bfcl.to_openai_tool(schema, q.language)
                assert tool["function"]["name"] == schema["name"]
                walk(tool["function"]["parameters"])
                json.dumps(tool)
    assert types <= {"object", "array", "string", "number", "integer", "boolean", "function"}


def test_a_parameter_named_type_is_not_taken_for_a_type() -> None:
    schema = {
        "name": "f",
        "description": "F.",
        "parameters": {
            "type": "dict",
            "properties": {
                "type": {"type": "float", "description": "Dict?", "optional": True},
                "dict": {"type": "array", "items": {"type": "tuple", "items": {"type": "any"}}},
            },
            "required": ["type"],
        },
    }
    assert bfcl.to_openai_tool(schema)["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "type": {"type": "number", "description": "Dict?"},
            "dict": {
                "type": "array",
                "items": {"type": "array", "items": {"type": "string"}},
            },
        },
        "required": ["type"],
    }


def test_java_parameters_are_literals_in_strings() -> None:
    q = question("simple_java_0")
    properties = bfcl.to_openai_tool(q.tools[0], q.language)["function"]["parameters"]["properties"]
    assert {p["type"] for p in properties.values()} == {"string"}
    assert all("Java literal" in p["description"] for p in properties.values())


def test_an_unknown_split_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'simple_python'"):
        bfcl.load_split("simple_pyton")


def test_the_checker_is_the_unmodified_official_one_and_nothing_appears_in_site_packages() -> None:
    """Run in a fresh process: load, import, check; compare the package's files before, after."""
    package = bfcl.data_folder().parent

    def listing() -> dict[str, str]:
        return {
            str(p): hashlib.sha256(p.read_bytes()).hexdigest() if p.is_file() else "folder"
            for p in [*package.rglob("*"), *package.parent.glob("*")]
            if p.is_dir() or package in p.parents
        }

    before = listing()
    code = """
import sys
from gatewright import bfcl
q = bfcl.load_split("simple_python")[0]
assert bfcl.check(q, bfcl.gold_calls(q)).valid
checker, _ = bfcl.official_checker()
print(checker.__code__.co_filename)
print("bfcl_eval.constants.model_config" in sys.modules)
heavy = {"torch", "transformers", "numpy", "tree_sitter", "openai", "tenacity"}
print(sorted(heavy & set(sys.modules)))
print(sorted(m for m in sys.modules if m.startswith("bfcl_eval")))
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    file, stub_left, heavy, modules = out.stdout.splitlines()
    assert Path(file) == package / "eval_checker" / "ast_eval" / "ast_checker.py"
    assert stub_left == "False"
    assert heavy == "[]"
    assert "model_handler" not in modules
    assert "bfcl_eval.utils" not in modules
    assert listing() == before
