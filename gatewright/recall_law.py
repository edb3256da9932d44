"""How many facts a fixed state can hold: the recall scaling law, forwards and backwards.

Source: the capacity paper (theorem 4.2, remark 4.3, theorem 4.6).  A state of D channels by
N slots, in each of `layers` layers, holds `facts` key-value pairs over a vocabulary of V
tokens.  A query reads the right value with signal 1 and Gaussian noise of variance

    sigma^2 = a * facts / (layers * N * D) + 1 / D

on every wrong token, so that recall succeeds with probability about `Phi(1/sigma - b)`, where
b is how far the largest of V noises reaches.  `a` counts the pairs written per fact: 1 (AR)
and 5/4 (MQAR) for a trained linear model, half of that for a full Mamba, 2 and 3 for the
designed circuit, which writes every adjacent pair.

The printed form of theorem 4.2 drops the `1/D` term and disagrees with remark 4.3 at small
D; both are here.  The paper writes `b = sqrt(2 ln V)`; its authors' code uses the mean of
the largest of V standard Gaussians, `mean_of_max`, which is smaller (2.915 against 3.532 at
V = 512) and describes trained models far better.

The law counts N independent slots.  A key's hash is linear in D numbers, so that a layer has no
more than D of them: where N > D the law promises too much.  `a` of a full Mamba is the paper's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any, Literal

Task = Literal["ar", "mqar"]
Model = Literal["linear", "full"]
Reach = Literal["mean_of_max", "sqrt_2_log_v"]

_NORMAL = NormalDist()
PAIRS_PER_FACT = {
    ("linear", "ar"): 1.0,
    ("linear", "mqar"): 1.25,
    ("full", "ar"): 0.5,
    ("full", "mqar"): 0.625,
    ("designed", "ar"): 2.0,
    ("designed", "mqar"): 3.0,
}


def sqrt_2_log_v(vocab: int) -> float:
    """Return `sqrt(2 ln V)`, the leading order of the largest of V standard Gaussians."""
    return math.sqrt(2 * math.log(vocab))


def mean_of_max(vocab: int) -> float:
    """Return m_V, the next order: `s - (ln ln V + ln 4 pi) / (2 s)`, `s = sqrt(2 ln V)`."""
    s = sqrt_2_log_v(vocab)
    return s - (math.log(math.log(vocab)) + math.log(4 * math.pi)) / (2 * s)


REACH = {"mean_of_max": mean_of_max, "sqrt_2_log_v": sqrt_2_log_v}
MOST = 10**9
"""No size, vocabulary or number of facts is larger; beyond it floats and time run out."""


def pairs_per_fact(model: Model, task: Task, facts: int, length: int) -> float:
    """Return `a` of a trained model at any sequence length.

    In MQAR `facts / 2 + t / 4` pairs have been written before a query at t (theorem 4.2), over
    all queries `3/4 + length / (8 facts)` a fact: 5/4 at the usual length of 4 facts only.
    """
    usual = PAIRS_PER_FACT[model, task]
    return usual if task == "ar" else usual * (0.75 + length / (8 * facts)) / 1.25


def noise_variance(d: float, n: float, facts: float, a: float, layers: float = 1) -> float:
    """Return sigma^2 of a readout (remark 4.3; theorem 4.6 for several layers)."""
    return a * facts / (layers * n * d) + 1 / d


def recall(d: float, n: float, facts: float, a: float, b: float, layers: float = 1) -> float:
    """Return remark 4.3's probability of recall, `Phi(1/sigma - b)`."""
    return _NORMAL.cdf(1 / math.sqrt(noise_variance(d, n, facts, a, layers)) - b)


def recall_as_printed(
    d: float, n: float, facts: int, b: float, task: Task, length: int | None = None
) -> float:
    """Return theorem 4.2's probability as printed, without the 1/D term.

    For MQAR it is the mean over the query positions t = 2 facts .. length - 1 of a query at
    t, by which time `facts / 2 + t / 4` pairs have been written.

    Raises:
        ValueError: MQAR without a `length` that leaves room for queries.
    """
    if task == "ar":
        return _NORMAL.cdf(math.sqrt(n * d / facts) - b)
    if length is None or length <= 2 * facts:
        raise ValueError("MQAR needs a length greater than twice the facts")
    positions = range(2 * facts, length)
    values = [_NORMAL.cdf(math.sqrt(n * d / (facts / 2 + t / 4)) - b) for t in positions]
    return sum(values) / len(values)


