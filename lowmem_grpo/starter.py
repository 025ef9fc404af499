"""A first config for a data file: what `lowmem-grpo init` writes.

The text is the recipe `own-task` with the lines filled in that the rows decide: columns, reward, sizes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowmem_grpo.config import load_config, recipe_text
from lowmem_grpo.data import guess_columns, sample_rows
from lowmem_grpo.errors import ConfigError, DataError

__all__ = ["REWARD_FILE", "write_starter"]

REWARD_FILE = "rewards.py"
"""File, beside the config, with the reward function of a task that no built-in reward fits."""

_MOST_ROWS = 100_000
"""Rows looked at; a larger file is sized as if it had this many."""

_NUMBER = re.compile(r"[-+]?[$€£]?\s*\d[\d,]*(\.\d+)?\s*%?")
_SHORT_ANSWER = 80  # characters; nobody samples a longer text word for word

_REWARD_TEMPLATE = '''\
"""Reward of the task: what is a good answer? Change `my_reward`, then try it without a model:

    lowmem-grpo score CONFIG --completions answers.jsonl
"""


def my_reward(prompts, completions, **columns):
    """One score for each completion, higher is better; None leaves an answer out.

    `completions` are texts, or lists of chat messages where the prompts are. Every column of the data file is in
    `columns` by its name, one entry for each completion. Answers to the same prompt are compared with each other, so
    give part of the score for part of the work: a group in which all score the same teaches nothing.
    """
    return [score(text_of(completion)) for completion in completions]


def text_of(completion):
    return completion if isinstance(completion, str) else completion[-1]["content"]


def score(text):
    # An example to replace: short answers that end with a full stop.
    return 0.5 * text.rstrip().endswith(".") + 0.5 * (len(text.split()) <= 40)
'''


def write_starter(data_file: Path, out: Path | None = None) -> Path:
    """Looks at the rows of `data_file` and writes a commented config, beside it unless `out` says where.

    Where no built-in reward fits, a commented reward file is written too, unless there is one. Gives the config's path.

    Raises:
        DataError: the file is missing, unreadable, or too small to train and test on.
        ConfigError: a file of that name is there already; nothing is overwritten.
    """
    rows = sample_rows(data_file, _MOST_ROWS)
    prompt_column, answer_column = guess_columns(rows)
    golds = _golds(rows, answer_column)
    sizes = _Sizes.for_rows(_usable(rows, prompt_column, data_file))
    path = out or data_file.with_suffix(".yaml")
    if path.exists():
        raise ConfigError(f"{path} exists and is not overwritten: give another name with --out, or remove it")
    if not path.parent.is_dir():
        raise ConfigError(f"there is no folder {path.parent} to write {path.name} to")
    reward = _reward_for(golds)
    text = _fill_in(
        recipe_text("own-task"),
        {
            "source: my-task.jsonl": f"source: {_quoted(_relative(data_file, path.parent))}",
            "prompt_column: prompt": f"prompt_column: {_quoted(prompt_column)}",
            "answer_column: answer": f"answer_column: {_quoted(answer_column) if answer_column and golds else 'null'}",
            "- name: text": f"- name: {reward}",
            "dev_size: 32": f"dev_size: {sizes.dev}",
            "test_size: 64": f"test_size: {sizes.test}",
            "steps: 100": f"steps: {sizes.steps}",
        },
    )
    path.write_text(f"{text}\n{_examples(rows, prompt_column, answer_column)}", encoding="utf-8")
    load_config(path)  # what was just written has to be a valid config
    reward_file = path.parent / REWARD_FILE
    if reward.startswith(REWARD_FILE) and not reward_file.exists():
        reward_file.write_text(_REWARD_TEMPLATE, encoding="utf-8")
    return path


@dataclass(frozen=True, slots=True)
class _Sizes:
    dev: int
    test: int
    steps: int

    @classmethod
    def for_rows(cls, rows: int) -> _Sizes:
        """Up to a fifth of the rows is held out for the test and a tenth for dev; then two rounds, 20 to 200 steps.

        >>> _Sizes.for_rows(1000)
        _Sizes(dev=64, test=200, steps=200)
        >>> _Sizes.for_rows(50)
        _Sizes(dev=5, test=10, steps=20)
        """
        dev, test = min(64, rows // 10), min(200, rows // 5)
        return cls(dev, test, min(200, max(20, math.ceil(2 * (rows - dev - test) / 4))))


def _usable(rows: Sequence[Mapping[str, Any]], prompt_column: str, data_file: Path) -> int:
    usable = sum(bool(row.get(prompt_column)) for row in rows)
    if usable < 10:
        raise DataError(
            f"{data_file} has {usable} rows with a {prompt_column!r}, too few to train and test on: 10 are the least, "
            "and some hundred make sense"
        )
    return usable


def _golds(rows: Sequence[Mapping[str, Any]], answer_column: str | None) -> list[Any]:
    if answer_column is None:
        return []
    return [row[answer_column] for row in rows if row.get(answer_column) not in (None, "")]


def _reward_for(golds: Sequence[Any]) -> str:
    """`number` for numbers, `text` for short texts, and otherwise a function only the user can write."""
    if not golds:
        return f"{REWARD_FILE}:my_reward"
    if all(_is_number(gold) for gold in golds):
        return "number"
    short = all(isinstance(gold, str | int | float) and len(str(gold)) <= _SHORT_ANSWER for gold in golds)
    return "text" if short else f"{REWARD_FILE}:my_reward"


def _is_number(gold: Any) -> bool:
    if isinstance(gold, bool):
        return False
    return isinstance(gold, int | float) or (isinstance(gold, str) and bool(_NUMBER.fullmatch(gold.strip())))


def _fill_in(text: str, lines: Mapping[str, str]) -> str:
    """The template with other values; the comment of a line keeps its column where there is room."""
    for old, new in lines.items():
        assert text.count(old) == 1, f"the recipe own-task has to have {old!r} once"
        padded = re.search(re.escape(old) + " *", text)
        assert padded is not None
        gap = "  " if text[padded.end()] == "#" else ""
        width = len(padded.group())
        text = text.replace(padded.group(), new.ljust(width) if len(new) < width else new + gap)
    return text


def _quoted(value: str) -> str:
    """A YAML scalar: bare where that is safe, as JSON text otherwise (which YAML reads the same)."""
    bare = re.fullmatch(r"[A-Za-z_][\w./-]*", value) and value.lower() not in (
        "null",
        "true",
        "false",
        "yes",
        "no",
        "on",
        "off",
    )
    return value if bare else json.dumps(value, ensure_ascii=False)


def _relative(file: Path, folder: Path) -> str:
    """The data file as the config names it: short when it lies beside the config or below, else its full path."""
    file, folder = file.resolve(), folder.resolve()
    return file.relative_to(folder).as_posix() if file.is_relative_to(folder) else file.as_posix()


def _examples(rows: Sequence[Mapping[str, Any]], prompt_column: str, answer_column: str | None) -> str:
    """The first rows as comments, one line each."""
    lines = ["# The first rows:"]
    for row in rows[:3]:
        answer = f"  ->  {_short(row.get(answer_column))}" if answer_column else ""
        lines.append(f"#   {_short(row.get(prompt_column))}{answer}")
    return "\n".join(lines) + "\n"


def _short(value: Any) -> str:
    text = " ".join((value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).split())
    return text if len(text) <= 70 else text[:67] + "..."
