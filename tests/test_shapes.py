"""The sizes of a model from its config alone, against transformers' own modules and against published counts."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from lowmem_grpo.catalog import KNOWN, known_model, shape_of
from lowmem_grpo.catalog.shapes import LinearShape, ModelShape, model_shape
from lowmem_grpo.errors import ModelError
from tests.tiny import FAMILIES, WINDOW, save_tiny, tiny_config, tiny_model

SIZES = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 32,
    "vocab_size": 264,
    "max_position_embeddings": 512,
}
"""What a config has to give; 32 heads, so that every family's own number of key-value heads fits."""

PAD = {"pad_token_id": 0}
"""The families' own lies outside of the tiny vocabulary."""

LLAMA = {"model_type": "llama", **SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}

PUBLISHED_MILLIONS = {
    "smollm2-135m-instruct": 134.5,
    "smollm2-360m-instruct": 361.8,
    "smollm2-1.7b-instruct": 1711,
    "smollm3-3b": 3080,
    "qwen2.5-0.5b-instruct": 494,
    "qwen2.5-1.5b-instruct": 1540,
    "qwen2.5-3b-instruct": 3090,
    "qwen2.5-7b-instruct": 7610,
    "qwen2.5-14b-instruct": 14_700,
    "qwen2.5-32b-instruct": 32_500,
    "qwen2.5-72b-instruct": 72_700,
    "qwen2.5-coder-1.5b-instruct": 1540,
    "qwen2.5-coder-3b-instruct": 3090,
    "qwen2.5-coder-7b-instruct": 7610,
    "qwen2.5-coder-14b-instruct": 14_700,
    "qwen2.5-coder-32b-instruct": 32_500,
    "qwen2.5-math-1.5b-instruct": 1540,
    "qwen2.5-math-7b-instruct": 7610,
    "qwen3-0.6b": 596,
    "qwen3-1.7b": 1720,
    "qwen3-4b": 4020,
    "qwen3-4b-instruct-2507": 4020,
    "qwen3-8b": 8190,
    "qwen3-14b": 14_800,
    "qwen3-32b": 32_800,
    "deepseek-r1-distill-qwen-1.5b": 1780,
    "deepseek-r1-distill-qwen-7b": 7620,
    "deepseek-r1-distill-qwen-14b": 14_800,
    "deepseek-r1-distill-qwen-32b": 32_800,
    "deepseek-r1-distill-llama-8b": 8030,
    "llama-3.2-1b-instruct": 1236,
    "llama-3.2-3b-instruct": 3213,
    "llama-3.1-8b-instruct": 8030,
    "llama-3.3-70b-instruct": 70_554,
    "tinyllama-1.1b-chat-v1.0": 1100,
    "mistral-7b-instruct-v0.3": 7248,
    "mistral-nemo-instruct-2407": 12_248,
    "mistral-small-24b-instruct-2501": 23_572,
    "phi-3.5-mini-instruct": 3821,
    "phi-4": 14_660,
    "phi-4-mini-instruct": 3836,
    "gemma-2-2b-it": 2614,
    "gemma-2-9b-it": 9242,
    "gemma-2-27b-it": 27_227,
    "gemma-3-270m-it": 268,
    "gemma-3-1b-it": 1000,
}
"""What the model cards and the hub's pages say, a tied head counted once."""


@functools.cache
def on_meta(config_json: str) -> nn.Module:
    """The model of a config, without its values."""
    values = json.loads(config_json)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))


def built(config: Mapping[str, Any]) -> nn.Module:
    return on_meta(json.dumps(dict(config)))


def linears_of(layer: nn.Module) -> set[LinearShape]:
    return {
        LinearShape(name.rpartition(".")[2], m.in_features, m.out_features, m.bias is not None)
        for name, m in layer.named_modules()
        if isinstance(m, nn.Linear)
    }


def norm_parameters_of(model: nn.Module) -> int:
    return sum(p.numel() for name, p in model.named_parameters() if "norm" in name)


def assert_like_transformers(shape: ModelShape, model: nn.Module) -> None:
    """Compare every size that transformers' modules or its config object show."""
    config: Any = model.config
    layers = model.model.layers
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.norm_parameters == norm_parameters_of(model)
    assert (len(layers), set(shape.linears)) == (shape.layers, linears_of(layers[0]))
    assert linears_of(layers[-1]) == linears_of(layers[0])
    assert shape.bias_parameters == sum(p.numel() for name, p in model.named_parameters() if name.endswith("bias"))
    assert shape.embedding_parameters == model.get_input_embeddings().weight.numel()
    assert shape.tied == (model.get_output_embeddings().weight is model.get_input_embeddings().weight)
    assert (shape.heads, shape.kv_heads) == (config.num_attention_heads, config.num_key_value_heads)
    assert shape.head_dim == layers[0].self_attn.head_dim


def windows_of(model: nn.Module) -> list[int | None]:
    """The window that each layer's attention gives to its attention function."""
    if model.config.model_type in ("mistral", "phi3"):  # theirs look it up in the config
        return [model.config.sliding_window] * model.config.num_hidden_layers
    return [getattr(layer.self_attn, "sliding_window", None) for layer in model.model.layers]


