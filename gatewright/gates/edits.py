"""Edits of gates: what is asked for, and what it means for every A_log of a checkpoint.

An edit becomes one additive offset per head (`Plan`), in log space, because that is what every
kind of edit is: scaling by s adds log(s), moving tau to T adds log(tau / T).  Values are edited
in float64 and rounded once to the stored type.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gatewright.checkpoints import dtypes
from gatewright.checkpoints.storage import StoredTensor
from gatewright.errors import UserError
from gatewright.gates import definitions
from gatewright.gates.find import Gate, Gates

SAFE_SCALES = (1 / 64, 64.0)
"""Scales outside this range need --force: they put every head at no decay or no memory."""

_HELD_SCALES = (1e-30, 1e30)
"""Not even --force goes beyond: models compute the decay rate in fp32, where it must not be inf."""

_NUMBER = re.compile(r"[0-9]{1,6}")
TABLE_KEYS = ("scale", "offset", "tau")

Dts = Mapping[int, np.ndarray]
"""Layer -> measured mean dt per head; empty when dt is taken from the weights."""


@dataclasses.dataclass(frozen=True)
class Edit:
    """One edit of a checkpoint's gates, as the command line states it.

    Raises:
        UserError: a value that is no scale, offset or length.
    """

    kind: str
    """scale, offset, target_tau, or table (a value per head from a file)."""
    value: float = 0.0
    table_key: str = ""
    table: tuple[tuple[int, tuple[float, ...]], ...] = ()
    """For `table`: (layer, values) with one value, or one per head."""
    table_dt: str = ""
    """For `table` of tau: whether their dt came from `weights` or `data`, if that is stated."""
    layers: frozenset[int] | None = None
    """None means every layer."""
    heads: frozenset[int] | None = None
    """None means every head."""

    def __post_init__(self) -> None:
        if self.kind == "scale":
            definitions.check_scale(self.value)
        elif self.kind == "offset":
            if not math.isfinite(self.value):
                raise UserError(f"--offset {self.value}: give a finite number")
        elif self.kind == "target_tau":
            if not (math.isfinite(self.value) and self.value > 0):
                raise UserError(f"--target-tau {self.value}: give a positive number of tokens")
        else:
            assert self.kind == "table", self
            assert self.table_key in TABLE_KEYS, self

    @property
    def flag(self) -> str:
        """What the user wrote, for messages."""
        if self.kind == "table":
            return "--from"
        return f"--{self.kind.replace('_', '-')} {self.value:g}"

    @property
    def label(self) -> str:
        """The ending of an output folder's name: `s0.5`, `d-1`, `tau4096`, `table`."""
        prefix = {"scale": "s", "offset": "d", "target_tau": "tau"}.get(self.kind)
        return "table" if prefix is None else f"{prefix}{self.value:.12g}"

    def describe(self) -> dict[str, Any]:
        """Return the edit as it is written into a manifest."""
        text: dict[str, Any] = {"kind": self.kind}
        if self.kind == "table":
            text |= {"of": self.table_key, "values": {str(k): list(v) for k, v in self.table}}
        else:
            text["value"] = self.value
        text["layers"] = "all" if self.layers is None else sorted(self.layers)
        text["heads"] = "all" if self.heads is None else sorted(self.heads)
        return text


def parse_selection(text: str, flag: str) -> frozenset[int]:
    """Parse `0-7,12` into a set of numbers; both ends of a range belong to it.

    Raises:
        UserError: anything else; `flag` is named.
    """
    chosen: set[int] = set()
    shown = text if len(text) <= 60 else text[:60] + "..."
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not _NUMBER.fullmatch(first) or (dash and not _NUMBER.fullmatch(last)):
            raise UserError(
                f"{flag} {shown!r}: write numbers below 1,000,000 and ranges, for example 0-7,12"
            )
        low, high = int(first), int(last or first)
        if low > high:
            raise UserError(f"{flag} {shown!r}: {part!r} is not a range")
        chosen.update(range(low, high + 1))
    return frozenset(chosen)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"a name occurs twice among {', '.join(found)[:60]}")
    return found


