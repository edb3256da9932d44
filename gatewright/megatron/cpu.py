"""What Megatron-Core needs to run without CUDA.

The engine assumes a GPU in four ways: it asks CUDA for the current device, keeps separate
CUDA generator states, creates small tensors with `device="cuda"`, and recognises dtypes by
names such as `torch.cuda.FloatTensor`.  `enable` answers the first two for good, once;
`redirect` is a context for code that does the last two.  On a machine with CUDA both do
nothing.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
_TRITON_OPS = "megatron.core.inference.contexts.attention_context.triton.tensor_ops"
_EXPECTED_WARNINGS = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",  # Megatron warns of its own default
    "The .grad attribute of a Tensor that is not a leaf",  # views of parameters, by design
    "When using async grad allreduce it is recommended",
    "`load_state_dict` is deprecated",
    "Please use DTensor instead",
    "`torch.distributed.*` is deprecated",
)
_enabled = False


def present() -> bool:
    """Tell whether this process computes on CUDA."""
    return torch.cuda.is_available()


def enable() -> None:
    """Install the adaptations that hold for the whole process.  Idempotent; no-op on CUDA.

    Call it before anything imports `megatron.core.ssm`.
    """
    global _enabled
    if _enabled or present():
        return
    _enabled = True
    for message in _EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    _import_without_compiling()
    _stub_triton_operations()
    torch.cuda.current_device = lambda: CPU  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda device=None: None  # type: ignore[assignment]
    torch.cuda.empty_cache = lambda: None  # type: ignore[assignment]
    _share_the_cpu_generator()


def _import_without_compiling() -> None:
    """Import Megatron with its fused pointwise functions left as plain Python.

    They are decorated with torch.compile at import: on CPU that gains nothing and costs the
    import of the compiler, three seconds at each start.
    """
    before = torch.compile
    torch.compile = lambda function: function  # type: ignore[assignment]
    try:
        import megatron.core  # noqa: F401
    finally:
        torch.compile = before


def _stub_triton_operations() -> None:
    """Stand in for a module that imports triton, which only inference on GPUs uses."""
    if importlib.util.find_spec("triton") is not None:
        return
    module = types.ModuleType(_TRITON_OPS)

    def unavailable(*_: Any, **__: Any) -> None:
        raise RuntimeError("Megatron's dynamic inference needs triton and a GPU")

    for name in ("tensor_get_slice_after", "tensor_masked_update", "tensor_merge"):
        setattr(module, name, unavailable)
    sys.modules[_TRITON_OPS] = module


class _NotOnCpu(logging.Filter):
    """Drops the tracker's warning that the CPU generator moved: here it is the only one."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "CPU RNG state changed" not in record.getMessage()


def _share_the_cpu_generator() -> None:
    """Let the tracker of CUDA generator states save and restore torch's CPU generator."""
    from megatron.core.tensor_parallel import random

    def get(*_: Any, **__: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def put(state: torch.Tensor, *_: Any, **__: Any) -> None:
        torch.set_rng_state(state)

    random._get_cuda_rng_state = get
    random._set_cuda_rng_state = put
    torch.cuda.get_rng_state = get  # type: ignore[assignment]
    torch.cuda.set_rng_state = put  # type: ignore[assignment]
    torch.cuda.manual_seed = torch.manual_seed  # type: ignore[assignment]
    logging.getLogger(random.__name__).addFilter(_NotOnCpu())


_CUDA_TYPE_NAMES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
    torch.float16: "torch.cuda.HalfTensor",
}


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


class _Redirect(TorchFunctionMode):
    """Sends `device="cuda"` to the CPU and answers `.type()` with CUDA's names."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return _CUDA_TYPE_NAMES.get(args[0].dtype) or func(*args)
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs = {**kwargs, "device": CPU}
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        return func(*args, **kwargs)


@contextlib.contextmanager
def redirect() -> Iterator[None]:
    """Run a block of Megatron code that names CUDA devices or types.  No-op on CUDA."""
    if present():
        yield
        return
    enable()
    with _Redirect():
        yield
