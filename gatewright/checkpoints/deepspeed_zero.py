"""DeepSpeed ZeRO checkpoints in universal form: a folder per parameter, plus the model's file.

`ds_to_universal` writes `zero/<parameter>/fp32.pt` (the optimizer's master copy) beside the
moments, and `mp_rank_XX_model_states.pt` with the weights that the forward pass uses.  A gate
is in both, and both must agree, or the next step brings the old gate back.  Consolidated
folders (`zero_to_fp32`) hold a `pytorch_model.bin` or safetensors and are read as such.
"""

from __future__ import annotations

from pathlib import Path

from gatewright.checkpoints import torch_files
from gatewright.checkpoints.storage import StoredTensor
from gatewright.errors import UserError

MASTER_PREFIX = "optimizer.state.fp32_param."
"""Names under which masters are listed, the same as in a Megatron checkpoint."""

# What DeepSpeed writes beside the weights; names only, nothing of it is imported or called.
_INERT = ("deepspeed.", "torch.", "numpy.", "collections.", "builtins.set", "argparse.Namespace")
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

    Args:
        root: the folder that `find_root` answered.
        prefix: path from the checkpoint's root to it, `""` or `tag/`.

    Raises:
        UserError: model parallel parts (edit before splitting), or damaged files.
    """
    states = sorted(p.name for p in root.glob("mp_rank_*_model_states.pt"))
    if len(states) != 1:
        raise UserError(
            f"{root}: {len(states)} mp_rank_*_model_states.pt files; only checkpoints without "
            "model parallelism can be edited in this form, consolidate it (zero_to_fp32.py)"
        )
    saved = torch_files.read_saved(root / states[0], allowed_prefixes=_INERT)
    module = saved.get("module") if isinstance(saved, dict) else None
    if not isinstance(module, dict):
        raise UserError(f"{root / states[0]}: holds no `module` with the model's weights")
    tensors = {n: t.stored(n, prefix + states[0]) for n, t in torch_files.walk(module)}
    for file in sorted((root / "zero").glob("*/fp32.pt")):
        name = file.parent.name
        if name not in tensors or not name.endswith("A_log"):
            continue  # only gates are ever edited; other masters stay unopened
        master = torch_files.read_saved(file, allowed_prefixes=_INERT)
        master = master.get("param") if isinstance(master, dict) else master
        if not isinstance(master, torch_files.SavedTensor):
            raise UserError(f"{file}: holds no `param`")
        place = f"{prefix}zero/{name}/fp32.pt"
        shape = tensors[name].shape
        stored = master.stored(MASTER_PREFIX + name, place)
        if stored.shape != shape and stored.numel == tensors[name].numel:
            piece = stored.pieces[0]
            stored = StoredTensor(
                stored.name,
                stored.dtype,
                shape,
                (type(piece)(place, piece.start, (0,) * len(shape), shape, piece.entry),),
            )
        tensors[stored.name] = stored
    return tensors
