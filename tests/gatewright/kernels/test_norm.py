"""The gated RMSNorm and the gate alone against their definitions."""

import pytest
import torch
import torch.nn.functional as F

from gatewright.kernels import gated_rms_norm, gated_rms_norm_reference
from gatewright.kernels.norm import silu_gate, swiglu
from tests.gatewright.kernels.oracle import outputs_and_gradients, relative_error, worst


@pytest.mark.parametrize("gate", ["none", "before the norm", "after the norm"])
@pytest.mark.parametrize(
    ("width", "group"), [(48, None), (48, 24), (48, 16), (40, 5), (7, 7), (512, 128)]
)
def test_values_and_gradients(kernels: str, gate: str, width: int, group: int | None) -> None:
    torch.manual_seed(0)
    t = {"x": torch.randn(3, 50, width), "weight": torch.randn(width)}
    if gate != "none":
        t["z"] = torch.randn(3, 50, width)
    options = {"eps": 1e-5, "group_size": group, "norm_before_gate": gate == "after the norm"}
    truth = outputs_and_gradients(gated_rms_norm_reference, t, torch.float64, **options)
    found = outputs_and_gradients(gated_rms_norm, t, torch.float32, **options)
    error, name = worst(found, truth)
    assert error < 1e-5, name


def test_gate_that_is_a_slice_of_a_wider_tensor(kernels: str) -> None:
    torch.manual_seed(0)
    joined, x, weight = torch.randn(2, 5, 40), torch.randn(2, 5, 16), torch.ones(16)
    z = joined[..., 8:24]
    strided = gated_rms_norm(x, weight, 1e-5, z)
    assert torch.allclose(strided, gated_rms_norm(x, weight, 1e-5, z.contiguous()))


def test_bf16(kernels: str) -> None:
    torch.manual_seed(0)
    t = {k: torch.randn(4, 64).bfloat16().float() for k in ("x", "z")} | {"weight": torch.ones(64)}
    half = {"x": torch.bfloat16, "z": torch.bfloat16}
    truth = outputs_and_gradients(gated_rms_norm_reference, t, torch.float64, eps=1e-5)
    found = outputs_and_gradients(gated_rms_norm, t, torch.float32, half, eps=1e-5)
    for name in truth:
        assert relative_error(found[name], truth[name]) < torch.finfo(torch.bfloat16).eps, name


def test_gate_alone(kernels: str) -> None:
    torch.manual_seed(0)
    t = {"y": torch.randn(2, 9, 3, 32), "z": 10 * torch.randn(2, 9, 3, 32)}
    truth = outputs_and_gradients(lambda y, z: y * F.silu(z), t, torch.float64)
    error, name = worst(outputs_and_gradients(silu_gate, t, torch.float32), truth)
    assert error < 1e-6, name


def test_a_group_must_divide_the_width(kernels: str) -> None:
    with pytest.raises(ValueError, match="group_size 5"):
        gated_rms_norm(torch.ones(1, 12), torch.ones(12), 1e-5, group_size=5)


def test_shapes_that_do_not_fit_are_refused(kernels: str) -> None:
    x = torch.randn(3, 32)
    with pytest.raises(ValueError, match="do not fit together"):
        gated_rms_norm(x, torch.ones(16), 1e-5)
    with pytest.raises(ValueError, match="do not fit together"):
        gated_rms_norm(x, torch.ones(32), 1e-5, z=torch.randn(2, 32))
    with pytest.raises(ValueError, match="33 channels"):
        swiglu(torch.randn(3, 33))
