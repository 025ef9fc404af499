"""Scored groups and their advantages become packed micro-batches under a token budget.

A group lies in a micro-batch as its prompt, once, with its answers behind it, so the prompt is forwarded once for all
of them: P + sum of T_i tokens instead of G x P + sum of T_i, and no padding. A group larger than the budget is split;
each part forwards the prompt again, and the gradients of the parts add up. What each token weighs in the loss is fixed
here, once, for the whole update, so the cut cannot change the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from lowmem_grpo.types import GroupSpan, PackedMicroBatch, Rollout, ScoredGroup

__all__ = ["pack_groups", "rewards_tensor"]

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
    """Answers of one group that are forwarded behind one copy of its prompt. `tokens` counts both."""

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
    answer that exceeds the budget gets a micro-batch of its own. Returns [] when nothing is live.
    """
    _, lengths_P_G = rewards_tensor(groups)
    weights_P_G = weigh((lengths_P_G * counted_P_G).flatten()).reshape(lengths_P_G.shape)
    parts = [
        part
        for p, group in enumerate(groups)
        if live_P[p] and counted_P_G[p].any()
        for part in _split_group(p, group, counted_P_G[p].nonzero().flatten().tolist(), micro_batch_tokens)
    ]
    bins = _fill_bins(parts, [part.tokens for part in parts], micro_batch_tokens)
    bins.sort(key=lambda members: -sum(part.tokens for part in members))  # what does not fit shows at once
    return [_micro_batch(groups, members, advantages_P_G, weights_P_G, device) for members in bins]


def _split_group(index: int, group: ScoredGroup, answers: Sequence[int], budget: int) -> Iterator[_Part]:
    """The answers in as few parts as fit the budget with a prompt each, the longest answers first."""
    prompt = len(group.group.problem.prompt_ids)
    lengths = [len(group.group.rollouts[g].completion_ids) for g in answers]
    for members in _fill_bins(list(zip(answers, lengths, strict=True)), lengths, budget - prompt):
        yield _Part(index, tuple(g for g, _ in members), prompt + sum(length for _, length in members))


def _fill_bins(items: Sequence[Item], sizes: Sequence[int], capacity: int) -> list[list[Item]]:
    """First-fit decreasing: the largest item first, each into the first bin with room; an oversized one goes alone."""
    bins: list[list[Item]] = []
    room: list[int] = []
    for i in sorted(range(len(items)), key=lambda i: -sizes[i]):  # stable: equal sizes keep their order
        index = next((b for b, free in enumerate(room) if sizes[i] <= free), len(bins))
        if index == len(bins):
            bins.append([])
            room.append(capacity)
        bins[index].append(items[i])
        room[index] -= sizes[i]
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
        prompt = groups[part.group].group.problem.prompt_ids
        members = [groups[part.group].group.rollouts[g] for g in part.answers]
        spans.append(GroupSpan(len(ids), len(prompt), tuple(len(answer.completion_ids) for answer in members)))
        last_of_prompt = len(ids) + len(prompt) - 1
        ids += prompt
        for answer in members:
            predictors += _predictors(answer, last_of_prompt, len(ids))
            ids += answer.completion_ids
    mask_BT, sampler_logprobs_BT = _rows(answers)
    index_B_2 = torch.tensor(rows)
    advantages_B, weights_B = (
        values_P_G[index_B_2[:, 0], index_B_2[:, 1]] for values_P_G in (advantages_P_G, weights_P_G)
    )
    positions = [position for span in spans for position in span.position_ids()]
    targets = [token for answer in answers for token, sampled in _tokens(answer) if sampled]
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


def _tokens(answer: Rollout) -> Iterator[tuple[int, bool]]:
    return zip(answer.completion_ids, answer.sampled_T, strict=True)


def _predictors(answer: Rollout, last_of_prompt: int, start: int) -> list[int]:
    """Where the hidden state lies that predicts each sampled token of an answer whose first token is at `start`."""
    return [start + t - 1 if t else last_of_prompt for t, (_, sampled) in enumerate(_tokens(answer)) if sampled]


def _rows(answers: Sequence[Rollout]) -> tuple[torch.Tensor, torch.Tensor]:
    """The mask of sampled tokens and the sampler's log-probs, (B, T), right-padded."""
    shape = (len(answers), max(len(answer.completion_ids) for answer in answers))
    mask_BT, logprobs_BT = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.float64)
    for b, answer in enumerate(answers):
        mask_BT[b, : len(answer.sampled_T)] = torch.tensor(answer.sampled_T)
        logprobs_BT[b, : len(answer.sampled_T)] = torch.tensor(answer.sampler_logprobs_T, dtype=torch.float64)
    return mask_BT, logprobs_BT
