"""Members that train together are what they would be alone; clipping and schedules per member."""

import math

import pytest
import torch

from synthetic import ensemble


def regression(seeds: list[int], steps: int = 30) -> dict[str, torch.Tensor]:
    """Fit each member's own random line with a shared routine."""
    weights, data = ensemble.generators(seeds, 0), ensemble.generators(seeds, 1)
    p = {"w": ensemble.uniform(weights, 1.0, 2, 3), "b": ensemble.normal(weights, 0.1, 2)}

    def losses(_: int) -> torch.Tensor:
        x = ensemble.normal(data, 1.0, 8, 3)
        y = ensemble.linear(x, p["w"], p["b"])
        return ((y - x.sum(-1, keepdim=True)) ** 2).mean((1, 2)) * 50  # large: clipping acts

    ensemble.train(
        p,
        losses,
        ensemble.AdamW(lr=0.05, clip_norm=0.1, weight_decay=0.1),
        ensemble.Schedule(steps, warmup_steps=3, floor=0.1),
        desc="test",
    )
    return p


def test_members_do_not_influence_each_other() -> None:
    together, alone = regression([5, 6, 7]), regression([6])
    for name in together:
        torch.testing.assert_close(together[name][1], alone[name][0], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(together["w"][0], together["w"][1])


def test_clipping_is_per_member() -> None:
    p = {"a": torch.zeros(2, 3, requires_grad=True), "b": torch.zeros(2, 2, 2, requires_grad=True)}
    (p["a"] * torch.tensor([[3.0], [0.01]])).sum().backward()
    (p["b"] * 0.0).sum().backward()
    norms = ensemble.clip_each(p, 1.0)
    assert p["a"].grad is not None
    torch.testing.assert_close(norms, torch.tensor([3.0 * 3**0.5, 0.01 * 3**0.5]))
    torch.testing.assert_close(p["a"].grad[0].norm(), torch.tensor(1.0), rtol=1e-4, atol=0)
    torch.testing.assert_close(p["a"].grad[1], torch.full((3,), 0.01))


def test_the_schedule_warms_up_stays_and_falls_to_its_floor() -> None:
    s = ensemble.Schedule(2000, warmup_steps=100, flat_steps=400, floor=0.1)
    assert s.factor(0) == pytest.approx(0.01)
    assert s.factor(99) == s.factor(300) == s.factor(499) == 1.0
    assert s.factor(1250) == pytest.approx(0.55)
    assert s.factor(1999) == pytest.approx(0.1, abs=1e-4)
    with pytest.raises(ValueError, match="fit"):
        ensemble.Schedule(10, warmup_steps=8, flat_steps=8)


def test_a_diverging_member_is_an_error_not_a_result() -> None:
    p = {"w": torch.ones(2, 2, 2)}
    with pytest.raises(ArithmeticError, match="not finite"):
        ensemble.train(
            p,
            lambda _: p["w"].sum((1, 2)) * math.inf,
            ensemble.AdamW(lr=0.1),
            ensemble.Schedule(2),
            desc="boom",
        )


@pytest.mark.parametrize("steps", [1, 5, 60])
def test_a_diverging_member_is_named_and_leaves_the_others_alone(steps: int) -> None:
    """Steps between two looks: the last one is looked at too, and what it leaves."""

    def trained(weights: torch.Tensor, worst: torch.Tensor) -> tuple[torch.Tensor, dict]:
        p = {"w": weights.clone()}
        found = ensemble.train(
            p,
            lambda step: p["w"].sum((1, 2)) * (worst if step == steps - 1 else 1),
            ensemble.AdamW(lr=0.1),
            ensemble.Schedule(steps),
            desc="boom",
            tolerant=True,
        )
        return p["w"], found

    whole, diverged = trained(torch.ones(2, 2, 2), torch.tensor([1.0, math.inf]))
    assert diverged == {1: steps - 1}
    alone, none = trained(torch.ones(1, 2, 2), torch.ones(1))
    assert none == {}
    torch.testing.assert_close(whole[0], alone[0])


def test_weights_that_the_last_update_breaks_are_seen() -> None:
    p = {"w": torch.ones(2, 2, 2)}

    def broken(_: int) -> None:
        p["w"].data[1, 0, 0] = math.nan

    settings = ensemble.AdamW(lr=0.1), ensemble.Schedule(1)
    found = ensemble.train(
        p, lambda _: p["w"].sum((1, 2)), *settings, desc="x", after=broken, tolerant=True
    )
    assert found == {1: 0}


def test_batched_layers_equal_plain_ones_per_member() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 4, 5, generator=g)
    w, b = torch.randn(2, 3, 5, generator=g), torch.randn(2, 3, generator=g)
    table = torch.randn(2, 7, 5, generator=g)
    tokens = torch.randint(7, (2, 4), generator=g)
    scale, shift = torch.randn(2, 5, generator=g), torch.randn(2, 5, generator=g)
    for m in range(2):
        plain = torch.nn.functional.linear(x[m], w[m], b[m])
        torch.testing.assert_close(ensemble.linear(x, w, b)[m], plain)
        torch.testing.assert_close(ensemble.embedding(table, tokens)[m], table[m][tokens[m]])
        norm = torch.nn.functional.layer_norm(x[m], (5,), scale[m], shift[m])
        torch.testing.assert_close(ensemble.layer_norm(x, scale, shift)[m], norm)
