"""Finding the gates of a checkpoint: which tensors are `A_log`, and what dt goes with each.

A gate is recognised by its tensors: `A_log` beside `dt_bias` (Mamba-2 and its hybrids, Gated
DeltaNet, Kimi delta attention) or beside the bias of `dt_proj` (Mamba-1, Jamba, Zamba).  The
configuration then says how dt is clamped, and excludes models whose A_log is not the log of a
decay rate.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gatewright.checkpoints import deepspeed_zero, dtypes
from gatewright.checkpoints.opening import open_checkpoint
from gatewright.checkpoints.storage import Checkpoint, StoredTensor
from gatewright.errors import UserError
from gatewright.gates import definitions, undo_record

KINDS = {
    "per_head": "one gate per head: A_log (H,) with dt_bias (H,)",
    "per_state": "gates per channel and state: A_log (E, N) with dt_proj.bias (E,)",
    "per_head_state": "gates per head, channel and state: A_log (H, P, N) with dt_proj_bias (H, P)",
    "per_key_channel": "one rate per head, dt per key channel: A_log (H,) with dt_bias (H*K,)",
}
"""The shapes in which gates occur."""

KNOWN_MODEL_TYPES = {
    *("mamba", "falcon_mamba", "jamba", "zamba"),
    *("mamba2", "bamba", "zamba2", "nemotron_h", "falcon_h1", "granitemoehybrid"),
    *("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
    *("olmo_hybrid", "kimi_linear"),
}
"""model_type values whose decay was checked to be exp(-dt * exp(A_log))."""

_CLAMPED_FROM_BELOW = {"nemotron_h", "zamba2"}  # they read time_step_min, not time_step_limit
_NO_MODEL = {"training_args.bin", "optimizer.bin", "scheduler.bin", "sampler.bin"}
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_OPTIMIZER = re.compile(r"^optimizer\.(?:\d+\.)?state\.(?:param|fp32_param)\.")


@dataclasses.dataclass(frozen=True)
class Gate:
    """The gates of one layer.

    Raises:
        UserError: from `values` and `dt`, when what is stored is not finite.
    """

    layer: int
    kind: str
    A_log: StoredTensor
    bias: StoredTensor
    """dt_bias, or the bias of dt_proj."""
    masters: tuple[StoredTensor, ...] = ()
    """fp32 copies that an optimizer holds; an edit of A_log alone would be undone by it."""

    @property
    def n_heads(self) -> int:
        """Heads of the layer; channels in Mamba-1, whose A_log is (channels, d_state)."""
        scalar = self.kind in ("per_head", "per_key_channel")  # stored as (H,) or (1, 1, H, 1)
        return self.A_log.numel if scalar else self.A_log.shape[0]

    def values(self, checkpoint: Checkpoint) -> np.ndarray:
        """Return A_log as float64 (H, M): M is 1 for one gate per head."""
        return _finite(checkpoint, self.A_log).reshape(self.n_heads, -1)

    def dt(self, checkpoint: Checkpoint, dt_limit: tuple[float, float]) -> np.ndarray:
        """Return dt of a zero input as float64, broadcastable to `values`: (H, 1) or (H, M)."""
        bias = _finite(checkpoint, self.bias).reshape(self.n_heads, -1)
        if self.kind == "per_head_state":  # (H, P) against A_log (H, P * N)
            bias = np.repeat(bias, self.A_log.shape[-1], axis=1)
        return positive(definitions.dt_from_weights(bias, dt_limit))


def positive(dt: np.ndarray) -> np.ndarray:
    """Return steps with those that underflowed to 0 as the smallest float64 above it.

    softplus is never 0; and 0 times a rate that overflowed would be nan.
    """
    return np.maximum(dt, np.finfo(np.float64).smallest_subnormal)


def _finite(checkpoint: Checkpoint, tensor: StoredTensor) -> np.ndarray:
    values = checkpoint.read_float(tensor)
    if not np.isfinite(values).all():
        raise UserError(
            f"{checkpoint.root}: {tensor.name} holds values that are not finite; fetch it again, "
            "or take a checkpoint from before training diverged"
        )
    return values


@dataclasses.dataclass(frozen=True)
class Gates:
    """All gates of a checkpoint, by layer, and how the model clamps dt."""

    checkpoint: Checkpoint
    model_type: str
    dt_limit: tuple[float, float]
    gates: tuple[Gate, ...]
    warnings: tuple[str, ...]

    def tau(self, gate: Gate, dt: np.ndarray | None = None) -> np.ndarray:
        """Return the effective length of each gate of a layer in tokens, (H, M).

        Args:
            dt: measured mean step per head, (H,) or (H, M); softplus(dt_bias) if not given.
        """
        step = (
            gate.dt(self.checkpoint, self.dt_limit) if dt is None else dt.reshape(gate.n_heads, -1)
        )
        return definitions.tau_from_dt(gate.values(self.checkpoint), step)


def layer_of(name: str) -> int | None:
    """Return the layer's number in a tensor's name, None where the name has none."""
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def find_gates(source: Path | str | Checkpoint) -> Gates:
    """Return the gates of a checkpoint (a folder, or one that is open already).

    Raises:
        UserError: the folder is no known checkpoint, or holds no gate (the message lists what
            was looked for and found), or an in-place edit of it was interrupted.
    """
    if source == "":  # as a path it would mean the current folder
        raise UserError("the checkpoint's path is empty; name its folder")
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(Path(source))
    undo_record.refuse_half_edited(checkpoint.root)
    model_type = model_type_of(checkpoint.config)
    _refuse_bounded(checkpoint, model_type)
    names = [n for n in checkpoint.tensors if n == "A_log" or n.endswith(".A_log")]
    masters: dict[str, list[str]] = {}
    models = []
    for name in names:
        plain = _OPTIMIZER.sub("", name)
        if plain != name:
            masters.setdefault(plain, []).append(name)
        elif not name.startswith("optimizer."):
            models.append(name)
    if not models:
        raise UserError(_nothing_found(checkpoint, model_type))
    gates = []
    for order, name in enumerate(models):
        layer = layer_of(name)
        copies = tuple(checkpoint.tensors[m] for m in masters.get(name, ()))
        gates.append(_gate(checkpoint, name, order if layer is None else layer, copies))
    gates.sort(key=lambda g: (g.layer, g.A_log.name))
    numbers = [g.layer for g in gates]
    if len(set(numbers)) != len(numbers):
        raise UserError(f"{checkpoint.root}: two A_log tensors claim one layer: {models[:4]}")
    warnings = []
    if model_type not in KNOWN_MODEL_TYPES and checkpoint.config:
        warnings.append(
            f"model_type {model_type!r} is not among the {len(KNOWN_MODEL_TYPES)} checked ones; "
            f"its tensors look like {gates[0].kind} ({KINDS[gates[0].kind]})"
        )
    warnings += _second_copies(checkpoint)
    if checkpoint.format in ("megatron", "deepspeed"):
        warnings += _unreachable_masters(checkpoint, gates)
    return Gates(
        checkpoint,
        model_type,
        dt_limit_of(checkpoint.config, model_type),
        tuple(gates),
        tuple(warnings),
    )


def _second_copies(checkpoint: Checkpoint) -> list[str]:
    """Warn of weights beside the ones that count: a loader that prefers them finds old gates."""
    if checkpoint.format not in ("huggingface", "pytorch"):
        return []
    chosen = {piece.file for t in checkpoint.tensors.values() for piece in t.pieces}
    others = [
        file
        for file in checkpoint.files
        if file.endswith((".safetensors", ".bin"))
        and file not in chosen
        and Path(file).name not in _NO_MODEL
    ]
    if not others:
        return []
    return [
        f"{len(others)} more files of weights lie here and are not looked at: "
        f"{', '.join(others[:4])}{', ...' if len(others) > 4 else ''}; a loader that reads "
        f"them instead of {min(chosen)} finds the gates that they hold"
    ]


def _unreachable_masters(checkpoint: Checkpoint, gates: Sequence[Gate]) -> list[str]:
    """Warn when an optimizer is saved in a layout that does not name its copies of A_log."""
    resumable = checkpoint.format == "deepspeed" or any(
        name.startswith("optimizer.") for name in checkpoint.tensors
    )
    missing = [g.layer for g in gates if not g.masters and not deepspeed_zero.is_master(g.A_log)]
    if not resumable or not missing:
        return []
    return [
        f"an optimizer is saved here, but its fp32 copy of A_log cannot be found by name (layer "
        f"{missing[0]} and {len(missing) - 1} more): resume with the weights only, or the first "
        "step brings the old gates back"
    ]


def model_type_of(config: Mapping[str, Any]) -> str:
    """Return the architecture's name in a Hugging Face, Megatron-run or mamba_ssm config."""
    if "model_type" in config:
        return str(config["model_type"])
    if isinstance(config.get("ssm_cfg"), Mapping):
        return "mamba2" if config["ssm_cfg"].get("layer") == "Mamba2" else "mamba"
    model = config.get("model")
    if isinstance(model, Mapping) and "family" in model:
        return str(model["family"])
    return str(config.get("family", "unknown"))


