"""Statistics of gates: medians, shares, histograms, and the paper's drift table."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from gatewright.errors import UserError
from gatewright.gates import edits, figure, find, rewrite, statistics, tables
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
