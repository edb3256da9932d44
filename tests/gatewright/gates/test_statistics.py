"""Statistics of gates: medians, shares, histograms, and the paper's drift table."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from gatewright.errors import UserError
from gatewright.gates import edits, figure, find, growth, rewrite, statistics, tables
from gatewright.gates.edits import Edit
from tests.gatewright.gates import families


def layer(number: int, tau: list[float]) -> statistics.LayerGates:
    values = np.array(tau)
    return statistics.LayerGates(number, "per_head", values, np.exp(-1 / values), np.ones(len(tau)))


def test_tau_per_head_is_the_definition(tmp_path: Path) -> None:
    """Against the parameters as torch sees them, one head at a time."""
    model = families.build("mamba2")
    model.save_pretrained(tmp_path / "m")
    for found in statistics.layer_gates(find.find_gates(tmp_path / "m")):
        mixer = model.backbone.layers[found.layer].mixer
        for head in range(4):
            dt = torch.nn.functional.softplus(mixer.dt_bias[head].double())
            rate = dt * mixer.A_log[head].double().exp()
            assert found.tau[head] == pytest.approx(1 / rate.item(), rel=1e-9)
            assert found.alpha[head] == pytest.approx(torch.exp(-rate).item(), rel=1e-9)


def test_a_mamba1_channel_is_summarised_by_its_median_state(tmp_path: Path) -> None:
    model = families.build("mamba")
    model.save_pretrained(tmp_path / "m")
    (first, _) = statistics.layer_gates(find.find_gates(tmp_path / "m"))
    mixer = model.backbone.layers[0].mixer
    dt = torch.nn.functional.softplus(mixer.dt_proj.bias.double())
    tau = 1 / (dt[:, None] * mixer.A_log.double().exp())
    np.testing.assert_allclose(first.tau, np.median(tau.detach().numpy(), axis=1), rtol=1e-9)


def test_the_models_own_clamp_of_dt_counts(tmp_path: Path) -> None:
    """Nemotron-H never steps below time_step_min, so a low dt_bias does not lengthen tau."""
    model = families.build("nemotron_h")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("dt_bias"):
                parameter.fill_(-30.0)
    model.save_pretrained(tmp_path / "m")
    gates = find.find_gates(tmp_path / "m")
    assert gates.dt_limit[0] == 0.001
    for found in statistics.layer_gates(gates):
        assert (found.dt == 0.001).all()


def test_shares_beyond_contexts_and_the_histogram_count_every_head() -> None:
    layers = [layer(0, [1.0, 5000.0, 20_000.0]), layer(4, [100_000.0])]
    found = statistics.summary(layers)
    assert found["share_beyond"] == {"4096": 0.75, "16384": 0.5, "65536": 0.25}
    assert sum(b["heads"] for b in found["histogram"]) == found["heads"] == 4
    for bin_ in found["histogram"]:
        inside = [t for x in layers for t in x.tau if bin_["from_tokens"] <= t < bin_["to_tokens"]]
        assert len(inside) == bin_["heads"]
    equal = statistics.summary([layer(0, [8.0, 8.0])])
    assert sum(b["heads"] for b in equal["histogram"]) == 2


EXTREME = [
    *(("A_log", 1000.0), ("A_log", 200.0), ("A_log", -200.0), ("A_log", -1000.0)),
    *(("dt_bias", -1e4), ("dt_bias", 1e30)),
]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("other", [0.0, 1000.0])
@pytest.mark.parametrize(("ending", "value"), EXTREME)
def test_extreme_gates_are_shown_and_counted(
    ending: str, value: float, other: float, tmp_path: Path
) -> None:
    """tau of 0 and inf are no numbers to take a logarithm of, and no reason to fail."""
    model = families.build("mamba2")
    with torch.no_grad():
        for layer in model.backbone.layers[:2]:
            getattr(layer.mixer, ending)[:3] = value
            layer.mixer.A_log[0] += other
    model.save_pretrained(tmp_path / "m")
    gates = find.find_gates(tmp_path / "m")
    layers = statistics.layer_gates(gates)
    found = statistics.as_json(layers, {})["summary"]
    assert sum(b["heads"] for b in found["histogram"]) == found["heads"] == 12
    assert len(found["histogram"]) <= statistics.MAX_BINS + 2
    assert not np.isnan(list(found["tau"].values())).any()
    for name, tau in (("0", 0.0), ("inf", np.inf)):
        heads = sum(int((x.tau == tau).sum()) for x in layers)
        rows = [b["heads"] for b in found["histogram"] if b["to_tokens"] == b["from_tokens"] == tau]
        assert rows == [heads] * bool(heads)
        shown = [line.split()[:2] for line in tables.gates_table(layers, "m", "x").splitlines()]
        assert ([name, str(heads)] in shown) == bool(heads)
    ElementTree.fromstring(figure.tau_svg([("m", layers)], "weights"))
    tables.drift_table(statistics.drift(layers, layers))
    plan = edits.resolve(Edit("scale", 2.0), gates, {})
    growth.warnings(plan, gates, 4096, None)
    rewrite.write_edits(gates, [plan], tmp_path / "out", dts={})


@pytest.mark.parametrize("A_log", [1000.0, -1000.0])
def test_no_edit_moves_a_median_that_is_no_length(A_log: float, tmp_path: Path) -> None:
    model = families.build("mamba2")
    with torch.no_grad():
        for layer in model.backbone.layers:
            layer.mixer.A_log.fill_(A_log)
    model.save_pretrained(tmp_path / "m")
    gates = find.find_gates(tmp_path / "m")
    with pytest.raises(UserError, match="--target-tau 50: the median tau .* is (0|inf)"):
        edits.resolve(Edit("target_tau", 50.0), gates, {}, force=True)
    edit = Edit("table", table_key="tau", table=((0, (50.0,)),))
    with pytest.raises(UserError, match="--from: adds -?inf"):
        edits.resolve(edit, gates, {}, force=True)


def test_drift_is_the_papers_table(tmp_path: Path) -> None:
    """|delta alpha| per head, medians over heads; scaling by 2 halves every tau."""
    families.save("mamba2", tmp_path / "a")
    gates = find.find_gates(tmp_path / "a")
    rewrite.write_edits(
        gates, [edits.resolve(Edit("scale", 2.0), gates, {})], tmp_path / "b", dts={}
    )
    before = statistics.layer_gates(gates)
    after = statistics.layer_gates(find.find_gates(tmp_path / "b"))
    found = statistics.drift(before, after)
    assert found["tau_after"] == pytest.approx(found["tau_before"] / 2, rel=1e-5)
    alpha = np.concatenate([x.alpha for x in before])
    assert found["alpha_change"] == pytest.approx(np.median(alpha - alpha**2), rel=1e-4)
    assert statistics.drift(before, before)["alpha_change_max"] == 0
    text = tables.drift_table(found)
    assert len(text.splitlines()) == 2 + 3 + 1
    with pytest.raises(UserError, match="differ in layers or heads"):
        statistics.drift(before, after[:2])


def test_the_figure_draws_every_head(tmp_path: Path) -> None:
    families.save("mamba2", tmp_path / "a")
    layers = statistics.layer_gates(find.find_gates(tmp_path / "a"))
    svg = figure.tau_svg([("<a> & b", layers), ("c", layers)], "weights")
    root = ElementTree.fromstring(svg)
    ns = "{http://www.w3.org/2000/svg}"
    dots = root.findall(f"{ns}circle")
    assert len(dots) == 2 * 12
    for dot in dots:
        assert 0 < float(dot.get("cx", "")) < 860
        assert 0 < float(dot.get("cy", "")) < 420
    assert any("<a> & b" in (t.text or "") for t in root.findall(f"{ns}text"))
    many = [layer(i, list(np.geomspace(1, 1e5, 3000))) for i in range(2)]
    assert figure.tau_svg([("m", many)], "data").count("<circle") == 2 * figure.MAX_DOTS_PER_LAYER
