"""A checkpoint seen as the tensors of a Hugging Face model, whatever format it is in.

Hugging Face's names and shapes are the hub between formats: `hf_views` shows a Megatron,
mamba_ssm or Hugging Face checkpoint in them, and writers take views.  Nothing is read until
a view is asked for its values, and then only the parts it needs.

Shape legend: D d_model, E d_inner, H heads, P head_dim, N d_state, G groups, K d_conv,
V vocab_size, F ffn_dim, L layers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from gatewright.checkpoints.storage import Checkpoint
from gatewright.errors import UserError
from gatewright.models import ModelConfig

# zxBCdt: rows of in_proj are [z | x | B | C | dt]; channels of conv1d are [x | B | C].
IN_PROJ_PARTS = ("z", "x", "B", "C", "dt")
CONV_PARTS = ("x", "B", "C")


@dataclasses.dataclass(frozen=True)
class View:
    """A tensor that can be produced on demand: type, shape, and how to get its raw array."""

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


def in_proj_rows(model: ModelConfig) -> dict[str, int]:
    """Return the rows of each part of Mamba-2's in_proj, in order."""
    groups = model.ngroups * model.d_state
    sizes = (model.d_inner, model.d_inner, groups, groups, model.n_ssm_heads)
    return dict(zip(IN_PROJ_PARTS, sizes, strict=True))


