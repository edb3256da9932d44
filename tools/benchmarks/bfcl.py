"""BFCL harness: answers per second against a plain generate() loop, ranking, scoring, decoding.

- Generation: `python -m eval_bfcl.generate` on random 4.5M models against transformers'
  `generate()` one prompt at a time with its own kernels; same model, prompts and limit of new
  tokens, the time to load the model and to tokenize left out on both sides.  Random models do
  not end their turn, so both sides write the same number of tokens.
- Ranking: pools for 400 questions over 10,000 tools against rank-bm25, index included; the
  rankings must be equal.
- Scoring: parsing and official verdict of the 400 published answers (no peer).
- Decoding: a token after a long context against a token after 1K, same model: 1.0 means that
  the context costs nothing.

Peers that take half a minute are measured once, so that all of it ends within four minutes on
one core; their `repeats` say so.
"""

from __future__ import annotations

import dataclasses
import gzip
import inspect
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gatewright import artifact, bfcl, bm25
from gatewright.models import ModelConfig, hf_config
from gatewright.tool_pool import ToolPool
from tools.benchmarks.harness import Options, Result, in_turn, result, seconds

ALLOCATORS = ("tuned",)
THREADS = (1,)
TOOLS = 10_000
QUESTIONS = 12
POOL_SIZES = "1,4,8,24"
NEW_TOKENS = 64
VOCAB_SIZE = 4096
SHORT, LONG = 1024, 65_536

SIZES: dict[str, dict[str, Any]] = {
    "mamba2": {"d_model": 256, "n_layers": 6, "head_dim": 64, "d_state": 64, "chunk_size": 64},
    "llama": {
        **{"d_model": 256, "n_layers": 4, "head_dim": 64, "n_heads": 4, "n_kv_heads": 4},
        **{"ffn_dim": 768, "max_seq_len_tokens": 131_072},
    },
}


def run(options: Options) -> Iterator[Result]:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    yield from _ranking(options)
    yield from _scoring(options)
    with tempfile.TemporaryDirectory() as tmp:
        scratch = Path(tmp)
        tokenizer = _tokenizer(scratch)
        _command("eval_bfcl.build_pools", split="simple_python", retriever="bm25")(
            pool_sizes=POOL_SIZES, out=scratch / "pools"
        )
        for family in SIZES:
            folder = _model(scratch, family, tokenizer)
            yield from _generation(options, scratch, family, folder)
            yield from _decoding(options, family, folder)


def _command(module: str, **flags: Any) -> Any:
    """Return a function that runs a stage's command with these flags and some more."""

    def call(**more: Any) -> None:
        argv = [sys.executable, "-m", module]
        for name, value in {**flags, **more}.items():
            argv += [f"--{name.replace('_', '-')}", str(value)]
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    return call


