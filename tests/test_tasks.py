"""The built-in tasks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowmem_grpo.data import DataSpec, prepare, read_rows
from lowmem_grpo.errors import ConfigError
from lowmem_grpo.tasks import TASKS, addition
from tests.tiny import tiny_tokenizer


def operands(row: dict[str, str]) -> tuple[int, int]:
    a, b = re.fullmatch(r"What is (-?\d+) \+ (-?\d+)\? Reply with only the number\.", row["prompt"]).groups()
    return int(a), int(b)


def test_addition_has_every_unordered_pair_once() -> None:
    rows = addition(low=0, high=2, seed=0)
    assert sorted(tuple(sorted(operands(row))) for row in rows) == [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2)]


def test_addition_defaults_make_1275_rows() -> None:
    assert len(addition()) == 50 * 51 // 2
    assert TASKS["addition"] is addition


@given(low=st.integers(-5, 5), width=st.integers(0, 6), seed=st.integers(0, 9))
def test_addition_answers_are_right_and_pairs_never_repeat(low: int, width: int, seed: int) -> None:
    rows = addition(low=low, high=low + width, seed=seed)
    assert [row["answer"] for row in rows] == [str(sum(operands(row))) for row in rows]
    assert len({frozenset(operands(row)) for row in rows}) == len(rows) == (width + 1) * (width + 2) // 2


def test_the_seed_decides_the_orientation_and_nothing_else() -> None:
    first, again, other = addition(high=9, seed=1), addition(high=9, seed=1), addition(high=9, seed=2)
    assert first == again
    assert first != other
    assert [sorted(operands(row)) for row in first] == [sorted(operands(row)) for row in other]
    # 45 pairs of two different numbers: both orientations occur.
    assert {a < b for a, b in map(operands, first) if a != b} == {True, False}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"low": 5, "high": 4}, "data.args.low is 5 and above data.args.high, 4"),
        ({"low": 1.5}, r"data.args.low has to be a whole number, not 1.5"),
        ({"high": "49"}, r"data.args.high has to be a whole number, not '49'"),
        ({"seed": True}, r"data.args.seed has to be a whole number, not True"),
        ({"high": 10**9}, "more than 1,000,000 rows"),
    ],
)
def test_addition_refuses_bad_arguments(args: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        addition(**args)  # type: ignore[arg-type]


def test_splits_of_addition_are_disjoint_as_unordered_pairs() -> None:
    spec = DataSpec("addition", args={"high": 9}, dev_size=10, test_size=15)
    data = prepare(read_rows(spec, base_dir=Path()), spec, tiny_tokenizer(), needs_gold=True)
    splits = [{frozenset(operands({"prompt": p.prompt})) for p in part} for part in (data.train, data.dev, data.test)]
    assert [len(pairs) for pairs in splits] == [30, 10, 15]
    assert len(splits[0] | splits[1] | splits[2]) == 55
