"""Run a pipeline file: on this machine (`--local`) or as Slurm jobs (`--submit`)."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import Annotated

import tyro

from gatewright import cli
from gatewright.errors import UserError
from slurm import local, spec

PROG = "python -m slurm.pipeline"


@dataclasses.dataclass
class Args:
    """Run the steps of a pipeline file, each once: what is finished is skipped."""

    file: tyro.conf.Positional[Path]
    """Pipeline file (slurm/pipelines/demo.toml shows one)."""
    local: bool = False
    """Run on this machine, one step after another."""
    submit: bool = False
    """Submit to Slurm."""
    dry_run: bool = False
    """Only print what would run and why."""
    run: Path | None = None
    """Run folder; by default runs/NAME."""
    only: str | None = None
    """Run nothing but this step; its needs must be finished."""
    start_from: Annotated[str | None, tyro.conf.arg(name="from")] = None
    """Run this step and all that depend on it again, even if finished."""
    set: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """NAME=VALUE, repeatable: another value for an entry of the file's [params]."""


def overrides(settings: tuple[str, ...]) -> dict[str, str]:
    """Split NAME=VALUE settings.

    Raises:
        UserError: one has no '='.
    """
    found: dict[str, str] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise UserError(f"--set {setting}: write it as NAME=VALUE")
        found[name] = value
    return found


def main(args: Args) -> int:
    """Run the steps of a pipeline file, each once: what is finished is skipped."""
    if args.local == args.submit:
        raise UserError("choose one of --local (this machine) and --submit (Slurm)")
    pipeline = spec.load(args.file, overrides(args.set))
    run = (args.run or Path("runs") / pipeline.name).resolve()
    chosen = list(pipeline.tasks)
    forced: set[str] = set()
    if args.only:
        pipeline.step(args.only)
        chosen = pipeline.tasks_of(args.only)
        local.check_parents(pipeline, run, chosen)
    if args.start_from:
        pipeline.step(args.start_from)
        forced = pipeline.descendants(args.start_from)
    if args.dry_run:
        return local.dry_run(pipeline, run, chosen, forced)
    local.keep_pipeline_file(pipeline, run)
    again = [a for a in sys.argv[1:] if not a.startswith("--from")]
    if args.start_from in again:
        again.remove(args.start_from)
    return local.execute(pipeline, run, chosen, forced, f"{PROG} {shlex.join(again)}")


if __name__ == "__main__":
    cli.run(main, Args, prog=PROG)
