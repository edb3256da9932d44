"""What the capacity law predicts that a recurrent state can recall of a pool of k tools.

A prediction from the checkpoint's sizes alone, never a measurement: it counts each tool as one
fact, asked for once (task `ar` of `gatewright.recall_law`).  A real tool is hundreds of tokens
that the same state must carry, so that a model is expected below it; but it is no bound: small
trained models recalled up to .17 more than the law says (docs/results/capacity).  Models with
attention read their whole context and have no such ceiling.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gatewright.errors import UserError
from gatewright.recall_law import State, state_of

EXPLAINED = (
    "Predicted ceiling: the recall of an idealised task (one fact a tool) that the capacity law "
    "predicts from the checkpoint's sizes alone; not a measurement and no bound: small trained "
    "models exceeded it by up to .17, and where N > D it promises too much."
)


def read_state(folder: Path) -> dict[str, Any] | None:
    """Return the fields of `recall_law.State` that a model folder's config.json holds.

    None for a model that the law does not describe, and where the config leaves a size to its
    class's default: then there is nothing to predict from.

    Raises:
        UserError: a size in config.json is none.
    """
    path = folder / "config.json"
    try:
        state = state_of(json.loads(path.read_bytes()))
    except KeyError:
        return None
    except ValueError as e:
        raise UserError(f"{path}: its sizes make no state ({e}; d hidden, n state size)") from e
    return None if state is None else dataclasses.asdict(state)


def predict(state: Mapping[str, Any] | None, k: int) -> dict[str, float | str | None]:
    """Return the predicted recall in a pool of k tools, and the pool at which it is one half.

    `predicted_from` names the curve: the same for all models of these sizes, whatever their
    gates.

    Args:
        state: what `read_state` found when the model was asked; None if nothing.
        k: tools in the pool.
    """
    if state is None:
        return dict.fromkeys(("predicted_ceiling", "predicted_tools_at_half", "predicted_from"))
    s = State(**state)
    plural = "s" if s.layers > 1 else ""
    caution = " (N > D: promises too much)" if s.more_slots_than_channels else ""
    return {
        "predicted_ceiling": s.recall(k, "ar"),
        "predicted_tools_at_half": s.facts_at(0.5, "ar"),
        "predicted_from": f"predicted ceiling: D {s.d}, N {s.n}, {s.layers} layer{plural}{caution}",
    }
