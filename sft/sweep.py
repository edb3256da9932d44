"""Gate scales x seeds from one parent, in one command, into one table.

    python -m sft.sweep mamba2_debug_cpu --model DIR --data DIR --out DIR \
        --scales 0.25,0.5,1,2,4 --seeds 0,1,2

Every cell copies the parent, multiplies its gates' decay rates (`A_log += log(s)`), fine-tunes
it with one seed and measures held-out loss and call accuracy at the asked pool sizes.  Cells
resume like any run of `sft.train`, so a sweep that was killed goes on where it stopped.  Arms are
compared with unscaled gates (or the fixed curriculum) by `sft.compare`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from gatewright import artifact, cli, launch
from gatewright.config import split_recipe
from gatewright.errors import UserError
from sft import claims, compare, train
from sft.cells import in_child, start_method
from sft.recipes import RECIPES, Curriculum, TrainConfig

PROG = "python -m sft.sweep"
SWEEP = "sweep.json"


@dataclass(frozen=True)
class Args:
    """Flags of `python -m sft.sweep RECIPE`."""

    model: Path
    """Hugging Face folder of the Mamba-2 that every cell starts from."""
    data: Path
    """Folder made by sft.prepare."""
    out: Path
    """Folder for the cells, results.jsonl, table.csv, comparisons.csv and table.txt."""
    train: TrainConfig
    """How to train each cell; the recipe gives the defaults."""
    scales: str = "0.25,0.5,1,2,4"
    """Factors of the gates' decay rates, separated by commas."""
    seeds: str = "0,1,2"
    """Seeds of the order of the samples, separated by commas."""
    curricula: str = ""
    """Sweep over these curricula too (fixed,ramp,gated); empty takes the recipe's."""
    pool_sizes: str = "1,8,24"
    """Pool sizes at which call accuracy is measured."""
    questions: int = 100
    """Most held-out chats to measure call accuracy on."""
    keep_models: bool = False
    """Keep every cell's model folder; else only its metrics stay."""


@dataclass(frozen=True)
class Cell:
    """One fine-tuning of the sweep."""

    scale: float
    seed: int
    curriculum: Curriculum

    @property
    def name(self) -> str:
        return f"s{self.scale:g}-{self.curriculum}-seed{self.seed}"


def claim(args: Args, recipe: str) -> None:
    """Make the output folder this sweep's, or find that it already is.

    Scales, seeds and curricula may be added to; everything else would mix unlike cells.

    Raises:
        UserError: it is finished, holds a sweep of other settings or inputs, or something else.
    """
    claims.require_unfinished(args.out)
    sweep = {
        "recipe": recipe,
        "model": artifact.content_hash(args.model),
        "data": artifact.content_hash(args.data),
        "train": dataclasses.asdict(args.train),
        "pool_sizes": args.pool_sizes,
        "questions": args.questions,
    }
    before = claims.held(args.out, SWEEP)
    if before is not None:
        different = sorted(name for name in sweep if before.get(name) != sweep[name])
        if different:
            raise UserError(
                f"--out {args.out}: holds a sweep with another {different[0]} ({SWEEP}); repeat "
                "its flags to go on with it, or choose another folder"
            )
        return
    claims.begin(args.out, SWEEP, sweep)


def check_scales(model: Path, scales: list[float]) -> None:
    """Refuse, before anything is written, what `scaled_parents` could not scale.

    Raises:
        UserError: `model` is no model folder or has no gates, or a scale is none.
    """
    from gatewright.gates.edits import Edit, resolve
    from gatewright.gates.find import find_gates
    from sft import parent

    parent.inspect(model)
    gates = find_gates(model)
    for scale in scales:
        resolve(Edit("scale", scale), gates, {})


def require_distinct(flag: str, values: Sequence[float | str]) -> None:
    """Refuse values that would share a cell's folder, and count as two in the table.

    Raises:
        UserError: two are written alike (scales to six digits, as in the cells' names).
    """
    names = [f"{value:g}" if isinstance(value, float) else str(value) for value in values]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{flag}: {name} occurs twice; give each once, apart by six digits")


def check_cells(recipe: str, args: Args, curricula: Sequence[Curriculum]) -> None:
    """Refuse, before anything is trained, what training or measuring a cell would refuse.

    Raises:
        UserError: see `sft.inputs.check` and `sft.measure.check`.
    """
    from sft import measure

    for curriculum in curricula:
        config = dataclasses.replace(args.train, curriculum=curriculum)
        train.check(recipe, train.Args(args.model, args.data, args.out, config))
    measure.check(measure.Args(args.model, args.data, args.pool_sizes, args.questions))


def scaled_parents(args: Args, scales: list[float]) -> dict[float, Path]:
    """Return a copy of the parent per scale, written once."""
    from gatewright.gates.edits import Edit, resolve
    from gatewright.gates.find import find_gates
    from gatewright.gates.rewrite import write_edits

    folders = {scale: args.out / "parents" / f"s{scale:g}" for scale in scales}
    gates = None
    for scale, folder in folders.items():
        if (folder / artifact.MANIFEST).is_file():
            continue
        gates = gates or find_gates(args.model)
        plan = resolve(Edit("scale", scale), gates, {})
        write_edits(gates, [plan], folder, dts={})
    return folders