def assert_windows_like_transformers(shape: ModelShape, model: nn.Module) -> None:
    windows = windows_of(model)
    assert shape.full_layers == windows.count(None)
    assert {shape.window} - {None} == set(windows) - {None}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_models(family: str, tied: bool) -> None:
    config = tiny_config(family, tied=tied).to_dict()
    model = tiny_model(family, tied=tied)
    shape = model_shape(config, family)
    assert_like_transformers(shape, model)
    assert_windows_like_transformers(shape, model)
    assert (shape.family, shape.vocab, shape.hidden, shape.intermediate) == (family, 264, 32, 64)
    assert (shape.max_positions, shape.quantized) == (512, False)
    assert shape.window == (None if family in ("llama", "qwen2", "qwen3") else WINDOW)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_config_leaves_out_is_what_transformers_takes_for_it(family: str) -> None:
    config = {"model_type": family, **SIZES, **PAD}
    model = built(config)
    shape = model_shape(config, family)
    assert_like_transformers(shape, model)
    assert_windows_like_transformers(shape, model)


@pytest.mark.parametrize(
    "more",
    [
        {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
        {"model_type": "llama", "num_key_value_heads": None, "head_dim": None, "layer_types": ["full_attention"] * 3},
        {"model_type": "qwen3", "attention_bias": True, "use_sliding_window": True, "sliding_window": 8},
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1},
        {"model_type": "qwen2", "head_dim": 6},
        {"model_type": "gemma2", "attention_bias": True, "sliding_window": 8},
        {"model_type": "gemma3_text", "sliding_window": 8, "sliding_window_pattern": 2},
        {"model_type": "gemma3_text", "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
        {"model_type": "mistral", "sliding_window": None, "head_dim": 6},
        {"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 8, "no_rope_layers": [1, 0, 0]},
        {"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 8, "no_rope_layer_interval": 2},
        {"model_type": "smollm3", "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 8},
        {"model_type": "phi3", "num_key_value_heads": 8, "sliding_window": 16},
    ],
    ids=lambda more: "-".join(map(str, more.values())),
)
def test_options_of_the_families(more: dict[str, Any]) -> None:
    config = {**SIZES, **PAD, **more}
    shape = model_shape(config, "x")
    assert_like_transformers(shape, built(config))
    assert_windows_like_transformers(shape, built(config))


@pytest.mark.parametrize("name", KNOWN)
def test_known_models(name: str) -> None:
    known = KNOWN[name]
    shape = known.shape
    assert_like_transformers(shape, built(known.config))
    assert_windows_like_transformers(shape, built(known.config))
    assert shape.parameters == pytest.approx(PUBLISHED_MILLIONS[name] * 1e6, rel=0.01)
    assert shape.head_parameters == (0 if shape.tied else shape.embedding_parameters)
    assert not shape.quantized


def test_the_table_and_the_published_counts_have_the_same_models() -> None:
    assert set(KNOWN) == set(PUBLISHED_MILLIONS)
    assert len(KNOWN) >= 36


def test_download_sizes() -> None:
    assert KNOWN["llama-3.1-8b-instruct"].download_bytes == 16_060_522_496  # model.safetensors.index.json: total_size
    assert KNOWN["qwen3-0.6b"].download_bytes == 1_503_264_768  # its file holds the tied head again
    assert KNOWN["smollm2-135m-instruct"].download_bytes == 92_871_040  # the wheel


def test_known_by_short_name_or_repository() -> None:
    for name in ("qwen3-8b", "Qwen3-8B", "Qwen/Qwen3-8B", "qwen/qwen3-8b"):
        assert known_model(name) is KNOWN["qwen3-8b"]
    assert known_model("someone/Qwen3-8B") is None
    assert known_model("qwen3-9b") is None


# ---- worked by hand ---------------------------------------------------------------------------------------------


def test_smollm2_by_hand() -> None:
    shape = KNOWN["smollm2-135m-instruct"].shape
    attention = 576 * 576 * 2 + 576 * 192 * 2
    assert shape.linear_parameters == 30 * (attention + 3 * 576 * 1536) == 106_168_320
    assert shape.norm_parameters == 30 * 2 * 576 + 576 == 35_136
    assert shape.embedding_parameters == 49_152 * 576 == 28_311_552
    assert shape.parameters == 106_168_320 + 35_136 + 28_311_552
    assert shape.kv_values_per_token == 2 * 30 * 3 * 64
    assert shape.lora_parameters(8) == 8 * 30 * (2 * (576 + 576) + 2 * (576 + 192) + 3 * (576 + 1536))
    assert shape.lora_parameters(8, ("q_proj", "v_proj")) == 8 * 30 * ((576 + 576) + (576 + 192))


def test_biases_of_qwen2_by_hand() -> None:
    assert KNOWN["qwen2.5-0.5b-instruct"].shape.bias_parameters == 24 * (896 + 128 + 128)


@settings(max_examples=40, deadline=None)
@given(
    layers=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    head_dim=st.integers(1, 8),
    intermediate=st.integers(1, 40),
    tied=st.booleans(),
    family=st.sampled_from(FAMILIES),
)
def test_parts_add_up(
    layers: int, kv_heads: int, groups: int, head_dim: int, intermediate: int, tied: bool, family: str
) -> None:
    config = {
        **SIZES,
        "model_type": family,
        "num_hidden_layers": layers,
        "intermediate_size": intermediate,
        "num_attention_heads": kv_heads * groups,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "tie_word_embeddings": tied,
    }
    shape = model_shape(config, "x")
    widest = 2 * 64 * intermediate + intermediate * 64
    attention = 64 * head_dim * kv_heads * (2 * groups + 2)
    assert shape.linear_parameters == layers * (widest + attention)
    assert shape.kv_values_per_token == layers * 2 * kv_heads * head_dim
    assert shape.parameters - shape.linear_parameters - shape.bias_parameters - shape.norm_parameters == (
        (1 if tied else 2) * 264 * 64
    )


@pytest.mark.parametrize(
    "targets",
    [None, ("q_proj", "down_proj"), ("self_attn.o_proj",), ("layers.1.mlp.up_proj", "v_proj"), ("proj",), ("k",)],
)
@pytest.mark.parametrize("family", ["qwen2", "phi3"])
def test_lora_is_what_peft_makes(family: str, targets: tuple[str, ...] | None) -> None:
    shape = model_shape(tiny_config(family).to_dict(), family)
    chosen = list(targets) if targets else "all-linear"
    lora = LoraConfig(r=4, target_modules=chosen, task_type="CAUSAL_LM")
    try:
        model = get_peft_model(tiny_model(family), lora)
    except ValueError:  # peft finds no such layer
        assert shape.lora_parameters(4, targets) == 0
        return
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert 0 < shape.lora_parameters(4, targets) == trainable


def test_shapes_can_be_kept_in_a_cache() -> None:
    assert {KNOWN["qwen3-8b"].shape: 1}[KNOWN["qwen3-8b"].shape] == 1


# ---- what is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model_type": "mamba"}, r"^tiny is of the family 'mamba'; supported are gemma2, .*smollm3\.$"),
        ({"hidden_size": None}, r"^The config\.json of tiny has no hidden_size, so its size is not known\.$"),
        ({"vocab_size": "many"}, r"^The config\.json of tiny says vocab_size is 'many'; it takes an integer of at"),
        ({"num_hidden_layers": 0}, r"says num_hidden_layers is 0; it takes an integer of at least 1\.$"),
        ({"intermediate_size": 8.5}, r"says intermediate_size is 8\.5;"),
        ({"num_attention_heads": True}, r"says num_attention_heads is True;"),
        ({"num_key_value_heads": -1}, r"says num_key_value_heads is -1;"),
        ({"head_dim": "8"}, r"says head_dim is '8';"),
        ({"max_position_embeddings": []}, r"says max_position_embeddings is \[\];"),
        ({"num_key_value_heads": 3}, r"has 4 attention heads, which 3 key-value heads cannot share evenly"),
        ({"hidden_size": 66}, r"has a hidden_size of 66, which 4 attention heads do not divide, and no head_dim\.$"),
        ({"model_type": "mistral", "sliding_window": 0}, r"says sliding_window is 0;"),
    ],
)
def test_bad_configs_are_told_in_one_sentence(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence) as caught:
        model_shape({**LLAMA, **change}, "tiny")
    assert str(caught.value).count("\n") == 0


@pytest.mark.parametrize("field", [*SIZES])
def test_a_missing_size_is_named(field: str) -> None:
    with pytest.raises(ModelError, match=rf"The config\.json of tiny has no {field}, "):
        model_shape({key: value for key, value in LLAMA.items() if key != field}, "tiny")


def test_a_model_that_is_nf4_already() -> None:
    quantization = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    assert model_shape({**LLAMA, "quantization_config": quantization}, "tiny").quantized


# ---- by name ----------------------------------------------------------------------------------------------------


def test_local_folder_needs_no_weights(tmp_path: Path) -> None:
    whole = save_tiny(tmp_path / "whole", "qwen3")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((whole / "config.json").read_text())
    shapes = [shape_of(str(path)) for path in (whole, bare, bare / "config.json")]
    assert len({(shape.family, shape.parameters) for shape in shapes}) == 1
    assert shapes[0].parameters == sum(p.numel() for p in tiny_model("qwen3").parameters())


def test_local_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json, so it is not a model"):
        shape_of(str(tmp_path))
    with pytest.raises(ModelError, match=r"The folder \./nothing-here does not exist"):
        shape_of("./nothing-here")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="not a JSON object but a list"):
        shape_of(str(tmp_path / "config.json"))


def test_the_config_of_a_shape_builds_the_model() -> None:
    config = tiny_config("gemma2")
    values = dict(model_shape(config.to_dict(), "x").config)
    again: PretrainedConfig = AutoConfig.for_model(values.pop("model_type"), **values)
    assert (again.hidden_size, again.final_logit_softcapping) == (32, 3.0)
