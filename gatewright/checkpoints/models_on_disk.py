"""What model a checkpoint folder holds, whatever format its configuration is in."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gatewright import artifact
from gatewright.checkpoints.storage import Checkpoint
from gatewright.errors import UserError
from gatewright.models import ModelConfig, from_hf_config


def model_config(checkpoint: Checkpoint) -> ModelConfig:
    """Return the sizes of the model that a checkpoint holds.

    Raises:
        UserError: the configuration is missing or of a model that cannot be converted.
    """
    source = str(checkpoint.root / "config.json")
    config = checkpoint.config
    if checkpoint.format == "megatron":
        model = config.get("model")
        if not isinstance(model, Mapping):
            raise UserError(f"{source}: has no `model` with the sizes; was it made by gatewright?")
        known = {f.name for f in dataclasses.fields(ModelConfig)}
        unknown = sorted(set(model) - known)
        if unknown:
            raise UserError(f"{source}: model.{unknown[0]} is not a size that is known here")
        try:
            return ModelConfig(**model)
        except TypeError as e:
            raise UserError(f"{source}: model is incomplete ({e})") from e
    if "ssm_cfg" in config:
        return _of_mamba_ssm(config, source)
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    wrong = (StrictDataclassError, ValueError, OSError, LookupError, TypeError, AttributeError)
    try:
        parsed = AutoConfig.from_pretrained(checkpoint.root)
    except (*wrong, ArithmeticError) as e:
        said = " ".join(str(e).split())[:200]
        raise UserError(f"{source}: {said}; mend it, or fetch it with the weights") from e
    return from_hf_config(parsed, source)


def dt_limit(checkpoint: Checkpoint) -> tuple[float, float] | None:
    """Return the bounds that a mamba_ssm configuration sets on dt; None if it sets none.

    Raises:
        UserError: `ssm_cfg.dt_limit` is not a pair of numbers in order.
    """
    ssm = checkpoint.config.get("ssm_cfg")
    stated = ssm.get("dt_limit") if isinstance(ssm, Mapping) else None
    if stated is None:
        return None
    try:
        low, high = map(float, stated)
        if not 0 <= low <= high:
            raise ValueError
    except (TypeError, ValueError) as e:
        raise UserError(
            f"{checkpoint.root / 'config.json'}: ssm_cfg.dt_limit {stated!r} is not a pair of "
            "numbers [low, high]; mend it"
        ) from e
    return None if low == 0 and high == float("inf") else (low, high)


def require_unbounded_dt(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint for Megatron-Core whose dt is clamped: its Mamba-2 has no bounds.

    Raises:
        UserError: `ssm_cfg.dt_limit` bounds dt.
    """
    limit = dt_limit(checkpoint)
    if limit is not None:
        raise UserError(
            f"{checkpoint.root / 'config.json'}: ssm_cfg.dt_limit {list(limit)} bounds dt, which "
            "Megatron-Core cannot; only [0, inf] can be trained (--to hf and --to mamba_ssm keep "
            "the bounds)"
        )


def stated_facts(folder: Path) -> Mapping[str, Any]:
    """Return the `extra` of a checkpoint's manifest, or of the run's that an `iter_*` lies in.

    Empty where neither has a manifest.

    Raises:
        UserError: the manifest is damaged.
    """
    for place in (folder, folder.parent) if folder.name.startswith("iter_") else (folder,):
        if (place / artifact.MANIFEST).is_file():
            facts = artifact.read_manifest(place).get("extra") or {}
            if not isinstance(facts, dict):
                raise UserError(
                    f"{place / artifact.MANIFEST}: `extra` is not an object; make the folder "
                    "again, or rename the file if it is another program's"
                )
            return facts
    return {}


def require_trained_tokenizer(run: Path, tokenizer: Path) -> None:
    """Refuse a tokenizer with other ids than the one a finished Gatewright folder was made with.

    A smaller foreign vocabulary fits the embeddings and the logits still agree, so nothing else
    would notice.  A changed chat template is allowed.  What cannot be known passes: a folder
    without manifest, or one whose own tokenizer folder is gone or was made again.

    Raises:
        UserError: the vocabularies differ.
    """
    from tokenizers import Tokenizer

    folder = run.parent if run.name.startswith("iter_") else run
    if not (folder / artifact.MANIFEST).is_file():
        return
    stated = artifact.read_manifest(folder).get("parents", {}).get("tokenizer")
    trained = Path(stated["path"]) if stated else None
    if trained is None or not (trained / artifact.MANIFEST).is_file():
        return
    if artifact.read_manifest(trained).get("content_hash") != stated["content_hash"]:
        return
    ours, given = (
        Tokenizer.from_file(str(t / "tokenizer.json")).get_vocab(with_added_tokens=True)
        for t in (trained, tokenizer)
    )
    if ours != given:
        raise UserError(
            f"--tokenizer {tokenizer}: its vocabulary is not the one that {run} was trained with; "
            f"name {trained}"
        )


