"""What the flags of `python -m synthetic.capacity` may be: pairs, tasks, sizes that fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gatewright.errors import UserError
from synthetic.arguments import positive

if TYPE_CHECKING:
    from synthetic.capacity import tasks

MOST_THREADS = 1024
MOST_NUMBERS = 2**30
"""Weights, and activations of a batch, of all members together: 4 GiB each as floats."""


def counts(args: Any, *names: str) -> None:
    """Refuse arguments that are not above zero, and more threads than any machine has.

    Raises:
        UserError: one is not.
    """
    positive(args, *names, "threads")
    if args.threads > MOST_THREADS:
        raise UserError(f"--threads {args.threads}: must be at most {MOST_THREADS}")


def pairs(flag: str, text: str, separator: str, wanted: str) -> list[tuple[int, int]]:
    """Parse comma-separated pairs of whole numbers from 1, such as `2x4,...`.

    Args:
        wanted: for the error message, what a pair is.

    Raises:
        UserError: anything else, or none.
    """
    found = []
    for item in filter(None, map(str.strip, text.split(","))):
        pair = [x.strip() for x in item.split(separator)]
        # isdigit would let ² pass, and int takes time for thousands of digits.
        if len(pair) != 2 or not all(x.isdecimal() and len(x) < 10 and int(x) for x in pair):
            raise UserError(f"{flag} {item}: give {wanted}")
        found.append((int(pair[0]), int(pair[1])))
    if not found:
        raise UserError(f"{flag} {text!r}: give {wanted}")
    return found


def task(
    where: str, name: tasks.Name, vocab: int, facts: int, length: int | None = None
) -> tasks.Task:
    """Return a task whose sizes came from the flags that `where` names.

    Raises:
        UserError: there is no such task.
    """
    from synthetic.capacity import tasks  # torch: not before the plain checks

    try:
        return tasks.make(name, vocab, facts, length)
    except ValueError as e:
        raise UserError(f"{where}: {e}") from e


def fits(where: str, vocab: int, d: int, n: int, length: int, members: int = 1) -> None:
    """Refuse models that no machine trains here, before anything is written.

    Args:
        where: the flags that say the sizes.

    Raises:
        UserError: too many weights, or activations of a batch.
    """
    weights = members * d * (vocab + 6 * d + 4 * n)
    activations = members * 128 * length * (d + 2 * n)
    if max(weights, activations) > MOST_NUMBERS:
        raise UserError(
            f"{where}: more than 2^{MOST_NUMBERS.bit_length() - 1} weights or activations of "
            "members that train together; choose smaller sizes"
        )
