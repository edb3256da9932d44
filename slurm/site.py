"""Site settings: what differs from cluster to cluster, kept apart from the pipelines."""

from __future__ import annotations

import dataclasses
import os
import string
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gatewright.cli import nearest
from gatewright.errors import UserError
from slurm.step import MEMORY, PLAIN, as_text, in_directive

EXAMPLE = "slurm/site.example.toml"
_SLURMS_LONGEST_WARNING = 65535  # of --signal


@dataclasses.dataclass(frozen=True)
class Site:
    """One cluster's settings (slurm/site.example.toml explains them for people)."""

    account: str
    """Slurm account; "" where the cluster has none."""
    partition: str
    """Partition; "" takes the cluster's default."""
    cpu_partition: str = ""
    """Partition of steps that take no GPU; "" takes `partition`."""
    python: str = sys.executable
    """Python with gatewright installed, on a file system that all nodes see."""
    gpu_option: str = "--gpus-per-node={n}"
    """How the cluster wants GPUs asked for, such as "--gres=gpu:h100:{n}"."""
    memory: str = ""
    """Memory per node of steps that do not say; "" leaves it to the cluster."""
    sbatch: tuple[str, ...] = ()
    """Further #SBATCH options, such as "--qos=long"."""
    setup: tuple[str, ...] = ()
    """Shell lines that each job runs first, such as "module load cuda/12.8"."""
    container: str = ""
    """Image for `srun --container-image` (pyxis); "" runs without."""
    container_mounts: tuple[str, ...] = ()
    """Mounts into the container, "/data:/data"; the run folder is always mounted."""
    container_python: str = "python"
    """Python inside the container."""
    save_seconds: int = 180
    """How long before the time limit a job is told to save."""
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    """Environment variables of every command."""
    params: dict[str, str] = dataclasses.field(default_factory=dict)
    """Values for the pipelines' [params]: where the data lies here."""


def place(path: Path | None) -> Path:
    """Return the site file that counts: the one named, $GATEWRIGHT_SITE, or site.toml here."""
    return path if path is not None else Path(os.environ.get("GATEWRIGHT_SITE", "site.toml"))


def load(path: Path | None) -> Site:
    """Read a site file; without a path take $GATEWRIGHT_SITE, then site.toml here.

    Raises:
        UserError: there is none; it is not TOML; an unknown key (the nearest is suggested); a
            value of the wrong type or form; no account or no partition.
    """
    path = place(path)
    try:
        with open(path, "rb") as f:
            table: dict[str, Any] = tomllib.load(f)
    except OSError as e:
        raise UserError(
            f"site file {path}: cannot be read ({e.strerror}); copy {EXAMPLE}, fill it in and "
            "name it with --site (or $GATEWRIGHT_SITE)"
        ) from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise UserError(f"site file {path}: is not valid TOML: {e}") from e
    fields = {f.name: f for f in dataclasses.fields(Site)}
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in fields:
            raise UserError(
                f"site file {path}: unknown key {key!r}{nearest(key, fields)}; "
                f"keys: {', '.join(fields)}"
            )
        values[key] = _value(path, key, value, fields[key].type)
    for key in ("account", "partition"):
        if key not in values:
            raise UserError(
                f'site file {path}: no {key}: write {key} = "NAME", or {key} = "" if the cluster '
                "needs none"
            )
    site = Site(**values)
    for key, value, wrong in _mistakes(site):
        raise UserError(f"site file {path}: {key} = {value!r}: {wrong}")
    return site


def _mistakes(site: Site) -> Iterator[tuple[str, object, str]]:
    """Yield key, value and what is wrong with it."""
    for field in dataclasses.fields(Site):
        value = getattr(site, field.name)
        texts = (value,) if isinstance(value, str) else value if isinstance(value, tuple) else ()
        for text in texts if field.name != "setup" else ():  # shell lines, not directives
            if wrong := in_directive(field.name, text):
                yield field.name, text, wrong
    for key in ("python", "container_python"):
        program = getattr(site, key)
        if not program or ("/" in program and not program.startswith("/")):
            yield key, program, "give an absolute path, or a name that is on the jobs' PATH"
    if not _one_number(site.gpu_option):
        yield (
            "gpu_option",
            site.gpu_option,
            f"write {{n}} for the number of GPUs, and no other braces, as in {Site.gpu_option!r}",
        )
    for option in site.sbatch:
        if not option.startswith("--"):
            yield "sbatch", option, 'write options in their long form, as in "--qos=long"'
    if site.memory and not MEMORY.match(site.memory):
        yield "memory", site.memory, "write it as 16G or 900M, or 0 for all"
    for mount in site.container_mounts:
        if len(parts := mount.split(":")) < 2 or not all(parts):
            yield "container_mounts", mount, 'write it as "/here:/in/the/container"'
    if site.save_seconds > _SLURMS_LONGEST_WARNING:
        yield "save_seconds", site.save_seconds, f"Slurm warns {_SLURMS_LONGEST_WARNING} s at most"


def _one_number(option: str) -> bool:
    try:
        fields = [part[1:] for part in string.Formatter().parse(option) if part[1] is not None]
    except ValueError:  # a lone brace
        return False
    return bool(fields) and all(field == ("n", "", None) for field in fields)


def _value(path: Path, key: str, value: Any, kind: Any) -> Any:
    if kind == "str" and isinstance(value, str):
        return value
    if kind == "int" and isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    if kind == "tuple[str, ...]" and isinstance(value, list):
        if not all(isinstance(v, str) for v in value):
            raise UserError(f"site file {path}: {key} = {value!r}: give an array of strings")
        return tuple(value)
    if kind == "dict[str, str]" and isinstance(value, dict):
        for name, inner in value.items():
            if not isinstance(inner, PLAIN):
                raise UserError(
                    f"site file {path}: {key}.{name} = {inner!r}: give a string, a number, true "
                    "or false"
                )
        return {name: as_text(inner) for name, inner in value.items()}
    wanted = {
        "str": "a string",
        "int": "a positive whole number",
        "tuple[str, ...]": "an array of strings",
        "dict[str, str]": f"a table [{key}]",
    }[kind]
    raise UserError(f"site file {path}: {key} = {value!r}: give {wanted}")
