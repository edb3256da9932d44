"""Reading prompts that begin alike: what they share is read once.

Pools of growing k are nested, so the prompts of one question at several k share all tools of
the smaller pool; only its end (instructions, question) is read anew.  A cache of attention is
cut back to any of its beginnings; a recurrent state cannot be, so reading stops where prompts
part and keeps a copy of the state there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

SHARED_TOKENS = 32
"""Shorter common beginnings are not worth a copy."""

Forward = Callable[[Sequence[int], Any], tuple[Any, Any]]
"""(tokens, cache or None) -> (logits after the last token, cache after it)."""


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many first tokens two prompts share; at least one is left to read.

    0 if they are fewer than SHARED_TOKENS.
    """
    end = min(len(a), len(b)) - 1
    n = next((i for i in range(end) if a[i] != b[i]), end)
    return n if n >= SHARED_TOKENS else 0


def read_cropping(
    prompts: Sequence[Sequence[int]], forward: Forward, cropped: Callable[[Any, int], Any]
) -> Iterator[tuple[int, Any, Any]]:
    """Yield (number of the prompt, logits after it, its cache), the longest prompt first."""
    done: list[tuple[Sequence[int], Any]] = []
    for i in sorted(range(len(prompts)), key=lambda i: -len(prompts[i])):
        prompt = prompts[i]
        shared, source = max(
            ((common(prompt, other), cache) for other, cache in done),
            key=lambda found: found[0],
            default=(0, None),
        )
        start = cropped(source, shared) if shared else None
        logits, cache = forward(prompt[shared:], start)
        done.append((prompt, cache))
        yield i, logits, cache


def read_nested(
    prompts: Sequence[Sequence[int]], forward: Forward, snapshot: Callable[[Any], Any]
) -> Iterator[tuple[int, Any, Any]]:
    """Yield (number of the prompt, logits after it, its cache), in the order of their tokens.

    Neighbours in that order share the most, so a stack of the states where prompts part holds
    all that is needed.
    """
    order = sorted(range(len(prompts)), key=lambda i: tuple(prompts[i]))
    shared = [common(prompts[a], prompts[b]) for a, b in itertools.pairwise(order)]
    kept: list[tuple[int, Any]] = [(0, None)]
    for place, i in enumerate(order):
        prompt = prompts[i]
        while kept[-1][0] > (shared[place - 1] if place else 0):
            kept.pop()
        depth, start = kept[-1]
        cache = None if start is None else snapshot(start)
        for stop in _partings(shared[place:], depth):
            _, cache = forward(prompt[depth:stop], cache)
            kept.append((stop, snapshot(cache)))
            depth = stop
        logits, cache = forward(prompt[depth:], cache)
        yield i, logits, cache


def _partings(shared: Sequence[int], depth: int) -> list[int]:
    """Return the depths beyond `depth` at which later prompts leave this one, ascending."""
    stops: list[int] = []
    low = None
    for n in shared:
        low = n if low is None else min(low, n)
        if low <= depth:
            break
        if not stops or low < stops[-1]:
            stops.append(low)
    return stops[::-1]
