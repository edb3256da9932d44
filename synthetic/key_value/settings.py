"""The key-value experiment's two sizes: the paper's, and one that two cores finish in minutes.

What the small size keeps of the paper's: the form of sequences, n ~ U[1, N], what memory alone
reaches (0.43), evaluation at the largest n, contexts up to 4 N, five seeds, AdamW's recipe, early
stop and the definition of an escape.  What is smaller, and why (pilots on seeds 0, 1 and 10):

* A core does about 75,000 tokens a second of 2 layers of width 64.  45 runs in 45 minutes
  leave each a minute: 3,000 steps of 32 sequences of at most 71 tokens.  After 1,200 steps only
  one of five runs at offset -5 had escaped, and none at 0 had memorised what memory can.
* m = 2, so that the convolution's four tokens hold a key and the start of its value; eps grows
  to 0.34, which keeps (1 - eps)^m at 0.43.
* 1,000 entries: 256 are learned by heart in 200 steps, and offset -4 stays there for 1,000.
* q = 0.5: at 0.25 two of the last two pairs are asked for, and the second answer needs no key
  (always right, also in longer contexts, where the first was right in a third of cases).
* N = 8: with 6 fewer answers a sequence teach less (offset -5 stood at 0.43 after 1,000 steps).
* Learning rate 1e-2: 3e-3 and 5e-3 did not leave memory in 600 steps.  The Transformer's is
  3e-3: with 1e-2 it learned neither memory nor retrieval (0.08 after 1,200 steps, seed 10).
* Offsets move up by about log(10,151 / 71) = 5, the ratio of the sequences' lengths, because a
  gate acts through its decay over a distance: the paper's -10..0 become about -5..5.  At N = 8
  offsets 0 and 2 learned alike (0.40 and 0.44 after 1,000 steps), so the range ends early.
"""

from __future__ import annotations

import dataclasses

from synthetic.key_value.task import Task
from synthetic.sequence_models import Size
from synthetic.trainer import Recipe

ORDERS = ("best_first", "best_last")
MODELS = ("mamba2", "gpt_neox")
ESCAPE = 0.95  # an escape: the first evaluation above this (paper, appendix "Plot descriptions")
STOP = 0.99


@dataclasses.dataclass(frozen=True)
class Settings:
    """One size of the experiment.

    Attributes:
        task: its `order` is replaced by each part's.
        recipe, baseline_lr: how to train; the Transformer has its own peak learning rate.
        offsets: by order of queries, added to A_log, weakest gates first.
        lengths: numbers of pairs at which best-last models are tested.
        curve_sequences, final_sequences, length_sequences: evaluated during training, at its
            end, and at each length.
        eval_rows: sequences per evaluation pass.
    """

    task: Task
    sizes: dict[str, Size]
    recipe: Recipe
    baseline_lr: float
    offsets: dict[str, tuple[float, ...]]
    seeds: tuple[int, ...]
    lengths: tuple[int, ...]
    curve_sequences: int
    final_sequences: int
    length_sequences: int
    eval_rows: int

    def recipe_of(self, model: str) -> Recipe:
        """Return how a model is trained."""
        if model == "mamba2":
            return self.recipe
        return dataclasses.replace(self.recipe, lr=self.baseline_lr)


SMALL = Settings(
    task=Task(
        symbols=32,
        entries=1000,
        length=2,
        pairs=8,
        noise=0.34,
        query_ratio=0.5,
        order="best_first",
    ),
    sizes={
        "mamba2": Size("mamba2", d_model=64, layers=2, heads=4, head_dim=16, d_state=32),
        "gpt_neox": Size("gpt_neox", d_model=64, layers=2, heads=4, head_dim=16, ffn=128),
    },
    recipe=Recipe(steps=3000, batch=32, lr=1e-2, eval_every=50),
    baseline_lr=3e-3,
    offsets={"best_first": (-5.0, -2.0, -1.0, 0.0), "best_last": (-5.0, -1.0, 1.0)},
    seeds=(10, 11, 12, 13, 14),
    lengths=(8, 12, 16, 20, 24, 28, 32),
    curve_sequences=128,
    final_sequences=1024,
    length_sequences=256,
    eval_rows=128,
)

PAPER = Settings(
    task=Task(
        symbols=64,
        entries=10_000,
        length=8,
        pairs=512,
        noise=0.1,
        query_ratio=0.1,
        order="best_first",
    ),
    sizes={
        "mamba2": Size("mamba2", d_model=768, layers=24, heads=24, head_dim=64, d_state=128),
        "gpt_neox": Size("gpt_neox", d_model=768, layers=12, heads=12, head_dim=64, ffn=3072),
    },
    recipe=Recipe(steps=100_000, batch=128, lr=3e-4, eval_every=500, micro_batch=4, bf16=True),
    baseline_lr=3e-4,
    offsets=dict.fromkeys(ORDERS, (-10.0, -6.0, -4.0, -3.0, -2.0, -1.0, 0.0)),
    seeds=(0, 1, 2, 3, 4),
    lengths=(512, 768, 1024, 1280, 1536, 1792, 2048),
    curve_sequences=1024,
    final_sequences=1024,
    length_sequences=1024,
    eval_rows=4,
)

SIZES = {"small": SMALL, "paper": PAPER}
