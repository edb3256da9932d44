"""Ask a model every question of a pools folder, all pool sizes and seeds in one process.

Answers are appended as they come and carry the question's id, so a run that was stopped
continues where it was.  A request that the machinery fails at is tried again, and is never
stored as an answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from eval_bfcl import ceiling, local_model, pools, prompting
from eval_bfcl.backend import Backend, Failure
from eval_bfcl.prompting import Request
from eval_bfcl.results import Results, base_name, check_label, label_of, model_facts
from gatewright import artifact, bfcl, cli
from gatewright.errors import UserError
from gatewright.runlog import progress

BackendName = Literal["transformers", "vllm", "openai"]
OverContext = Literal["refuse", "skip", "run"]

LONGEST_WAIT_S = 60.0
"""Failed requests never wait longer for their next try."""
MAX_TIMEOUT_S = 86_400.0
"""No answer is waited for longer: a socket takes no time without end."""


@dataclasses.dataclass
class Args:
    """Flags of `python -m eval_bfcl.generate`."""

    model: str
    """Hugging Face model folder or hub name; for --backend openai the server's model name."""
    pools: Path
    """Folder of eval_bfcl.build_pools."""
    out: Path
    """Folder to create, or to continue if a run with the same settings was stopped."""
    backend: str = "transformers"
    """transformers, vllm, or openai (any OpenAI-compatible server, see --base-url)."""
    limit: int | None = None
    """Only the first N questions of the split; the report says so in its first line."""
    pool_sizes: str | None = None
    """Only these pool sizes of the pools folder, separated by commas."""
    name: str | None = None
    """Name in results and report; default: the model's last path component, `_` written `-`."""
    prompt: str = "template"
    """template (the model's chat template draws the tools), system (tools in a system message,
    for templates without tools) or system_one_shot (the same after one answered example)."""
    style: str = "auto"
    """How the model writes calls: auto (from its chat template), hermes, llama3, nemotron or
    python."""
    dots: str = "auto"
    """Tool names in the prompt: keep, underscore (OpenAI's servers refuse dots), or auto
    (underscore for --backend openai, else keep)."""
    max_new_tokens: int = 256
    """Limit of new tokens an answer; BFCL's gold answers need up to about 150."""
    over_context: str = "run"
    """A prompt that does not fit into the model's position limit: run (ask all the same, its
    answer flagged `over_context`), skip (count the question as an error of the machinery, by
    name) or refuse (stop before generating)."""
    batch_size: int = 64
    """transformers: most rows of a batch."""
    batch_tokens: int = 32768
    """transformers: most prompt tokens that wait for an answer or are answered at a time,
    padding included; a Transformer's cache of them is held twice while a batch is put together."""
    dtype: str = "auto"
    """transformers, vllm: float32, bfloat16 or auto (float32 on CPU; on CUDA what config.json
    names, for vllm bfloat16 where that is float32).  A run continues only in the same."""
    retries: int = 5
    """How often a failed request is tried again."""
    retry_wait_s: float = 1.0
    """Seconds before failed requests are tried again; doubles with every try, up to a minute."""
    accept_failures: bool = False
    """Finish although some requests failed for good; score counts them as errors."""
    base_url: str = "http://127.0.0.1:8000/v1"
    """openai: where the server's API begins."""
    api_key_env: str = "OPENAI_API_KEY"
    """openai: environment variable that holds the key, if the server wants one."""
    concurrency: int = 8
    """openai: requests in flight at a time."""
    timeout_s: float = 300.0
    """openai: seconds to wait for one answer, and for each piece of it."""
    tensor_parallel: int = 1
    """vllm: GPUs that share the model."""

    def __post_init__(self) -> None:
        for flag, value, known in (
            ("--backend", self.backend, get_args(BackendName)),
            ("--over-context", self.over_context, get_args(OverContext)),
            ("--prompt", self.prompt, get_args(prompting.PromptKind)),
            ("--style", self.style, ("auto", "hermes", "llama3", "nemotron", "python")),
            ("--dots", self.dots, ("auto", "keep", "underscore")),
            ("--dtype", self.dtype, ("auto", "float32", "bfloat16")),
        ):
            if value not in known:
                raise UserError(
                    f"{flag} {value}{cli.nearest(value, known)}: choose one of {', '.join(known)}"
                )
        for flag, number in (
            ("--limit", self.limit),
            ("--max-new-tokens", self.max_new_tokens),
            ("--batch-size", self.batch_size),
            ("--batch-tokens", self.batch_tokens),
            ("--concurrency", self.concurrency),
            ("--tensor-parallel", self.tensor_parallel),
        ):
            if number is not None and number < 1:
                raise UserError(f"{flag} {number}: give a positive number")
        if not 0 < self.timeout_s <= MAX_TIMEOUT_S:
            raise UserError(f"--timeout-s {self.timeout_s}: give 0 to {MAX_TIMEOUT_S:g} seconds")
        for flag, least in (("--retries", self.retries), ("--retry-wait-s", self.retry_wait_s)):
            if not least >= 0:
                raise UserError(f"{flag} {least}: give 0 or more")
        for field in dataclasses.fields(self):
            takers = _TAKEN_BY.get(field.name, (self.backend,))
            if self.backend not in takers and getattr(self, field.name) != field.default:
                raise UserError(
                    f"--{field.name.replace('_', '-')}: only --backend {' or '.join(takers)} "
                    f"takes it, not {self.backend}"
                )


