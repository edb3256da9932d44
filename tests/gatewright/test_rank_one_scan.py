"""The fast forms of the rank-one recurrence against it in float64, gradients too."""

import pytest
import torch
from torch import Tensor

from gatewright import rank_one_scan
from gatewright.kernels import backend
from gatewright.rank_one_scan import MIN_LOG_DECAY, delta_scan, recurrence, scan

# lengths below, at and beyond the kernel's kept states; widths that fill no vector
SHAPES = [(3, 37, 32, 32), (2, 17, 6, 5), (2, 1, 16, 8), (2, 33, 64, 64), (2, 16, 20, 12)]


@pytest.fixture(params=["cpp", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cpp" and backend.native_library() is None:
        pytest.skip(backend.why())
    monkeypatch.setenv("GATEWRIGHT_KERNELS", request.param)
    return request.param


def inputs(shape: tuple[int, ...], decay: str) -> dict[str, Tensor]:
    rows, length, key, value = shape
    g = torch.Generator().manual_seed(length)
    q, k, a, b = (torch.randn(rows, length, key, generator=g) * 0.8 / key**0.5 for _ in range(4))
    strength = {"strong": MIN_LOG_DECAY, "none": 0.0}.get(decay, -1.0)
    width = 1 if decay == "scalar" else key
    return {
        "q": q,
        "k": k,
        "v": torch.randn(rows, length, value, generator=g),
        "log_w": strength * torch.rand(rows, length, width, generator=g),
        "a": a,
        "b": b,
        "beta": torch.rand(rows, length, 1, generator=g),
    }


def naive_delta(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_w: Tensor | None = None
) -> Tensor:
    log_w = torch.zeros_like(beta) if log_w is None else log_w
    return recurrence(q, k, beta * v, log_w, beta * k * log_w.exp(), k)


FORMS = {
    "diagonal": (scan, recurrence, ("q", "k", "v", "log_w")),
    "general": (scan, recurrence, ("q", "k", "v", "log_w", "a", "b")),
    "delta": (delta_scan, naive_delta, ("q", "k", "v", "beta")),
    "gated delta": (delta_scan, naive_delta, ("q", "k", "v", "beta", "log_w")),
}


@pytest.mark.parametrize("decay", ["vector", "scalar", "none", "strong"])
@pytest.mark.parametrize("form", FORMS)
def test_output_and_gradients_equal_the_float64_recurrence(
    form: str, decay: str, kernels: str
) -> None:
    fast, slow, names = FORMS[form]
    for shape in SHAPES:
        given = [inputs(shape, decay)[n] for n in names]
        mine = [t.clone().requires_grad_() for t in given]
        exact = [t.double().requires_grad_() for t in given]
        got, want = fast(*mine), slow(*exact)
        weight = torch.randn(want.shape, generator=torch.Generator().manual_seed(1))
        found = torch.autograd.grad((got * weight).sum(), mine)
        expected = torch.autograd.grad((want * weight).sum(), exact)
        # dividing by the decays (chunks, without a compiler) costs digits when they are strong
        tolerance = 1e-5 if kernels == "cpp" else 1e-3 if decay == "strong" else 5e-5
        for name, x, y in zip(("o", *names), (got, *found), (want, *expected), strict=True):
            assert x.dtype == torch.float32
            error = (x - y).abs().max() / y.abs().max().clamp_min(1e-3)
            assert error < tolerance, (shape, name, float(error))


def test_the_kernel_runs_where_it_says_and_leaves_the_rest(
    kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it is not made for (float64, wide keys, nothing at all) goes to the chunked form."""
    used: list[int] = []
    real = rank_one_scan.chunked
    monkeypatch.setattr(rank_one_scan, "chunked", lambda *args: used.append(1) or real(*args))
    x = inputs((2, 5, 8, 8), "vector")
    args = [x[n] for n in ("q", "k", "v", "log_w")]
    scan(*args)
    assert len(used) == (kernels == "torch")
    scan(*(t.double() for t in args))
    wide = inputs((1, 5, 80, 8), "vector")
    scan(*(wide[n] for n in ("q", "k", "v", "log_w")))
    scan(*(t[:0] for t in args))
    assert len(used) == (kernels == "torch") + 3


def test_threads_do_not_change_a_bit(kernels: str) -> None:
    x = inputs((9, 40, 32, 32), "vector")
    args = [x[n].requires_grad_() for n in ("q", "k", "v", "beta", "log_w")]
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            o = delta_scan(*args)
            results.append((o, *torch.autograd.grad(o.sum(), args)))
    finally:
        torch.set_num_threads(before)
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two) or kernels == "torch"
        torch.testing.assert_close(one, two)


def test_no_states_are_kept_when_no_gradient_is_asked(kernels: str) -> None:
    x = inputs((2, 40, 32, 32), "vector")
    args = [x[n] for n in ("q", "k", "v", "beta", "log_w")]
    with torch.no_grad():
        plain = delta_scan(*args)
    assert not plain.requires_grad
    torch.testing.assert_close(plain, delta_scan(*(t.requires_grad_() for t in args)))


def test_shapes_that_do_not_fit_are_refused() -> None:
    k, v, one = torch.randn(2, 5, 4), torch.randn(2, 5, 3), torch.zeros(2, 5, 1)
    with pytest.raises(ValueError, match="both a and b"):
        scan(k, k, v, one, k)
    for wrong in (torch.zeros(2, 5, 2), torch.zeros(2, 4, 1)):
        with pytest.raises(ValueError, match="do not fit together"):
            scan(k, k, v, wrong)
    with pytest.raises(ValueError, match="do not fit together"):
        scan(k[:1], k, v, one)
    with pytest.raises(ValueError, match="beta"):
        delta_scan(k, k, v, one[:1])
