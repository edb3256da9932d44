"""The paper's predictions against brute force: Euler steps, Monte Carlo, limits."""

import math

import numpy as np
import pytest

from synthetic.theory import flow


def test_critical_alpha_is_where_the_growth_rates_are_equal() -> None:
    exact = flow.critical_alpha_exact(32, 0.1)
    assert flow.initial_ratio(exact, 32, 0.1) == pytest.approx(1)
    assert exact == pytest.approx(0.1878, abs=1e-4)
    assert flow.critical_alpha_approximate(32, 0.1) == pytest.approx(0.1581, abs=1e-4)


@pytest.mark.parametrize("train_gate", [True, False])
@pytest.mark.parametrize("to_kappa", [True, False])
def test_full_flow_agrees_with_euler_steps(train_gate: bool, to_kappa: bool) -> None:
    alpha, points, eps, dt = 0.1, 8, 0.1, 0.01
    want = flow.full_flow(alpha, points, eps, train_gate=train_gate, to_kappa=to_kappa)
    u = v = t = 0.0
    while t == 0 or alpha * v < (flow.kappa(eps) if to_kappa else (1 + alpha) * u):
        m, r = (1 + alpha) * u, alpha * v
        kept, flipped = (1 - eps) / (1 + math.exp(m + r)), eps / (1 + math.exp(r - m))
        step = (
            (1 + alpha) * (kept - flipped) / points,
            alpha * (kept + flipped),
            (alpha * math.log(alpha)) ** 2 * ((u + v) * kept + (v - u) * flipped),
        )
        u, v, alpha = u + dt * step[0], v + dt * step[1], alpha + dt * step[2] * train_gate
        t += dt
    assert want == pytest.approx(t, rel=2e-3)


def test_reduced_flow_agrees_with_euler_steps_and_with_its_asymptote() -> None:
    alpha, v, t, dt, eps = 0.05, 0.0, 0.0, 0.002, 0.1
    k = flow.kappa(eps)
    while alpha * v < k:
        phi = (1 - eps) / (1 + math.exp(k + alpha * v)) + eps / (1 + math.exp(alpha * v - k))
        step = alpha * phi
        alpha, v = alpha + dt * (alpha * math.log(alpha)) ** 2 * v * phi, v + dt * step
        t += dt
    assert flow.reduced_flow(0.05, eps) == pytest.approx(t, rel=2e-3)
    # Proposition 2 says Theta(scale); by Laplace's method the constant is the asymptotic slope.
    slopes = [flow.reduced_flow(10.0**-p, eps) / flow.escape_scale(10.0**-p) for p in (6, 12, 24)]
    limit = flow.asymptotic_slope(eps, 1.0)
    assert abs(slopes[2] / limit - 1) < abs(slopes[1] / limit - 1) < abs(slopes[0] / limit - 1)
    assert slopes[2] == pytest.approx(limit, rel=0.05)
    assert flow.asymptotic_slope(0.1, 0.3) == pytest.approx(23.2, abs=0.05)


def test_bayes_accuracy_agrees_with_explicit_tokens() -> None:
    rng = np.random.default_rng(0)
    tau, dim, length, n = 3.0, 8, 10, 40_000
    ages = np.arange(1, length + 1)
    for distance in (1, 4, 10):
        x = rng.normal(size=(n, length, dim)) / math.sqrt(dim)
        y = rng.choice([-1, 1], size=(n, length))
        q = x[:, distance - 1]
        g = (np.exp(-ages / tau) * np.einsum("nld,nd->nl", x, q) * y).sum(1)
        hit = (np.sign(g) == y[:, distance - 1]).mean()
        want = flow.bayes_accuracy(tau, np.array([distance]), dim, length)[0]
        assert hit == pytest.approx(want, abs=4 * math.sqrt(0.25 / n))


def test_limits_of_the_bayes_curve() -> None:
    limit = flow.no_decay_accuracy(128, 1024)
    assert flow.bayes_accuracy_uniform(1e9, 128, 1024) == pytest.approx(limit, abs=1e-6)
    # The query at distance 1 with almost no memory of anything older is certain.
    assert flow.bayes_accuracy(0.05, np.array([1]), 128, 64)[0] == pytest.approx(1)
    assert flow.bayes_accuracy(0.05, np.array([60]), 128, 64)[0] == pytest.approx(0.5)


def test_reach_grows_like_tau_log_d_over_tau() -> None:
    dim = 100_000
    x = [t * math.log(dim / t) for t in (4.0, 8.0, 16.0)]
    reach = [flow.retrievable_distance(t, 0.25, dim, 400) for t in (4.0, 8.0, 16.0)]
    ratio = [r / s for r, s in zip(reach, x, strict=True)]
    assert max(ratio) / min(ratio) < 1.05
    assert flow.retrievable_distance(1e6, 0.01, 16, 400) == 0.0
