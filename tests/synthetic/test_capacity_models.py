"""The capacity room's models against plain recurrences, its circuits, its view inside."""

import pytest
import torch

from synthetic import ensemble
from synthetic.capacity import designed, full_mamba, linear_mamba, operators, tasks, variants


def batches(task: tasks.Task, members: int, count: int = 3) -> tasks.Batch:
    streams = [torch.Generator().manual_seed(i) for i in range(members)]
    return tasks.stack([tasks.sample(task, count, g) for g in streams])


@pytest.mark.parametrize("name", ["ar", "mqar"])
@pytest.mark.parametrize(("facts", "conv"), [(1, True), (3, True), (5, False)])
def test_the_table_form_equals_the_recurrence_gradients_too(
    name: str, facts: int, conv: bool
) -> None:
    task = tasks.make(name, 12, facts)  # type: ignore[arg-type]
    p = linear_mamba.initial([linear_mamba.Size(12, 5, n, conv) for n in (3, 4)], [0, 1])
    p = {k: v.double().requires_grad_() for k, v in p.items()}
    batch = batches(task, 2)
    quick = linear_mamba.logits(p, batch)
    torch.set_default_dtype(torch.float64)
    try:
        slow = torch.stack(
            [
                torch.stack(
                    [
                        linear_mamba.reference_logits(p, m, row)[where]
                        for row, where in zip(batch.tokens[m], batch.positions[m], strict=True)
                    ]
                )
                for m in range(2)
            ]
        )
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(quick, slow)
    weight = torch.randn(quick.shape, generator=torch.Generator().manual_seed(9)).double()
    quick_grads = torch.autograd.grad((quick * weight).sum(), list(p.values()), retain_graph=True)
    slow_grads = torch.autograd.grad((slow * weight).sum(), list(p.values()))
    for a, b in zip(quick_grads, slow_grads, strict=True):
        torch.testing.assert_close(a, b)


def test_one_layer_with_one_head_is_the_linear_mamba() -> None:
    task = tasks.make("mqar", 20, 3)
    p = linear_mamba.initial([linear_mamba.Size(20, 6, 4)] * 2, [0, 1])
    renamed = {k if k == "embedding" else f"{k}.0": v for k, v in p.items()}
    batch = batches(task, 2)
    torch.testing.assert_close(
        variants.logits(renamed, variants.Size(20, 6, 4), batch), linear_mamba.logits(p, batch)
    )


def test_shared_heads_are_special_cases_of_their_own() -> None:
    """MHA with equal keys and queries is MVA; with equal values and keys, MQA."""
    task, g = tasks.make("mqar", 20, 3), [0, 1]
    batch = batches(task, 2)
    mva = variants.Size(20, 6, 4, pattern="mva", heads=3)
    p = variants.initial(mva, g)
    repeated = {
        **p,
        "b_proj.0": p["b_proj.0"].repeat(1, 3, 1),
        "c_proj.0": p["c_proj.0"].repeat(1, 3, 1),
    }
    mha = variants.Size(20, 6, 4, pattern="mha", heads=3)
    torch.testing.assert_close(
        variants.logits(repeated, mha, batch), variants.logits(p, mva, batch)
    )
    single = variants.Size(20, 6, 4)
    torch.testing.assert_close(variants.logits(p, single, batch), variants.logits(p, mva, batch))

    mqa = variants.Size(20, 6, 4, pattern="mqa", heads=3)
    q = variants.initial(mqa, g)
    found = variants.logits(q, mqa, batch)
    # The same layer by hand: every head reads the first 4 channels with its own query.
    z = ensemble.linear(ensemble.embedding(q["embedding"], batch.tokens), q["in_proj.0"])
    w = q["conv.0"][:, None, None]
    z = z * w[..., 1] + torch.nn.functional.pad(z[:, :, :-1] * w[..., 0], (0, 0, 1, 0))
    b = ensemble.linear(z, q["b_proj.0"])
    past = torch.tril(torch.ones(z.shape[2], z.shape[2]))
    heads = [
        ((ensemble.linear(z, c) @ b.mT) * past) @ z[..., :4] for c in q["c_proj.0"].split(4, 1)
    ]
    u = ensemble.linear(ensemble.linear(torch.cat(heads, -1), q["out_proj.0"]), q["embedding"])
    want = u.gather(2, batch.positions[..., None].expand(-1, -1, -1, 20))
    torch.testing.assert_close(found, want)
    with pytest.raises(ValueError, match="does not divide"):
        variants.Size(20, 5, 4, pattern="mha", heads=4)


def test_layers_add_up_and_see_only_the_past() -> None:
    task = tasks.make("mqar", 20, 3)
    size = variants.Size(20, 6, 4, layers=3)
    p = variants.initial(size, [0])
    batch = batches(task, 1)
    want = variants.logits(p, size, batch)
    first = int(batch.positions.min())
    changed = batch.tokens.clone()
    changed[..., first + 1 :] = 0
    again = variants.logits(p, size, tasks.Batch(changed, batch.positions, batch.answers))
    early = (batch.positions == first)[..., None].expand_as(want)
    torch.testing.assert_close(again[early], want[early])
    silent = {k: torch.zeros_like(v) if k == "out_proj.1" else v for k, v in p.items()}
    assert not torch.allclose(variants.logits(silent, size, batch), want)


