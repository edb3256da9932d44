"""The rules experiment's two sizes: the paper's, and one that two cores finish in minutes.

What the small size keeps of the paper's: three sets, as many clauses as propositions, the
prompt's form, sizes ~ U[1, k], q = 0.1, beta = 10 with the most relevant clause last, Muon with
a tenth of warm-up and a cosine, five seeds.  What is smaller, and why (pilots on seed 0):

* 2 layers of width 64 and 500 steps of 32 examples, so that a run takes about 15 CPU seconds.
* Propositions of 2 symbols and names of 3 digits: with 4 and 4 the length task was at 0.13 after
  300 steps, with these at 1.0 (default gates).  Sets have the paper's 128 propositions and
  clauses: with 32, pools cannot grow far enough (offset -4 answered all of them).
* Pools of 2 for retrieval: with 4, offset -5 knew most names by heart after 600 steps (0.74
  without an oracle, 64 clauses) and retrieved none; with 2, offset -2 began within 200.
* Pools of 4 for length, tested to 128 (the paper: 8 and 128).
* Learning rates 1e-2 and 5e-3 where 1e-3 would hardly move in 500 steps.
* Offsets of at most 0: with 3 the length task was at chance after 400 steps (2.31 nats a digit).
"""

from __future__ import annotations

import dataclasses

from synthetic.rules.examples import Pools
from synthetic.rules.world import Size as WorldSize
from synthetic.sequence_models import Size
from synthetic.trainer import Recipe

PARTS = ("retrieval", "length")
MODELS = ("mamba2", "llama")


@dataclasses.dataclass(frozen=True)
class Settings:
    """One size of the experiment.

    Attributes:
        recipe, length_lr: how to train; length models have their own peak learning rate.
        world: sizes of the propositions' and clauses' sets.
        retrieval_pool, length_pool: k, the largest pool in training (sizes ~ U[1, k]).
        share: q, the share of clauses (from the front) whose names retrieval resamples.
        beta: the ranking's inverse temperature in the length experiment.
        lengths: pool sizes at which length models are tested, at most `world.clauses`.
        weak_betas: rankings of the weak retriever sweep (0 is a random order).
        offsets: added to A_log, weakest gates first.
        curve_examples, final_examples: evaluated during training and after it.
        eval_rows: examples per evaluation pass.
    """

    world: WorldSize
    sizes: dict[str, Size]
    recipe: Recipe
    length_lr: float
    retrieval_pool: int
    length_pool: int
    share: float
    beta: float
    lengths: tuple[int, ...]
    weak_betas: tuple[float, ...]
    offsets: tuple[float, ...]
    seeds: tuple[int, ...]
    curve_examples: int
    final_examples: int
    eval_rows: int

    def pool(self, part: str) -> int:
        """Return the largest pool that a part trains with."""
        return self.retrieval_pool if part == "retrieval" else self.length_pool

    def recipe_of(self, part: str) -> Recipe:
        """Return how a part is trained."""
        if part == "retrieval":
            return self.recipe
        return dataclasses.replace(self.recipe, lr=self.length_lr)

    def training(self, part: str) -> Pools:
        """Return how a part's training contexts are made."""
        if part == "retrieval":
            return Pools("random", "anywhere", resampled=self.share)
        return Pools("ranked", beta=self.beta, resampled=1.0)


SMALL = Settings(
    world=WorldSize(sets=3, propositions=128, clauses=128, symbols=2, digits=3),
    sizes={
        "mamba2": Size("mamba2", d_model=64, layers=2, heads=4, head_dim=16, d_state=32),
        "llama": Size("llama", d_model=64, layers=2, heads=4, head_dim=16, ffn=128),
    },
    recipe=Recipe(
        steps=500, batch=32, lr=1e-2, eval_every=50, optimizer="muon", warmup=0.1, floor=0.0
    ),
    length_lr=5e-3,
    retrieval_pool=2,
    length_pool=4,
    share=0.1,
    beta=10.0,
    lengths=(4, 16, 64, 128),
    weak_betas=(0.0, 1.0),
    offsets=(-4.0, -2.0, 0.0),
    seeds=(10, 11, 12, 13, 14),
    curve_examples=64,
    final_examples=64,
    eval_rows=64,
)

PAPER = Settings(
    world=WorldSize(sets=3, propositions=128, clauses=128, symbols=4, digits=4),
    sizes={
        # 16 heads of 256 are 4,096 channels: with Mamba-2's usual expansion of 2, width 2,048.
        "mamba2": Size("mamba2", d_model=2048, layers=4, heads=16, head_dim=256, d_state=256),
        "llama": Size("llama", d_model=1024, layers=4, heads=8, head_dim=128, ffn=2816),
    },
    recipe=Recipe(
        steps=200_000,
        batch=128,
        lr=1e-3,
        eval_every=1000,
        optimizer="muon",
        warmup=0.1,
        floor=0.0,
        micro_batch=64,
        bf16=True,
    ),
    length_lr=1e-3,
    retrieval_pool=32,
    length_pool=8,
    share=0.1,
    beta=10.0,
    lengths=(1, 2, 4, 8, 16, 32, 64, 128),
    weak_betas=(0.0, 1.0),
    # Default gates have a median tau of about 12 tokens; the paper's table spans 2.1e4 to 0.2.
    offsets=(-7.5, -3.2, -0.35, 1.45, 2.15, 2.7, 4.1),
    seeds=(0, 1, 2, 3, 4),
    curve_examples=512,
    final_examples=2048,
    eval_rows=64,
)

SIZES = {"small": SMALL, "paper": PAPER}
