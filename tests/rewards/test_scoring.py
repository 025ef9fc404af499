"""Scoring given answers: groups, order, JSON, and the rows that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lowmem_grpo.advantages import ESTIMATORS
from lowmem_grpo.errors import DataError
from lowmem_grpo.rewards import RewardSpec, Rubric, score_completions


def score(rows: list[Any], *specs: RewardSpec, **options: Any) -> dict[str, Any]:
    with Rubric(specs or [RewardSpec("number")], base_dir=Path("/")) as rubric:
        return score_completions(rubric, rows, estimator=ESTIMATORS["dr_grpo"], **options)


def test_groups_by_problem_in_the_order_read() -> None:
    rows = [
        {"problem_id": "a", "completion": "7", "answer": 7},
        {"problem_id": "b", "completion": "1", "answer": 1},
        {"problem_id": "a", "completion": "8", "answer": 7},
        {"problem_id": "b", "completion": "1.0", "answer": 1},
        {"problem_id": "a", "completion": [{"role": "assistant", "content": "9"}], "answer": 7},
        {"problem_id": "c", "completion": "5", "answer": "???"},
    ]
    result = score(rows, RewardSpec("number", weight=3.0))
    assert [row["problem_id"] for row in result["rows"]] == ["a", "b", "a", "b", "a", "c"]
    assert [row["rewards"]["number"] for row in result["rows"]] == [1.0, 1.0, 0.0, 1.0, 0.0, None]
    assert [row["reward"] for row in result["rows"]] == [3.0, 3.0, 0.0, 3.0, 0.0, None]
    assert [row["advantage"] for row in result["rows"]] == [2.0, 0.0, -1.0, 0.0, -1.0, None]
    assert [row["error"] for row in result["rows"]] == [None] * 6
    assert result["groups"] == [
        {"problem_id": "a", "answers": 3, "mean": 1.0, "std": pytest.approx(2**0.5), "zero_variance": False},
        {"problem_id": "b", "answers": 2, "mean": 3.0, "std": 0.0, "zero_variance": True},
        {"problem_id": "c", "answers": 1, "mean": None, "std": None, "zero_variance": True},
    ]
    number = result["functions"]["number"]
    assert (number["mean"], number["std"], number["failures"]) == (0.6, pytest.approx(0.24**0.5), 0)
    json.dumps(result, allow_nan=False)


def test_rows_of_a_run_are_grouped_by_step_and_by_prompt() -> None:
    rows = [
        {"step": 1, "prompt": "1+1", "completion": "2", "answer": 2, "reward": 0.3, "tokens": 4},
        {"step": 2, "prompt": "1+1", "completion": "3", "answer": 2, "reward": 0.1, "tokens": 9},
        {"step": 1, "prompt": "1+1", "completion": "4", "answer": 2, "reward": 0.2, "tokens": 4},
    ]
    result = score(rows)
    assert [group["answers"] for group in result["groups"]] == [2, 1]
    assert [row["problem_id"] for row in result["rows"]] == ["prompt-1", "prompt-2", "prompt-1"]
    assert [row["advantage"] for row in result["rows"]] == [0.5, None, -0.5]


def test_lengths_and_missing_rewards_reach_the_estimator() -> None:
    seen: list[tuple[list[Any], list[Any]]] = []

    def estimator(rewards_P_G: torch.Tensor, lengths_P_G: torch.Tensor) -> torch.Tensor:
        seen.append((rewards_P_G.isnan().tolist(), lengths_P_G.tolist()))
        return torch.zeros_like(rewards_P_G)

    rows = [{"prompt": "q", "completion": "x", "completion_ids": [1] * n} for n in (9, 10, 0)]
    with Rubric([RewardSpec("length", args={"max_tokens": 10, "cache": 2})], base_dir=Path("/")) as rubric:
        result = score_completions(rubric, rows, estimator=estimator)
    assert [row["reward"] for row in result["rows"]] == [-0.5, -1.0, None]
    assert seen == [([[False, False, True]], [[9, 10, 1]])]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "q", "text": "x"}, "line 12 has no completion; it has prompt, text"),
        ({"prompt": "q", "completion": None}, "line 12 has no completion"),
        ({"prompt": "q", "completion": 7}, "line 12: completion is 7, not text or a list of messages"),
        ({"completion": "x"}, "line 12 has neither problem_id nor prompt"),
        ({"prompt": 3, "completion": "x"}, "line 12: prompt is 3, not text or a list of messages"),
        ("x", "line 12 holds 'x', not an object"),
        ({"prompt": "a", "completion": "x", "answer": 2}, "line 12: answer is 2 but 1 in line 10 of the same problem"),
    ],
)
def test_rows_that_cannot_be_used_name_their_line(row: Any, words: str) -> None:
    with pytest.raises(DataError) as caught:
        score([{"prompt": "a", "completion": "x", "answer": 1}, row], lines=[10, 12])
    assert words in str(caught.value)


def test_a_missing_column_is_refused() -> None:
    with pytest.raises(DataError) as caught:
        score([{"prompt": "q", "completion": "7", "gold": 7, "level": 1}])
    assert str(caught.value) == (
        "reward 'number' needs the column 'answer'; besides prompt and completion the rows have gold, level"
    )


def test_no_rows_are_refused() -> None:
    with pytest.raises(DataError, match="there are no rows to score"):
        score([])