def read_table(path: Path) -> Edit:
    """Read a value per head from JSON: `{"scale": {"0": [..], "3": 0.5}}`, by layer.

    The key says what the values are: `scale`, `offset` or `tau` (target tokens).  A layer's
    value is one number or one per head.  What `tools.show_gates --json` prints is accepted
    too; its `tau` per head becomes the target, and its `dt_from` says which dt they hold for.

    Returns:
        An edit of all layers and heads.

    Raises:
        UserError: unreadable, or in none of these forms, or with a layer twice.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        parsed = json.loads(text, object_pairs_hook=_no_duplicates)
    except OSError as e:
        raise UserError(f"--from {path}: cannot be read ({e.strerror})") from e
    except (ValueError, RecursionError) as e:
        raise UserError(f"--from {path}: is not valid JSON ({e})") from e
    if isinstance(parsed, dict) and isinstance(parsed.get("layers"), list):
        try:
            rows = [(str(row["layer"]), row["tau"]) for row in parsed["layers"]]
            parsed = {"tau": _no_duplicates(rows), "dt_from": parsed.get("dt_from")}
        except (TypeError, KeyError) as e:
            raise UserError(f"--from {path}: a layer lacks `layer` or `tau`") from e
        except ValueError as e:
            raise UserError(f"--from {path}: {e}") from e
    keys = [k for k in TABLE_KEYS if isinstance(parsed, dict) and k in parsed]
    if len(keys) != 1 or not isinstance(parsed[keys[0]], dict) or not parsed[keys[0]]:
        raise UserError(
            f"--from {path}: write one of {', '.join(TABLE_KEYS)} by layer, like "
            '{"scale": {"0": [0.5, 1.0], "3": 2.0}}'
        )
    key = keys[0]
    table: dict[int, tuple[float, ...]] = {}
    for layer, values in parsed[key].items():
        values = values if isinstance(values, list) else [values]
        numbers = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values)
        if not _NUMBER.fullmatch(layer):
            raise UserError(f"--from {path}: {layer[:40]!r} is not the number of a layer")
        if not values or not numbers:
            raise UserError(f"--from {path}: layer {layer!r} needs a number or a list of numbers")
        if int(layer) in table:
            raise UserError(f"--from {path}: layer {int(layer)} occurs twice; leave one out")
        values = [math.inf if abs(v) > sys.float_info.max else v for v in values]
        low = -math.inf if key == "offset" else 0.0
        if not all(math.isfinite(v) and v > low for v in values):
            wanted = "finite" if key == "offset" else "positive and finite"
            raise UserError(f"--from {path}: layer {layer}: each {key} must be {wanted}")
        table[int(layer)] = tuple(float(v) for v in values)
    dt_from = parsed.get("dt_from") if key == "tau" else None
    if dt_from not in (None, "weights", "data"):
        raise UserError(f"--from {path}: dt_from is {dt_from!r}; it must be weights or data")
    return Edit("table", table_key=key, table=tuple(table.items()), table_dt=dt_from or "")


@dataclasses.dataclass(frozen=True)
class Plan:
    """An edit resolved against a checkpoint: the offset that each head's A_log receives."""

    edit: Edit
    offsets: Mapping[int, np.ndarray]
    """Layer -> offsets (H,), zero where a head is not selected."""

    def changes(
        self, gates: Gates, file: str | None = None
    ) -> Iterator[tuple[StoredTensor, np.ndarray]]:
        """Yield every tensor that the edit touches with its new raw array, masters included.

        Args:
            file: only tensors that have a part in this file.
        """
        for gate in self._gates(gates):
            for tensor in (gate.A_log, *gate.masters):
                if file is None or any(p.file == file for p in tensor.pieces):
                    yield tensor, self.edited(gates, gate, tensor)

    def touched(self, gates: Gates) -> list[StoredTensor]:
        """Return every tensor that the edit touches, masters included."""
        return [t for gate in self._gates(gates) for t in (gate.A_log, *gate.masters)]

    def _gates(self, gates: Gates) -> list[Gate]:
        return [gate for gate in gates.gates if self.offsets[gate.layer].any()]

    def edited(
        self, gates: Gates, gate: Gate, tensor: StoredTensor, dtype: str | None = None
    ) -> np.ndarray:
        """Return the new raw array of one tensor, rounded to `dtype` (its own by default).

        Heads with offset zero keep their bits, a negative zero's sign included.
        """
        raw = gates.checkpoint.read(tensor)
        exact = self.exact(gate, dtypes.decode(raw, tensor.dtype))
        if dtype is not None and dtype != tensor.dtype:
            return dtypes.encode(exact, dtype)
        untouched = np.broadcast_to(
            (self.offsets[gate.layer] == 0)[:, None], (gate.n_heads, tensor.numel // gate.n_heads)
        ).reshape(tensor.shape)
        return np.where(untouched, raw, dtypes.encode(exact, tensor.dtype))

    def exact(self, gate: Gate, values: np.ndarray) -> np.ndarray:
        """Return float64 values plus the offsets, before any rounding."""
        rows = values.reshape(gate.n_heads, -1)
        offset = self.offsets[gate.layer][:, None]
        return np.where(offset == 0, rows, rows + offset).reshape(values.shape)


def resolve(edit: Edit, gates: Gates, dts: Dts, *, force: bool = False) -> Plan:
    """Turn an edit into offsets per head.

    Args:
        dts: measured dt by layer (from calibration); empty to use softplus(dt_bias).
        force: allow scales outside `SAFE_SCALES`.

    Raises:
        UserError: a layer or head that the checkpoint does not have, or an extreme scale.
    """
    _compare_dt(edit, dts)
    selected = _selection(edit, gates)
    offsets = {g.layer: np.zeros(g.n_heads) for g in gates.gates}
    if edit.kind == "table":
        rows = dict(edit.table)
        for gate in gates.gates:
            if gate.layer in rows:
                values = _per_head(gate, rows[gate.layer])
                offsets[gate.layer] = np.where(
                    selected[gate.layer],
                    _table_offsets(edit.table_key, values, gate, gates, dts),
                    0.0,
                )
    else:
        if edit.kind == "scale":
            shift = definitions.offset_of_scale(edit.value)
        elif edit.kind == "offset":
            shift = edit.value
        else:
            median = _median_tau(gates, selected, dts)
            if not 0 < median < math.inf:
                raise UserError(
                    f"{edit.flag}: the median tau of the selected heads is {median:g}, which no "
                    "edit moves; select other --layers or --heads"
                )
            shift = math.log(median / edit.value)
        for layer, mask in selected.items():
            offsets[layer] = np.where(mask, shift, 0.0)
    low, high = (math.log(s) for s in SAFE_SCALES)
    for layer, offset in offsets.items():
        worst = offset[np.argmax(np.abs(offset))]
        if not math.log(_HELD_SCALES[0]) <= worst <= math.log(_HELD_SCALES[1]):
            raise UserError(
                f"{edit.flag}: adds {worst:.3g} to an A_log of layer {layer}, a scale of the decay "
                "rate beyond [1e-30, 1e30]; fp32 holds no such rate, choose a smaller edit"
            )
        if not low <= worst <= high and not force:
            way = "choose a smaller edit"
            if edit.kind == "target_tau":
                now = edit.value * math.exp(worst)
                way = f"choose {now * SAFE_SCALES[0]:.3g} to {now * SAFE_SCALES[1]:.3g} tokens"
            raise UserError(
                f"{edit.flag}: scales a decay rate of layer {layer} by {math.exp(worst):.3g}, "
                f"outside [1/64, 64], where heads keep everything or nothing; {way}, or --force"
            )
    return Plan(edit, offsets)


def _compare_dt(edit: Edit, dts: Dts) -> None:
    """Refuse target tau that were read with another dt than the one that they would be set with."""
    if edit.table_dt == "data" and not dts:
        raise UserError(
            "--from: its tau were measured on a text (dt_from: data); give --calibrate with that "
            "text, or make the file with show_gates --json without --calibrate"
        )
    if edit.table_dt == "weights" and dts:
        raise UserError(
            "--calibrate: the tau in --from's file are from the weights (dt_from: weights); leave "
            "--calibrate out, or make the file with show_gates --json --calibrate"
        )


def _selection(edit: Edit, gates: Gates) -> dict[int, np.ndarray]:
    """Return layer -> mask (H,) of what the edit may touch."""
    known = {g.layer for g in gates.gates}
    asked = edit.layers if edit.layers is not None else frozenset(known)
    table = {layer for layer, _ in edit.table}
    for flag, wanted in (("--layers", asked), ("--from", table)):
        missing = sorted(wanted - known)
        if missing:
            found = _ranges(sorted(known))
            raise UserError(f"{flag}: no gate in layer {missing[0]}; layers with gates: {found}")
    masks = {}
    for gate in gates.gates:
        mask = np.full(gate.n_heads, gate.layer in asked)
        if edit.heads is not None:
            beyond = [h for h in edit.heads if h >= gate.n_heads]
            if beyond:
                raise UserError(
                    f"--heads: layer {gate.layer} has {gate.n_heads} heads, none is {min(beyond)}"
                )
            mask &= np.isin(np.arange(gate.n_heads), list(edit.heads))
        masks[gate.layer] = mask
    return masks


def _ranges(numbers: Sequence[int]) -> str:
    parts: list[str] = []
    for n in numbers:
        first, _, last = parts[-1].partition("-") if parts else ("", "", "")
        if parts and int(last or first) == n - 1:
            parts[-1] = f"{first}-{n}"
        else:
            parts.append(str(n))
    return ",".join(parts)


def _per_head(gate: Gate, values: tuple[float, ...]) -> np.ndarray:
    if len(values) not in (1, gate.n_heads):
        raise UserError(f"--from: layer {gate.layer} has {gate.n_heads} heads, not {len(values)}")
    return np.broadcast_to(np.array(values), (gate.n_heads,))


def _table_offsets(key: str, values: np.ndarray, gate: Gate, gates: Gates, dts: Dts) -> np.ndarray:
    if key == "offset":
        return values
    if key == "scale":
        return np.log(values)
    with np.errstate(divide="ignore", over="ignore"):  # tau of 0 and inf are refused by the caller
        return np.log(np.median(gates.tau(gate, dts.get(gate.layer)), axis=1) / values)


def _median_tau(gates: Gates, selected: Mapping[int, np.ndarray], dts: Dts) -> float:
    """Return the median effective length over the selected gates of all layers, in tokens."""
    with np.errstate(over="ignore"):
        taus = [
            gates.tau(g, dts.get(g.layer))[selected[g.layer]].astype(np.float32).ravel()
            for g in gates.gates
            if selected[g.layer].any()
        ]
    if not taus:
        raise UserError("--layers and --heads select nothing")
    return float(np.median(np.concatenate(taus)))