_TAKEN_BY = {
    "prompt": ("transformers", "vllm"),
    "dtype": ("transformers", "vllm"),
    "batch_size": ("transformers",),
    "batch_tokens": ("transformers",),
    "tensor_parallel": ("vllm",),
    "base_url": ("openai",),
    "api_key_env": ("openai",),
    "concurrency": ("openai",),
    "timeout_s": ("openai",),
}
"""Flags that some backends would ignore: given to those, they are refused."""


def choose_cells(cells: list[pools.Cell], args: Args) -> list[pools.Cell]:
    """Return the cells that are asked for, cut to the first --limit questions.

    Raises:
        UserError: a pool size that the pools folder does not have.
    """
    if args.pool_sizes is not None:
        sizes = sorted(set(cli.numbers("--pool-sizes", args.pool_sizes, int, least=1)))
        have = sorted({c.k for c in cells})
        for k in sizes:
            if k not in have:
                raise UserError(f"--pool-sizes {k}: --pools has {', '.join(map(str, have))}")
        cells = [c for c in cells if c.k in sizes]
    return [dataclasses.replace(c, rows=c.rows[: args.limit]) for c in cells]


def check_context(plan: Plan, args: Args) -> dict[tuple[str, str], int]:
    """Return, by (cell, id), the tokens of the prompts that do not fit the model's positions.

    Raises:
        UserError: there is one and --over-context is refuse.
    """
    limit = plan.context_tokens
    over = {
        (r.cell, r.id): len(r.prompt_ids)
        for r in plan.requests
        if limit is not None and len(r.prompt_ids) + args.max_new_tokens > limit
    }
    if over:
        (cell, id), tokens = max(over.items(), key=lambda item: item[1])
        said = (
            f"{len(over)} of {len(plan.requests)} prompts do not fit the model's {limit} "
            f"positions with --max-new-tokens {args.max_new_tokens} (longest: {id} at {cell}, "
            f"{tokens} tokens)"
        )
        if args.over_context == "refuse":
            raise UserError(f"{said}: use smaller pools, or --over-context run or skip")
        print(f"{said}: {args.over_context}")
    return over


def ask(
    backend: Backend,
    requests: list[Request],
    results: Results,
    over: dict[tuple[str, str], int],
    retries: int,
    retry_wait_s: float,
) -> dict[tuple[str, str], str]:
    """Run all requests, storing answers as they come; return what failed for good.

    What a server refuses (a prompt that is too long, a wrong key) is not asked again.  Waits
    between tries grow twofold from `retry_wait_s` to LONGEST_WAIT_S: a server that restarts or
    limits its callers needs minutes, not more questions.
    """
    failed: dict[tuple[str, str], str] = {}
    left = requests
    with progress(total=len(requests), desc="answers", unit="question") as bar:
        for attempt in range(retries + 1):
            again = []
            for request, answer in backend.run(left):
                if isinstance(answer, Failure):
                    failed[(request.cell, request.id)] = answer.error
                    if answer.again:
                        again.append(request)
                    continue
                failed.pop((request.cell, request.id), None)
                row: dict[str, Any] = {
                    "id": request.id,
                    "result": answer.text,
                    "input_token_count": answer.prompt_tokens,
                    "output_token_count": answer.new_tokens,
                    "latency": answer.latency_s,
                    "finish": answer.finish,
                }
                if (request.cell, request.id) in over:
                    row["over_context"] = True
                results.append(request.cell, [row])
                bar.update()
            left = again
            if not left:
                break
            if attempt < retries:
                wait = min(retry_wait_s * 2.0**attempt, LONGEST_WAIT_S)
                error = failed[(left[0].cell, left[0].id)]
                bar.write(f"{len(left)} requests failed ({error}); again in {wait:g} s")
                time.sleep(wait)
    return failed


