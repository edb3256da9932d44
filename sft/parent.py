"""The model that fine-tuning starts from, and the folder it ends in."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gatewright import artifact
from gatewright.checkpoints.models_on_disk import TOKENIZER_FILES
from gatewright.checkpoints.opening import read_config
from gatewright.errors import UserError
from gatewright.models import load_hf_model
from sft.objective import FAMILIES, register_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclasses.dataclass(frozen=True)
class Parent:
    """A Hugging Face folder that can be fine-tuned.

    Attributes:
        path: the folder.
        family: mamba2 or llama.
        gate_scale: what its gates were multiplied by since pretraining; 1.0 if nothing says
            so, None if heads were scaled differently and for a llama, which has no gates.
        vocab_size: rows of its embedding.
    """

    path: Path
    family: str
    gate_scale: float | None
    vocab_size: int


def inspect(path: Path) -> Parent:
    """Read what a model folder says of itself, without loading weights.

    Raises:
        UserError: not a finished model folder of ours nor a Hugging Face one, or another
            architecture.
    """
    extra: Mapping[str, Any] = {}
    if (path / artifact.MANIFEST).is_file():
        extra = artifact.read_manifest(path, "hf-model", flag="--model").get("extra") or {}
        artifact.require_whole(path, "--model", (".safetensors",))
    if not path.is_dir():
        raise UserError(f"--model {path}: no such folder")
    if not (path / "config.json").is_file():
        raise UserError(
            f"--model {path}: holds no config.json; give a Hugging Face model folder "
            "(python -m tools.convert CKPT --to hf makes one)"
        )
    family = read_config(path).get("model_type")
    if family not in FAMILIES:
        raise UserError(f"--model {path}: model_type {family!r:.80} is neither mamba2 nor llama")
    config = sound_config(path, str(family))
    require_sound_weights(path)
    gate_scale = None
    if family == "mamba2":
        stated = extra.get("gate_scale", 1.0)
        gate_scale = None if stated is None else float(stated)
    return Parent(path, str(family), gate_scale, config.vocab_size)


_SIZES = {
    "mamba2": (
        "vocab_size", "hidden_size", "num_hidden_layers", "state_size", "num_heads", "head_dim",
        "n_groups", "conv_kernel", "chunk_size",
    ),
    "llama": (
        "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "head_dim",
        "num_attention_heads", "num_key_value_heads",
    ),
}  # fmt: skip
_DIVIDES = {
    "mamba2": ("n_groups", "num_heads"),
    "llama": ("num_key_value_heads", "num_attention_heads"),
}


def sound_config(path: Path, family: str) -> Any:
    """Return a folder's configuration as transformers reads it, its sizes checked.

    Raises:
        UserError: transformers refuses it, or a size is none or does not fit another.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig
    from transformers.activations import ACT2FN

    source = f"--model {path / 'config.json'}"
    wrong = (StrictDataclassError, ValueError, OSError, LookupError, TypeError, AttributeError)
    try:
        config = AutoConfig.from_pretrained(str(path), local_files_only=True)
    except (*wrong, ArithmeticError) as e:
        said = " ".join(str(e).split())[:200]
        raise UserError(f"{source}: {said}; mend it, or fetch it with the weights") from e
    for name in _SIZES[family]:
        size = getattr(config, name, None)
        if type(size) is not int or size < 1:
            raise UserError(f"{source}: {name} is {size!r:.80}; it must be a positive whole number")
    part, whole = _DIVIDES[family]
    if getattr(config, whole) % getattr(config, part):
        raise UserError(
            f"{source}: {part} {getattr(config, part)} does not divide {whole} "
            f"{getattr(config, whole)}; fetch it with the weights"
        )
    if not isinstance(config.hidden_act, str) or config.hidden_act not in ACT2FN:
        raise UserError(f"{source}: hidden_act {config.hidden_act!r:.80} is not known")
    return config


def require_sound_weights(path: Path) -> None:
    """Read the headers of a folder's weight files: one cut short ends deep inside a reader else.

    Raises:
        UserError: there are no weights, or a file is damaged; it is named.
    """
    from gatewright.checkpoints.safetensors_files import read_header, shard_names

    names = shard_names(path)
    if names is None:
        if any(path.glob("pytorch_model*.bin")):
            return  # transformers reads them, as data only
        raise UserError(
            f"--model {path}: holds no weights (model.safetensors); copy or fetch the folder again"
        )
    for name in names:
        read_header(path / name)


def require_family(parent: Parent, recipe: str, wanted: str, recipes: Sequence[str]) -> None:
    """Refuse a model that the recipe's learning rate and batch were not chosen for.

    Raises:
        UserError: the model is of another family; recipes of its own are named.
    """
    if parent.family != wanted:
        own = ", ".join(name for name in recipes if name.startswith(parent.family))
        raise UserError(
            f"--model {parent.path}: is a {parent.family}, and recipe {recipe} is for {wanted}; "
            f"choose {own}"
        )


def check_vocabulary(parent: Parent, data: Path, manifest: Mapping[str, Any]) -> None:
    """Refuse data whose token ids the model cannot have or means differently.

    Raises:
        UserError: the tokenizer has more tokens than the model, or is not the model's own.
    """
    try:
        needed = int(manifest["extra"]["vocab_size"])
        drawn_with = str(manifest["extra"]["tokenizer_sha256"])
    except (LookupError, TypeError, ValueError) as e:
        raise UserError(
            f"{data / artifact.MANIFEST}: is damaged ({type(e).__name__}: {e}); "
            "run sft.prepare again"
        ) from e
    if needed > parent.vocab_size:
        raise UserError(
            f"--model {parent.path}: its vocabulary of {parent.vocab_size} is smaller than the "
            f"{needed} tokens of the tokenizer that --data {data} was prepared with; prepare the "
            "data with the model's own tokenizer"
        )
    own = parent.path / "tokenizer.json"
    if own.is_file() and artifact.sha256_file(own) != drawn_with:
        raise UserError(
            f"--data {data}: was prepared with another tokenizer than the one in --model "
            f"{parent.path}; run sft.prepare --tokenizer {parent.path}"
        )


def load(parent: Parent) -> PreTrainedModel:
    """Return the model with fp32 weights, ready for packed samples.

    Raises:
        UserError: the weights are damaged, lack a tensor, or one has another shape than the
            config says.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    kwargs: dict[str, Any] = {"dtype": torch.float32, "local_files_only": True}
    if parent.family == "mamba2":
        from transformers import Mamba2ForCausalLM

        from gatewright.kernels import bind_transformers

        bind_transformers()
        return load_hf_model(Mamba2ForCausalLM, parent.path, **kwargs)
    from transformers import LlamaForCausalLM

    kwargs["attn_implementation"] = register_attention()
    return load_hf_model(LlamaForCausalLM, parent.path, **kwargs)


def save(model: nn.Module, out: Path, tokenizer: Path, stop_ids: list[int]) -> None:
    """Write the model into `out` in the Hugging Face layout, tokenizer files beside it."""
    assert hasattr(model, "generation_config")
    model.generation_config.eos_token_id = stop_ids
    model.save_pretrained(str(out))  # type: ignore[operator]
    for name in TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copy2(tokenizer / name, out / name)
