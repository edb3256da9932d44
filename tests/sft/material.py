"""Small real things for the fine-tuning tests: chats, a tokenizer, models, commands."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"  # before anything imports deepspeed

ROOT = Path(__file__).resolve().parents[2]
WORDS = "alpha bravo charlie delta echo foxtrot golf hotel india juliet".split()  # noqa: SIM905


def tool(name: str, *parameters: str, description: str | None = None) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description or f"Does {name.replace('_', ' ')}.",
            "parameters": {
                "type": "object",
                "properties": {
                    p: {"type": "string", "description": f"The {p}."} for p in parameters
                },
                "required": list(parameters),
            },
        },
    }


def call(name: str, arguments: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **more}


def chat_rows(count: int) -> list[dict[str, Any]]:
    """Chats in which the question names the tool and its argument."""
    rows = []
    for i in range(count):
        verb, thing = WORDS[i % 10], WORDS[(i // 10) % 10]
        name = f"{verb}_{thing}"
        arguments = {"item": WORDS[(i * 7) % 10]}
        rows.append(
            {
                "uuid": f"row-{i}",
                "messages": [
                    {"role": "user", "content": f"Please {verb} the {thing}: {arguments['item']}"},
                    {
                        "role": "assistant",
                        "content": "",
                        "tool_calls": [call(name, json.dumps(arguments) if i % 2 else arguments)],
                    },
                ],
                "tools": [tool(name, "item")],
                "license": "apache-2.0",
                "used_in": [],
            }
        )
    return rows


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def build_tokenizer(folder: Path, chat_template: str | None, vocab_size: int = 500) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from gatewright.chat import SPECIAL_TOKENS

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    text = [json.dumps(row) for row in chat_rows(100)]
    bpe.train_from_iterator(
        text,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=SPECIAL_TOKENS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        chat_template=chat_template,
    )
    fast.save_pretrained(str(folder))
    return folder


def build_model(
    folder: Path, family: str, vocab_size: int = 500, tokenizer: Path | None = None
) -> Path:
    import shutil

    import torch
    from transformers import LlamaForCausalLM, Mamba2ForCausalLM

    from gatewright.models import ModelConfig, hf_config

    torch.manual_seed(0)
    if family == "mamba2":
        config = ModelConfig(
            "mamba2",
            vocab_size,
            32,
            2,
            d_state=16,
            head_dim=16,
            ngroups=2,
            chunk_size=16,
            tie_embeddings=True,
        )
        model: Any = Mamba2ForCausalLM(hf_config(config))
    else:
        config = ModelConfig(
            "llama",
            vocab_size,
            32,
            2,
            head_dim=16,
            n_heads=2,
            n_kv_heads=1,
            ffn_dim=64,
            tie_embeddings=True,
        )
        model = LlamaForCausalLM(hf_config(config))
    model.save_pretrained(str(folder))
    if tokenizer is not None:
        for file in tokenizer.iterdir():
            shutil.copy2(file, folder / file.name)
    return folder


def python_m(
    module: str, *args: object, processes: int = 1, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a command of the house as a user does."""
    command = [sys.executable, "-m", module]
    if processes > 1:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={processes}",
            "-m",
            module,
        ]
    return subprocess.run(
        [*command, *map(str, args)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GATEWRIGHT_QUIET": "1", **env},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
