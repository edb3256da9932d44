"""The closed forms against the simplified SSM written token by token, gradients too."""

import pytest
import torch

from synthetic.theory import flow, long_context, short_context
from synthetic.theory.explicit import hidden_state, logistic_loss, output


@pytest.mark.parametrize(("length", "distance"), [(1, 1), (5, 2), (7, 7)])
def test_gram_gradients_equal_autograd_on_explicit_tokens(length: int, distance: int) -> None:
    task = short_context.Task(dim=6, points=9, length=length, distance=distance, noise=0.3)
    data = short_context.Dictionaries(task, [0, 1])
    model = short_context.Readouts(data, torch.tensor([0.3, 0.8]), torch.tensor([True, False]))
    for _ in range(3):  # away from zero, where every term counts
        model.step(16, 2.0)
    context, labels = data.sample(11)
    got = model.gradients(context, labels)
    for m in range(2):
        for s in range(2):
            points = data.points[s]
            w = (model.c_MSP[m, s] @ points).requires_grad_()
            v = model.v_MS[m, s].clone().requires_grad_()
            lam = model.lam_MS[m, s].clone().requires_grad_()
            # Columns run by distance from the query; the explicit model wants oldest first.
            x, y = points[context[s].flip(1)], labels[s].flip(1)
            f = output(w, v, lam, x, y, points[context[s, :, distance - 1]])
            logistic_loss(f, labels[s, :, distance - 1]).backward()
            torch.testing.assert_close(got[0][m, s] @ points, w.grad)
            torch.testing.assert_close(got[1][m, s], v.grad)
            torch.testing.assert_close(got[2][m, s], lam.grad)


def test_a_frozen_gate_stays_and_seeds_do_not_mix() -> None:
    task = short_context.Task(dim=8, points=6, length=3, distance=2, noise=0.1)
    both = short_context.Readouts(
        short_context.Dictionaries(task, [3, 4]), torch.tensor([0.5, 0.5]), torch.tensor([1, 0])
    )
    alone = short_context.Readouts(
        short_context.Dictionaries(task, [4]), torch.tensor([0.5]), torch.tensor([1])
    )
    for _ in range(20):
        both.step(32, 0.5)
        alone.step(32, 0.5)
    torch.testing.assert_close(both.alpha()[1], torch.full((2,), 0.5, dtype=torch.float64))
    assert (both.alpha()[0] - 0.5).abs().min() > 1e-4
    torch.testing.assert_close(both.c_MSP[0, 1], alone.c_MSP[0, 0])
    torch.testing.assert_close(both.lam_MS[0, 1], alone.lam_MS[0, 0])


def test_contexts_hold_distinct_points_and_the_right_share_of_flips() -> None:
    task = short_context.Task(dim=4, points=10, length=6, distance=2, noise=0.2)
    data = short_context.Dictionaries(task, [0])
    context, labels = data.sample(4_000)
    assert all(len(set(row)) == 6 for row in context[0, :200].tolist())
    flipped = (labels[0] != data.labels_SP[0][context[0]]).double().mean()
    assert abs(float(flipped) - 0.2) < 0.01
    with pytest.raises(ValueError, match="distance"):
        short_context.Task(dim=4, points=10, length=6, distance=7, noise=0.2)


def test_sgd_on_orthonormal_points_follows_the_gradient_flow() -> None:
    alpha0, lr = 0.0038, 0.3
    task = short_context.Task(dim=64, points=32, length=4, distance=1, noise=0.1)
    data = short_context.Dictionaries(task, [0, 1, 2], orthonormal=True)
    model = short_context.Readouts(data, torch.tensor([alpha0]), torch.tensor([True]))
    escaped = torch.zeros(3)
    for step in range(1, 600):
        model.step(256, lr)
        memory, retrieval = model.margins()
        escaped[(escaped == 0) & (step > 5) & (retrieval[0] >= memory[0])] = step
        if bool((escaped > 0).all()):
            break
    assert float(escaped.median()) == pytest.approx(flow.full_flow(alpha0, 32, 0.1) / lr, rel=0.03)