def _needed_variance(target: float, b: float) -> float:
    if not 0 < target < 1:
        raise ValueError(f"a target recall lies strictly between 0 and 1, not {target}")
    reach = b + _NORMAL.inv_cdf(target)
    return math.inf if reach <= 0 else 1 / reach**2


def facts_at(target: float, d: float, n: float, a: float, b: float, layers: float = 1) -> float:
    """Return how many facts a state holds at a target recall; 0 when D alone is too small.

    Infinite when the target is so low that guessing reaches it.
    """
    spare = _needed_variance(target, b) - 1 / d
    return max(0.0, spare * layers * n * d / a)


def state_size_for(
    target: float, facts: float, d: float, a: float, b: float, layers: float = 1
) -> float:
    """Return the N that reaches a target recall at a given D; infinite when no N does."""
    spare = _needed_variance(target, b) - 1 / d
    if spare <= 0:
        return math.inf
    return 0.0 if math.isinf(spare) else a * facts / (spare * layers * d)


def smallest_width(target: float, b: float) -> float:
    """Return the D below which no state size reaches the target (the 1/D term alone)."""
    return 1 / _needed_variance(target, b)


@dataclasses.dataclass(frozen=True)
class State:
    """What the law reads in a model's configuration.

    Attributes:
        d: hidden size; the state has `expand` times as many channels, which the law does not
            count (a channel's copies hold no more than the channel).
        n: state size.
        layers: recurrent layers.
        vocab: tokens that compete as answers.
        task: what a synthetic checkpoint was trained on; None for a language model.
    """

    d: int
    n: int
    layers: int
    vocab: int
    model: Model = "full"
    task: Task | None = None

    def __post_init__(self) -> None:
        for name, least in (("d", 1), ("n", 1), ("layers", 1), ("vocab", 2)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"{name} must be a whole number, not {value!r}")
            if value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
            if value > MOST:
                raise ValueError(f"{name} must be at most {MOST}")
        if self.task not in (None, "ar", "mqar"):
            raise ValueError(f"task must be ar or mqar, not {self.task!r}")

    @property
    def more_slots_than_channels(self) -> bool:
        """Whether N > D, where the law promises too much."""
        return self.n > self.d

    def recall(self, facts: float, task: Task, reach: Reach = "mean_of_max") -> float:
        """Return the predicted probability of recalling one of so many facts."""
        a, b = PAIRS_PER_FACT[self.model, task], REACH[reach](self.vocab)
        return recall(self.d, self.n, facts, a, b, self.layers)

    def facts_at(self, target: float, task: Task, reach: Reach = "mean_of_max") -> float:
        """Return how many facts the state is predicted to hold at a target recall."""
        a, b = PAIRS_PER_FACT[self.model, task], REACH[reach](self.vocab)
        return facts_at(target, self.d, self.n, a, b, self.layers)


def state_of(config: Mapping[str, Any]) -> State | None:
    """Return the state that a config.json describes; None where the law describes none.

    Attention reads its whole cache and hybrids have some, so only purely recurrent models have
    one.  Heads of a Mamba-2 with one group share keys and queries (pattern MVA), which the law
    counts as one; with several groups they have keys of their own, and it does not say how many
    facts those hold.

    Raises:
        KeyError, ValueError: a recurrent model's sizes are missing or no sizes.
    """
    kind = str(config.get("model_type", ""))
    if kind not in ("mamba", "mamba2", "falcon_mamba") and not kind.startswith("recall-"):
        return None
    if kind == "mamba2" and config["n_groups"] != 1:
        return None
    return State(
        d=config["hidden_size"],
        n=config["state_size"],
        layers=config["num_hidden_layers"],
        vocab=config["vocab_size"],
        model="linear" if kind == "recall-linear" else "full",
        task=config.get("task"),
    )
