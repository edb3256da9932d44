"""From what a model wrote to one outcome: exclusive, and summing to all questions.

Order of judgement: error of the machinery; unparseable; no call; a name outside the pool
(hallucinated, in any of several calls); the official verdict; more calls than wanted
(several_calls); fewer (missing_calls, only where several are wanted); another tool of the
pool (wrong_tool); else the right tool with wrong arguments.  `correct` is exactly the
official checker's verdict, with the one reservation that a hallucinated name cannot be valid.
What the pool holds goes by the names that the prompt showed; the checker is given the data's.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from eval_bfcl.pools import Row
from eval_bfcl.prompting import Dots, NameMap
from gatewright import bfcl
from gatewright.bfcl import Question
from gatewright.chat import Call
from gatewright.python_calls import parse_answer as parse

Outcome = Literal[
    "correct",
    "wrong_arguments",
    "wrong_tool",
    "hallucinated",
    "several_calls",
    "missing_calls",
    "no_call",
    "unparseable",
    "error",
]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


@dataclasses.dataclass(frozen=True)
class Judged:
    """The judgement of one answer.

    Attributes:
        outcome: see the module.
        official_valid: the official checker's verdict; null for an error of the machinery.
        valid_call: the answer held at least one well-formed call.
        calls: all calls, with the data's tool names.
        error_type, error: the checker's or the parser's reason.
        defaults_valid: a second, unofficial verdict: valid as it is, or after every parameter
            that was left out is filled in with the schema's default.
    """

    outcome: Outcome
    official_valid: bool | None
    valid_call: bool
    calls: list[Call]
    error_type: str | None = None
    error: str | None = None
    defaults_valid: bool | None = None


def judge(question: Question, row: Row, text: str, style: str, dots: Dots) -> Judged:
    """Return the outcome of a model's text."""
    parsed = parse(text, style)
    names = NameMap(row.names, dots)
    calls = names.real_calls(parsed.calls)
    try:
        verdict = bfcl.check(question, calls)
        defaults_valid = verdict.valid or _valid_with_defaults(question, calls, verdict)
    except bfcl.GoldAnswerError as e:
        return Judged("error", None, bool(calls), calls, "gold_answer", str(e))
    outcome: Outcome
    # As written: a dotted name that the prompt shows with underscores is none of its tools.
    outside = not all(names.shows(c.name) for c in parsed.calls)
    if question.expect == "no_call":
        outcome = "correct" if verdict.valid else "hallucinated" if outside else "wrong_tool"
    elif parsed.kind == "unparseable":
        outcome = "unparseable"
    elif not calls:
        outcome = "no_call"
    elif outside:
        outcome = "hallucinated"
    elif verdict.valid:
        outcome = "correct"
    else:
        outcome = _kind_of_wrong(question, calls)
    error_type, error = verdict.error_type, verdict.error
    if parsed.kind == "unparseable":
        error_type, error = "unparseable", parsed.error
    return Judged(outcome, verdict.valid, bool(calls), calls, error_type, error, defaults_valid)


def _valid_with_defaults(question: Question, calls: list[Call], verdict: bfcl.Verdict) -> bool:
    """Return whether a refused answer is valid with the defaults of what it leaves out.

    The checker is not asked again where it would say the same, or has found no end before.
    """
    filled = [_with_defaults(question, c) for c in calls]
    if filled == calls or bfcl.timed_out(verdict.error_type):
        return False
    return bfcl.check(question, filled).valid


def _kind_of_wrong(question: Question, calls: Sequence[Call]) -> Outcome:
    wanted = Counter(name for call in question.gold for name in call)
    if len(calls) > wanted.total():
        return "several_calls"
    if Counter(c.name for c in calls) - wanted:
        return "wrong_tool"
    return "missing_calls" if len(calls) < wanted.total() else "wrong_arguments"


def _with_defaults(question: Question, call: Call) -> Call:
    """Return a call with every parameter it leaves out at the schema's default, if it has one."""
    schema: Mapping[str, Any] = next((t for t in question.tools if t["name"] == call.name), {})
    properties = schema.get("parameters", {}).get("properties", {})
    defaults = {
        name: copy.deepcopy(p["default"])
        for name, p in properties.items()
        if "default" in p and name not in call.arguments
    }
    return Call(call.name, {**call.arguments, **defaults})
