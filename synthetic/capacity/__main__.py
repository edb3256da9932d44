"""`python -m synthetic.capacity grid|train|designed`: recall against the capacity law."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from gatewright.errors import UserError
from synthetic.arguments import dispatch, integers, positive, words
from synthetic.sweep import Sweep, print_verdicts

PROG = "python -m synthetic.capacity"


@dataclasses.dataclass
class GridArgs:
    """Train linear Mambas over a D x N grid, then layers, heads and a look inside one."""

    out: Path
    """Folder for results.jsonl, summary.json and the figure; an unfinished one is resumed."""
    parts: str = "cells,layers,heads,inside"
    """Which parts to run, comma-separated."""
    tasks: str = "ar,mqar"
    """Tasks of the grid, comma-separated."""
    vocab: int = 512
    """V: half of the tokens are keys, half values."""
    facts: int = 16
    """Key-value pairs in a context; MQAR sequences are four times as long (the paper's)."""
    d: str = "16,32,64"
    """Embedding dimensions D (the paper: 2..64 in steps of 2)."""
    n: str = "4,8,16,32"
    """State dimensions N (the paper: 2..32)."""
    steps: int = 2000
    """Training steps of a cell (the paper's)."""
    seeds: int = 2
    """Seeds per cell, trained together (the paper: 3)."""
    sequences: int = 2000
    """Evaluation sequences (the paper: 10,000)."""
    threads: int = 2
    """Threads that torch may use."""


@dataclasses.dataclass
class TrainArgs:
    """Train one cell, measure it, look inside, and measure how recall falls with the facts."""

    out: Path
    """Folder for results.jsonl, summary.json, the figure and, with --save, the checkpoint."""
    task: Literal["ar", "mqar"]
    """ar: one query; mqar: every key is queried."""
    d: int
    """D, the embedding dimension."""
    n: int
    """N, the state dimension."""
    vocab: int = 512
    """V: half of the tokens are keys, half values."""
    facts: int = 16
    """Key-value pairs in a context."""
    length: int | None = None
    """Sequence length in tokens; default 4 facts (MQAR) or 2 facts + 1 (AR)."""
    seeds: int = 3
    """Seeds, trained together."""
    steps: int = 2000
    """Training steps."""
    sequences: int = 2000
    """Evaluation sequences."""
    model: Literal["linear", "full"] = "linear"
    """linear: the simplified Mamba; full: Mamba-1 (the paper trains it for 20,000 steps)."""
    conv: bool = True
    """With the width-2 convolution (linear only)."""
    curve: str = ""
    """Numbers of facts, comma-separated, at which to measure the trained model as it is."""
    save: bool = False
    """Keep seed 0's weights in OUT/checkpoint, for tools.plan_recall."""
    threads: int = 2
    """Threads that torch may use."""


@dataclasses.dataclass
class DesignedArgs:
    """Score the circuits of theorems 3.1 and 3.2, which need no training, over the grid."""

    out: Path
    """Folder for results.jsonl, summary.json and the figure."""
    regimes: str = "512:16,512:32,1024:16"
    """Vocabulary:facts pairs, comma-separated (the paper's three)."""
    d: str = "8,16,32,48,64"
    """Embedding dimensions D."""
    n: str = "2,4,8,16,32"
    """State (hash) dimensions N."""
    draws: int = 4
    """Draws of random embeddings per cell."""
    sequences: int = 250
    """Sequences per draw."""
    threads: int = 2
    """Threads that torch may use."""


def grid(args: GridArgs) -> None:
    """Predicted against trained accuracy over the D x N grid, layers, heads, operators."""
    parts = words("--parts", args.parts, ("cells", "layers", "heads", "inside"))
    names = words("--tasks", args.tasks, ("ar", "mqar"))
    ds, ns = integers("--d", args.d), integers("--n", args.n)
    positive(args, "steps", "seeds", "sequences", "threads", "facts")

    import torch

    from synthetic.capacity import figure, report, runs, tasks

    torch.set_num_threads(args.threads)
    try:
        tasks.make("mqar", args.vocab, args.facts)
    except ValueError as e:
        raise UserError(str(e)) from e
    m = runs.Measure(args.steps, args.seeds, args.sequences)
    config = {k: v for k, v in vars(args).items() if k not in ("out", "threads")}
    with Sweep(args.out, "capacity grid", config) as sweep:
        if "cells" in parts:
            runs.run_cells(sweep, names, args.vocab, args.facts, ds, ns, m)
        if "inside" in parts:
            runs.run_inside(sweep, args.vocab, args.facts, ds[len(ds) // 2], max(ns) // 2 or 1, m)
        if "layers" in parts:
            # The paper's D 64, 80 facts, V 512 and 320 tokens, each scaled down to a CPU.
            runs.run_layers(sweep, 128, 20, 32, (2, 4, 8), (1, 2, 4), m)
        if "heads" in parts:
            runs.run_heads(sweep, 128, 16, 24, (3, 6), (1, 2, 4), m)
        summary, verdicts = report.summarise_grid(sweep.rows, "cell", "linear")
        for name, part in (
            ("layers", report.summarise_layers),
            ("heads", report.summarise_heads),
            ("inside", report.summarise_inside),
        ):
            summary[name], more = part(sweep.rows)
            verdicts += more
        if "cells" in parts:
            figure.draw_grid(args.out, summary, "grid", "trained linear")
            cells = [c for v in summary.values() if "forms" in v for c in v["cells"]]
            summary["accuracy"] = [c["accuracy"] for c in cells]
            summary["law"] = [c["law"] for c in cells]
        summary["seconds"] = sweep.seconds()
        sweep.finish({**summary, "verdicts": verdicts})
    print_verdicts(verdicts)


def train(args: TrainArgs) -> None:
    """Train one cell and print its accuracy beside the law."""
    positive(args, "steps", "seeds", "sequences", "threads", "facts", "d", "n")
    curve = integers("--curve", args.curve) if args.curve else []
    if args.model == "full" and (curve or args.save or not args.conv):
        raise UserError("--curve, --save and --no-conv are for --model linear")

    import numpy as np
    import torch

    from gatewright import recall_law
    from synthetic.capacity import figure, full_mamba, linear_mamba, report, runs, tasks

    torch.set_num_threads(args.threads)
    try:
        task = tasks.make(args.task, args.vocab, args.facts, args.length)
        longer = [tasks.make(args.task, args.vocab, f) for f in curve]
    except ValueError as e:
        raise UserError(str(e)) from e
    seeds = list(range(args.seeds))
    config = {k: v for k, v in vars(args).items() if k not in ("out", "threads")}
    with Sweep(args.out, "capacity train", config) as sweep:
        settings = {
            "task": args.task,
            "vocab": args.vocab,
            "facts": args.facts,
            "length": task.length,
            "d": args.d,
            "n": args.n,
            "model": args.model,
            "conv": args.conv,
        }
        a = recall_law.PAIRS_PER_FACT[args.model, args.task]
        b = recall_law.mean_of_max(args.vocab)
        summary: dict[str, Any] = {}
        if args.model == "full":
            size = full_mamba.Size(args.vocab, args.d, args.n)
            p = full_mamba.train(size, seeds, task, args.steps, "full Mamba")
            found = full_mamba.accuracy(p, size, task, args.sequences)
        else:
            sizes = [linear_mamba.Size(args.vocab, args.d, args.n, args.conv)] * args.seeds
            p = linear_mamba.train(sizes, seeds, task, args.steps, "linear Mamba")
            found = linear_mamba.accuracy(p, task, args.sequences)
            if args.conv:
                summary["inside"] = runs.look_inside(p, 0, task, args.sequences)
            summary["curve"] = [
                {
                    "facts": t.facts,
                    "accuracy": float(
                        np.mean(linear_mamba.accuracy(p, t, args.sequences // 4 or 1))
                    ),
                    "law": recall_law.recall(args.d, args.n, t.facts, a, b),
                }
                for t in longer
            ]
            if args.save:
                runs.save_checkpoint(p, 0, task, settings, args.out / "checkpoint")
        sweep.add_all(
            {"part": "cell", **settings, "steps": args.steps, "seed": i, "accuracy": x}
            for i, x in enumerate(found)
        )
        summary |= {
            "accuracy": float(np.mean(found)),
            "accuracy_seeds": found,
            "law": recall_law.recall(args.d, args.n, args.facts, a, b),
            "law_forms": report.predictions(settings, args.model),
            "measured_facts_at_half": report.facts_at_half(summary.get("curve", [])),
            "predicted_facts_at_half": recall_law.facts_at(0.5, args.d, args.n, a, b),
            "seconds": sweep.seconds(),
        }
        if summary.get("curve"):
            figure.draw_curve(args.out, summary)
        sweep.finish(summary)
    print(
        f"recall {summary['accuracy']:.3f} (seeds {', '.join(f'{x:.3f}' for x in found)}); "
        f"the law predicts {summary['law']:.3f}"
    )


def designed(args: DesignedArgs) -> None:
    """The untrained circuits against the law, and theorem 3.1's perfect recall."""
    ds, ns = integers("--d", args.d), integers("--n", args.n)
    positive(args, "draws", "sequences", "threads")
    regimes = []
    for item in args.regimes.split(","):
        parts = item.split(":")
        if len(parts) != 2 or not all(p.strip().isdigit() for p in parts):
            raise UserError(f"--regimes {item}: give vocabulary:facts, for example 512:16")
        regimes.append((int(parts[0]), int(parts[1])))

    import torch

    from synthetic.capacity import designed as circuits
    from synthetic.capacity import figure, linear_mamba, report, runs, tasks
    from synthetic.sweep import verdict

    torch.set_num_threads(args.threads)
    try:
        for vocab, facts in regimes:
            tasks.make("mqar", vocab, facts)
    except ValueError as e:
        raise UserError(f"--regimes: {e}") from e
    config = {k: v for k, v in vars(args).items() if k not in ("out", "threads")}
    with Sweep(args.out, "capacity designed", config) as sweep:
        runs.run_designed(sweep, regimes, ds, ns, args.draws, args.sequences)
        summary, verdicts = report.summarise_grid(sweep.rows, "designed", "designed")
        worst = max(v["forms"]["remark_4_3/mean_of_max"]["max_abs_error"] for v in summary.values())
        small = tasks.make("mqar", 64, 8)  # the circuit has D = N = V: any V shows it
        perfect = linear_mamba.accuracy(
            circuits.non_compressive(small.vocab), small, 200, chunk=50
        )[0]
        verdicts.append(
            verdict(
                "every cell of the designed circuits is within .17 of the law",
                worst < 0.17,
                worst,
                "largest difference over all cells",
            )
        )
        verdicts.append(
            verdict(
                "theorem 3.1: with D = N = V recall is perfect",
                perfect == 1.0,
                perfect,
                f"V = {small.vocab}, {small.facts} facts, "
                f"{200 * small.facts} queries, through the linear Mamba itself",
            )
        )
        figure.draw_grid(args.out, summary, "designed", "designed")
        cells = [c for v in summary.values() for c in v["cells"]]
        summary |= {
            "accuracy": [c["accuracy"] for c in cells],
            "law": [c["law"] for c in cells],
            "non_compressive_accuracy": perfect,
            "seconds": sweep.seconds(),
        }
        sweep.finish({**summary, "verdicts": verdicts})
    print_verdicts(verdicts)


COMMANDS: dict[str, tuple[Callable[[Any], None], type]] = {
    "grid": (grid, GridArgs),
    "train": (train, TrainArgs),
    "designed": (designed, DesignedArgs),
}


if __name__ == "__main__":
    dispatch(PROG, COMMANDS, sys.argv[1:])
