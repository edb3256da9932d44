"""bf16 training leaves A_log, D and dt_bias in fp32, at every stage of their life."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from sft import train
from sft.engine import (
    FP32_PARAMETERS,
    gathered,
    initialize,
    learning_rate,
    load_checkpoint,
    parameter_groups,
    save_checkpoint,
)
from sft.objective import PackedLoss
from sft.packing import collate
from sft.recipes import RECIPES

CONFIG = dataclasses.replace(
    RECIPES.get("mamba2_debug_cpu"), context_tokens=512, global_batch_packs=1, precision="bf16"
)


def gate_dtypes(module: torch.nn.Module) -> set[torch.dtype]:
    found = {
        name: p.dtype
        for name, p in module.named_parameters()
        if name.rpartition(".")[2] in FP32_PARAMETERS
    }
    assert len(found) == 2 * len(FP32_PARAMETERS)
    return set(found.values())


def a_log(engine: Any) -> torch.Tensor:
    """Return a copy of the first layer's A_log, whole under ZeRO-3 too."""
    with gathered(engine) as module:
        whole: torch.Tensor = module.model.backbone.layers[0].mixer.A_log
        return whole.detach().clone()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gates_stay_fp32_under_bf16(
    stage: int, models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    from sft import parent
    from sft.dataset import Samples

    samples = Samples(data / "train")
    config = dataclasses.replace(CONFIG, zero_stage=stage)
    module = PackedLoss(parent.load(parent.inspect(models["mamba2"])))
    assert gate_dtypes(module) == {torch.float32}  # after load
    engine = initialize(module, config, world_size=1)
    products = []
    layer = module.model.backbone.layers[0].mixer.in_proj
    layer.register_forward_hook(lambda m, i, out: products.append(out.dtype))
    before = a_log(engine)
    batch = collate(samples, [[0, 1]], pad_id=0)
    engine.backward(engine(batch, 1 / len(batch.labels)))
    engine.step()
    assert products == [torch.bfloat16]  # it did compute in bf16
    assert gate_dtypes(module) == {torch.float32}  # after a step
    after = a_log(engine)
    assert not torch.equal(before, after)
    # A change that bf16 could not hold: the weights are not rounded to it.
    assert not torch.equal(after, after.bfloat16().float())
    save_checkpoint(engine, tmp_path / "ckpt", 1, {"step": 1}, keep=1)
    with torch.no_grad(), gathered(engine, change=True):
        module.model.backbone.layers[0].mixer.A_log.zero_()
    assert not a_log(engine).any()
    load_checkpoint(engine, tmp_path / "ckpt", "step_0000001")
    assert gate_dtypes(module) == {torch.float32}  # after a reload
    assert torch.equal(a_log(engine), after)
    with gathered(engine):
        parent.save(module.model, tmp_path, data / "tokenizer", [0])
    with safe_open(tmp_path / "model.safetensors", "pt") as f:  # as stored
        assert torch.equal(f.get_tensor("backbone.layers.0.mixer.A_log"), after)
    again = parent.load(parent.inspect(tmp_path))
    assert gate_dtypes(again) == {torch.float32}


def test_gates_norms_and_biases_do_not_decay(models: dict[str, Path]) -> None:
    from sft import parent

    model = parent.load(parent.inspect(models["mamba2"]))
    decaying, plain = parameter_groups(model, 0.1)
    names = {id(p): name for name, p in model.named_parameters()}
    assert decaying["weight_decay"] == 0.1
    assert plain["weight_decay"] == 0
    assert all(names[id(p)].endswith("weight") for p in decaying["params"])
    untouched = {names[id(p)].rpartition(".")[2] for p in plain["params"]}
    assert untouched == {*FP32_PARAMETERS, "bias", "weight"}
    assert len(decaying["params"]) + len(plain["params"]) == len(names)


def test_the_rate_warms_up_and_follows_a_cosine() -> None:
    config = dataclasses.replace(CONFIG, lr=1.0, lr_warmup_steps=4, min_lr_ratio=0.1)
    rates = [learning_rate(config, step, 24) for step in range(25)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[14] == pytest.approx(0.55)
    assert rates[24] == pytest.approx(0.1)
    assert rates[4:] == sorted(rates[4:], reverse=True)


def test_every_recipe_is_complete() -> None:
    for name in RECIPES:
        config = RECIPES.get(name)
        gpus = 8 if name.endswith("8xh100") else 1
        assert config.global_batch_packs % (gpus * config.micro_batch_packs) == 0
        assert dataclasses.asdict(config)
    tokens = RECIPES.get("mamba2_1p5b_8xh100")
    assert tokens.context_tokens * tokens.global_batch_packs == 524_288
    pairs = (("mamba2_1p5b_8xh100", "llama_2b_8xh100"), ("mamba2_debug_cpu", "llama_debug_cpu"))
    for one, other in pairs:
        assert RECIPES.get(one) == RECIPES.get(other)  # both families on the same diet
    assert train.RECIPES is RECIPES
