"""The checks that `tests/gpu/run.sh` runs on one GPU; prints a table, fails on disparity."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from gatewright import kernels
from gatewright.megatron import build, checkpoints, cpu, data, distributed, loop, plan
from gatewright.megatron.recipes import RECIPES
from tests.gatewright.megatron import tiny

DEPTH = 4
"""Layers of the paper models that are timed: full width, this depth."""
WARM_UP, TIMED = 3, 8
KERNEL_PARITY, LOSS_PARITY = 1e-2, 5e-3
"""Triton multiplies fp32 in TF32, which keeps 10 bits."""
SIZES: dict[str, dict[str, int]] = {
    "mamba2": {"d_model": 128, "d_state": 16, "head_dim": 32, "ngroups": 2, "chunk_size": 64},
    "llama": {"d_model": 128, "head_dim": 32, "ffn_dim": 256},
}
"""What Triton and fused attention can take, unlike the tiny models of the CPU tests."""
LOSSES = "losses.json"


def peak_tflops() -> float:
    """Return the dense bf16 peak of this GPU; H100 SXM's if it is not in the table."""
    name = torch.cuda.get_device_name().lower()
    return next((v for k, v in plan.PEAK_TFLOPS.items() if k in name), plan.PEAK_TFLOPS["h100"])


def kernel_parity() -> list[dict[str, Any]]:
    """Compare the scan on the GPU with the plain recurrence in float64, gradients too."""
    rows = []
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    b, l, h, p, g, n = 2, 300, 8, 64, 2, 64
    inputs = {"x": draw(b, l, h, p), "dt": draw(b, l, h), "A": -draw(h).exp()}
    inputs |= {"B": draw(b, l, g, n) / 8, "C": draw(b, l, g, n), "D": draw(h)}
    inputs["dt_bias"] = draw(h) - 2
    weights = draw(b, l, h, p)

    def outcome(f: Any, cast: Any, *chunk: int) -> list[torch.Tensor]:
        leaves = {k: cast(v).detach().requires_grad_() for k, v in inputs.items()}
        x, dt, A, B, C = (leaves[k] for k in ("x", "dt", "A", "B", "C"))
        more = {"D": leaves["D"], "dt_bias": leaves["dt_bias"], "dt_softplus": True}
        y = f(x, dt, A, B, C, *(chunk or (64,)), **more)
        (y * cast(weights)).sum().backward()
        return [y, *(v.grad for v in leaves.values())]

    expected = outcome(kernels.ssd_reference, lambda t: t)
    found = outcome(kernels.ssd_scan, lambda t: t.cuda().float())
    for name, one, want in zip(["y", *inputs], found, expected, strict=True):
        error = (one.double().cpu() - want).abs().max() / want.abs().max()
        label = name if name == "y" else f"d{name}"
        rows.append({"check": f"ssd_scan {label}", "value": float(error), "limit": KERNEL_PARITY})
    return rows


def layers_parity(folder: Path) -> list[dict[str, Any]]:
    """Train both families two steps here, save, and let a CPU process go on from it too."""
    corpus = str(tiny.write_corpus(folder / "corpus"))
    rows = []
    for family in ("mamba2", "llama"):
        out = folder / family
        here = three_losses(family, corpus, out, save=True)
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "tests.gpu.check", "--cpu", family, corpus, out],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "4"},
            capture_output=True,
            text=True,
            timeout=150,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        there = json.loads((out / LOSSES).read_text())
        error = max(abs(a - b) for a, b in zip(here, there, strict=True))
        rows.append({"check": f"{family} losses, GPU - CPU", "value": error, "limit": LOSS_PARITY})
    return rows


