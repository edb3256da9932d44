"""transformers' Mamba2 gives the same numbers when bound to our kernels."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Mamba2Config, Mamba2ForCausalLM
from transformers.models.mamba2 import modeling_mamba2

from gatewright.kernels import bind_transformers
from tests.gatewright.kernels.oracle import relative_error

PATCHED = ("Mamba2Mixer", "Mamba2RMSNorm", "Mamba2ForCausalLM", "Mamba2Model")


@pytest.fixture(scope="module")
def model() -> Mamba2ForCausalLM:
    torch.manual_seed(0)
    config = Mamba2Config(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_heads=4,
        head_dim=16,
        state_size=8,
        n_groups=2,
        expand=2,
        chunk_size=16,
        use_bias=False,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
    )
    model = Mamba2ForCausalLM(config)
    with torch.no_grad():  # larger steps, so that what is remembered shows in the logits
        for layer in model.backbone.layers:
            layer.mixer.dt_bias += 3
    return model


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(2, 64, (3, 37), generator=torch.Generator().manual_seed(0))


def logits_and_gradients(
    model: Mamba2ForCausalLM, ids: Tensor, mask: Tensor | None
) -> dict[str, Tensor]:
    model.zero_grad()
    out = model(input_ids=ids, labels=ids, attention_mask=mask, use_cache=False)
    out.loss.backward()
    return {"logits": out.logits.detach()} | {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_training_step(
    kernels: str, model: Mamba2ForCausalLM, ids: Tensor, train: bool, padded: bool
) -> None:
    mask = torch.ones_like(ids)
    mask[0, :5] = 0  # padding on the left
    mask[1, 30:] = 0  # and on the right
    given = mask if padded else None
    model.train(train)
    truth = logits_and_gradients(model, ids, given)
    with bind_transformers():
        found = logits_and_gradients(model, ids, given)
    assert found.keys() == truth.keys()
    for name, value in truth.items():
        assert relative_error(found[name], value.double()) < 2e-5, name


def test_generation_with_left_padding(kernels: str, model: Mamba2ForCausalLM, ids: Tensor) -> None:
    model.eval()
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    options: dict[str, Any] = {
        "attention_mask": mask,
        "max_new_tokens": 12,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    truth = model.generate(input_ids=ids, **options)
    with bind_transformers():
        found = model.generate(input_ids=ids, **options)
    assert torch.equal(truth.sequences, found.sequences)
    for a, b in zip(found.logits, truth.logits, strict=True):
        assert relative_error(a, b.double()) < 2e-5


@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_samples_do_not_see_each_other(
    kernels: str, model: Mamba2ForCausalLM, ids: Tensor, checkpointing: bool
) -> None:
    """seq_idx reaches every layer, also when a layer is computed again in the backward pass."""
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    try:
        with bind_transformers():
            runs = []
            packed = {"input_ids": ids[:1], "seq_idx": (torch.arange(37) >= 20).int()[None]}
            for batches in ([packed], [{"input_ids": ids[:1, :20]}, {"input_ids": ids[:1, 20:]}]):
                model.zero_grad()
                logits = torch.cat([model(**b, use_cache=False).logits for b in batches], dim=1)
                logits.square().sum().backward()
                grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
                runs.append([logits.detach(), *grads])
    finally:
        model.gradient_checkpointing_disable()
    for together, apart in zip(*runs, strict=True):
        assert relative_error(together, apart.double()) < 2e-5


def test_packed_samples_differ_from_one_sample(
    kernels: str, model: Mamba2ForCausalLM, ids: Tensor
) -> None:
    model.eval()
    with bind_transformers(), torch.no_grad():
        one = model(input_ids=ids[:1]).logits
        two = model(input_ids=ids[:1], seq_idx=(torch.arange(37) >= 20).int()[None]).logits
    assert torch.allclose(one[:, :20], two[:, :20], atol=1e-6)
    assert not torch.allclose(one[:, 20:], two[:, 20:], atol=1e-4)


def test_a_packed_prefill_is_continued_from_its_last_sample(
    kernels: str, model: Mamba2ForCausalLM, ids: Tensor
) -> None:
    model.eval()
    seq_idx = (torch.arange(37) >= 35).int()[None]  # shorter than the convolution is wide
    with bind_transformers(), torch.no_grad():
        packed = model(input_ids=ids[:1], seq_idx=seq_idx, use_cache=True).cache
        alone = model(input_ids=ids[:1, 35:], use_cache=True).cache
        token = ids[1:2, :1]
        a, b = (model(input_ids=token, cache=c, use_cache=True).logits for c in (packed, alone))
        assert relative_error(a, b.double()) < 2e-5
        with pytest.raises(ValueError, match="filled cache"):
            model(input_ids=ids[:1], seq_idx=seq_idx, cache=packed)


def test_packed_samples_on_cuda_never_go_to_code_that_mixes_them(
    monkeypatch: pytest.MonkeyPatch, ids: Tensor
) -> None:
    """Without its kernels transformers' mixer takes seq_idx and ignores it."""
    from gatewright.kernels import transformers_binding as binding

    for missing in ("mamba_ssm.ops.triton.ssd_combined", "causal_conv1d"):
        monkeypatch.setattr(
            binding.backend,
            "cuda_module",
            lambda name, gone=missing: None if name == gone else torch,
        )
        assert not binding._keeps_apart_on_cuda(ids)
        assert binding._keeps_apart_on_cuda(None)
    monkeypatch.setattr(binding.backend, "cuda_module", lambda name: torch)
    assert binding._keeps_apart_on_cuda(ids)


def test_binding_twice_is_binding_once_and_undo_restores() -> None:
    before = [getattr(modeling_mamba2, name).forward for name in PATCHED]
    binding = bind_transformers()
    assert bind_transformers() is binding
    assert all(
        getattr(modeling_mamba2, name).forward is not f
        for name, f in zip(PATCHED, before, strict=True)
    )
    binding.undo()
    binding.undo()
    assert [getattr(modeling_mamba2, name).forward for name in PATCHED] == before
    with bind_transformers() as again:
        assert again is not binding
    assert [getattr(modeling_mamba2, name).forward for name in PATCHED] == before
