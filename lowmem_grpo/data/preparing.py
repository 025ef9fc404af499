"""From raw rows to problems: drop and count what cannot be used, render the rest, split it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from lowmem_grpo.data.columns import RESERVED, reward_columns
from lowmem_grpo.data.rendering import (
    RenderedPrompt,
    TemplateRecord,
    as_messages,
    content_text,
    markers_of,
    render_prompt,
    template_record,
    template_warnings,
)
from lowmem_grpo.data.spec import DataSpec, RawData, Table
from lowmem_grpo.data.splitting import Kept, hold_out, test_part
from lowmem_grpo.data.values import has_lost_backslash
from lowmem_grpo.errors import DataError
from lowmem_grpo.types import Problem, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["DataReport", "Dropped", "PreparedData", "prepare"]

Unusable = Callable[[Mapping[str, Any]], str | None]
"""A check of a row's reward columns: why the row cannot be used, or None."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """Rows of one source left out for one reason.

    >>> Dropped("own.jsonl", "line", "the prompt is empty", (4, 9)).describe()
    'own.jsonl: 2 rows left out because the prompt is empty (lines 4, 9)'
    """

    label: str
    unit: Literal["line", "row"]
    reason: str
    lines: tuple[int, ...]

    def describe(self) -> str:
        """One line for the console."""
        rows = "1 row" if len(self.lines) == 1 else f"{len(self.lines)} rows"
        return f"{self.label}: {rows} left out because {self.reason} ({_listed(self.unit, self.lines)})"


@dataclass(frozen=True, slots=True)
class DataReport:
    """What became of the rows: `rows` read, then dropped or in one of the splits.

    `duplicates` counts training problems whose prompt occurred before; they are kept. `longest_prompt` is in tokens,
    over all splits.
    """

    rows: int
    train: int
    dev: int
    test: int
    duplicates: int
    longest_prompt: int
    dropped: tuple[Dropped, ...]
    warnings: tuple[str, ...]

    def describe(self) -> list[str]:
        """Lines for the console: the counts, then each reason for dropping, then the warnings."""
        counts = f"{self.rows} rows read: {self.train} to train on, {self.dev} dev, {self.test} test"
        tokens = f"longest prompt {self.longest_prompt} tokens"
        repeats = f", {self.duplicates} repeated prompts kept" if self.duplicates else ""
        dropped = [item.describe() for item in self.dropped]
        return [f"{counts}; {tokens}{repeats}", *dropped, *(f"warning: {warning}" for warning in self.warnings)]


@dataclass(frozen=True, slots=True)
class PreparedData:
    """Problems by split, the report on how they came about, and the first rendered training prompt as an example."""

    train: tuple[Problem, ...]
    dev: tuple[Problem, ...]
    test: tuple[Problem, ...]
    report: DataReport
    prompt_format: Literal["chat", "text"]
    example: str


class _Ledger:
    """Collects line numbers by reason while the rows of one table are looked at."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._dropped: dict[str, list[int]] = {}
        self._noted: dict[str, list[int]] = {}

    def drop(self, reason: str, line: int) -> None:
        self._dropped.setdefault(reason, []).append(line)

    def note(self, remark: str, line: int) -> None:
        self._noted.setdefault(remark, []).append(line)

    def dropped(self) -> Iterator[Dropped]:
        for reason, lines in self._dropped.items():
            yield Dropped(self._table.label, self._table.unit, reason, tuple(lines))

    def warnings(self) -> Iterator[str]:
        for remark, lines in self._noted.items():
            yield f"{self._table.label} {_listed(self._table.unit, lines)}: {remark}"


