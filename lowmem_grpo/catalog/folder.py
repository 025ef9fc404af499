"""What a model folder (or a list of file names on a hub) must have, and which kinds of model are supported."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from lowmem_grpo.errors import ModelError

__all__ = [
    "FAMILIES",
    "check_config",
    "check_file_names",
    "check_folder",
    "context_length",
    "read_config",
    "weight_files",
]

FAMILIES = ("gemma2", "gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3")
"""The values of `model_type` that this package knows how to train."""

_LAYER_KINDS = ("full_attention", "sliding_attention")
"""Layers whose state is keys and values per token. A recurrent state cannot branch from a prompt to its answers."""

_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_INDEX = "model.safetensors.index.json"
_TOKENIZERS = ({"tokenizer.json"}, {"tokenizer.model"}, {"vocab.json", "merges.txt"})


def weight_files(names: Collection[str]) -> list[str]:
    """The safetensors files transformers would load, in order; [] when there are none.

    >>> weight_files(["model-00001-of-00002.safetensors", "consolidated.safetensors", "pytorch_model.bin"])
    ['model-00001-of-00002.safetensors']
    """
    return sorted(name for name in names if _WEIGHTS.fullmatch(name))


def check_file_names(names: Collection[str], label: str) -> None:
    """Raise ModelError when files with these names cannot be a model; `label` starts the sentence."""
    if "adapter_config.json" in names:
        raise ModelError(
            f"{label} holds a LoRA adapter, not a whole model; name its base as model.name and this as "
            "lora.continue_from."
        )
    if "config.json" not in names:
        raise ModelError(f"{label} has no config.json, so it is not a model in the transformers layout.")
    if not weight_files(names):
        raise ModelError(_no_weights(names, label))
    if not any(files <= set(names) for files in _TOKENIZERS):
        raise ModelError(
            f"{label} has no tokenizer (tokenizer.json, or tokenizer.model, or vocab.json with merges.txt); copy the "
            "tokenizer files of the base model into it."
        )


def _no_weights(names: Collection[str], label: str) -> str:
    pickles = sorted(name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt")))
    if pickles:
        return (
            f"{label} has its weights only as {pickles[0]}, a pickle, which can run code when it is read; "
            "only safetensors are read here: choose a revision that has them, or save it again with save_pretrained()."
        )
    if gguf := sorted(name for name in names if name.endswith(".gguf")):
        return f"{label} has only {gguf[0]}, which is made for inference; choose the safetensors version of the model."
    return f"{label} has no weights (no model.safetensors)."


def read_config(path: Path, label: str) -> dict[str, Any]:
    """config.json as a dict; ModelError when it is not a JSON object."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{label} has a config.json that cannot be read ({error}).") from error
    if not isinstance(config, dict):
        raise ModelError(f"{label} has a config.json that is not a JSON object but a {type(config).__name__}.")
    return config


def check_config(config: Mapping[str, Any], label: str) -> tuple[str, bool]:
    """(family, already quantised to NF4) of a model.

    Raises:
        ModelError: an unsupported family, a head that is not a language model's, a linear, convolution or recurrent
            layer, or another kind of quantisation.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ModelError(f"{label} is of the family {family!r}; supported are {', '.join(FAMILIES)}.")
    heads = config.get("architectures") or []
    if heads and not any(str(head).endswith("ForCausalLM") for head in heads):
        raise ModelError(f"{label} is a {heads[0]}, not a language model that writes text (…ForCausalLM).")
    if odd := [kind for kind in config.get("layer_types") or [] if kind not in _LAYER_KINDS]:
        raise ModelError(
            f"{label} has layers of the kind {odd[0]}; answers share their prompt here, which needs attention layers "
            f"({', '.join(_LAYER_KINDS)}) throughout."
        )
    quantization = config.get("quantization_config")
    if not quantization:
        return str(family), False
    kind = _quantization_kind(quantization)
    if kind != "nf4":
        raise ModelError(
            f"{label} is already quantised as {kind}; training starts from 16-bit weights (quantised to NF4 while "
            "loading) or from a bitsandbytes NF4 model, so choose one of those."
        )
    return str(family), True


def context_length(config: Mapping[str, Any]) -> int | None:
    """How many tokens prompt and answer may have together, by a model's config; None when it does not say.

    A rotary embedding that changes with the longest position of a batch is used up to its original length only: beyond,
    an answer's log-probs would depend on its neighbours.

    >>> context_length({"max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
    ...                 "rope_scaling": {"type": "longrope"}})
    4096
    """
    positions = config.get("max_position_embeddings")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if positions is None or rope.get("rope_type", rope.get("type")) not in ("longrope", "su", "dynamic"):
        return positions
    original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    return min(positions, original or positions)


def _quantization_kind(quantization: Mapping[str, Any]) -> str:
    method = str(quantization.get("quant_method", "bitsandbytes"))
    if method != "bitsandbytes":
        return method
    if quantization.get("load_in_4bit"):
        return str(quantization.get("bnb_4bit_quant_type", "fp4"))  # fp4 is what bitsandbytes means by nothing
    return "int8" if quantization.get("load_in_8bit") else method


def check_folder(folder: Path, label: str) -> tuple[dict[str, Any], str, bool]:
    """(config, family, quantised) of a whole local model folder.

    Raises:
        ModelError: a file is missing, cut off, a pickle or of an unsupported kind.
    """
    names = {path.name for path in folder.iterdir()}
    check_file_names(names, label)
    config = read_config(folder / "config.json", label)
    family, quantized = check_config(config, label)
    for name in _shards(folder, names, label):
        if name not in names:
            raise ModelError(f"{label} lacks {name}, which {_INDEX} lists; copy or download it again.")
        _check_safetensors(folder / name, label)
    return config, family, quantized


def _shards(folder: Path, names: Collection[str], label: str) -> list[str]:
    if "model.safetensors" in names or _INDEX not in names:
        return weight_files(names)
    try:
        return sorted(set(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"{label} has a {_INDEX} that cannot be read ({error!r}).") from error


def _check_safetensors(path: Path, label: str) -> None:
    """Compare the header with the length of the file; no weight is read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{label} has a damaged {path.name} ({error}); copy or download it again.") from error
