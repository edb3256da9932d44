"""Changes to a pipeline file that its user makes on the command line, with `--set`.

`NAME=VALUE` gives an entry of [params] another value.  `STEP.KEY=VALUE` gives a step other
resources (`pretrain.time=00:30:00`), other values for a key of its matrix (`gates.scale=0.5,2`)
or, with KEY `flags`, appends words to its command (`pretrain.flags="--train.steps 50"`), so that
any recipe of a shipped pipeline can be changed without editing the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gatewright.cli import nearest
from gatewright.errors import UserError

FLAGS = "flags"
_NUMBERS = ("nodes", "gpus", "cpus", "processes", "throttle")
_TEXTS = ("memory", "time", "partition", "account", "container")
KEYS = (FLAGS, *_NUMBERS, *_TEXTS)


def parse(settings: tuple[str, ...]) -> dict[str, str]:
    """Split NAME=VALUE settings.

    Raises:
        UserError: one has no '=', or two give one name.
    """
    found: dict[str, str] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise UserError(f"--set {setting}: write it as NAME=VALUE or STEP.KEY=VALUE")
        if name in found:
            raise UserError(f"--set {setting}: {name} is also set to {found[name]!r}; give it once")
        found[name] = value
    return found


def change_params(path: Path, params: dict[str, Any], overrides: Mapping[str, str]) -> None:
    """Put the values of NAME=VALUE settings into a pipeline's params.

    Raises:
        UserError: it has no such param; the nearest is suggested.
    """
    for key, text in overrides.items():
        if "." in key:
            continue
        if key not in params:
            raise UserError(
                f"--set {key}={text}: {path} has no such param{nearest(key, params)}; "
                f"params: {', '.join(params) or 'none'}"
            )
        params[key] = text


def change_steps(path: Path, tables: dict[str, Any], overrides: Mapping[str, str]) -> None:
    """Put the values of STEP.KEY=VALUE settings into a pipeline's [step.NAME] tables.

    Raises:
        UserError: there is no such step or key (the nearest is suggested), or a number is none.
    """
    for name, text in overrides.items():
        step, dot, key = name.partition(".")
        if not dot:
            continue
        said = f"--set {name}={text}"
        if step not in tables or not isinstance(tables[step], dict):
            raise UserError(f"{said}: {path} has no step {step!r}{nearest(step, tables)}")
        table = tables[step]
        matrix = table.get("matrix") if isinstance(table.get("matrix"), dict) else {}
        keys = (*matrix, *KEYS)
        if key not in keys:
            raise UserError(f"{said}: no key {key!r}{nearest(key, keys)}; keys: {', '.join(keys)}")
        if key in matrix:
            values = [value for value in map(str.strip, text.split(",")) if value]
            table["matrix"] = {**matrix, key: values}
        elif key == FLAGS:
            table["command"] = f"{table.get('command', '')} {text}"
        elif key in _TEXTS:
            table[key] = text
        else:
            try:
                table[key] = int(text)
            except ValueError as e:
                raise UserError(f"{said}: give a whole number") from e
