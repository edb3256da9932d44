"""A model of this machine or the hub: its folder, its numbers and its device."""

from __future__ import annotations

import json
from pathlib import Path

from gatewright.errors import UserError

DTYPES = ("float32", "bfloat16", "float16")


def find(name: str) -> Path:
    """Return the folder of a model, fetched from the hub if it is a hub name.

    Raises:
        UserError: neither a folder nor a model that the hub has.
    """
    folder = Path(name)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    if name.count("/") != 1 or name.startswith((".", "/")):
        raise UserError(f"--model {name}: no such folder")
    try:
        patterns = ["*.json", "*.safetensors", "*.jinja", "*.model"]
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as e:
        raise UserError(f"--model {name}: no such folder, and the hub says: {e}") from e


def numbers_and_device(folder: Path, backend: str, dtype: str) -> tuple[str, str]:
    """Return in which numbers a model answers and on which device: what `auto` means here.

    Args:
        folder: with a config.json that has been read before.
        backend: transformers or vllm.
        dtype: what --dtype asks for.
    """
    device = "cuda"
    if backend == "transformers":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype != "auto":
        return dtype, device
    if device == "cpu":
        return "float32", device
    config = json.loads((folder / "config.json").read_bytes())
    own = str(config.get("dtype") or config.get("torch_dtype"))
    own = own if own in DTYPES else "float32"
    # vLLM's own auto does the same: its fast kernels take no float32.
    return "bfloat16" if backend == "vllm" and own == "float32" else own, device
