"""Tiny random models and tokenizers for the tests: every family that is supported, built in memory in milliseconds."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"]
FAMILIES = ("llama", "qwen2", "qwen3")


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
    kind = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}[family]
    extra = {"head_dim": 8} if family == "qwen3" else {}
    return kind(
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
        **extra,
    )


def tiny_model(
    family: str = "llama", *, dtype: torch.dtype = torch.float32, tied: bool = True, seed: int = 0
) -> PreTrainedModel:
    """A random model of `family`; the same seed gives the same weights."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(family, tied=tied))
    return model.to(dtype).eval()


def save_tiny(folder: Path, family: str = "llama", *, chat: bool = True, tied: bool = True, seed: int = 0) -> Path:
    """Write a loadable model folder (safetensors, tokenizer) and return it."""
    tiny_model(family, tied=tied, seed=seed).save_pretrained(folder)
    tiny_tokenizer(chat=chat).save_pretrained(folder)
    return folder
