"""The SSD scan against the plain float64 recurrence: values and every input's gradient."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gatewright.kernels import ssd_reference, ssd_scan
from tests.gatewright.kernels.oracle import outputs_and_gradients, relative_error, worst

TOLERANCE = 1e-5  # relative to the largest true value; the typical error is 3e-7


def inputs(
    b: int = 2,
    l: int = 70,
    h: int = 4,
    p: int = 8,
    g: int = 1,
    n: int = 16,
    scale: float = 1.0,
    extras: tuple[str, ...] = ("D",),
    seed: int = 0,
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Random inputs in the ranges of Mamba-2's initialisation; `scale` strengthens gates."""
    r = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=r)

    t = {
        "x": randn(b, l, h, p),
        "dt": randn(b, l, h),
        "A": -(1 + 15 * torch.rand(h, generator=r)) * scale,
        "B": randn(b, l, g, n),
        "C": randn(b, l, g, n),
        "dt_bias": randn(h) * 0.5 - 3,
    }
    if "D" in extras:
        t["D"] = randn(h)
    if "D2" in extras:
        t["D"] = randn(h, p)
    if "z" in extras:
        t["z"] = randn(b, l, h, p)
    if "initial_states" in extras:
        t["initial_states"] = randn(b, h, p, n)
    seq_idx = None
    if "seq_idx" in extras:
        seq_idx = (torch.rand(b, l, generator=r) < 0.06).int().cumsum(1).int()
    return t, seq_idx


def compare(t: dict[str, Tensor], seq_idx: Tensor | None, **options: Any) -> tuple[float, str]:
    options = {"chunk_size": 64, "dt_softplus": True, "return_final_states": True} | options
    options["seq_idx"] = seq_idx
    truth = outputs_and_gradients(ssd_reference, t, torch.float64, **options)
    return worst(outputs_and_gradients(ssd_scan, t, torch.float32, **options), truth)


@pytest.mark.parametrize("length", [0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 129, 200])
def test_any_length(kernels: str, length: int) -> None:
    error, name = compare(*inputs(b=1, l=length, h=2, p=4, n=5))
    assert error < TOLERANCE, name


@pytest.mark.parametrize(
    "sizes",
    [
        {"h": 1, "p": 1, "n": 1},
        {"h": 3, "p": 5, "n": 7},
        {"h": 4, "p": 16, "n": 16, "g": 2},
        {"h": 6, "p": 20, "n": 33, "g": 3},
        {"h": 4, "p": 64, "n": 128, "g": 4},
        {"b": 3, "h": 2, "p": 96, "n": 48},
    ],
)
def test_any_shape(kernels: str, sizes: dict[str, int]) -> None:
    error, name = compare(*inputs(**sizes))
    assert error < TOLERANCE, name


@pytest.mark.parametrize(
    "extras",
    [
        (),
        ("D2",),
        ("D", "z"),
        ("D", "initial_states"),
        ("D", "seq_idx"),
        ("D2", "z", "initial_states", "seq_idx"),
    ],
)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 64.0])
def test_options_under_vanishing_plain_and_strong_gates(
    kernels: str, extras: tuple[str, ...], scale: float
) -> None:
    error, name = compare(*inputs(l=150, g=2, scale=scale, extras=extras))
    assert error < TOLERANCE, name


def test_strong_gates_keep_neighbours_apart(kernels: str) -> None:
    """One huge step, then tiny ones: their decay is a small difference of large sums."""
    t, _ = inputs(b=1, l=64, h=2, extras=())
    del t["dt_bias"]
    t["dt"] = torch.full((1, 64, 2), 1e-4)
    t["dt"][:, 5] = 30.0
    t["A"] = torch.tensor([-1024.0, -300.0])
    error, name = compare(t, None, dt_softplus=False)
    assert error < TOLERANCE, name


def test_no_decay_at_all(kernels: str) -> None:
    t, _ = inputs(l=130, extras=("initial_states",))
    t["A"] = -torch.zeros(4)
    error, name = compare(t, None)
    assert error < TOLERANCE, name


@pytest.mark.parametrize("dt_limit", [(0.02, 0.08), (0.0, 0.05), (0.03, math.inf)])
def test_dt_limit(kernels: str, dt_limit: tuple[float, float]) -> None:
    error, name = compare(*inputs(), dt_limit=dt_limit)
    assert error < TOLERANCE, name


def test_without_softplus_bias_and_final_states(kernels: str) -> None:
    t, _ = inputs()
    del t["dt_bias"]
    t["dt"] = t["dt"].abs() * 0.1
    error, name = compare(t, None, dt_softplus=False, return_final_states=False)
    assert error < TOLERANCE, name


