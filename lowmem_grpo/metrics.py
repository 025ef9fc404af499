"""What the answers of a step say about it, under the names of metrics.jsonl."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lowmem_grpo.types import ScoredGroup

__all__ = ["rollout_metrics", "telling_group"]


def rollout_metrics(
    groups: Sequence[ScoredGroup], rewards_P_G: torch.Tensor, lengths_P_G: torch.Tensor, dead_P: torch.Tensor
) -> dict[str, float]:
    """Rewards, spread, dead groups, lengths and variety of one step's answers; NaN rewards are left out.

    `groups/zero_variance` is the share of groups that teach nothing; `groups/skew` the mean third standardised moment
    of the others (positive: few right answers among wrong ones); `completion/unique` the mean share of distinct texts
    in a group. A reward function without any score has no entry.
    """
    rollouts = [rollout for group in groups for rollout in group.group.rollouts]
    texts = [[rollout.text for rollout in group.group.rollouts] for group in groups]
    metrics = {
        "groups/zero_variance": dead_P.double().mean().item(),
        "completion/length_mean": lengths_P_G.mean().item(),
        "completion/length_max": lengths_P_G.max().item(),
        "completion/truncated": sum(rollout.truncated for rollout in rollouts) / len(rollouts),
        "completion/unique": sum(len(set(group)) / len(group) for group in texts) / len(texts),
        "reward/missing": rewards_P_G.isnan().double().mean().item(),
    }
    if not rewards_P_G.isnan().all():
        metrics["reward/mean"] = rewards_P_G.nanmean().item()
        metrics["reward/within_group_std"] = _within_group_std(rewards_P_G)
    if not dead_P.all():
        metrics["groups/skew"] = _skew(rewards_P_G[~dead_P])
    return metrics | _function_means(groups)


def telling_group(
    groups: Sequence[ScoredGroup], advantages_P_G: torch.Tensor, dead_P: torch.Tensor
) -> tuple[ScoredGroup, tuple[float, ...]]:
    """The group to show a reader, with its advantages: the first that teaches something, or the first."""
    live = (~dead_P).nonzero().flatten().tolist()
    index = live[0] if live else 0
    return groups[index], tuple(advantages_P_G[index].tolist())


def _within_group_std(rewards_P_G: torch.Tensor) -> float:
    """Mean over groups of the standard deviation (ddof 0) inside a group."""
    centred_P_G = rewards_P_G - rewards_P_G.nanmean(dim=1, keepdim=True)
    return centred_P_G.square().nanmean(dim=1).sqrt().nanmean().item()


def _skew(rewards_P_G: torch.Tensor) -> float:
    centred_P_G = rewards_P_G - rewards_P_G.nanmean(dim=1, keepdim=True)
    second_P, third_P = centred_P_G.square().nanmean(dim=1), centred_P_G.pow(3).nanmean(dim=1)
    return (third_P / second_P.pow(1.5)).mean().item()


def _function_means(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    means = {}
    for label in groups[0].scores:
        scores = [score for group in groups for score in group.scores[label] if score is not None]
        if scores:
            means[f"reward/{label}"] = sum(scores) / len(scores)
    return means
