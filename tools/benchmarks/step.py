"""Where a pretraining step's time goes, by part, of the debug recipes on the Megatron engine.

torch's profiler, its own cost included; a part's share is what matters.  There is no peer.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from gatewright.megatron import cpu, distributed, loop
from gatewright.megatron.recipes import RECIPES
from tools.benchmarks.harness import Options, Result, result
from tools.benchmarks.pretrain import endless, one_step, write_corpus

ALLOCATORS = ("tuned",)
STEPS = 3
PARTS = {
    "matrix products of layers": ("_Linear", "_LinearBackward", "aten::mm", "aten::bmm"),
    "output layer and loss": ("_LinearCrossEntropy", "_LinearCrossEntropyBackward"),
    "mixers: convolution, scan, gated norm": ("Mixer", "MixerBackward"),
    "attention": ("Attention", "AttentionBackward"),
    "rotary, SwiGLU, norms": tuple(
        name + suffix for name in ("Rotary", "SwiGLU", "Norm") for suffix in ("", "Backward")
    ),
    "AdamW": ("aten::_fused_adamw_",),
}


def run(options: Options) -> Iterator[Result]:
    cpu.enable()
    with tempfile.TemporaryDirectory() as tmp:
        corpus = write_corpus(Path(tmp) / "corpus")
        for family in ("mamba2", "llama"):
            config = endless(RECIPES.get(f"{family}_debug_cpu"))
            out = Path(tmp) / family
            out.mkdir()
            with (
                distributed.processes(config.parallel),
                loop.Run(config, corpus, out, data_parallel=1) as steps,
            ):
                parts = _milliseconds_by_part(steps)
            whole = sum(parts.values())
            yield result(options, f"{family} step", whole, None, "ms")
            for name, took in parts.items():
                yield result(options, f"{family}: {name}", 100 * took / whole, None, "% of step")


def _milliseconds_by_part(run: loop.Run) -> dict[str, float]:
    from torch.profiler import ProfilerActivity, profile

    one_step(run)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(STEPS):
            one_step(run)
    part_of = {event: part for part, events in PARTS.items() for event in events}
    found: dict[str, float] = defaultdict(float)
    for event in profiled.key_averages():
        part = part_of.get(event.key, "everything else")
        found[part] += event.self_cpu_time_total / 1e3 / STEPS
    return dict(sorted(found.items(), key=lambda item: -item[1]))
