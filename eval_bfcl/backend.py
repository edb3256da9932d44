"""What every way of generating answers has in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

from eval_bfcl.prompting import Request


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a model wrote.

    Attributes:
        text: the generated text as it came, its end-of-turn token left out.
        prompt_tokens, new_tokens: counts (0 where a server does not tell).
        latency_s: seconds from the start of its batch (or request) to its last token.
        finish: `stop` at the end of the turn, `length` at the limit of new tokens.
    """

    text: str
    prompt_tokens: int
    new_tokens: int
    latency_s: float
    finish: Literal["stop", "length"]


@dataclasses.dataclass(frozen=True)
class Failure:
    """The machinery failed: nothing is known of what the model would have written.

    Attributes:
        error: what happened, in one line.
        again: asking once more may help (a busy server); not so for a prompt that is refused.
    """

    error: str
    again: bool = True


class Backend(Protocol):
    """Generates greedily."""

    def run(self, requests: Sequence[Request]) -> Iterator[tuple[Request, Answer | Failure]]:
        """Yield every request once, in any order, as soon as it is done."""
        ...
