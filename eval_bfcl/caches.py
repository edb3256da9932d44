"""What a model remembers of a prompt: copied, cut short, and put together into a batch.

Works on the caches of transformers: keys and values per token for attention, a state of fixed
size for recurrent layers, both in hybrids.  Imported only where torch is loaded anyway.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DummyLayer, DynamicCache, DynamicLayer, LinearAttentionLayer


def fresh(config: Any) -> DynamicCache:
    """Return the empty cache of a model."""
    return DynamicCache(config=config)


def croppable(cache: Any) -> bool:
    """Return whether the cache of a prompt holds those of all its beginnings (pure attention)."""
    return all(type(layer) is DynamicLayer for layer in cache.layers)


def stackable(cache: Any) -> bool:
    """Return whether `stack` can put such caches together (no sliding windows)."""
    known = (DynamicLayer, LinearAttentionLayer, DummyLayer)
    return all(type(layer) in known for layer in cache.layers)


def held_tokens(cache: Any) -> int:
    """Return the tokens that take memory of their own: 0 for a purely recurrent model."""
    return max((x.get_seq_length() for x in cache.layers if isinstance(x, DynamicLayer)), default=0)


def snapshot(cache: Any) -> Any:
    """Return a cache that stays as it is while the model reads on with the original.

    Attention layers grow by making new tensors, so theirs are shared; states that are written
    in place are copied.
    """
    out = copy.copy(cache)
    out.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in out.layers:
        for name, value in vars(layer).items():
            if isinstance(value, dict):
                cloned = {k: v.clone() if isinstance(v, Tensor) else v for k, v in value.items()}
                setattr(layer, name, cloned)
    return out


def cropped(cache: Any, tokens: int) -> Any:
    """Return the cache of the first `tokens` tokens; see `croppable`."""
    out = snapshot(cache)
    for layer in out.layers:
        layer.keys, layer.values = layer.keys[:, :, :tokens], layer.values[:, :, :tokens]
    return out


class RoomyLayer(DynamicLayer):
    """Keys and values of a batch with room for what will be written, so that no step copies.

    Args:
        keys, values: per row, shape (1, heads, its tokens, head_dim).
        width: tokens of a row, shorter ones padded on the left.
        room: tokens that will be added.
    """

    def __init__(
        self, keys: Sequence[Tensor], values: Sequence[Tensor], width: int, room: int
    ) -> None:
        super().__init__()
        self.used = width
        self._keys, self._values = self._put(keys, room), self._put(values, room)
        self.keys, self.values = self._keys[:, :, : self.used], self._values[:, :, : self.used]
        self.dtype, self.device = self._keys.dtype, self._keys.device
        self.is_initialized = True

    def _put(self, rows: Sequence[Tensor], room: int) -> Tensor:
        _, heads, _, dim = rows[0].shape
        out = rows[0].new_zeros(len(rows), heads, self.used + room, dim)
        for place, row in zip(out, rows, strict=True):
            place[:, self.used - row.shape[2] : self.used] = row[0]
        return out

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        """Add tokens, shape (rows, heads, tokens, head_dim); return all keys and values."""
        end = self.used + key_states.shape[2]
        self._keys[:, :, self.used : end] = key_states
        self._values[:, :, self.used : end] = value_states
        self.used = end
        self.keys, self.values = self._keys[:, :, :end], self._values[:, :, :end]
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep these rows only."""
        self._keys = self._keys.index_select(0, beam_idx)
        self._values = self._values.index_select(0, beam_idx)
        self.keys, self.values = self._keys[:, :, : self.used], self._values[:, :, : self.used]


def stack(caches: Sequence[Any], width: int, room: int) -> Any:
    """Return one cache of several prompts, a row each.

    Args:
        width: tokens of a row of keys and values, shorter ones padded on the left.
        room: tokens that will be written after each prompt.
    """
    out = copy.copy(caches[0])
    out.layers = []
    for layers in zip(*(c.layers for c in caches), strict=True):
        if isinstance(layers[0], DynamicLayer):
            keys, values = [x.keys for x in layers], [x.values for x in layers]
            out.layers.append(RoomyLayer(keys, values, width, room))
            continue
        layer = copy.copy(layers[0])
        for name in ("conv_states", "recurrent_states"):
            parts = [getattr(x, name, {}) for x in layers]
            joined = {
                i: v if v is None else torch.cat([p[i] for p in parts]) for i, v in parts[0].items()
            }
            setattr(layer, name, joined)
        out.layers.append(layer)
    return out
