"""Micro-batches: which rows, how they are cut, padded and weighted."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowmem_grpo.batching import pack_rows, rewards_tensor
from lowmem_grpo.types import PackedMicroBatch, ScoredGroup
from tests.helpers import group_of, pack

# Rows of 5, 3, 4 and 3 tokens in the first group, of 6, 2, 3 and 3 in the second.
FIRST = group_of(
    (5, 6),
    [(7, 8, 2), (9,), (10, 2), (2,)],
    (1.0, 0.0, 0.5, None),
    logprobs=[(-0.1, -0.2, -0.3), (-0.4,), (-0.5, -0.6), (-0.7,)],
)
SECOND = group_of((11,), [(12, 13, 14, 15, 2), (2,), (16, 2), (17, 2)], (0.0, 0.0, 0.0, 1.0))
GROUPS = [FIRST, SECOND]


def packed(groups: list[ScoredGroup], budget: int, **changes: torch.Tensor) -> list[PackedMicroBatch]:
    """Micro-batches with easily recognised numbers: advantage 10 p + g, weight 1 / (number of counted answers)."""
    count = len(groups[0].totals)
    grid = torch.arange(len(groups) * 10.0, dtype=torch.float64).reshape(len(groups), 10)[:, :count]
    values = {
        "advantages_P_G": grid,
        "counted_P_G": ~rewards_tensor(groups)[0].isnan(),
        "live_P": torch.ones(len(groups), dtype=torch.bool),
    } | changes
    return pack_rows(
        groups,
        **values,
        weigh=lambda lengths_R: (lengths_R > 0) / (lengths_R > 0).sum(),
        micro_batch_tokens=budget,
        pad_id=0,
        device=torch.device("cpu"),
    )


def test_rewards_and_lengths() -> None:
    rewards_P_G, lengths_P_G = rewards_tensor(GROUPS)
    assert (rewards_P_G.dtype, lengths_P_G.dtype) == (torch.float64, torch.float64)
    assert rewards_P_G[0, :3].tolist() == [1.0, 0.0, 0.5]
    assert math.isnan(rewards_P_G[0, 3])
    assert rewards_P_G[1].tolist() == [0.0, 0.0, 0.0, 1.0]
    assert lengths_P_G.tolist() == [[3, 1, 2, 1], [5, 1, 2, 2]]


def test_a_micro_batch_by_hand() -> None:
    [micro] = packed([FIRST], budget=1000)
    assert micro.rows == ((0, 0), (0, 2), (0, 1))  # the longest first; the answer without a reward is left out
    assert micro.input_ids_BT.tolist() == [[5, 6, 7, 8, 2], [5, 6, 10, 2, 0], [5, 6, 9, 0, 0]]
    assert micro.attention_mask_BT.tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0], [1, 1, 1, 0, 0]]
    assert micro.position_ids_BT.tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 3], [0, 1, 2, 2, 2]]
    assert micro.completion_mask_BT.tolist() == [
        [False, False, True, True, True],
        [False, False, True, True, False],
        [False, False, True, False, False],
    ]
    assert micro.advantages_BT.tolist() == [[0, 0, 0, 0, 0], [0, 0, 2, 2, 0], [0, 0, 1, 0, 0]]
    third = pytest.approx(1 / 3)
    assert [row.tolist() for row in micro.weights_BT] == [
        [0, 0, third, third, third],
        [0, 0, third, third, 0],
        [0, 0, third, 0, 0],
    ]
    assert micro.sampler_logprobs_BT.tolist() == [[0, 0, -0.1, -0.2, -0.3], [0, 0, -0.5, -0.6, 0], [0, 0, -0.4, 0, 0]]


def test_padding_is_told_from_an_end_token_of_the_same_id() -> None:
    [micro] = pack([group_of((40,), [(5, 6, 2), (5, 6, 7, 8, 9)], (1.0, 0.0))], micro_batch_tokens=100)
    assert micro.input_ids_BT.tolist() == [[40, 5, 6, 7, 8, 9], [40, 5, 6, 2, 2, 2]]
    assert micro.completion_mask_BT[:, 1:].int().tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert micro.attention_mask_BT.tolist() == [[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]


@pytest.mark.parametrize(
    ("budget", "shapes"),
    [
        (1000, [(7, 6)]),
        (42, [(7, 6)]),
        (41, [(6, 6), (1, 2)]),
        (12, [(2, 6), (3, 4), (2, 3)]),
        (6, [(1, 6), (1, 5), (1, 4), (2, 3), (2, 3)]),
        (1, [(1, 6), (1, 5), (1, 4), (1, 3), (1, 3), (1, 3), (1, 2)]),  # a row above the budget goes alone
    ],
)
def test_the_cut_by_hand(budget: int, shapes: list[tuple[int, int]]) -> None:
    # Row lengths 5, 3, 4 and 6, 2, 3, 3.
    assert [tuple(micro.input_ids_BT.shape) for micro in packed(GROUPS, budget)] == shapes


def test_dead_groups_are_not_forwarded_but_count_in_the_weights() -> None:
    both = packed(GROUPS, 1000)[0]
    [live] = packed(GROUPS, 1000, live_P=torch.tensor([True, False]))
    assert {p for p, _ in live.rows} == {0}
    assert both.weights_BT.max() == live.weights_BT.max() == 1 / 7


def test_an_answer_that_is_not_counted_leaves_row_and_weight() -> None:
    counted_P_G = torch.tensor([[True, False, True, False], [True, True, True, True]])
    [micro] = packed(GROUPS, 1000, counted_P_G=counted_P_G)
    assert (0, 1) not in micro.rows and (0, 3) not in micro.rows
    assert micro.weights_BT.max().item() == pytest.approx(1 / 6)


def test_nothing_live_gives_no_micro_batch() -> None:
    assert packed(GROUPS, 1000, live_P=torch.tensor([False, False])) == []
    assert packed(GROUPS, 1000, counted_P_G=torch.zeros(2, 4, dtype=torch.bool)) == []


@pytest.mark.parametrize(
    ("aggregation", "short", "long"),
    [("grpo", 1 / 4, 1 / 16), ("dapo", 1 / 10, 1 / 10), ("dr_grpo", 1 / 20, 1 / 20)],
)
@pytest.mark.parametrize("budget", [1, 1000])
def test_token_weights_of_answers_of_2_and_8_tokens(aggregation: str, short: float, long: float, budget: int) -> None:
    group = group_of((40,), [(5, 2), (5, 6, 7, 8, 9, 10, 11, 2)], (-1.0, 1.0))
    micro_batches = pack([group], aggregation=aggregation, micro_batch_tokens=budget, max_new_tokens=10)
    rows = {row: micro.weights_BT[b] for micro in micro_batches for b, row in enumerate(micro.rows)}
    assert rows[0, 0][rows[0, 0] > 0].tolist() == pytest.approx([short] * 2)
    assert rows[0, 1][rows[0, 1] > 0].tolist() == pytest.approx([long] * 8)


@given(
    lengths=st.lists(
        st.tuples(st.integers(1, 6), st.lists(st.integers(1, 9), min_size=2, max_size=2)), min_size=1, max_size=5
    ),
    budget=st.integers(1, 60),
)
def test_no_row_is_lost_doubled_or_over_the_budget(lengths: list[tuple[int, list[int]]], budget: int) -> None:
    groups = [
        group_of(range(20, 20 + prompt), [[10 * p + g] * n for g, n in enumerate(answers)], [0.0, 1.0])
        for p, (prompt, answers) in enumerate(lengths)
    ]
    micro_batches = pack(groups, micro_batch_tokens=budget)
    rows = [row for micro in micro_batches for row in micro.rows]
    assert sorted(rows) == [(p, g) for p in range(len(groups)) for g in range(2)]
    widths = [micro.input_ids_BT.shape[1] for micro in micro_batches]
    assert widths == sorted(widths, reverse=True), "the largest comes first: what does not fit shows at once"
    for micro in micro_batches:
        height, width = micro.input_ids_BT.shape
        assert height * width <= budget or height == 1
        for b, (p, g) in enumerate(micro.rows):
            answer = groups[p].group.rollouts[g].completion_ids
            assert micro.input_ids_BT[b][micro.completion_mask_BT[b]].tolist() == list(answer)
            assert micro.attention_mask_BT[b].sum() == lengths[p][0] + len(answer)
    total = sum(micro.weights_BT.sum().item() for micro in micro_batches)
    assert total == pytest.approx(1.0)
