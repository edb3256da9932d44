"""Conversion between Megatron torch_dist, Hugging Face and mamba_ssm, streaming and checked."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gatewright import artifact
from gatewright.checkpoints import (
    mamba_ssm_writer,
    models_on_disk,
    parity,
    safetensors_files,
    torch_dist_writer,
)
from gatewright.checkpoints.opening import open_checkpoint, resolve_run
from gatewright.checkpoints.storage import Checkpoint
from gatewright.checkpoints.views import (
    View,
    hf_views,
    megatron_empty_states,
    megatron_tensors,
)
from gatewright.errors import UserError
from gatewright.models import ModelConfig, hf_config

TARGETS = {"hf": "hf-model", "megatron": "pretrain", "mamba_ssm": "mamba_ssm-model"}
"""What --to accepts, and the kind that the written folder's manifest states."""

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_size(text: str) -> int:
    """Parse `5GB` or `200MB` (powers of ten) into bytes.

    Raises:
        UserError: anything else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?B)?", text.strip(), re.IGNORECASE)
    size = int(float(match[1]) * _UNITS[(match[2] or "").upper()]) if match else 0
    if size <= 0:
        raise UserError(f"--max-shard-size {text!r}: write a size like 5GB or 200MB")
    return size


@dataclasses.dataclass(frozen=True)
class Converted:
    """What a conversion wrote."""

    folder: Path
    model: ModelConfig
    nbytes: int
    parity: parity.Parity | None
    """None when the check was not asked for."""


def convert(
    source: Path,
    to: str,
    out: Path,
    *,
    tokenizer: Path | None = None,
    max_shard_bytes: int = 5 * 10**9,
    check: bool = True,
    progress: Callable[[int, int], None] = lambda done, total: None,
    checking: Callable[[], None] = lambda: None,
) -> Converted:
    """Write a checkpoint in another format; the folder appears complete and checked or not at all.

    Weights keep their stored type; gates (A_log, D, dt_bias) become fp32 in a Megatron
    checkpoint, which trains them so.  One tensor is in memory at a time, except in the check,
    which loads one model and then the other.

    Args:
        source: a Megatron run or `iter_*` folder, a Hugging Face or a mamba_ssm folder.
        to: hf, megatron or mamba_ssm.
        tokenizer: folder whose tokenizer files go into the output; by default the source's own.
        check: compare the logits of input and output on random tokens, in fp32.
        progress: told (bytes just written, bytes in all).
        checking: called when everything is written and the check begins.

    Raises:
        UserError: an input that cannot be converted, or logits that differ.
    """
    if to not in TARGETS:
        raise UserError(f"--to {to}: choose one of {', '.join(TARGETS)}")
    checkpoint = open_checkpoint(resolve_run(Path(source)))
    model = models_on_disk.model_config(checkpoint)
    if to == "mamba_ssm":
        models_on_disk.mamba_ssm_config(model)  # refuses a Llama before any work
    elif to == "megatron":
        models_on_disk.require_unbounded_dt(checkpoint)
    ids: Mapping[str, int | None] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    if tokenizer is not None:
        ids = models_on_disk.token_ids(tokenizer, model)
        models_on_disk.require_trained_tokenizer(Path(source), tokenizer)
    views = hf_views(checkpoint, model)
    total = sum(_nbytes(v) for v in views.values())
    parents = {"model": checkpoint.root}
    if tokenizer is not None:
        parents["tokenizer"] = tokenizer
    extra: dict[str, Any] = {"parameters": model.parameters(), "from": checkpoint.format}
    before = models_on_disk.stated_facts(Path(source))
    if "gate_scale" in before:  # converting leaves gates as they are
        extra["gate_scale"] = before["gate_scale"]
    with artifact.create(
        Path(out), kind=TARGETS[to], config=model, parents=parents, extra=extra
    ) as tmp:
        written = tmp

        def report(n: int) -> None:
            progress(n, total)

        if to == "hf":
            _write_hf(tmp, checkpoint, model, views, ids, max_shard_bytes, report)
        elif to == "mamba_ssm":
            limit = models_on_disk.dt_limit(checkpoint)
            config = models_on_disk.mamba_ssm_config(model, limit)
            artifact.write_json(tmp / "config.json", config)
            mamba_ssm_writer.write_file(tmp, views, tied=model.tie_embeddings, progress=report)
        else:
            written = _write_megatron(tmp, checkpoint, model, views, report)
        _copy_tokenizer(tokenizer or checkpoint.root, tmp)
        found = None
        if check:
            checking()
            found = parity.compare(
                parity.logits(checkpoint, model),
                parity.logits(open_checkpoint(written), model),
                source,
            )
            extra["max_logit_difference"] = found.max_difference
            if not found.agrees:
                raise UserError(
                    f"{source}: logits of the converted model "
                    f"differ by {found.max_difference:.3g}; "
                    "nothing was written (please report this; --no-check writes it anyway)"
                )
    return Converted(Path(out), model, total, found)


def _nbytes(view: View) -> int:
    return safetensors_files.Planned("", view.dtype, view.shape, view.read).nbytes


def _write_hf(
    tmp: Path,
    checkpoint: Checkpoint,
    model: ModelConfig,
    views: Mapping[str, View],
    ids: Mapping[str, int | None],
    max_shard_bytes: int,
    report: Callable[[int], None],
) -> None:
    planned = [safetensors_files.Planned(n, v.dtype, v.shape, v.read) for n, v in views.items()]
    safetensors_files.write_folder(tmp, planned, max_shard_bytes, report)
    if checkpoint.format == "huggingface":  # nothing to translate: only shards change
        for name in ("config.json", "generation_config.json"):
            if (checkpoint.root / name).is_file():
                shutil.copyfile(checkpoint.root / name, tmp / name)
        return
    main = max(views.values(), key=_nbytes)
    config = hf_config(model, **ids)
    config.architectures = [
        {"mamba2": "Mamba2ForCausalLM", "llama": "LlamaForCausalLM"}[model.family]
    ]
    config.dtype = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}.get(main.dtype)
    if model.family == "mamba2":
        limit = models_on_disk.dt_limit(checkpoint)
        if limit is not None:
            config.time_step_limit = limit
        config.residual_in_fp32 = bool(checkpoint.config.get("residual_in_fp32", False))
    config.save_pretrained(tmp)


def _write_megatron(
    tmp: Path,
    checkpoint: Checkpoint,
    model: ModelConfig,
    views: dict[str, View],
    report: Callable[[int], None],
) -> Path:
    """Write a run folder with one weights-only checkpoint; return the checkpoint's folder."""
    for name, view in views.items():
        if name.rpartition(".")[2] in ("A_log", "D", "dt_bias") and view.dtype != "F32":
            views[name] = _in_fp32(view)
    folder = tmp / "iter_0000000"
    folder.mkdir()
    common = {"step": 0, "consumed_samples": 0, "layout": [1, 1, 1, 1]}
    torch_dist_writer.write_folder(
        folder, megatron_tensors(views, model), common, megatron_empty_states(model), report
    )
    sizes = {"model": dataclasses.asdict(model)}
    for place in (folder, tmp):
        (place / "config.json").write_text(json.dumps(sizes, indent=2) + "\n", encoding="utf-8")
    (tmp / "latest").write_text("iter_0000000\n", encoding="utf-8")
    return folder


def _in_fp32(view: View) -> View:
    from gatewright.checkpoints import dtypes

    def read() -> Any:
        return dtypes.encode(dtypes.decode(view.read(), view.dtype), "F32")

    return View("F32", view.shape, read)


def _copy_tokenizer(source: Path, target: Path) -> None:
    for name in models_on_disk.TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
