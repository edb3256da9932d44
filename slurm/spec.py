"""A pipeline file: what it may say, and everything that can be wrong with it.

    name = "demo"                       # also the default run folder: runs/demo
    [params]                            # values that commands name as {vocab_size}
    vocab_size = 8192
    [defaults]                          # resources of steps that do not say otherwise
    cpus = 2
    [step.tokenizer]
    command = "python -m tokenizer.train --corpus {text} --vocab-size {vocab_size} --out {out}"
    needs = ["text"]
    out = "tokenizer"                   # below the run folder; finished once it has a manifest
    [step.gates]
    matrix = { scale = [0.5, 1, 2] }    # one task for each value (or combination of values)
    command = "python -m tools.scale_gates {run}/hf/mamba2 --scale {scale} --out {out}"
    needs = ["hf"]
    out = "gates/mamba2-s{scale}"

Placeholders: `{run}` the run folder, `{out}` the step's output, `{NEEDED-STEP}` the output (or
outputs, as separate words) of a needed step, `{PARAM}`, `{MATRIX-KEY}`; `{{` is a brace.
A task's parents are the tasks of needed steps whose output its command names; of a needed step
that no task of the step names, those that agree on the matrix keys both have.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import shlex
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from gatewright.cli import nearest
from gatewright.errors import UserError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*\Z")
_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_TIME = re.compile(r"(?:(\d+)-)?(\d{1,2}):(\d{2}):(\d{2})\Z")
_MEMORY = re.compile(r"\d+[MG]\Z|0\Z")
_RESERVED = ("run", "out")
_RUN = "\0run\0"  # stands for the run folder until it is known


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


@dataclasses.dataclass(frozen=True)
class Task:
    """One command to run: a step, or one combination of its matrix."""

    step: Step
    index: int
    """Position within the step: the index in its Slurm array."""
    values: dict[str, str]
    """Matrix key -> value, as text."""
    words: tuple[str, ...]
    """The command's words; `argv` puts the run folder in."""
    outs: tuple[str, ...]
    """Output folders, relative to the run folder."""
    inputs: tuple[str, ...]
    """Files or patterns outside the run folder."""

    @property
    def name(self) -> str:
        """`sft[scale=0.5]`: what people read."""
        inside = ",".join(f"{k}={v}" for k, v in self.values.items())
        return f"{self.step.name}[{inside}]" if inside else self.step.name

    @property
    def slug(self) -> str:
        """`sft.scale=0.5`: a file name."""
        parts = [self.step.name, *(f"{k}={v}" for k, v in self.values.items())]
        return re.sub(r"[^A-Za-z0-9_.=+-]", "_", ".".join(parts))

    def argv(self, run: str) -> list[str]:
        """Return the command's words with the run folder put in."""
        return [word.replace(_RUN, run) for word in self.words]

    def out_paths(self, run: Path) -> list[Path]:
        return [run / out for out in self.outs]


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """A checked pipeline: steps in an order that respects their needs, and their tasks."""

    path: Path
    name: str
    summary: str
    params: dict[str, Any]
    steps: tuple[Step, ...]
    tasks: tuple[Task, ...]

    def step(self, name: str) -> Step:
        """Return a step by name.

        Raises:
            UserError: there is none; the nearest name is suggested.
        """
        for step in self.steps:
            if step.name == name:
                return step
        names = [s.name for s in self.steps]
        raise UserError(
            f"{self.path}: no step {name!r}{nearest(name, names)}; steps: {', '.join(names)}"
        )

    def tasks_of(self, step: str) -> list[Task]:
        return [t for t in self.tasks if t.step.name == step]

    def parents(self, task: Task) -> list[Task]:
        """Return the tasks whose output `task` reads (see the module's docstring)."""
        found: list[Task] = []
        for need in task.step.needs:
            candidates = self.tasks_of(need)
            siblings = [
                [c for c in candidates if any(_mentions(t.words, out) for out in c.outs)]
                for t in self.tasks_of(task.step.name)
            ]
            named = siblings[task.index]
            found += named if any(siblings) else [c for c in candidates if _agree(task, c)]
        return found

    def descendants(self, name: str) -> set[str]:
        """Return the step and every step that depends on it, directly or not."""
        found = {name}
        for step in self.steps:  # in dependency order
            if found & set(step.needs):
                found.add(step.name)
        return found


def _agree(a: Task, b: Task) -> bool:
    return all(a.values[key] == b.values[key] for key in a.values.keys() & b.values.keys())


def _mentions(words: Iterable[str], out: str) -> bool:
    """Tell whether a word names the folder `out` below the run folder, or something in it."""
    pattern = re.compile(re.escape(f"{_RUN}/{out}") + r"(?![A-Za-z0-9_.+=-])")
    return any(pattern.search(word) for word in words)


class _Reader:
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


