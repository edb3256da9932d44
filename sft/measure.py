"""Call accuracy of a model on the held-out chats, at several pool sizes.

    python -m sft.measure MODEL --data DIR --pool-sizes 1,8,24

prints a JSON line per pool size.  It is the measure of training (names and arguments against
the chat's own calls); BFCL accuracy is `eval_bfcl`'s business.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from gatewright import artifact, cli, launch
from gatewright.errors import UserError


@dataclass(frozen=True)
class Args:
    """Flags of `python -m sft.measure`."""

    model: Annotated[Path, tyro.conf.Positional]
    """Hugging Face model folder."""
    data: Path
    """Folder made by sft.prepare."""
    pool_sizes: str = "1,8,24"
    """Pool sizes, separated by commas."""
    questions: int = 100
    """Most held-out chats."""
    new_tokens: int = 160
    """Longest answer."""
    batch_size: int = 16
    """Prompts at a time."""


def measure(args: Args) -> Iterator[dict[str, Any]]:
    """Yield the shares of right, parsed and hallucinated answers, a row per pool size.

    Raises:
        UserError: the model does not fit the data, or the data has no questions or tools enough.
    """
    from gatewright.chat import Renderer
    from sft import parent
    from sft.engine import process_group, use_device
    from sft.evaluate import call_accuracy, load_questions
    from sft.pools import PoolBuilder

    sizes = cli.numbers("--pool-sizes", args.pool_sizes, int, least=1)
    if args.questions < 1:
        raise UserError(f"--questions {args.questions}: give a positive number")
    manifest = artifact.read_manifest(args.data, "sft-data", flag="--data")
    found = parent.inspect(args.model)
    parent.check_vocabulary(found, args.data, manifest)
    questions = load_questions(args.data, args.questions)
    if not questions:
        raise UserError(f"--data {args.data}: holds no held-out chat with a call")
    with open(args.data / "tools.jsonl", encoding="utf-8") as f:
        tools = [json.loads(line) for line in f]
    config = manifest["config"]
    if max(sizes) > len(tools):
        raise UserError(f"--pool-sizes {max(sizes)}: the data's tool corpus holds {len(tools)}")
    builder = PoolBuilder(tools, config["max_pool_size"], config["order"], config["seed"])
    device = use_device()
    renderer = Renderer.load(args.data / "tokenizer")
    with process_group(device, deepspeed=False):
        model = parent.load(found).to(device).eval()
        for k in sizes:
            shares = call_accuracy(
                model, renderer, builder, questions, k, args.new_tokens, (0, 1), device,
                args.batch_size,
            )  # fmt: skip
            rounded = {name: round(value, 4) for name, value in shares.items()}
            yield {"k": k, "questions": len(questions), **rounded}


def main(args: Args) -> None:
    """Measure call accuracy on held-out chats."""
    for row in measure(args):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    launch.retune()
    cli.run(main, Args, prog="python -m sft.measure")
