"""The sizes of a model, worked out from its config.json alone: no weight, no torch, no network.

What a config leaves out is what transformers takes for it (its config classes, version 5.24); `tests/test_shapes.py`
builds each family and each known model on torch's meta device and compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lowmem_grpo.catalog.folder import check_config, context_length
from lowmem_grpo.errors import ModelError

__all__ = ["LinearShape", "ModelShape", "model_shape"]


@dataclass(frozen=True, slots=True)
class LinearShape:
    """One linear layer of a decoder layer, by its name in transformers: a weight of (outputs, inputs).

    >>> LinearShape("k_proj", 576, 192, False).weights
    110592
    """

    name: str
    inputs: int
    outputs: int
    bias: bool

    @property
    def weights(self) -> int:
        """Numbers in the weight, without the bias."""
        return self.inputs * self.outputs

    @property
    def path(self) -> str:
        """The name inside the decoder layer, as in `self_attn.k_proj`."""
        return f"{'mlp' if self.name in _MLP else 'self_attn'}.{self.name}"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model; all counts are numbers of values, not bytes.

    `linears` are those of one decoder layer; all layers are alike. `window` is how many tokens a sliding-window layer
    sees, None when the model has no such layer; `full_layers` counts the layers that see everything. `max_positions`
    is the context length (`folder.context_length`). `norm_parameters` counts the norms of the whole model. `tied` says
    that the head is the embedding, `quantized` that the weights are NF4 already. `config` is config.json, what
    `AutoConfig.for_model(**config)` takes.

    >>> shape = model_shape({"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 16,
    ...                      "num_attention_heads": 2, "vocab_size": 10, "max_position_embeddings": 64}, "tiny")
    >>> shape.head_dim, shape.linear_parameters, shape.norm_parameters, shape.parameters
    (4, 1280, 40, 1480)
    """

    name: str
    family: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    max_positions: int
    window: int | None
    full_layers: int
    linears: tuple[LinearShape, ...]
    norm_parameters: int
    quantized: bool
    config: Mapping[str, Any] = field(repr=False, hash=False)

    @property
    def linear_parameters(self) -> int:
        """Weights of the linear layers of all decoder layers, without biases and without the head."""
        return self.layers * sum(linear.weights for linear in self.linears)

    @property
    def bias_parameters(self) -> int:
        """Biases of the linear layers of all decoder layers."""
        return self.layers * sum(linear.outputs for linear in self.linears if linear.bias)

    @property
    def embedding_parameters(self) -> int:
        """The token embedding, (V, H)."""
        return self.vocab * self.hidden

    @property
    def head_parameters(self) -> int:
        """The head's own weight, (V, H); 0 when it is the embedding."""
        return 0 if self.tied else self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All of them, a tied head once."""
        return (
            self.linear_parameters
            + self.bias_parameters
            + self.embedding_parameters
            + self.head_parameters
            + self.norm_parameters
        )

    def lora_parameters(self, rank: int, targets: tuple[str, ...] | None = None) -> int:
        """Trainable values of a LoRA adapter (arXiv 2106.09685): A (rank, inputs) and B (outputs, rank) of each target.

        None adapts every linear layer of the decoder. Else a layer is a target when its name is one of `targets` or
        ends with a dot and one, as in peft: `q_proj`, `mlp.down_proj`, `layers.3.self_attn.q_proj`.
        """
        paths = (
            (f"model.layers.{layer}.{linear.path}", linear) for layer in range(self.layers) for linear in self.linears
        )
        return rank * sum(
            linear.inputs + linear.outputs
            for path, linear in paths
            if targets is None or any(path == target or path.endswith(f".{target}") for target in targets)
        )

    @property
    def kv_values_per_token(self) -> int:
        """Keys and values that one token leaves in the cache of all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim


_MLP = ("gate_proj", "up_proj", "gate_up_proj", "down_proj")

_TIED = ("gemma2", "gemma3_text", "smollm3")
"""Families whose config ties the head to the embedding when it says nothing."""

_HEAD_DIM = {"gemma2": 256, "gemma3_text": 256, "qwen3": 128}
"""Head width where a config says nothing; in the other families the hidden size is divided by the heads."""

_KV_HEADS = {"gemma2": 4, "gemma3_text": 4, "mistral": 8, "qwen2": 32, "qwen3": 32, "smollm3": 4}
"""Key-value heads where a config says nothing (null means one per head); in the other families one per head."""

_ATTENTION_BIAS = ("gemma2", "gemma3_text", "llama", "qwen3", "smollm3")
"""Families that read `attention_bias`, for all four linear layers of the attention."""

_MLP_BIAS = ("llama", "smollm3")
"""Families that read `mlp_bias`."""

_FOUR_NORMS = ("gemma2", "gemma3_text")
"""Families with norms before and after both halves of a layer; the others have two norms a layer."""

_HEAD_NORMS = ("gemma3_text", "qwen3")
"""Families that normalise queries and keys, each with one weight per value of a head."""

_WINDOW = {"gemma2": 4096, "gemma3_text": 4096, "mistral": 4096}
"""Sliding window where a config says nothing (null means none)."""


