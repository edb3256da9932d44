"""Held-out loss and held-out call accuracy during training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sft.dataset import Samples
from sft.packing import collate, plan

if TYPE_CHECKING:
    from gatewright.chat import Parsed, Renderer
    from sft.pools import PoolBuilder

Share = tuple[int, int]
"""(rank, world size): which part of the work is this process's."""

JUDGED = ("parsed", "first_tool", "right_tool", "exact", "hallucinated")
"""What `judge` says of an answer."""


def all_sum(values: Sequence[float], device: torch.device) -> list[float]:
    """Return the element-wise sum over all processes."""
    import torch.distributed as dist

    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return [float(v) for v in total]


@torch.no_grad()
def held_out_loss(
    engine: Any,
    samples: Samples,
    context_tokens: int,
    most_packs: int,
    pad_id: int,
    share: Share,
    device: torch.device,
) -> float | None:
    """Return the mean loss per target token (nats) on held-out samples; None without any.

    Every process runs the same number of passes, as ZeRO-3 needs; a spare one counts zero.
    """
    if not len(samples) or most_packs < 1:
        return None
    packs = plan(samples.index["length"].astype("int64"), context_tokens, ("held-out",))
    packs = packs[:most_packs]
    rank, world = share
    engine.eval()
    total = count = 0.0
    for first in range(0, len(packs), world):
        mine = first + rank
        batch = collate(samples, [packs[min(mine, len(packs) - 1)]], pad_id).to(device)
        loss = float(engine(batch))
        if mine < len(packs):
            total += loss
            count += len(batch.labels)
    engine.train()
    total, count = all_sum([total, count], device)
    return total / count if count else None


def judge(parsed: Parsed, gold: Sequence[dict[str, Any]], pool: set[str]) -> dict[str, bool]:
    """Compare an answer with the gold calls.

    Returns:
        `first_tool`: the first called name is a gold one; `right_tool`: the called names are
        the gold ones, each as often, in any order;
        `exact`: arguments are equal too; `hallucinated`: a name outside the pool is called;
        `parsed`: the answer holds a call at all.
    """
    calls = sorted((c.name, json.dumps(c.arguments, sort_keys=True)) for c in parsed.calls)
    wanted = sorted((g["name"], json.dumps(g["arguments"], sort_keys=True)) for g in gold)
    return {
        "parsed": parsed.kind == "calls",
        "first_tool": bool(parsed.calls) and parsed.calls[0].name in {g["name"] for g in gold},
        "right_tool": [name for name, _ in calls] == [name for name, _ in wanted],
        "exact": calls == wanted,
        "hallucinated": any(name not in pool for name, _ in calls),
    }


@torch.no_grad()
def call_accuracy(
    model: nn.Module,
    renderer: Renderer,
    builder: PoolBuilder,
    questions: Sequence[dict[str, Any]],
    pool_size: int,
    new_tokens: int,
    share: Share,
    device: torch.device,
    batch_size: int = 16,
) -> dict[str, float]:
    """Return the shares of `judge` over held-out questions with pools of one size.

    Answers are greedy.  Each process answers its part of the questions.
    """
    rank, world = share
    prompts: list[list[int]] = []
    pools: list[set[str]] = []
    mine = list(questions)[rank::world]
    for q in mine:
        called = list(dict.fromkeys(g["name"] for g in q["gold"]))
        pool = builder.draw(q["query"], q["tools"], called, ("eval", q["id"]), pool_size)
        prompts.append(renderer.prompt_ids(q["messages"], pool.tools))
        pools.append({t["function"]["name"] for t in pool.tools})
    counts = dict.fromkeys(JUDGED, 0.0)
    was_training = model.training
    model.eval()
    order = sorted(range(len(mine)), key=lambda i: len(prompts[i]))
    for first in range(0, len(order), batch_size):
        chosen = order[first : first + batch_size]
        answers = generate(model, renderer, [prompts[i] for i in chosen], new_tokens, device)
        for i, answer in zip(chosen, answers, strict=True):
            for name, hit in judge(renderer.parse(answer), mine[i]["gold"], pools[i]).items():
                counts[name] += hit
    model.train(was_training)
    *sums, total = all_sum([*counts.values(), len(mine)], device)
    return {name: s / max(total, 1) for name, s in zip(counts, sums, strict=True)}


def generate(
    model: nn.Module,
    renderer: Renderer,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    device: torch.device,
) -> list[str]:
    """Return greedy continuations of left-padded prompts, without stop and padding tokens."""
    stop = renderer.stop_ids
    pad = renderer.tokenizer.pad_token_id
    pad = stop[-1] if pad is None else pad
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), pad, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, prompt in enumerate(prompts):
        ids[i, longest - len(prompt) :] = torch.tensor(prompt)
        mask[i, longest - len(prompt) :] = 1
    out = model.generate(  # type: ignore[operator]
        input_ids=ids.to(device),
        attention_mask=mask.to(device),
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=stop,
        pad_token_id=pad,
        use_cache=True,
    )
    texts = []
    for row in out[:, longest:].tolist():
        end = next((i for i, token in enumerate(row) if token in stop), len(row))
        texts.append(renderer.tokenizer.decode(row[:end], skip_special_tokens=False))
    return texts
