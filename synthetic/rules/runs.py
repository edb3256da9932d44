"""One run of the rules experiment: a part, a model, a gate offset, a seed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from synthetic import sequence_models, sequences, trainer
from synthetic.ranks import Ranks
from synthetic.rules import examples as ex
from synthetic.rules import world as worlds
from synthetic.rules.examples import Examples, Pools, Right
from synthetic.rules.settings import Settings
from synthetic.rules.world import Ints, World
from synthetic.sequences import Batch
from synthetic.sweep import Row


@dataclasses.dataclass(frozen=True)
class Run:
    """What tells one run from the others."""

    part: str
    model: str
    offset: float | None
    seed: int

    def key(self) -> Row:
        """Return the run as the fields of its result row."""
        return dataclasses.asdict(self)

    def label(self) -> str:
        gate = "" if self.offset is None else f" {self.offset:+g}"
        return f"{self.part} {self.model}{gate} seed {self.seed}"


def plan(s: Settings, parts: list[str], models: list[str]) -> list[Run]:
    """Return every run, seed by seed, so that an early look has all settings."""
    return [
        Run(part, model, offset, seed)
        for part in parts
        for seed in s.seeds
        for model in models
        for offset in (s.offsets[part] if model == "mamba2" else (None,))
    ]


def build(s: Settings, run: Run) -> nn.Module:
    """Return the run's fresh model; a seed starts from the same weights at every offset."""
    longest = ex.prompt_tokens(worlds.make(s.world, run.seed), max(*s.lengths, s.retrieval_pool))
    return sequence_models.build(
        s.sizes[run.model], ex.VOCAB, longest, seed=run.seed, offset=run.offset or 0.0
    )


def training_batches(s: Settings, world: World, part: str, seed: int) -> Callable[[int], Batch]:
    """Return step -> training batch; turns and pool sizes are uniform."""
    pools, most = s.training(part), s.pool(part)

    def draw(step: int) -> Batch:
        rng = np.random.default_rng([seed, step])

        def sample(count: int) -> Batch:
            asked = ex.questions(world, count, rng, None)
            sizes = rng.integers(1, most + 1, size=count)
            return ex.encode(ex.fill(world, asked, pools, sizes, rng))

        return sequences.draw(sample, s.recipe.batch, test=False)

    return draw


def test_turns(world: World, pools: Pools, k: int, count: int, seed: int) -> Examples:
    """Return first turns of the test half of the space, with pools of k clauses."""
    rng = np.random.default_rng([seed, k, 77])
    found: list[Examples] = []
    have = 0
    while have < count:
        asked = ex.questions(world, 4 * count, rng, 0)
        some = ex.fill(world, asked, pools, np.full(len(asked), k), rng)
        some = _take(some, sequences.in_test(ex.encode(some)).nonzero()[:, 0].numpy())
        found.append(some)
        have += len(some.turn)
    return _take(_join(found), np.arange(count))


def _take(e: Examples, rows: Ints) -> Examples:
    arrays = {f.name: getattr(e, f.name)[rows] for f in dataclasses.fields(e) if f.name != "world"}
    return Examples(e.world, **arrays)


def _join(parts: list[Examples]) -> Examples:
    arrays = {
        f.name: np.concatenate([getattr(p, f.name) for p in parts])
        for f in dataclasses.fields(parts[0])
        if f.name != "world"
    }
    return Examples(parts[0].world, **arrays)


def right_answers(
    model: nn.Module, e: Examples, rows: int, device: str, *, right: Right = "shown"
) -> Ints:
    """Return (B,) the name that greedy decoding answers if it is a right one, else -1.

    Greedy decoding gives a name exactly if each of its digits is the most likely one after
    those before it, so one pass with the right name in place decides, one for each name that
    would be right.
    """
    was_training = model.training
    model.eval()
    found = np.full(len(e.turn), -1)
    for names in e.right_names(right).T:
        todo = ((found < 0) & (names >= 0)).nonzero()[0]
        if not len(todo):
            continue
        batch = ex.encode(dataclasses.replace(_take(e, todo), target=names[todo])).to(device)
        hits = sequence_models.right_answers(model, batch, rows).cpu().numpy()
        found[todo[hits]] = names[todo[hits]]
    model.train(was_training)
    return found


