"""Tiny random models and tokenizers for the tests: every family that is supported, built in memory in milliseconds."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from lowmem_grpo.catalog import folder as catalog_folder

FAMILIES = catalog_folder.FAMILIES

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"]
WINDOW = 4
"""Tokens that a sliding-window layer of a tiny model sees: fewer than the prompts and answers of the tests have."""
OPTIONS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 8},
    # One layer of each kind; caps low enough that random weights reach them.
    "gemma2": {
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": WINDOW,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "mistral": {"head_dim": 8, "sliding_window": WINDOW},
    "phi3": {"sliding_window": WINDOW},
    "smollm3": {
        "no_rope_layers": [1, 0],
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
"""What a family's tiny config has besides the common sizes."""


def tiny_tokenizer(chat: bool = True, bos: bool = False) -> PreTrainedTokenizerFast:
    """One token per byte, after the four special tokens; end and pad are the same id 2, as in SmolLM2."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(SPECIAL_TOKENS + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", vocab["<s>"])]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        bos_token="<s>" if bos else None,
        additional_special_tokens=["<|endoftext|>", "<|im_start|>"],
    )
    if chat:
        fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_config(family: str = "llama", *, tied: bool = True, layers: int = 2) -> PretrainedConfig:
    """A config of `family` with 2 layers, width 32, 4 query and 2 key-value heads, and the tiny vocabulary."""
    return AutoConfig.for_model(
        family,
        vocab_size=264,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        eos_token_id=2,
        pad_token_id=2,
        bos_token_id=None,
        initializer_range=0.3,
        **OPTIONS.get(family, {}),
    )


def tiny_model(
    family: str = "llama", *, dtype: torch.dtype = torch.float32, tied: bool = True, seed: int = 0
) -> PreTrainedModel:
    """A random model of `family`; the same seed gives the same weights. In float64 its norms are float64 too."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(family, tied=tied))
    model = model.to(dtype).eval()
    if dtype == torch.float64:
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = functools.partial(_rms_norm, module)
    return model


def _rms_norm(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Transformers' own casts to float32, which rounds a gradient before the sum over answers or after it."""
    gemma = hasattr(module, "eps")
    eps, weight = (module.eps, 1 + module.weight) if gemma else (module.variance_epsilon, module.weight)
    return weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + eps)


def save_tiny(folder: Path, family: str = "llama", *, chat: bool = True, tied: bool = True, seed: int = 0) -> Path:
    """Write a loadable model folder (safetensors, tokenizer) and return it."""
    tiny_model(family, tied=tied, seed=seed).save_pretrained(folder)
    tiny_tokenizer(chat=chat).save_pretrained(folder)
    return folder
