"""Which part of a published corpus a shard belongs to, and named blends of parts."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from gatewright import cli
from gatewright.errors import UserError

WHOLE = "text"
"""Name of the indexed files of a corpus that is not blended."""

BLENDS: dict[str, tuple[frozenset[str], ...]] = {
    # Nemotron-CC v1 high quality: web pages as they are, and questions made of them; the
    # same two in v2's folders.
    "nemotron_cc_hq": (
        frozenset(("high-actual", "high-diverse_qa_pairs")),
        frozenset(("High-Quality", "Diverse-QA")),
    ),
}
"""Blend name -> the partitions that make it up, in each layout that is known."""

_KEYED = re.compile(r"(quality|kind|kind2)=([^/]+)")


def partition(path: Path) -> str:
    """Return the partition of a shard.

    `quality=Q/kind=K/kind2=K2` (Nemotron-CC v1) gives `Q-K2`; otherwise it is the name of the
    folder that holds the shard (v2: `High-Quality`, ...).
    """
    keyed = dict(_KEYED.findall(path.as_posix()))
    if "quality" in keyed and "kind" in keyed:
        kind = keyed["kind"] if keyed["kind"] == "actual" else keyed.get("kind2", keyed["kind"])
        return f"{keyed['quality']}-{kind}"
    return path.resolve().parent.name


@dataclasses.dataclass(frozen=True)
class Part:
    """Shards that end in one pair of indexed files.

    `weight` says how often a token of this part is seen, relative to the other parts' tokens.
    """

    name: str
    shards: tuple[Path, ...]
    weight: float = 1.0


def parse_weights(weights: Sequence[str]) -> dict[str, float]:
    """Read `PARTITION=WEIGHT` words.

    Raises:
        UserError: a word of another form, or a weight that is not above 0.
    """
    out: dict[str, float] = {}
    for word in weights:
        name, _, number = word.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            value = -1.0
        if not name or not 0 < value < float("inf"):
            raise UserError(f"--weights {word}: write PARTITION=WEIGHT with a weight above 0")
        out[name] = value
    return out


def plan(shards: Sequence[Path], blend: str, weights: Mapping[str, float]) -> list[Part]:
    """Return the parts of a corpus, ordered by name.

    Args:
        blend: `none` (one part, every shard), `partitions` (a part each), or a name of BLENDS.

    Raises:
        UserError: a blend lacks one of its partitions, or a weight names none that is there.
    """
    if blend == "none":
        if weights:
            raise UserError("--weights: needs --blend partitions or a named blend")
        return [Part(WHOLE, tuple(shards))]
    found: dict[str, list[Path]] = {}
    for shard in shards:
        found.setdefault(partition(shard), []).append(shard)
    if blend != "partitions":
        # The layout of which most partitions are there; what is missing of it is named.
        wanted = max(BLENDS[blend], key=lambda names: len(names & found.keys()))
        missing = sorted(wanted - found.keys())
        if missing:
            raise UserError(
                f"--blend {blend}: --input holds no shard of {', '.join(missing)}; "
                f"its partitions: {', '.join(sorted(found))}"
            )
        found = {name: found[name] for name in wanted}
    for name in weights:
        if name not in found:
            raise UserError(f"--weights {name}: no such partition{cli.nearest(name, found)}")
    return [Part(n, tuple(found[n]), weights.get(n, 1.0)) for n in sorted(found)]
