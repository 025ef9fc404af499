"""What a reward function is, and how any of them is called and its answer read.

A reward function is written as for TRL and runs here unchanged:

    def f(prompts, completions, completion_ids=..., **dataset_columns) -> list[float | None]

sync or async, called by keyword. The form of `prompts` and `completions` follows the prompt column: text gives text,
a message list gives `[{"role": "assistant", "content": ...}]`; `text_of` reads either.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
import traceback
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from lowmem_grpo.errors import RewardFailed, nearest

__all__ = [
    "AnswerChecker",
    "AsyncLoop",
    "Builtin",
    "Failure",
    "FormChecker",
    "Mode",
    "RewardFn",
    "Scores",
    "Signature",
    "call_function",
    "read_scores",
    "text_of",
]

Mode = Literal["strict", "lenient", "format"]
"""How an answer checker reads: `strict`, in the form asked for and right; `lenient`, the final answer found anywhere in
the text is right; `format`, in the form asked for, right or wrong."""

CORE_INPUTS = frozenset({"prompts", "completions", "completion_ids"})
"""What every reward function may ask for besides the columns of the data set."""


class RewardFn(Protocol):
    """Scores answers; one entry per answer, None where it has nothing to say. All arguments come by keyword."""

    def __call__(self, *, prompts: list[Any], completions: list[Any], **columns: Any) -> Any: ...


class Builtin(Protocol):
    """A built-in reward function: it says which columns it reads, whether it must run in the killable worker, and the
    best score it gives."""

    needs: ClassVar[frozenset[str]]
    in_worker: ClassVar[bool]
    best: ClassVar[float]

    def __call__(self, **inputs: Any) -> list[float | None]: ...


@runtime_checkable
class FormChecker(Builtin, Protocol):
    """A built-in that looks for a literal form, which a model can hardly hit when the prompt never mentions it."""

    @property
    def asks_for(self) -> tuple[str, ...]:
        """What an answer has to contain literally, as in ("<answer>",); () where these options ask for nothing."""
        ...


@runtime_checkable
class AnswerChecker(Builtin, Protocol):
    """A built-in that compares with the gold column `answer`; `dataclasses.replace(checker, mode=...)` reads anew."""

    @property
    def mode(self) -> Mode: ...

    def parseable_gold(self, value: Any) -> bool:
        """Whether `value` can be compared with; a row whose gold cannot is left out before training."""
        ...


def text_of(prompt_or_completion: str | Sequence[Mapping[str, Any]]) -> str:
    """The text of a prompt or completion in either form; messages are joined by line breaks.

    >>> text_of("6") == text_of([{"role": "assistant", "content": "6"}]) == "6"
    True
    """
    if isinstance(prompt_or_completion, str):
        return prompt_or_completion
    return "\n".join(_content_text(message.get("content")) for message in prompt_or_completion)


def _content_text(content: Any) -> str:
    """Content is text, nothing (a message of tool calls only), or parts such as {"type": "text", "text": ...}."""
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content or () if isinstance(part, Mapping))


@dataclass(frozen=True, slots=True)
class Signature:
    """Which keyword arguments a function takes: `accepted`, everything when `takes_all`; `required` have no default."""

    accepted: tuple[str, ...]
    required: tuple[str, ...]
    takes_all: bool

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Signature:
        """Read from the function; one without a readable signature gets everything."""
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):
            return cls((), (), True)
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        required = tuple(p.name for p in named if p.default is p.empty)
        return cls(tuple(p.name for p in named), required, any(p.kind is p.VAR_KEYWORD for p in parameters))

    def columns(self, given: Collection[str] = ()) -> frozenset[str]:
        """The data set columns the function cannot do without; `given` are arguments set in the config."""
        return frozenset(self.required) - CORE_INPUTS - frozenset(given)

    def select(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs that the function takes."""
        return {name: value for name, value in inputs.items() if self.takes_all or name in self.accepted}

    def unknown_argument(self, given: Iterable[str]) -> str:
        """A sentence end about the first of `given` that the function does not take, or ""."""
        for name in given:
            if not self.takes_all and name not in self.accepted:
                near = nearest(name, self.accepted)
                hint = f", did you mean '{near}'?" if near else ""
                return f"has no argument '{name}'{hint}; it takes {', '.join(self.accepted) or 'none'}"
        return ""


@dataclass(frozen=True, slots=True)
class Scores:
    """What a call gave, one entry per answer: a finite score or None, and the reason where an entry is a failure.

    >>> read_scores([True, None, float("nan")], 3, "f")
    Scores(values=(1.0, None, None), errors=(None, None, 'ValueError: the score is nan'))
    """

    values: tuple[float | None, ...]
    errors: tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class Failure:
    """A call that gave nothing: the last line of its traceback, the whole traceback, and whether time ran out."""

    line: str
    traceback: str
    timed_out: bool = False


def read_scores(result: Any, count: int, label: str) -> Scores:
    """Reads what a function returned: a list, tuple, tensor or array of `count` numbers or None.

    Bools, integers, numpy scalars and tensors of one element are numbers; NaN and infinity are failures of that answer.
    Raises RewardFailed for anything that is not `count` scores.
    """
    if hasattr(result, "tolist"):
        result = result.tolist()
    if isinstance(result, str | bytes | Mapping) or not isinstance(result, Iterable):
        raise RewardFailed(
            f"reward '{label}' returned {result!r:.80} for {count} answers, not a list of {count} scores"
        )
    items = list(result)
    if len(items) != count:
        raise RewardFailed(f"reward '{label}' returned {len(items)} scores for {count} answers")
    pairs = [_read_score(item) for item in items]
    return Scores(tuple(value for value, _ in pairs), tuple(error for _, error in pairs))


def _read_score(item: Any) -> tuple[float | None, str | None]:
    if item is None:
        return None, None
    if isinstance(item, str | bytes) or not (hasattr(item, "item") or hasattr(item, "__float__")):
        return None, f"TypeError: the score is {item!r:.80}, not a number"
    try:
        value = float(item.item() if hasattr(item, "item") else item)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        return None, last_line(error)
    if not math.isfinite(value):
        return None, f"ValueError: the score is {value}"
    return value, None


def call_function(
    function: Callable[..., Any], inputs: Mapping[str, Any], count: int, label: str, loop: AsyncLoop
) -> Scores | Failure:
    """One call in this process, awaited if it is async. What the function raises comes back as a Failure."""
    try:
        result = function(**inputs)
        if inspect.isawaitable(result):
            result = loop.run(result)
    except (Exception, SystemExit) as error:
        return failure_of(error)
    return read_scores(result, count, label)


def failure_of(error: BaseException) -> Failure:
    """The error as a Failure; the frames of this package above the user's function are left out."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and _is_ours(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    return Failure(last_line(error), "".join(traceback.format_exception(type(error), error, frames)).rstrip())


def _is_ours(filename: str) -> bool:
    return Path(filename).parent == Path(__file__).parent


def last_line(error: BaseException) -> str:
    """The last line that a traceback of `error` would print."""
    return "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]


class AsyncLoop:
    """One event loop in a thread of its own, so that async functions keep their clients from call to call.

    A thread, because a notebook already runs a loop in the main one.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, awaitable: Awaitable[Any]) -> Any:
        """Waits for the awaitable and gives its result, or raises what it raised."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="reward-loop", daemon=True)
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(_wait_for(awaitable), self._loop).result()

    def close(self) -> None:
        """Ends the thread; harmless when none was started."""
        if self._loop is None or self._thread is None:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = self._thread = None


async def _wait_for(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