def many_tools(n: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return n schemas with names of their own, mixed from those of all BFCL splits."""
    own = {t["name"]: t for s in bfcl.SPLITS for q in bfcl.load_split(s) for t in q.tools}
    tools = list(own.values())
    rng = random.Random(seed)
    while len(tools) < n:
        a, b = rng.sample(list(own.values()), 2)
        properties = dict(
            rng.sample(
                [*a["parameters"]["properties"].items(), *b["parameters"]["properties"].items()],
                k=min(3, len(a["parameters"]["properties"])),
            )
        )
        words = f"{a['description']} {b['description']}".split()
        tools.append(
            {
                "name": f"{a['name']}_{len(tools)}",
                "description": " ".join(rng.sample(words, k=min(20, len(words)))),
                "parameters": {"type": "dict", "properties": properties, "required": []},
            }
        )
    return tools[:n]


def _ranking(options: Options) -> Iterator[Result]:
    import numpy as np
    from rank_bm25 import BM25Okapi

    tools = many_tools(TOOLS)
    queries = [q.query for q in bfcl.load_split("simple_python")]
    kept: dict[str, list[list[int]]] = {}

    def ours() -> None:
        pool = ToolPool(tools)
        kept["ours"] = [pool.rank(query) for query in queries]

    def peer() -> None:
        index = BM25Okapi([bm25.tokenize(bm25.document_text(t)) for t in tools])
        kept["peer"] = [
            np.argsort(-np.round(index.get_scores(bm25.tokenize(query)), 9), kind="stable").tolist()
            for query in queries
        ]

    ours()
    took = statistics.median(seconds(ours) for _ in range(options.repeats))
    peer_took = seconds(peer)
    assert kept["ours"] == kept["peer"], "the rankings differ"
    name = f"rank {TOOLS} tools, {len(queries)} queries"
    once = dataclasses.replace(options, repeats=1)
    yield result(once, name, took, peer_took, "s", "rank-bm25 BM25Okapi, once")


def _scoring(options: Options) -> Iterator[Result]:
    from gatewright.chat import parse_calls

    questions = bfcl.load_split("simple_python")
    texts = [
        "\n".join(
            f"<tool_call>\n{json.dumps({'name': c.name, 'arguments': c.arguments})}\n</tool_call>"
            for c in bfcl.gold_calls(q)
        )
        for q in questions
    ]

    def score() -> None:
        for q, text in zip(questions, texts, strict=True):
            assert bfcl.check(q, parse_calls(text).calls).valid

    (took,) = in_turn(options.repeats, score)
    yield result(options, f"parse and judge {len(questions)} answers", took, None, "s")


def _tokenizer(scratch: Path) -> Path:
    corpus, out = scratch / "text.jsonl", scratch / "tokenizer"
    with open(corpus, "w", encoding="utf-8") as f:
        for q in bfcl.load_split("simple_python"):
            f.write(json.dumps({"text": f"{q.query}\n{json.dumps(q.tools)}"}) + "\n")
    _command("tokenizer.train", corpus=corpus, vocab_size=VOCAB_SIZE, out=out)()
    return out


def _model(scratch: Path, family: str, tokenizer: Path) -> Path:
    """Write a random model with a tokenizer as an hf-model folder."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = scratch / family
    torch.manual_seed(0)
    config = ModelConfig(family=family, vocab_size=VOCAB_SIZE, **SIZES[family])  # type: ignore[arg-type]
    AutoModelForCausalLM.from_config(hf_config(config)).save_pretrained(folder)
    for file in tokenizer.iterdir():
        if file.name != artifact.MANIFEST:
            (folder / file.name).write_bytes(file.read_bytes())
    artifact.finish(folder, kind="hf-model")
    return folder


def _generation(options: Options, scratch: Path, family: str, folder: Path) -> Iterator[Result]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    generate = _command(
        "eval_bfcl.generate",
        model=folder,
        pools=scratch / "pools",
        limit=QUESTIONS,
        max_new_tokens=NEW_TOKENS,
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    stop = [tokenizer.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|endoftext|>")]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()

    def plain(prompts: list[torch.Tensor]) -> int:
        """Answer one prompt (its tokens) after the other; return the number of tokens written."""
        written = 0
        for ids in prompts:
            with torch.inference_mode():
                new = model.generate(
                    ids, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=stop
                )
            written += new.shape[1] - ids.shape[1]
        return written

    out = scratch / f"answers-{family}"
    generate(out=out)
    extra = artifact.read_manifest(out)["extra"]
    ours = extra["answered_in_last_run"] / extra["seconds_of_last_run"]
    prompts = []
    for path in sorted(out.glob("pool_size=*/seed=*/prompts.jsonl.gz")):
        lines = gzip.decompress(path.read_bytes()).splitlines()
        texts = [json.loads(line)["prompt"] for line in lines]
        prompts += [tokenizer(text, return_tensors="pt")["input_ids"] for text in texts]
    our_tokens = sum(
        json.loads(line)["output_token_count"]
        for path in out.glob("pool_size=*/seed=*/result/*/*/*_result.json")
        for line in path.read_text().splitlines()
    )
    plain(prompts[:1])
    started = time.perf_counter()
    peer_tokens = plain(prompts)
    peer = len(prompts) / (time.perf_counter() - started)
    # Greedy choices may part at a near tie, and with them the lengths, but not by much.
    assert abs(our_tokens - peer_tokens) <= 0.05 * peer_tokens, (our_tokens, peer_tokens)
    yield result(
        dataclasses.replace(options, repeats=1),
        f"generate, {family}, {QUESTIONS} questions, k = {POOL_SIZES}",
        ours,
        peer,
        "answers/s",
        "transformers generate() loop",
        more_is_better=True,
    )


def _decoding(options: Options, family: str, folder: Path) -> Iterator[Result]:
    import torch
    from transformers import AutoModelForCausalLM

    from gatewright.kernels import bind_transformers

    length = LONG if family == "mamba2" else LONG // 4  # attention needs its cache's memory
    with bind_transformers(), torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
        known = inspect.signature(type(model).forward).parameters
        name = "cache" if "cache" in known else "past_key_values"

        def after(context: int) -> Any:
            """Return the cache after a context, read in pieces of 1K tokens."""
            generator = torch.Generator().manual_seed(0)
            ids = torch.randint(8, VOCAB_SIZE, (1, context), generator=generator)
            cache = None
            for piece in ids.split(SHORT, dim=1):
                more: dict[str, Any] = {} if cache is None else {name: cache}
                out = model(input_ids=piece, use_cache=True, logits_to_keep=1, **more)
                cache = getattr(out, name)
            return cache

        def steps(cache: Any) -> Any:
            token = torch.tensor([[9]])

            def ten() -> None:
                for _ in range(10):
                    model(input_ids=token, use_cache=True, **{name: cache})

            return ten

        long, short = in_turn(options.repeats, steps(after(length)), steps(after(SHORT)))
    yield result(
        options,
        f"decode a token at {length // 1024}K, {family}",
        long * 100,
        short * 100,
        "ms",
        f"the same at {SHORT // 1024}K",
    )
