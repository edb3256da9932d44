"""docs/results/recall tells the truth: its commands parse, its numbers are the files'."""

import json
import re
import shlex
from pathlib import Path

import pytest

from gatewright import cli
from synthetic.recall.__main__ import COMMANDS

RESULTS = Path(__file__).parents[2] / "docs" / "results"
TEXT = (RESULTS / "recall" / "README.md").read_text()
SPEED = TEXT[TEXT.index("## Speed") :]


def cells(line: str) -> list[str]:
    return [c.strip() for c in line.strip("|").split("|")]


def test_its_commands_can_be_pasted_and_write_to_different_folders() -> None:
    lines = re.findall(r"^    python -m synthetic\.recall (.*)$", TEXT, re.MULTILINE)
    assert len(lines) >= 5
    folders = []
    for line in lines:
        name, *flags = shlex.split(line)
        args = cli.parse(COMMANDS[name][1], flags, prog=name)
        folders.append(args.out)
        if name == "run":
            args.arm()
    assert len(set(folders)) == len(folders)


def test_its_speed_is_the_measured_one() -> None:
    by_peer: dict[tuple[str, bool], dict] = {}
    for r in json.loads((RESULTS / "speed" / "mqar.json").read_text())["results"]:
        by_peer[r["name"].split(",")[0], "C++" in r["peer_name"]] = r
    for family, steps in (("delta family (gated DeltaNet)", 2000), ("diagonal (Mamba-2)", 5000)):
        (line,) = re.findall(rf"^\| {re.escape(family)}.*$", SPEED, re.MULTILINE)
        fast, plain = by_peer[family, True], by_peer[family, False]
        assert cells(line)[1:] == [
            f"{fast['ours']:.1f}",
            f"{fast['peer']:.1f} ({fast['ratio']:.2f}x)",
            f"{plain['peer']:.1f} ({plain['ratio']:.2f}x)",
        ]
        assert f"{1000 * fast['ours'] / steps:.1f}" in SPEED
        assert f"{3600 / fast['ours']:.0f}" in SPEED


@pytest.mark.parametrize("allocator", ["tuned", "default"])
def test_its_ratios_to_fla_are_the_measured_ones(allocator: str) -> None:
    results = json.loads((RESULTS / "speed" / "cells.json").read_text())["results"]
    column = 0 if allocator == "tuned" else 1
    want, peers = {}, {"fla-core naive recurrent": "recurrent"}
    for r in results:
        if r["allocator"] == allocator:
            peer = peers.get(r["peer_name"], "chunkwise")
            name = r["name"].removesuffix(", forward + backward")
            want[name, peer] = (f"{r['ours']:.1f}", f"{r['peer']:.0f}", f"{r['ratio']:.1f}x")
    got = {}
    table = SPEED[SPEED.index("| recurrence |") :].split("\n\n")[0].splitlines()[2:]
    for line in table:
        name, ours, peer, time, ratio = cells(line)
        parts = [c.removesuffix(" ms").split(" / ")[column] for c in (ours, time, ratio)]
        got[name, peer] = tuple(parts)
    assert got == want