@dataclasses.dataclass
class Plan:
    """What is asked of which model: everything that is known before the model is loaded.

    Attributes:
        run: what goes into run.json and the manifest; a stopped run continues only if equal
            (the hash of its prompts, numbers and device included; not a server's address, at
            which the same model is served today).
        folder: the model's folder; None for a server.
        renderer: draws prompts; None for a server.
        requests: every question of every cell, prompts drawn.
        context_tokens: the model's position limit, if it has one.
    """

    run: dict[str, Any]
    folder: Path | None
    renderer: Any
    cells: list[pools.Cell]
    requests: list[Request]
    context_tokens: int | None


def make_plan(args: Args) -> Plan:
    """Read pools and tokenizer, and draw every prompt.

    Raises:
        UserError: pools, model folder, tokenizer or flags do not go together.
    """
    manifest, cells = pools.load(args.pools)
    split = manifest["extra"]["split"]
    cells = choose_cells(cells, args)
    local = args.backend != "openai"
    folder = local_model.find(args.model) if local else None
    facts: dict[str, Any] = {"family": "server", "gate_scale": None, "context_tokens": None}
    state = None
    renderer, style = None, args.style
    dots: Any = "keep" if local else "underscore"
    if args.dots != "auto":
        dots = args.dots
    if folder is not None:
        from gatewright.chat import Renderer

        facts, state = model_facts(folder), ceiling.read_state(folder)
        renderer = Renderer.load(folder)
        prompting.check_kind(renderer, args.prompt)
    if style == "auto":
        style = renderer.style if renderer and args.prompt == "template" else "hermes"
    label = (label_of(args.model) if args.name is None else args.name).replace("_", "-")
    check_label(label)
    dtype, device = None, None
    if folder is not None:
        dtype, device = local_model.numbers_and_device(folder, args.backend, args.dtype)
    run = {
        "label": label,
        "base": base_name(label),
        "model": args.model,
        "model_hash": artifact.content_hash(folder) if folder is not None else None,
        **facts,
        "state": state,
        "split": split,
        "questions": len(cells[0].rows),
        "of": manifest["extra"]["questions"],
        "pools": {k: manifest["extra"][k] for k in ("retriever", "beta", "utility")},
        "pools_hash": manifest["content_hash"],
        "cells": [c.name for c in cells],
        "backend": args.backend,
        "style": style,
        "prompt": args.prompt if local else "server",
        "dots": dots,
        "max_new_tokens": args.max_new_tokens,
        "over_context": args.over_context,
        "dtype": dtype,
        "device": device,
    }
    questions = {q.id: q for q in bfcl.load_split(split)}
    requests = []
    for cell in cells:
        for row in cell.rows:
            item = prompting.request(questions[row.id], cell, row, dots)
            if renderer is not None:
                prompting.draw(item, renderer, args.prompt)  # type: ignore[arg-type]
            requests.append(item)
    run["prompts_hash"] = hash_of(requests)
    return Plan(run, folder, renderer, cells, requests, facts["context_tokens"])


def hash_of(requests: Sequence[Request]) -> str:
    """Return a hash of all that is asked, as the model sees it."""
    digest = hashlib.sha256()
    for r in requests:
        asked = [r.prompt, r.prompt_ids] if r.prompt else [r.messages, r.tools]
        digest.update(json.dumps([r.cell, r.id, *asked]).encode() + b"\n")
    return digest.hexdigest()


