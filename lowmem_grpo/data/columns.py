"""From the columns of a file to the names a reward function asks for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lowmem_grpo.data.spec import DataSpec, RawData, Table
from lowmem_grpo.errors import DataError, nearest

__all__ = ["RESERVED", "check_columns", "check_mapping", "guess_columns", "reward_columns"]

RESERVED = ("prompts", "completions", "completion_ids")
"""Names that every reward function gets from the trainer; a column cannot use them."""

_PROMPT_NAMES = ("prompt", "question", "instruction", "problem", "query", "input", "messages", "prompts", "text")
_ANSWER_NAMES = (
    *("answer", "solution", "output", "response", "target", "label", "completion"),
    *("ground_truth", "gold", "expected", "final_answer", "reference", "result"),
)


def guess_columns(rows: Sequence[Mapping[str, Any]]) -> tuple[str, str | None]:
    """The prompt column and the answer column, judged by the names people use; no answer column is None.

    Without a known name the prompt is the first column that holds text or a list. Raises DataError without any.

    >>> guess_columns([{"id": 7, "Question": "1+1", "answer": "2"}])
    ('Question', 'answer')
    """
    columns = list(dict.fromkeys(column for row in rows for column in row))
    wordy = [column for column in columns if any(isinstance(row.get(column), str | list) for row in rows)]
    if not wordy:
        raise DataError(f"no column holds text, so none can be the prompt; columns found: {_names(columns)}")
    prompt = _first_named(_PROMPT_NAMES, wordy) or wordy[0]
    return prompt, _first_named(_ANSWER_NAMES, [column for column in columns if column != prompt])


def check_mapping(table: Table, spec: DataSpec) -> None:
    """Raise DataError when the prompt column or a mapped column is not in the table."""
    if spec.prompt_column not in table.columns:
        likely = nearest(spec.prompt_column, table.columns) or guess_columns(table.rows[:100])[0]
        raise DataError(
            f"{table.label} has no column {spec.prompt_column!r} for the prompt; columns found: "
            f"{_names(table.columns)}; name yours, for example data.prompt_column={likely}"
        )
    for name in RESERVED:
        if name in spec.columns:
            raise DataError(f"data.columns.{name} uses a name that every reward already gets; choose another one")
    # The default answer column may be absent: only a reward that needs it makes that an error.
    mapped = {f"data.columns.{name}": column for name, column in spec.columns.items()}
    if spec.answer_column not in (None, "answer"):
        mapped["data.answer_column"] = spec.answer_column
    for key, column in mapped.items():
        if column not in table.columns:
            close = nearest(column, table.columns)
            hint = f"; did you mean {key}={close}?" if close else ""
            raise DataError(
                f"{key}={column} names no column of {table.label}; columns found: {_names(table.columns)}{hint}"
            )


def check_columns(raw: RawData, spec: DataSpec, needed: Mapping[str, Collection[str]]) -> None:
    """Raise DataError when a reward wants a column that no row has and no mapping provides.

    `needed` maps a reward's label to the names it wants, `answer` among them when it needs the gold.
    """
    for table in raw.tables:
        for label, names in needed.items():
            for name in names:
                if name not in _offered(table, spec):
                    raise DataError(
                        f"the reward {label!r} wants the column {name!r}, which {table.label} has not; columns found: "
                        f"{_names(table.columns)}; map one of them, for example {_mapping_line(name, table, spec)}"
                    )


def reward_columns(row: Mapping[str, Any], table: Table, spec: DataSpec) -> dict[str, Any]:
    """The columns of a row under every name a reward may ask for.

    Each column of the file keeps its own name (None where the row lacks it), mapped names are added and win, and the
    gold is also `answer`. A prompt column called `prompt` is left out, as TRL does; so are the reserved names.
    """
    hidden = (*RESERVED, "prompt") if spec.prompt_column == "prompt" else RESERVED
    own = {column: row.get(column) for column in table.columns if column not in hidden}
    mapped = {name: row.get(column) for name, column in spec.columns.items()}
    gold = {"answer": row.get(spec.gold_column)} if spec.gold_column in table.columns else {}
    return own | gold | mapped


def _offered(table: Table, spec: DataSpec) -> set[str]:
    return set(reward_columns({}, table, spec))


def _mapping_line(name: str, table: Table, spec: DataSpec) -> str:
    others = [column for column in table.columns if column != spec.prompt_column] or list(table.columns)
    gold = _first_named(_ANSWER_NAMES, others)
    column = nearest(name, others) or gold or others[0]
    return f"data.answer_column={column}" if name == "answer" else f"data.columns.{name}={column}"


def _first_named(names: Sequence[str], columns: Sequence[str]) -> str | None:
    by_lower = {column.strip().lower(): column for column in reversed(columns)}
    return next((by_lower[name] for name in names if name in by_lower), None)


def _names(columns: Sequence[str]) -> str:
    return ", ".join(columns) or "none"
