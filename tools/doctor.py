"""One page on what this machine has, and what each missing part would change.

    python -m tools.doctor [--json]

The exit code is 1 when a part is missing that the CPU pipeline cannot do without.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gatewright import cli, launch, processor
from gatewright.errors import UserError

State = Literal["ok", "absent", "broken"]
_MARKS: dict[State, str] = {"ok": "ok", "absent": "--", "broken": "!!"}


@dataclass(frozen=True)
class Finding:
    """One part: what was found and, where something is to be had, what it would change."""

    part: str
    state: State
    found: str
    change: str = ""
    needed: bool = False


@dataclass
class Args:
    json: bool = False
    """Print the findings as JSON instead of a page."""


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def package(part: str, name: str, change: str, *, needed: bool = False) -> Finding:
    """Look for an installed distribution, without importing it."""
    version = _version(name)
    found = f"{name} {version}" if version else "not installed"
    if version is None:
        return Finding(part, "absent", found, change, needed)
    return Finding(part, "ok", found, needed=needed)


def machine() -> Finding:
    """CPU, memory and the instruction sets that matter to the kernels."""
    features = processor.features()
    words = set(features.split())
    model = next(
        (x.split(":", 1)[1].strip() for x in features.splitlines() if x.startswith("model name")),
        platform.machine(),
    )
    sets = [s for s in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if s in words]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    found = f"{model}, {os.cpu_count()} cores, {memory:.0f} GB, {' '.join(sets) or 'no AVX2'}"
    slow = "bf16 products run in scalar loops without AVX-512: train in fp32 on this CPU"
    return Finding("machine", "ok", found, slow if processor.bf16_is_slow() else "")


def torch_build() -> Finding:
    """The torch that everything runs on."""
    import torch

    where = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    found = (
        f"torch {torch.__version__} ({where}), {torch.get_num_threads()} threads, "
        f"{torch.backends.cpu.get_cpu_capability()}, MKL {torch.backends.mkl.is_available()}"
    )
    return Finding("torch", "ok", found, needed=True)


def gpu() -> Finding:
    """CUDA devices, as torch sees them."""
    import torch

    change = "pretraining at scale, Transformer Engine layers and vLLM need one; CPU does the rest"
    if not torch.cuda.is_available():
        return Finding("GPU", "absent", "no CUDA device", change)
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Finding("GPU", "ok", f"{len(devices)} x {devices[0]}")


def kernels() -> Finding:
    """Which Mamba-2 kernels are in use, and why; compiles them if they are not yet."""
    from gatewright.kernels import backend

    active = backend.active_backend()
    change = "" if active != "torch" else "with a C++ compiler the scan is 2 to 3 times faster"
    return Finding("Mamba-2 kernels", "ok", f"{active}: {backend.why()}", change)


def compiler() -> Finding:
    """The C++ compiler that builds the kernels on first use."""
    from gatewright.kernels.native import build

    path = build.compiler()
    change = "without one the kernels run in plain PyTorch"
    if path is None:
        return Finding("C++ compiler", "absent", "neither $CXX, g++ nor clang++", change)
    done = subprocess.run(
        [path, "--version"], capture_output=True, text=True, timeout=30, check=False
    )
    first = (done.stdout.splitlines() or ["no version"])[0]
    return Finding("C++ compiler", "ok", f"{path} ({first})")


def allocator() -> Finding:
    """Whether this process runs under the tuned glibc allocator."""
    tuned = launch.allocator() == "tuned"
    found = "tuned" if tuned else "glibc's default in this shell"
    change = "our launchers set it; by hand: GLIBC_TUNABLES as gatewright.launch.tuned_env() says"
    return Finding("allocator", "ok", found, "" if tuned else change)


def slurm() -> Finding:
    """A Slurm client on the path, and whether its controller answers."""
    change = "pipelines run here with --local; --submit needs it"
    if shutil.which("sbatch") is None or shutil.which("sinfo") is None:
        return Finding("Slurm", "absent", "no sbatch on the path", change)
    try:
        done = subprocess.run(
            ["sinfo", "--version"], capture_output=True, text=True, timeout=10, check=False
        )
        ping = subprocess.run(
            ["scontrol", "ping"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.SubprocessError) as e:
        return Finding("Slurm", "broken", f"sinfo does not answer ({e})", change)
    up = ping.returncode == 0 and "UP" in ping.stdout
    version = done.stdout.strip() or "installed"
    if not up:
        return Finding("Slurm", "absent", f"{version}, no controller answers", change)
    return Finding("Slurm", "ok", f"{version}, its controller answers")


def bfcl_data() -> Finding:
    """The BFCL questions that evaluation reads."""
    from gatewright import bfcl

    change = "evaluation and the demo's chats need it: pip install --no-deps bfcl-eval==2026.3.23"
    try:
        count = len(bfcl.load_split("simple_python"))
    except UserError as e:
        return Finding("BFCL data", "absent", str(e), change, needed=True)
    found = f"bfcl-eval {_version('bfcl-eval')}, {count} simple_python questions"
    return Finding("BFCL data", "ok", found, needed=True)


def deepspeed_ops() -> Finding:
    """DeepSpeed's CPU communication op, compiled on its first multi-process run."""
    version = _version("deepspeed")
    if version is None:
        return Finding("DeepSpeed", "absent", "not installed", "sft.train needs it", needed=True)
    if not shutil.which("ninja") and importlib.util.find_spec("ninja") is None:
        return Finding(
            "DeepSpeed", "broken", f"deepspeed {version}, but no ninja", "its CPU op needs ninja"
        )
    home = Path(os.environ.get("TORCH_EXTENSIONS_DIR", Path.home() / ".cache/torch_extensions"))
    built = any(home.rglob("*shm_comm*.so")) if home.exists() else False
    note = "CPU op compiled" if built else "its first multi-process run compiles an op (1 minute)"
    return Finding("DeepSpeed", "ok", f"deepspeed {version}, {note}", needed=True)