def model_shape(config: Mapping[str, Any], name: str) -> ModelShape:
    """The sizes of the model with this config.json; `name` starts the sentence of an error.

    Raises:
        ModelError: an unsupported family, a missing size, a size that is not a positive integer, or heads that the
            hidden size or the key-value heads do not fit.
    """
    family, quantized = check_config(config, name)
    layers, hidden, intermediate, heads, vocab, positions = (
        _size(config, key, name)
        for key in (
            "num_hidden_layers",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "vocab_size",
            "max_position_embeddings",
        )
    )
    kv_heads = _kv_heads(config, family, heads, name)
    head_dim = _head_dim(config, family, hidden, heads, name)
    window, full_layers = _windows(config, family, layers, name)
    per_layer = hidden * (4 if family in _FOUR_NORMS else 2) + (2 * head_dim if family in _HEAD_NORMS else 0)
    return ModelShape(
        name=name,
        family=family,
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=vocab,
        tied=bool(config.get("tie_word_embeddings", family in _TIED)),
        max_positions=context_length(config) or positions,
        window=window,
        full_layers=full_layers,
        linears=_linears(config, family, hidden, intermediate, heads * head_dim, kv_heads * head_dim),
        norm_parameters=layers * per_layer + hidden,
        quantized=quantized,
        config=config,
    )


def _size(config: Mapping[str, Any], key: str, name: str) -> int:
    """A size that the config has to give."""
    if config.get(key) is None:
        raise ModelError(f"The config.json of {name} has no {key}, so its size is not known.")
    return _positive(config[key], key, name)


def _positive(value: Any, key: str, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"The config.json of {name} says {key} is {value!r}; it takes an integer of at least 1.")
    return value


def _kv_heads(config: Mapping[str, Any], family: str, heads: int, name: str) -> int:
    given = config.get("num_key_value_heads", _KV_HEADS.get(family))
    kv_heads = heads if given is None else _positive(given, "num_key_value_heads", name)
    if heads % kv_heads:
        raise ModelError(
            f"The config.json of {name} has {heads} attention heads, which {kv_heads} key-value heads cannot share "
            "evenly; num_attention_heads is a multiple of num_key_value_heads."
        )
    return kv_heads


def _head_dim(config: Mapping[str, Any], family: str, hidden: int, heads: int, name: str) -> int:
    given = config.get("head_dim")
    if given is None:
        given = _HEAD_DIM.get(family)
    if given is not None:
        return _positive(given, "head_dim", name)
    if hidden % heads:
        raise ModelError(
            f"The config.json of {name} has a hidden_size of {hidden}, which {heads} attention heads do not divide, "
            "and no head_dim."
        )
    return hidden // heads


def _windows(config: Mapping[str, Any], family: str, layers: int, name: str) -> tuple[int | None, int]:
    """(window of the sliding layers or None, number of layers that see everything)."""
    window = config.get("sliding_window", _WINDOW.get(family))
    if family in ("qwen2", "qwen3", "smollm3") and not config.get("use_sliding_window"):
        window = None
    if family == "llama" or window is None:
        return None, layers
    full = sum(kind == "full_attention" for kind in _layer_kinds(config, family, layers))
    return (None if full == layers else _positive(window, "sliding_window", name)), full


def _layer_kinds(config: Mapping[str, Any], family: str, layers: int) -> list[str]:
    """What each layer sees, in a model with a sliding window."""
    if family in ("mistral", "phi3"):
        return ["sliding_attention"] * layers
    if given := config.get("layer_types"):
        return list(given)[:layers]
    match family:
        case "gemma2":
            sliding = [layer % 2 == 0 for layer in range(layers)]
        case "gemma3_text":
            sliding = [(layer + 1) % config.get("sliding_window_pattern", 6) != 0 for layer in range(layers)]
        case "smollm3":
            every = config.get("no_rope_layer_interval", 4)
            sliding = [not rope for rope in config.get("no_rope_layers") or _rope_layers(layers, every)]
        case _:
            sliding = [layer >= config.get("max_window_layers", 28) for layer in range(layers)]
    return ["sliding_attention" if slides else "full_attention" for slides in sliding]


def _rope_layers(layers: int, every: int) -> list[bool]:
    """True for the layers of SmolLM3 with rotary positions: all but each `every`-th."""
    return [(layer + 1) % every != 0 for layer in range(layers)]


def _linears(
    config: Mapping[str, Any], family: str, hidden: int, intermediate: int, queries: int, keys: int
) -> tuple[LinearShape, ...]:
    """The linear layers of one decoder layer; `queries` and `keys` are the widths of all heads together."""
    if family == "phi3":
        return (
            LinearShape("qkv_proj", hidden, queries + 2 * keys, False),
            LinearShape("o_proj", queries, hidden, False),
            LinearShape("gate_up_proj", hidden, 2 * intermediate, False),
            LinearShape("down_proj", intermediate, hidden, False),
        )
    attention = family in _ATTENTION_BIAS and bool(config.get("attention_bias"))
    mlp = family in _MLP_BIAS and bool(config.get("mlp_bias"))
    qkv = attention or family == "qwen2"
    return (
        LinearShape("q_proj", hidden, queries, qkv),
        LinearShape("k_proj", hidden, keys, qkv),
        LinearShape("v_proj", hidden, keys, qkv),
        LinearShape("o_proj", queries, hidden, attention),
        LinearShape("gate_proj", hidden, intermediate, mlp),
        LinearShape("up_proj", hidden, intermediate, mlp),
        LinearShape("down_proj", intermediate, hidden, mlp),
    )
