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
import os
import re
import shlex
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from gatewright.cli import nearest
from gatewright.errors import UserError
from slurm import overrides as changes
from slurm.step import (
    NAME,
    PLAIN,
    Reader,
    Resources,
    Step,
    as_text,
    read_resources,
    read_step,
)

_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_RESERVED = ("run", "out")
_RUN = "\0run\0"  # stands for the run folder until it is known


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
                f"known here: {', '.join(known) or 'nothing'}"
            )
        values = known[match[1]]
        if not values:
            raise UserError(
                f"{where}: {{{match[1]}}} stands for no folder: no task of {match[1]!r} has this "
                "step's matrix values; give both steps the same ones"
            )
        if len(values) != 1:
            raise UserError(
                f"{where}: {{{match[1]}}} stands for {len(values)} folders, so it must be a word "
                "of its own"
            )
        return values[0]

    return [_PLACEHOLDER.sub(value, text)]


def _at_home(word: str) -> str:
    """Return a word with `~` made a path, for no shell sees it."""
    return os.path.expanduser(word)


def _tasks(path: Path, steps: list[Step], params: Mapping[str, Any]) -> Iterator[Task]:
    made: dict[str, list[Task]] = {}
    for step in steps:
        where = f"{path}: step {step.name!r}"
        made[step.name] = []
        for key in step.matrix:
            if key in params or key in _RESERVED or any(key == s.name for s in steps):
                raise UserError(f"{where}: matrix.{key} is also a param, a step or reserved")
        for index, combination in enumerate(itertools.product(*step.matrix.values())):
            values = {k: as_text(v) for k, v in zip(step.matrix, combination, strict=True)}
            known = {k: [as_text(v)] for k, v in {**params, **values}.items()}
            outs = tuple(_fill(out, known, f"{where}: out")[0] for out in step.out)
            for out in outs:
                pure = PurePosixPath(out)
                if pure.is_absolute() or ".." in pure.parts or str(pure) != out or out == ".":
                    raise UserError(f"{where}: out {out!r} must be a plain path below the run")
                if pure.parts[0] == "pipeline":
                    raise UserError(f"{where}: out {out!r}: pipeline/ holds the run's own records")
            inputs = tuple(_at_home(_fill(i, known, f"{where}: inputs")[0]) for i in step.inputs)
            known |= {"run": [_RUN], "out": [f"{_RUN}/{outs[0]}"]}
            task = Task(step, index, values, (), outs, inputs)
            for need in step.needs:
                agreeing = [t for t in made[need] if _agree(task, t)]
                known[need] = [f"{_RUN}/{out}" for t in agreeing for out in t.outs]
            try:
                raw = shlex.split(step.command)
            except ValueError as e:
                raise UserError(f"{where}: command: {e}") from e
            words = [_at_home(w) for word in raw for w in _fill(word, known, f"{where}: command")]
            task = dataclasses.replace(task, words=tuple(words))
            made[step.name].append(task)
            yield task


def _check_records(path: Path, tasks: list[Task]) -> None:
    """Refuse two tasks that would share a record and a log."""
    known: dict[str, Task] = {}
    for task in tasks:
        other = known.setdefault(task.slug, task)
        if other is not task:
            raise UserError(
                f"{path}: {other.name!r} and {task.name!r} would share the record {task.slug!r}: "
                "give their matrix values other letters or digits"
            )


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
        overrides: from `--set NAME=VALUE` and `--set STEP.KEY=VALUE` (slurm.overrides).
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
    top = Reader(path, "", data)
    name = top.take("name", str, None, "the pipeline's name")
    if name is None or not NAME.match(name):
        raise top.fail("give the pipeline a name of letters, digits, '-' and '_'")
    summary = top.take("summary", str, "", "a string")
    params = dict(top.take("params", dict, {}, "a table"))
    defaults_reader = Reader(path, "defaults", top.take("defaults", dict, {}, "a table"))
    defaults = read_resources(defaults_reader, Resources())
    defaults_reader.done()
    tables = top.take("step", dict, {}, "tables [step.NAME]")
    top.done()
    if not tables:
        raise UserError(f"{path}: has no [step.NAME]")
    params |= {key: text for key, text in (site or {}).items() if key in params}
    changes.change_params(path, params, overrides or {})
    changes.change_steps(path, tables, overrides or {})
    for key, value in params.items():
        if key in _RESERVED or key in tables or not isinstance(value, PLAIN):
            raise UserError(f"{path}: params.{key}: is a step, reserved, or no plain value")
        if isinstance(value, str):
            params[key] = _at_home(value)
    steps = _in_order(path, [read_step(path, n, t, defaults) for n, t in tables.items()])
    tasks = list(_tasks(path, steps, params))
    _check_folders(path, steps, tasks)
    _check_records(path, tasks)
    return Pipeline(Path(path), name, summary, params, tuple(steps), tuple(tasks))