def hf_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of the Hugging Face model, in layer order.

    With tied embeddings there is no lm_head: safetensors stores shared tensors once.
    """
    d, v = model.d_model, model.vocab_size
    shapes: dict[str, tuple[int, ...]] = {}
    if model.family == "mamba2":
        rows = in_proj_rows(model)
        conv = sum(rows[p] for p in CONV_PARTS)
        shapes["backbone.embeddings.weight"] = (v, d)
        for i in range(model.n_layers):
            layer = f"backbone.layers.{i}."
            shapes[layer + "norm.weight"] = (d,)
            for gate in ("A_log", "D", "dt_bias"):
                shapes[f"{layer}mixer.{gate}"] = (model.n_ssm_heads,)
            shapes[layer + "mixer.in_proj.weight"] = (sum(rows.values()), d)
            shapes[layer + "mixer.conv1d.weight"] = (conv, 1, model.d_conv)
            shapes[layer + "mixer.conv1d.bias"] = (conv,)
            shapes[layer + "mixer.norm.weight"] = (model.d_inner,)
            shapes[layer + "mixer.out_proj.weight"] = (d, model.d_inner)
        shapes["backbone.norm_f.weight"] = (d,)
    else:
        q, kv = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
        shapes["model.embed_tokens.weight"] = (v, d)
        for i in range(model.n_layers):
            layer = f"model.layers.{i}."
            shapes[layer + "input_layernorm.weight"] = (d,)
            shapes[layer + "self_attn.q_proj.weight"] = (q, d)
            shapes[layer + "self_attn.k_proj.weight"] = (kv, d)
            shapes[layer + "self_attn.v_proj.weight"] = (kv, d)
            shapes[layer + "self_attn.o_proj.weight"] = (d, q)
            shapes[layer + "post_attention_layernorm.weight"] = (d,)
            shapes[layer + "mlp.gate_proj.weight"] = (model.ffn_dim, d)
            shapes[layer + "mlp.up_proj.weight"] = (model.ffn_dim, d)
            shapes[layer + "mlp.down_proj.weight"] = (d, model.ffn_dim)
        shapes["model.norm.weight"] = (d,)
    if not model.tie_embeddings:
        shapes["lm_head.weight"] = (v, d)
    return shapes


def hf_views(checkpoint: Checkpoint, model: ModelConfig) -> dict[str, View]:
    """Return every tensor of the Hugging Face model as a view of the checkpoint.

    Raises:
        UserError: a tensor is missing or has another shape than the configuration says, or
            the checkpoint holds weights that the configuration says nothing of.
    """
    views = {}
    taken = set()
    for name, shape in hf_shapes(model).items():
        if checkpoint.format == "megatron":
            views[name] = _megatron_view(checkpoint, model, name, shape)
        else:
            stored = name
            if stored not in checkpoint.tensors:  # mamba_ssm says `embedding`
                stored = name.replace("backbone.embeddings.", "backbone.embedding.")
            views[name] = _whole(checkpoint, stored, shape)
            taken.add(stored)
    if checkpoint.format == "megatron":
        taken = {tensor.name for tensor in megatron_tensors(views, model)}
    left = [name for name in checkpoint.tensors if name not in taken and _is_weight(name, model)]
    if left:
        raise UserError(
            f"{checkpoint.root}: holds {left[0]} and {len(left) - 1} other tensors that the model "
            f"of config.json ({model.family}, {model.n_layers} layers) has no place for; "
            "wrong config.json?"
        )
    return views


def _is_weight(name: str, model: ModelConfig) -> bool:
    """Tell whether a model misses something without a stored tensor.

    It does not without a tied output's copy, old Llamas' table of frequencies, or what
    Megatron's optimizer keeps beside the weights.
    """
    if name.startswith("optimizer.") or name.endswith(("rotary_emb.inv_freq", "_extra_state")):
        return False
    return not (model.tie_embeddings and name == "lm_head.weight")


def _expect(checkpoint: Checkpoint, name: str, shape: Sequence[int]) -> str:
    """Return the stored type of a tensor after checking that it exists and has its shape."""
    tensor = checkpoint.shape_and_dtype(name)
    if tensor is None:
        raise UserError(f"{checkpoint.root}: lacks the tensor {name}; wrong config.json?")
    if tensor[0] != tuple(shape):
        raise UserError(
            f"{checkpoint.root}: {name} has shape {tensor[0]}, but config.json says {tuple(shape)}"
        )
    return tensor[1]


def _whole(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> View:
    return View(_expect(checkpoint, name, shape), shape, lambda: checkpoint.read(name))


def _joined(
    checkpoint: Checkpoint, names: Sequence[str], shapes: Sequence[tuple[int, ...]]
) -> View:
    """Return tensors that stand below one another on axis 0 as one view."""
    kinds = {_expect(checkpoint, n, s) for n, s in zip(names, shapes, strict=True)}
    if len(kinds) != 1:
        raise UserError(f"{checkpoint.root}: {names[0]} and its neighbours differ in type")
    rows = sum(s[0] for s in shapes)
    return View(
        kinds.pop(),
        (rows, *shapes[0][1:]),
        lambda: np.concatenate([checkpoint.read(n) for n in names]),
    )


def _megatron_view(
    checkpoint: Checkpoint, model: ModelConfig, name: str, shape: tuple[int, ...]
) -> View:
    outer = {
        "backbone.embeddings.weight": "embedding.word_embeddings.weight",
        "model.embed_tokens.weight": "embedding.word_embeddings.weight",
        "backbone.norm_f.weight": "decoder.final_norm.weight",
        "model.norm.weight": "decoder.final_layernorm.weight",
        "lm_head.weight": "output_layer.weight",
    }
    if name in outer:
        return _whole(checkpoint, outer[name], shape)
    _, _, number, inner = name.split(".", 3)
    layer = int(number)
    if model.family == "mamba2":
        return _megatron_mamba(checkpoint, model, layer, inner, shape)
    return _megatron_llama(checkpoint, model, layer, inner, shape)


def _megatron_mamba(
    checkpoint: Checkpoint, model: ModelConfig, layer: int, inner: str, shape: tuple[int, ...]
) -> View:
    prefix = f"decoder.layers.{layer}."
    rows = in_proj_rows(model)
    if inner == "norm.weight":
        return _whole(checkpoint, prefix + "mixer.in_proj.layer_norm_weight", shape)
    if inner == "mixer.in_proj.weight":
        names = [f"{prefix}mixer.in_proj.weight.{p}" for p in IN_PROJ_PARTS]
        return _joined(checkpoint, names, [(rows[p], model.d_model) for p in IN_PROJ_PARTS])
    if inner.startswith("mixer.conv1d."):
        names = [f"{prefix}{inner}.{p}" for p in CONV_PARTS]
        return _joined(checkpoint, names, [(rows[p], *shape[1:]) for p in CONV_PARTS])
    return _whole(checkpoint, prefix + inner, shape)


LLAMA_STACKS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
    "post_attention_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "mlp.down_proj.weight": "mlp.linear_fc2.weight",
}
"""Hugging Face's name in a layer -> Megatron's stack over layers, where the shapes agree."""


def _megatron_llama(
    checkpoint: Checkpoint, model: ModelConfig, layer: int, inner: str, shape: tuple[int, ...]
) -> View:
    depth, d, p = model.n_layers, model.d_model, model.head_dim
    stack = "decoder.layers."
    if inner in LLAMA_STACKS:
        name = stack + LLAMA_STACKS[inner]
        dtype = _expect(checkpoint, name, (depth, *shape))
        return View(dtype, shape, lambda: checkpoint.read_rows(name, layer, layer + 1)[0])
    if inner.startswith("mlp."):  # fc1 rows are [gate | up]
        name = stack + "mlp.linear_fc1.weight"
        dtype = _expect(checkpoint, name, (depth, 2 * model.ffn_dim, d))
        half = 0 if "gate_proj" in inner else 1

        def read_half() -> np.ndarray:
            both = checkpoint.read_rows(name, layer, layer + 1)[0]
            return both.reshape(2, model.ffn_dim, d)[half]

        return View(dtype, shape, read_half)
    # linear_qkv rows are, for each key/value head, [its queries | key | value]
    name = stack + "self_attention.linear_qkv.weight"
    per_group = model.n_heads // model.n_kv_heads
    dtype = _expect(checkpoint, name, (depth, (per_group + 2) * model.n_kv_heads * p, d))
    part = {"q": slice(0, per_group), "k": slice(-2, -1), "v": slice(-1, None)}[inner[10]]

    def read_part() -> np.ndarray:
        packed = checkpoint.read_rows(name, layer, layer + 1)[0]
        grouped = packed.reshape(model.n_kv_heads, per_group + 2, p, d)
        return grouped[:, part].reshape(shape)

    return View(dtype, shape, read_part)


@dataclasses.dataclass(frozen=True)
class Part:
    """A box of a tensor of the Megatron model and the view that fills it."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


