"""Writing a weights-only Megatron checkpoint (torch_dist), one box at a time.

The folder is what Megatron-Core's `dist_checkpointing.load` reads at any parallel layout:
`.metadata` (which box lies where), one data file of small torch.save archives, `common.pt`
(what is not sharded) and `metadata.json` (the format's name).
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gatewright.checkpoints import dtypes
from gatewright.checkpoints.views import MegatronTensor

DATA_FILE = "__0_0.distcp"


def as_torch(raw: np.ndarray, dtype: str) -> Any:
    """Return a raw array as a torch tensor of its stored type (sharing memory if writable)."""
    import torch

    names = {stored: name for name, stored in dtypes.TORCH_NAMES.items()}
    array = np.require(raw, requirements=["C", "W"])
    if dtype == "BF16":
        return torch.from_numpy(array.view("<i2")).view(torch.bfloat16)
    return torch.from_numpy(array).to(getattr(torch, names[dtype]))


def write_folder(
    folder: Path,
    tensors: Sequence[MegatronTensor],
    common: Mapping[str, Any],
    empty_states: Sequence[str] = (),
    progress: Callable[[int], None] = lambda n: None,
) -> None:
    """Write tensors and common state as a torch_dist checkpoint into an existing folder.

    Args:
        empty_states: keys of objects without content that the loader asks for.
        progress: told the bytes of each box as it is written.
    """
    import torch
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    described: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    with open(folder / DATA_FILE, "wb") as f:
        for tensor in tensors:
            properties, chunks = None, []
            for part in tensor.parts:
                block = as_torch(part.read(), tensor.dtype)
                assert tuple(block.shape) == part.shape, (tensor.name, block.shape, part.shape)
                offset = f.tell()
                torch.save(block.clone(), f)  # a view would carry its whole storage along
                where = torch.Size(part.offsets)
                storage[dcp.MetadataIndex(tensor.name, where)] = _StorageInfo(
                    DATA_FILE, offset, f.tell() - offset
                )
                chunks.append(dcp.ChunkStorageMetadata(where, torch.Size(part.shape)))
                properties = dcp.TensorProperties.create_from_tensor(block)
                progress(block.numel() * block.element_size())
            assert properties is not None, tensor.name
            described[tensor.name] = dcp.TensorStorageMetadata(
                properties, torch.Size(tensor.shape), chunks
            )
        for key in empty_states:
            offset = f.tell()
            torch.save([None], f)
            described[key] = dcp.BytesStorageMetadata()
            storage[dcp.MetadataIndex(key)] = _StorageInfo(DATA_FILE, offset, f.tell() - offset)
        _sync(f)
    metadata = dcp.Metadata(state_dict_metadata=described, planner_data={}, storage_data=storage)
    with open(folder / ".metadata", "wb") as f:
        pickle.dump(metadata, f)
        _sync(f)
    torch.save(dict(common), folder / "common.pt")
    (folder / "metadata.json").write_text(
        json.dumps(
            {
                "sharded_backend": "torch_dist",
                "sharded_backend_version": 1,
                "common_backend": "torch",
                "common_backend_version": 1,
            }
        )
    )


def _sync(f: Any) -> None:
    f.flush()
    os.fsync(f.fileno())
