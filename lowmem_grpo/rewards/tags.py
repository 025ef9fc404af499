"""The reward `tags`: does the answer have the tags it was asked for, each once, well formed, one after the other?

Where the chat template already opened the first tag (a prompt that ends in `<think>`), the answer is read as if it had
written that itself; on a plain template the same answer lacks it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lowmem_grpo.errors import ConfigError
from lowmem_grpo.options import checked
from lowmem_grpo.rewards.base import text_of

__all__ = ["TagsReward", "tags"]


@dataclass(frozen=True, slots=True)
class TagsReward:
    """1.0 when all tags are well formed, else 0.0; with `partial` the share of tags that are."""

    names: tuple[str, ...]
    partial: bool = False

    needs: ClassVar[frozenset[str]] = frozenset()
    in_worker: ClassVar[bool] = False
    best: ClassVar[float] = 1.0

    @property
    def asks_for(self) -> tuple[str, ...]:
        """The opening tags."""
        return tuple(f"<{name}>" for name in self.names)

    def __call__(
        self,
        *,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        prompt_texts: Sequence[str] | None = None,
        **_: Any,
    ) -> list[float | None]:
        rendered = prompt_texts if prompt_texts is not None else [text_of(prompt) for prompt in prompts]
        rows = zip(rendered, completions, strict=True)
        return [self._score(self._opened(prompt) + text_of(completion)) for prompt, completion in rows]

    def _opened(self, prompt: str) -> str:
        """What the template wrote of the first tag: `<think>`, an empty `<think></think>`, or nothing."""
        first = re.escape(self.names[0])
        match = re.search(rf"<{first}>\s*(?:</{first}>\s*)?$", prompt[-200:])
        return match.group() if match else ""

    def _score(self, text: str) -> float:
        good, at = 0, 0
        for name in self.names:
            start, end = text.find(f"<{name}>"), text.find(f"</{name}>")
            if text.count(f"<{name}>") == text.count(f"</{name}>") == 1 and at <= start < end:
                good, at = good + 1, end + len(f"</{name}>")
        share = good / len(self.names)
        return share if self.partial else float(share == 1.0)


@checked("reward", frozenset())
def tags(*, tags: tuple[str, ...] = ("think", "answer"), partial: bool = False) -> TagsReward:
    """Are all `tags` there, once each, well formed and in this order? `partial` gives the share that is."""
    wrong = [name for name in tags if not re.fullmatch(r"[\w-]+", name)]
    if not tags or wrong or len(set(tags)) != len(tags):
        raise ConfigError(
            f"option tags of reward 'tags' is {list(tags)} but should list different names, as [think, answer]"
        )
    return TagsReward(tags, partial)
