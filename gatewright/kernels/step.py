"""One token of the state space recurrence, for generation."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from gatewright.kernels import backend
from gatewright.kernels.native import step as native
from gatewright.kernels.native.ssd import rows
from gatewright.kernels.reference import discretize_dt
from gatewright.kernels.shapes import require


@torch.no_grad()
def state_step(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
) -> Tensor:
    """Advance `state` (b, h, p, n) by one token in place and return y (b, h, p).

    x (b, h, p), dt (b, h), A (h,), B and C (b, g, n), D (h,) or (h, p), z (b, h, p).  The cost
    does not depend on how many tokens came before.  For inference: no gradient is recorded.

    Raises:
        ValueError: shapes that do not fit together.
    """
    b, h, p, n = state.shape
    g = B.shape[1]
    require(
        "state_step",
        x=(x, (b, h, p)),
        dt=(dt, (b, h)),
        A=(A, (h,)),
        B=(B, (b, g, n)),
        C=(C, (b, g, n)),
        D=(D, (h,) if D is not None and D.dim() == 1 else (h, p)),
        z=(z, (b, h, p)),
        dt_bias=(dt_bias, (h,)),
    )
    if h % g:
        raise ValueError(f"state_step: {g} groups do not divide {h} heads")
    acc = torch.float64 if state.dtype == torch.float64 else torch.float32
    bias = None if dt_bias is None else dt_bias.to(acc)
    step = discretize_dt(dt.to(acc), bias, dt_softplus, dt_limit)
    xa = x.to(acc)
    library = backend.native_for(state)
    if library is not None and state.dtype == torch.float32 and state.is_contiguous():
        D_rows = None if D is None else (D if D.dim() == 2 else D[:, None]).float()
        y = native.state_step(
            library,
            state,
            rows(xa),
            step,
            A.float(),
            rows(B.float()),
            rows(C.float()),
            None if D_rows is None else D_rows.expand(h, p).contiguous(),
        )
        return (y if z is None else y * F.silu(z.float())).to(x.dtype)
    new = state if state.dtype == acc else state.to(acc)
    new.mul_(torch.exp(step * A.to(acc))[..., None, None])
    by_group = new.view(b, g, -1, n)
    by_group.addcmul_((xa * step[..., None]).view(b, g, -1, 1), B.to(acc)[:, :, None])
    y = (by_group @ C.to(acc)[..., None]).view(b, h, p)
    if new is not state:
        state.copy_(new)
    if D is not None:
        y = torch.addcmul(y, xa, (D if D.dim() == 2 else D[:, None]).to(acc))
    if z is not None:
        y = y * F.silu(z.to(acc))
    return y.to(x.dtype)
