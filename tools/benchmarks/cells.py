"""Recall cells' recurrences, forward + backward, against flash-linear-attention's naive forms.

Peers are the pure PyTorch references that flash-linear-attention ships beside its Triton
kernels, recurrent and chunkwise, loaded from an installed `fla-core` without importing the
package (which needs Triton).  Same shapes, same inputs, fp32; outputs are compared first.
The shapes are the recall harness's: 128 sequences of 96 tokens, state 32 x 32.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from gatewright import rank_one_scan
from gatewright.errors import UserError
from tools.benchmarks.harness import Options, Result, in_turn, result

SEQUENCES, TOKENS, WIDTH = 128, 96, 32
PEER = "fla-core"
INSTALL = (
    "it is not a dependency: `pip install --no-deps --target DIR fla-core==0.6.0`, "
    "then run with PYTHONPATH=DIR"
)


def naive(name: str) -> ModuleType:
    """Load `fla/ops/<name>/naive.py` by its path.

    Raises:
        UserError: fla-core is not installed, or this version has no such file.
    """
    spec = importlib.util.find_spec("fla")
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"the benchmark's peer {PEER} is not installed; {INSTALL}")
    path = Path(next(iter(spec.submodule_search_locations))) / "ops" / name / "naive.py"
    if not path.is_file():
        raise UserError(f"{path}: missing in this version of {PEER}; {INSTALL}")
    found = importlib.util.spec_from_file_location(f"fla_{name.replace('/', '_')}_naive", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def inputs() -> dict[str, Tensor]:
    """Return every case's inputs in the harness's shapes, keys normalised."""
    g = torch.Generator().manual_seed(0)
    shape = (SEQUENCES, TOKENS, WIDTH)
    q, k, v = (torch.randn(shape, generator=g) for _ in range(3))
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    beta = torch.rand(SEQUENCES, TOKENS, 1, generator=g)
    log_w = -0.6 * torch.rand(shape, generator=g)
    return {"q": q, "k": k, "v": v, "beta": beta, "log_w": log_w, "log_decay": log_w[..., :1]}


Side = Callable[..., Tensor]
SCALE = WIDTH**0.5  # the peers divide q by this


@dataclasses.dataclass(frozen=True)
class Case:
    """A recurrence: our form, where the peers' are, and which inputs all of them take.

    Attributes:
        peers: functions of `naive(module)`, by what they are.
        theirs: calls one of them with our inputs (they have a head axis, here of one).
    """

    name: str
    inputs: tuple[str, ...]
    ours: Side
    module: str
    peers: dict[str, str]
    theirs: Callable[..., Tensor]


def _head_first(f: Side, *args: Tensor) -> Tensor:
    return f(*(x[:, None] for x in args))[0][:, 0]


def _head_third(f: Side, *args: Tensor) -> Tensor:
    return f(*(x[:, :, None] for x in args))[0][:, :, 0]


CASES = (
    Case(
        "delta rule",
        ("q", "k", "v", "beta"),
        rank_one_scan.delta_scan,
        "delta_rule",
        {"recurrent": "delta_rule_recurrence", "chunkwise": "delta_rule_chunkwise"},
        lambda f, q, k, v, beta: _head_first(f, q * SCALE, k, v, beta[..., 0]),
    ),
    Case(
        "gated delta rule, one decay a token",
        ("q", "k", "v", "beta", "log_decay"),
        rank_one_scan.delta_scan,
        "gated_delta_rule",
        {"recurrent": "naive_recurrent_gated_delta_rule"},
        lambda f, q, k, v, beta, g: _head_third(f, q * SCALE, k, v, beta[..., 0], g[..., 0]),
    ),
    Case(
        "gated delta rule, one decay a token",
        ("q", "k", "v", "beta", "log_decay"),
        rank_one_scan.delta_scan,
        "gated_delta_rule",
        {"chunkwise": "naive_chunk_gated_delta_rule"},
        lambda f, q, k, v, beta, g: _head_third(f, q * SCALE, k, v, g[..., 0], beta[..., 0]),
    ),
    Case(
        "diagonal decay",
        ("q", "k", "v", "log_w"),
        rank_one_scan.scan,
        "gla",
        {"recurrent": "naive_recurrent_gla"},
        lambda f, q, k, v, w: _head_third(f, q * SCALE, k, v, w),
    ),
    Case(
        "diagonal plus rank one",
        ("q", "k", "v", "beta", "log_w"),
        lambda q, k, v, beta, w: rank_one_scan.scan(q, k, v, w, beta * k, k),
        "generalized_delta_rule/dplr",
        {"recurrent": "dplr_recurrence", "chunkwise": "dplr_chunkwise"},
        lambda f, q, k, v, beta, w: _head_first(f, q * SCALE, k, v, beta * k, -k, w),
    ),
)


def run(options: Options) -> Iterator[Result]:
    torch.set_num_threads(options.threads)
    values = inputs()
    weight = torch.randn(SEQUENCES, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))

    def step(f: Side, args: list[Tensor]) -> tuple[Tensor, ...]:
        out = f(*args)
        return out, *torch.autograd.grad((out * weight).sum(), args)

    for case in CASES:
        args = [values[w].clone().requires_grad_() for w in case.inputs]
        want = step(case.ours, args)
        for kind, name in case.peers.items():
            peer = functools.partial(case.theirs, getattr(naive(case.module), name))
            for x, y in zip(step(peer, args), want, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-3)
            mine, other = in_turn(
                options.repeats,
                functools.partial(step, case.ours, args),
                functools.partial(step, peer, args),
            )
            yield result(
                options,
                f"{case.name}, forward + backward",
                mine * 1e3,
                other * 1e3,
                "ms",
                f"{PEER} naive {kind}",
            )