def explicit_statistics(
    model: long_context.Readouts, m: int, batch: int, length: int, generator: torch.Generator
) -> torch.Tensor:
    """Return (batch, 4) of f, df/dv, df/dlam and |h_x|^2 from explicit Gaussian tokens."""
    dim = model.w.shape[1]
    x = torch.randn(batch, length, dim, generator=generator, dtype=torch.float64) / dim**0.5
    y = torch.randint(0, 2, (batch, length), generator=generator).double() * 2 - 1
    where = torch.randint(0, length, (batch,), generator=generator)
    rows = torch.arange(batch)
    x_q, target = x[rows, where], y[rows, where]
    w, v = model.w[m].double(), model.v[m].double()
    lam = model.lam[m].clone()
    h = hidden_state(x, y, x_q, lam)
    f, tangent = torch.func.jvp(
        lambda u: output(w, v, u, x, y, x_q), (lam,), (torch.ones((), dtype=torch.float64),)
    )
    # times the target, so that means are not zero by symmetry
    return torch.stack(
        [
            f * target,
            h[:, -1] * target,
            tangent * target,
            f**2,
            tangent**2,
            f * tangent,
            (h[:, :-1] ** 2).sum(1),
        ],
        1,
    )


def test_sampled_hidden_states_have_the_distribution_of_explicit_tokens() -> None:
    dim, length, batch = 5, 7, 60_000
    generator = torch.Generator().manual_seed(5)
    model = long_context.Readouts(torch.tensor([2.0, 20.0]), torch.tensor([1, 1]), dim, length)
    model.w = torch.randn(2, dim, generator=generator)
    model.v = torch.tensor([0.7, -1.3])
    e = long_context.sample(batch, dim, length, generator)
    f, label, df_dlam, along, spread = model.forward(e)
    target = e.target_B[:, None]
    norm2 = (e.query_BD**2).sum(1, keepdim=True)
    h2 = along**2 * norm2 + spread**2 * (e.noise_BD**2).sum(1, keepdim=True)
    quick = torch.stack(
        [f * target, label * target, df_dlam * target, f**2, df_dlam**2, f * df_dlam, h2], 2
    ).double()
    for m in range(2):
        slow = explicit_statistics(model, m, batch, length, generator)
        gap = quick[:, m].mean(0) - slow.mean(0)
        error = (quick[:, m].var(0) / batch + slow.var(0) / batch).sqrt()
        assert float((gap / error).abs().max()) < 4.5, (gap / error).tolist()


def test_long_context_steps_are_sgd_on_the_sampled_loss() -> None:
    generator = torch.Generator().manual_seed(1)
    model = long_context.Readouts(torch.tensor([3.0, 9.0]), torch.tensor([1, 0]), 4, 6)
    model.w, model.v = torch.randn(2, 4, generator=generator), torch.tensor([0.5, 1.5])
    e = long_context.sample(50, 4, 6, generator)
    w, v = model.w.clone().requires_grad_(), model.v.clone().requires_grad_()
    probe = long_context.Readouts(torch.tensor([3.0, 9.0]), torch.tensor([1, 0]), 4, 6)
    probe.w, probe.v = w, v
    f = probe.forward(e)[0]
    torch.nn.functional.softplus(-e.target_B[:, None] * f).mean(0).sum().backward()
    before = (model.w.clone(), model.v.clone(), model.tau().clone())
    model.step(e, 0.1)
    torch.testing.assert_close(before[0] - 0.1 * w.grad, model.w)
    torch.testing.assert_close(before[1] - 0.1 * v.grad, model.v)
    assert float(model.tau()[1]) == float(before[2][1])
    assert float(model.tau()[0]) != float(before[2][0])