def chain_success(
    model: nn.Module, world: World, pools: Pools, k: int, count: int, s: Settings, device: str
) -> float:
    """Return the share of questions that M-1 turns answer, each from where the last one led."""
    rng = np.random.default_rng([k, 78])
    asked = ex.questions(world, count, rng, 0)
    goal, alive = asked[:, 2].copy(), np.arange(count)
    for turn in range(world.size.sets - 1):
        here = np.stack([np.full(len(alive), turn), asked[alive, 1], goal[alive]], axis=1)
        # Off the path there may be no class 1 clause left to show; the turn is then lost.
        e = ex.fill(world, here, pools, np.full(len(alive), k), rng)
        answered = right_answers(model, e, s.eval_rows, device)
        ok = answered >= 0
        asked[alive[ok], 1] = e.after(answered)[ok]
        alive = alive[ok]
        if not len(alive):
            break
    return len(alive) / count


def execute(
    s: Settings, run: Run, ranks: Ranks | None = None, *, checkpoint: Path | None = None
) -> Row:
    """Train and measure one run; return its row."""
    ranks = ranks or Ranks()
    device = ranks.device
    world = worlds.make(s.world_of(run.part), run.seed)
    model = build(s, run).to(device)
    k, share = s.pool(run.part), s.share

    def accuracy(pools: Pools, size: int, count: int, right: Right = "shown") -> float:
        e = test_turns(world, pools, size, count, run.seed)
        found = right_answers(model, e, s.eval_rows, device, right=right)
        return float((found >= 0).mean())

    no_oracle = Pools("random", "absent", resampled=share)
    random_name = Pools("random", "resampled", resampled=share)
    ranked = Pools("ranked", beta=s.beta, resampled=1.0)

    def evaluate(_: int) -> dict[str, Any]:
        n = s.curve_examples
        if run.part == "length":
            return {"accuracy": accuracy(ranked, k, n)}
        return {
            "no_oracle": accuracy(no_oracle, k, n, right="known"),
            "random_oracle_name": accuracy(random_name, k, n, right="renamed"),
        }

    probe = ex.encode(test_turns(world, s.training(run.part), k, 64, run.seed)).to(device)
    before = sequence_models.gate_state(model, probe) if run.model == "mamba2" else None
    done = trainer.train(
        model,
        training_batches(s, world, run.part, run.seed),
        s.recipe_of(run.part),
        evaluate,
        desc=run.label(),
        ranks=ranks,
        checkpoint=checkpoint,
        name=run.key(),
    )
    n = s.final_examples
    row: dict[str, Any] = {
        **run.key(),
        "steps": done.steps,
        "parameters": sequence_models.parameter_count(model),
        "cpu_seconds": round(done.cpu_seconds, 2),
        "data_seconds": round(done.data_seconds, 4),
        "curve": [{k: _short(v) for k, v in c.items()} for c in done.curve],
    }
    if run.part == "retrieval":
        row["no_oracle"] = accuracy(no_oracle, k, n, right="known")
        row["random_oracle_name"] = accuracy(random_name, k, n, right="renamed")
        row["first_turn"] = accuracy(s.training(run.part), k, n)
        row["chain"] = chain_success(model, world, s.training(run.part), k, n, s, device)
    else:
        row["lengths"] = list(s.lengths)
        row["length_accuracy"] = [accuracy(ranked, size, n) for size in s.lengths]
        row["chain"] = chain_success(model, world, ranked, k, n, s, device)
        row["weak"] = [
            {
                "beta": beta,
                "k": size,
                "accuracy": accuracy(
                    Pools("ranked", beta=beta, inject=False, resampled=1.0), size, n
                ),
            }
            for beta in s.weak_betas
            for size in s.lengths
        ]
    if before is not None:
        row |= sequence_models.drift(before, sequence_models.gate_state(model, probe))
    return row


def _short(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value
