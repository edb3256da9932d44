"""Runs mamba_ssm's Triton scan on CPU tensors in Triton's interpreter: FOLDER with cases.pt.

A process of its own, because the interpreter is chosen before triton is imported.  Results,
outputs and the gradient of every input, go to results.pt.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.gatewright.kernels.oracle import outputs_and_gradients


def import_scan() -> Any:
    """Return mamba_ssm's `mamba_chunk_scan_combined` as it runs without a GPU."""
    import triton.runtime.autotuner as autotuner
    import triton.runtime.interpreter as interpreter

    # The package's __init__ wants compiled extensions; its Triton modules do not.
    spec = importlib.util.find_spec("mamba_ssm")
    assert spec is not None
    package = types.ModuleType("mamba_ssm")
    package.__path__ = list(spec.submodule_search_locations or [])
    sys.modules["mamba_ssm"] = package
    for name in ("causal_conv1d_cuda", "selective_scan_cuda"):
        sys.modules[name] = types.ModuleType(name)

    torch.cuda.device = lambda *_: contextlib.nullcontext()  # type: ignore[assignment,misc]
    one_core = types.SimpleNamespace(multi_processor_count=1)
    torch.cuda.get_device_properties = lambda *_: one_core  # type: ignore[assignment,return-value]
    # Without timings every configuration is as good as the first.
    autotuner.Autotuner.prune_configs = lambda self, kwargs: self.configs[:1]
    create_dot = interpreter.InterpreterBuilder.create_dot

    def widened(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        """bf16 is kept as integers there, and would be multiplied as such."""
        for operand in (a, b):
            assert operand.data.dtype.kind == "f", "bf16 operands are not widened here"
        return create_dot(self, a, b, d, *options)

    interpreter.InterpreterBuilder.create_dot = widened
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    return mamba_chunk_scan_combined


def main(folder: Path) -> None:
    assert os.environ["TRITON_INTERPRET"] == "1"
    torch.set_num_threads(1)
    scan = import_scan()
    results: list[dict[str, Tensor]] = []
    for case in torch.load(folder / "cases.pt", weights_only=True):
        results.append(
            outputs_and_gradients(scan, case["tensors"], torch.float32, **case["options"])
        )
    torch.save(results, folder / "results.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
