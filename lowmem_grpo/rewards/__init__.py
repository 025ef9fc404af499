"""Reward functions: one signature, the built-ins, user files in a worker process, and the rubric that adds them up."""

from __future__ import annotations

from lowmem_grpo.rewards.base import AnswerChecker, Mode, RewardFn, text_of
from lowmem_grpo.rewards.overlap import OverlappedScoring
from lowmem_grpo.rewards.registry import REWARDS
from lowmem_grpo.rewards.rubric import RewardSpec, Rubric
from lowmem_grpo.rewards.scoring import score_completions

__all__ = [
    "REWARDS",
    "AnswerChecker",
    "Mode",
    "OverlappedScoring",
    "RewardFn",
    "RewardSpec",
    "Rubric",
    "score_completions",
    "text_of",
]
