"""Writing mamba_ssm's format: `pytorch_model.bin` and its config.json, one tensor at a time.

torch.save wants every tensor in memory.  So it writes the file once with room but no data,
and each tensor is then written into its room and the archive's checksums renewed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gatewright.checkpoints import dtypes
from gatewright.checkpoints.archives import renewed_checksum
from gatewright.checkpoints.torch_files import read_state_dict
from gatewright.checkpoints.views import View

FILE = "pytorch_model.bin"


def mamba_ssm_name(hf_name: str) -> str:
    """Return mamba_ssm's name of a tensor of transformers' Mamba-2."""
    return hf_name.replace("backbone.embeddings.", "backbone.embedding.")


def write_file(
    folder: Path,
    views: Mapping[str, View],
    *,
    tied: bool,
    progress: Callable[[int], None] = lambda n: None,
) -> None:
    """Write `pytorch_model.bin` from Hugging Face views of a Mamba-2.

    Args:
        tied: add lm_head.weight as the same storage as the embedding, as mamba_ssm saves it.
    """
    import torch
    from torch._subclasses import FakeTensorMode

    names = {stored: name for name, stored in dtypes.TORCH_NAMES.items()}
    with FakeTensorMode():
        state: dict[str, Any] = {
            mamba_ssm_name(name): torch.empty(v.shape, dtype=getattr(torch, names[v.dtype]))
            for name, v in views.items()
        }
        if tied:
            state["lm_head.weight"] = state["backbone.embedding.weight"]
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(state, folder / FILE)
    stored = read_state_dict(folder, FILE)
    with open(folder / FILE, "r+b") as f:
        for name, view in views.items():
            (piece,) = stored[mamba_ssm_name(name)].pieces
            raw = np.ascontiguousarray(view.read())
            assert raw.shape == piece.shape, name
            f.seek(piece.start)
            f.write(raw.reshape(-1).view(np.uint8).data)
            assert piece.entry is not None, name
            crc = renewed_checksum(f, piece.entry)
            for at in piece.entry.checksums:
                f.seek(at)
                f.write(crc)
            progress(raw.nbytes)