def _resources(reader: _Reader, base: Resources) -> Resources:
    found: dict[str, Any] = {}
    for field in ("nodes", "gpus", "cpus"):
        low = 0 if field == "gpus" else 1
        found[field] = reader.take(field, int, getattr(base, field), f"a whole number >= {low}")
        if found[field] < low:
            raise reader.fail(f"{field} = {found[field]}: give a whole number >= {low}")
    for field in ("memory", "time", "partition", "account", "container"):
        found[field] = reader.take(field, str, getattr(base, field), "a string")
    if not _TIME.match(found["time"]):
        raise reader.fail(f"time = {found['time']!r}: write it as HH:MM:SS or D-HH:MM:SS")
    if found["memory"] is not None and not _MEMORY.match(found["memory"]):
        raise reader.fail(f"memory = {found['memory']!r}: write it as 16G or 900M, or 0 for all")
    return Resources(**found)


def _matrix(reader: _Reader) -> dict[str, tuple[Any, ...]]:
    table = reader.take("matrix", dict, {}, "a table such as { scale = [0.5, 1, 2] }")
    found: dict[str, tuple[Any, ...]] = {}
    for key, values in table.items():
        scalar = isinstance(values, list) and all(isinstance(v, str | int | float) for v in values)
        if not scalar or not values or not _NAME.match(key):
            raise reader.fail(f"matrix.{key} = {values!r}: give a non-empty array of values")
        found[key] = tuple(values)
    return found


def _step(path: Path, name: str, table: Any, defaults: Resources) -> Step:
    if not isinstance(table, dict):
        raise UserError(f"{path}: step.{name} = {table!r}: write a table [step.{name}]")
    reader = _Reader(path, f"step {name!r}", table)
    if not _NAME.match(name):
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
        processes=reader.take("processes", int, None, "torchrun processes on each node"),
        resumes=reader.take("resumes", bool, False, "true or false"),
        throttle=reader.take("throttle", int, None, "how many tasks may run at once"),
        env={k: str(v) for k, v in reader.take("env", dict, {}, "a table of NAME = value").items()},
        summary=reader.take("summary", str, "", "a string"),
        resources=_resources(reader, defaults),
    )
    reader.done()
    for field in ("processes", "throttle"):
        value = getattr(step, field)
        if value is not None and value < 1:
            raise reader.fail(f"{field} = {value}: give a whole number >= 1")
    if step.resources.nodes > 1 and step.processes is None:
        raise reader.fail("takes several nodes but gives no processes (torchrun's, on each node)")
    return step


def _in_order(path: Path, steps: list[Step]) -> list[Step]:
    """Return the steps so that each follows its needs, otherwise as in the file."""
    names = [s.name for s in steps]
    for step in steps:
        for need in step.needs:
            if need not in names:
                raise UserError(
                    f"{path}: step {step.name!r} needs {need!r}, which is no step"
                    f"{nearest(need, names)}"
                )
    ordered: list[Step] = []
    left = list(steps)
    while left:
        ready = next((s for s in left if {*s.needs} <= {o.name for o in ordered}), None)
        if ready is None:
            raise UserError(f"{path}: the steps need each other in a circle: {_cycle(left)}")
        ordered.append(ready)
        left.remove(ready)
    return ordered


def _cycle(steps: list[Step]) -> str:
    """Return one circle among steps none of which is ready, as `a -> b -> a` (needs)."""
    by_name = {s.name: s for s in steps}
    trail = [steps[0].name]
    while trail.count(trail[-1]) == 1:
        trail.append(next(n for n in by_name[trail[-1]].needs if n in by_name))
    return " -> ".join(trail[trail.index(trail[-1]) :])


def _fill(
    text: str, known: Mapping[str, list[str]], where: str, *, whole_word: bool = True
) -> list[str]:
    """Put values into a word; one that is only a placeholder may become several words."""
    alone = re.fullmatch(r"\{([^{}]+)\}", text)
    if alone and whole_word and len(known.get(alone[1], [])) > 1:
        return known[alone[1]]

    def value(match: re.Match[str]) -> str:
        if match[0] in ("{{", "}}"):
            return match[0][0]
        if match[1] is None:
            raise UserError(f"{where}: a lone brace in {text!r}; write {{{{ or }}}} for a brace")
        if match[1] not in known:
            raise UserError(
                f"{where}: unknown placeholder {{{match[1]}}}{nearest(match[1], known)}; "
                f"known here: {', '.join(known)}"
            )
        values = known[match[1]]
        if len(values) != 1:
            raise UserError(
                f"{where}: {{{match[1]}}} stands for {len(values)} folders, so it must be a word "
                "of its own"
            )
        return values[0]

    return [_PLACEHOLDER.sub(value, text)]


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _tasks(path: Path, steps: list[Step], params: Mapping[str, Any]) -> Iterator[Task]:
    made: dict[str, list[Task]] = {}
    for step in steps:
        where = f"{path}: step {step.name!r}"
        made[step.name] = []
        for key in step.matrix:
            if key in params or key in _RESERVED or any(key == s.name for s in steps):
                raise UserError(f"{where}: matrix.{key} is also a param, a step or reserved")
        for index, combination in enumerate(itertools.product(*step.matrix.values())):
            values = {k: _text(v) for k, v in zip(step.matrix, combination, strict=True)}
            known = {k: [_text(v)] for k, v in {**params, **values}.items()}
            outs = tuple(_fill(out, known, f"{where}: out")[0] for out in step.out)
            for out in outs:
                pure = PurePosixPath(out)
                if pure.is_absolute() or ".." in pure.parts or str(pure) != out or out == ".":
                    raise UserError(f"{where}: out {out!r} must be a plain path below the run")
                if pure.parts[0] == "pipeline":
                    raise UserError(f"{where}: out {out!r}: pipeline/ holds the run's own records")
            inputs = tuple(_fill(i, known, f"{where}: inputs")[0] for i in step.inputs)
            known |= {"run": [_RUN], "out": [f"{_RUN}/{outs[0]}"]}
            task = Task(step, index, values, (), outs, inputs)
            for need in step.needs:
                agreeing = [t for t in made[need] if _agree(task, t)]
                known[need] = [f"{_RUN}/{out}" for t in agreeing for out in t.outs]
            try:
                raw = shlex.split(step.command)
            except ValueError as e:
                raise UserError(f"{where}: command: {e}") from e
            words = [w for word in raw for w in _fill(word, known, f"{where}: command")]
            task = dataclasses.replace(task, words=tuple(words))
            made[step.name].append(task)
            yield task


