"""One-token steps against the recurrence over the whole sequence."""

import pytest
import torch
from torch import Tensor

from gatewright.kernels import selective_state_update, ssd_reference, state_step
from gatewright.kernels.reference import state_step_reference
from tests.gatewright.kernels.oracle import relative_error
from tests.gatewright.kernels.test_ssd import inputs

TOLERANCE = 1e-5
PER_TOKEN = ("x", "dt", "B", "C", "z")


@pytest.mark.parametrize("extras", [(), ("D",), ("D2", "z", "initial_states")])
@pytest.mark.parametrize("scale", [1e-3, 64.0])
def test_steps_equal_the_sequence(kernels: str, extras: tuple[str, ...], scale: float) -> None:
    t, _ = inputs(l=20, h=4, p=7, g=2, n=21, scale=scale, extras=extras)
    truth, final = ssd_reference(
        **{k: v.double() for k, v in t.items()}, dt_softplus=True, return_final_states=True
    )
    state = t.pop("initial_states", torch.zeros(2, 4, 7, 21))
    for i in range(20):
        now = {k: v[:, i] if k in PER_TOKEN else v for k, v in t.items()}
        y = state_step(state, **now, dt_softplus=True)
        assert relative_error(y, truth[:, i]) < TOLERANCE
    assert relative_error(state, final) < TOLERANCE


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float64])
def test_states_of_other_types(kernels: str, state_dtype: torch.dtype) -> None:
    t, _ = inputs(l=1, extras=("D",))
    now = {k: v[:, 0] if k in PER_TOKEN else v for k, v in t.items()}
    state = torch.randn(2, 4, 8, 16).to(state_dtype)
    truth, new = state_step_reference(
        state.double(), **{k: v.double() for k, v in now.items()}, dt_softplus=True
    )
    y = state_step(state, **now, dt_softplus=True)
    assert y.dtype == torch.float32
    assert relative_error(y, truth) < TOLERANCE
    assert relative_error(state, new) < torch.finfo(state_dtype).eps + 1e-9


def test_name_and_arguments_of_mamba_ssm(kernels: str) -> None:
    t, _ = inputs(l=1, extras=("D", "z"))
    now = {k: v[:, 0] if k in PER_TOKEN else v for k, v in t.items()}
    pool = torch.randn(5, 4, 8, 16)
    which = torch.tensor([3, 1])
    state = pool[which].clone()
    truth = state_step(state, **now, dt_softplus=True)
    h, p, n = 4, 8, 16
    wide: dict[str, Tensor] = now | {
        "dt": now["dt"][..., None].expand(-1, -1, p),
        "A": now["A"][:, None, None].expand(h, p, n),
        "D": now["D"][:, None].expand(h, p),
        "dt_bias": now["dt_bias"][:, None].expand(h, p),
    }
    y = selective_state_update(pool, **wide, dt_softplus=True, state_batch_indices=which)
    assert torch.allclose(y, truth, atol=1e-6)
    assert torch.allclose(pool[which], state, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("x", (2, 4, 7)), ("dt", (1, 4)), ("C", (2, 1, 15)), ("D", (3,)), ("z", (2, 4)), ("A", (5,))],
)
def test_shapes_that_do_not_fit_are_named(kernels: str, name: str, shape: tuple[int, ...]) -> None:
    t, _ = inputs(l=1, extras=("D", "z"))
    now = {k: v[:, 0] if k in PER_TOKEN else v for k, v in t.items()}
    with pytest.raises(ValueError, match=rf"state_step: {name} "):
        state_step(torch.randn(2, 4, 8, 16), **{**now, name: torch.zeros(shape)})
