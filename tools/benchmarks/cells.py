"""Recall cells' recurrences, forward + backward, against flash-linear-attention's naive forms.

Peers are the pure PyTorch references that flash-linear-attention ships beside its Triton
kernels, recurrent and chunkwise, loaded from an installed `fla-core` without importing the
package (which needs Triton).  Same shapes, same inputs, fp32; outputs are compared first.
The shapes are the recall harness's: 128 sequences of 96 tokens, state 32 x 32.
"""

from __future__ import annotations

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
    """Return q, k, v, log_w, a, b of the harness's shapes, keys normalised."""
    g = torch.Generator().manual_seed(0)
    shape = (SEQUENCES, TOKENS, WIDTH)
    q, k, v = (torch.randn(shape, generator=g) for _ in range(3))
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    beta = torch.rand(SEQUENCES, TOKENS, 1, generator=g)
    log_w = -0.6 * torch.rand(shape, generator=g)
    return {"q": q, "k": k, "v": v, "beta": beta, "log_w": log_w}


Side = Callable[..., Tensor]


def sides(name: str) -> tuple[Side, dict[str, Side], tuple[str, ...]]:
    """Return our fast form, the peers by name, and the inputs a side takes."""
    scale = WIDTH**0.5  # the peers divide q by this; they have a head axis of one

    def head(x: Tensor) -> Tensor:
        return x[:, None]

    if name == "delta rule":
        module = naive("delta_rule")

        def ours(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
            none = torch.zeros_like(beta)
            return rank_one_scan.chunked(q, k, beta * v, none, beta * k, k)

        def theirs(f: Callable[..., tuple[Tensor, Tensor]]) -> Side:
            def side(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
                return f(head(q * scale), head(k), head(v), head(beta[..., 0]))[0][:, 0]

            return side

        peers = {
            "recurrent": theirs(module.delta_rule_recurrence),
            "chunkwise": theirs(module.delta_rule_chunkwise),
        }
        return ours, peers, ("q", "k", "v", "beta")

    module = naive("generalized_delta_rule/dplr")

    def general(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_w: Tensor) -> Tensor:
        return rank_one_scan.chunked(q, k, v, log_w, beta * k, k)

    def their(f: Callable[..., tuple[Tensor, Tensor]]) -> Side:
        def side(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_w: Tensor) -> Tensor:
            args = (q * scale, k, v, beta * k, -k, log_w)
            return f(*(head(x) for x in args))[0][:, 0]

        return side

    peers = {"recurrent": their(module.dplr_recurrence), "chunkwise": their(module.dplr_chunkwise)}
    return general, peers, ("q", "k", "v", "beta", "log_w")


def run(options: Options) -> Iterator[Result]:
    torch.set_num_threads(options.threads)
    values = inputs()
    for name in ("delta rule", "diagonal plus rank one"):
        ours, peers, wanted = sides(name)
        args = [values[w].clone().requires_grad_() for w in wanted]
        weight = torch.randn(SEQUENCES, TOKENS, WIDTH)

        def step(
            f: Side, args: list[Tensor] = args, weight: Tensor = weight
        ) -> tuple[Tensor, tuple[Tensor, ...]]:
            out = f(*args)
            return out, torch.autograd.grad((out * weight).sum(), args)

        want, gradients = step(ours)
        for kind, peer in peers.items():
            got, theirs = step(peer)
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
            for x, y in zip(theirs, gradients, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-2)

            def our_side(ours: Side = ours, step: Callable = step) -> object:
                return step(ours)

            def peer_side(peer: Side = peer, step: Callable = step) -> object:
                return step(peer)

            mine, other = in_turn(options.repeats, our_side, peer_side)
            yield result(
                options,
                f"{name}, forward + backward",
                mine * 1e3,
                other * 1e3,
                "ms",
                f"{PEER} naive {kind}",
            )