def _of_mamba_ssm(config: Mapping[str, Any], source: str) -> ModelConfig:
    """Read a config.json of state-spaces/mamba2-*; what it leaves out has mamba_ssm's defaults."""
    ssm = config["ssm_cfg"]
    if not isinstance(ssm, Mapping) or ssm.get("layer", "Mamba1") != "Mamba2":
        raise UserError(f"{source}: ssm_cfg.layer is not Mamba2; only Mamba-2 can be converted")
    plain = {
        "attn_layer_idx": ([], None),
        "d_intermediate": (0, None),
        "rms_norm": (True,),
    }
    plain_ssm: dict[str, tuple[Any, ...]] = {
        "bias": (False,),
        "conv_bias": (True,),
        "rmsnorm": (True,),
        "norm_before_gate": (False,),
        "D_has_hdim": (False,),
        "d_ssm": (None,),
    }
    for where, table, allowed in (("", config, plain), ("ssm_cfg.", ssm, plain_ssm)):
        for name, values in allowed.items():
            if name in table and table[name] not in values:
                raise UserError(
                    f"{source}: {where}{name} is {table[name]!r}; only plain Mamba-2 stacks "
                    f"({values[0]!r}) can be converted"
                )
    try:
        vocab, multiple = int(config["vocab_size"]), int(config.get("pad_vocab_size_multiple", 8))
        return ModelConfig(
            family="mamba2",
            vocab_size=-(-vocab // multiple) * multiple,
            d_model=int(config["d_model"]),
            n_layers=int(config["n_layer"]),
            tie_embeddings=bool(config.get("tie_embeddings", True)),
            norm_eps=float(config.get("norm_epsilon", 1e-5)),
            expand=int(ssm.get("expand", 2)),
            d_state=int(ssm.get("d_state", 128)),
            head_dim=int(ssm.get("headdim", 64)),
            ngroups=int(ssm.get("ngroups", 1)),
            d_conv=int(ssm.get("d_conv", 4)),
            chunk_size=int(ssm.get("chunk_size", 256)),
        )
    except (KeyError, TypeError, ValueError, ArithmeticError) as e:
        raise UserError(f"{source}: not a mamba_ssm configuration ({type(e).__name__}: {e})") from e


def mamba_ssm_config(
    model: ModelConfig, dt_limit: tuple[float, float] | None = None
) -> dict[str, Any]:
    """Return the config.json that mamba_ssm's MambaLMHeadModel reads.

    Args:
        dt_limit: bounds on dt, if any.

    Raises:
        UserError: the model is not a Mamba-2.
    """
    if model.family != "mamba2":
        raise UserError(f"--to mamba_ssm: needs a Mamba-2 checkpoint, this is a {model.family}")
    return {
        "d_model": model.d_model,
        "d_intermediate": 0,
        "n_layer": model.n_layers,
        "vocab_size": model.vocab_size,
        "ssm_cfg": {
            "layer": "Mamba2",
            "d_state": model.d_state,
            "d_conv": model.d_conv,
            "expand": model.expand,
            "headdim": model.head_dim,
            "ngroups": model.ngroups,
            "chunk_size": model.chunk_size,
            **({} if dt_limit is None else {"dt_limit": list(dt_limit)}),
        },
        "attn_layer_idx": [],
        "attn_cfg": {},
        "rms_norm": True,
        "residual_in_fp32": False,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 1,
        "tie_embeddings": model.tie_embeddings,
    }


TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
"""What makes a tokenizer in the Hugging Face layout; copied along with data and models."""


def token_ids(tokenizer: Path, model: ModelConfig) -> dict[str, int | None]:
    """Return bos, eos and pad ids of a tokenizer folder.

    Raises:
        UserError: it has no tokenizer.json, or more tokens than the model has embeddings.
    """
    from tokenizers import Tokenizer

    path = tokenizer / "tokenizer.json"
    if not path.is_file():
        raise UserError(f"--tokenizer {tokenizer}: has no tokenizer.json")
    try:
        loaded = Tokenizer.from_file(str(path))
        settings = json.loads((tokenizer / "tokenizer_config.json").read_text(encoding="utf-8"))
    except Exception as e:
        raise UserError(f"--tokenizer {tokenizer}: cannot be read ({e})") from e
    size = max(loaded.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if size > model.vocab_size:
        raise UserError(
            f"--tokenizer {tokenizer}: has {size} tokens, but the checkpoint has "
            f"{model.vocab_size} embeddings; name the tokenizer it was trained with"
        )
    found: dict[str, int | None] = {}
    for kind in ("bos", "eos", "pad"):
        token = settings.get(f"{kind}_token")
        if isinstance(token, Mapping):
            token = token.get("content")
        found[f"{kind}_token_id"] = None if token is None else loaded.token_to_id(str(token))
    return found
