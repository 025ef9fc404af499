"""What the data stage is asked for, and the raw rows it starts from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["DataSpec", "RawData", "Table"]

Source = str | Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class DataSpec:
    """Where the rows come from and how a row becomes a prompt.

    `source` and `test_source` are each one of: a file (.jsonl, .ndjson, .json, .csv, .tsv, .parquet), a folder or a hub
    id (read with `datasets`), a task of `lowmem_grpo.tasks.TASKS`, `path/file.py:function`, or rows in memory. `split`
    and `test_split` matter for folders and hub ids only. `columns` maps the name a reward asks for to a column of the
    file. `args` goes to a task or function, or names a hub configuration (`{"name": "main"}`).

    `dev_size` and `test_size` count rows. Without a `test_source` the test rows are taken out of `source`; with one,
    `test_size` 0 means all of it.

    >>> DataSpec("train.jsonl", prompt_column="question", columns={"solution": "answer"}).max_prompt_tokens
    512
    """

    source: Source
    split: str = "train"
    prompt_column: str = "prompt"
    answer_column: str | None = "answer"
    columns: Mapping[str, str] = field(default_factory=dict)
    system_prompt: str | None = None
    thinking: bool | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_prompt_tokens: int = 512
    dev_size: int = 0
    test_source: Source | None = None
    test_split: str = "test"
    test_size: int = 0
    format: Literal["auto", "chat", "text"] = "auto"
    args: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    @property
    def gold_column(self) -> str | None:
        """The column of the file that rewards get as `answer`."""
        return self.columns.get("answer", self.answer_column)


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of one source, JSON values only, and where each stands.

    `lines` has the line of each row in a text file and the row number (from 1) elsewhere; `unit` says which. `columns`
    is every column of any row, in the order first seen; a row may lack some.

    >>> Table("own.jsonl", "line", ({"prompt": "1+1"},), (3,), ("prompt",)).place(0)
    'own.jsonl line 3'
    """

    label: str
    unit: Literal["line", "row"]
    rows: tuple[dict[str, Any], ...]
    lines: tuple[int, ...]
    columns: tuple[str, ...]

    def place(self, index: int) -> str:
        """Where row `index` (from 0) stands, for an error message."""
        return f"{self.label} {self.unit} {self.lines[index]}"


@dataclass(frozen=True, slots=True)
class RawData:
    """The rows as read. `test` holds those of `test_source`; `sha256` is over all rows as JSON, so the same rows have
    the same hash whatever the file format."""

    train: Table
    test: Table | None
    sha256: str

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables there are, training rows first."""
        return (self.train,) if self.test is None else (self.train, self.test)
