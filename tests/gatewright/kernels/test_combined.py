"""The mixers' functions, under mamba_ssm's names, against references composed in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gatewright.kernels import (
    causal_conv1d_reference,
    gated_rms_norm_reference,
    mamba_chunk_scan_combined,
    mamba_split_conv1d_scan_combined,
    ssd_reference,
    ssd_scan,
)
from tests.gatewright.kernels.oracle import outputs_and_gradients, relative_error, worst
from tests.gatewright.kernels.test_ssd import inputs

H, P, N = 4, 8, 16


def mixer_reference(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    ngroups: int,
    rmsnorm_weight: Tensor | None = None,
    outproj_weight: Tensor | None = None,
    norm_before_gate: bool = False,
    **options: Any,
) -> Tensor:
    """What a Mamba-2 mixer does between its projections, in the references' words."""
    inner, gn = H * P, ngroups * N
    z, xBC, dt = zxbcdt.split([inner, inner + 2 * gn, H], dim=-1)
    xBC = causal_conv1d_reference(
        xBC.transpose(1, 2), conv1d_weight, conv1d_bias, "silu", options["seq_idx"]
    ).transpose(1, 2)
    x, B, C = xBC.split([inner, gn, gn], dim=-1)
    y = ssd_reference(
        x.unflatten(-1, (H, P)),
        dt,
        A,
        B.unflatten(-1, (ngroups, N)),
        C.unflatten(-1, (ngroups, N)),
        D=D,
        z=None if rmsnorm_weight is not None else z.unflatten(-1, (H, P)),
        dt_bias=dt_bias,
        seq_idx=options["seq_idx"],
        dt_softplus=True,
        dt_limit=options["dt_limit"],
    ).flatten(2)
    if rmsnorm_weight is not None:
        y = gated_rms_norm_reference(y, rmsnorm_weight, 1e-6, z, inner // ngroups, norm_before_gate)
    return y if outproj_weight is None else y @ outproj_weight.T


def mixer_inputs(ngroups: int, length: int, norm: bool, per_channel_D: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    width = H * P + 2 * ngroups * N
    t = {
        "zxbcdt": torch.randn(2, length, H * P + width + H),
        "conv1d_weight": torch.randn(width, 4) * 0.5,
        "conv1d_bias": torch.randn(width),
        "dt_bias": torch.randn(H) - 3,
        "A": -torch.rand(H) * 15 - 1,
        "D": torch.randn(H, P) if per_channel_D else torch.randn(H),
    }
    if norm:
        t["rmsnorm_weight"] = torch.randn(H * P)
        t["outproj_weight"] = torch.randn(24, H * P)
    return t


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("ngroups", [1, 2])
@pytest.mark.parametrize("dt_limit", [(0.0, float("inf")), (0.02, 0.2)])
def test_mixer(
    kernels: str, norm: bool, packed: bool, ngroups: int, dt_limit: tuple[float, float]
) -> None:
    t = mixer_inputs(ngroups, 70, norm, per_channel_D=packed)
    seq_idx = (torch.rand(2, 70) < 0.06).int().cumsum(1).int() if packed else None
    options: dict[str, Any] = {"ngroups": ngroups, "seq_idx": seq_idx, "dt_limit": dt_limit}
    options["norm_before_gate"] = False
    truth = outputs_and_gradients(mixer_reference, t, torch.float64, **options)
    found = outputs_and_gradients(
        mamba_split_conv1d_scan_combined,
        t,
        torch.float32,
        chunk_size=64,
        headdim=None if packed else P,
        **options,
    )
    error, name = worst(found, truth)
    assert error < 1e-5, name


def test_mixer_with_states_is_the_same_function(kernels: str) -> None:
    """Asking for final states takes another way through the code."""
    t = mixer_inputs(2, 33, True, False)
    common: dict[str, Any] = {"chunk_size": 64, "headdim": P, "ngroups": 2}
    plain = mamba_split_conv1d_scan_combined(**t, **common)
    y, state = mamba_split_conv1d_scan_combined(**t, **common, return_final_states=True)
    assert isinstance(plain, Tensor)
    assert state.shape == (2, H, P, N)
    assert relative_error(y, plain.double()) < 1e-5


def test_mixer_in_bf16(kernels: str) -> None:
    t = mixer_inputs(1, 50, True, False)
    options: dict[str, Any] = {"chunk_size": 64, "headdim": P}
    full = mamba_split_conv1d_scan_combined(**t, **options)
    names = ("zxbcdt", "conv1d_weight", "conv1d_bias", "rmsnorm_weight", "outproj_weight")
    half = {k: v.bfloat16() if k in names else v for k, v in t.items()}
    y = mamba_split_conv1d_scan_combined(**half, **options)
    assert isinstance(y, Tensor)
    assert isinstance(full, Tensor)
    assert y.dtype == torch.bfloat16
    assert relative_error(y, full.double()) < 0.05


def test_head_dim_must_be_known(kernels: str) -> None:
    with pytest.raises(ValueError, match="headdim"):
        mamba_split_conv1d_scan_combined(**mixer_inputs(1, 4, False, False), chunk_size=64)


@pytest.mark.parametrize("name", ["zxbcdt", "conv1d_weight", "conv1d_bias", "dt_bias", "A"])
def test_a_mixer_argument_that_does_not_fit_is_refused(kernels: str, name: str) -> None:
    t = mixer_inputs(2, 9, True, False)
    t[name] = t[name][..., :-1] if name == "zxbcdt" else t[name][:-1]
    with pytest.raises(ValueError, match=r"mamba_split_conv1d_scan_combined: .*(is not|fit)"):
        mamba_split_conv1d_scan_combined(**t, chunk_size=64, headdim=P, ngroups=2)


def test_states_at_the_ends_of_packed_sequences(kernels: str) -> None:
    t, _ = inputs(b=1, l=50)
    cu_seqlens = torch.tensor([0, 20, 45])  # the last five tokens are padding
    y, _, states = mamba_chunk_scan_combined(
        **t,
        chunk_size=64,
        cu_seqlens=cu_seqlens,
        dt_softplus=True,
        return_final_states=True,
        return_varlen_states=True,
    )
    per_token = ("x", "dt", "B", "C")
    for i, part in enumerate((slice(0, 20), slice(20, 45))):
        alone, state = ssd_scan(
            **{k: v[:, part] if k in per_token else v for k, v in t.items()},
            dt_softplus=True,
            return_final_states=True,
        )
        assert torch.equal(states[i], state[0])
        assert torch.equal(y[:, part], alone)
    assert states.shape[0] == 2
    with pytest.raises(ValueError, match="cu_seqlens"):
        mamba_chunk_scan_combined(**t, chunk_size=64, return_varlen_states=True)


@pytest.mark.parametrize("norm", [False, True])
def test_mixer_takes_tokens_first_as_they_lie(kernels: str, norm: bool) -> None:
    """Megatron's (l, b, d) activations, transposed: the same numbers, and laid out alike."""
    t = mixer_inputs(2, 70, norm, per_channel_D=False)
    options: dict[str, Any] = {"chunk_size": 64, "headdim": P, "ngroups": 2}
    options["norm_before_gate"] = False

    def tokens_first(zxbcdt: Tensor, **more: Tensor) -> Tensor:
        lbd = zxbcdt.transpose(0, 1).contiguous()
        y = mamba_split_conv1d_scan_combined(lbd.transpose(0, 1), **more, **options)
        assert isinstance(y, Tensor)
        assert kernels == "torch" or y.transpose(0, 1).is_contiguous()
        return y

    t.pop("outproj_weight", None)
    plain = outputs_and_gradients(mamba_split_conv1d_scan_combined, t, torch.float32, **options)
    found = outputs_and_gradients(tokens_first, t, torch.float32)
    assert worst(found, plain)[0] < 1e-6
