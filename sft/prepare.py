"""Chats to training samples: `python -m sft.prepare`.

Two passes over the JSONL files, line by line: the first collects the corpus-wide tool pool,
the second repairs each row, draws its tools, renders it with the tokenizer's chat template
and writes tokens and loss masks.  Memory does not grow with the number of rows.  What was
kept, repaired and dropped, and why, is printed and kept in the manifest.
"""

from __future__ import annotations

import collections
import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gatewright import artifact, cli, runlog
from gatewright.errors import UserError
from sft.ledger import Ledger
from sft.pools import Order, PoolBuilder, ToolCorpus
from sft.rows import Chat, Dropped, Reasoning, lines, read_row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from gatewright.chat import Renderer


@dataclass
class Args:
    """Flags of `python -m sft.prepare`."""

    input: tuple[Path, ...]
    """JSONL files of chats in Nemotron-Agentic-v1's row format, read in this order."""
    tokenizer: Path
    """Tokenizer or model folder; its chat template draws the chats."""
    out: Path
    """Folder to create (kind sft-data)."""
    max_pool_size: int = 24
    """k: each example shows 1..k tools, uniformly drawn."""
    order: Order = "best-first"
    """How a pool is ordered: by BM25 rank, at random, or by rank with the best last."""
    context_tokens: int = 4096
    """Longest sample; longer chats are cut after an assistant turn."""
    copies: int = 1
    """Samples made of each row, each with a new pool."""
    reasoning: Reasoning = "drop"
    """reasoning_content: drop it, keep it for the template, or render it as <think> text."""
    held_out: float = 0.02
    """Share of the rows that is never trained on."""
    tool_corpus_limit: int = 50_000
    """Most distinct tools to draw distractors from (a uniform sample if there are more)."""
    seed: int = 0
    """Fixes pools, orders and the held-out rows."""
    workers: int = 1
    """Processes that render."""
    strict: bool = False
    """Stop at the first row that would be dropped."""

    def __post_init__(self) -> None:
        if self.max_pool_size < 1:
            raise UserError(f"--max-pool-size {self.max_pool_size}: give at least 1")
        if self.context_tokens < 16:
            raise UserError(f"--context-tokens {self.context_tokens}: give at least 16")
        if self.copies < 1:
            raise UserError(f"--copies {self.copies}: give at least 1")
        if not 0 <= self.held_out < 1:
            raise UserError(f"--held-out {self.held_out}: give a share in [0, 1)")
        if self.tool_corpus_limit < 1:
            raise UserError(f"--tool-corpus-limit {self.tool_corpus_limit}: give at least 1")
        if self.workers < 1:
            raise UserError(f"--workers {self.workers}: give at least 1")


@dataclass
class Sample:
    """One rendered sample: token ids, loss mask (1 on the assistant's tokens), pool size."""

    ids: list[int]
    mask: list[int]
    pool_size: int


@dataclass
class Outcome:
    """What became of one row."""

    number: int
    where: str
    samples: list[Sample]
    repairs: list[str]
    dropped: Dropped | None = None
    held_out: dict[str, Any] | None = None
    is_held_out: bool = False
    own_left_out: int = 0
    injected: int = 0


Numbered = tuple[int, str, bytes | None]
"""(row number over all inputs, `file:line`, the line)"""


def numbered_lines(files: tuple[Path, ...], desc: str) -> Iterator[Numbered]:
    """Yield every line of every file with its place, under a progress bar in bytes."""
    number = 0
    total = sum(f.stat().st_size for f in files)
    with runlog.progress(total=total, desc=desc, unit="B", scale=True) as bar:
        for file in files:
            for line_number, line in lines(file):
                bar.update(len(line) if line is not None else 0)
                yield number, f"{file}:{line_number}", line
                number += 1


