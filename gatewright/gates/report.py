"""What an edit did: effective lengths before and after, and what rounding cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gatewright.checkpoints import dtypes
from gatewright.gates import definitions
from gatewright.gates.edits import Dts, Plan
from gatewright.gates.find import Gates
from gatewright.gates.widening import widened_type


def edit_report(plan: Plan, gates: Gates, dts: Dts, *, fp32: bool = False) -> dict[str, Any]:
    """Return an edit's effect per layer and over all gates, as it is stored.

    Args:
        dts: measured dt by layer; empty to use softplus(dt_bias).
        fp32: every A_log that is narrower is stored in fp32, edited or not.

    Returns:
        `tau_from` (`weights` or `data`), `median_tau_before`, `median_tau_after` (tokens),
        `rounding` (stored types, median and largest relative error of the decay rate), and
        `layers`, a row each: layer, heads, edited_heads, stored_as, tau_before, tau_after
        (medians).
    """
    rows: list[dict[str, Any]] = []
    before: list[np.ndarray] = []
    after: list[np.ndarray] = []
    errors: list[np.ndarray] = []
    stored_types = set()
    for gate in gates.gates:
        stored = widened_type(gate.A_log) if fp32 else gate.A_log.dtype
        stored_types.add(stored)
        old = gate.values(gates.checkpoint)
        raw = plan.edited(gates, gate, gate.A_log, stored)
        new = dtypes.decode(raw, stored).reshape(old.shape)
        measured = dts.get(gate.layer)
        if measured is None:
            dt = gate.dt(gates.checkpoint, gates.dt_limit)
        else:
            dt = measured.reshape(gate.n_heads, -1)
        tau_old, tau_new = definitions.tau_from_dt(old, dt), definitions.tau_from_dt(new, dt)
        touched = plan.offsets[gate.layer] != 0
        if touched.any():
            exact = plan.exact(gate, old)[touched]
            errors.append(np.abs(np.expm1(new[touched] - exact)).astype(np.float32).ravel())
        rows.append(
            {
                "layer": gate.layer,
                "heads": gate.n_heads,
                "edited_heads": int(touched.sum()),
                "stored_as": stored,
                "tau_before": float(np.median(tau_old)),
                "tau_after": float(np.median(tau_new)),
            }
        )
        with np.errstate(over="ignore"):
            before.append(tau_old.astype(np.float32).ravel())
            after.append(tau_new.astype(np.float32).ravel())
    all_errors = np.concatenate(errors) if errors else np.zeros(1, np.float32)
    return {
        "tau_from": "data" if dts else "weights",
        "median_tau_before": float(np.median(np.concatenate(before))),
        "median_tau_after": float(np.median(np.concatenate(after))),
        "rounding": {
            "stored_as": sorted(stored_types),
            "decay_rate_relative_error_median": float(np.median(all_errors)),
            "decay_rate_relative_error_max": float(all_errors.max()),
        },
        "layers": rows,
    }


def format_edit(label: str, report: dict[str, Any]) -> str:
    """Return an edit's effect as a few lines of text: a summary, then a line per layer."""
    rounding = report["rounding"]
    lines = [
        f"{label}: median tau {report['median_tau_before']:.4g} -> "
        f"{report['median_tau_after']:.4g} "
        f"tokens (dt from {report['tau_from']}); stored as {'/'.join(rounding['stored_as'])}, "
        f"decay rate off by at most {rounding['decay_rate_relative_error_max']:.2g} (relative)"
    ]
    rows: Sequence[dict[str, Any]] = report["layers"]
    lines.append(f"  {'layer':>5} {'heads':>6} {'edited':>6} {'tau before':>12} {'tau after':>12}")
    lines += [
        f"  {r['layer']:>5} {r['heads']:>6} {r['edited_heads']:>6} "
        f"{r['tau_before']:>12.4g} {r['tau_after']:>12.4g}"
        for r in rows
    ]
    return "\n".join(lines)
