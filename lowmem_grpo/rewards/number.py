"""The reward `number`: is the answer the right number? Exact decimal arithmetic, no rounding.

What counts as one number: an optional sign, a currency sign before or after, thousands commas, a decimal part, an
exponent, `%` or the word percent, a final period: `-4.0`, `$35.00.`, `1,234`, `35 percent`.

Percent: `35%` is 0.35, on both sides. A bare `35` is therefore not `35%`, unless `bare_percent` is set: then a
percentage and the bare number in front of its sign count as the same.

Reading leniently. The final answer is the number said to be the answer ("the answer is 7", "Answer: 7", `#### 7`,
`\\boxed{7}`, `<answer>7</answer>`, "7 is the answer"), else a sentence of the number alone ("It is 7."), else the last
number of the text after the thinking. These are no answers: an operand ("3 + 4"), a number in a question, an echo of
the prompt, a negated or excluded number, an ordinal, a part of a word. There is none when the text gives several:
different numbers said to be the answer, the final number in a list ("5, 6, 7", "6 or 7"), another number in a later
sentence, two results for one left side ("3 + 4 = 6, 3 + 4 = 7", "3 + 4 = 6 = 7"), or when it is taken back ("that is
wrong").
Only one number is ever credited, so naming more can never earn more.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, ClassVar

from lowmem_grpo.errors import ConfigError
from lowmem_grpo.options import checked
from lowmem_grpo.rewards.base import Mode, text_of
from lowmem_grpo.rewards.reading import (
    Sentence,
    after_thinking,
    content_after,
    is_negated,
    last_retraction,
    sentences,
    tag_content,
    without_echo,
)

__all__ = ["Number", "NumberReward", "final_number", "number", "parse_number"]

_DIGITS = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?!,?[0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?"
_PERCENT = r"(?:%|per\s?cent\b)"
_WHOLE = re.compile(
    rf"(?P<sign>[-+]?)\s?[$€£¥]?\s?(?P<sign2>[-+]?)(?P<digits>{_DIGITS})\s?(?:(?P<percent>{_PERCENT})|[€£¥$])?\.?", re.I
)
_IN_TEXT = re.compile(
    rf"(?<![A-Za-z_0-9])(?<![0-9]\.)(?P<digits>{_DIGITS})(?![0-9])(?!\.[0-9])"
    rf"(?!(?:st|nd|rd|th)\b)(?:\s?(?P<percent>{_PERCENT}))?",
    re.I,
)
_OPERATOR = re.compile(
    r"[ \t()$€£¥]*(?:\*\*|[-+*/^:x]|plus|minus|times|multiplied by|divided by|over|of|mod)[-+ \t()$€£¥]*", re.I
)
_HANGING_OPERATOR = re.compile(r"[ \t()]*[+*/^][ \t(]*")
_LIST_GAP = re.compile(r"(?:[\s,;.!|/&()*•$€£¥-]|\b(?:and|or|to|maybe|perhaps|possibly|then|also)\b)*", re.I)
_SAID_BEFORE = re.compile(
    r"\banswer\b(?:[^.!?\n]{0,80}(?:\b(?:is|was|be|equals)\b|[:=]))?\W*"
    r"(?:(?:simply|just|exactly|about|approximately|equal to|the number|therefore|thus)\W*){0,2}$",
    re.I,
)
_SAID_AFTER = re.compile(r"\W*(?:is|was|would be)\s+(?:the|my|our)\b[^.!?\n]{0,30}\banswer\b", re.I)
_EQUATION = re.compile(r"(?P<left>[-+*/^x().0-9 \t]{0,60}[0-9)][ \t]{0,3})=[ \t]*(?P<right>-?[.0-9][.,0-9]*)", re.I)
_CHAIN = re.compile(r"=[ \t]*(?P<first>-?[0-9.]+)[ \t]*=[ \t]*(?P<then>-?[0-9.]*[0-9])(?![ \t]*[-+*/^x0-9])", re.I)
_MINUS = re.compile(r"(?:^|[^\w)])(?:-[$€£¥]?|[$€£¥]-)$")
_REWRITES = tuple(
    (re.compile(pattern, re.M), to)
    for pattern, to in (
        (r"[−‒]", "-"),
        (r"\\boxed\s*\{([^{}]*)\}", r". The answer is \1 . "),
        (r"^#{4}[ \t]*([^\n]*)$", r". The answer is \1 . "),
        (r"\\(?:times|cdot)\b|×", "*"),
        (r"\\div\b|÷", "/"),
        (r"\\([$%])", r"\1"),
        (r"\\[()\[\]]|`", " "),
        (r"(?<![0-9 ])\*\*|\*\*(?![0-9 ])|(?<= )\*\*(?! )|__", " "),
    )
)
_FILLER = re.compile(
    r"(?:\W|\b(?:the|an?|answer|final|result|total|sum|value|number|solution|it|is|it's|that|that's|this|so|or|and|maybe"
    r"|perhaps|possibly|actually|no|wait|yes|be|could|would|might|may|must|should|equals?|to|therefore|thus|hence|i|think"
    r"|probably|also|alternatively)\b)*",
    re.I,
)


@dataclass(frozen=True, slots=True)
class Number:
    """A number as written: its exact value, and the value without the percent sign where there was one.

    >>> parse_number("35%") == Number(Decimal("0.35"), Decimal("35"))
    True
    """

    value: Decimal
    bare: Decimal

    @classmethod
    def of(cls, negative: bool, digits: str, percent: bool) -> Number:
        mantissa, _, exponent = digits.replace(",", "").lower().partition("e")
        sign = "-" if negative else ""
        # Decimal's constructor is exact, its division is not.
        bare, hundredth = (Decimal(f"{sign}{mantissa}e{int(exponent or 0) - shift}") for shift in (0, 2))
        return cls(hundredth if percent else bare, bare)

    def equals(self, other: Number, *, bare_percent: bool) -> bool:
        """Equal values; with `bare_percent` also equal when the percent signs are left away."""
        return self.value == other.value or (bare_percent and self.bare == other.bare)


def parse_number(text: str) -> Number | None:
    """The number that the whole stripped text is, or None.

    >>> parse_number(" $1,234.50. ").value, parse_number("about 6")
    (Decimal('1234.50'), None)
    """
    match = _WHOLE.fullmatch(text.strip().replace("−", "-").replace("\\", ""))
    if match is None or (match["sign"] and match["sign2"]):
        return None
    return Number.of("-" in match["sign"] + match["sign2"], match["digits"], match["percent"] is not None)


def parse_gold(value: Any) -> Number | None:
    """The gold number of a data set cell: a number, or text that is one, or is one after its last `####`."""
    if value is None or isinstance(value, bool):
        return None
    return parse_number(str(value).rpartition("####")[2])


@dataclass(frozen=True, slots=True)
class _Mention:
    """A number in a text, not an operand and not inside a question."""

    start: int
    end: int
    number: Number
    sentence: Sentence


def final_number(text: str, prompt: str = "", tag: str | None = None) -> Number | None:
    """The number that a lenient reader takes as the final answer of `text`, or None; the rule is in the module's text.

    >>> final_number("What is 3 + 4? 3 + 4 = 7").value, final_number("5, 6, 7"), final_number("It is not 7")
    (Decimal('7'), None, None)
    """
    text = _rewrite(without_echo(after_thinking(text), prompt), tag)
    mentions = _mentions(text)
    retracted = last_retraction(text)
    kept = [m for m in mentions if m.end > retracted and not is_negated(text, m.start, m.end)]
    if not kept or _equations_disagree(text):
        return None
    per_sentence = Counter(m.sentence.start for m in mentions)
    stated = [m for m in kept if _is_said(text, m)]
    stated = stated or [m for m in kept if per_sentence[m.sentence.start] == 1 and _is_alone(text, m)]
    final = stated[-1] if stated else kept[-1]
    rivals = [*stated, *(m for m in kept if m.start >= final.sentence.end), *_listed_with(text, final, kept)]
    starts = {m.start for m in kept}
    denied = {m.number.value for m in mentions if m.start not in starts}
    if final.number.value in denied or any(m.number.value != final.number.value for m in rivals):
        return None
    return final.number


def _rewrite(text: str, tag: str | None) -> str:
    for name in {"answer", tag or "answer"}:
        text = text.replace(f"<{name}>", ". The answer is ").replace(f"</{name}>", " . ")
    for pattern, to in _REWRITES:
        text = pattern.sub(to, text)
    return re.sub(r"</?\w+>", "\n", text)


def _mentions(text: str) -> list[_Mention]:
    found = list(_IN_TEXT.finditer(text))
    operands = set()
    for i, (left, right) in enumerate(itertools.pairwise(found)):
        if _OPERATOR.fullmatch(text, left.end(), right.start()):
            operands |= {i, i + 1}
    places = list(sentences(text))
    mentions, at = [], 0
    for i, match in enumerate(found):
        while places[at].end < match.end():
            at += 1
        if i in operands or places[at].asks or _HANGING_OPERATOR.match(text, match.end()):
            continue
        negative = _MINUS.search(text[max(0, match.start() - 4) : match.start()]) is not None
        value = Number.of(negative, match["digits"], match["percent"] is not None)
        mentions.append(_Mention(match.start(), match.end(), value, places[at]))
    return mentions


def _is_said(text: str, mention: _Mention) -> bool:
    before = text[max(0, mention.start - 140) : mention.start]
    return _SAID_BEFORE.search(before) is not None or _SAID_AFTER.match(text, mention.end) is not None


def _is_alone(text: str, mention: _Mention) -> bool:
    """True for a sentence such as "It is 6." or "6": nothing but filler words around the number."""
    before, after = text[mention.sentence.start : mention.start], text[mention.end : mention.sentence.end]
    return _FILLER.fullmatch(before.replace("’", "'")) is not None and _FILLER.fullmatch(after) is not None


def _listed_with(text: str, final: _Mention, kept: Sequence[_Mention]) -> list[_Mention]:
    """The neighbours that only list words and marks separate from the final number."""
    at = next(i for i, m in enumerate(kept) if m is final)
    listed = []
    if at > 0 and _LIST_GAP.fullmatch(text, kept[at - 1].end, final.start):
        listed.append(kept[at - 1])
    if at + 1 < len(kept) and _LIST_GAP.fullmatch(text, final.end, kept[at + 1].start):
        listed.append(kept[at + 1])
    return listed


def _equations_disagree(text: str) -> bool:
    """Two results for one left side, or a chain of two different results ("= 6 = 7")."""
    chains = ((parse_number(chain["first"]), parse_number(chain["then"])) for chain in _CHAIN.finditer(text))
    if any(first and then and first.value != then.value for first, then in chains):
        return True
    results: dict[str, str] = {}
    for equation in _EQUATION.finditer(text):
        left = re.sub(r"\s", "", equation["left"])
        right = equation["right"].rstrip(".,")
        if results.setdefault(left, right) != right:
            return True
    return False


@dataclass(frozen=True, slots=True)
class NumberReward:
    """1.0 or 0.0 by the gold in the column `answer`; None for a gold that is no number."""

    tag: str | None = None
    after: str | None = None
    bare_percent: bool = False
    mode: Mode = "strict"

    needs: ClassVar[frozenset[str]] = frozenset({"answer"})
    in_worker: ClassVar[bool] = False
    best: ClassVar[float] = 1.0

    @property
    def asks_for(self) -> tuple[str, ...]:
        """The opening tag, or `after` where it is more than one sign such as "="; nothing when reading leniently."""
        if self.mode == "lenient":
            return ()
        if self.tag is not None:
            return (f"<{self.tag}>",)
        return (self.after,) if self.after is not None and len(self.after) > 1 else ()

    def __call__(
        self, *, prompts: Sequence[Any], completions: Sequence[Any], answer: Sequence[Any], **_: Any
    ) -> list[float | None]:
        rows = zip(prompts, completions, answer, strict=True)
        return [self._score(text_of(prompt), text_of(completion), gold) for prompt, completion, gold in rows]

    def parseable_gold(self, value: Any) -> bool:
        """Whether the gold is a number."""
        return parse_gold(value) is not None

    def _score(self, prompt: str, completion: str, gold: Any) -> float | None:
        right = parse_gold(gold)
        if right is None:
            return None
        given = final_number(completion, prompt, self.tag) if self.mode == "lenient" else self._in_form(completion)
        if given is None:
            return 0.0
        return float(self.mode == "format" or given.equals(right, bare_percent=self.bare_percent))

    def _in_form(self, completion: str) -> Number | None:
        content: str | None = completion
        if self.tag is not None:
            content = tag_content(completion, self.tag)
        elif self.after is not None:
            content = content_after(after_thinking(completion), self.after)
        return None if content is None else parse_number(content)


@checked("reward", frozenset())
def number(
    *,
    tag: str | None = None,
    after: str | None = None,
    bare_percent: bool = False,
    mode: Mode = "strict",
) -> NumberReward:
    """Is the answer the right number? Strict: the answer is one number, or the content of the one `<tag>` is, or all
    that follows the one `after` is (`after: "####"`, or `"="` for `3 + 4 = 7`).
    """
    if tag is not None and after is not None:
        raise ConfigError("the reward number takes tag or after, not both: they name two forms of the answer")
    return NumberReward(tag, after, bare_percent, mode)
