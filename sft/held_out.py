"""What asking a model about held-out chats needs: questions, tool pools and the renderer."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gatewright.errors import UserError

if TYPE_CHECKING:
    from gatewright.chat import Renderer
    from sft.pools import PoolBuilder


def load_questions(data: Path, limit: int) -> list[dict[str, Any]]:
    """Return the first held-out questions that call a tool (see `sft.prepare`).

    Raises:
        UserError: the file is missing or damaged.
    """
    return _read(data / "held_out.jsonl", limit)


def load_tools(data: Path) -> list[dict[str, Any]]:
    """Return the corpus of tools that the data's pools were drawn from.

    Raises:
        UserError: the file is missing or damaged.
    """
    return _read(data / "tools.jsonl")


def _read(file: Path, limit: int | None = None) -> list[dict[str, Any]]:
    try:
        with open(file, encoding="utf-8") as f:
            return [json.loads(line) for line in itertools.islice(f, limit)]
    except (OSError, ValueError) as e:
        raise UserError(f"{file}: is missing or damaged ({e}); run sft.prepare again") from e


def pool_builder(data: Path, manifest: Mapping[str, Any]) -> PoolBuilder:
    """Return what draws pools as they were drawn for a prepared data folder.

    Args:
        data: folder made by `sft.prepare`.
        manifest: its manifest.
    """
    from sft.pools import PoolBuilder

    config = manifest["config"]
    return PoolBuilder(load_tools(data), config["max_pool_size"], config["order"], config["seed"])


def load_renderer(data: Path, manifest: Mapping[str, Any]) -> Renderer:
    """Return the renderer that drew a prepared data folder, reasoning included if it was kept."""
    from gatewright.chat import Renderer

    kept = manifest["config"].get("reasoning") == "keep"
    return Renderer.load(data / "tokenizer", reasoning=kept)
