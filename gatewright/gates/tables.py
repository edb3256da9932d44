"""Gate statistics as text, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gatewright.gates.statistics import CONTEXTS, LayerGates, quantiles, summary


def _tokens(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= value < 1e12 else f"{value:.3g}"


def context_name(tokens: int) -> str:
    """Return `4K` for 4096, and lengths that are no multiple of 1024 in full."""
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


def gates_table(
    layers: Sequence[LayerGates], title: str, dt_from: str, contexts: Sequence[int] = CONTEXTS
) -> str:
    """Return a table of tau per layer, then medians, shares and a histogram over all heads."""
    lines = [f"{title}  (tau in tokens, dt from {dt_from})"]
    beyond = [">" + context_name(c) for c in contexts]
    lines.append(
        f"{'layer':>5} {'heads':>6} {'min':>10} {'q25':>10} {'median':>10} {'q75':>10} {'max':>12}"
        + "".join(f" {b:>6}" for b in beyond)
    )
    for x in layers:
        q = list(quantiles(x.tau).values())
        shares = "".join(f" {(x.tau > c).mean():>6.1%}" for c in contexts)
        lines.append(
            f"{x.layer:>5} {x.tau.size:>6} {_tokens(q[0]):>10} {_tokens(q[1]):>10} "
            f"{_tokens(q[2]):>10} {_tokens(q[3]):>10} {_tokens(q[4]):>12}{shares}"
        )
    found = summary(layers, contexts)
    q = found["tau"]
    shares = "".join(f" {found['share_beyond'][str(c)]:>6.1%}" for c in contexts)
    lines.append(
        f"{'all':>5} {found['heads']:>6} {_tokens(q['min']):>10} {_tokens(q['q25']):>10} "
        f"{_tokens(q['median']):>10} {_tokens(q['q75']):>10} {_tokens(q['max']):>12}{shares}"
    )
    lines.append("heads by tau:")
    most = max(b["heads"] for b in found["histogram"])
    for bin_ in found["histogram"]:
        bar = "#" * round(40 * bin_["heads"] / most)
        low, high = _tokens(bin_["from_tokens"]), _tokens(bin_["to_tokens"])
        edges = low if low == high else f"{low} - {high}"
        lines.append(f"  {edges:>22} {bin_['heads']:>6} {bar}")
    return "\n".join(lines)


def drift_table(found: dict[str, Any]) -> str:
    """Return the paper's gate drift table: per layer, then over all heads."""
    lines = [
        "gate drift (medians over heads)",
        f"{'layer':>5} {'tau before':>12} {'tau after':>12} {'|delta alpha|':>14}",
    ]
    for row in [*found["layers"], {"layer": "all", **found}]:
        lines.append(
            f"{row['layer']:>5} {_tokens(row['tau_before']):>12} {_tokens(row['tau_after']):>12} "
            f"{row['alpha_change']:>14.2g}"
        )
    return "\n".join(lines)
