"""The reward `text`: is the answer the right text?

Both sides are compared after unifying compatible characters, case and white space, and after dropping punctuation
unless `punctuation` is set.

Reading leniently, the gold has to stand as whole words in the last line that has any, and in its last sentence; not
negated, not beside an "or", and that sentence must not be an echo of the prompt.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lowmem_grpo.options import checked
from lowmem_grpo.rewards.base import Mode, text_of
from lowmem_grpo.rewards.reading import after_thinking, is_negated, last_retraction, sentences, squeeze, tag_content

__all__ = ["TextReward", "text"]

_MASK = "\ufffc"
_OR_BEFORE = re.compile(r"(?:\bor|/|\|)[^\w\n]*$", re.I)
_OR_AFTER = re.compile(r"[^\w\n]*(?:or\b|/|\|)", re.I)


@dataclass(frozen=True, slots=True)
class TextReward:
    """1.0 or 0.0 by the gold in the column `answer`; None for a gold that is empty."""

    tag: str | None = None
    ignore_case: bool = True
    punctuation: bool = False
    mode: Mode = "strict"

    needs: ClassVar[frozenset[str]] = frozenset({"answer"})
    in_worker: ClassVar[bool] = False
    best: ClassVar[float] = 1.0

    @property
    def asks_for(self) -> tuple[str, ...]:
        """The opening tag; nothing without one and when reading leniently."""
        return (f"<{self.tag}>",) if self.tag is not None and self.mode != "lenient" else ()

    def __call__(
        self, *, prompts: Sequence[Any], completions: Sequence[Any], answer: Sequence[Any], **_: Any
    ) -> list[float | None]:
        rows = zip(prompts, completions, answer, strict=True)
        return [self._score(text_of(prompt), text_of(completion), gold) for prompt, completion, gold in rows]

    def parseable_gold(self, value: Any) -> bool:
        """Whether there is any text to compare with."""
        return value is not None and bool(self._normal(str(value)))

    def _score(self, prompt: str, completion: str, gold: Any) -> float | None:
        if not self.parseable_gold(gold):
            return None
        if self.mode == "lenient":
            return float(self._states(completion, str(gold), prompt))
        content = completion if self.tag is None else tag_content(completion, self.tag)
        if content is None or not self._normal(content):
            return 0.0
        if self.mode == "format":
            return float("\n" not in content.strip())
        return float(self._normal(content) == self._normal(str(gold)))

    def _normal(self, value: str) -> str:
        value = unicodedata.normalize("NFKC", value)
        if not self.punctuation:
            value = "".join(c for c in value if not unicodedata.category(c).startswith("P"))
        return " ".join((value.casefold() if self.ignore_case else value).split())

    def _states(self, completion: str, gold: str, prompt: str) -> bool:
        answer = re.sub(r"</?\w+>", "\n", after_thinking(completion))
        if self._normal(answer) == self._normal(gold):
            return True
        last = ["", *_statements(answer)][-1]
        if squeeze(last) in squeeze(prompt):
            return False
        words = r"\s+".join(re.escape(word) for word in gold.split())
        pattern = re.compile(rf"(?<!\w){words}(?!\w)", re.IGNORECASE if self.ignore_case else 0)
        # A gold such as "false" must not be read as a negation of itself.
        last, answer = pattern.sub(_MASK, last), pattern.sub(_MASK, answer)
        places = [match.span() for match in re.finditer(_MASK, last)]
        if not places or last_retraction(answer) >= 0:
            return False
        hedged = (_OR_BEFORE.search(last[:start]) or _OR_AFTER.match(last, end) for start, end in places)
        return not any(hedged) and not any(is_negated(last, start, end) for start, end in places)


def _statements(text: str) -> Iterator[str]:
    """The sentences and lines with any word in them that are not questions."""
    for sentence in sentences(text):
        words = text[sentence.start : sentence.end]
        if not sentence.asks and re.search(r"\w", words):
            yield words


@checked("reward", frozenset())
def text(
    *, tag: str | None = None, ignore_case: bool = True, punctuation: bool = False, mode: Mode = "strict"
) -> TextReward:
    """Is the answer the right text? Strict: the answer, or the content of the one `<tag>`, equals the gold."""
    return TextReward(tag, ignore_case, punctuation, mode)