def prepare(
    raw: RawData,
    spec: DataSpec,
    tokenizer: PreTrainedTokenizerBase,
    *,
    needs_gold: bool,
    unusable: Unusable | None = None,
) -> PreparedData:
    """Render every usable row and split them into train, dev and test.

    Left out and counted by line: a null or empty prompt; a null or empty gold where `needs_gold`; a prompt longer than
    `spec.max_prompt_tokens` (never cut); a row for which `unusable(columns)` names a reason (a reward that cannot parse
    its gold); a training row that asks the same as a row of `test_source`. Refused with DataError: a prompt that is
    neither text nor messages, that ends with an assistant's turn, or was rendered before; no row left; too few rows for
    the sizes asked for.

    Rows that ask the same (prompt and system prompt, whatever the case and white space) always share a split. Which
    rows become dev and test depends on the seed and the prompts alone: not on the order in the file, and the test rows
    not on `dev_size`.
    """
    record = template_record(spec, tokenizer)
    keeper = _Keeper(spec, tokenizer, record, needs_gold, unusable)
    ledgers = [_Ledger(table) for table in raw.tables]
    kept = [keeper.keep(table, ledger) for table, ledger in zip(raw.tables, ledgers, strict=True)]
    warnings = [*template_warnings(record), *_column_warnings(raw, spec)]
    if raw.test is None:
        train, dev, test = hold_out(kept[0], spec.dev_size, spec.test_size, spec.seed, warnings)
    else:
        rows = _without_test(kept[0], kept[1], ledgers[0])
        train, dev, _ = hold_out(rows, spec.dev_size, 0, spec.seed, warnings)
        test = test_part(kept[1], spec.test_size, spec.seed, warnings)
    report = DataReport(
        rows=sum(len(table.rows) for table in raw.tables),
        train=len(train),
        dev=len(dev),
        test=len(test),
        duplicates=len(train) - len({row.key for row in train}),
        longest_prompt=max(len(row.rendered.ids) for row in (*train, *dev, *test)),
        dropped=tuple(item for ledger in ledgers for item in ledger.dropped()),
        warnings=(*warnings, *(warning for ledger in ledgers for warning in ledger.warnings())),
    )
    splits = (_problems("train", train), _problems("dev", dev), _problems("test", test))
    return PreparedData(*splits, report, record["format"], train[0].rendered.text)


class _Keeper:
    """Looks at one row after the other and keeps those that can be used."""

    def __init__(
        self,
        spec: DataSpec,
        tokenizer: PreTrainedTokenizerBase,
        record: TemplateRecord,
        needs_gold: bool,
        unusable: Unusable | None,
    ) -> None:
        self._spec, self._tokenizer, self._record = spec, tokenizer, record
        self._needs_gold, self._unusable = needs_gold, unusable
        # Text is used as it is, so nothing in it can be a mistake.
        self._markers, self._plain = markers_of(tokenizer, record["template"]) if record["template"] else ((), ())
        if spec.system_prompt is not None:
            self._refuse_rendered(spec.system_prompt, "data.system_prompt")

    def keep(self, table: Table, ledger: _Ledger) -> list[Kept]:
        kept = []
        for index, (line, row) in enumerate(zip(table.lines, table.rows, strict=True)):
            found = self._look(row, table, index, ledger)
            if isinstance(found, str):
                ledger.drop(found, line)
            else:
                kept.append(found)
        if not kept:
            reasons = "; ".join(item.describe() for item in ledger.dropped())
            raise DataError(f"{table.label} has no row that can be used: {reasons}")
        other = next((item for item in kept if type(item.prompt) is not type(kept[0].prompt)), None)
        if other is not None:
            raise DataError(
                f"{table.label}, column {self._spec.prompt_column!r}, mixes text and lists of messages "
                f"({table.unit}s {kept[0].line} and {other.line}); keep one form, because rewards get it as it is"
            )
        return kept

    def _look(self, row: Mapping[str, Any], table: Table, index: int, ledger: _Ledger) -> Kept | str:
        """The usable row, or the reason it is not."""
        spec, line = self._spec, table.lines[index]
        prompt, gold = row.get(spec.prompt_column), row.get(spec.gold_column) if spec.gold_column else None
        place = f"{table.place(index)}, column {spec.prompt_column!r}"
        if prompt is None:
            return "the prompt is null"
        _check_form(prompt, place)
        if _is_blank(prompt):
            return "the prompt is empty"
        if self._needs_gold and (gold is None or (isinstance(gold, str) and not gold.strip())):
            return "the answer is null" if gold is None else "the answer is empty"
        self._note_oddities(prompt, gold, line, ledger)
        columns = reward_columns(row, table, spec)
        reason = self._unusable(columns) if self._unusable else None
        if reason is not None:
            return reason
        rendered = self._render(prompt, place)
        if len(rendered.ids) > spec.max_prompt_tokens:
            return f"the prompt is longer than data.max_prompt_tokens={spec.max_prompt_tokens}"
        return Kept(line, _key(prompt, self._record), prompt, rendered, columns)

    def _render(self, prompt: Prompt, place: str) -> RenderedPrompt:
        for message in as_messages(prompt, None):
            self._refuse_rendered(content_text(message), place)
        try:
            return render_prompt(prompt, self._tokenizer, self._record)
        except DataError as error:
            raise DataError(f"{place}: {error}") from error

    def _refuse_rendered(self, text: str, place: str) -> None:
        found = next((marker for marker in self._markers if marker in text), None)
        if found is not None:
            raise DataError(
                f"{place} already holds the chat marker {found!r}, and the chat template would write it a second time; "
                "give the bare question (or a list of messages), or set data.format=text to use the text as it is"
            )

    def _note_oddities(self, prompt: Prompt, gold: Any, line: int, ledger: _Ledger) -> None:
        if has_lost_backslash([prompt, gold]):
            ledger.note(
                r"a control character where a LaTeX command is likely: in JSON write a backslash as \\ (\\frac)", line
            )
        messages = as_messages(prompt, None)
        for token in self._plain:
            if any(token in content_text(message) for message in messages):
                ledger.note(f"the text {token} is read as a special token by this tokenizer", line)
        if self._spec.system_prompt is not None and messages[0]["role"] == "system":
            ledger.note("the row brings its own system message, so data.system_prompt is not used there", line)