def test_a_reset_equals_separate_sequences(kernels: str) -> None:
    t, _ = inputs(b=1, l=90)
    seq_idx = (torch.arange(90) >= 37).int()[None]
    packed = ssd_scan(**t, seq_idx=seq_idx, dt_softplus=True)
    assert isinstance(packed, Tensor)
    per_token = ("x", "dt", "B", "C")
    for part in (slice(0, 37), slice(37, 90)):
        alone = ssd_scan(
            **{k: v[:, part] if k in per_token else v for k, v in t.items()}, dt_softplus=True
        )
        assert isinstance(alone, Tensor)
        assert relative_error(packed[:, part], alone.double()) < 1e-6


def test_a_scan_in_two_parts_equals_one(kernels: str) -> None:
    t, _ = inputs(l=100)
    whole, final = ssd_scan(**t, dt_softplus=True, return_final_states=True)
    per_token = ("x", "dt", "B", "C")

    def part(s: slice) -> dict[str, Tensor]:
        return {k: v[:, s] if k in per_token else v for k, v in t.items()}

    first, state = ssd_scan(**part(slice(0, 41)), dt_softplus=True, return_final_states=True)
    second, last = ssd_scan(
        **part(slice(41, 100)), dt_softplus=True, initial_states=state, return_final_states=True
    )
    assert relative_error(torch.cat([first, second], 1), whole.double()) < 1e-6
    assert relative_error(last, final.double()) < 1e-6


def test_strided_views_as_a_mixer_passes_them(kernels: str) -> None:
    t, _ = inputs(b=2, l=40, h=2, p=8, n=16)
    joined = torch.cat([t["x"].flatten(2), t["B"].flatten(2), t["C"].flatten(2)], -1)
    x, B, C = joined.split([16, 16, 16], -1)
    views = t | {"x": x.unflatten(-1, (2, 8)), "B": B.unflatten(-1, (1, 16))}
    views["C"] = C.unflatten(-1, (1, 16))
    assert not views["x"].is_contiguous()
    y, plain = ssd_scan(**views, dt_softplus=True), ssd_scan(**t, dt_softplus=True)
    assert isinstance(y, Tensor)
    assert isinstance(plain, Tensor)
    assert torch.equal(y, plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_with_fp32_sums(kernels: str, dtype: torch.dtype) -> None:
    """Rounding of inputs and outputs remains; the sums over 300 tokens add nothing to it."""
    t, _ = inputs(l=300, scale=0.01)
    half = dict.fromkeys(("x", "B", "C"), dtype)
    rounded = {k: v.to(half.get(k, v.dtype)).float() for k, v in t.items()}
    options: dict[str, Any] = {"dt_softplus": True, "return_final_states": True}
    truth = outputs_and_gradients(ssd_reference, rounded, torch.float64, **options)
    found = outputs_and_gradients(ssd_scan, t, torch.float32, half, **options)
    assert found["out0"].dtype == dtype
    assert relative_error(found["out1"], truth["out1"]) < TOLERANCE  # the state stays fp32
    unit = torch.finfo(dtype).eps
    for name in truth:
        assert relative_error(found[name], truth[name]) < unit, name


def test_float64_goes_through_the_same_code(kernels: str) -> None:
    t, seq_idx = inputs(l=70, extras=("D", "seq_idx", "initial_states"))
    options: dict[str, Any] = {"seq_idx": seq_idx, "dt_softplus": True}
    truth = outputs_and_gradients(ssd_reference, t, torch.float64, **options)
    found = outputs_and_gradients(ssd_scan, t, torch.float64, **options)
    assert worst(found, truth)[0] < 1e-12


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_share_one_group_without_changing_the_result(kernels: str, threads: int) -> None:
    t, _ = inputs(b=1, h=4)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        error, name = compare(t, None)
    finally:
        torch.set_num_threads(before)
    assert error < TOLERANCE, name


def test_a_context_of_65536_tokens(kernels: str) -> None:
    """Slow decay over 64K tokens, compared with a float64 scan that is exact to 1e-12."""
    t, _ = inputs(b=1, l=65536, h=2, p=4, n=4, scale=1e-3)
    options: dict[str, Any] = {"dt_softplus": True, "return_final_states": True}
    truth = outputs_and_gradients(ssd_scan, t, torch.float64, **options)
    found = outputs_and_gradients(ssd_scan, t, torch.float32, **options)
    error, name = worst(found, truth)
    assert error < 1e-5, name


def test_shapes_that_disagree_are_named(kernels: str) -> None:
    t, _ = inputs()
    t["B"] = t["B"][:, :-1]
    with pytest.raises(ValueError, match=r"B \(2, 69, 1, 16\)"):
        ssd_scan(**t)


@pytest.mark.parametrize(
    ("name", "shape"), [("z", (2, 4, 3, 8)), ("initial_states", (1, 3, 8, 6)), ("seq_idx", (1, 5))]
)
def test_what_goes_along_must_fit(kernels: str, name: str, shape: tuple[int, ...]) -> None:
    x, dt, BC = torch.randn(2, 5, 3, 8), torch.rand(2, 5, 3), torch.randn(2, 5, 1, 6)
    with pytest.raises(ValueError, match=name):
        ssd_scan(x, dt, -torch.ones(3), BC, BC, 16, **{name: torch.zeros(shape)})
