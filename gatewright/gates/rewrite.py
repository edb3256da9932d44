"""From a checkpoint and its edits to finished folders, each complete or absent."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gatewright import artifact
from gatewright.checkpoints.models_on_disk import stated_facts
from gatewright.checkpoints.safetensors_files import INDEX
from gatewright.errors import UserError
from gatewright.gates import marks
from gatewright.gates.copying import Output, write_copies
from gatewright.gates.edits import Dts, Plan
from gatewright.gates.find import Gate, Gates
from gatewright.gates.patching import Patch, patches_of, refuse_shared
from gatewright.gates.report import edit_report
from gatewright.gates.widening import enlarge_total_size, widened_type

KINDS = {
    "huggingface": "hf-model",
    "pytorch": "pytorch-model",
    "megatron": "pretrain",
    "deepspeed": "deepspeed",
}
"""Checkpoint format -> the kind that its copy's manifest states."""


@dataclasses.dataclass(frozen=True)
class Written:
    """A finished copy and what its edit did."""

    folder: Path
    plan: Plan
    report: dict[str, Any]


def output_folders(out: Path, plans: Sequence[Plan]) -> list[Path]:
    """Return where each edit goes: `out` itself for one edit, `out-s0.5`, `out-s2`, ... else.

    Raises:
        UserError: two edits would go to one folder, or `out` has no name of its own.
    """
    if len(plans) == 1:
        return [out]
    if out.name in ("", ".."):
        raise UserError(f"--out {out}: has no name to which several edits could add theirs")
    folders = [out.with_name(f"{out.name}-{plan.edit.label}") for plan in plans]
    if len(set(folders)) != len(folders):
        raise UserError(f"--out {out}: the same edit is asked for twice")
    return folders


def write_edits(
    gates: Gates,
    plans: Sequence[Plan],
    out: Path,
    *,
    dts: Dts,
    link: bool = False,
    fp32: bool = False,
    whole_hashes: bool = False,
    progress: Callable[[int], None] = lambda n: None,
) -> list[Written]:
    """Write one copy of the checkpoint per edit, in one pass over its files.

    Every copy appears complete, with its manifest, or not at all; when one fails none appears.

    Args:
        out: the folder of a single edit, or the stem of several (see `output_folders`).
        fp32: store every A_log that is narrower in fp32 (Hugging Face safetensors only).
        whole_hashes: hash large files whole for the manifests; else they get what the input's
            manifest states, or a mark that takes no time but proves less (see `marks`).
        link: share unchanged files with the input where the filesystem can.
        progress: told the bytes of the input as they are done.

    Raises:
        UserError: an output exists, lies inside the checkpoint, or cannot be written; or the
            input's manifest is damaged.
    """
    checkpoint = gates.checkpoint
    folders = output_folders(Path(out), plans)
    root = checkpoint.root.resolve()
    for folder in folders:
        if Path(os.path.realpath(folder)).is_relative_to(root):
            raise UserError(f"--out {folder} lies inside the checkpoint; choose another place")
    if fp32 and checkpoint.format != "huggingface":
        raise UserError(
            f"--keep-fp32-gates: only safetensors can hold gates in another type than before, "
            f"{checkpoint.root} is {checkpoint.format}; convert it first (tools.convert --to hf)"
        )
    for plan in plans:
        refuse_shared(checkpoint, plan.touched(gates))
    scales = [gate_scale(gates, plan) for plan in plans]
    reports = [edit_report(plan, gates, dts, fp32=fp32) for plan in plans]
    parent_hashes: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        outputs = []
        for plan, folder, report, scale in zip(plans, folders, reports, scales, strict=True):
            hashes: dict[str, str] = {}
            tmp = stack.enter_context(
                artifact.create(
                    folder,
                    kind=KINDS[checkpoint.format],
                    config={"edit": plan.edit.describe()},
                    parents={"model": checkpoint.root},
                    extra={
                        "gates": report,
                        "model_type": gates.model_type,
                        "gate_scale": scale,
                    },
                    hashes=hashes,
                    parent_hashes=parent_hashes,
                    sync=False,  # as cp leaves it to the kernel when to write
                )
            )
            output = Output(tmp, functools.partial(_patches, gates, plan), hashes)
            if fp32:
                output.patches = functools.partial(_patches_of_wide, gates, plan)
                output.widened = functools.partial(_widened, gates, plan)
            outputs.append(output)
        try:
            sources = write_copies(
                checkpoint, outputs, link=link, whole_hashes=whole_hashes, progress=progress
            )
            if fp32 and INDEX in checkpoint.files:
                for output in outputs:
                    output.hashes[INDEX] = enlarge_total_size(output.folder / INDEX, _added(gates))
        except OSError as e:
            raise UserError(f"{e.filename or out}: {e.strerror}; nothing was written") from e
        parent_hashes["model"] = _parent_hash(root, sources)
    return [Written(*row) for row in zip(folders, plans, reports, strict=True)]


def _parent_hash(root: Path, hashes: Mapping[str, str]) -> str:
    """Return the input's content hash, under the name that its own manifest gave it if it holds."""
    if set(marks.known(root, whole=False)) == set(hashes):
        return artifact.content_hash(root)
    return artifact.content_hash_of(hashes)


def gate_scale(gates: Gates, plan: Plan) -> float | None:
    """Return what all gates were multiplied by since pretraining, this edit included.

    None if the edits differ between heads: then no single number says it.

    Raises:
        UserError: the checkpoint's manifest states something that is no scale.
    """
    before = stated_facts(gates.checkpoint.root).get("gate_scale", 1.0)
    if before is not None and not (type(before) in (int, float) and 0 < before < 1e300):
        raise UserError(
            f"{gates.checkpoint.root}: its {artifact.MANIFEST} states extra.gate_scale {before!r}, "
            "which is no scale; correct it, or rename the file if it is another program's"
        )
    offsets = np.concatenate([np.ravel(o) for o in plan.offsets.values()])
    if before is None or not np.all(offsets == offsets[0]):
        return None
    return float(f"{before * math.exp(float(offsets[0])):.12g}")


def _patches(gates: Gates, plan: Plan, file: str) -> Sequence[Patch]:
    changed = plan.changes(gates, file)
    return patches_of(gates.checkpoint, changed, file).get(file, [])


def _narrow(gates: Gates) -> list[Gate]:
    return [g for g in gates.gates if widened_type(g.A_log) != g.A_log.dtype]


def _added(gates: Gates) -> int:
    """Return the bytes by which storing gates in fp32 enlarges the weights."""
    return sum(4 * g.A_log.numel - g.A_log.nbytes for g in _narrow(gates))


def _is_widened(gates: Gates, file: str) -> bool:
    return any(g.A_log.pieces[0].file == file for g in _narrow(gates))


def _patches_of_wide(gates: Gates, plan: Plan, file: str) -> Sequence[Patch]:
    return () if _is_widened(gates, file) else _patches(gates, plan, file)


def _widened(gates: Gates, plan: Plan, file: str) -> dict[str, np.ndarray]:
    """Return the new values of every gate in a file that has gates to widen, edited or not."""
    if not _is_widened(gates, file):
        return {}
    return {
        gate.A_log.name: plan.edited(gates, gate, gate.A_log, widened_type(gate.A_log))
        for gate in gates.gates
        if gate.A_log.pieces[0].file == file
    }