CHECKS: tuple[Callable[[], Finding], ...] = (
    machine,
    torch_build,
    gpu,
    kernels,
    compiler,
    allocator,
    lambda: package("Megatron-Core", "megatron-core", "pretrain.train needs it", needed=True),
    lambda: package(
        "Transformer Engine", "transformer-engine", "fused layers and fp8 on CUDA only"
    ),
    lambda: package("mamba-ssm", "mamba-ssm", "CUDA kernels; CPU runs on ours"),
    lambda: package("causal-conv1d", "causal-conv1d", "CUDA kernels; CPU runs on ours"),
    deepspeed_ops,
    lambda: package("transformers", "transformers", "sft and generation need it", needed=True),
    lambda: package("vLLM", "vllm", "eval_bfcl.generate --backend vllm needs it, and a GPU"),
    bfcl_data,
    slurm,
)


def examine() -> list[Finding]:
    """Run every check; one that fails is reported, it does not end the others."""
    findings = []
    for check in CHECKS:
        try:
            findings.append(check())
        except UserError as e:
            findings.append(Finding(check.__name__, "broken", str(e)))
    return findings


def page(findings: list[Finding]) -> str:
    """Return the findings as aligned text."""
    width = max(len(f.part) for f in findings)
    lines = []
    for f in findings:
        lines.append(f"{_MARKS[f.state]}  {f.part.ljust(width)}  {f.found}")
        if f.change:
            lines.append(f"    {' ' * width}  {f.change}")
    return "\n".join(lines)


def main(args: Args) -> int:
    """Say what this machine has and what each missing part would change."""
    findings = examine()
    if args.json:
        print(json.dumps([dataclasses.asdict(f) for f in findings], indent=2))
    else:
        print(page(findings))
    missing = [f.part for f in findings if f.needed and f.state != "ok"]
    if missing and not args.json:
        print(f"\nThe CPU pipeline cannot run without: {', '.join(missing)}. `make install` helps.")
    return 1 if missing else 0


if __name__ == "__main__":
    cli.run(main, Args, prog="python -m tools.doctor")
