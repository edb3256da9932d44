"""Command lines: dataclass fields become flags, mistakes become one line and exit code 2.

Every stage's command is a dataclass of arguments and a function that takes it:

    if __name__ == "__main__":
        cli.run(main, Args, prog="python -m tokenizer.train")

Nested dataclasses become dotted flags (`--train.steps 100`).  A field without a default is
required: nothing is guessed for the user.  Field docstrings are the `--help` text.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import errno
import io
import os
import re
import signal
import sys
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import tyro

from gatewright.errors import UserError

T = TypeVar("T")
N = TypeVar("N", int, float)
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT}
"""Whatever a command was doing, a traceback would hide what the user has to do."""


def _flags(cls: type, prefix: str = "") -> Iterable[str]:
    """Yield the long flags that tyro makes of a dataclass, nested ones dotted."""
    hints = typing.get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        name = prefix + field.name.rstrip("_").replace("_", "-")  # from_ is --from
        hint = hints[field.name]
        cls.__annotations__[field.name] = _plain_unions(hint)
        if typing.get_origin(hint) is typing.Annotated:
            for marker in hint.__metadata__:  # tyro.conf.arg(name=...) renames the flag
                renamed = getattr(marker, "name", None)
                name = prefix + renamed if isinstance(renamed, str) else name
            hint = hint.__origin__
        if dataclasses.is_dataclass(hint):
            yield from _flags(typing.cast(type, hint), name + ".")
        else:
            yield "--" + name
            if hint is bool:
                head, _, last = name.rpartition(".")
                yield "--" + (f"{head}.no-{last}" if head else f"no-{last}")


def _plain_unions(hint: Any) -> Any:
    """Return a type with `X | None` as `Optional[X]`, which means the same.

    tyro checks the first form with typeguard, whose import takes 50 ms at every start.
    """
    if typing.get_origin(hint) is typing.Annotated:
        return typing.Annotated[(_plain_unions(hint.__origin__), *hint.__metadata__)]
    if isinstance(hint, types.UnionType):
        return typing.Union[typing.get_args(hint)]  # noqa: UP007
    return hint


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)` for the closest known name, or an empty string."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {match[0]!r}?)" if match else ""


def numbers(
    flag: str,
    text: str,
    kind: type[N],
    *,
    least: float | None = None,
    most: float | None = None,
) -> list[N]:
    """Return the numbers of a comma-separated flag, in the given order.

    Args:
        kind: int or float.
        least, most: refuse smaller or larger ones.

    Raises:
        UserError: one is not such a number or outside the limits, or there is none.
    """
    what = "whole number" if kind is int else "number"
    if not text.strip(" ,"):
        raise UserError(f"{flag} {text!r}: give at least one {what}")
    found: list[N] = []
    for part in map(str.strip, text.split(",")):
        try:
            found.append(kind(part.replace("_", "?")))  # Python would read 1_0 as 10
        except ValueError as e:
            raise UserError(
                f"{flag} {text}: {part!r} is not a {what}; give {what}s separated by commas"
            ) from e
    if least is not None and not min(found) >= least:
        raise UserError(f"{flag} {text}: each must be at least {least:g}")
    if most is not None and not max(found) <= most:
        raise UserError(f"{flag} {text}: each must be at most {most:g}")
    return found


def parse(
    cls: type[T],
    argv: Sequence[str],
    *,
    prog: str,
    description: str | None = None,
    default: T | None = None,
) -> T:
    """Parse `argv` into the dataclass `cls`.

    Raises:
        UserError: an unknown flag (the nearest name is suggested), a missing or malformed
            value, or a value that the dataclass's `__post_init__` rejects.
    """
    known = set(_flags(cls))
    help_asked = any(a in ("-h", "--help") for a in argv)
    for arg in argv:
        flag = arg.split("=", 1)[0].replace("_", "-")
        if arg.startswith("--") and len(arg) > 2 and flag not in known and flag != "--help":
            raise UserError(
                f"unknown flag {arg.split('=', 1)[0]}{nearest(flag, known)}; "
                f"{prog} --help lists all"
            )
    if help_asked:
        tyro.cli(cls, args=["--help"], prog=prog, description=description, **_maybe(default))
    captured = io.StringIO()
    try:
        with contextlib.redirect_stdout(captured), contextlib.redirect_stderr(captured):
            parsed, extra = tyro.cli(
                cls, args=list(argv), prog=prog, return_unknown_args=True, **_maybe(default)
            )
    except SystemExit as e:
        raise UserError(f"{_one_line(captured.getvalue())}; {prog} --help lists all") from e
    except ValueError as e:
        raise UserError(str(e)) from e
    if extra:
        raise UserError(f"unexpected argument {extra[0]!r}; {prog} --help lists all")
    return typing.cast(T, parsed)


def _maybe(default: Any) -> dict[str, Any]:
    return {} if default is None else {"default": default}


def _one_line(box: str) -> str:
    """Flatten tyro's framed error message to one line, without the help that follows it."""
    words: list[str] = []
    for raw in box.splitlines():
        line = raw.strip(" │╭╮╰╯─|+-\t") if not raw.strip().startswith("--") else raw.strip()
        if set(line) <= set("-─ "):
            continue
        if line.startswith(("Argument helptext", "For full helptext")):
            break
        words.append(line)
    text = " ".join(words).replace("Missing from", "missing from")
    text = re.sub(r"^Value error Error parsing (?:[A-Z]\w*: )?", "", text)  # not our classes' names
    # Of `X | None` only what X says of the value, and that in the user's words.
    union = r"no type matching .* could be instantiated from .*\. Got errors: <class 'NoneType'>: "
    text = re.sub(union + r".* does not match choices \('None',\) (?:<class '\w+'>: )?", "", text)
    text = re.sub(r"invalid literal for int\(\) with base 10: (.*)", r"\1 is no whole number", text)
    text = re.sub(r"could not convert string to float: (.*)", r"\1 is no number", text)
    # The frame's title says the same as its first words.
    return text.replace("Invalid choice invalid", "invalid") or "cannot read the arguments"


def fail(error: UserError) -> typing.NoReturn:
    """Print a one-line error and leave with exit code 2."""
    print(f"error: {error}", file=sys.stderr)
    raise SystemExit(2)


def run(
    main: Callable[[T], int | None],
    cls: type[T],
    *,
    prog: str,
    description: str | None = None,
    default: T | None = None,
    argv: Sequence[str] | None = None,
) -> typing.NoReturn:
    """Parse the command line, call `main`, and leave with its exit code.

    Exit codes: 0 done; 2 bad input or a full disk (one line on stderr); 130 interrupted; what
    `main` returns otherwise.  Any other exception keeps its traceback and Python's code 1.
    """
    args = sys.argv[1:] if argv is None else list(argv)
    description = description if description is not None else main.__doc__
    try:
        parsed = parse(cls, args, prog=prog, description=description, default=default)
        code = main(parsed)
    except UserError as e:
        fail(e)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except OSError as e:
        if e.errno not in _DISK_FULL:
            raise
        where = e.filename or "writing"
        fail(UserError(f"{where}: {e.strerror}; make room, then give the command again"))
    raise SystemExit(code or 0)
