"""Opening a checkpoint of any known format: which format it is, its files and its tensors."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gatewright.checkpoints import safetensors_files, torch_dist, torch_files
from gatewright.checkpoints.storage import Checkpoint
from gatewright.errors import UserError

BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def list_files(root: Path) -> tuple[str, ...]:
    """Return every file below `root`, links followed, as sorted relative paths.

    Raises:
        UserError: a link that leads nowhere or round in a circle, or something that is
            neither file nor folder.
    """
    return tuple(sorted(_walk(root, root, {os.path.realpath(root)})))


def _walk(root: Path, folder: Path, above: set[str]) -> Iterator[str]:
    for entry in os.scandir(folder):
        path = Path(entry.path)
        try:
            mode = path.stat().st_mode
        except OSError as e:
            raise UserError(f"{path}: cannot be read ({e.strerror}); a link leads nowhere?") from e
        if stat.S_ISDIR(mode):
            real = os.path.realpath(path)
            if real in above:
                raise UserError(f"{path}: leads round in a circle; remove the link")
            yield from _walk(root, path, above | {real})
        elif stat.S_ISREG(mode):
            yield path.relative_to(root).as_posix()
        else:
            raise UserError(f"{path}: is neither a file nor a folder; remove it")


def read_config(root: Path) -> dict[str, Any]:
    """Return the parsed config.json of a folder, empty when there is none.

    Raises:
        UserError: it is not valid JSON, or not an object.
    """
    path = root / "config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as e:
        raise UserError(f"{path}: is not valid JSON ({e})") from e
    if not isinstance(config, dict):
        raise UserError(f"{path}: is not a JSON object")
    return config


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint folder for reading; no tensor is read yet.

    Known formats: a Hugging Face folder (`huggingface`), a folder with `pytorch_model.bin`
    (`pytorch`; Hugging Face's older layout and mamba_ssm's), and a Megatron torch_dist folder
    (`megatron`; an `iter_*` folder, or a run folder, of which the latest is taken).

    Raises:
        UserError: no such folder, none of these, or damaged.
    """
    path = Path(path)
    try:
        if path.is_file():
            raise UserError(f"{path}: is a file; give the folder that holds it")
        if not path.is_dir():
            raise UserError(f"{path}: no such folder")
    except OSError as e:
        raise UserError(f"{path}: cannot be read ({e.strerror})") from e
    path = Path(os.path.normpath(path))
    if (path / torch_dist.METADATA).is_file():
        tensors = torch_dist.Tensors(path)
        return Checkpoint(path, "megatron", tensors, list_files(path), read_config(path))
    shards = safetensors_files.shard_names(path)
    if shards is not None:
        return _folder(path, "huggingface", safetensors_files.read_folder(path, shards))
    bins = _bin_names(path)
    if bins:
        stored = {}
        for name in bins:
            stored.update(torch_files.read_state_dict(path, name))
        return _folder(path, "pytorch", stored)
    raise UserError(
        f"{path}: holds no weights; looked for {safetensors_files.SINGLE}, "
        f"{safetensors_files.INDEX}, {BIN}, {BIN_INDEX} and .metadata (Megatron torch_dist)"
    )


def _folder(path: Path, kind: str, tensors: Any) -> Checkpoint:
    config = read_config(path)
    if not config:
        raise UserError(f"{path}: has no config.json; fetch it with the weights")
    return Checkpoint(path, kind, tensors, list_files(path), config)


def _bin_names(path: Path) -> list[str]:
    if (path / BIN).is_file():
        return [BIN]
    if (path / BIN_INDEX).is_file():
        return sorted(set(safetensors_files.read_index(path / BIN_INDEX).values()))
    return []
