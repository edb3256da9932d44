"""The transformers models: packed and padded sequences alike, initial gates, drift, sizes."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from synthetic import sequence_models as sm
from synthetic import sequences, trainer
from synthetic.key_value import runs as kv_runs
from synthetic.key_value import settings as kv
from synthetic.key_value import task as tasks
from synthetic.rules import examples as ex
from synthetic.rules import runs as rules_runs
from synthetic.rules import settings as rules
from synthetic.rules import world

TINY = {
    "mamba2": sm.Size("mamba2", d_model=16, layers=2, heads=2, head_dim=16, d_state=8),
    "gpt_neox": sm.Size("gpt_neox", d_model=16, layers=2, heads=2, head_dim=8, ffn=32),
    "llama": sm.Size("llama", d_model=16, layers=2, heads=2, head_dim=8, ffn=32),
}


def batch_of(count: int = 6) -> sequences.Batch:
    task = dataclasses.replace(kv.SMALL.task, entries=50)
    table = tasks.dictionary(task, 0)
    return tasks.sample(task, table, count, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", TINY)
def test_a_sequence_is_answered_alike_alone_and_in_company(family: str) -> None:
    model = sm.build(TINY[family], kv.SMALL.task.vocab, 64, seed=0)
    batch = batch_of()
    together = sm.answer_logits(model, batch)
    alone = [sm.answer_logits(model, batch.rows(torch.tensor([i]))) for i in range(len(batch))]
    torch.testing.assert_close(together, torch.cat(alone), atol=2e-5, rtol=1e-4)
    # Logits stand before the answers: transformers' own forward pass on one whole row.
    row, valid, answer = batch.tokens[0], batch.valid[0], batch.answer[0]
    whole = model(input_ids=row[valid][None]).logits[0]
    torch.testing.assert_close(
        alone[0], whole[answer[valid].nonzero()[:, 0] - 1], atol=2e-5, rtol=1e-4
    )


def test_answers_are_whole() -> None:
    model = sm.build(TINY["mamba2"], kv.SMALL.task.vocab, 64, seed=0)
    batch = batch_of()
    hits = sm.answer_logits(model, batch).argmax(-1) == batch.targets()
    by_hand = [bool(hits[i : i + 2].all()) for i in range(0, len(hits), 2)]
    assert sm.right_answers(model, batch, rows=4).tolist() == by_hand


@pytest.mark.parametrize("offset", [-10.0, 0.0, 2.0])
def test_gates_start_as_the_paper_says(offset: float) -> None:
    size = sm.Size("mamba2", d_model=128, layers=3, heads=64, head_dim=4, d_state=4)
    model = sm.build(size, 20, 64, seed=1, offset=offset)
    A_log = torch.cat([m.A_log.detach() for m in sm.mixers(model)]).double() - offset
    rate = A_log.exp()
    assert 1 <= rate.min() < 1.8
    assert 15 < rate.max() <= 16 + 1e-4
    assert float(rate.mean()) == pytest.approx(8.5, abs=1.0)  # U(1, 16)
    plain = sm.build(size, 20, 64, seed=1)
    for a, b in zip(model.state_dict().items(), plain.state_dict().items(), strict=True):
        assert a[0].endswith("A_log") or torch.equal(a[1], b[1])
    with pytest.raises(ValueError, match="no gates"):
        sm.build(TINY["llama"], 20, 64, seed=0, offset=1.0)


def test_drift_is_the_median_over_all_heads() -> None:
    model = sm.build(TINY["mamba2"], kv.SMALL.task.vocab, 64, seed=0)
    batch = batch_of()
    before = sm.gate_state(model, batch)
    with torch.no_grad():
        for mixer in sm.mixers(model):
            mixer.A_log += math.log(2)
    after = sm.gate_state(model, batch)
    found = sm.drift(before, after)
    for source in ("weights", "data"):
        assert len(before[source].alpha) == 4
        half = found[f"tau_initial_{source}"] / 2
        assert found[f"tau_final_{source}"] == pytest.approx(half, rel=1e-3)
        assert found[f"delta_alpha_{source}"] == pytest.approx(
            float(np.median(np.abs(after[source].alpha - before[source].alpha)))
        )


def test_the_measured_step_is_the_mean_of_the_mixers_own() -> None:
    model = sm.build(TINY["mamba2"], kv.SMALL.task.vocab, 64, seed=0)
    for mixer in sm.mixers(model):  # with no input part, every step is the bias's
        with torch.no_grad():
            mixer.in_proj.weight[-mixer.num_heads :] = 0
    state = sm.gate_state(model, batch_of())
    np.testing.assert_allclose(state["data"].alpha, state["weights"].alpha, rtol=1e-6)
    np.testing.assert_allclose(state["data"].tau, state["weights"].tau, rtol=1e-6)


def test_tau_is_finite_where_alpha_rounds_to_one() -> None:
    model = sm.build(TINY["mamba2"], kv.SMALL.task.vocab, 64, seed=0, offset=-29.9)
    state = sm.gate_state(model, batch_of())
    with torch.no_grad():
        for mixer in sm.mixers(model):
            mixer.A_log -= 10
    assert (sm.gate_state(model, batch_of())["weights"].alpha == 1).all()
    found = sm.drift(state, sm.gate_state(model, batch_of()))
    assert all(math.isfinite(v) and v >= 0 for v in found.values())
    assert found["tau_final_data"] == pytest.approx(
        found["tau_initial_data"] * math.exp(10), rel=1e-3
    )


def test_muon_takes_the_layers_matrices_and_adamw_the_rest() -> None:
    for family in ("mamba2", "llama"):
        model = sm.build(TINY[family], 20, 64, seed=0)
        recipe = dataclasses.replace(rules.SMALL.recipe, optimizer="muon")
        adamw, muon = trainer.optimizers(model, recipe)
        names = {id(p): n for n, p in model.named_parameters()}
        taken = [names[id(p)] for g in muon.param_groups for p in g["params"]]
        assert taken
        assert all("layers" in n and n.endswith("weight") for n in taken)
        rest = {names[id(p)]: g["weight_decay"] for g in adamw.param_groups for p in g["params"]}
        assert set(taken) | set(rest) == set(names.values())
        assert not set(taken) & set(rest)
        decayed = {n for n, w in rest.items() if w > 0}
        assert all("embed" in n or "conv1d.weight" in n for n in decayed)
        assert not any(n.endswith(("A_log", "dt_bias", ".D", "bias")) for n in decayed)


def test_micro_batches_give_the_whole_batchs_gradient() -> None:
    batch = batch_of(7)
    grads = []
    for micro in (0, 3):
        model = sm.build(TINY["mamba2"], kv.SMALL.task.vocab, 64, seed=0)
        recipe = dataclasses.replace(kv.SMALL.recipe, micro_batch=micro)
        loss = trainer.backward(model, batch, recipe)
        grads.append((loss, [p.grad for p in model.parameters()]))
    assert grads[0][0] == pytest.approx(grads[1][0], rel=1e-5)
    for a, b in zip(grads[0][1], grads[1][1], strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-3)


PAPER_PARAMETERS = {
    ("key_value", "mamba2"): 90_419_904,
    ("key_value", "gpt_neox"): 85_107_456,
    ("rules", "mamba2"): 105_195_712,
    ("rules", "llama"): 51_433_472,
}


@pytest.mark.slow
@pytest.mark.parametrize(("experiment", "name"), PAPER_PARAMETERS)
def test_paper_sizes_are_built_and_take_two_steps(experiment: str, name: str) -> None:
    offset = -3.0 if name == "mamba2" else None
    small = {"steps": 2, "batch": 2, "eval_every": 2, "micro_batch": 1, "bf16": False}
    if experiment == "key_value":
        s = kv.PAPER
        run = kv_runs.Run("best_first", name, offset, 0)
        model = kv_runs.build(s, run)
        task = dataclasses.replace(s.task, pairs=3)  # the model's size, not the context's
        table = tasks.dictionary(s.task, 0)
        g = torch.Generator().manual_seed(0)
        batch = tasks.sample(task, table, 2, g)
        draw = lambda step: batch  # noqa: E731
    else:
        s = rules.PAPER
        model = rules_runs.build(s, rules_runs.Run("length", name, offset, 0))
        w = world.make(s.world, 0)
        rng = np.random.default_rng(0)
        asked = ex.questions(w, 2, rng, None)
        batch = ex.encode(ex.fill(w, asked, s.training("length"), np.array([1, 2]), rng))
        draw = lambda step: batch  # noqa: E731
    assert sm.parameter_count(model) == PAPER_PARAMETERS[experiment, name]
    before = [p.detach().clone() for p in list(model.parameters())[:3]]
    recipe = dataclasses.replace(s.recipe, **small)
    done = trainer.train(model, draw, recipe, lambda _: {}, desc="paper size")
    assert done.steps == 2
    assert 0 < done.curve[0]["loss"] < 20
    assert all(
        not torch.equal(a, b) for a, b in zip(before, list(model.parameters())[:3], strict=True)
    )
