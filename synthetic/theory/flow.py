"""What the paper predicts: gradient flow, escape times, Bayes accuracy, limits, contours."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np


def initial_ratio(alpha: float, points: int, noise: float) -> float:
    """Return proposition 1: retrieval's over memorisation's initial growth rate of the margin."""
    return points * alpha**2 / ((1 - 2 * noise) * (1 + alpha) ** 2)


def critical_alpha_approximate(points: int, noise: float) -> float:
    """Return `sqrt((1 - 2 eps) / P)`, the critical scale as the paper approximates it."""
    return math.sqrt((1 - 2 * noise) / points)


def critical_alpha_exact(points: int, noise: float) -> float:
    """Return the root of proposition 1 at ratio 1: `a / (1 + a) = sqrt((1 - 2 eps) / P)`."""
    root = critical_alpha_approximate(points, noise)
    return root / (1 - root)


def kappa(noise: float) -> float:
    """Return `log((1 - eps) / eps)`, the margin of perfect memorisation (lemma 2)."""
    return math.log((1 - noise) / noise)


def _sigmoid(x: float) -> float:
    return 0.5 * (1 + math.tanh(0.5 * x))


def _phi_psi(delta: float, noise: float) -> tuple[float, float]:
    k = kappa(noise)
    kept, flipped = (1 - noise) * _sigmoid(-(k + delta)), noise * _sigmoid(k - delta)
    return kept + flipped, kept - flipped


def full_flow(
    alpha0: float, points: int, noise: float, *, train_gate: bool = True, to_kappa: bool = False
) -> float:
    """Return the escape time under the full gradient flow.

    The state is (u, v, log log 1/alpha) of one of P orthonormal points, from u = v = 0
    (appendix, "Short context retrieval").  Divide by the learning rate for SGD steps.

    Args:
        to_kappa: the time at which `alpha v` reaches kappa (proposition 2's event) instead
            of the memorisation margin `(1 + alpha) u` (the main text's).
    """
    from scipy.integrate import solve_ivp

    k = kappa(noise)

    def rates(_: float, state: np.ndarray) -> list[float]:
        u, v, loglog = state
        log_alpha = -math.exp(loglog)
        alpha = math.exp(log_alpha)
        memory, retrieval = (1 + alpha) * u, alpha * v
        kept = (1 - noise) * _sigmoid(-(memory + retrieval))
        flipped = noise * _sigmoid(memory - retrieval)
        # d alpha / dt = (alpha log alpha)^2 [...], and d loglog / d alpha = 1 / (alpha log alpha).
        gate = alpha * log_alpha * ((u + v) * kept + (v - u) * flipped) if train_gate else 0.0
        return [(1 + alpha) * (kept - flipped) / points, alpha * (kept + flipped), gate]

    start = [0.0, 0.0, math.log(-math.log(alpha0))]

    def reached(_: float, state: np.ndarray) -> float:
        alpha = math.exp(-math.exp(state[2]))
        return float(alpha * state[1] - (k if to_kappa else (1 + alpha) * state[0]))

    reached.terminal = True  # type: ignore[attr-defined]
    reached.direction = 1  # type: ignore[attr-defined]
    solution: Any = solve_ivp(
        rates, (0, 1e12), start, method="LSODA", events=reached, rtol=1e-8, atol=1e-10
    )
    if not len(solution.t_events[0]):
        raise ArithmeticError(f"the flow from alpha0={alpha0} did not escape by t=1e12")
    return float(solution.t_events[0][0])


def reduced_flow(alpha0: float, noise: float) -> float:
    """Return the escape time under the reduced dynamics on the plateau (proposition 2).

    `T` is the integral of `dv / (alpha(v) phi(alpha(v) v))` up to `alpha(v) v = kappa`, with
    `alpha(v) = exp(-1 / (1/b0 + v^2/2))`, `b0 = log(1/alpha0)`.
    """
    from scipy.integrate import quad
    from scipy.optimize import brentq

    b0, k = math.log(1 / alpha0), kappa(noise)

    def alpha(v: float) -> float:
        return math.exp(-1 / (1 / b0 + v * v / 2))

    end = brentq(lambda v: alpha(v) * v - k, k, k + 10 + 2 * k)
    # Almost all the time passes at v below a few times 1/b0: give the quadrature that scale.
    cuts = [0.0, *(c / b0 for c in (0.5, 1, 2, 4, 8) if c / b0 < end), end]
    total = 0.0
    for a, b in itertools.pairwise(cuts):
        total += quad(lambda v: 1 / (alpha(v) * _phi_psi(alpha(v) * v, noise)[0]), a, b)[0]
    return total


def escape_scale(alpha0: float) -> float:
    """Return `1 / (alpha0 log(1 / alpha0))`, the abscissa of panel b."""
    return 1 / (alpha0 * math.log(1 / alpha0))


def asymptotic_slope(noise: float, lr: float) -> float:
    """Return `sqrt(pi/2) / (2 eps (1 - eps) lr)`: steps per `escape_scale` as alpha0 -> 0."""
    return math.sqrt(math.pi / 2) / (2 * noise * (1 - noise) * lr)


def query_norms(dim: int, count: int = 400) -> np.ndarray:
    """Return equally likely values of |x_q| for x_q ~ N(0, I/d): quantiles of the chi law."""
    from scipy.stats import chi

    return np.asarray(chi.ppf((np.arange(count) + 0.5) / count, dim)) / math.sqrt(dim)


def bayes_accuracy(tau: float, distance: np.ndarray, dim: int, length: int) -> np.ndarray:
    """Return lemma 3's label-coordinate Bayes accuracy at each distance, averaged over |x_q|."""
    from scipy.special import ndtr

    ages = np.arange(1, length + 1)
    hit = np.exp(-np.asarray(distance) / tau)
    # Subtracting the hit's own square from S_2 would lose all digits when it dominates.
    squares = np.exp(-2 * ages / tau)
    others = np.array([squares[ages != d].sum() for d in np.asarray(distance)])
    with np.errstate(divide="ignore", invalid="ignore"):
        snr = hit * np.sqrt(dim / others)
    snr = np.where(hit == 0, 0.0, snr)
    return np.asarray(ndtr(snr[:, None] * query_norms(dim)[None]).mean(1))


def bayes_accuracy_uniform(tau: float, dim: int, length: int) -> float:
    """Return the Bayes accuracy averaged over distances uniform in 1..length (panel c)."""
    return float(bayes_accuracy(tau, np.arange(1, length + 1), dim, length).mean())


def no_decay_accuracy(dim: int, length: int) -> float:
    """Return proposition 3's limit `Phi(|x_q| sqrt(d / (l - 1)))`, averaged over |x_q|."""
    from scipy.special import ndtr

    return float(ndtr(query_norms(dim) * math.sqrt(dim / (length - 1))).mean())


def retrievable_distance(tau: float, error: float, dim: int, length: int) -> float:
    """Return the largest distance at which the Bayes error is at most `error` (0 if none).

    Found on the Bayes curve, interpolated between neighbouring distances.
    """
    distance = np.arange(1, length + 1)
    accuracy = bayes_accuracy(tau, distance, dim, length)
    good = np.flatnonzero(accuracy >= 1 - error)
    if not len(good):
        return 0.0
    last = int(good[-1])
    if last + 1 == length:
        return float(length)
    drop = accuracy[last] - accuracy[last + 1]
    return float(distance[last] + (accuracy[last] - (1 - error)) / drop)
