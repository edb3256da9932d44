"""One step of a pipeline file: its keys, their types and defaults, and what may be wrong."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gatewright.cli import nearest
from gatewright.errors import UserError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*\Z")
_TIME = re.compile(r"(?:(\d+)-)?(\d{1,2}):([0-5]\d):([0-5]\d)\Z", re.ASCII)
MEMORY = re.compile(r"\d+[MG]\Z|0\Z", re.ASCII)
PLAIN = (str, int, float)
"""Types of a value that becomes a word; bool is an int."""


def as_text(value: str | int | float) -> str:
    """Return a TOML value as a command line has it: true, not True."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def in_directive(key: str, value: str) -> str | None:
    """Return what is wrong with a text for a line `#SBATCH --key=value`, or None."""
    if not value.isprintable():
        return "has a line break or another control character"
    if key in ("account", "partition", "cpu_partition") and " " in value:
        return "has a space"
    return None


@dataclasses.dataclass(frozen=True)
class Resources:
    """What one task of a step asks a scheduler for; this machine only reads `cpus`."""

    nodes: int = 1
    """Machines."""
    gpus: int = 0
    """GPUs on each node."""
    cpus: int = 2
    """CPU cores on each node."""
    memory: str | None = None
    """Memory of each node, such as 16G; 0 is all of it; by default the site's."""
    time: str = "01:00:00"
    """Wall-clock limit [D-]HH:MM:SS of one job; a step that resumes may take several jobs."""
    partition: str | None = None
    """Slurm partition, where it differs from the site's."""
    account: str | None = None
    """Slurm account, where it differs from the site's."""
    container: str | None = None
    """Container image, where it differs from the site's."""

    @property
    def seconds(self) -> int:
        """The wall-clock limit in seconds."""
        match = _TIME.match(self.time)
        assert match is not None
        days, hours, minutes, seconds = (int(g or 0) for g in match.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


@dataclasses.dataclass(frozen=True)
class Step:
    """One entry of the file, as written there."""

    name: str
    command: str
    needs: tuple[str, ...]
    out: tuple[str, ...]
    matrix: dict[str, tuple[Any, ...]]
    inputs: tuple[str, ...]
    resources: Resources
    processes: int | None
    resumes: bool
    throttle: int | None
    env: dict[str, str]
    summary: str


class Reader:
    """Takes typed values out of one TOML table and complains about what it did not ask for."""

    def __init__(self, path: Path, where: str, table: Mapping[str, Any]) -> None:
        self.path, self.where, self.table = path, where, dict(table)
        self.asked: list[str] = []

    def fail(self, message: str) -> UserError:
        at = f"{self.path}: {self.where}: " if self.where else f"{self.path}: "
        return UserError(at + message)

    def take(self, key: str, kind: type | tuple[type, ...], default: Any, what: str) -> Any:
        self.asked.append(key)
        if key not in self.table:
            return default
        value = self.table.pop(key)
        bool_as_int = isinstance(value, bool) and kind is int
        if not isinstance(value, kind) or bool_as_int:
            raise self.fail(f"{key} = {value!r}: give {what}")
        return value

    def strings(self, key: str) -> tuple[str, ...]:
        """Take a string or an array of strings."""
        value = self.take(key, (str, list), [], "a string or an array of strings")
        values = [value] if isinstance(value, str) else value
        if not all(isinstance(v, str) and v for v in values):
            raise self.fail(f"{key} = {value!r}: give a string or an array of strings")
        return tuple(values)

    def done(self) -> None:
        for key in self.table:
            raise self.fail(
                f"unknown key {key!r}{nearest(key, self.asked)}; keys: {', '.join(self.asked)}"
            )


def read_resources(reader: Reader, base: Resources) -> Resources:
    found: dict[str, Any] = {}
    for field in ("nodes", "gpus", "cpus"):
        low = 0 if field == "gpus" else 1
        found[field] = reader.take(field, int, getattr(base, field), f"a whole number >= {low}")
        if found[field] < low:
            raise reader.fail(f"{field} = {found[field]}: give a whole number >= {low}")
    for field in ("memory", "time", "partition", "account", "container"):
        value = found[field] = reader.take(field, str, getattr(base, field), "a string")
        if value is not None and (wrong := in_directive(field, value)):
            raise reader.fail(f"{field} = {value!r}: {wrong}")
    if not _TIME.match(found["time"]):
        raise reader.fail(f"time = {found['time']!r}: write it as HH:MM:SS or D-HH:MM:SS")
    if found["memory"] is not None and not MEMORY.match(found["memory"]):
        raise reader.fail(f"memory = {found['memory']!r}: write it as 16G or 900M, or 0 for all")
    resources = Resources(**found)
    if resources.seconds == 0:
        raise reader.fail(f"time = {found['time']!r}: Slurm would take it for no limit; give one")
    return resources


def _matrix(reader: Reader) -> dict[str, tuple[Any, ...]]:
    table = reader.take("matrix", dict, {}, "a table such as { scale = [0.5, 1, 2] }")
    found: dict[str, tuple[Any, ...]] = {}
    for key, values in table.items():
        scalar = isinstance(values, list) and all(isinstance(v, PLAIN) for v in values)
        if not scalar or not values or not NAME.match(key):
            raise reader.fail(f"matrix.{key} = {values!r}: give a non-empty array of values")
        said = [as_text(value) for value in values]
        for value in said:
            if said.count(value) > 1:
                raise reader.fail(f"matrix.{key}: {value} is given twice")
        found[key] = tuple(values)
    return found


def read_step(path: Path, name: str, table: Any, defaults: Resources) -> Step:
    if not isinstance(table, dict):
        raise UserError(f"{path}: step.{name} = {table!r}: write a table [step.{name}]")
    reader = Reader(path, f"step {name!r}", table)
    if not NAME.match(name):
        raise reader.fail("a step's name is letters, digits, '-' and '_'")
    command = reader.take("command", str, None, "the command line as a string")
    if not command or not command.strip():
        raise reader.fail("has no command")
    out = reader.strings("out")
    if not out:
        raise reader.fail("has no out: name the folder (below the run folder) that it writes")
    step = Step(
        name=name,
        command=command,
        needs=reader.strings("needs"),
        out=out,
        matrix=_matrix(reader),
        inputs=reader.strings("inputs"),
        processes=reader.take("processes", int, None, "a whole number (torchrun's, on each node)"),
        resumes=reader.take("resumes", bool, False, "true or false"),
        throttle=reader.take("throttle", int, None, "a whole number (tasks that may run at once)"),
        env=_env(reader),
        summary=reader.take("summary", str, "", "a string"),
        resources=read_resources(reader, defaults),
    )
    reader.done()
    for field in ("processes", "throttle"):
        value = getattr(step, field)
        if value is not None and value < 1:
            raise reader.fail(f"{field} = {value}: give a whole number >= 1")
    if step.resources.nodes > 1 and step.processes is None:
        raise reader.fail("takes several nodes but gives no processes (torchrun's, on each node)")
    _check_processes(reader, step)
    if step.throttle is not None and not step.matrix:
        raise reader.fail(f"throttle = {step.throttle}: the step has no matrix, so it is one task")
    return step


def _check_processes(reader: Reader, step: Step) -> None:
    """Refuse processes that torchrun cannot start."""
    if step.processes is None:
        return
    gpus = step.resources.gpus
    if 0 < gpus < step.processes:
        raise reader.fail(
            f"processes = {step.processes} is more than gpus = {gpus}: each process takes one"
        )
    words = step.command.split()
    if words[0] != "python" or len(words) < 2 or (words[1].startswith("-") and words[1] != "-m"):
        raise reader.fail(
            f"processes = {step.processes}: torchrun starts them, so the command must begin with "
            "python -m MODULE or python FILE"
        )


def _env(reader: Reader) -> dict[str, str]:
    table = reader.take("env", dict, {}, "a table of NAME = value")
    for key, value in table.items():
        if not isinstance(value, PLAIN):
            raise reader.fail(f"env.{key} = {value!r}: give a string, a number, true or false")
    return {key: as_text(value) for key, value in table.items()}
