"""DeepSpeed ZeRO checkpoints in universal form: a folder per parameter, plus the model's file.

`ds_to_universal` writes `zero/<parameter>/fp32.pt` (the optimizer's master copy) beside the
moments, and `mp_rank_XX_model_states.pt` with the weights that the forward pass uses.  A gate
is in both, and both must agree, or the next step brings the old gate back.  Consolidated
folders (`zero_to_fp32`) hold a `pytorch_model.bin` or safetensors and are read as such.
Made from ZeRO stage 3, `zero/` holds the only weights there are, flat, and the files of the
ranks (`zero_pp_rank_*`) their shapes.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from gatewright.checkpoints import torch_files
from gatewright.checkpoints.storage import StoredTensor
from gatewright.errors import UserError

MASTER_PREFIX = "optimizer.state.fp32_param."
"""Names under which masters are listed, the same as in a Megatron checkpoint."""

INERT = ("deepspeed.", "torch.", "numpy.", "collections.", "builtins.set", "argparse.Namespace")
"""What DeepSpeed writes beside the weights; names only, nothing of it is imported or called."""
_STATES = "_model_states.pt"
_GATE_TENSORS = ("A_log", "dt_bias", "dt_proj.bias", "dt_proj_bias")
_TAG_FILES = ("latest_universal", "latest")


def find_root(path: Path) -> Path | None:
    """Return the folder of a DeepSpeed checkpoint at `path` or named by its `latest`, or None.

    Raises:
        UserError: a sharded ZeRO checkpoint that is not in universal form.
    """
    for folder in (path, *_tagged(path)):
        states = [p.name for p in folder.glob("*_model_states.pt")]
        if not states:
            continue
        if (folder / "zero").is_dir():
            return folder
        raise UserError(
            f"{folder}: a DeepSpeed checkpoint whose optimizer is sharded; make it universal "
            "(python -m deepspeed.checkpoint.ds_to_universal) or consolidate it "
            "(zero_to_fp32.py), then edit that"
        )
    return None


def _tagged(path: Path) -> list[Path]:
    found = []
    for name in _TAG_FILES:
        if (path / name).is_file():
            tag = (path / name).read_text(encoding="utf-8", errors="replace").strip()
            if tag and Path(tag).name == tag and (path / tag).is_dir():
                found.append(path / tag)
    return found


def read_tensors(root: Path, prefix: str) -> dict[str, StoredTensor]:
    """Return the model's tensors and the masters of a universal checkpoint.

    From ZeRO stage 3 the weights are nowhere but in the masters; there those of the gates and
    their step sizes stand under the model's own names.

    Args:
        root: the folder that `find_root` answered.
        prefix: path from the checkpoint's root to it, `""` or `tag/`.

    Raises:
        UserError: model parallel parts (edit before splitting), or damaged files.
    """
    parallel = sorted({p.name[-len(_STATES) - 2 :] for p in root.glob(f"*mp_rank_*{_STATES}")})
    if parallel != [f"00{_STATES}"]:
        raise UserError(
            f"{root}: is split by model parallelism ({len(parallel)} ranks); only checkpoints "
            "without it can be edited in this form, consolidate it (zero_to_fp32.py)"
        )
    whole = root / f"mp_rank_00{_STATES}"
    if not whole.is_file():
        return _read_stage_3(root, prefix)
    saved = torch_files.read_saved(whole, allowed_prefixes=INERT)
    module = saved.get("module") if isinstance(saved, dict) else None
    if not isinstance(module, dict):
        raise UserError(f"{whole}: holds no `module` with the model's weights")
    tensors = {n: t.stored(n, prefix + whole.name) for n, t in torch_files.walk(module)}
    for file in sorted((root / "zero").glob("*/fp32.pt")):
        name = file.parent.name
        if name in tensors and name.endswith("A_log"):
            # Only gates are ever edited; other masters stay unopened.
            stored = _master(file, MASTER_PREFIX + name, tensors[name].shape, prefix)
            tensors[stored.name] = stored
    return tensors


def is_master(tensor: StoredTensor) -> bool:
    """Tell whether a tensor is itself the optimizer's copy (ZeRO stage 3)."""
    return Path(tensor.pieces[0].file).name == "fp32.pt"


def _read_stage_3(root: Path, prefix: str) -> dict[str, StoredTensor]:
    first = min(root.glob(f"zero_pp_rank_*{_STATES}"))
    saved = torch_files.read_saved(first, allowed_prefixes=INERT)
    groups = saved.get("param_shapes") if isinstance(saved, dict) else None
    tensors = {}
    try:
        shapes = {n: tuple(s.args[0]) for group in groups or () for n, s in group.items()}
    except (AttributeError, IndexError, TypeError) as e:
        raise UserError(f"{first}: its `param_shapes` are not names and shapes") from e
    for name, shape in shapes.items():
        file = root / "zero" / name / "fp32.pt"
        if name.endswith(_GATE_TENSORS) and Path(name).name == name and file.is_file():
            tensors[name] = _master(file, name, shape, prefix)
    return tensors


def _master(file: Path, name: str, shape: tuple[int, ...], prefix: str) -> StoredTensor:
    """Return the tensor in a `fp32.pt`, which may be stored flat, in its own shape."""
    saved = torch_files.read_saved(file, allowed_prefixes=INERT)
    saved = saved.get("param") if isinstance(saved, dict) else saved
    if not isinstance(saved, torch_files.SavedTensor):
        raise UserError(f"{file}: holds no `param`")
    stored = saved.stored(name, f"{prefix}zero/{file.parent.name}/{file.name}")
    if stored.shape != shape and stored.numel == math.prod(shape):
        piece = dataclasses.replace(stored.pieces[0], offsets=(0,) * len(shape), shape=shape)
        stored = dataclasses.replace(stored, shape=shape, pieces=(piece,))
    return stored
