"""The rules experiment's two sizes: the paper's, and one that two cores finish in minutes.

What the small size keeps of the paper's: three sets, as many clauses as propositions, the
prompt's form, sizes ~ U[1, k], q = 0.1, beta = 10 with the most relevant clause last, Muon with
a tenth of warm-up and a cosine, five seeds.  What is smaller, and why (pilots on seed 0):

* 2 layers of width 64 and batches of 32 examples; 2,000 steps for retrieval and 500 for length,
  so that a run takes about a CPU minute and 15 seconds.
* Propositions of 2 symbols and names of 3 digits: with 4 and 4 the length task was at 0.13 after
  300 steps, with these at 1.0 (default gates).
* Retrieval has 32 propositions and clauses, and pools of up to 8.  The first tenth of a pool, one
  clause here, has a new name, so with pools of 2 three quarters of the oracles have one, and no
  model learns names by heart (offset -4: 0.00 without an oracle).  With 8 two thirds keep theirs,
  and in 1,500 steps offset -4 went from memory (0.92) to retrieval, while offset 1 stayed (1.00).
* Length has the paper's 128: with 32, pools cannot grow far enough (offset -4 answered all of
  them).  It trains on pools of 4 and is tested to 128 (the paper: 8 and 128).
* Learning rates 1e-2 and 5e-3 where 1e-3 would hardly move in so few steps.
* Length has offsets of at most 0: with 3 it was at chance after 400 steps (2.31 nats a digit).
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
        recipe, length_lr, length_steps: how to train; length models have their own peak
            learning rate and at most `length_steps` steps.
        world, retrieval_world: sizes of the propositions' and clauses' sets; the first is the
            length experiment's.
        retrieval_pool, length_pool: k, the largest pool in training (sizes ~ U[1, k]).
        share: q, the share of clauses (from the front) whose names retrieval resamples.
        beta: the ranking's inverse temperature in the length experiment.
        lengths: pool sizes at which length models are tested, at most `world.clauses`; among
            them `length_pool` and larger ones.
        weak_betas: rankings of the weak retriever sweep (0 is a random order).
        offsets: by part, added to A_log, weakest gates first.
        curve_examples, final_examples: evaluated during training and after it.
        eval_rows: examples per evaluation pass.
    """

    world: WorldSize
    retrieval_world: WorldSize
    sizes: dict[str, Size]
    recipe: Recipe
    length_lr: float
    length_steps: int
    retrieval_pool: int
    length_pool: int
    share: float
    beta: float
    lengths: tuple[int, ...]
    weak_betas: tuple[float, ...]
    offsets: dict[str, tuple[float, ...]]
    seeds: tuple[int, ...]
    curve_examples: int
    final_examples: int
    eval_rows: int

    def __post_init__(self) -> None:
        if self.length_pool not in self.lengths or max(self.lengths) <= self.length_pool:
            raise ValueError(f"{self.lengths} lack pools of {self.length_pool} or larger ones")

    def world_of(self, part: str) -> WorldSize:
        """Return the sizes of a part's sets."""
        return self.retrieval_world if part == "retrieval" else self.world

    def pool(self, part: str) -> int:
        """Return the largest pool that a part trains with."""
        return self.retrieval_pool if part == "retrieval" else self.length_pool

    def recipe_of(self, part: str) -> Recipe:
        """Return how a part is trained."""
        if part == "retrieval":
            return self.recipe
        steps = min(self.recipe.steps, self.length_steps)
        return dataclasses.replace(self.recipe, lr=self.length_lr, steps=steps)

    def training(self, part: str) -> Pools:
        """Return how a part's training contexts are made."""
        if part == "retrieval":
            return Pools("random", "anywhere", resampled=self.share)
        return Pools("ranked", beta=self.beta, resampled=1.0)


SMALL = Settings(
    world=WorldSize(sets=3, propositions=128, clauses=128, symbols=2, digits=3),
    retrieval_world=WorldSize(sets=3, propositions=32, clauses=32, symbols=2, digits=3),
    sizes={
        "mamba2": Size("mamba2", d_model=64, layers=2, heads=4, head_dim=16, d_state=32),
        "llama": Size("llama", d_model=64, layers=2, heads=4, head_dim=16, ffn=128),
    },
    recipe=Recipe(
        steps=2000, batch=32, lr=1e-2, eval_every=50, optimizer="muon", warmup=0.1, floor=0.0
    ),
    length_lr=5e-3,
    length_steps=500,
    retrieval_pool=8,
    length_pool=4,
    share=0.1,
    beta=10.0,
    lengths=(4, 16, 64, 128),
    weak_betas=(0.0, 1.0),
    offsets={"retrieval": (-4.0, -2.0, 0.0, 1.0), "length": (-7.5, -4.0, -2.0, 0.0)},
    seeds=(10, 11, 12, 13, 14),
    curve_examples=64,
    final_examples=64,
    eval_rows=64,
)

_PAPER_WORLD = WorldSize(sets=3, propositions=128, clauses=128, symbols=4, digits=4)
PAPER = Settings(
    world=_PAPER_WORLD,
    retrieval_world=_PAPER_WORLD,
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
    length_steps=200_000,
    retrieval_pool=32,
    length_pool=8,
    share=0.1,
    beta=10.0,
    lengths=(1, 2, 4, 8, 16, 32, 64, 128),
    weak_betas=(0.0, 1.0),
    # Default gates have a median tau of about 12 tokens; the paper's table spans 2.1e4 to 0.2.
    offsets=dict.fromkeys(PARTS, (-7.5, -3.2, -0.35, 1.45, 2.15, 2.7, 4.1)),
    seeds=(0, 1, 2, 3, 4),
    curve_examples=512,
    final_examples=2048,
    eval_rows=64,
)

SIZES = {"small": SMALL, "paper": PAPER}
