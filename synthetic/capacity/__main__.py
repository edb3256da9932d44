"""`python -m synthetic.capacity grid|train|designed`: recall against the capacity law."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from gatewright.errors import UserError
from synthetic.arguments import dispatch, integers, words
from synthetic.capacity import flags
from synthetic.sweep import Row, Sweep, print_verdicts

PROG = "python -m synthetic.capacity"


@dataclasses.dataclass
class GridArgs:
    """Train linear Mambas over a D x N grid and look inside; then layers, heads, no convolution."""

    out: Path
    """Folder for results.jsonl, summary.json and the figure; an unfinished one is resumed."""
    parts: str = "cells,ablation,layers,heads"
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
    pattern_vocab: int = 128
    """V of the layers and heads (the paper: 512)."""
    pattern_facts: int = 16
    """Facts of the layers and heads (the paper: 80 and 16), MQAR."""
    pattern_d: int = 24
    """D of the layers and heads (the paper: 64 and 60)."""
    stacks: str = "1x6,2x3,3x2,1x12,2x6,3x4"
    """Layers x N of the stacks, comma-separated (the paper: 1..5 layers, N 2..16)."""
    heads: str = "2,4"
    """Heads of each pattern, comma-separated (the paper: 1..6)."""
    heads_n: str = "3,6"
    """State dimensions N of the heads (the paper: 2..10)."""
    steps: int = 2000
    """Training steps (the paper's; it gives layers and heads 4,000)."""
    seeds: int = 2
    """Seeds per cell, trained together (the paper: 3)."""
    sequences: int = 10_000
    """Evaluation sequences (the paper's)."""
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
    """Sequence length in tokens; default 4 facts (MQAR, the law's a = 5/4 is for this length) or
    2 facts + 1 (AR, which has no other)."""
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
    """Numbers of facts, comma-separated, at which to measure the trained model as it is, each at
    the default length."""
    retrain: bool = False
    """Also train a fresh model at every other number of facts of --curve, in turn, one seed each:
    the law describes models trained at the load."""
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


LISTS = ("parts", "tasks", "d", "n", "stacks", "heads", "heads_n")
"""Flags of `grid` that only say which rows to make: a stopped sweep may go on with others."""


def grid(args: GridArgs) -> None:
    """Predicted against trained accuracy over the D x N grid, layers, heads, operators."""
    parts = words("--parts", args.parts, ("cells", "ablation", "layers", "heads"))
    names: Any = words("--tasks", args.tasks, ("ar", "mqar"))
    ds, ns = integers("--d", args.d), integers("--n", args.n)
    heads_n, heads = integers("--heads-n", args.heads_n), integers("--heads", args.heads, least=2)
    flags.counts(args, "steps", "seeds", "sequences", "facts", "pattern_facts", "pattern_d")
    stacks = flags.pairs("--stacks", args.stacks, "x", "layers x N, for example 1x12,2x6")
    for count in heads if "heads" in parts else []:
        if 2 * args.pattern_d % count:
            raise UserError(f"--heads {count}: must divide twice --pattern-d {args.pattern_d}")
    if {"cells", "ablation"} & set(parts):
        where = f"--vocab {args.vocab} --facts {args.facts}"
        length = flags.task(where, "mqar", args.vocab, args.facts).length
        flags.fits(f"{where} --d --n", args.vocab, ds[-1], ns[-1], length, args.seeds)
    if {"layers", "heads"} & set(parts):
        where = f"--pattern-vocab {args.pattern_vocab} --pattern-facts {args.pattern_facts}"
        length = flags.task(where, "mqar", args.pattern_vocab, args.pattern_facts).length
        slots = [x * n for x, n in stacks if "layers" in parts]
        slots += [x * n for x in heads for n in heads_n if "heads" in parts]
        where += " --pattern-d --stacks --heads --heads-n"
        flags.fits(where, args.pattern_vocab, args.pattern_d, max(slots), length, args.seeds)

    import torch

    from synthetic.capacity import figure, report, runs

    torch.set_num_threads(args.threads)
    m = runs.Measure(args.steps, args.seeds, args.sequences)
    pattern = (args.pattern_vocab, args.pattern_facts, args.pattern_d)
    config = {k: v for k, v in vars(args).items() if k not in ("out", "threads")}
    with Sweep(args.out, "capacity grid", config, free=LISTS) as sweep:
        # Only what was asked for: a resumed folder may hold more, made with other lists.
        rows: list[Row] = []
        if "cells" in parts:
            rows += runs.run_cells(sweep, names, args.vocab, args.facts, ds, ns, m)
        if "ablation" in parts:
            d, n = ds[len(ds) // 2], ns[len(ns) // 2]
            rows += runs.run_ablation(sweep, names, args.vocab, args.facts, d, n, m)
        if "layers" in parts:
            rows += runs.run_stacks(sweep, *pattern, stacks, m)
        if "heads" in parts:
            rows += runs.run_heads(sweep, *pattern, heads_n, heads, m)
        summary, verdicts = report.summarise_grid(rows, "cell", "linear")
        lines = report.form_lines(summary)
        for name, part in (
            ("inside", report.summarise_inside),
            ("ablation", report.summarise_ablation),
            ("layers", report.summarise_layers),
            ("heads", report.summarise_heads),
        ):
            summary[name], more = part(rows)
            verdicts += more
        figure.draw_grid(args.out, summary, "grid", "trained linear")
        summary["seconds"] = sweep.seconds()
        sweep.finish({**summary, "verdicts": verdicts})
    print("\n".join(lines))
    print_verdicts(verdicts)


def train(args: TrainArgs) -> None:
    """Train one cell and print its accuracy beside the law."""
    flags.counts(args, "steps", "seeds", "sequences", "facts", "d", "n")
    curve = integers("--curve", args.curve) if args.curve else []
    if args.model == "full" and (curve or args.save or not args.conv):
        raise UserError("--curve, --save and --no-conv are for --model linear")
    if args.retrain and not curve:
        raise UserError("--retrain trains at the numbers of facts of --curve: give some")
    if not args.conv and (curve or args.save):
        raise UserError(
            "--no-conv: the law describes no model without the convolution, and such a checkpoint "
            "would not say so; leave out --curve and --save"
        )
    if args.length is not None and curve:
        raise UserError("--curve measures every load at its default length: leave out --length")
    where = f"--vocab {args.vocab} --facts {args.facts}"
    where += "" if args.length is None else f" --length {args.length}"
    task = flags.task(where, args.task, args.vocab, args.facts, args.length)
    longer = [
        flags.task(f"--vocab {args.vocab} --curve {f}", args.task, args.vocab, f) for f in curve
    ]
    longest = max(t.length for t in (task, *longer))
    where += f" --d {args.d} --n {args.n} --seeds {args.seeds}"
    flags.fits(where, args.vocab, args.d, args.n, longest, args.seeds)

    import numpy as np
    import torch

    from gatewright import recall_law
    from synthetic.capacity import figure, full_mamba, linear_mamba, report, runs

    torch.set_num_threads(args.threads)
    seeds = list(range(args.seeds))
    config = {k: v for k, v in vars(args).items() if k not in ("out", "threads")}
    state = recall_law.State(args.d, args.n, 1, args.vocab, args.model, args.task)
    with Sweep(args.out, "capacity train", config, free=("curve", "retrain")) as sweep:
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
        summary: dict[str, Any] = {}
        if args.model == "full":
            size = full_mamba.Size(args.vocab, args.d, args.n)
            p = full_mamba.train(size, seeds, task, args.steps, "full Mamba")
            found = full_mamba.accuracy(p, size, task, args.sequences)
        else:
            one = linear_mamba.Size(args.vocab, args.d, args.n, args.conv)
            p = linear_mamba.train([one] * args.seeds, seeds, task, args.steps, "linear Mamba")
            found = linear_mamba.accuracy(p, task, args.sequences)
            if args.conv:
                summary["inside"] = runs.look_inside(p, 0, task, args.sequences)
            if args.save:
                runs.save_checkpoint(p, 0, task, settings, args.out / "checkpoint")
            if args.retrain:
                runs.retrain(sweep, one, task, found[0], longer, args.steps, args.sequences)
            summary["curve"] = runs.curve(sweep, p, longer, args.sequences, args.retrain)
            for point in summary["curve"]:
                point["law"] = state.recall(point["facts"], args.task)
        if not sweep.has(part="cell"):
            sweep.add_all(
                {"part": "cell", **settings, "steps": args.steps, "seed": i, "accuracy": x}
                for i, x in enumerate(found)
            )
        points = summary.get("curve", [])
        forms = report.predictions(settings, args.model) if args.conv else None
        as_usual = args.conv and args.length is None  # the length that the law's a is for
        summary |= {
            "accuracy": float(np.mean(found)),
            "accuracy_seeds": found,
            "law": forms[report.MAIN] if forms else None,
            "law_forms": forms,
            "measured_facts_at_half": report.facts_at_half(points, "accuracy"),
            "retrained_facts_at_half": report.facts_at_half(points, "retrained"),
            "predicted_facts_at_half": state.facts_at(0.5, args.task) if as_usual else None,
            "seconds": sweep.seconds(),
        }
        if points:
            figure.draw_curve(args.out, summary)
        sweep.finish(summary)
    told = (
        "the law describes no model without the convolution"
        if summary["law"] is None
        else f"the law predicts {summary['law']:.3f}"
    )
    print(
        f"recall {summary['accuracy']:.3f} (seeds {', '.join(f'{x:.3f}' for x in found)}); {told}"
    )
    if points:
        print(
            "recall falls to one half at "
            + ", ".join(
                f"{name} {'n/a' if summary[k] is None else format(summary[k], '.1f')}"
                for name, k in (
                    ("predicted", "predicted_facts_at_half"),
                    ("as trained", "measured_facts_at_half"),
                    ("trained at each load", "retrained_facts_at_half"),
                )
            )
            + " facts"
        )


def designed(args: DesignedArgs) -> None:
    """The untrained circuits against the law, and theorem 3.1's perfect recall."""
    ds, ns = integers("--d", args.d), integers("--n", args.n)
    flags.counts(args, "draws", "sequences")
    regimes = flags.pairs("--regimes", args.regimes, ":", "vocabulary:facts, for example 512:16")
    for vocab, facts in regimes:
        where = f"--regimes {vocab}:{facts}"
        length = flags.task(where, "mqar", vocab, facts).length
        flags.fits(f"{where} --d --n", vocab, ds[-1], ns[-1], length)

    import torch

    from synthetic.capacity import designed as circuits
    from synthetic.capacity import figure, report, runs, tasks
    from synthetic.sweep import verdict

    torch.set_num_threads(args.threads)
    config = {k: v for k, v in vars(args).items() if k not in ("out", "threads")}
    with Sweep(args.out, "capacity designed", config) as sweep:
        runs.run_designed(sweep, regimes, ds, ns, args.draws, args.sequences)
        summary, verdicts = report.summarise_grid(sweep.rows, "designed", "designed")
        worst = max(v["forms"]["remark_4_3/mean_of_max"]["max_abs_error"] for v in summary.values())
        # The circuit has D = N = V, so that any V shows what it does.
        perfect = {
            name: circuits.non_compressive_accuracy(tasks.make(name, 64, 8), sequences)
            for name, sequences in zip(runs.NAMES, (1600, 200), strict=True)
        }
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
                perfect["ar"]["among_all"] == perfect["mqar"]["among_values"] == 1.0,
                min(perfect["ar"]["among_all"], perfect["mqar"]["among_values"]),
                "1600 queries each, V = 64, 8 facts, through the linear Mamba itself; MQAR among "
                f"values ({perfect['mqar']['among_all']:.3f} among all tokens: where a random "
                "token repeats a key, what follows it is remembered too)",
            )
        )
        figure.draw_grid(args.out, summary, "designed", "designed")
        lines = report.form_lines(summary)
        summary |= {"non_compressive": perfect, "seconds": sweep.seconds()}
        sweep.finish({**summary, "verdicts": verdicts})
    print("\n".join(lines))
    print_verdicts(verdicts)


COMMANDS: dict[str, tuple[Callable[[Any], None], type]] = {
    "grid": (grid, GridArgs),
    "train": (train, TrainArgs),
    "designed": (designed, DesignedArgs),
}


if __name__ == "__main__":
    dispatch(PROG, COMMANDS, sys.argv[1:])
