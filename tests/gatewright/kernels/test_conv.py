"""The causal convolution, over sequences and one token at a time, against its definition."""

import pytest
import torch
from torch import Tensor

from gatewright.kernels import (
    causal_conv1d,
    causal_conv1d_fn,
    causal_conv1d_reference,
    causal_conv1d_update,
    conv1d_step,
    conv1d_step_reference,
)
from tests.gatewright.kernels.oracle import outputs_and_gradients, relative_error, worst

TOLERANCE = 1e-5


def inputs(
    b: int = 2, d: int = 37, l: int = 23, w: int = 4, initial: bool = False
) -> dict[str, Tensor]:
    torch.manual_seed(0)
    t = {"x": torch.randn(b, d, l), "weight": torch.randn(d, w), "bias": torch.randn(d)}
    if initial:
        t["initial_states"] = torch.randn(b, d, w - 1)
    return t


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 9, 300])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("initial", [False, True])
def test_values_and_gradients(kernels: str, length: int, packed: bool, initial: bool) -> None:
    t = inputs(l=length, initial=initial)
    torch.manual_seed(1)
    seq_idx = (torch.rand(2, length) < 0.3).int().cumsum(1).int() if packed else None
    options = {"activation": "silu", "seq_idx": seq_idx, "return_final_states": True}
    truth = outputs_and_gradients(causal_conv1d_reference, t, torch.float64, **options)
    found = outputs_and_gradients(causal_conv1d, t, torch.float32, **options)
    error, name = worst(found, truth)
    assert error < TOLERANCE, name


@pytest.mark.parametrize("width", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("channels", [1, 16, 300])
def test_widths_and_activations(
    kernels: str, width: int, activation: str | None, channels: int
) -> None:
    t = inputs(d=channels, w=width)
    del t["bias"]
    truth = outputs_and_gradients(causal_conv1d_reference, t, torch.float64, activation=activation)
    found = outputs_and_gradients(causal_conv1d, t, torch.float32, activation=activation)
    error, name = worst(found, truth)
    assert error < TOLERANCE, name


def test_past_inputs_without_gradients(kernels: str) -> None:
    """The C++ path takes past inputs that need no gradient, as a prefill's are."""
    t = inputs(initial=True)
    past = t.pop("initial_states")
    truth = outputs_and_gradients(
        causal_conv1d_reference, t, torch.float64, initial_states=past.double()
    )
    found = outputs_and_gradients(causal_conv1d, t, torch.float32, initial_states=past)
    assert worst(found, truth)[0] < TOLERANCE


def test_result_lies_in_memory_as_the_input(kernels: str) -> None:
    t = inputs()
    rows = t["x"].transpose(1, 2).contiguous()  # (b, l, d)
    y = causal_conv1d(rows.transpose(1, 2), t["weight"], t["bias"], "silu")
    assert isinstance(y, Tensor)
    assert y.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(kernels: str, dtype: torch.dtype) -> None:
    t = inputs()
    t["x"] = t["x"].to(dtype).float()
    truth = outputs_and_gradients(causal_conv1d_reference, t, torch.float64, activation="silu")
    found = outputs_and_gradients(causal_conv1d, t, torch.float32, {"x": dtype}, activation="silu")
    assert found["out0"].dtype == dtype
    for name in truth:
        assert relative_error(found[name], truth[name]) < torch.finfo(dtype).eps, name


def test_unknown_activation_is_refused(kernels: str) -> None:
    with pytest.raises(ValueError, match="gelu"):
        causal_conv1d(**inputs(), activation="gelu")


@pytest.mark.parametrize("history", [3, 4, 7])
def test_steps_equal_the_sequence(kernels: str, history: int) -> None:
    t = inputs(l=12)
    whole = causal_conv1d_reference(**{k: v.double() for k, v in t.items()}, activation="silu")
    assert isinstance(whole, Tensor)
    state = torch.zeros(2, 37, history)
    for i in range(12):
        y = conv1d_step(t["x"][:, :, i], state, t["weight"], t["bias"], "silu")
        assert relative_error(y, whole[:, :, i]) < TOLERANCE
    assert torch.equal(state, t["x"][:, :, -history:])


def test_step_reference_and_too_short_a_state(kernels: str) -> None:
    t = inputs(l=1)
    state = torch.randn(2, 37, 3)
    truth, new = conv1d_step_reference(t["x"][:, :, 0], state, t["weight"], t["bias"], "silu")
    y = conv1d_step(t["x"][:, :, 0], state, t["weight"], t["bias"], "silu")
    assert torch.allclose(y, truth, atol=1e-6)
    assert torch.equal(state, new)
    with pytest.raises(ValueError, match="3 are needed"):
        conv1d_step(t["x"][:, :, 0], state[:, :, :2], t["weight"])


def test_names_of_causal_conv1d(kernels: str) -> None:
    t = inputs(l=9)
    plain = causal_conv1d(**t, activation="silu")
    assert isinstance(plain, Tensor)
    named = causal_conv1d_fn(t["x"], t["weight"], t["bias"], activation="silu")
    assert isinstance(named, Tensor)
    assert torch.equal(plain, named)
    # rows 2 and 0 of a larger pool of states
    pool = torch.zeros(3, 37, 4)
    which = torch.tensor([2, 0])
    y = causal_conv1d_update(t["x"], pool, t["weight"], t["bias"], "silu", conv_state_indices=which)
    assert torch.allclose(y, plain, atol=1e-5)
    assert torch.equal(pool[which], t["x"][:, :, -4:])
    assert not pool[1].any()


def test_shapes_that_do_not_fit_are_refused(kernels: str) -> None:
    x, weight = torch.randn(2, 32, 5), torch.randn(32, 4)
    for wrong in (
        {"weight": weight[:16]},
        {"weight": weight, "bias": torch.zeros(16)},
        {"weight": weight, "seq_idx": torch.zeros(1, 5, dtype=torch.int32)},
    ):
        with pytest.raises(ValueError, match="do not fit together"):
            causal_conv1d(x, **wrong)
