"""Convert checkpoints between Megatron, Hugging Face and mamba_ssm.

    python -m tools.convert CKPT --to hf|megatron|mamba_ssm --out DIR [--tokenizer DIR]

CKPT is a Megatron run folder or one of its iter_* folders (any parallel layout), a Hugging
Face folder, or a folder with mamba_ssm's pytorch_model.bin.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

from gatewright import cli


@dataclasses.dataclass
class Args:
    """Convert a Mamba-2 or Llama checkpoint, streaming, with a logits check."""

    checkpoint: Annotated[Path, tyro.conf.Positional]
    """Folder of the checkpoint."""
    to: Literal["hf", "megatron", "mamba_ssm"]
    """Format to write."""
    out: Path
    """Folder to write."""
    tokenizer: Path | None = None
    """Tokenizer folder whose files go into the output; its special tokens go into the config."""
    max_shard_size: str = "5GB"
    """Largest safetensors file; more weights are sharded."""
    check: bool = True
    """Load input and output and compare their logits on random tokens (fp32, 1e-4)."""


def main(args: Args) -> None:
    """Convert a Mamba-2 or Llama checkpoint, streaming, with a logits check."""
    from gatewright.checkpoints import convert
    from gatewright.runlog import progress

    limit = convert.parse_size(args.max_shard_size)
    with progress(total=0, desc="converting", unit="B", scale=True) as bar:

        def advance(n: int, total: int) -> None:
            bar.total = total
            bar.update(n)

        done = convert.convert(
            args.checkpoint,
            args.to,
            args.out,
            tokenizer=args.tokenizer,
            max_shard_bytes=limit,
            check=args.check,
            progress=advance,
            checking=bar.close,
        )
    checked = "logits not compared"
    if done.parity is not None:
        checked = f"logits differ by at most {done.parity.max_difference:.2g}"
    print(
        f"{done.folder}: {done.model.family}, {done.model.parameters() / 1e6:.1f}M parameters, "
        f"{done.nbytes / 1e6:.1f} MB; {checked}"
    )


if __name__ == "__main__":
    cli.run(main, Args, prog="python -m tools.convert")