def dt_limit_of(config: Mapping[str, Any], model_type: str) -> tuple[float, float]:
    """Return the range to which the model clamps dt.

    Raises:
        UserError: the configuration's limit is not a pair of numbers in order.
    """
    if model_type in _CLAMPED_FROM_BELOW:
        limit: Any = (config.get("time_step_min", 0.001), math.inf)
    else:
        ssm = config.get("ssm_cfg")
        limit = (ssm if isinstance(ssm, Mapping) else {}).get("dt_limit")
        limit = limit or config.get("time_step_limit") or definitions.UNLIMITED
    try:
        # transformers 5 writes infinity as {"__float__": "Infinity"}
        low, high = (float(x["__float__"] if isinstance(x, Mapping) else x) for x in limit)
    except (TypeError, ValueError, KeyError, OverflowError) as e:
        raise UserError(f"config.json: time_step_limit {limit!r} is not a pair of numbers") from e
    if not 0 <= low < high:
        raise UserError(f"config.json: time_step_limit {limit!r} is not a range of step sizes")
    return low, high


def _gate(checkpoint: Checkpoint, name: str, layer: int, masters: tuple[StoredTensor, ...]) -> Gate:
    A_log = checkpoint.tensors[name]
    prefix = name.removesuffix("A_log")
    for sibling in ("dt_bias", "dt_proj.bias", "dt_proj_bias"):
        if prefix + sibling in checkpoint.tensors:
            bias = checkpoint.tensors[prefix + sibling]
            break
    else:
        raise UserError(
            f"{checkpoint.root}: {name} has no step size beside it; looked for {prefix}dt_bias, "
            f"{prefix}dt_proj.bias and {prefix}dt_proj_bias"
        )
    for tensor in (A_log, bias, *masters):
        if tensor.dtype not in dtypes.FLOATS:
            raise UserError(
                f"{checkpoint.root}: {tensor.name} is stored as {tensor.dtype}; "
                f"gates are edited in {', '.join(dtypes.FLOATS)} only"
            )
    kind = _kind(A_log, bias)
    if kind is None or any(m.shape != A_log.shape for m in masters):
        raise UserError(
            f"{checkpoint.root}: {name} has shape {A_log.shape} and {bias.name} {bias.shape}; "
            f"known: {'; '.join(KINDS.values())}"
        )
    return Gate(layer, kind, A_log, bias, masters)


