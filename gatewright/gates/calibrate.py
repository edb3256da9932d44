"""Measuring a model's step sizes on a text: tau "from data" instead of "from weights".

dt depends on the token: dt_t = softplus(dt_raw_t + dt_bias).  The model is run by transformers
and every softplus inside a module that owns an A_log is recorded, which is where all families
compute dt.  Optionally the largest update u_t = S_t - alpha_t S_{t-1} of each head's state is
measured too, token by token, which needs no knowledge of how a family forms B and x.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gatewright.checkpoints.models_on_disk import TOKENIZER_FILES
from gatewright.errors import UserError
from gatewright.gates.find import Gate, Gates, layer_of, positive
from gatewright.models import load_hf_model

WINDOW_TOKENS = 512
MAX_WINDOWS = 8
UPDATE_TOKENS = 16
MAX_CHARACTERS = 64 * WINDOW_TOKENS * MAX_WINDOWS
_OTHER_CONFIG = "is config.json the one that belongs to the weights?"


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a text told about a model's gates, by layer."""

    dt: dict[int, np.ndarray]
    """Mean step of each head (or channel), (H,) or (H, M), after clamping."""
    update: dict[int, np.ndarray]
    """Largest absolute entry of an update of each head's state, (H,); empty if not measured."""
    tokens: int


def measure(gates: Gates, text_file: Path, *, updates: bool = False) -> Measured:
    """Run the checkpoint's model on a text and measure its gates.

    Args:
        text_file: UTF-8 text; its first 4096 tokens are used.
        updates: also measure the size of state updates (Mamba only; slower).

    Raises:
        UserError: the format cannot be run, the text is unreadable or too short, or the model
            does not compute dt where it can be seen (fused CUDA kernels).
    """
    import torch

    checkpoint = gates.checkpoint
    if checkpoint.format != "huggingface":
        raise UserError(
            f"--calibrate: needs a model that transformers can run, {checkpoint.root} is "
            f"{checkpoint.format}; convert it first (tools.convert --to hf)"
        )
    ids = _tokens(checkpoint.root, text_file)
    model = _load(checkpoint.root)
    embedded = model.get_input_embeddings().num_embeddings
    if int(ids.max()) >= embedded:
        raise UserError(
            f"{checkpoint.root}: its tokenizer answers token {int(ids.max())}, but the model "
            f"embeds only {embedded}; fetch the tokenizer that belongs to it"
        )
    modules = _gate_modules(model, gates)
    sums: dict[int, Any] = {g.layer: 0.0 for g in gates.gates}
    windows = _windows(ids, {g.n_heads for g in gates.gates})
    with torch.no_grad(), _recording(modules) as recorded:
        for window in windows:
            recorded.clear()
            with _explained(f"{checkpoint.root}: its model does not run", _OTHER_CONFIG):
                model(input_ids=window, use_cache=False)
            for gate in gates.gates:
                sums[gate.layer] = sums[gate.layer] + _step_sum(recorded, gate, gates, window)
        counted = sum(w.size(1) for w in windows)
        dt = {layer: positive(np.asarray(total) / counted) for layer, total in sums.items()}
        for layer, mean in dt.items():
            if not np.isfinite(mean).all():
                raise UserError(
                    f"{checkpoint.root}: on this text the steps of layer {layer} are not finite; "
                    "leave --calibrate out, or fetch the checkpoint again"
                )
        found = _updates(model, gates, windows[0], recorded) if updates else {}
    return Measured(dt, found, counted)


