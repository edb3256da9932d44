"""What an edit means for every head: selections, targets, tables, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gatewright.errors import UserError
from gatewright.gates import edits, find, rewrite, statistics
from gatewright.gates.edits import Edit
from tests.gatewright.gates import families


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.save("mamba2", tmp_path_factory.mktemp("m") / "source")


@given(st.sets(st.integers(0, 300), min_size=1))
def test_a_selection_is_written_as_ranges_and_read_back(numbers: set[int]) -> None:
    text = edits._ranges(sorted(numbers))
    assert edits.parse_selection(text, "--layers") == numbers


@pytest.mark.parametrize("text", ["", "a", "1,,2", "-1", "3-1", "1-", "0-9999999", "9" * 5000])
def test_selections_that_are_none(text: str) -> None:
    with pytest.raises(UserError, match="--layers") as caught:
        edits.parse_selection(text, "--layers")
    assert len(str(caught.value)) < 200


def test_layers_and_heads_are_numbered_as_in_the_checkpoint(source: Path) -> None:
    gates = find.find_gates(source)
    edit = Edit("scale", 2.0, layers=frozenset({0, 2}), heads=frozenset({1, 3}))
    plan = edits.resolve(edit, gates, {})
    step = math.log(2)
    assert plan.offsets[0].tolist() == [0, step, 0, step]
    assert plan.offsets[1].tolist() == [0, 0, 0, 0]
    assert plan.offsets[2].tolist() == [0, step, 0, step]
    with pytest.raises(UserError, match=r"no gate in layer 3; layers with gates: 0-2"):
        edits.resolve(Edit("scale", 2.0, layers=frozenset({3})), gates, {})
    with pytest.raises(UserError, match="has 4 heads, none is 4"):
        edits.resolve(Edit("scale", 2.0, heads=frozenset({4})), gates, {})


def test_target_tau_moves_the_median_of_the_selected_heads(source: Path, tmp_path: Path) -> None:
    gates = find.find_gates(source)
    edit = Edit("target_tau", 37.0, layers=frozenset({1}))
    rewrite.write_edits(gates, [edits.resolve(edit, gates, {})], tmp_path / "out", dts={})
    before = statistics.layer_gates(gates)
    after = statistics.layer_gates(find.find_gates(tmp_path / "out"))
    assert np.median(after[1].tau) == pytest.approx(37.0, rel=1e-5)
    ratio = after[1].tau / before[1].tau
    np.testing.assert_allclose(ratio, ratio[0], rtol=1e-5)  # heads keep their order
    np.testing.assert_array_equal(after[0].tau, before[0].tau)


def test_target_tau_uses_measured_steps_when_there_are_some(source: Path) -> None:
    gates = find.find_gates(source)
    dts = {g.layer: np.full(g.n_heads, 0.01) for g in gates.gates}
    plan = edits.resolve(Edit("target_tau", 50.0), gates, dts)
    taus = [gates.tau(g, dts[g.layer]) / np.exp(plan.offsets[g.layer][0]) for g in gates.gates]
    assert np.median(np.concatenate(taus)) == pytest.approx(50.0, rel=1e-5)


def test_what_show_gates_prints_can_be_edited_and_applied(source: Path, tmp_path: Path) -> None:
    gates = find.find_gates(source)
    shown = statistics.as_json(statistics.layer_gates(gates), {"checkpoint": str(source)})
    wanted = [[7.0, 70.0, 700.0, 7000.0], shown["layers"][1]["tau"], [11.0] * 4]
    for row, tau in zip(shown["layers"], wanted, strict=True):
        row["tau"] = tau
    (tmp_path / "stats.json").write_text(json.dumps(shown))
    plan = edits.resolve(edits.read_table(tmp_path / "stats.json"), gates, {}, force=True)
    rewrite.write_edits(gates, [plan], tmp_path / "out", dts={})
    after = statistics.layer_gates(find.find_gates(tmp_path / "out"))
    for layer, tau in zip(after, wanted, strict=True):
        np.testing.assert_allclose(layer.tau, tau, rtol=1e-5)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("{", "not valid JSON"),
        ("[]", "write one of scale, offset, tau"),
        ({"scale": {}}, "write one of"),
        ({"scale": {"0": 1}, "tau": {"0": 1}}, "write one of"),
        ({"scale": {"x": 1}}, "'x' is not the number of a layer"),
        ({"scale": {"9" * 5000: 1}}, "is not the number of a layer"),
        ({"scale": {"0": 1, "00": 2}}, "layer 0 occurs twice"),
        ('{"scale": {"0": 1, "0": 2}}', "a name occurs twice"),
        ({"layers": [{"layer": 0, "tau": 1}] * 2}, "a name occurs twice"),
        ({"tau": {"0": 30}, "dt_from": "guess"}, "dt_from is 'guess'"),
        ({"scale": {"0": [1, "2"]}}, "needs a number"),
        ({"scale": {"0": -1}}, "positive"),
        ({"tau": {"0": 0}}, "positive"),
        ({"offset": {"0": math.inf}}, "finite"),
        ({"layers": [{"layer": 0}]}, "lacks"),
        ({"scale": {"7": 2}}, "no gate in layer 7"),
        ({"scale": {"0": [1, 2, 3]}}, "has 4 heads, not 3"),
    ],
)
def test_wrong_tables(content: Any, match: str, source: Path, tmp_path: Path) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    (tmp_path / "t.json").write_text(text)
    gates = find.find_gates(source)

    def apply() -> None:
        edits.resolve(edits.read_table(tmp_path / "t.json"), gates, {})

    with pytest.raises(UserError, match=match):
        apply()


def test_tau_are_applied_with_the_dt_that_they_were_read_with(source: Path, tmp_path: Path) -> None:
    """tau "from data" against tau "from weights" is a change of dt, not of gates."""
    gates = find.find_gates(source)
    dts = {g.layer: np.full(g.n_heads, 0.01) for g in gates.gates}
    for dt_from, used, other in (("data", dts, {}), ("weights", {}, dts)):
        about = {"checkpoint": str(source), "dt_from": dt_from}
        shown = statistics.as_json(statistics.layer_gates(gates, used), about)
        (tmp_path / "t.json").write_text(json.dumps(shown))
        edit = edits.read_table(tmp_path / "t.json")
        plan = edits.resolve(edit, gates, used)
        assert max(np.abs(o).max() for o in plan.offsets.values()) < 1e-12
        with pytest.raises(UserError, match=f"--calibrate.*dt_from: {dt_from}|dt_from: data"):
            edits.resolve(edit, gates, other)


def test_extreme_scales_need_force(source: Path) -> None:
    gates = find.find_gates(source)
    for s in (1 / 65, 65.0):
        with pytest.raises(UserError, match="--force"):
            edits.resolve(Edit("scale", s), gates, {})
        assert edits.resolve(Edit("scale", s), gates, {}, force=True).offsets[0].any()
    for s in (1 / 64, 64.0):
        edits.resolve(Edit("scale", s), gates, {})
    with pytest.raises(UserError, match="--force"):
        edits.resolve(Edit("offset", -10.0), gates, {})


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        *(("scale", 0), ("scale", -2), ("scale", math.nan), ("scale", math.inf)),
        *(("offset", math.nan), ("target_tau", 0), ("target_tau", math.inf)),
    ],
)
def test_values_that_are_none(kind: str, value: float) -> None:
    with pytest.raises(UserError, match="--" + kind.replace("_", "-")):
        Edit(kind, value)


def test_untouched_heads_keep_their_bits_negative_zero_included(tmp_path: Path) -> None:
    model = families.build("mamba2")
    with torch.no_grad():
        model.get_parameter("backbone.layers.0.mixer.A_log").copy_(
            torch.tensor([-0.0, 0.0, 1e-42, 2.0])
        )
    model.save_pretrained(tmp_path / "source")
    gates = find.find_gates(tmp_path / "source")
    plan = edits.resolve(Edit("scale", 2.0, heads=frozenset({3})), gates, {})
    raw = gates.checkpoint.read(gates.gates[0].A_log)
    new = plan.edited(gates, gates.gates[0], gates.gates[0].A_log)
    assert new[:3].tobytes() == raw[:3].tobytes()
    wide = plan.edited(gates, gates.gates[0], gates.gates[0].A_log, "F64")
    assert wide[:3].tobytes() == raw[:3].astype(np.float64).tobytes()
    assert new[3] == np.float32(2.0 + math.log(2.0))


def test_a_table_value_that_no_float_holds(tmp_path: Path) -> None:
    for sign in ("", "-"):
        (tmp_path / "t.json").write_text(f'{{"offset": {{"0": {sign}1{"0" * 400}}}}}')
        with pytest.raises(UserError, match="layer 0: each offset must be finite"):
            edits.read_table(tmp_path / "t.json")