def _kind(A_log: StoredTensor, bias: StoredTensor) -> str | None:
    shape, steps = A_log.shape, bias.shape
    if not A_log.numel or not bias.numel:
        return None
    if A_log.numel == max(shape, default=0):  # (H,) or (1, 1, H, 1)
        if bias.numel == A_log.numel:
            return "per_head"
        return "per_key_channel" if bias.numel % A_log.numel == 0 else None
    if len(shape) == 2 and steps == shape[:1]:
        return "per_state"
    return "per_head_state" if len(shape) == 3 and steps == shape[:2] else None


def _refuse_bounded(checkpoint: Checkpoint, model_type: str) -> None:
    """Refuse models whose decay is bounded: there exp(A_log) is a slope, not a rate."""
    config = checkpoint.config
    text = config.get("text_config")
    text = text if isinstance(text, Mapping) else config
    bounded = (model_type == "bailing_hybrid" and config.get("kda_safe_gate", True)) or (
        model_type.startswith("glm5_next") and text.get("linear_lower_bound", -5.0) is not None
    )
    if bounded:
        raise UserError(
            f"{checkpoint.root}: {model_type} bounds its decay "
            "(lower_bound * sigmoid(exp(A_log) * g)), so adding log(s) to A_log "
            "does not scale its decay rate; it cannot be edited"
        )


def _nothing_found(checkpoint: Checkpoint, model_type: str) -> str:
    some: Sequence[str] = list(checkpoint.tensors)[:3]
    return (
        f"{checkpoint.root}: a {model_type} with no gate to scale: none of its "
        f"{len(checkpoint.tensors)} tensors is named *.A_log (looked for: "
        f"{'; '.join(KINDS.values())}); "
        f"found for example {', '.join(some) or 'nothing'}"
    )
