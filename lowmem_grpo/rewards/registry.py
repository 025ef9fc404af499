"""The built-in reward functions by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from lowmem_grpo.rewards.base import Builtin
from lowmem_grpo.rewards.length import length
from lowmem_grpo.rewards.number import number
from lowmem_grpo.rewards.regex import regex
from lowmem_grpo.rewards.tags import tags
from lowmem_grpo.rewards.text import text

__all__ = ["REWARDS"]

REWARDS: Mapping[str, Callable[..., Builtin]] = MappingProxyType(
    {"number": number, "text": text, "tags": tags, "regex": regex, "length": length}
)
"""Name -> factory: `REWARDS["number"](tag="answer")` is a reward function. Wrong options raise ConfigError."""
