"""Tiny models with a real tokenizer, and pools of a few questions, made once per session."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gatewright import artifact, bfcl
from gatewright.chat import PAD, SPECIAL_TOKENS, STRUCTURE_TOKENS, TEMPLATE, TURN_END


def save_tokenizer(folder: Path) -> int:
    """Write a byte-level BPE tokenizer with our chat template; return its vocabulary size."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    texts = [json.dumps(q.tools) + q.query for q in bfcl.load_split("simple_python")[:60]]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    raw = json.loads(tokenizer.to_str())
    for token in raw["added_tokens"]:
        token["special"] = token["content"] not in STRUCTURE_TOKENS
    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(raw)), eos_token=TURN_END, pad_token=PAD
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return len(fast)


def save_model(folder: Path, family: str, gate_scale: float | None = None) -> Path:
    """Write a random two-layer model with its tokenizer as a finished hf-model folder."""
    import torch
    from transformers import AutoModelForCausalLM

    from gatewright.models import ModelConfig, hf_config

    folder.mkdir(parents=True)
    vocab = save_tokenizer(folder)
    sizes: dict = {"vocab_size": vocab, "d_model": 64, "n_layers": 2, "head_dim": 16}
    if family == "mamba2":
        sizes |= {"d_state": 16, "chunk_size": 64}
    else:
        sizes |= {"n_heads": 4, "n_kv_heads": 2, "ffn_dim": 128, "max_seq_len_tokens": 4096}
    torch.manual_seed(0)
    config = hf_config(ModelConfig(family=family, **sizes))  # type: ignore[arg-type]
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # larger logits: greedy choices are not decided by rounding
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(4)
    model.save_pretrained(folder)
    extra = {} if gate_scale is None else {"gate_scale": gate_scale}
    artifact.finish(folder, kind="hf-model", extra=extra)
    return folder


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "mamba2": save_model(root / "mamba2-s0.5", "mamba2", 0.5),
        "llama": save_model(root / "llama", "llama"),
    }


@pytest.fixture(scope="session")
def make_pools(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that builds a pools folder, once per set of flags."""
    from eval_bfcl import build_pools

    built: dict[str, Path] = {}

    def make(**flags: object) -> Path:
        key = json.dumps(flags, sort_keys=True)
        if key not in built:
            out = tmp_path_factory.mktemp("pools") / "pools"
            build_pools.main(build_pools.Args(out=out, **flags))  # type: ignore[arg-type]
            built[key] = out
        return built[key]

    return make


@pytest.fixture(scope="session")
def pools_1_4(make_pools: Callable[..., Path]) -> Path:
    return make_pools(split="simple_python", retriever="bm25", pool_sizes="1,4")


@pytest.fixture(scope="session")
def scores(make_pools: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    from tests.eval_bfcl import five_models

    return five_models.write_scores(tmp_path_factory.mktemp("scores"), make_pools)


@pytest.fixture(scope="session")
def made(scores: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    from eval_bfcl import report

    out = tmp_path_factory.mktemp("report") / "report"
    report.main(report.Args(scores=tuple(scores), out=out, note="A test <b>note</b>."))
    return out
