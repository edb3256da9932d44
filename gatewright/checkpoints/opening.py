"""Opening a checkpoint of any known format: which format it is, its files and its tensors."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gatewright.checkpoints import deepspeed_zero, safetensors_files, torch_dist, torch_files
from gatewright.checkpoints.storage import Checkpoint, StoredTensor
from gatewright.errors import UserError

BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def list_files(root: Path) -> tuple[str, ...]:
    """Return every file below `root`, links followed, as sorted relative paths.

    Raises:
        UserError: a link that leads nowhere or round in a circle, something that is neither
            file nor folder, or a name that is not UTF-8 (no manifest can state it).
    """
    return tuple(sorted(_walk(root, root, {os.path.realpath(root)})))


def _walk(root: Path, folder: Path, above: set[str]) -> Iterator[str]:
    for entry in os.scandir(folder):
        path = Path(entry.path)
        try:
            entry.name.encode()
        except UnicodeEncodeError as e:
            raise UserError(f"{os.fsencode(path)!r}: its name is not UTF-8; rename it") from e
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


def resolve_run(path: Path) -> Path:
    """Return the checkpoint to read: the folder itself, or a run folder's latest `iter_*`.

    Raises:
        UserError: a run folder whose `latest` names something that is not there.
    """
    path = Path(path)
    if (path / torch_dist.METADATA).is_file():
        return path
    for pointer in ("latest", "latest_checkpointed_iteration.txt"):
        file = path / pointer
        if not file.is_file() or not any(path.glob("iter_*")):
            continue
        name = file.read_text(encoding="utf-8", errors="replace").strip()
        if name.isdecimal():  # Megatron-LM writes the number only
            name = f"iter_{int(name):07d}"
        if Path(name).name != name or not (path / name / torch_dist.METADATA).is_file():
            raise UserError(f"{file}: names {name!r}, which is no checkpoint beside it")
        return path / name
    return path


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint folder for reading; no tensor is read yet.

    Known formats: a Hugging Face folder (`huggingface`), a folder with `pytorch_model.bin`
    (`pytorch`; Hugging Face's older layout and mamba_ssm's), a Megatron torch_dist folder
    (`megatron`; an `iter_*` folder, or a run folder, of which only the latest counts) and a
    DeepSpeed universal checkpoint (`deepspeed`).

    Raises:
        UserError: no such folder, none of these, or damaged.
    """
    path = Path(path)
    try:
        if path.is_file():
            raise UserError(f"{path}: is a file; give the folder that holds it")
        if not path.is_dir():
            hub = (
                f"; is it a Hub model? hf download {path} --local-dir DIR"
                if _hub_like(path)
                else ""
            )
            raise UserError(f"{path}: no such folder{hub}")
    except OSError as e:
        raise UserError(f"{path}: cannot be read ({e.strerror})") from e
    path = Path(os.path.normpath(path))
    latest = resolve_run(path)
    if (latest / torch_dist.METADATA).is_file():
        return _megatron(path, latest)
    shards = safetensors_files.shard_names(path)
    if shards is not None:
        return _folder(path, "huggingface", safetensors_files.read_folder(path, shards))
    bins = _bin_names(path)
    if bins:
        return _folder(path, "pytorch", _read_bins(path, bins))
    zero = deepspeed_zero.find_root(path)
    if zero is not None:
        prefix = "" if zero == path else f"{zero.name}/"
        tensors = deepspeed_zero.read_tensors(zero, prefix)
        files = tuple(f for f in list_files(path) if _belongs(f, prefix))
        return Checkpoint(path, "deepspeed", tensors, files, read_config(path))
    raise UserError(
        f"{path}: holds no weights; looked for {safetensors_files.SINGLE}, "
        f"{safetensors_files.INDEX}, {BIN}, {BIN_INDEX}, .metadata (Megatron torch_dist) and "
        "*_model_states.pt (DeepSpeed)"
    )


def _hub_like(path: Path) -> bool:
    return not path.is_absolute() and len(path.parts) == 2 and not path.parent.exists()


def _megatron(path: Path, latest: Path) -> Checkpoint:
    """Open an `iter_*` folder, or a run folder as its latest checkpoint and its settings."""
    prefix = "" if latest == path else f"{latest.name}/"
    tensors = torch_dist.Tensors(latest, prefix)
    files = tuple(f for f in list_files(path) if _belongs(f, prefix))
    return Checkpoint(path, "megatron", tensors, files, read_config(latest) or read_config(path))


def _belongs(file: str, prefix: str) -> bool:
    """Tell whether a run's file goes with the one checkpoint under `prefix`."""
    settings = ("config.json", "latest", "latest_universal", "latest_checkpointed_iteration.txt")
    return file.startswith(prefix) or file in settings


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


def _read_bins(root: Path, shards: list[str]) -> dict[str, StoredTensor]:
    """Return the tensors of all shards, each in one of them and in the one that the index says."""
    stored: dict[str, StoredTensor] = {}
    for shard in shards:
        for name, tensor in torch_files.read_state_dict(root, shard).items():
            if name in stored:
                first = stored[name].pieces[0].file
                raise UserError(f"{root}: {name} is in {first} and {shard}; fetch it again")
            stored[name] = tensor
    if shards != [BIN]:
        for name, shard in safetensors_files.read_index(root / BIN_INDEX).items():
            if name not in stored or stored[name].pieces[0].file != shard:
                raise UserError(
                    f"{root / BIN_INDEX}: says {name} is in {shard}, but it is not; fetch it again"
                )
    return stored
