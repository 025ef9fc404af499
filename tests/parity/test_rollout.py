"""The sampler against its naive twin: one answer at a time, the whole sequence forwarded for every token."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowmem_grpo.model import Policy
from lowmem_grpo.rollout import SlotEngine, engine
from lowmem_grpo.rollout.decoding import slot_shape
from lowmem_grpo.rollout.slots import SlotShape
from lowmem_grpo.types import Group, Problem, SamplingParams
from tests.helpers import END_IDS, naive_logprobs, problems_of, tiny_policy
from tests.rollout.test_sampling import uniform_twin
from tests.tiny import FAMILIES, tiny_model

PROBLEMS = problems_of((40, 41, 42), (50, 51, 52, 53, 54, 55, 56), (60,), (40, 41, 42))
GROUP_SIZE = 3
SEED, STEP = 5, 9
SAMPLINGS = {
    "plain": SamplingParams(max_new_tokens=7),
    "filters": SamplingParams(max_new_tokens=7, temperature=0.7, top_k=40, top_p=0.9, min_p=0.02),
    "greedy": SamplingParams(max_new_tokens=7, temperature=0.0),
}
DRAWS = [
    *((family, "plain") for family in FAMILIES),
    *((family, name) for family in ("llama", "gemma2") for name in ("filters", "greedy")),
]


@functools.cache
def policy_of(family: str, dtype: torch.dtype = torch.float64) -> Policy:
    return tiny_policy(family, dtype, end_ids=END_IDS)


def naive_draw(logits_V: torch.Tensor, uniform: float, sampling: SamplingParams) -> tuple[int, float]:
    """One token and its log-prob, by sorting and walking along the probabilities."""
    if sampling.temperature == 0:
        token = max(range(len(logits_V)), key=logits_V.tolist().__getitem__)
        return token, torch.log_softmax(logits_V, 0)[token].item()
    logprobs = torch.log_softmax(logits_V.double() / sampling.temperature, 0)
    probabilities = logprobs.exp().tolist()
    ranked = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])
    kept = set(ranked[: sampling.top_k or None])
    floor = sampling.min_p * max(probabilities)
    kept -= {token for token in kept if probabilities[token] < floor}
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
    """(token, log-prob) of one answer without stored keys and without neighbours."""
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


@pytest.mark.parametrize(("family", "name"), DRAWS)
def test_ids_and_log_probs_equal_the_twin_in_any_schedule(family: str, name: str) -> None:
    policy, sampling = policy_of(family), SAMPLINGS[name]
    whole, *cut = [
        SlotEngine(policy, seed=SEED, max_concurrent=rows).generate(PROBLEMS, GROUP_SIZE, sampling, step=STEP)
        for rows in (None, 1, 5)
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
@given(data=st.data())
@settings(max_examples=6)
def test_any_call_with_any_slots_equals_the_twin(family: str, data: st.DataObject) -> None:
    prompt = st.lists(st.integers(5, 259), min_size=1, max_size=12)
    problems = problems_of(*data.draw(st.lists(prompt, min_size=1, max_size=3)))
    group_size = data.draw(st.integers(1, 3))
    sampling = SamplingParams(max_new_tokens=data.draw(st.integers(1, 6)))
    max_concurrent = data.draw(st.none() | st.integers(1, 10))

    def any_shape(*args: Any) -> SlotShape:
        shape = slot_shape(*args)
        return replace(shape, prompt_slots=data.draw(st.integers(1, min(len(problems), shape.slots))))

    handed: list[tuple[int, Group]] = []
    with mock.patch.object(engine, "slot_shape", any_shape):
        groups = SlotEngine(policy_of(family), seed=SEED, max_concurrent=max_concurrent).generate(
            problems, group_size, sampling, step=STEP, on_group=lambda index, group: handed.append((index, group))
        )
    assert [group.problem for group in groups] == problems
    assert [len(group.rollouts) for group in groups] == [group_size] * len(problems)
    assert sorted(handed, key=lambda pair: pair[0]) == list(enumerate(groups))
    assert_equal_to_twin(policy_of(family), groups, sampling, 1e-10)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", [None, 2])
def test_log_probs_in_fp32_equal_those_of_whole_rows(family: str, rows: int | None) -> None:
    policy = policy_of(family, torch.float32)
    sampling = SamplingParams(max_new_tokens=7, temperature=0.7)
    groups = SlotEngine(policy, seed=SEED, max_concurrent=rows).generate(PROBLEMS, GROUP_SIZE, sampling, step=STEP)
    for group in groups:
        for rollout in group.rollouts:
            expected = naive_logprobs(policy, group.problem.prompt_ids, rollout.completion_ids, 0.7)
            assert rollout.sampler_logprobs_T == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize("family", ["gemma2", "llama"])
@pytest.mark.parametrize(("dtype", "mean_gap"), [(torch.float16, 0.005), (torch.bfloat16, 0.04)])
def test_log_probs_in_16_bits_are_those_of_whole_rows_up_to_rounding(
    family: str, dtype: torch.dtype, mean_gap: float
) -> None:
    policy = policy_of(family, dtype)
    gaps: list[float] = []
    for group in SlotEngine(policy, seed=SEED, max_concurrent=5).generate(
        PROBLEMS, GROUP_SIZE, SAMPLINGS["plain"], step=STEP
    ):
        for rollout in group.rollouts:
            expected_T = naive_logprobs(policy, group.problem.prompt_ids, rollout.completion_ids, 1.0)
            gaps += (expected_T.double() - torch.tensor(rollout.sampler_logprobs_T)).abs().tolist()
    assert 0 < sum(gaps) / len(gaps) < mean_gap


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_in_fp32_equal_those_of_the_stock_model(family: str) -> None:
    policy, stock = policy_of(family, torch.float32), tiny_model(family)
    stock.set_attn_implementation("eager")
    with policy.reference():
        groups = SlotEngine(policy, seed=SEED, max_concurrent=5).generate(
            PROBLEMS, GROUP_SIZE, SAMPLINGS["plain"], step=STEP
        )
    gaps_to_adapter = []
    for group in groups:
        for rollout in group.rollouts:
            prompt, completion = group.problem.prompt_ids, rollout.completion_ids
            ids = torch.tensor([[*prompt, *completion]])
            with torch.no_grad():
                logprobs_T_V = torch.log_softmax(stock(input_ids=ids).logits[0, len(prompt) - 1 : -1], dim=-1)
            expected_T = logprobs_T_V.gather(1, ids[0, len(prompt) :, None])[:, 0]
            assert rollout.sampler_logprobs_T == pytest.approx(expected_T.tolist(), abs=1e-4)
            gaps_to_adapter.append((naive_logprobs(policy, prompt, completion, 1.0) - expected_T).abs().max().item())
    assert max(gaps_to_adapter) > 0.1, "with the adapter it is another model, or this shows nothing"