class Maker:
    """Turns rows into samples: repair, pool, render, fit."""

    def __init__(self, args: Args, renderer: Renderer, builder: PoolBuilder) -> None:
        self.args = args
        self.renderer = renderer
        self.builder = builder

    def make(self, numbered: Numbered) -> Outcome:
        """Return one row's samples, or why there are none; never raises for a bad row."""
        number, where, line = numbered
        outcome = Outcome(number, where, [], [])
        try:
            chat = read_row(line, self.args.reasoning)
            outcome.repairs = chat.repairs
            outcome.is_held_out = is_held_out(chat.id, self.args)
            for copy in range(1 if outcome.is_held_out else self.args.copies):
                outcome.samples.append(self._sample(chat, copy, outcome))
            if outcome.is_held_out:
                outcome.held_out = held_out_question(chat)
        except Dropped as e:
            outcome.dropped = e
        except UserError as e:  # the template refuses this chat
            outcome.dropped = Dropped("the chat template refuses it", str(e))
        except RecursionError:
            outcome.dropped = Dropped("nested too deeply")
        return outcome

    def _sample(self, chat: Chat, copy: int, outcome: Outcome) -> Sample:
        pool = self.builder.draw(chat.query, chat.tools, chat.called, (chat.id, copy))
        outcome.own_left_out += pool.own_left_out
        outcome.injected += pool.injected
        tools = pool.tools
        called = set(chat.called)
        while True:
            encoded = self.renderer.encode(chat.messages, tools)
            end = fitting_end(encoded.assistant_mask, self.args.context_tokens)
            if end:
                break
            spare = [t for t in tools if t["function"]["name"] not in called]
            if not spare:
                raise Dropped(
                    "first assistant turn beyond the context",
                    f"{len(encoded.input_ids)} tokens, --context-tokens {self.args.context_tokens}",
                )
            keep = len(spare) // 2
            worst = spare[: len(spare) - keep] if self.args.order == "best-last" else spare[keep:]
            gone = {t["function"]["name"] for t in worst}
            tools = [t for t in tools if t["function"]["name"] not in gone]
            outcome.repairs.append("pool made smaller to fit the context")
        if any(encoded.assistant_mask[end:]):
            outcome.repairs.append("cut after an assistant turn to fit the context")
        return Sample(encoded.input_ids[:end], encoded.assistant_mask[:end], len(tools))


def fitting_end(mask: list[int], context_tokens: int) -> int:
    """Return the end of the last assistant span that lies wholly within the context, else 0."""
    end = 0
    for i in range(min(len(mask), context_tokens)):
        if mask[i] and (i + 1 == len(mask) or not mask[i + 1]):
            end = i + 1
    return end


def is_held_out(chat_id: str, args: Args) -> bool:
    """Say whether a row is held out: by its id and the seed alone, not by its place."""
    from gatewright.plackett_luce import generator

    return bool(generator("held-out", args.seed, chat_id).random() < args.held_out)


def held_out_question(chat: Chat) -> dict[str, Any] | None:
    """Return what measuring call accuracy on a held-out chat needs; None if it calls nothing.

    The prompt is everything before the first assistant turn that calls a tool; the gold
    answer is that turn's calls.
    """
    for i, message in enumerate(chat.messages):
        if message.get("tool_calls"):
            gold = [call["function"] for call in message["tool_calls"]]
            return {
                "id": chat.id,
                "query": chat.query,
                "messages": chat.messages[:i],
                "gold": gold,
                "tools": chat.tools,
            }
    return None


_maker: Maker | None = None


def _make_many(numbered: list[Numbered]) -> list[Outcome]:
    assert _maker is not None
    return [_maker.make(one) for one in numbered]


def outcomes(maker: Maker, source: Iterator[Numbered], workers: int) -> Iterator[Outcome]:
    """Yield every row's outcome in order, rendered by one or several processes.

    At most a few chunks per worker are under way, so memory stays bounded.
    """
    if workers == 1:
        for numbered in source:
            yield maker.make(numbered)
        return
    import multiprocessing
    from concurrent.futures import Future, ProcessPoolExecutor

    global _maker
    _maker = maker  # inherited by fork: the tool index is not copied
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    context = multiprocessing.get_context("fork")
    waiting: collections.deque[Future[list[Outcome]]] = collections.deque()
    with ProcessPoolExecutor(workers, mp_context=context) as executor:
        chunk: list[Numbered] = []
        for numbered in source:
            chunk.append(numbered)
            if len(chunk) == 32:
                waiting.append(executor.submit(_make_many, chunk))
                chunk = []
            if len(waiting) > 4 * workers:
                yield from waiting.popleft().result()
        waiting.append(executor.submit(_make_many, chunk))
        while waiting:
            yield from waiting.popleft().result()


