"""How free text is read: thinking cut off, tags, sentences, echoes of the question, negations.

Shared by the answer checkers. Look-behind and repetition are bounded, so long runaway answers need no time limit.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = [
    "Sentence",
    "after_thinking",
    "content_after",
    "is_negated",
    "last_retraction",
    "sentences",
    "squeeze",
    "tag_content",
    "without_echo",
]

ECHO_WORDS = 4
"""From this many words on, a sentence that also stands in the question is an echo of it; "4 apples" is an answer."""

CLAUSE_CHARS = 80
"""How far from a statement a negation of it is looked for."""

_SENTENCE_END = re.compile(r"[!?\n]|\.(?=\s|$)")
_CLAUSE_END = re.compile(r"[,;!?\n=]|\.(?=\s|$)|\b(?:but|so|therefore|thus|hence|then|because|since)\b", re.I)
_NEGATION = re.compile(r"\b(?:not|never|cannot|nor|neither|except|excluding|wrong|incorrect|false)\b|n['’]t\b", re.I)
_EXCLUDED = re.compile(r"(?:[<>≤≥≠]|!=|\b(?:less|more|fewer|greater|larger|smaller|other|rather) than)=?\s*$", re.I)
_TAKEN_BACK = re.compile(
    r"\b(?:wrong|incorrect|false)\b|(?:\bnot|n['’]t)\s+(?:the\s+|a\s+)?(?:answer|right|correct|true)\b", re.I
)


@dataclass(frozen=True, slots=True)
class Sentence:
    """A sentence or line: its place in the text, and whether it asks something.

    >>> [(s.start, s.end, s.asks) for s in sentences("Why 3.5? So.")]
    [(0, 8, True), (8, 12, False)]
    """

    start: int
    end: int
    asks: bool


def sentences(text: str) -> Iterator[Sentence]:
    """The sentences of `text`, end marks included; a point inside a word or number ends none."""
    start = 0
    for end in _SENTENCE_END.finditer(text):
        yield Sentence(start, end.end(), end.group() == "?")
        start = end.end()
    if start < len(text):
        yield Sentence(start, len(text), False)


def squeeze(text: str) -> str:
    """Text for comparing: compatible characters unified, lower case, single spaces.

    >>> squeeze("  The  Ｃat\\n")
    'the cat'
    """
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def after_thinking(text: str) -> str:
    """What follows the last `</think>`, or the whole text without one."""
    return text.rpartition("</think>")[2]


def tag_content(text: str, tag: str) -> str | None:
    """What stands between `<tag>` and `</tag>` when each occurs exactly once and in this order, else None.

    >>> tag_content("<answer>\\n9</answer>", "answer"), tag_content("<answer>6</answer><answer>8</answer>", "answer")
    ('\\n9', None)
    """
    opening, closing = f"<{tag}>", f"</{tag}>"
    start, end = text.find(opening), text.find(closing)
    if text.count(opening) != 1 or text.count(closing) != 1 or end < start:
        return None
    return text[start + len(opening) : end]


def content_after(text: str, marker: str) -> str | None:
    """What follows `marker` when it occurs exactly once, else None.

    >>> content_after("3 + 4 = 7", "="), content_after("3 + 4 = 6 = 7", "="), content_after("7", "=")
    (' 7', None, None)
    """
    return text.partition(marker)[2] if text.count(marker) == 1 else None


def without_echo(text: str, prompt: str) -> str:
    """`text` without the sentences at its start that repeat the prompt.

    >>> without_echo("Tom has 3 blue pens. He has 5.", "Tom has 3 blue pens. Ann gives him 2.")
    ' He has 5.'
    """
    asked = squeeze(prompt)
    for sentence in sentences(text):
        words = squeeze(text[sentence.start : sentence.end])
        if words and not (words in asked and len(words.split()) >= ECHO_WORDS):
            return text[sentence.start :]
    return ""


def last_retraction(text: str) -> int:
    """Where the last "that is wrong" or "not the answer" of the text starts; -1 without one.

    >>> last_retraction("6. That is wrong."), last_retraction("It is 6")
    (11, -1)
    """
    return max((match.start() for match in _TAKEN_BACK.finditer(text)), default=-1)


def is_negated(text: str, start: int, end: int) -> bool:
    """Whether the statement at text[start:end] is denied in its own clause or excluded (`> 6`, `rather than 6`).

    >>> [is_negated(t, t.index("6"), t.index("6") + 1) for t in ("not 6", "not 5 but 6", "6 is wrong", "6, not 8")]
    [True, False, True, False]
    """
    before = text[max(0, start - CLAUSE_CHARS) : start]
    boundaries = [match.end() for match in _CLAUSE_END.finditer(before)]
    if _NEGATION.search(before, boundaries[-1] if boundaries else 0) or _EXCLUDED.search(before[-24:]):
        return True
    after = text[end : end + CLAUSE_CHARS]
    clause_end = _CLAUSE_END.search(after)
    return _NEGATION.search(after, 0, clause_end.start() if clause_end else len(after)) is not None
