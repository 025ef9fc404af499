from __future__ import annotations

import doctest
import json
import runpy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

import lowmem_grpo.starter
from lowmem_grpo.config import load_config
from lowmem_grpo.errors import ConfigError, DataError
from lowmem_grpo.starter import REWARD_FILE, write_starter


def data_file(folder: Path, rows: Iterable[Mapping[str, Any]], name: str = "task.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def sums(n: int, gold: Any = str) -> list[dict[str, Any]]:
    return [{"question": f"What is {i} + 2?", "output": gold(i + 2)} for i in range(n)]


def test_docstring_examples() -> None:
    result = doctest.testmod(lowmem_grpo.starter)
    assert (result.attempted, result.failed) == (2, 0)


def test_the_config_lies_beside_the_data_and_loads(tmp_path: Path) -> None:
    path = write_starter(data_file(tmp_path, sums(60)))
    config = load_config(path).config
    assert path == tmp_path / "task.yaml"
    assert (config.data.source, config.data.prompt_column, config.data.answer_column) == (
        "task.jsonl",
        "question",
        "output",
    )
    assert [reward.name for reward in config.rewards] == ["number"]
    # 60 rows: 12 to test, 6 for dev, 42 to train on; twice through them by 4 is 21 steps.
    assert (config.data.test_size, config.data.dev_size, config.run.steps) == (12, 6, 21)
    assert not (tmp_path / REWARD_FILE).exists()


def test_the_first_rows_are_shown_as_comments(tmp_path: Path) -> None:
    text = write_starter(data_file(tmp_path, sums(20))).read_text("utf-8")
    assert text.endswith(
        "# The first rows:\n#   What is 0 + 2?  ->  2\n#   What is 1 + 2?  ->  3\n#   What is 2 + 2?  ->  4\n"
    )
    assert not any(line.endswith(" ") for line in text.splitlines())


@pytest.mark.parametrize(
    ("gold", "reward"),
    [
        (str, "number"),
        (int, "number"),
        (lambda i: f"${i},000.50", "number"),
        (lambda i: f"{i} %", "number"),
        (lambda i: f"{i} apples", "text"),
        (lambda i: "yes", "text"),
        (lambda i: "x" * 81, "rewards.py:my_reward"),
        (lambda i: {"total": i}, "rewards.py:my_reward"),
        (lambda i: None, "rewards.py:my_reward"),
    ],
)
def test_the_reward_fits_the_answers(tmp_path: Path, gold: Any, reward: str) -> None:
    config = load_config(write_starter(data_file(tmp_path, sums(20, gold)))).config
    assert [entry.name for entry in config.rewards] == [reward]
    assert (tmp_path / REWARD_FILE).exists() == (reward == "rewards.py:my_reward")


def test_without_answers_a_reward_file_that_works_is_written(tmp_path: Path) -> None:
    config = load_config(write_starter(data_file(tmp_path, ({"prompt": f"p{i}"} for i in range(10))))).config
    assert config.data.answer_column is None
    my_reward = runpy.run_path(str(tmp_path / REWARD_FILE))["my_reward"]
    message = [{"role": "assistant", "content": "word " * 41}]
    assert my_reward(prompts=["p", "p"], completions=["Short.", "no stop"], extra=[1, 2]) == [1.0, 0.5]
    assert my_reward(prompts=[[]], completions=[message]) == [0.0]


def test_a_reward_file_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / REWARD_FILE).write_text("mine", encoding="utf-8")
    write_starter(data_file(tmp_path, ({"prompt": f"p{i}"} for i in range(10))))
    assert (tmp_path / REWARD_FILE).read_text("utf-8") == "mine"


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    rows = data_file(tmp_path, sums(20))
    path = write_starter(rows)
    path.write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigError, match="exists and is not overwritten"):
        write_starter(rows)
    assert path.read_text("utf-8") == "mine"


def test_a_config_elsewhere_points_to_the_data(tmp_path: Path) -> None:
    rows = data_file(tmp_path, sums(20), name="a: #b.jsonl")
    (tmp_path / "configs").mkdir()
    above = load_config(write_starter(rows, tmp_path / "configs" / "x.yaml")).config
    beside = load_config(write_starter(rows, tmp_path / "y.yaml")).config
    assert (above.data.source, beside.data.source) == (str(rows), "a: #b.jsonl")


@pytest.mark.parametrize("column", ["null", "a: b", "no", "#x", "prompt 1", "日本", "it's", '"q"'])
def test_any_column_name_survives(tmp_path: Path, column: str) -> None:
    rows = data_file(tmp_path, ({column: "text"} for _ in range(10)))
    assert load_config(write_starter(rows)).config.data.prompt_column == column


def test_what_cannot_be_started_from_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="9 rows"):
        write_starter(data_file(tmp_path, sums(9)))
    with pytest.raises(DataError, match=r"task\.json"):
        write_starter(tmp_path / "task.json")
    with pytest.raises(ConfigError, match="there is no folder"):
        write_starter(data_file(tmp_path, sums(20)), tmp_path / "nowhere" / "x.yaml")
    assert [path.name for path in tmp_path.iterdir()] == ["task.jsonl"]