def collect_tools(args: Args) -> ToolCorpus:
    """Return the distinct tools of all usable rows (first pass)."""
    corpus = ToolCorpus(args.tool_corpus_limit, args.seed)
    usable = 0
    first_drop = "there is none"
    for _, where, line in numbered_lines(args.input, "collecting tools"):
        try:
            corpus.add(read_row(line, args.reasoning).tools)
            usable += 1
        except Dropped as e:
            if args.strict:
                raise UserError(f"{where}: {e}; mend the row, or leave --strict out") from e
            if first_drop == "there is none":
                first_drop = f"{where}: {e}"
    if not usable:
        raise UserError(f"no row of the input is usable; the first: {first_drop}")
    return corpus


def require_drawn_answers(renderer: Renderer, folder: Path) -> None:
    """Refuse a template that loses what is to be learned: a text or a call of the assistant.

    Raises:
        UserError: its assistant spans are empty, or a drawn call does not read back.
    """
    function = {"name": "probe", "arguments": {"word": "alpha"}}
    parameters = {"type": "object", "properties": {"word": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "probe", "parameters": parameters}}
    call = {"id": "call00000", "type": "function", "function": function}
    answers: list[dict[str, Any]] = [
        {"role": "assistant", "content": "alpha"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    said = []
    for answer in answers:
        encoded = renderer.encode([{"role": "user", "content": "?"}, answer], [tool])
        own = [i for i, one in zip(encoded.input_ids, encoded.assistant_mask, strict=True) if one]
        said.append(renderer.tokenizer.decode(own, skip_special_tokens=False))
    if "alpha" not in said[0]:
        raise UserError(
            f"--tokenizer {folder}: the {{% generation %}} spans of its chat template do not hold "
            "what the assistant says; tokenizer.adopt --template ours gives it one that does"
        )
    calls = renderer.parse(said[1]).calls
    if [(c.name, c.arguments) for c in calls] != [("probe", {"word": "alpha"})]:
        raise UserError(
            f"--tokenizer {folder}: its chat template draws no tool call that reads back in the "
            f"style {renderer.style}; tokenizer.adopt --template ours gives it one that does"
        )


def ids_needed(tokenizer: PreTrainedTokenizerFast) -> int:
    """Return how many rows an embedding must have: the largest token id plus one.

    (The number of tokens is smaller where ids have gaps, as after added tokens were removed.)
    """
    return max(tokenizer.get_vocab().values()) + 1


def save_tokenizer(source: Path, folder: Path) -> None:
    """Keep the tokenizer with the data: what trains on it renders and saves with the same."""
    from gatewright.checkpoints.models_on_disk import TOKENIZER_FILES

    folder.mkdir()
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copy2(source / name, folder / name)


def warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)


def main(args: Args) -> None:
    """Repair chats, draw tool pools, render, mask and write training samples."""
    for file in args.input:
        if not file.is_file():
            raise UserError(f"--input {file}: no such file")
    if args.out.exists():
        raise UserError(f"--out {args.out} exists: remove it or choose another folder")
    from gatewright.chat import Renderer

    if args.tokenizer.is_dir() and not (args.tokenizer / "tokenizer.json").is_file():
        raise UserError(
            f"--tokenizer {args.tokenizer}: holds no tokenizer.json; tokenizer.adopt --from "
            f"{args.tokenizer} makes a folder that has one"
        )
    renderer = Renderer.load(args.tokenizer, reasoning=args.reasoning == "keep")
    require_drawn_answers(renderer, args.tokenizer)
    corpus = collect_tools(args)
    if not len(corpus):
        raise UserError(
            f"--input {args.input[0]}{' ...' if args.input[1:] else ''}: no usable row offers a "
            "tool, so there are no pools to draw; give chats with tools"
        )
    if args.max_pool_size > len(corpus):
        raise UserError(
            f"--max-pool-size {args.max_pool_size}: the usable rows of {args.input[0]}"
            f"{' ...' if args.input[1:] else ''} hold {len(corpus)} distinct tools only; "
            "lower it or add rows"
        )
    tools = corpus.tools()
    maker = Maker(args, renderer, PoolBuilder(tools, args.max_pool_size, args.order, args.seed))
    ledger = Ledger()
    parents = {"tokenizer": args.tokenizer}
    parents |= {f"input{i}": file for i, file in enumerate(args.input)}
    extra: dict[str, Any] = {}
    with artifact.create(
        args.out, kind="sft-data", config=args, parents=parents, seed=args.seed, extra=extra
    ) as folder:
        with open(folder / "tools.jsonl", "w", encoding="utf-8") as f:
            for tool in tools:
                f.write(json.dumps(tool, ensure_ascii=False) + "\n")
        save_tokenizer(args.tokenizer, folder / "tokenizer")
        extra |= write(folder, maker, args, ledger)
        if not ledger.kept:
            raise UserError(
                f"no row of the input is usable; the first: {ledger.first_drop or 'there is none'}"
            )
        extra |= {
            "rows": ledger.as_dict(),
            "distinct_tools": len(tools),
            "tools_beyond_limit": corpus.seen_over_limit,
            "vocab_size": ids_needed(renderer.tokenizer),
            "call_style": renderer.style,
            "tokenizer_sha256": artifact.sha256_file(args.tokenizer / "tokenizer.json"),
        }
    print(ledger.table())
    for split in ("train", "held_out"):
        facts = extra[split]
        print(
            f"{split}: {facts['samples']} samples, {facts['tokens']} tokens, "
            f"{facts['targets']} with loss"
        )
    print(f"{args.out}: {len(tools)} distinct tools, pools of 1..{args.max_pool_size}")


def write(folder: Path, maker: Maker, args: Args, ledger: Ledger) -> dict[str, Any]:
    """Render all rows into `folder` (second pass); return the counts for the manifest."""
    from sft.dataset import Writer

    left_out = injected = 0
    sizes: collections.Counter[int] = collections.Counter()
    source = numbered_lines(args.input, "rendering chats")
    with (
        Writer(folder / "train") as train,
        Writer(folder / "held_out") as held_out,
        open(folder / "held_out.jsonl", "w", encoding="utf-8") as questions,
    ):
        for outcome in outcomes(maker, source, args.workers):
            ledger.read += 1
            if outcome.dropped is not None:
                if args.strict:
                    raise UserError(
                        f"{outcome.where}: {outcome.dropped}; mend the row, or leave --strict out"
                    )
                ledger.drop(outcome.where, outcome.dropped, warn)
                continue
            ledger.keep(outcome.repairs)
            left_out += outcome.own_left_out
            injected += outcome.injected
            for sample in outcome.samples:
                writer = held_out if outcome.is_held_out else train
                writer.add(sample.ids, sample.mask, sample.pool_size, outcome.number)
                sizes[sample.pool_size] += 1
            if outcome.held_out is not None:
                questions.write(json.dumps(outcome.held_out, ensure_ascii=False) + "\n")
    return {
        "train": _facts(train),
        "held_out": _facts(held_out),
        "own_tools_left_out": left_out,
        "pools_with_injection": injected,
        "pool_sizes": {str(k): sizes[k] for k in sorted(sizes)},
    }


def _facts(writer: Any) -> dict[str, int]:
    return {"samples": writer.samples, "tokens": writer.tokens, "targets": writer.targets}


if __name__ == "__main__":
    cli.run(main, Args, prog="python -m sft.prepare")
