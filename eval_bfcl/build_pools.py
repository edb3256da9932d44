"""Build tool pools of several sizes for a BFCL split.

Every tool name of the split is one slot.  A question's own tools show the question's own
schemas; other slots show the first schema of that name.  A retriever ranks all slots for the
question, the first k are its pool, and a correct tool that is not among them is injected.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal, get_args

from eval_bfcl import pools
from gatewright import artifact, bfcl, cli, plackett_luce
from gatewright.bfcl import Question
from gatewright.errors import UserError
from gatewright.runlog import progress
from gatewright.tool_pool import ToolPool, cut

Retriever = Literal["bm25", "plackett_luce", "oracle", "random"]


@dataclasses.dataclass
class Args:
    """Flags of `python -m eval_bfcl.build_pools`."""

    split: str
    """BFCL split: simple_python, simple_java, simple_javascript, multiple, parallel,
    parallel_multiple, irrelevance or a single-turn live_* split."""
    retriever: str
    """bm25; plackett_luce (BM25 with noise, needs --beta); oracle (correct tools first, then the
    question's other own tools, then BM25 order: at k = 1 the correct tool alone); random."""
    pool_sizes: str
    """Pool sizes k, separated by commas."""
    out: Path
    """Folder to create."""
    seeds: str = "0"
    """Seeds of noise and of injection places, separated by commas."""
    beta: float | None = None
    """Retriever strength of plackett_luce: 0 is random; with minmax, 0.05 is almost random and
    10 mildly noisy."""
    utility: str | None = None
    """What beta multiplies: minmax (BM25 score scaled to 0..1 per question; the default), rank
    or score."""

    def __post_init__(self) -> None:
        if self.retriever not in get_args(Retriever):
            raise UserError(
                f"--retriever {self.retriever}{cli.nearest(self.retriever, get_args(Retriever))}: "
                f"choose one of {', '.join(get_args(Retriever))}"
            )
        if self.retriever == "plackett_luce":
            if self.beta is None:
                raise UserError("--retriever plackett_luce: give its strength with --beta")
            if not 0 <= self.beta < float("inf"):
                raise UserError(
                    f"--beta {self.beta}: give a number >= 0 (--retriever bm25 is beta = infinity)"
                )
            plackett_luce.utilities([0.0], self.utility or "minmax")  # type: ignore[arg-type]
        elif self.beta is not None or self.utility is not None:
            flag = "--beta" if self.beta is not None else "--utility"
            raise UserError(f"{flag}: only --retriever plackett_luce takes it")


class Corpus:
    """The slots of a split: one per tool name, in order of first appearance."""

    def __init__(self, questions: list[Question]) -> None:
        first: dict[str, dict[str, Any]] = {}
        for question in questions:
            for tool in question.tools:
                first.setdefault(tool["name"], tool)
        self.names = list(first)
        self.number = {name: i for i, name in enumerate(self.names)}
        self.tools = list(first.values())
        self.pool = ToolPool(self.tools)

    def own(self, question: Question) -> dict[int, dict[str, Any]]:
        """Return the slots that show the question's own schemas."""
        return {self.number[tool["name"]]: tool for tool in question.tools}

    def tool_rows(self, questions: list[Question]) -> list[dict[str, Any]]:
        """Return `tools.jsonl`: the corpus, then every own schema that differs from it."""
        rows = [
            {"name": name, "question_id": None, "schema": tool}
            for name, tool in zip(self.names, self.tools, strict=True)
        ]
        for question in questions:
            for slot, tool in self.own(question).items():
                if tool != self.tools[slot]:
                    rows.append({"name": tool["name"], "question_id": question.id, "schema": tool})
        return rows


def rank(
    corpus: Corpus, question: Question, args: Args, scores: Any, order: list[int], seed: int
) -> list[int]:
    """Return all slots in the order of the chosen retriever, best first."""
    if args.retriever == "bm25":
        return order
    if args.retriever == "oracle":
        first = [corpus.number[n] for n in question.gold_names]
        first += [s for s in corpus.own(question) if s not in first]
        return first + [s for s in order if s not in first]
    noise = plackett_luce.gumbel_noise(len(corpus.names), question.id, seed)
    beta = 0.0 if args.beta is None else args.beta
    x = plackett_luce.utilities(scores, args.utility or "minmax")  # type: ignore[arg-type]
    return [int(i) for i in plackett_luce.ranking(x, beta, noise)]


def build(args: Args) -> tuple[dict[tuple[int, int], list[pools.Row]], list[dict[str, Any]]]:
    """Return the pools of every (pool size, seed), and the rows of `tools.jsonl`.

    Raises:
        UserError: a pool size that is larger than the corpus, or too small for a question
            that needs several tools.
    """
    sizes = sorted(set(cli.numbers("--pool-sizes", args.pool_sizes, int, least=1)))
    seeds = sorted(set(cli.numbers("--seeds", args.seeds, int, least=0)))
    questions = bfcl.load_split(args.split)
    corpus = Corpus(questions)
    if sizes[-1] > len(corpus.names):
        raise UserError(
            f"--pool-sizes {sizes[-1]}: {args.split} has only {len(corpus.names)} tool names"
        )
    most = max(questions, key=lambda q: len(q.gold_names))
    if sizes[0] < len(most.gold_names):
        raise UserError(
            f"--pool-sizes {sizes[0]}: question {most.id} needs {len(most.gold_names)} tools, so "
            f"{args.split} needs pools of at least {len(most.gold_names)}"
        )
    utility = (args.utility or "minmax") if args.retriever == "plackett_luce" else None
    cells: dict[tuple[int, int], list[pools.Row]] = {(k, s): [] for k in sizes for s in seeds}
    for question in progress(questions, desc="pools", unit="question"):
        own = corpus.own(question)
        scores = corpus.pool.scores(question.query, own)
        order = corpus.pool.order(scores)
        golds = question.gold_names
        correct = [corpus.number[name] for name in golds]
        for seed in seeds:
            ranking = rank(corpus, question, args, scores, order, seed)
            for k in sizes:
                c = cut(ranking, k, correct, (question.id, seed))
                cells[(k, seed)].append(
                    pools.Row(
                        id=question.id,
                        k=k,
                        seed=seed,
                        beta=args.beta,
                        utility=utility,
                        names=[corpus.names[i] for i in c.items],
                        gold=golds[0] if golds else None,
                        gold_rank=max(c.ranks, default=None),
                        retrieved=c.retrieved,
                        injected=c.injected,
                        golds=golds,
                        gold_ranks=c.ranks,
                    )
                )
    return cells, corpus.tool_rows(questions)


def main(args: Args) -> None:
    """Build tool pools of several sizes for a BFCL split (paper, section 5)."""
    if args.out.exists():
        raise UserError(f"--out {args.out} exists: remove it or choose another folder")
    cells, tool_rows = build(args)
    recall = {
        f"pool_size={k} seed={s}": pools.recall_percent([r.gold_rank for r in rows], k)
        for (k, s), rows in cells.items()
    }
    some = next(iter(cells.values()))
    extra = {
        "split": args.split,
        "retriever": args.retriever,
        "beta": args.beta,
        "utility": some[0].utility,
        "questions": len(some),
        "tool_names": sum(t["question_id"] is None for t in tool_rows),
        "recall_percent": recall,
    }
    seeds = sorted({s for _, s in cells})
    with artifact.create(
        args.out, kind="pools", config=args, seed=seeds[0] if len(seeds) == 1 else None, extra=extra
    ) as tmp:
        for (k, seed), rows in cells.items():
            folder = tmp / pools.cell_name(k, seed)
            folder.mkdir(parents=True)
            pools.write_jsonl(folder / "pools.jsonl", rows)
            pools.write_jsonl(folder / "tools.jsonl", tool_rows)
    print(f"{extra['questions']} questions of {args.split}, {extra['tool_names']} tool names")
    print(f"{'k':>6}  {'recall@k %':>10}  injected")
    for k in sorted({k for k, _ in cells}):
        rows = [r for (size, _), cell in cells.items() if size == k for r in cell]
        value = pools.recall_percent([r.gold_rank for r in rows], k)
        shown = f"{value:.2f}" if rows[0].golds else "no gold"
        print(f"{k:>6}  {shown:>10}  {sum(r.injected for r in rows)} of {len(rows)}")
    print(args.out)


if __name__ == "__main__":
    cli.run(main, Args, prog="python -m eval_bfcl.build_pools")
