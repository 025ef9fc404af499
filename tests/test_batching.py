"""Micro-batches: which groups, how they are cut, where each token lies and what it weighs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

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


def targets_of(micro: PackedMicroBatch) -> dict[tuple[int, int], list[int]]:
    """(group, answer) -> its sampled tokens."""
    lengths_B = micro.mask_BT.sum(1).tolist()
    return {row: ids.tolist() for row, ids in zip(micro.rows, micro.targets_M.split(lengths_B), strict=True)}


def nodes_of(answers: Iterable[Sequence[int]]) -> int:
    """Nodes of the tree of all answers without their last tokens: the different beginnings of at least one token."""
    return len({tuple(answer[:length]) for answer in answers for length in range(1, len(answer))})


def test_rewards_and_lengths() -> None:
    rewards_P_G, lengths_P_G = rewards_tensor(GROUPS)
    assert (rewards_P_G.dtype, lengths_P_G.dtype) == (torch.float64, torch.float64)
    assert rewards_P_G[0, :3].tolist() == [1.0, 0.0, 0.5]
    assert math.isnan(rewards_P_G[0, 3])
    assert rewards_P_G[1].tolist() == [0.0, 0.0, 0.0, 1.0]
    assert lengths_P_G.tolist() == [[3, 1, 2, 1], [5, 1, 2, 2]]


def test_a_micro_batch_by_hand() -> None:
    [micro] = packed([FIRST], budget=1000)
    # By falling tokens but the last, 10 before 7 8 before nothing; the answer without a reward is left out.
    assert micro.rows == ((0, 2), (0, 0), (0, 1))
    assert micro.spans == (GroupSpan(0, 2, (1, 2), (0, 0)),)
    assert micro.input_ids_N.tolist() == [5, 6, 10, 7, 8]
    assert micro.position_ids_N.tolist() == [0, 1, 2, 2, 3]
    assert micro.predictors_M.tolist() == [1, 2, 1, 3, 4, 1]  # token 1 ends the prompt and predicts all first tokens
    assert micro.targets_M.tolist() == [10, 2, 7, 8, 2, 9]
    assert micro.mask_BT.tolist() == [[True, True, False], [True, True, True], [True, False, False]]
    assert micro.advantages_BT.tolist() == [[2, 2, 0], [0, 0, 0], [1, 0, 0]]
    third = pytest.approx(1 / 3)
    assert [row.tolist() for row in micro.weights_BT] == [[third, third, 0], [third, third, third], [third, 0, 0]]
    assert micro.sampler_logprobs_BT.tolist() == [[-0.5, -0.6, 0], [-0.1, -0.2, -0.3], [-0.4, 0, 0]]


def test_the_example_of_the_packed_micro_batch() -> None:
    [micro] = packed([group_of((5, 6), [(7, 8, 2), (7, 2), (2,)], (0.0, 1.0, 2.0))], budget=1000)
    assert micro.input_ids_N.tolist() == [5, 6, 7, 8]
    assert micro.position_ids_N.tolist() == [0, 1, 2, 3]
    assert micro.spans == (GroupSpan(0, 2, (2,), (0,)),)
    assert micro.mask_BT.int().tolist() == [[1, 1, 1], [1, 1, 0], [1, 0, 0]]
    assert micro.predictors_M.tolist() == [1, 2, 3, 1, 2, 1]
    assert micro.targets_M.tolist() == [7, 8, 2, 7, 2, 2]


def test_two_groups_lie_behind_one_another() -> None:
    [micro] = packed(GROUPS, budget=1000)
    # The larger group first: 1 + 6 and 2 + 3 tokens.
    assert micro.spans == (GroupSpan(0, 1, (1, 1, 4), (0, 0, 0)), GroupSpan(7, 2, (1, 2), (0, 0)))
    assert micro.input_ids_N.tolist() == [11, 17, 16, 12, 13, 14, 15, 5, 6, 10, 7, 8]
    assert micro.position_ids_N.tolist() == [0, 1, 1, 1, 2, 3, 4, 0, 1, 2, 2, 3]
    assert micro.rows == ((1, 3), (1, 2), (1, 0), (1, 1), (0, 2), (0, 0), (0, 1))
    assert micro.predictors_M.tolist() == [0, 1, 0, 2, 0, 3, 4, 5, 6, 0, 8, 9, 8, 10, 11, 8]


FORKS = group_of(
    (5, 6),
    [(30, 31, 32, 2), (30, 31, 2), (30, 31, 33, 34, 2), (30, 40, 2), (50, 2), (30, 31, 32, 2), (2,), (30, 40, 41)],
    [float(g) for g in range(8)],
)


def test_forks_by_hand() -> None:
    """From the highest tokens down: 50, then 30 40, then 30 [31 33 34], then 30 31 [32]."""
    [micro] = packed([FORKS], budget=1000)
    assert micro.rows == ((0, 4), (0, 3), (0, 7), (0, 2), (0, 0), (0, 5), (0, 1), (0, 6))
    assert micro.input_ids_N.tolist() == [5, 6, 50, 30, 40, 31, 33, 34, 32]
    assert micro.position_ids_N.tolist() == [0, 1, 2, 2, 3, 3, 4, 5, 4]
    assert micro.spans == (GroupSpan(0, 2, (1, 2, 3, 1), (0, 0, 1, 2)),)
    assert [ids.tolist() for ids in micro.predictors_M.split(micro.mask_BT.sum(1).tolist())] == [
        [1, 2],
        [1, 3, 4],
        [1, 3, 4],
        [1, 3, 5, 6, 7],
        [1, 3, 5, 8],
        [1, 3, 5, 8],
        [1, 3, 5],
        [1],
    ]
    assert targets_of(micro) == {(0, g): list(r.completion_ids) for g, r in enumerate(FORKS.group.rollouts)}


def test_a_split_keeps_together_what_begins_alike() -> None:
    cut = packed([FORKS], budget=6)
    # 30 31 33 34 fills the first, and 30 31 adds nothing to it; to 30 31 32 adds 30 40 one token; 50 is left.
    assert [micro.input_ids_N.tolist() for micro in cut] == [
        [5, 6, 30, 31, 33, 34],
        [5, 6, 30, 40, 31, 32],
        [5, 6, 50],
    ]
    assert [[g for _, g in micro.rows] for micro in cut] == [[2, 1, 6], [3, 7, 0, 5], [4]]


def test_an_answer_above_the_budget_takes_along_what_adds_nothing() -> None:
    group = group_of((5, 6), [(7, 8, 9, 2), (7, 8, 9, 3), (7, 2), (4,), (7, 8, 10, 2)], [0.0, 1.0, 2.0, 3.0, 4.0])
    cut = packed([group], budget=3)
    assert [micro.input_ids_N.tolist() for micro in cut] == [[5, 6, 7, 8, 9], [5, 6, 7, 8, 10]]
    assert [[g for _, g in micro.rows] for micro in cut] == [[0, 1, 2, 3], [4]]


def test_answers_of_one_token_forward_the_prompt_alone() -> None:
    [micro] = packed([group_of((5, 6), [(7,), (8,), (7,)], (0.0, 1.0, 2.0))], budget=1000)
    assert micro.input_ids_N.tolist() == [5, 6]
    assert micro.spans == (GroupSpan(0, 2, (), ()),)
    assert micro.predictors_M.tolist() == [1, 1, 1]
    assert micro.targets_M.tolist() == [7, 8, 7]


def test_tokens_the_policy_did_not_sample_are_forwarded_and_not_scored() -> None:
    # As a tool's output in the middle of an answer will be: it is read, but the policy did not write it. What comes
    # behind the last token that the policy wrote is read by nobody.
    group = group_of((5, 6), [(7, 8, 9, 2), (2,), (7, 8, 3, 4)], (1.0, 0.0, 0.5))
    tool = Rollout((7, 8, 9, 2), (True, False, False, True), (-0.1, 0.0, 0.0, -0.4), "end", "")
    ended_by_tool = Rollout((7, 8, 3, 4), (True, True, False, False), (-0.1, -0.2, 0.0, 0.0), "end", "")
    rollouts = (tool, group.group.rollouts[1], ended_by_tool)
    group = replace(group, group=replace(group.group, rollouts=rollouts))
    [micro] = packed([group], budget=1000)
    assert micro.rows == ((0, 0), (0, 2), (0, 1))
    assert micro.input_ids_N.tolist() == [5, 6, 7, 8, 9]
    assert micro.predictors_M.tolist() == [1, 4, 1, 2, 1]
    assert micro.targets_M.tolist() == [7, 2, 7, 8, 2]
    assert micro.mask_BT.int().tolist() == [[1, 0, 0, 1], [1, 1, 0, 0], [1, 0, 0, 0]]


def test_an_answer_of_which_nothing_was_sampled_has_a_row_and_no_token() -> None:
    group = group_of((5, 6), [(7, 2), (8, 9)], (1.0, 0.0))
    forced = Rollout((8, 9), (False, False), (0.0, 0.0), "end", "")
    [micro] = packed([replace(group, group=replace(group.group, rollouts=(group.group.rollouts[0], forced)))], 1000)
    assert micro.input_ids_N.tolist() == [5, 6, 7]
    assert micro.mask_BT.int().tolist() == [[1, 1], [0, 0]]


def test_padding_is_told_from_an_end_token_of_the_same_id() -> None:
    [micro] = pack([group_of((40,), [(5, 6, 2), (5, 6, 7, 8, 9)], (1.0, 0.0))], micro_batch_tokens=100)
    assert micro.input_ids_N.tolist() == [40, 5, 6, 7, 8]
    assert micro.mask_BT.int().tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]


@pytest.mark.parametrize(
    ("budget", "cut"),
    [
        (1000, [[(1, 1, 1, 4), (2, 1, 2)]]),
        (12, [[(1, 1, 1, 4), (2, 1, 2)]]),
        (11, [[(1, 1, 1, 4)], [(2, 1, 2)]]),
        (6, [[(1, 1, 4)], [(2, 1, 2)], [(1, 1)]]),
        (5, [[(1, 4)], [(2, 1, 2)], [(1, 1, 1)]]),
        (4, [[(1, 4)], [(2, 2)], [(2, 1)], [(1, 1, 1)]]),
        # A prompt with one answer above the budget goes alone; an answer of one token adds nothing to it.
        (1, [[(1, 4)], [(2, 2)], [(2, 1)], [(1, 1)], [(1, 1)]]),
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


TREES = st.lists(
    st.tuples(
        st.integers(1, 6),
        # Few different tokens, so that answers begin alike in every way.
        st.lists(st.lists(st.sampled_from([30, 31, 32]), min_size=1, max_size=9), min_size=3, max_size=3),
    ),
    min_size=1,
    max_size=5,
)


@given(trees=TREES, budget=st.integers(1, 60))
def test_no_answer_is_lost_doubled_or_over_the_budget(trees: list[tuple[int, list[list[int]]]], budget: int) -> None:
    groups = [group_of(range(40, 40 + prompt), answers, [0.0, 1.0, 2.0]) for prompt, answers in trees]
    micro_batches = pack(groups, micro_batch_tokens=budget)
    found = [item for micro in micro_batches for item in targets_of(micro).items()]
    expected = {(p, g): answer for p, (_, answers) in enumerate(trees) for g, answer in enumerate(answers)}
    assert len(found) == len(expected) and dict(found) == expected
    sizes = [len(micro.input_ids_N) for micro in micro_batches]
    assert sizes == sorted(sizes, reverse=True), "the largest comes first: what does not fit shows at once"
    for micro in micro_batches:
        answers = [expected[row] for row in micro.rows]
        of_groups = {p: [a for (q, _), a in zip(micro.rows, answers, strict=True) if p == q] for p, _ in micro.rows}
        # Each prompt once, and each node of the tree of its answers once.
        tokens = sum(trees[p][0] + nodes_of(its) for p, its in of_groups.items())
        assert len(micro.input_ids_N) == sum(span.tokens for span in micro.spans) == tokens
        assert len(micro.spans) == len(of_groups)
        # Above the budget goes one answer alone, with what adds nothing to it.
        assert tokens <= budget or (len(of_groups) == 1 and nodes_of(answers) == max(map(len, answers)) - 1)
    assert sum(micro.weights_BT.sum().item() for micro in micro_batches) == pytest.approx(1.0)


@given(trees=TREES, budget=st.integers(1, 60))
def test_each_token_is_predicted_behind_just_what_stands_before_it(
    trees: list[tuple[int, list[list[int]]]], budget: int
) -> None:
    groups = [group_of(range(40, 40 + prompt), answers, [0.0, 1.0, 2.0]) for prompt, answers in trees]
    for micro in pack(groups, micro_batch_tokens=budget):
        before: dict[int, list[int]] = {}
        for span, (p, _) in zip(micro.spans, dict.fromkeys((p, None) for p, _ in micro.rows), strict=True):
            before[span.start + span.prompt_length - 1] = list(groups[p].group.problem.prompt_ids)
            end = span.start + span.prompt_length
            for prefix, own in zip(span.prefixes(), span.answer_lengths, strict=True):
                path = [i for part in (*prefix, range(end, end + own)) for i in part]
                assert micro.position_ids_N[path].tolist() == list(range(len(path)))
                before |= {i: micro.input_ids_N[path[: n + 1]].tolist() for n, i in enumerate(path) if i >= end}
                end += own
        expected = [
            [*groups[p].group.problem.prompt_ids, *groups[p].group.rollouts[g].completion_ids[:t]]
            for p, g in micro.rows
            for t in range(len(groups[p].group.rollouts[g].completion_ids))
        ]
        assert [before[i] for i in micro.predictors_M.tolist()] == expected


def test_an_order_of_answers_changes_the_order_of_rows_alone() -> None:
    flipped = replace(FORKS.group, rollouts=FORKS.group.rollouts[::-1])
    [one], [other] = packed([FORKS], 1000), packed([replace(FORKS, group=flipped)], 1000)
    assert torch.equal(one.input_ids_N, other.input_ids_N)
    assert torch.equal(one.predictors_M, other.predictors_M)
    assert one.spans == other.spans
