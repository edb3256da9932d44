"""Every recipe is complete, and is what its name and the paper say."""

from __future__ import annotations

import pytest

from gatewright.megatron.config import ParallelConfig
from pretrain.recipes import RECIPES

FIGURES = {
    "mamba2_1p5b_128xh100": (1_481_777_152, 1_048_576),
    "llama_2b_128xh100": (1_975_633_920, 1_048_576),
    "mamba2_debug_cpu": (4_890_000, 2_048),
    "llama_debug_cpu": (4_720_896, 2_048),
}
"""Recipe -> parameters, tokens per step."""


def test_every_recipe_has_the_figures_that_are_stated() -> None:
    found = {
        name: (recipe.model.parameters(), recipe.train.tokens_per_step)
        for name, recipe in ((name, RECIPES.get(name)) for name in RECIPES.names())
    }
    assert found == FIGURES


def test_the_paper_recipes_have_the_paper_sizes_and_training() -> None:
    mamba, llama = RECIPES.get("mamba2_1p5b_128xh100"), RECIPES.get("llama_2b_128xh100")
    assert round(mamba.model.parameters() / 1e9, 3) == 1.482
    assert round(llama.model.parameters() / 1e9, 3) == 1.976
    assert mamba.train == llama.train  # same data, same pipeline
    train = mamba.train
    assert (train.seq_len_tokens, train.global_batch_sequences) == (4096, 256)
    assert (train.lr, train.weight_decay, train.dtype) == (3e-4, 0.1, "bf16")
    assert train.fp32_gates
    assert 300e9 <= train.steps * train.tokens_per_step < 300e9 + train.tokens_per_step
    assert train.microbatches(mamba.parallel.data(128)) == 1


def test_the_debug_pair_is_matched() -> None:
    mamba, llama = RECIPES.get("mamba2_debug_cpu"), RECIPES.get("llama_debug_cpu")
    assert mamba.train == llama.train
    sizes = [r.model.parameters() for r in (mamba, llama)]
    assert max(sizes) / min(sizes) < 1.06
    assert all(4e6 < size < 5e6 for size in sizes)
    for recipe in (mamba, llama):
        # The chats of fine-tuning are longer than the pretraining sequences.
        assert recipe.model.max_seq_len_tokens >= 2048


@pytest.mark.parametrize("name", RECIPES.names())
def test_every_recipe_fits_its_layout(name: str) -> None:
    recipe = RECIPES.get(name)
    recipe.parallel.check(recipe.model, recipe.train.seq_len_tokens)
    gpus = int(name.rpartition("_")[2].partition("x")[0]) if "xh100" in name else 1
    assert recipe.train.microbatches(recipe.parallel.data(gpus)) >= 1
    ParallelConfig(tensor=2).check(recipe.model, recipe.train.seq_len_tokens)
