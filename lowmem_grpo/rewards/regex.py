"""The reward `regex`: does the answer match a pattern? It runs in the worker, where a runaway pattern can be killed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from lowmem_grpo.errors import ConfigError
from lowmem_grpo.options import checked
from lowmem_grpo.rewards.base import text_of

__all__ = ["RegexReward", "regex"]


@dataclass(frozen=True, slots=True)
class RegexReward:
    """1.0 where the pattern matches, else 0.0."""

    pattern: re.Pattern[str]
    how: Literal["search", "fullmatch"] = "search"

    needs: ClassVar[frozenset[str]] = frozenset()
    in_worker: ClassVar[bool] = True
    best: ClassVar[float] = 1.0

    def __call__(self, *, completions: Sequence[Any], **_: Any) -> list[float | None]:
        match = self.pattern.fullmatch if self.how == "fullmatch" else self.pattern.search
        return [float(match(text_of(completion)) is not None) for completion in completions]


@checked("reward", frozenset())
def regex(
    *,
    pattern: str = "",
    how: Literal["search", "fullmatch"] = "search",
    ignore_case: bool = False,
    multiline: bool = False,
    dotall: bool = False,
) -> RegexReward:
    """Does `pattern` match somewhere (`search`) or all of the answer (`fullmatch`)? Flags as in Python's re."""
    if not pattern:
        raise ConfigError("reward 'regex' needs the option pattern, such as args: {pattern: '[0-9]+'}")
    flags = re.IGNORECASE * ignore_case | re.MULTILINE * multiline | re.DOTALL * dotall
    try:
        return RegexReward(re.compile(pattern, flags), how)
    except re.error as error:
        raise ConfigError(f"option pattern of reward 'regex' is {pattern!r}, which is no pattern: {error}") from None
