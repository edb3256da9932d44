"""The C++ recall cell with its projections, forward and backward, for many members at once."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from gatewright.kernels.native import rank_one

_I64, _PTR = ctypes.c_int64, ctypes.c_void_p
KINDS = ("deltanet", "gated_deltanet", "rwkv7", "rwkv7_diagonal", "mamba2")
_BLOCK = 8  # sequences whose gradients of the small parameters are summed in C++
_TAPS = 4
_COLUMNS = (
    *("q_at", "k_at", "v_at", "beta_at", "gate_at", "gate_width", "rate_at"),
    *("mixed", "q_tap", "k_tap", "v_tap"),
)
_SMALL = ("tap_bias", "removal", "head_rate", "skip")
_PAD = 16  # widths and value rows are padded to this


class RecallCellArgs(ctypes.Structure):
    """Mirror of `RecallCellArgs` in recall_cell.cpp."""

    _fields_ = (
        *((n, _I64) for n in ("members", "sequences", "tokens", "width", "used", "reverse")),
        *((n, _I64) for n in ("columns", "key_width", "value_width", "heads", "kind", "reads")),
        *((n, _I64) for n in _COLUMNS),
        *((n, _I64) for n in ("block", "threads")),
        *((n, _PTR) for n in ("u", "weight", "bias", "taps", "tap_bias", "removal")),
        *((n, _PTR) for n in ("head_rate", "skip", "positions", "out", "removed")),
        *((n, _PTR) for n in ("checkpoints", "dout", "du", "dweight", "dsmall")),
    )


@dataclasses.dataclass(frozen=True)
class Layout:
    """What the columns of a cell's projections are.

    Attributes:
        kind: one of KINDS; `gated_deltanet` with a gate_width of 1 has one gate a token.
        key_width, value_width: K and V of the state.
        heads: Mamba-2's; heads of V / heads value rows have their own decay.
        q_at, k_at, v_at: first columns of the three groups that the convolution covers; q is
            last of all columns.
        beta_at, gate_at, rate_at: first columns of the gates' pre-activations.
        q_tap, k_tap, v_tap: where each group's taps begin in the convolution's 2 K + V.
    """

    kind: str
    key_width: int
    value_width: int
    q_at: int
    k_at: int
    v_at: int
    q_tap: int
    k_tap: int
    v_tap: int
    beta_at: int = 0
    gate_at: int = 0
    gate_width: int = 0
    rate_at: int = 0
    heads: int = 0

    @property
    def mixed(self) -> int:
        return 2 * self.key_width + self.value_width


def takes(library: ctypes.CDLL, layout: Layout) -> bool:
    """Say whether the kernel is made for these widths."""
    rows = layout.value_width // layout.heads if layout.heads else 8
    return layout.key_width <= rank_one.max_width(library) and rows % 8 == 0


def _padded(n: int) -> int:
    return -(-n // _PAD) * _PAD


class RecallCell(Function):
    """The residual stream u (E, B, L, d) -> what the state gives (E, B, Q, V).

    Q are the asked tokens, or all L.

    Args, after the library and the layout:
        u: its LayerNorm without the affine part is projected.
        weight: (E, C, d), bias (E, C): the projections, C columns as the layout says.
        reverse: the recurrence goes from the last token to the first.
        positions: (E, B, Q) int64 tokens to read at, or None for every token.
        taps: (E, 2 K + V, 4) of the short convolution, or None without it; tap_bias (E, 2 K + V).
        removal: (E, K), RWKV-7's; head_rate, skip: (E, H), Mamba-2's e^A_log and D.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        library: ctypes.CDLL,
        layout: Layout,
        u: Tensor,
        weight: Tensor,
        bias: Tensor,
        reverse: bool,
        positions: Tensor | None,
        taps: Tensor | None,
        *small: Tensor | None,
    ) -> Tensor:
        members, sequences, length, _ = u.shape
        used = length
        if weight.shape[1] != layout.q_at + layout.key_width:
            raise ValueError(f"{weight.shape[1]} projections do not fit {layout}")
        if positions is not None:
            positions = positions.contiguous()
            first, last = int(positions.min()), int(positions.max())
            if first < 0 or last >= length:
                raise IndexError(f"asked tokens {first} to {last} of {length}")
            used = length - first if reverse else last + 1  # no later token reaches these
        rows = (members, sequences, used)
        padded = _padded(layout.value_width)
        removed = states = None
        if layout.kind in ("deltanet", "gated_deltanet", "rwkv7"):
            removed = torch.empty(*rows, padded)
        if any(ctx.needs_input_grad):
            count = -(-used // rank_one.chunk(library))
            width = rank_one.padded_width(library, layout.key_width)
            states = torch.empty(members, sequences, count, padded, width)
        kept = {
            "u": u.contiguous(),
            "weight": weight.contiguous(),
            "bias": bias.contiguous(),
            "taps": None if taps is None else taps.transpose(1, 2).contiguous(),
            **dict(zip(_SMALL, (t if t is None else t.contiguous() for t in small), strict=True)),
            "positions": positions,
            "removed": removed,
            "checkpoints": states,
        }
        args = _arguments(layout, used, reverse, kept)
        reads = length if positions is None else positions.shape[2]
        out = torch.empty(members, sequences, reads, layout.value_width)
        args.out = out.data_ptr()
        library.recall_cell_forward(ctypes.byref(args))
        ctx.save_for_backward(*kept.values())
        ctx.library, ctx.layout, ctx.names = library, layout, tuple(kept)
        ctx.used, ctx.reverse = used, reverse
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        kept = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        layout: Layout = ctx.layout
        u, (members, columns, width) = kept["u"], kept["weight"].shape
        dout, du = grads[0].contiguous(), torch.empty_like(u)
        blocks = -(-u.shape[1] // _BLOCK)
        dweight = torch.empty(members, blocks, _padded(width), _padded(columns))
        taps = (_TAPS + 1) * layout.mixed
        sizes = (columns, taps, layout.key_width, layout.heads, layout.heads)
        dsmall = torch.empty(members, blocks, sum(sizes))
        args = _arguments(layout, ctx.used, ctx.reverse, kept)
        args.dout, args.du = dout.data_ptr(), du.data_ptr()
        args.dweight, args.dsmall = dweight.data_ptr(), dsmall.data_ptr()
        ctx.library.recall_cell_backward(ctypes.byref(args))
        dbias, conv, dremoval, dhead, dskip = dsmall.sum(1).split(sizes, dim=1)
        conv = conv.unflatten(1, (_TAPS + 1, layout.mixed))
        found = {"tap_bias": conv[:, _TAPS], "removal": dremoval, "head_rate": dhead, "skip": dskip}
        return (
            *(None, None, du),
            dweight.sum(1)[:, :width, :columns].transpose(1, 2),
            *(dbias, None, None),
            None if kept["taps"] is None else conv[:, :_TAPS].transpose(1, 2),
            *(None if kept[name] is None else found[name] for name in _SMALL),
        )


def _arguments(
    layout: Layout, used: int, reverse: bool, kept: dict[str, Tensor | None]
) -> RecallCellArgs:
    u, weight, positions = kept["u"], kept["weight"], kept["positions"]
    assert u is not None
    assert weight is not None
    args = RecallCellArgs(*u.shape, used, reverse, weight.shape[1])
    for name in ("key_width", "value_width", "heads", *_COLUMNS):
        setattr(args, name, getattr(layout, name))
    args.kind = KINDS.index(layout.kind)
    args.reads = 0 if positions is None else positions.shape[2]
    args.block, args.threads = _BLOCK, torch.get_num_threads()
    for name, t in kept.items():
        setattr(args, name, None if t is None else t.data_ptr())
    return args
