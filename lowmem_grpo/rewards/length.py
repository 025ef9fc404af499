"""The reward `length`: a soft penalty for answers near the token limit (overlong shaping, DAPO, arXiv 2503.14476).

    penalty(n) = clamp((max_tokens - cache - n) / cache, -1, 0)        n: tokens of the answer

0 up to `max_tokens - cache`, then linear, -1 from `max_tokens` on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lowmem_grpo.errors import ConfigError
from lowmem_grpo.options import checked

__all__ = ["LengthReward", "length"]


@dataclass(frozen=True, slots=True)
class LengthReward:
    """Between -1.0 and 0.0; None where the token ids of an answer are not known (scoring text without a model)."""

    max_tokens: int
    cache: int

    needs: ClassVar[frozenset[str]] = frozenset()
    in_worker: ClassVar[bool] = False
    best: ClassVar[float] = 0.0

    def __call__(self, *, completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float | None]:
        return [self._penalty(len(ids)) if len(ids) else None for ids in completion_ids]

    def _penalty(self, tokens: int) -> float:
        over = tokens - (self.max_tokens - self.cache)
        return 0.0 if over <= 0 else -min(1.0, over / self.cache)


@checked("reward", frozenset())
def length(*, max_tokens: int | None = None, cache: int | None = None) -> LengthReward:
    """Soft penalty near the limit `max_tokens`, over the last `cache` tokens (a fifth of the limit unless given)."""
    if max_tokens is None:
        raise ConfigError("reward 'length' needs the option max_tokens, such as args: {max_tokens: 256, cache: 64}")
    cache = max(1, max_tokens // 5) if cache is None else cache
    if not 0 < cache <= max_tokens:
        raise ConfigError(
            f"option cache of reward 'length' is {cache} but should be from 1 to max_tokens ({max_tokens})"
        )
    return LengthReward(max_tokens, cache)
