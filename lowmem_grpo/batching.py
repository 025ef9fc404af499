"""Scored groups and their advantages become packed micro-batches under a token budget.

A group lies in a micro-batch as a tree: its prompt once, behind it each beginning that answers have in common once,
then where they part. Tokens behind the last sampled one of an answer predict nothing, so of an answer of T tokens at
most T - 1 are forwarded. Answers sorted by their tokens lie next to the one they have most in common with, so each
stores what it adds to the one before, and an answer that adds nothing costs nothing. In all: P plus the tree's tokens
instead of G x P plus the sum of T_i, and no padding. A group larger than the budget is split; each part forwards the
prompt again, and the gradients of the parts add up. What each token weighs in the loss is fixed here, once, for the
whole update, so neither the cut nor the tree can change the gradient.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from lowmem_grpo.types import Group, GroupSpan, PackedMicroBatch, Problem, Rollout, ScoredGroup

__all__ = ["largest_micro_batch", "pack_groups", "rewards_tensor"]

Item = TypeVar("Item")


def rewards_tensor(groups: Sequence[ScoredGroup]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards and lengths of answers in sampled tokens (both (P, G), float64); NaN marks an answer without a reward.

    >>> rewards_tensor([])[0].shape
    torch.Size([0, 0])
    """
    if not groups:
        return torch.zeros(0, 0, dtype=torch.float64), torch.zeros(0, 0, dtype=torch.float64)
    rewards = [[float("nan") if total is None else total for total in group.totals] for group in groups]
    lengths = [[sum(rollout.sampled_T) for rollout in group.group.rollouts] for group in groups]
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(lengths, dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class _Part:
    """Answers of one group behind one copy of its prompt. `tokens` counts what is forwarded of both."""

    group: int
    answers: tuple[int, ...]
    tokens: int


def pack_groups(
    groups: Sequence[ScoredGroup],
    advantages_P_G: torch.Tensor,
    counted_P_G: torch.Tensor,
    live_P: torch.Tensor,
    weigh: Callable[[torch.Tensor], torch.Tensor],
    *,
    micro_batch_tokens: int,
    device: torch.device,
) -> list[PackedMicroBatch]:
    """Pack the live groups into micro-batches of at most `micro_batch_tokens` tokens, the largest first.

    `counted_P_G` (bool) marks answers with a reward; the others leave numerator and denominator. `live_P` (bool)
    marks groups that carry a gradient; the others are not forwarded but stay in the denominator. `weigh` maps the
    lengths of all answers (P * G,), 0 for those not counted, to the weight of each of their tokens. A prompt with one
    answer that exceeds the budget gets a micro-batch of its own, which answers that add nothing to it share. Returns []
    when nothing is live.
    """
    _, lengths_P_G = rewards_tensor(groups)
    weights_P_G = weigh((lengths_P_G * counted_P_G).flatten()).reshape(lengths_P_G.shape)
    parts = [
        part
        for p, group in enumerate(groups)
        if live_P[p] and counted_P_G[p].any()
        for part in _split_group(p, group, counted_P_G[p].nonzero().flatten().tolist(), micro_batch_tokens)
    ]
    bins = _fill_bins(parts, lambda part, _: part.tokens, micro_batch_tokens)
    bins.sort(key=lambda members: -sum(part.tokens for part in members))  # what does not fit shows at once
    return [_micro_batch(groups, members, advantages_P_G, weights_P_G, device) for members in bins]


def largest_micro_batch(
    problems: Sequence[Problem], group_size: int, answer_tokens: int, *, micro_batch_tokens: int, device: torch.device
) -> PackedMicroBatch:
    """The most that `pack_groups` puts into one micro-batch: answers of full length to `problems`, all different.

    The last answer that has room is cut so that the micro-batch is full to the token; a single prompt with its answer
    may exceed it. Advantages and weights are 1, log-probs 0.
    """
    groups: list[ScoredGroup] = []
    room = micro_batch_tokens
    for problem in problems:
        prompt = len(problem.prompt_ids)
        if groups and room <= prompt + 1:
            break
        groups.append(_filling_group(problem, group_size, answer_tokens, room - prompt))
        room -= prompt + sum(len(answer.completion_ids) - 1 for answer in groups[-1].group.rollouts)
    shape_P_G = (len(groups), group_size)
    return pack_groups(
        groups,
        torch.ones(shape_P_G, dtype=torch.float64),
        torch.ones(shape_P_G, dtype=torch.bool),
        torch.ones(len(groups), dtype=torch.bool),
        torch.ones_like,
        micro_batch_tokens=max(micro_batch_tokens, len(problems[0].prompt_ids) + answer_tokens),
        device=device,
    )[0]


def _filling_group(problem: Problem, group_size: int, answer_tokens: int, room: int) -> ScoredGroup:
    """A group of which `room` tokens of answers are forwarded, or one answer of full length if that is more.

    An answer's last token is not forwarded, and answers differ from their first token on, so none shares anything; the
    answers that have no room left are of one token.
    """
    longest, lengths = answer_tokens - 1, [answer_tokens]
    room -= longest
    for _ in range(group_size - 1):
        lengths.append(1 + max(0, min(longest, room)))
        room -= lengths[-1] - 1
    answers = tuple(
        Rollout((number,) * length, (True,) * length, (0.0,) * length, "length", "")
        for number, length in enumerate(lengths)
    )
    return ScoredGroup(Group(problem, answers), {}, (1.0,) * group_size, (None,) * group_size)


def _split_group(index: int, group: ScoredGroup, answers: Sequence[int], budget: int) -> Iterator[_Part]:
    """The answers in as few parts as fit the budget with a prompt each, those that begin alike together."""
    prompt = len(group.group.problem.prompt_ids)
    forwarded = {g: _forwarded(group.group.rollouts[g]) for g in answers}

    def added(g: int, members: Sequence[int]) -> int:
        shared = max((_common(forwarded[g], forwarded[other]) for other in members), default=0)
        return len(forwarded[g]) - shared

    for members in _fill_bins(answers, added, budget - prompt):
        members.sort(key=lambda g: forwarded[g], reverse=True)  # the longer of two that begin alike comes first
        tokens = sum(added(g, members[:place]) for place, g in enumerate(members))
        yield _Part(index, tuple(members), prompt + tokens)


def _forwarded(answer: Rollout) -> tuple[int, ...]:
    """The tokens of an answer that something is predicted from: those before its last sampled one."""
    return answer.completion_ids[: max((t for t, sampled in enumerate(answer.sampled_T) if sampled), default=0)]


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many tokens two sequences begin with in common."""
    shorter = min(len(one), len(other))
    return bisect.bisect_left(range(shorter), True, key=lambda t: one[: t + 1] != other[: t + 1])


def _fill_bins(items: Sequence[Item], added: Callable[[Item, Sequence[Item]], int], capacity: int) -> list[list[Item]]:
    """The largest item first, each into the bin with room to which it adds least, the first of equals.

    `added` says how much an item adds to the items of a bin, its own size where there are none. An oversized item goes
    alone, but for those that add nothing to it. Where nothing is shared this is first-fit decreasing.
    """
    bins: list[list[Item]] = []
    room: list[int] = []
    for item in sorted(items, key=lambda item: -added(item, ())):  # stable: equal sizes keep their order
        sizes = [added(item, members) for members in bins]
        fitting = [b for b, size in enumerate(sizes) if size <= max(room[b], 0)]
        if fitting:
            chosen = min(fitting, key=lambda b: sizes[b])
            bins[chosen].append(item)
            room[chosen] -= sizes[chosen]
        else:
            bins.append([item])
            room.append(capacity - added(item, ()))
    return bins


def _micro_batch(
    groups: Sequence[ScoredGroup],
    parts: Sequence[_Part],
    advantages_P_G: torch.Tensor,
    weights_P_G: torch.Tensor,
    device: torch.device,
) -> PackedMicroBatch:
    rows = tuple((part.group, g) for part in parts for g in part.answers)
    answers = [groups[p].group.rollouts[g] for p, g in rows]
    ids: list[int] = []
    spans: list[GroupSpan] = []
    predictors: list[int] = []
    for part in parts:
        group = groups[part.group].group
        span = _lay_out(group.problem.prompt_ids, [group.rollouts[g] for g in part.answers], ids, predictors)
        spans.append(span)
    mask_BT, sampler_logprobs_BT = _rows(answers)
    index_B_2 = torch.tensor(rows)
    advantages_B, weights_B = (
        values_P_G[index_B_2[:, 0], index_B_2[:, 1]] for values_P_G in (advantages_P_G, weights_P_G)
    )
    positions = [position for span in spans for position in span.position_ids()]
    targets = [
        token
        for answer in answers
        for token, sampled in zip(answer.completion_ids, answer.sampled_T, strict=True)
        if sampled
    ]
    return PackedMicroBatch(
        input_ids_N=torch.tensor(ids, device=device),
        position_ids_N=torch.tensor(positions, device=device),
        spans=tuple(spans),
        predictors_M=torch.tensor(predictors, device=device),
        targets_M=torch.tensor(targets, device=device),
        mask_BT=mask_BT.to(device),
        advantages_BT=(advantages_B[:, None] * mask_BT).to(device),
        weights_BT=(weights_B[:, None] * mask_BT).to(device),
        sampler_logprobs_BT=sampler_logprobs_BT.to(device),
        rows=rows,
    )


def _lay_out(prompt_ids: Sequence[int], answers: Sequence[Rollout], ids: list[int], predictors: list[int]) -> GroupSpan:
    """Append a part to `ids`: the prompt, then what each answer adds to the path before it.

    `predictors` gets where the hidden state lies that predicts each sampled token, answer by answer. Equal beginnings
    are found between neighbours only, so all of them where the answers are sorted.
    """
    start = len(ids)
    ids += prompt_ids
    shared_lengths: list[int] = []
    own_lengths: list[int] = []
    path_ids: tuple[int, ...] = ()
    path: list[int] = []
    for answer in answers:
        forwarded = _forwarded(answer)
        shared = _common(path_ids, forwarded)
        if own := len(forwarded) - shared:
            shared_lengths.append(shared)
            own_lengths.append(own)
            path_ids, path = forwarded, [*path[:shared], *range(len(ids), len(ids) + own)]
            ids += forwarded[shared:]
        before = [start + len(prompt_ids) - 1, *path]
        predictors += [before[t] for t, sampled in enumerate(answer.sampled_T) if sampled]
    return GroupSpan(start, len(prompt_ids), tuple(own_lengths), tuple(shared_lengths))


def _rows(answers: Sequence[Rollout]) -> tuple[torch.Tensor, torch.Tensor]:
    """The mask of sampled tokens and the sampler's log-probs, (B, T), right-padded."""
    shape = (len(answers), max(len(answer.completion_ids) for answer in answers))
    mask_BT, logprobs_BT = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.float64)
    for b, answer in enumerate(answers):
        mask_BT[b, : len(answer.sampled_T)] = torch.tensor(answer.sampled_T)
        logprobs_BT[b, : len(answer.sampled_T)] = torch.tensor(answer.sampler_logprobs_T, dtype=torch.float64)
    return mask_BT, logprobs_BT
