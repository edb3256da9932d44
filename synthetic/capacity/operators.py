"""What a trained linear Mamba computes, in terms that do not depend on a change of basis.

With xi_t = (x_{t-1}; x_t) one-hot (2V), `z = Ê xi`, `Ê = (diag(w0) P_in E^T | diag(w1) P_in E^T)`,

    logits_t = sum_tau G_vv xi_tau (xi_tau^T G_kq xi_t),
    G_vv = E P_out Ê  (V x 2V),    G_kq = (S_B Ê)^T (S_C Ê)  (2V x 2V).

The algorithm of the paper is: the convolution shifts (the key is the previous token, the
value and the query the current one), so that G_vv restricted to (values, current values) and
G_kq restricted to (previous keys, current keys) are close to multiples of the identity.
"""

from __future__ import annotations

import torch
from torch import Tensor

from synthetic.capacity.tasks import Task, sample
from synthetic.ensemble import Parameters


def _member(p: Parameters, member: int) -> Parameters:
    return {k: v[member].double() for k, v in p.items()}


def invariants(p: Parameters, member: int) -> tuple[Tensor, Tensor]:
    """Return G_vv (V, 2V) and G_kq (2V, 2V); columns and rows are [previous | current]."""
    q = _member(p, member)
    z = q["in_proj"] @ q["embedding"].T  # (2D, V)
    wide = torch.cat([q["conv"][:, :1] * z, q["conv"][:, 1:] * z], dim=1)
    return q["embedding"] @ q["out_proj"] @ wide, (q["b_proj"] @ wide).T @ (q["c_proj"] @ wide)


def identity_likeness(block: Tensor) -> dict[str, float]:
    """Return how close a square block is to a multiple of the identity.

    `retrieved`: share of columns whose largest entry is on the diagonal.  `contrast`: mean
    of the diagonal over the root mean square of the rest; independent random embeddings in D
    dimensions have sqrt(D).  `sign`: of the diagonal; it is free for each operator alone (only
    the product of the two matters), so the other figures are taken with it removed.
    """
    size = len(block)
    sign = 1.0 if block.diagonal().mean() >= 0 else -1.0
    block = block * sign
    diagonal = block.diagonal()
    rest = block[~torch.eye(size, dtype=torch.bool)]
    return {
        "sign": sign,
        "retrieved": float((block.argmax(0) == torch.arange(size)).double().mean()),
        "contrast": float(diagonal.mean() / rest.square().mean().sqrt()),
        "diagonal_spread": float(diagonal.std() / diagonal.mean().abs()),
    }


def measure(p: Parameters, member: int) -> dict[str, dict[str, float]]:
    """Return the likeness of the blocks that should be identities and of their rivals.

    `shift` holds, for both operators, the share of diagonal weight in the block that the
    shift predicts, among all blocks of that operator.
    """
    g_vv, g_kq = invariants(p, member)
    vocab = g_vv.shape[0]
    keys, values = slice(0, vocab // 2), slice(vocab // 2, vocab)

    def part(matrix: Tensor, row: int, rows: slice, column: int, columns: slice) -> Tensor:
        full = matrix[row * vocab : (row + 1) * vocab, column * vocab : (column + 1) * vocab]
        return full[rows, columns]

    def weight(block: Tensor) -> float:
        return float(block.diagonal().square().sum())

    key_blocks = {(r, c): weight(part(g_kq, r, keys, c, keys)) for r in (0, 1) for c in (0, 1)}
    value_blocks = {c: weight(part(g_vv, 0, values, c, values)) for c in (0, 1)}
    return {
        "G_vv": identity_likeness(part(g_vv, 0, values, 1, values)),
        "G_kq": identity_likeness(part(g_kq, 0, keys, 1, keys)),
        "shift": {
            "G_vv": value_blocks[1] / sum(value_blocks.values()),
            "G_kq": key_blocks[0, 1] / sum(key_blocks.values()),
        },
    }


def invert_state(
    p: Parameters, member: int, task: Task, *, sequences: int, seed: int
) -> dict[str, float]:
    """Compare states after the facts with the hash table that the paper reads in them.

    `explained`: squared cosine between H = P_out h (D x N), the part of the state that can be
    read, and `sum_n P_out z(v_n) B(k_n)^T`, z of a value as the current token, B of a key as
    the previous one.  `inverted`: share of facts
    whose value is the largest entry of the key's column in `E P_out h C(key)`, among values.
    """
    q = _member(p, member)
    table = q["embedding"] @ q["in_proj"].T  # (V, 2D)
    previous, current = table * q["conv"][:, 0], table * q["conv"][:, 1]
    batch = sample(task, sequences, torch.Generator().manual_seed(7 * seed + 3))
    context = batch.tokens[:, : 2 * task.facts]
    before = torch.nn.functional.pad(previous[context[:, :-1]], (0, 0, 1, 0))
    z = before + current[context]
    h = torch.einsum("btz,btn->bzn", z, z @ q["b_proj"].T)
    keys, values = context[:, 0::2], context[:, 1::2]
    facts = torch.einsum("bfz,bfn->bzn", current[values], previous[keys] @ q["b_proj"].T)
    h, facts = q["out_proj"] @ h, q["out_proj"] @ facts
    cosine = (h * facts).sum((1, 2)) / (h.norm(dim=(1, 2)) * facts.norm(dim=(1, 2)))
    asked = current[keys] @ q["c_proj"].T  # (B, F, N)
    read = torch.einsum("bdn,bfn->bfd", h, asked) @ q["embedding"].T
    half = task.vocab // 2
    hits = read[..., half:].argmax(-1) + half == values
    return {"explained": float(cosine.square().mean()), "inverted": float(hits.double().mean())}


def without_shift(p: Parameters) -> Parameters:
    """Return the parameters with the previous token's tap removed: the convolution ablated."""
    conv = p["conv"].clone()
    conv[..., 0] = 0
    return {**p, "conv": conv}