@dataclasses.dataclass(frozen=True)
class MegatronTensor:
    """A tensor as Megatron names it, in boxes of one layer at most."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def megatron_tensors(views: dict[str, View], model: ModelConfig) -> list[MegatronTensor]:
    """Return the tensors of a Megatron-Core model, produced from Hugging Face views."""
    mamba = model.family == "mamba2"
    found = []

    def whole(name: str, view: View) -> None:
        part = Part((0,) * len(view.shape), view.shape, view.read)
        found.append(MegatronTensor(name, view.dtype, view.shape, (part,)))

    embedding = "backbone.embeddings.weight" if mamba else "model.embed_tokens.weight"
    whole("embedding.word_embeddings.weight", views[embedding])
    if mamba:
        for layer in range(model.n_layers):
            for name, view in _mamba_layer(views, model, layer):
                whole(name, view)
        whole("decoder.final_norm.weight", views["backbone.norm_f.weight"])
    else:
        found += _llama_stacks(views, model)
        whole("decoder.final_layernorm.weight", views["model.norm.weight"])
    if not model.tie_embeddings:
        whole("output_layer.weight", views["lm_head.weight"])
    return found


def megatron_empty_states(model: ModelConfig) -> list[str]:
    """Return the keys of the extra states that Megatron's layers ask for when they load.

    They hold fp8 scales in Transformer Engine and nothing otherwise, but must be there.
    """
    depth = model.n_layers
    if model.family == "mamba2":
        keys = [
            f"decoder.layers.{layer}.mixer.{name}._extra_state/shard_0_1"
            for layer in range(depth)
            for name in ("in_proj", "out_proj")
        ]
        return [*keys, "output_layer._extra_state/shard_0_1"]
    names = (
        "self_attention.core_attention",
        "self_attention.linear_qkv",
        "self_attention.linear_proj",
        "mlp.linear_fc1",
        "mlp.linear_fc2",
    )
    return [
        f"decoder.layers.{name}._extra_state/shard_{layer}_{depth}"
        for layer in range(depth)
        for name in names
    ]


def _mamba_layer(views: dict[str, View], model: ModelConfig, layer: int) -> list[tuple[str, View]]:
    source, target = f"backbone.layers.{layer}.", f"decoder.layers.{layer}."
    rows = in_proj_rows(model)
    found = [(target + "mixer.in_proj.layer_norm_weight", views[source + "norm.weight"])]
    for inner in ("A_log", "D", "dt_bias", "norm.weight", "out_proj.weight"):
        found.append((f"{target}mixer.{inner}", views[f"{source}mixer.{inner}"]))
    for inner, parts in (
        ("in_proj.weight", IN_PROJ_PARTS),
        ("conv1d.weight", CONV_PARTS),
        ("conv1d.bias", CONV_PARTS),
    ):
        view = views[f"{source}mixer.{inner}"]
        begin = 0
        for part in parts:
            end = begin + rows[part]
            found.append((f"{target}mixer.{inner}.{part}", _rows_of(view, begin, end)))
            begin = end
    return found


def _rows_of(view: View, begin: int, end: int) -> View:
    return View(view.dtype, (end - begin, *view.shape[1:]), lambda: view.read()[begin:end])


def _llama_stacks(views: dict[str, View], model: ModelConfig) -> list[MegatronTensor]:
    per_group = model.n_heads // model.n_kv_heads
    p, d = model.head_dim, model.d_model

    def qkv(layer: str) -> np.ndarray:
        q, k, v = (views[f"{layer}self_attn.{n}_proj.weight"].read() for n in "qkv")
        grouped = [
            q.reshape(model.n_kv_heads, per_group, p, d),
            k.reshape(model.n_kv_heads, 1, p, d),
            v.reshape(model.n_kv_heads, 1, p, d),
        ]
        return np.concatenate(grouped, axis=1).reshape(-1, d)

    def fc1(layer: str) -> np.ndarray:
        halves = [views[f"{layer}mlp.{n}_proj.weight"].read() for n in ("gate", "up")]
        return np.concatenate(halves)

    def same(inner: str) -> Callable[[str], np.ndarray]:
        return lambda layer: views[layer + inner].read()

    stacks: dict[str, tuple[str, tuple[int, ...], Callable[[str], np.ndarray]]] = {
        "self_attention.linear_qkv.weight": (
            "self_attn.q_proj.weight",
            ((per_group + 2) * model.n_kv_heads * p, d),
            qkv,
        ),
        "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", (2 * model.ffn_dim, d), fc1),
    }
    for inner, name in LLAMA_STACKS.items():
        stacks[name] = (inner, views[f"model.layers.0.{inner}"].shape, same(inner))
    found = []
    for name, (typed_like, shape, produce) in stacks.items():
        dtype = views[f"model.layers.0.{typed_like}"].dtype
        parts = tuple(
            Part(
                (layer, *(0 for _ in shape)),
                (1, *shape),
                lambda produce=produce, layer=layer: produce(f"model.layers.{layer}.")[None],  # type: ignore[misc]
            )
            for layer in range(model.n_layers)
        )
        full = (model.n_layers, *shape)
        found.append(MegatronTensor(f"decoder.layers.{name}", dtype, full, parts))
    return found