def three_losses(family: str, corpus: str, out: Path, *, save: bool) -> list[float]:
    """Return the losses of steps 3 to 5; with `save`, steps 1 and 2 are taken and saved first."""
    out.mkdir(exist_ok=True)
    config = tiny.config(family, model=SIZES[family], train={"steps": 8})
    with distributed.processes(config.parallel) as data_parallel:
        files = data.Corpus.of_folder(Path(corpus), tiny.EOD)
        run = loop.Run(config, files, out, data_parallel)
        if not save:
            run.step, run.consumed_samples = checkpoints.load(
                out / "iter_0000002", run.model, run.optimizer, run.schedule
            )
            (out / "latest").unlink()
        with run:
            if save:
                for _ in range(2):
                    run.update_weights(run.forward_backward())
                run.save()
            losses = []
            for _ in range(3):
                found = run.forward_backward()
                run.update_weights(found)
                losses.append(found.loss)
    return losses


def speed(recipe: str, folder: Path) -> dict[str, Any]:
    """Time training steps of a paper recipe at full width and reduced depth, on one GPU."""
    config = RECIPES.get(recipe)
    train = dataclasses.replace(
        config.train,
        steps=WARM_UP + TIMED + 1,
        lr_warmup_steps=2,
        global_batch_sequences=8,
        micro_batch_sequences=4,
    )
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, n_layers=DEPTH),
        train=train,
        parallel=dataclasses.replace(config.parallel, overlap=False),
        log=dataclasses.replace(config.log, gates_every_steps=0, tensorboard=False),
    )
    out = folder / recipe
    out.mkdir()
    corpus = data.Corpus.of_folder(folder / "corpus", tiny.EOD)

    def take(run: loop.Run, steps: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            found = run.forward_backward()
            run.examine(found)
            run.update_weights(found)
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / steps

    with distributed.processes(config.parallel) as size, loop.Run(config, corpus, out, size) as run:
        take(run, WARM_UP)
        torch.cuda.reset_peak_memory_stats()
        seconds = take(run, TIMED)
    rate = train.tokens_per_step / seconds
    flops = config.model.training_flops_per_token(train.seq_len_tokens)
    return {
        "recipe": recipe,
        "layers": DEPTH,
        "parameters": config.model.parameters(),
        "tokens_per_second": rate,
        "mfu": rate * flops / (peak_tflops() * 1e12),
        "memory_gb": torch.cuda.max_memory_allocated() / 1e9,
    }


def main(results: str) -> None:
    parts = ("transformer_engine", "mamba_ssm", "causal_conv1d")
    have = {part: importlib.util.find_spec(part) is not None for part in parts}
    found: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "parts": have,
        "layers": "Transformer Engine" if build.fused() else "local",
        "kernels": kernels.active_backend(),
    }
    print(f"{found['gpu']}, torch {found['torch']}, layers {found['layers']}, parts {have}")
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp)
        found["parity"] = kernel_parity() + layers_parity(folder)
        for row in found["parity"]:
            verdict = "ok" if row["value"] <= row["limit"] else "TOO FAR"
            print(f"{row['check']:<34}{row['value']:>12.2e}  (limit {row['limit']:.0e})  {verdict}")
        found["speed"] = []
        print(f"\n{'recipe':<24}{'layers':>7}{'tokens/s':>12}{'MFU':>8}{'memory GB':>11}")
        for recipe in ("mamba2_1p5b_128xh100", "llama_2b_128xh100"):
            row = speed(recipe, folder)
            found["speed"].append(row)
            print(
                f"{recipe:<24}{row['layers']:>7}{row['tokens_per_second']:>12,.0f}"
                f"{row['mfu']:>8.1%}{row['memory_gb']:>11.1f}"
            )
    if results:
        Path(results).write_text(json.dumps(found, indent=2) + "\n")
    assert all(row["value"] <= row["limit"] for row in found["parity"]), "disparity, see above"


if __name__ == "__main__":
    cpu.enable()
    if sys.argv[1:2] == ["--cpu"]:
        family, corpus, out = sys.argv[2:]
        losses = three_losses(family, corpus, Path(out), save=False)
        (Path(out) / LOSSES).write_text(json.dumps(losses))
    else:
        main(sys.argv[1] if len(sys.argv) > 1 else "")