def measure_cell(args: Args, cell: Cell, folder: Path, result: Path) -> None:
    """Measure a trained cell and write its rows of the table."""
    from sft.measure import Args as MeasureArgs
    from sft.measure import measure

    loss = artifact.read_manifest(folder)["extra"].get("held_out_loss")
    facts = {**dataclasses.asdict(cell), "held_out_loss": loss}
    asked = MeasureArgs(folder, args.data, args.pool_sizes, args.questions)
    artifact.write_json(result, [{**facts, **row} for row in measure(asked)])


def run_cell(
    args: Args, recipe: str, cell: Cell, parent: Path, method: str
) -> list[dict[str, Any]]:
    """Fine-tune and measure one cell unless it is done; return its rows of the table.

    Raises:
        UserError: training or measuring failed.
        SystemExit: it was asked to leave and has saved (75: start the same command again).
    """
    from gatewright.megatron.signals import EXIT_RUN_AGAIN

    folder = args.out / "cells" / cell.name
    result = folder.parent / f"{cell.name}.json"
    if not result.is_file():
        if (folder / artifact.MANIFEST).is_file():
            shutil.rmtree(train.aside(folder), ignore_errors=True)
        else:
            config = dataclasses.replace(args.train, seed=cell.seed, curriculum=cell.curriculum)
            run = train.Args(parent, args.data, folder, config)
            code = in_child(method, train.main, recipe, run)
            if code == EXIT_RUN_AGAIN:
                raise SystemExit(code)
            if code:
                raise UserError(f"cell {cell.name} failed (exit code {code}); see above")
        if in_child(method, measure_cell, args, cell, folder, result):
            raise UserError(f"cell {cell.name} could not be measured; see above")
        if not args.keep_models:
            (folder / artifact.MANIFEST).unlink()  # without weights it is no model folder any more
            for weights in folder.glob("*.safetensors"):
                weights.unlink()
    rows: list[dict[str, Any]] = json.loads(result.read_text())
    return rows


def chosen_curricula(args: Args) -> list[Curriculum]:
    """Return the curricula to sweep over.

    Raises:
        UserError: an unknown one, or one that needs further flags.
    """
    known = {name: name for name in get_args(Curriculum)}
    chosen: list[Curriculum] = []
    for name in [c for c in args.curricula.split(",") if c] or [args.train.curriculum]:
        if name not in known:
            raise UserError(f"--curricula {name!r}: choose {', '.join(known)}")
        chosen.append(known[name])
        dataclasses.replace(args.train, curriculum=known[name])  # says what it needs
    return chosen


def main(recipe: str, args: Args) -> None:
    """Fine-tune one parent at several gate scales and seeds; write one table."""
    from gatewright import runlog

    scales = cli.numbers("--scales", args.scales, float)
    seeds = cli.numbers("--seeds", args.seeds, int)
    pool_sizes = cli.numbers("--pool-sizes", args.pool_sizes, int, least=1)
    if args.questions < 1:
        raise UserError(f"--questions {args.questions}: give a positive number")
    artifact.read_manifest(args.data, "sft-data", flag="--data")
    curricula = chosen_curricula(args)
    for flag, values in (
        ("scales", scales), ("seeds", seeds), ("pool-sizes", pool_sizes), ("curricula", curricula),
    ):  # fmt: skip
        require_distinct(f"--{flag}", values)
    check_scales(args.model, scales)
    check_cells(recipe, args, curricula)
    claim(args, recipe)
    (args.out / "cells").mkdir(exist_ok=True)
    parents = scaled_parents(args, scales)
    # Seed by seed: a sweep that is stopped has compared all arms on the seeds that it finished.
    cells = [Cell(s, seed, c) for seed in seeds for s in scales for c in curricula]
    method = start_method()
    rows: list[dict[str, Any]] = []
    for cell in runlog.progress(cells, desc="sweep", unit="cell"):
        rows += run_cell(args, recipe, cell, parents[cell.scale], method)
    with open(args.out / "results.jsonl", "w", encoding="utf-8") as f:
        f.writelines(json.dumps(row) + "\n" for row in rows)
    text = compare.write(rows, args.out)
    artifact.finish(
        args.out,
        kind="sft-sweep",
        config=args,
        parents={"model": args.model, "data": args.data},
        extra={"cells": len(cells)},
    )
    print(text)


def entry() -> None:
    """Read the recipe's name, then the flags over the recipe's values."""
    import tyro

    try:
        recipe, argv = split_recipe(sys.argv[1:], RECIPES, PROG)
        config = RECIPES.get(recipe)
    except UserError as e:
        cli.fail(e)
    missing: Any = tyro.MISSING
    cli.run(
        lambda args: main(recipe, args),
        Args,
        prog=f"{PROG} {recipe}",
        description=main.__doc__,
        default=Args(model=missing, data=missing, out=missing, train=config),
        argv=argv,
    )


if __name__ == "__main__":
    launch.retune()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    entry()