def test_the_selective_scan_equals_a_token_loop_gradients_too() -> None:
    g = torch.Generator().manual_seed(0)
    x, b, c = (torch.randn(2, 3, 7, w, generator=g).double() for w in (4, 5, 5))
    dt = torch.rand(2, 3, 7, 4, generator=g).double()
    a = -torch.rand(2, 4, 5, generator=g).double()
    inputs = [t.requires_grad_() for t in (x, dt, a, b, c)]
    quick = full_mamba.selective_scan(*inputs)
    slow = torch.zeros_like(quick)
    for m in range(2):
        for s in range(3):
            h = torch.zeros(4, 5).double()
            for t in range(7):
                h = torch.exp(dt[m, s, t, :, None] * a[m]) * h
                h = h + (dt[m, s, t] * x[m, s, t])[:, None] * b[m, s, t]
                slow[m, s, t] = h @ c[m, s, t]
    torch.testing.assert_close(quick, slow)
    for i, j in zip(
        torch.autograd.grad(quick.square().sum(), inputs),
        torch.autograd.grad(slow.square().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(i, j)


def test_full_mamba_starts_with_steps_between_a_thousandth_and_a_tenth_and_learns() -> None:
    size = full_mamba.Size(16, 8, 4)
    p = full_mamba.initial(size, [0, 1])
    dt = torch.nn.functional.softplus(p["dt_bias"])
    assert float(dt.min()) > 0.9e-3
    assert float(dt.max()) < 0.11
    task = tasks.make("ar", 16, 1)
    trained = full_mamba.train(size, [0, 1], task, 120, "test")
    assert min(full_mamba.accuracy(trained, size, task, 200)) > 0.2  # chance is 1/8


def test_theorem_3_1_is_perfect_and_theorem_3_2_is_the_score() -> None:
    ar, task = tasks.make("ar", 40, 6), tasks.make("mqar", 40, 6)
    assert set(designed.non_compressive_accuracy(ar, 100).values()) == {1.0}
    found = designed.non_compressive_accuracy(task, 100)
    assert found["among_values"] == 1.0
    assert found["among_all"] < 1.0  # random tokens repeat keys, and are followed by others
    g = torch.Generator().manual_seed(3)
    values, rows = designed.random_signs(40, 8, g), torch.randn(5, 8, generator=g)
    batch = tasks.sample(task, 4, g)
    weights = designed.as_linear_mamba(values, rows)
    torch.testing.assert_close(
        linear_mamba.logits(weights, tasks.stack([batch]))[0],
        designed.score(values, values @ rows.T, batch),
    )


@pytest.mark.parametrize(("name", "want"), [("ar", 0.680), ("mqar", 0.497)])
def test_the_designed_circuit_recalls_as_measured_independently(name: str, want: float) -> None:
    task = tasks.make(name, 512, 16)  # type: ignore[arg-type]
    found = designed.accuracy(task, 32, 16, draws=3, sequences=300, seed=0)
    assert sum(found) / 3 == pytest.approx(want, abs=0.04)


def test_operators_of_the_perfect_circuit_are_identities_and_its_state_is_the_table() -> None:
    p, task = designed.non_compressive(40), tasks.make("mqar", 40, 6)
    seen = operators.measure(p, 0)
    assert seen["G_vv"]["retrieved"] == seen["G_kq"]["retrieved"] == 1.0
    assert seen["shift"] == {"G_vv": 1.0, "G_kq": 1.0}
    state = operators.invert_state(p, 0, task, sequences=20, seed=0)
    assert state["inverted"] == 1.0
    # It writes all 11 adjacent pairs of distinct tokens with equal weight; 6 are facts.
    assert state["explained"] == pytest.approx(6 / 11)
    flipped = {**p, "out_proj": -p["out_proj"], "b_proj": -p["b_proj"]}
    again = operators.measure(flipped, 0)
    assert (again["G_vv"]["sign"], again["G_kq"]["sign"]) == (-1, -1)
    assert again["G_vv"]["retrieved"] == again["G_kq"]["retrieved"] == 1.0
    bare = operators.without_shift(p)
    assert linear_mamba.accuracy(bare, task, 50)[0] < 0.4


def test_operators_reproduce_the_model() -> None:
    p = linear_mamba.initial([linear_mamba.Size(10, 4, 3)], [0])
    task = tasks.make("mqar", 10, 2)
    batch = tasks.stack([tasks.sample(task, 1, torch.Generator().manual_seed(0))])
    g_vv, g_kq = operators.invariants(p, 0)
    tokens = batch.tokens[0, 0]
    one_hot = torch.eye(10).double()
    previous = torch.cat([torch.zeros(1, 10).double(), one_hot[tokens[:-1]]])
    xi = torch.cat([previous, one_hot[tokens]], 1)
    for i, t in enumerate(batch.positions[0, 0].tolist()):
        want = sum(g_vv @ xi[s] * (xi[s] @ g_kq @ xi[t]) for s in range(t + 1))
        torch.testing.assert_close(
            linear_mamba.logits(p, batch)[0, 0, i].double(), want, rtol=1e-4, atol=1e-5
        )
