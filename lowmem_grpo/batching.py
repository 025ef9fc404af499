"""Scored groups and their advantages become micro-batches of rows under a token budget.

This is the plain form: one answer per row, its prompt in front of it. What each token weighs in the loss is fixed
here, once, for the whole update, so the cut into micro-batches cannot change the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from lowmem_grpo.types import PackedMicroBatch, Rollout, ScoredGroup

__all__ = ["pack_rows", "rewards_tensor"]


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


def pack_rows(
    groups: Sequence[ScoredGroup],
    advantages_P_G: torch.Tensor,
    counted_P_G: torch.Tensor,
    live_P: torch.Tensor,
    weigh: Callable[[torch.Tensor], torch.Tensor],
    *,
    micro_batch_tokens: int,
    pad_id: int,
    device: torch.device,
) -> list[PackedMicroBatch]:
    """Pack the live groups, longest rows first, so that rows x longest row stays under `micro_batch_tokens`.

    `counted_P_G` (bool) marks answers with a reward; the others leave numerator and denominator. `live_P` (bool)
    marks groups that carry a gradient; the others are not forwarded but stay in the denominator. `weigh` maps the
    lengths of all answers (P * G,), 0 for those not counted, to the weight of each of their tokens. A row longer
    than the budget gets a micro-batch of its own. Returns [] when nothing is live.
    """
    _, lengths_P_G = rewards_tensor(groups)
    weights_P_G = weigh((lengths_P_G * counted_P_G).flatten()).reshape(lengths_P_G.shape)
    chosen = [
        (p, g)
        for p, group in enumerate(groups)
        for g in range(len(group.group.rollouts))
        if live_P[p] and counted_P_G[p, g]
    ]
    row_length = {
        (p, g): len(groups[p].group.problem.prompt_ids) + len(groups[p].group.rollouts[g].completion_ids)
        for p, g in chosen
    }
    chosen.sort(key=lambda row: -row_length[row])  # stable: equal lengths keep their order
    return [
        _micro_batch(groups, rows, advantages_P_G, weights_P_G, pad_id=pad_id, device=device)
        for rows in _cut(chosen, row_length, micro_batch_tokens)
    ]


def _cut(
    rows: Sequence[tuple[int, int]], row_length: dict[tuple[int, int], int], budget: int
) -> Iterator[list[tuple[int, int]]]:
    """Consecutive rows, sorted by falling length, whose padded size fits the budget; at least one row each."""
    start = 0
    while start < len(rows):
        size = max(1, budget // row_length[rows[start]])
        yield list(rows[start : start + size])
        start += size


def _micro_batch(
    groups: Sequence[ScoredGroup],
    rows: Sequence[tuple[int, int]],
    advantages_P_G: torch.Tensor,
    weights_P_G: torch.Tensor,
    *,
    pad_id: int,
    device: torch.device,
) -> PackedMicroBatch:
    prompts = [groups[p].group.problem.prompt_ids for p, _ in rows]
    answers: list[Rollout] = [groups[p].group.rollouts[g] for p, g in rows]
    shape = (len(rows), max(len(q) + len(a.completion_ids) for q, a in zip(prompts, answers, strict=True)))
    input_ids_BT = torch.full(shape, pad_id, dtype=torch.long)
    attention_mask_BT = torch.zeros(shape, dtype=torch.long)
    completion_mask_BT = torch.zeros(shape, dtype=torch.bool)
    sampler_logprobs_BT = torch.zeros(shape, dtype=torch.float64)
    for b, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        start, end = len(prompt), len(prompt) + len(answer.completion_ids)
        input_ids_BT[b, :end] = torch.tensor([*prompt, *answer.completion_ids])
        attention_mask_BT[b, :end] = 1
        completion_mask_BT[b, start:end] = torch.tensor(answer.sampled_T)
        sampler_logprobs_BT[b, start:end] = torch.tensor(answer.sampler_logprobs_T, dtype=torch.float64)
    index = torch.tensor(rows)
    advantages_B = advantages_P_G[index[:, 0], index[:, 1]]
    weights_B = weights_P_G[index[:, 0], index[:, 1]]
    return PackedMicroBatch(
        input_ids_BT=input_ids_BT.to(device),
        attention_mask_BT=attention_mask_BT.to(device),
        position_ids_BT=(attention_mask_BT.cumsum(dim=1) - 1).clamp(min=0).to(device),
        completion_mask_BT=completion_mask_BT.to(device),
        advantages_BT=(advantages_B[:, None] * completion_mask_BT).to(device),
        weights_BT=(weights_B[:, None] * completion_mask_BT).to(device),
        sampler_logprobs_BT=sampler_logprobs_BT.to(device),
        rows=tuple(rows),
    )
