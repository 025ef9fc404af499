"""What a run asks of a card, as plain figures: the input of the planner and of the simulator."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lowmem_grpo.catalog.shapes import ModelShape
from lowmem_grpo.config import Config
from lowmem_grpo.errors import DataError
from lowmem_grpo.types import Card, MemorySettings

__all__ = ["Workload", "check_context", "fixed_settings", "workload_of"]


@dataclass(frozen=True, slots=True)
class Workload:
    """A model, a card, and a step of `prompts_per_step` groups of `group_size` answers, all of the longest kind.

    `dtype` is that of activations; `quantized` says that the base is NF4, `decoded` that its decoded weights are kept
    as well. `targets` are the layers with an adapter (None: all linear ones), `reference_adapter` says that a second,
    frozen adapter is the reference. `prompt_tokens` and `answer_tokens` are the longest prompt and answer.
    `has_flash_attn` says that the package flash-attn will be used.
    """

    shape: ModelShape
    card: Card
    dtype: str
    quantized: bool
    decoded: bool
    rank: int
    targets: tuple[str, ...] | None
    optimizer: str
    prompts_per_step: int
    group_size: int
    prompt_tokens: int
    answer_tokens: int
    kl: bool = False
    reference_adapter: bool = False
    kv_int8: bool = False
    has_flash_attn: bool = False
    updates_per_rollout: int = 1

    @property
    def rows(self) -> int:
        """Answers of a step."""
        return self.prompts_per_step * self.group_size

    @property
    def tokens(self) -> int:
        """Tokens that the update of a step forwards: each prompt, and each answer but for its last token."""
        return self.prompts_per_step * (self.prompt_tokens + self.group_size * (self.answer_tokens - 1))

    @property
    def value_bytes(self) -> int:
        """Bytes of an activation."""
        return 4 if self.dtype == "float32" else 2


def workload_of(
    config: Config, shape: ModelShape, card: Card, dtype: str, prompt_tokens: int | None = None
) -> Workload:
    """The workload of a config; `prompt_tokens` is the longest prompt where the data is known, else the limit."""
    quantized = config.model.quantization == "nf4" or shape.quantized
    held = config.model.weights == "dequantized" or (config.model.weights == "auto" and card.device == "cpu")
    targets = config.lora.target_modules
    return Workload(
        shape=shape,
        card=card,
        dtype=dtype,
        quantized=quantized,
        decoded=quantized and held,
        rank=_rank(config),
        targets=None if isinstance(targets, str) else targets,
        optimizer=config.optim.name,
        prompts_per_step=config.rollout.prompts_per_step,
        group_size=config.rollout.group_size,
        prompt_tokens=prompt_tokens or config.data.max_prompt_tokens,
        answer_tokens=config.rollout.max_new_tokens,
        kl=config.algorithm.kl_coef > 0,
        reference_adapter=config.lora.continue_from is not None,
        kv_int8=config.rollout.kv_dtype == "int8",
        has_flash_attn=config.model.attention == "flash_attention_2",
        updates_per_rollout=config.algorithm.updates_per_rollout,
    )


def check_context(workload: Workload) -> None:
    """Raise DataError when the longest prompt and answer together exceed the model's context."""
    longest, context = workload.prompt_tokens + workload.answer_tokens, workload.shape.max_positions
    if longest > context:
        raise DataError(
            f"data.max_prompt_tokens={workload.prompt_tokens} and rollout.max_new_tokens={workload.answer_tokens} "
            f"together exceed the context of {workload.shape.name}, {context} tokens; lower one of them."
        )


def fixed_settings(config: Config) -> dict[str, Any]:
    """The memory settings that the config sets itself, by their names in `MemorySettings`."""
    given = {**config.memory.model_dump(), "max_concurrent": config.rollout.max_concurrent}
    return {field.name: given[field.name] for field in fields(MemorySettings) if given[field.name] is not None}


def _rank(config: Config) -> int:
    """That of the adapter the run goes on from, where it can be read, else that of the config."""
    if config.lora.continue_from is not None:
        path = Path(config.lora.continue_from) / "adapter_config.json"
        if path.is_file():
            return int(json.loads(path.read_text(encoding="utf-8")).get("r", config.lora.rank))
    return config.lora.rank
