"""The gate at work: the base answers training prompts as the run would, and `lowmem_grpo.gate` judges the answers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from lowmem_grpo.advantages import ESTIMATORS, is_dead_P
from lowmem_grpo.assembly import Parts, Preflight, sampling_params
from lowmem_grpo.batching import rewards_tensor
from lowmem_grpo.gate import GateReport, GateSample, GateSettings, crossed_groups, enough, judge
from lowmem_grpo.metrics import telling_group
from lowmem_grpo.model import Policy
from lowmem_grpo.rewards import REWARDS, AnswerChecker, RewardSpec, Rubric
from lowmem_grpo.sinks import Sink
from lowmem_grpo.types import Group, Problem, ScoredGroup

__all__ = ["ROUND_PROMPTS", "ask_gate"]

ROUND_PROMPTS = 16
"""Prompts sampled before the gate looks whether it has seen enough."""

CROSSED_LIMIT_S = 60.0
"""Rewards that took longer than this are not called a second time for the comparison with other golds."""


def ask_gate(checked: Preflight, parts: Parts, sinks: Sink) -> GateReport:
    """Sample the base on the problems that training begins with, in rounds, until the forecast is good enough.

    At most `gate.prompts` problems. Raises RewardFailed when a reward fails on everything.
    """
    scored: list[ScoredGroup] = []
    seconds = 0.0
    for number, problems in enumerate(_rounds(parts, checked.config.gate.prompts), 1):
        scored += _sample_round(checked, parts, sinks, number, problems)
        seconds += _reward_seconds(checked)
        if number == 1:
            _show_sample(checked, sinks, scored)
        if enough(rewards_tensor(scored)[0], checked.config.rollout.group_size):
            break
    settings = _settings(checked, scored)
    crossed: list[ScoredGroup] = []
    if settings.gold_columns and seconds < CROSSED_LIMIT_S:
        others = crossed_groups([group.group for group in scored], settings.gold_columns)
        crossed = checked.rubric.score(others) if others else []
    sample = GateSample(tuple(scored), parts.policy.end_ids, _special_tokens(parts.policy))
    return judge(sample, settings, crossed=crossed)


def _rounds(parts: Parts, most: int) -> Iterator[Sequence[Problem]]:
    """The first `most` training problems (at least one, none twice) in the order of the run, a round at a time."""
    epoch = itertools.chain.from_iterable(parts.stream.at(step) for step in range(parts.stream.steps_per_epoch))
    problems = itertools.islice(epoch, most)
    while batch := tuple(itertools.islice(problems, ROUND_PROMPTS)):
        yield batch


def _sample_round(
    checked: Preflight, parts: Parts, sinks: Sink, number: int, problems: Sequence[Problem]
) -> list[ScoredGroup]:
    groups: list[Group] = parts.eval_engine.generate(
        problems,
        checked.config.rollout.group_size,
        sampling_params(checked.config),
        step=-number,  # noise that no step of the run uses
        on_progress=lambda done, total, tokens: sinks.progress("gate", done, total, f"round {number}, {tokens} tokens"),
    )
    return checked.rubric.score(groups)


def _reward_seconds(checked: Preflight) -> float:
    return sum(function["seconds"] or 0.0 for function in checked.rubric.statistics().values())


def _show_sample(checked: Preflight, sinks: Sink, scored: Sequence[ScoredGroup]) -> None:
    rewards_P_G, lengths_P_G = rewards_tensor(scored)
    estimate = ESTIMATORS[checked.config.algorithm.advantage]
    advantages_P_G = estimate(rewards_P_G, lengths_P_G, **checked.advantage_options)
    sinks.sample(0, *telling_group(scored, advantages_P_G, is_dead_P(rewards_P_G)))


def _settings(checked: Preflight, scored: Sequence[ScoredGroup]) -> GateSettings:
    config = checked.config
    needed = checked.rubric.needed_columns()
    return GateSettings(
        group_size=config.rollout.group_size,
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        top_k=config.rollout.top_k,
        min_p=config.rollout.min_p,
        thinking=config.data.thinking,
        system_prompt=config.data.system_prompt,
        best_reward=checked.rubric.best_total,
        gold_columns=frozenset().union(*needed.values()),
        lenient=_read_leniently(checked, scored),
        asked_forms=checked.rubric.asked_forms(),
    )


def _read_leniently(checked: Preflight, scored: Sequence[ScoredGroup]) -> tuple[float, str] | None:
    """The share of answers that are right read leniently, and the override that reads them so.

    Of the first reward that asks for the answer in a strict form; None where reading leniently finds no more of them.
    """
    for index, reward in enumerate(checked.config.rewards):
        checker = REWARDS[reward.name](**reward.args) if reward.name in REWARDS else None
        if isinstance(checker, AnswerChecker) and checker.mode == "strict":
            spec = RewardSpec(reward.name, args={**reward.args, "mode": "lenient"}, timeout_s=reward.timeout_s)
            with Rubric([spec], base_dir=checked.base_dir) as rubric:
                lenient = [total for group in rubric.score([g.group for g in scored]) for total in group.totals]
            strict = [score for group in scored for score in group.scores[checked.rubric.labels[index]]]
            if lenient.count(1.0) > strict.count(1.0):
                return lenient.count(1.0) / len(lenient), f"rewards.{index}.args.mode=lenient"
    return None


def _special_tokens(policy: Policy) -> dict[int, str]:
    """The tokenizer's special tokens by id."""
    decoder = policy.tokenizer.added_tokens_decoder
    return {token_id: token.content for token_id, token in decoder.items() if token.special}