def _tokens(root: Path, text_file: Path) -> Any:
    import torch
    from transformers import AutoConfig, AutoTokenizer

    try:
        with open(text_file, encoding="utf-8") as f:
            text = f.read(MAX_CHARACTERS)  # more than enough, however long the file is
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"--calibrate {text_file}: cannot be read as UTF-8 text ({e})") from e
    if not any((root / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(f"{root}: --calibrate needs the model's tokenizer files beside its weights")
    with _explained(f"{root}: transformers cannot read config.json", _OTHER_CONFIG):
        AutoConfig.from_pretrained(root, trust_remote_code=False)  # the tokenizer's loader does too
    with _explained(f"{root}: its tokenizer cannot be loaded", "fetch the tokenizer files again"):
        tokenizer = AutoTokenizer.from_pretrained(root, trust_remote_code=False)
    ids = tokenizer(text)["input_ids"]
    if len(ids) < 2 * UPDATE_TOKENS:
        raise UserError(f"--calibrate {text_file}: only {len(ids)} tokens; give a longer text")
    return torch.tensor(ids[: WINDOW_TOKENS * MAX_WINDOWS])


def _windows(ids: Any, avoided: set[int]) -> list[Any]:
    """Cut tokens into windows whose length is no head count, so that axes can be told apart."""
    length = min(WINDOW_TOKENS, ids.numel())
    while length in avoided:
        length -= 1
    return [ids[i : i + length][None] for i in range(0, ids.numel() - length + 1, length)]


def _load(root: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with _explained(f"{root}: transformers cannot load it", _OTHER_CONFIG):
        return load_hf_model(
            AutoModelForCausalLM,
            root,
            named=str(root),
            dtype=torch.float32,
            trust_remote_code=False,
        ).eval()


@contextlib.contextmanager
def _explained(what: str, way_out: str) -> Iterator[None]:
    """Say in one line why another library could not take what the checkpoint's files hold."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except (
        *(OSError, ValueError, LookupError, TypeError, AttributeError),
        *(ImportError, RuntimeError, ArithmeticError, StrictDataclassError),
    ) as e:
        reason = " ".join(f"{type(e).__name__}: {e}".split())[:200]
        raise UserError(f"{what} ({reason}); {way_out}") from e


def _gate_modules(model: Any, gates: Gates) -> dict[int, Any]:
    owners = [
        (n, m)
        for n, m in model.named_modules()
        if "A_log" in dict(m.named_parameters(recurse=False))
    ]
    found = {}
    for order, (name, module) in enumerate(owners):
        layer = layer_of(name + ".")
        found[order if layer is None else layer] = module
    if set(found) != {g.layer for g in gates.gates}:
        raise UserError(f"{gates.checkpoint.root}: the loaded model has gates in other layers")
    return found


@contextlib.contextmanager
def _recording(modules: dict[int, Any]) -> Iterator[dict[int, list[Any]]]:
    """Record the result of every softplus that runs inside a gate's module, by layer."""
    import torch
    from torch.overrides import TorchFunctionMode

    recorded: dict[int, list[Any]] = {}
    inside: list[int] = []

    class Recorder(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            if inside and func is torch.nn.functional.softplus:
                recorded.setdefault(inside[-1], []).append(out.detach())
            return out

    def leave(*_: Any) -> None:  # a hook that returned the layer's number would replace the output
        inside.pop()

    hooks = []
    for layer, module in modules.items():
        hooks.append(module.register_forward_pre_hook(lambda *_, n=layer: inside.append(n)))
        hooks.append(module.register_forward_hook(leave))
    try:
        with Recorder():
            yield recorded
    finally:
        for hook in hooks:
            hook.remove()


def _step_sum(recorded: dict[int, list[Any]], gate: Gate, gates: Gates, window: Any) -> np.ndarray:
    """Return the sum over a window's tokens of each head's clamped step, (H,) or (H, M)."""
    calls = recorded.get(gate.layer, [])
    if not calls:
        raise UserError(
            f"layer {gate.layer}: its step sizes are computed inside a fused kernel and cannot be "
            "measured; run --calibrate on a CPU"
        )
    tokens = window.size(1)
    parts = []
    for dt in calls:
        dt = dt.clamp(*gates.dt_limit).double()[0]
        axis = next((i for i, n in enumerate(dt.shape) if n == tokens), None)
        if axis is None:
            raise UserError(f"layer {gate.layer}: steps of shape {tuple(dt.shape)} are not known")
        parts.append(dt.sum(dim=axis).flatten().numpy())
    total = np.concatenate(parts)
    if gate.kind == "per_head_state":  # channels of every head, each for all d_state entries
        per_channel = total.reshape(gate.n_heads, -1)
        return np.repeat(per_channel, gate.A_log.shape[-1], axis=1)
    return total if total.size == gate.n_heads else total.reshape(gate.n_heads, -1)


def _updates(
    model: Any, gates: Gates, window: Any, recorded: dict[int, list[Any]]
) -> dict[int, np.ndarray]:
    """Return the largest |S_t - alpha_t S_{t-1}| per head over the last tokens of a window."""
    start = window.size(1) - UPDATE_TOKENS
    cache = model(input_ids=window[:, :start], use_cache=True).past_key_values
    found: dict[int, np.ndarray] = {}
    for t in range(start, window.size(1)):
        before = {g.layer: _state(cache, g) for g in gates.gates}
        recorded.clear()
        cache = model(
            input_ids=window[:, t : t + 1], past_key_values=cache, use_cache=True
        ).past_key_values
        for gate in gates.gates:
            old, new = before[gate.layer], _state(cache, gate)
            if old is None or new is None or gate.kind not in ("per_state", "per_head"):
                continue
            rate = np.exp(gate.values(gates.checkpoint))  # (H, 1) or (E, N)
            dt = _decode_step(recorded[gate.layer], gate, gates)
            decay = np.exp(-dt[:, None] * rate)
            shape = (gate.n_heads,) + (1,) * (old.ndim - 2) + (decay.shape[1],)
            update = np.abs(new - decay.reshape(shape) * old).reshape(gate.n_heads, -1).max(axis=1)
            found[gate.layer] = np.maximum(found.get(gate.layer, 0.0), update)
    return {layer: u for layer, u in found.items() if math.isfinite(float(u.max()))}


def _decode_step(calls: list[Any], gate: Gate, gates: Gates) -> np.ndarray:
    dt = calls[-1].clamp(*gates.dt_limit).double().flatten().numpy()
    return dt.reshape(gate.n_heads, -1)[:, 0]


def _state(cache: Any, gate: Gate) -> np.ndarray | None:
    """Return a copy of a layer's recurrent state without the batch, (H, ..., N), or None."""
    layer = cache.layers[gate.layer] if gate.layer < len(getattr(cache, "layers", ())) else None
    state = getattr(layer, "recurrent_states", None)
    if isinstance(state, dict):
        state = state.get(0)
    if isinstance(state, (list, tuple)):
        state = state[0] if state else None
    return None if state is None else state[0].double().numpy().copy()
