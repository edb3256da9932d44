"""Site settings: what differs from cluster to cluster, kept apart from the pipelines."""

from __future__ import annotations

import dataclasses
import os
import sys
import tomllib
from pathlib import Path
from typing import Any

from gatewright.cli import nearest
from gatewright.errors import UserError

EXAMPLE = "slurm/site.example.toml"


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


def load(path: Path | None) -> Site:
    """Read a site file; without a path take $GATEWRIGHT_SITE, then site.toml here.

    Raises:
        UserError: there is none; it is not TOML; an unknown key (the nearest is suggested); a
            value of the wrong type; no account or no partition; a wrong placeholder.
    """
    if path is None:
        path = Path(os.environ.get("GATEWRIGHT_SITE", "site.toml"))
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
    try:
        site.gpu_option.format(n=1)
    except (KeyError, IndexError, ValueError, AttributeError) as e:
        raise UserError(
            f"site file {path}: gpu_option = {site.gpu_option!r}: write {{n}} for the number of "
            f"GPUs, as in {Site.gpu_option!r}"
        ) from e
    return site


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
        return {k: str(v) for k, v in value.items()}
    wanted = {
        "str": "a string",
        "int": "a positive whole number",
        "tuple[str, ...]": "an array of strings",
        "dict[str, str]": f"a table [{key}]",
    }[kind]
    raise UserError(f"site file {path}: {key} = {value!r}: give {wanted}")
