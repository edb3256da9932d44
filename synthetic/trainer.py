"""The trainer of the key-value and rules experiments: one model, fresh batches, early stop.

Models are trained one after the other.  Training them together would save nothing here: a
step of the small Mamba-2 costs the same CPU time per token at 1,000 tokens as at 8,000.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gatewright.runlog import progress
from synthetic import sequence_models
from synthetic.ensemble import Schedule
from synthetic.ranks import Diverged, Ranks
from synthetic.sequences import Batch

# What a gate is made of, and vectors, take no weight decay; neither do norms and biases.
NO_DECAY = ("A_log", "D", "dt_bias")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to train.

    Attributes:
        lr: peak learning rate of every optimizer.
        warmup: share of the steps in which the learning rate rises linearly; a cosine follows.
        floor: the last learning rate over the peak.
        micro_batch: sequences per forward and backward pass; their gradients are summed.
        bf16: autocast to bfloat16 (weights stay fp32).
    """

    steps: int
    batch: int
    lr: float
    eval_every: int
    optimizer: Literal["adamw", "muon"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    warmup: float = 0.05
    floor: float = 0.1
    micro_batch: int = 0
    bf16: bool = False

    def schedule(self) -> Schedule:
        return Schedule(self.steps, warmup_steps=int(self.warmup * self.steps), floor=self.floor)


def optimizers(model: nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Return AdamW, or Muon for the layers' matrices with AdamW for what Muon does not take."""
    tables = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    matrices, decayed, plain = [], [], []
    for name, p in model.named_parameters():
        if recipe.optimizer == "muon" and p.dim() == 2 and id(p) not in tables:
            matrices.append(p)
        elif p.dim() < 2 or name.split(".")[-1] in NO_DECAY:
            plain.append(p)
        else:
            decayed.append(p)
    groups = [
        {"params": decayed, "weight_decay": recipe.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    found: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=recipe.lr, betas=recipe.betas, fused=True
        )
    ]
    if matrices:
        # Updates as large as AdamW's, so that one learning rate serves both.
        muon = torch.optim.Muon(
            matrices,
            lr=recipe.lr,
            weight_decay=recipe.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
        found.append(muon)
    return found


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of the answers' tokens, in nats."""
    logits = sequence_models.answer_logits(model, batch)
    return nn.functional.cross_entropy(logits, batch.targets())


def backward(model: nn.Module, batch: Batch, recipe: Recipe, count: int | None = None) -> float:
    """Add the batch's gradient in micro-batches; return its mean loss.

    Args:
        count: answer tokens of the whole batch of which this is a part; gradient and loss are
            then this part's share.
    """
    size = recipe.micro_batch or len(batch)
    total, count = 0.0, count or int(batch.answer.sum())
    device = batch.tokens.device.type
    for start in range(0, len(batch), size):
        part = batch.rows(slice(start, start + size))
        with torch.autocast(device, torch.bfloat16, enabled=recipe.bf16):
            loss = loss_of(model, part)
        share = int(part.answer.sum()) / count
        (loss * share).backward()
        total += float(loss.detach()) * share
    return total


@dataclasses.dataclass
class Trained:
    """What a run leaves: the curve and how it ended.

    Attributes:
        curve: a dictionary per evaluation: `step`, `loss` (mean since the last), and what
            `evaluate` gave.
        steps: steps taken, fewer than the recipe's after an early stop.
        cpu_seconds: process time.
        data_seconds: of these, for drawing batches.
    """

    curve: list[dict[str, Any]]
    steps: int
    cpu_seconds: float
    data_seconds: float


def train(
    model: nn.Module,
    draw: Callable[[int], Batch],
    recipe: Recipe,
    evaluate: Callable[[int], dict[str, Any]],
    *,
    stop: Callable[[dict[str, Any]], bool] | None = None,
    desc: str,
    ranks: Ranks | None = None,
    checkpoint: Path | None = None,
    name: Mapping[str, Any] | None = None,
    checkpoint_seconds: float = 600.0,
) -> Trained:
    """Train a model in place.

    Args:
        draw: step -> its batch; must depend on the step alone, so that a run can be resumed.
        evaluate: step -> metrics, called every `eval_every` steps and at the end.
        stop: ends the run when it is true of an evaluation.
        ranks: the processes among which batches are split.
        checkpoint: a file to resume from and to renew every `checkpoint_seconds` and at the end.
            It stays: the run's evaluation may yet be killed.
        name: the run's, written into `checkpoint`; another run's file is not resumed from.

    Raises:
        Diverged: the loss is not finite.
    """
    ranks = ranks or Ranks()
    found, schedule = optimizers(model, recipe), recipe.schedule()
    done, ended = Trained([], 0, 0.0, 0.0), False
    state = _saved(checkpoint, name)
    if state is not None:
        model.load_state_dict(state["model"])
        for optimizer, s in zip(found, state["optimizers"], strict=True):
            optimizer.load_state_dict(s)
        done, ended = Trained(**state["done"]), state["ended"]
    base, start, saved = done.cpu_seconds, time.process_time(), time.monotonic()
    model.train()
    losses: list[float] = []
    steps = range(done.steps, done.steps if ended else recipe.steps)
    bar = progress(steps, desc=desc, unit="step", disable=not ranks.lead)
    for step in bar:
        before = time.process_time()
        batch = draw(step)
        done.data_seconds += time.process_time() - before
        for optimizer in found:
            for group in optimizer.param_groups:
                group["lr"] = recipe.lr * schedule.factor(step)
        losses.append(backward(model, ranks.part(batch), recipe, int(batch.answer.sum())))
        ranks.sum_gradients(model)
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
        for optimizer in found:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        done.steps = step + 1
        if done.steps % recipe.eval_every and done.steps != recipe.steps:
            continue
        loss = ranks.total(sum(losses) / len(losses))  # each process has its part's share
        if not math.isfinite(loss):
            raise Diverged(f"{desc}: the loss is not finite before step {done.steps}")
        losses = []
        done.curve.append({"step": done.steps, "loss": loss, **evaluate(done.steps)})
        bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
        done.cpu_seconds = base + time.process_time() - start
        # Processes decide alike, also where their last digits differ.
        if ranks.agree(stop is not None and stop(done.curve[-1])):
            break
        if checkpoint is None or not ranks.lead:
            continue
        if time.monotonic() - saved > checkpoint_seconds:
            _save(checkpoint, name, model, found, done)
            saved = time.monotonic()
    bar.close()
    model.eval()
    if checkpoint is not None and ranks.lead and len(steps):
        _save(checkpoint, name, model, found, done, ended=True)
    return done


def _saved(path: Path | None, name: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return what `_save` kept of the run of this name, if anything."""
    if path is None:
        return None
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:  # or the lead has just removed the last run's
        return None
    return state if state.get("name") == dict(name or {}) else None


def _save(
    path: Path,
    name: Mapping[str, Any] | None,
    model: nn.Module,
    found: list[torch.optim.Optimizer],
    done: Trained,
    *,
    ended: bool = False,
) -> None:
    state = {
        "name": dict(name or {}),
        "ended": ended,
        "model": model.state_dict(),
        "optimizers": [o.state_dict() for o in found],
        "done": dataclasses.asdict(done),
    }
    torch.save(state, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)
