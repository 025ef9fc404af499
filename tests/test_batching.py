"""Micro-batches: which groups, how they are cut, where each token lies and what it weighs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowmem_grpo.batching import pack_groups, rewards_tensor
from lowmem_grpo.types import GroupSpan, PackedMicroBatch, Rollout, ScoredGroup
from tests.helpers import group_of, pack

# A prompt of 2 with answers of 3, 1, 2 and 1 (the last without a reward); a prompt of 1 with answers of 5, 1, 2 and 2.
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
    return pack_groups(
        groups,
        **values,
        weigh=lambda lengths_R: (lengths_R > 0) / (lengths_R > 0).sum(),
        micro_batch_tokens=budget,
        device=torch.device("cpu"),
    )


def tokens_of(micro: PackedMicroBatch) -> dict[tuple[int, int], list[int]]:
    """(group, answer) -> its tokens, read back from the packed sequence by its spans."""
    found, rows = {}, iter(micro.rows)
    for span in micro.spans:
        start = span.start + span.prompt_length
        for length in span.answer_lengths:
            found[next(rows)] = micro.input_ids_N[start : start + length].tolist()
            start += length
    return found


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
    assert micro.spans == (GroupSpan(0, 2, (3, 2, 1)),)
    assert micro.input_ids_N.tolist() == [5, 6, 7, 8, 2, 10, 2, 9]
    assert micro.position_ids_N.tolist() == [0, 1, 2, 3, 4, 2, 3, 2]
    assert micro.predictors_M.tolist() == [1, 2, 3, 1, 5, 1]  # token 1 ends the prompt and predicts all first tokens
    assert micro.targets_M.tolist() == [7, 8, 2, 10, 2, 9]
    assert micro.mask_BT.tolist() == [[True, True, True], [True, True, False], [True, False, False]]
    assert micro.advantages_BT.tolist() == [[0, 0, 0], [2, 2, 0], [1, 0, 0]]
    third = pytest.approx(1 / 3)
    assert [row.tolist() for row in micro.weights_BT] == [[third, third, third], [third, third, 0], [third, 0, 0]]
    assert micro.sampler_logprobs_BT.tolist() == [[-0.1, -0.2, -0.3], [-0.5, -0.6, 0], [-0.4, 0, 0]]


def test_two_groups_lie_behind_one_another() -> None:
    [micro] = packed(GROUPS, budget=1000)
    assert micro.spans == (GroupSpan(0, 1, (5, 2, 2, 1)), GroupSpan(11, 2, (3, 2, 1)))  # the larger group first
    assert micro.input_ids_N.tolist() == [11, 12, 13, 14, 15, 2, 16, 2, 17, 2, 2, 5, 6, 7, 8, 2, 10, 2, 9]
    assert micro.position_ids_N.tolist() == [0, 1, 2, 3, 4, 5, 1, 2, 1, 2, 1, 0, 1, 2, 3, 4, 2, 3, 2]
    assert micro.rows == ((1, 0), (1, 2), (1, 3), (1, 1), (0, 0), (0, 2), (0, 1))
    assert micro.predictors_M.tolist() == [0, 1, 2, 3, 4, 0, 6, 0, 8, 0, 12, 13, 14, 12, 16, 12]


def test_tokens_the_policy_did_not_sample_are_forwarded_and_not_scored() -> None:
    # As a tool's output in the middle of an answer will be: it is read, but the policy did not write it.
    group = group_of((5, 6), [(7, 8, 9, 2), (2,)], (1.0, 0.0))
    tool = Rollout((7, 8, 9, 2), (True, False, False, True), (-0.1, 0.0, 0.0, -0.4), "end", "")
    group = ScoredGroup(
        type(group.group)(group.group.problem, (tool, group.group.rollouts[1])), {}, (1.0, 0.0), (None, None)
    )
    [micro] = packed([group], budget=1000)
    assert micro.input_ids_N.tolist() == [5, 6, 7, 8, 9, 2, 2]
    assert micro.predictors_M.tolist() == [1, 4, 1]
    assert micro.targets_M.tolist() == [7, 2, 2]
    assert micro.mask_BT.tolist() == [[True, False, False, True], [True, False, False, False]]


def test_padding_is_told_from_an_end_token_of_the_same_id() -> None:
    [micro] = pack([group_of((40,), [(5, 6, 2), (5, 6, 7, 8, 9)], (1.0, 0.0))], micro_batch_tokens=100)
    assert micro.input_ids_N.tolist() == [40, 5, 6, 7, 8, 9, 5, 6, 2]
    assert micro.mask_BT.int().tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]


@pytest.mark.parametrize(
    ("budget", "cut"),
    [
        (1000, [[(1, 5, 2, 2, 1), (2, 3, 2, 1)]]),
        (19, [[(1, 5, 2, 2, 1), (2, 3, 2, 1)]]),
        (18, [[(1, 5, 2, 2, 1)], [(2, 3, 2, 1)]]),
        (10, [[(1, 5, 2, 2)], [(2, 3, 2, 1), (1, 1)]]),  # 10 tokens, and 8 + 2
        (8, [[(1, 5, 2)], [(2, 3, 2, 1)], [(1, 2, 1)]]),
        (6, [[(1, 5)], [(2, 3, 1)], [(1, 2, 2, 1)], [(2, 2)]]),
        # A prompt with one answer above the budget goes alone.
        (1, [[(1, 5)], [(2, 3)], [(2, 2)], [(1, 2)], [(1, 2)], [(2, 1)], [(1, 1)]]),
    ],
)
def test_the_cut_by_hand(budget: int, cut: list[list[tuple[int, ...]]]) -> None:
    found = [[(s.prompt_length, *s.answer_lengths) for s in micro.spans] for micro in packed(GROUPS, budget)]
    sizes = [len(micro.input_ids_N) for micro in packed(GROUPS, budget)]
    assert sizes == sorted(sizes, reverse=True)
    assert sorted(map(sorted, found)) == sorted(map(sorted, cut))


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
        st.tuples(st.integers(1, 6), st.lists(st.integers(1, 9), min_size=3, max_size=3)), min_size=1, max_size=5
    ),
    budget=st.integers(1, 60),
)
def test_no_answer_is_lost_doubled_or_over_the_budget(lengths: list[tuple[int, list[int]]], budget: int) -> None:
    groups = [
        group_of(range(20, 20 + prompt), [[10 * p + g] * n for g, n in enumerate(answers)], [0.0, 1.0, 2.0])
        for p, (prompt, answers) in enumerate(lengths)
    ]
    micro_batches = pack(groups, micro_batch_tokens=budget)
    found = [item for micro in micro_batches for item in tokens_of(micro).items()]
    expected = {
        (p, g): list(rollout.completion_ids)
        for p, group in enumerate(groups)
        for g, rollout in enumerate(group.group.rollouts)
    }
    assert len(found) == len(expected) and dict(found) == expected
    sizes = [len(micro.input_ids_N) for micro in micro_batches]
    assert sizes == sorted(sizes, reverse=True), "the largest comes first: what does not fit shows at once"
    for micro in micro_batches:
        assert len(micro.input_ids_N) == sum(span.tokens for span in micro.spans)
        assert len(micro.input_ids_N) <= budget or len(micro.rows) == 1
        # A prompt is in a micro-batch once, however many of its answers are.
        assert len(micro.spans) == len({p for p, _ in micro.rows})
    assert sum(micro.weights_BT.sum().item() for micro in micro_batches) == pytest.approx(1.0)
