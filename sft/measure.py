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
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from gatewright import cli, launch
from gatewright.errors import UserError

if TYPE_CHECKING:
    from gatewright.chat import Renderer
    from sft.parent import Parent


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


@dataclass(frozen=True)
class Inputs:
    """What is measured, checked before a model is loaded."""

    parent: Parent
    manifest: dict[str, Any]
    questions: list[dict[str, Any]]
    pool_sizes: list[int]
    renderer: Renderer


def check(args: Args) -> Inputs:
    """Read the inputs and refuse what cannot be measured.

    Raises:
        UserError: the model does not fit the data, or the data has no questions or tools enough.
    """
    from sft import parent
    from sft.held_out import load_questions, load_renderer, load_tools
    from sft.inputs import read_data_manifest

    sizes = cli.numbers("--pool-sizes", args.pool_sizes, int, least=1)
    for name in ("questions", "new_tokens", "batch_size"):
        if getattr(args, name) < 1:
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} {getattr(args, name)}: give a positive number")
    manifest = read_data_manifest(args.data)
    found = parent.inspect(args.model)
    parent.check_vocabulary(found, args.data, manifest)
    questions = load_questions(args.data, args.questions)
    if not questions:
        raise UserError(f"--data {args.data}: holds no held-out chat with a call")
    tools = len(load_tools(args.data))
    if max(sizes) > tools:
        raise UserError(f"--pool-sizes {max(sizes)}: the data's tool corpus holds {tools}")
    return Inputs(found, manifest, questions, sizes, load_renderer(args.data, manifest))


def measure(args: Args) -> Iterator[dict[str, Any]]:
    """Yield the shares of right, parsed and hallucinated answers, a row per pool size.

    Raises:
        UserError: see `check`.
    """
    from sft import parent
    from sft.engine import process_group, use_device
    from sft.evaluate import call_accuracy
    from sft.held_out import pool_builder

    inputs = check(args)
    questions = inputs.questions
    builder = pool_builder(args.data, inputs.manifest)
    device = use_device()
    with process_group(device, deepspeed=False):
        model = parent.load(inputs.parent).to(device).eval()
        for k in inputs.pool_sizes:
            shares = call_accuracy(
                model, inputs.renderer, builder, questions, k, args.new_tokens, (0, 1), device,
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
