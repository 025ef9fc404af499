"""The batched sampler against its naive twin: one answer at a time, the whole sequence forwarded for every token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from lowmem_grpo.model import Policy
from lowmem_grpo.rollout import BatchEngine
from lowmem_grpo.types import Group, Problem, SamplingParams
from tests.helpers import END_IDS, naive_logprobs, problems_of, tiny_policy
from tests.rollout.test_sampling import uniform_twin
from tests.tiny import FAMILIES

PROBLEMS = problems_of((40, 41, 42), (50, 51, 52, 53, 54, 55, 56), (60,), (40, 41, 42))
GROUP_SIZE = 3
SEED, STEP = 5, 9
SAMPLINGS = {
    "plain": SamplingParams(max_new_tokens=7),
    "filters": SamplingParams(max_new_tokens=7, temperature=0.7, top_k=40, top_p=0.9, min_p=0.02),
    "greedy": SamplingParams(max_new_tokens=7, temperature=0.0),
}


def naive_draw(logits_V: torch.Tensor, uniform: float, sampling: SamplingParams) -> tuple[int, float]:
    """One token and its log-prob, by sorting and walking along the probabilities."""
    if sampling.temperature == 0:
        token = max(range(len(logits_V)), key=logits_V.tolist().__getitem__)
        return token, torch.log_softmax(logits_V, 0)[token].item()
    logprobs = torch.log_softmax(logits_V.double() / sampling.temperature, 0)
    probabilities = logprobs.exp().tolist()
    ranked = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])
    kept = set(ranked[: sampling.top_k or None])
    kept -= {token for token in kept if probabilities[token] < sampling.min_p * max(probabilities)}
    total = sum(probabilities[token] for token in kept)
    running = 0.0
    for token in [token for token in ranked if token in kept]:
        if sampling.top_p < 1 and running >= sampling.top_p * total:
            kept.discard(token)
        running += probabilities[token]
    target = uniform * sum(probabilities[token] for token in kept)
    for token in sorted(kept):
        target -= probabilities[token]
        if target < 0:
            break
    return token, logprobs[token].item()


@torch.no_grad()
def naive_answer(policy: Policy, problem: Problem, group: int, answer: int, sampling: SamplingParams) -> list[tuple]:
    """(token, log-prob) of one answer without a cache, a batch or padding."""
    drawn: list[tuple[int, float]] = []
    while len(drawn) < sampling.max_new_tokens:
        ids = torch.tensor([[*problem.prompt_ids, *(token for token, _ in drawn)]])
        logits_V = policy.model(input_ids=ids).logits[0, -1]
        drawn.append(naive_draw(logits_V, uniform_twin(SEED, STEP, group, answer, len(drawn)), sampling))
        if drawn[-1][0] in END_IDS:
            break
    return drawn


def assert_equal_to_twin(policy: Policy, groups: Sequence[Group], sampling: SamplingParams, atol: float) -> None:
    for p, group in enumerate(groups):
        for g, rollout in enumerate(group.rollouts):
            tokens, logprobs = zip(*naive_answer(policy, group.problem, p, g, sampling), strict=True)
            assert rollout.completion_ids == tokens
            assert rollout.sampler_logprobs_T == pytest.approx(logprobs, abs=atol)
            assert rollout.stop_reason == ("end" if tokens[-1] in END_IDS else "length")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_ids_and_log_probs_equal_the_twin_in_any_schedule(family: str, name: str) -> None:
    policy, sampling = tiny_policy(family, torch.float64, end_ids=END_IDS), SAMPLINGS[name]
    whole, *cut = [
        BatchEngine(policy, seed=SEED, max_concurrent=rows).generate(PROBLEMS, GROUP_SIZE, sampling, step=STEP)
        for rows in (None, 1, 3, 5)
    ]
    assert_equal_to_twin(policy, whole, sampling, 1e-10)
    for groups in cut:
        for group, expected in zip(groups, whole, strict=True):
            for rollout, other in zip(group.rollouts, expected.rollouts, strict=True):
                assert (rollout.completion_ids, rollout.text) == (other.completion_ids, other.text)
                assert rollout.sampler_logprobs_T == pytest.approx(other.sampler_logprobs_T, abs=1e-10)
    first, *_, last = ([rollout.completion_ids for rollout in group.rollouts] for group in whole)
    assert (first == last) == (name == "greedy"), "equal prompts are two groups with their own noise"
    if name == "plain":
        assert len({len(rollout.completion_ids) for group in whole for rollout in group.rollouts}) >= 3


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", [None, 2])
def test_log_probs_in_fp32_equal_those_of_whole_rows(family: str, rows: int | None) -> None:
    policy = tiny_policy(family, end_ids=END_IDS)
    sampling = SamplingParams(max_new_tokens=7, temperature=0.7)
    groups = BatchEngine(policy, seed=SEED, max_concurrent=rows).generate(PROBLEMS, GROUP_SIZE, sampling, step=STEP)
    for group in groups:
        for rollout in group.rollouts:
            expected = naive_logprobs(policy, group.problem.prompt_ids, rollout.completion_ids, 0.7)
            assert rollout.sampler_logprobs_T == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_does_no_harm_with_eager_attention(family: str) -> None:
    policy = tiny_policy(family, end_ids=END_IDS)
    policy.model.get_base_model().set_attn_implementation("eager")
    for group in BatchEngine(policy, seed=SEED).generate(PROBLEMS, 2, SAMPLINGS["plain"], step=STEP):
        for rollout in group.rollouts:
            expected = naive_logprobs(policy, group.problem.prompt_ids, rollout.completion_ids, 1.0)
            assert rollout.sampler_logprobs_T == pytest.approx(expected.tolist(), abs=1e-4)
