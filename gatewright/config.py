"""Recipes: one named function per real run returns its complete configuration.

A stage keeps its recipes in a `Recipes` registry; the command line is
`python -m STAGE.train RECIPE --dotted.flag value ...`.  A recipe's name says which hardware
it is meant for (`mamba2_1p5b_128xh100`, `mamba2_debug_cpu`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from gatewright import cli
from gatewright.errors import UserError

C = TypeVar("C")


class Recipes(Generic[C]):
    """A registry of functions without arguments, each returning a complete configuration."""

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self._functions: dict[str, Callable[[], C]] = {}

    def register(self, function: Callable[[], C]) -> Callable[[], C]:
        """Add a recipe under its function's name (use as a decorator)."""
        assert function.__name__ not in self._functions, function.__name__
        self._functions[function.__name__] = function
        return function

    def names(self) -> list[str]:
        return list(self._functions)

    def __iter__(self) -> Iterator[str]:
        return iter(self._functions)

    def get(self, name: str) -> C:
        """Return the named recipe's configuration.

        Raises:
            UserError: no recipe has that name; the nearest one is suggested.
        """
        if name not in self._functions:
            raise UserError(
                f"no {self.stage} recipe {name!r}{cli.nearest(name, self._functions)}; "
                f"recipes: {', '.join(self._functions)}"
            )
        return self._functions[name]()

    def describe(self) -> str:
        """Return one line per recipe: its name and the first line of its docstring."""
        width = max(map(len, self._functions), default=0)
        lines = []
        for name, function in self._functions.items():
            summary = (inspect.getdoc(function) or "").partition("\n")[0]
            lines.append(f"  {name:<{width}}  {summary}")
        return "\n".join(lines)


def split_recipe(argv: Sequence[str], recipes: Recipes[C], prog: str) -> tuple[str, list[str]]:
    """Take the recipe's name off the front of a command line.

    Prints the recipes and leaves with code 0 when only `--help` is given.

    Raises:
        UserError: no recipe is named, or a flag stands in its place.
    """
    if argv and argv[0] in ("-h", "--help"):
        print(f"usage: {prog} RECIPE [--flag value ...]\n\nrecipes:\n{recipes.describe()}\n")
        print(f"{prog} RECIPE --help lists every flag with the recipe's value.")
        raise SystemExit(0)
    if not argv or argv[0].startswith("-"):
        raise UserError(f"name a recipe first: {prog} RECIPE ...; recipes: {', '.join(recipes)}")
    return argv[0], list(argv[1:])