def _check_folders(path: Path, steps: list[Step], tasks: list[Task]) -> None:
    """Refuse two writers of one folder, and a read of what the step does not need."""
    writers: dict[str, Task] = {}
    for task in tasks:
        for out in task.outs:
            for other, writer in writers.items():
                a, b = PurePosixPath(out), PurePosixPath(other)
                if a == b or a in b.parents or b in a.parents:
                    hint = "" if task.step is not writer.step else "; put its matrix key into out"
                    raise UserError(
                        f"{path}: steps {writer.name!r} and {task.name!r} both write {out}{hint}"
                    )
            writers[out] = task
    by_name = {s.name: s for s in steps}
    for task in tasks:
        upstream: set[str] = set()
        queue = list(task.step.needs)
        while queue:
            upstream.add(queue[-1])
            queue += by_name[queue.pop()].needs
        for out, writer in writers.items():
            if writer.step.name in upstream or writer.step is task.step:
                continue
            if _mentions(task.words, out):
                raise UserError(
                    f"{path}: step {task.step.name!r} reads {out} but does not need "
                    f"{writer.step.name!r}, which writes it"
                )


def load(
    path: Path,
    overrides: Mapping[str, str] | None = None,
    site: Mapping[str, str] | None = None,
) -> Pipeline:
    """Read and check a pipeline file.

    Args:
        overrides: values for entries of `[params]`, from `--set NAME=VALUE`.
        site: the site's values; names that this pipeline does not have are for others.

    Raises:
        UserError: the file is missing or not TOML (the line is named); an unknown key or
            placeholder (the nearest is suggested); a missing command or out; an unknown need;
            a circle; two steps that write one folder; a command that reads a folder of a step
            it does not need.
    """
    try:
        with open(path, "rb") as f:
            data = tomllib.load(f)
    except FileNotFoundError as e:
        raise UserError(f"{path}: no such pipeline file") from e
    except OSError as e:
        raise UserError(f"{path}: cannot be read ({e.strerror})") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise UserError(f"{path}: is not valid TOML: {e}") from e
    top = _Reader(path, "", data)
    name = top.take("name", str, None, "the pipeline's name")
    if name is None or not _NAME.match(name):
        raise top.fail("give the pipeline a name of letters, digits, '-' and '_'")
    summary = top.take("summary", str, "", "a string")
    params = dict(top.take("params", dict, {}, "a table"))
    defaults_reader = _Reader(path, "defaults", top.take("defaults", dict, {}, "a table"))
    defaults = _resources(defaults_reader, Resources())
    defaults_reader.done()
    tables = top.take("step", dict, {}, "tables [step.NAME]")
    top.done()
    if not tables:
        raise UserError(f"{path}: has no [step.NAME]")
    params |= {key: text for key, text in (site or {}).items() if key in params}
    for key, text in (overrides or {}).items():
        if key not in params:
            raise UserError(
                f"--set {key}={text}: {path} has no such param{nearest(key, params)}; "
                f"params: {', '.join(params) or 'none'}"
            )
        params[key] = text
    for key, value in params.items():
        if key in _RESERVED or key in tables or not isinstance(value, str | int | float):
            raise UserError(f"{path}: params.{key}: is a step, reserved, or no plain value")
    steps = _in_order(path, [_step(path, n, t, defaults) for n, t in tables.items()])
    tasks = list(_tasks(path, steps, params))
    _check_folders(path, steps, tasks)
    return Pipeline(Path(path), name, summary, params, tuple(steps), tuple(tasks))