def answer_all(
    plan: Plan, args: Args, results: Results, over: dict[tuple[str, str], int]
) -> tuple[dict[tuple[str, str], str], int, float]:
    """Ask what is not answered yet.

    Returns:
        What failed for good by (cell, id), the answers of this run, and its seconds without
        the loading of the model.
    """
    done = {
        cell.name: results.done(cell.name, {row.id for row in cell.rows}) for cell in plan.cells
    }
    skipped = over if args.over_context == "skip" else {}
    to_run = [
        r for r in plan.requests if r.id not in done[r.cell] and (r.cell, r.id) not in skipped
    ]
    if not to_run:
        return {}, 0, 0.0
    backend = make_backend(args, plan)
    started = time.perf_counter()
    failed = ask(backend, to_run, results, over, args.retries, args.retry_wait_s)
    return failed, len(to_run) - len(failed), time.perf_counter() - started


def main(args: Args) -> None:
    """Ask a model every question of a pools folder."""
    plan = make_plan(args)
    over = check_context(plan, args)
    with contextlib.closing(Results(args.out, plan.run["label"], plan.run["split"])) as results:
        results.begin(plan.run)
        fill(results, plan, args, over)


def fill(results: Results, plan: Plan, args: Args, over: dict[tuple[str, str], int]) -> None:
    """Ask what the folder does not hold yet, and finish it.

    Raises:
        UserError: requests failed for good and --accept-failures is not given.
    """
    for cell in plan.cells:
        prompts = {r.id: r.prompt for r in plan.requests if r.cell == cell.name and r.prompt}
        if prompts:
            results.write_prompts(cell.name, prompts)

    broken, answered, seconds = answer_all(plan, args, results, over)
    failed = dict(broken)
    if args.over_context == "skip":
        failed |= {key: f"prompt of {n} tokens exceeds the context" for key, n in over.items()}
    for cell in plan.cells:
        results.write_failures(cell.name, {i: e for (c, i), e in failed.items() if c == cell.name})
        results.sort(cell.name, [row.id for row in cell.rows])
    if broken and not args.accept_failures:
        (cell_name, id), error = next(iter(broken.items()))
        raise UserError(
            f"{len(broken)} of {len(plan.requests)} requests failed (first: {id} at {cell_name}: "
            f"{error}); run the same command again to retry them, or add --accept-failures"
        )
    parents = {"pools": args.pools} | ({"model": plan.folder} if plan.folder else {})
    extra = {
        **plan.run,
        "failed": len(failed),
        "over_context_prompts": len(over),
        "answered_in_last_run": answered,
        "seconds_of_last_run": round(seconds, 3),
    }
    with results.writing():
        artifact.finish(args.out, kind="bfcl-results", config=args, parents=parents, extra=extra)
    print(
        f"{plan.run['label']}: {answered} answers in {seconds:.1f} s "
        f"({answered / max(seconds, 1e-9):.2f} answers/s), {len(failed)} failed -> {args.out}"
    )


def make_backend(args: Args, plan: Plan) -> Backend:
    """Return the chosen backend with its model loaded."""
    if args.backend == "transformers":
        from eval_bfcl import backend_transformers

        assert plan.folder is not None
        return backend_transformers.TransformersBackend(
            backend_transformers.load(plan.folder, plan.run["dtype"]),
            plan.renderer,
            max_new_tokens=args.max_new_tokens,
            batch_size=args.batch_size,
            batch_tokens=args.batch_tokens,
        )
    if args.backend == "vllm":
        from eval_bfcl.backend_vllm import VLLMBackend

        assert plan.folder is not None
        longest = max(len(r.prompt_ids) for r in plan.requests) + args.max_new_tokens
        return VLLMBackend(
            plan.folder,
            plan.renderer,
            dtype=plan.run["dtype"],
            max_new_tokens=args.max_new_tokens,
            max_model_len=min(longest, plan.context_tokens or longest),
            tensor_parallel=args.tensor_parallel,
        )
    from eval_bfcl.backend_openai import OpenAIBackend

    return OpenAIBackend(args, plan.run["style"])


if __name__ == "__main__":
    cli.run(main, Args, prog="python -m eval_bfcl.generate")
