"""Statistics of a checkpoint's gates: effective lengths per layer and head, and their drift.

The drift of two checkpoints is the paper's table ("How representative is a static gate?"):
the median tau of each and the median absolute change of alpha over heads.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gatewright.errors import UserError
from gatewright.gates import definitions
from gatewright.gates.edits import Dts
from gatewright.gates.find import Gate, Gates

MAX_BINS = 64
CONTEXTS = (4096, 16384, 65536)
"""Context lengths for which the share of longer-remembering heads is given by default."""


@dataclasses.dataclass(frozen=True)
class LayerGates:
    """Effective lengths of one layer's heads.

    Where a head has many gates (Mamba-1 has one per state), its tau and alpha are medians.
    """

    layer: int
    kind: str
    tau: np.ndarray
    """(H,) tokens."""
    alpha: np.ndarray
    """(H,) decay per token."""
    dt: np.ndarray
    """(H,) step size used."""


def layer_gates(gates: Gates, dts: Dts | None = None) -> list[LayerGates]:
    """Return the effective lengths of every layer with gates, in layer order.

    Args:
        dts: measured mean dt by layer; softplus(dt_bias) where a layer has none.
    """
    return [_layer(gates, gate, (dts or {}).get(gate.layer)) for gate in gates.gates]


def _layer(gates: Gates, gate: Gate, measured: np.ndarray | None) -> LayerGates:
    if measured is None:
        dt = gate.dt(gates.checkpoint, gates.dt_limit)
    else:
        dt = measured.reshape(gate.n_heads, -1)
    A_log = gate.values(gates.checkpoint)
    tau = np.median(definitions.tau_from_dt(A_log, dt), axis=1)
    alpha = np.median(definitions.alpha(A_log, dt), axis=1)
    return LayerGates(gate.layer, gate.kind, tau, alpha, np.median(dt, axis=1))


def quantiles(values: np.ndarray) -> dict[str, float]:
    """Return minimum, quartiles, median and maximum."""
    names = ("min", "q25", "median", "q75", "max")
    at = (0.0, 0.25, 0.5, 0.75, 1.0)
    with np.errstate(invalid="ignore"):
        found = np.quantile(values, at)
    # Between inf and inf there is nothing to interpolate.
    found = np.where(np.isnan(found), np.quantile(values, at, method="lower"), found)
    return dict(zip(names, map(float, found), strict=True))


def histogram(tau: np.ndarray) -> list[dict[str, float]]:
    """Return how many heads fall between successive powers of two of tau (in tokens).

    tau of exactly 0 or inf have rows of their own, with equal ends.  Empty rows are left out
    where there would be more than `MAX_BINS`.
    """
    inside = tau[(tau > 0) & np.isfinite(tau)]
    rows: list[tuple[float, float, int]] = [(0.0, 0.0, int((tau == 0).sum()))]
    if inside.size:
        low = int(np.floor(np.log2(inside.min())))
        high = max(int(np.ceil(np.log2(inside.max()))), low + 1)
        edges = np.array(
            [math.ldexp(1.0, n) if n < 1024 else math.inf for n in range(low, high + 1)]
        )
        counts, _ = np.histogram(inside, bins=edges)
        rows += [
            (float(a), float(b), int(n))
            for a, b, n in zip(edges[:-1], edges[1:], counts, strict=True)
            if n or counts.size <= MAX_BINS
        ]
    rows.append((math.inf, math.inf, int(np.isinf(tau).sum())))
    return [{"from_tokens": a, "to_tokens": b, "heads": n} for a, b, n in rows if n or a != b]


def summary(layers: Sequence[LayerGates], contexts: Sequence[int] = CONTEXTS) -> dict[str, Any]:
    """Return statistics over all heads: quantiles, histogram, share beyond context lengths."""
    tau = np.concatenate([layer.tau for layer in layers])
    return {
        "heads": int(tau.size),
        "tau": quantiles(tau),
        "share_beyond": {str(c): float((tau > c).mean()) for c in contexts},
        "histogram": histogram(tau),
    }


def drift(before: Sequence[LayerGates], after: Sequence[LayerGates]) -> dict[str, Any]:
    """Return how far gates moved between two checkpoints of one model, per layer and in all.

    Raises:
        UserError: the checkpoints have gates in other layers, or other numbers of heads.
    """
    if [(x.layer, x.tau.size) for x in before] != [(x.layer, x.tau.size) for x in after]:
        raise UserError("the two checkpoints differ in layers or heads: drift needs one model")
    rows = [
        {
            "layer": a.layer,
            "tau_before": float(np.median(a.tau)),
            "tau_after": float(np.median(b.tau)),
            "alpha_change": float(np.median(np.abs(b.alpha - a.alpha))),
        }
        for a, b in zip(before, after, strict=True)
    ]
    change = np.concatenate([np.abs(b.alpha - a.alpha) for a, b in zip(before, after, strict=True)])
    return {
        "tau_before": float(np.median(np.concatenate([x.tau for x in before]))),
        "tau_after": float(np.median(np.concatenate([x.tau for x in after]))),
        "alpha_change": float(np.median(change)),
        "alpha_change_max": float(change.max()),
        "layers": rows,
    }


def as_json(
    layers: Sequence[LayerGates], source: Mapping[str, Any], contexts: Sequence[int] = CONTEXTS
) -> dict[str, Any]:
    """Return everything about a checkpoint's gates; `tools.scale_gates --from` reads it too."""
    return {
        **source,
        "summary": summary(layers, contexts),
        "layers": [
            {
                "layer": x.layer,
                "kind": x.kind,
                "median_tau": float(np.median(x.tau)),
                "tau": [float(t) for t in x.tau],
                "alpha": [float(a) for a in x.alpha],
                "dt": [float(d) for d in x.dt],
            }
            for x in layers
        ],
    }
