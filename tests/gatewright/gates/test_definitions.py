"""The definitions of a gate, against plain loops, in numpy and torch alike."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gatewright import gates
from gatewright.errors import UserError


def test_tau_is_where_a_state_has_decayed_to_one_over_e() -> None:
    """Run the recurrence: after tau tokens of zero input 1/e of the state is left."""
    A_log, dt_bias = np.array([0.3]), np.array([-3.0])
    (tau,) = gates.tau_from_weights(A_log, dt_bias)
    decay = math.exp(-math.log1p(math.exp(-3.0)) * math.exp(0.3))
    state, tokens = 1.0, 0
    while state > 1 / math.e:
        state *= decay
        tokens += 1
    assert tokens - 1 < tau <= tokens
    assert gates.alpha(A_log, gates.dt_from_weights(dt_bias))[0] == pytest.approx(decay)


@pytest.mark.parametrize("s", [0.25, 1.0, 3.0])
def test_scaling_multiplies_the_decay_rate_and_divides_tau(s: float) -> None:
    A_log = torch.linspace(0, math.log(16), 7, dtype=torch.float64)
    dt = torch.full((7,), 0.02, dtype=torch.float64)
    scaled = gates.scale(A_log, s)
    torch.testing.assert_close(scaled.exp(), s * A_log.exp())
    torch.testing.assert_close(gates.tau_from_dt(scaled, dt), gates.tau_from_dt(A_log, dt) / s)


@pytest.mark.parametrize("s", [0.0, -1.0, math.nan, math.inf])
def test_a_scale_is_positive_and_finite(s: float) -> None:
    with pytest.raises(UserError, match="--scale"):
        gates.scale(np.zeros(2), s)


def test_numpy_and_torch_agree_and_torch_keeps_its_gradient() -> None:
    rng = np.random.default_rng(0)
    A_log, dt_bias = rng.normal(size=5), rng.normal(size=5) * 20
    A_torch = torch.tensor(A_log, requires_grad=True)
    found = gates.tau_from_weights(A_torch, torch.tensor(dt_bias))
    np.testing.assert_allclose(found.detach(), gates.tau_from_weights(A_log, dt_bias), rtol=1e-12)
    found.log().sum().backward()
    torch.testing.assert_close(A_torch.grad, -torch.ones(5, dtype=torch.float64))


def test_softplus_at_both_ends() -> None:
    np.testing.assert_allclose(
        gates.softplus(np.array([-800.0, -40.0, 0.0, 40.0, 800.0])),
        [0.0, math.exp(-40), math.log(2), 40.0, 800.0],
        rtol=1e-12,
    )


def test_dt_limit_clamps() -> None:
    dt_bias = np.array([-20.0, 0.0, 20.0])
    np.testing.assert_allclose(
        gates.dt_from_weights(dt_bias, (0.001, 0.5)), [0.001, 0.5, 0.5], rtol=1e-12
    )


def test_initial_gates_are_log_uniform_rates_shifted_by_the_offset() -> None:
    drawn = gates.initial_A_log((4000,), offset=-2.0, generator=np.random.default_rng(1))
    rate = np.exp(drawn + 2.0)
    assert 1.0 <= rate.min() < 1.05
    assert 15.95 < rate.max() <= 16.0
    assert rate.mean() == pytest.approx(8.5, abs=0.25)
    tensor = gates.initial_A_log((4000,), offset=-2.0, generator=torch.Generator().manual_seed(1))
    assert (tensor + 2.0).exp().mean().item() == pytest.approx(8.5, abs=0.25)