def _check_form(prompt: Any, place: str) -> None:
    if isinstance(prompt, str):
        return
    if not isinstance(prompt, list):
        raise DataError(f"{place} holds {prompt!r:.60}; a prompt is text or a list of messages")
    for message in prompt:
        _check_message(message, place)
    if prompt and prompt[-1]["role"] == "assistant":
        raise DataError(
            f"{place} ends with an assistant message, which is what the model is to write; end the list with "
            "the user's message and put the answer into a column of its own"
        )


def _check_message(message: Any, place: str) -> None:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
        found = ", ".join(message) if isinstance(message, dict) else type(message).__name__
        raise DataError(f"{place} holds a message without role and content (found: {found})")
    content = message["content"]
    parts = content if isinstance(content, list) else []
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise DataError(f"{place} holds a message with a part that is not text; images and sound are not supported")
    if not isinstance(content, str | list | None):
        raise DataError(f"{place} holds a message whose content is {content!r:.60}, not text")


def _is_blank(prompt: Prompt) -> bool:
    text = prompt if isinstance(prompt, str) else content_text(prompt[-1]) if prompt else ""
    return not text.strip()


def _key(prompt: Prompt, record: TemplateRecord) -> str:
    """What a prompt asks, without case and white space; the system prompt belongs to it."""
    if record["format"] == "text":
        return _squeezed(str(prompt))
    messages = as_messages(prompt, record["system_prompt"])
    return "\0".join(f"{message['role']}\0{_squeezed(content_text(message))}" for message in messages)


def _squeezed(text: str) -> str:
    return " ".join(text.split()).casefold()


def _without_test(rows: list[Kept], test: list[Kept], ledger: _Ledger) -> list[Kept]:
    """The rows that ask nothing that any row of the test source asks."""
    asked = {row.key for row in test}
    for row in rows:
        if row.key in asked:
            ledger.drop("the same prompt is in the test source", row.line)
    left = [row for row in rows if row.key not in asked]
    if not left:
        raise DataError("every training prompt is also in data.test_source, so nothing is left to train on")
    return left


def _problems(split: str, rows: list[Kept]) -> tuple[Problem, ...]:
    return tuple(
        Problem(f"{split}-{row.line}", row.prompt, row.rendered.text, row.rendered.ids, row.columns) for row in rows
    )


def _column_warnings(raw: RawData, spec: DataSpec) -> Iterator[str]:
    for table in raw.tables:
        for name in RESERVED:
            if name in table.columns and name != spec.prompt_column:
                yield f"{table.label}: the column {name} is not passed to rewards: they get something else by that name"
        if "answer" in table.columns and spec.gold_column not in (None, "answer"):
            yield (
                f"{table.label}: rewards get the column {spec.gold_column} as `answer`; "
                "the file's own answer column is hidden (data.columns.<name>=answer passes it too)"
            )


def _listed(unit: str, lines: Iterable[int], most: int = 10) -> str:
    numbers = list(lines)
    shown = ", ".join(map(str, numbers[:most]))
    more = f" and {len(numbers) - most} more" if len(numbers) > most else ""
    return f"{unit}{'s' if len(numbers) > 1 else ''} {shown}{more}"
