"""The capacity room's one loss and loop: PyTorch's own cross-entropy, and members kept apart."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from synthetic.capacity import linear_mamba, tasks, training


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_smoothed_cross_entropy_of_the_tied_logits(smoothing: float) -> None:
    g = torch.Generator().manual_seed(0)
    readout = torch.randn(2, 5, 3, 7, generator=g).requires_grad_()
    table = torch.randn(2, 11, 7, generator=g).requires_grad_()
    answers = torch.randint(11, (2, 5, 3), generator=g)
    want = torch.stack(
        [
            cross_entropy((r @ t.T).flatten(0, 1), a.flatten(), label_smoothing=smoothing)
            for r, t, a in zip(readout, table, answers, strict=True)
        ]
    )
    found = training.cross_entropy(readout, table, answers, smoothing)
    torch.testing.assert_close(found, want)
    weights = torch.tensor([1.0, -2.0])
    for a, b in zip(
        torch.autograd.grad((found * weights).sum(), (readout, table)),
        torch.autograd.grad((want * weights).sum(), (readout, table)),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_a_member_trains_as_it_would_alone_and_a_frozen_convolution_stays() -> None:
    task = tasks.make("mqar", 16, 2)
    size = linear_mamba.Size(16, 6, 3, conv=False)
    both = linear_mamba.train([size] * 2, [0, 1], task, 12, "together")
    alone = linear_mamba.train([size], [1], task, 12, "alone")
    for name in both:
        torch.testing.assert_close(both[name][1], alone[name][0], rtol=1e-4, atol=1e-5)
    assert set(both["conv"][..., 0].flatten().tolist()) == {0.0}  # the previous token's tap
    assert not torch.equal(both["embedding"], linear_mamba.initial([size] * 2, [0, 1])["embedding"])
