"""The update against its naive twin: every answer alone, all logits, plain autograd, one backward."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lowmem_grpo import attention
from lowmem_grpo.model import Policy
from lowmem_grpo.types import PackedMicroBatch, ScoredGroup
from tests.helpers import (
    RecordingSGD,
    adapted_layers,
    assert_gradients_close,
    gradients_of,
    group_of,
    naive_logprobs,
    pack,
    random_groups,
    tiny_policy,
    updater_of,
)
from tests.tiny import FAMILIES

MAX_NEW_TOKENS = 8
TEMPERATURE = 0.7
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def naive_weight(aggregation: str, length: int, lengths: Sequence[int]) -> float:
    """What one token of an answer of `length` counts, among all scored answers of the update."""
    return {
        "grpo": 1 / len(lengths) / length,
        "dapo": 1 / sum(lengths),
        "dr_grpo": 1 / len(lengths) / MAX_NEW_TOKENS,
    }[aggregation]


def scored_answers(groups: Sequence[ScoredGroup]) -> list[tuple[tuple[int, int], float, float]]:
    """((group, answer), advantage, length) of every answer with a reward, advantages by the textbook."""
    found = []
    for p, group in enumerate(groups):
        known = [reward for reward in group.totals if reward is not None]
        mean = sum(known) / len(known)
        sd = math.sqrt(sum((reward - mean) ** 2 for reward in known) / (len(known) - 1))
        for g, reward in enumerate(group.totals):
            if reward is not None:
                length = len(group.group.rollouts[g].completion_ids)
                found.append(((p, g), (reward - mean) / (sd + 1e-4) if sd else 0.0, length))
    return found


def naive_loss(
    policy: Policy,
    groups: Sequence[ScoredGroup],
    *,
    aggregation: str = "dapo",
    kl_coef: float = 0.0,
    loss: str = "clip",
    clip: tuple[float, float] = (0.2, 0.2),
    old: dict[tuple[int, int], Tensor] | None = None,
) -> Tensor:
    """The whole objective with its graph, row by row, token by token."""
    answers = scored_answers(groups)
    lengths = [length for _, _, length in answers]
    terms = []
    for (p, g), advantage, length in answers:
        prompt, completion = groups[p].group.problem.prompt_ids, groups[p].group.rollouts[g].completion_ids
        logprobs_T = naive_logprobs(policy, prompt, completion, TEMPERATURE, grad=True)
        with policy.model.disable_adapter():
            reference_T = naive_logprobs(policy, prompt, completion, TEMPERATURE) if kl_coef else logprobs_T
        difference_T = logprobs_T - (logprobs_T.detach() if old is None else old[p, g])
        if loss == "gspo":
            difference_T = difference_T.mean().expand(length)
        for t in range(length):
            ratio = difference_T[t].exp()
            clipped = ratio.clamp(1 - clip[0], 1 + clip[1])
            token = -torch.minimum(ratio * advantage, clipped * advantage)
            if kl_coef:
                gap = reference_T[t] - logprobs_T[t]
                token = token + kl_coef * (gap.exp() - gap - 1)
            terms.append(naive_weight(aggregation, length, lengths) * token)
    return torch.stack(terms).sum()


def naive_gradients(
    policy: Policy, groups: Sequence[ScoredGroup], **options: object
) -> tuple[float, dict[str, Tensor]]:
    parameters = policy.trainable_parameters()
    loss = naive_loss(policy, groups, **options)  # type: ignore[arg-type]
    return loss.item(), dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


@pytest.fixture(scope="module", params=FAMILIES)
def policy64(request: pytest.FixtureRequest) -> Policy:
    return tiny_policy(request.param, torch.float64)


@pytest.fixture(scope="module")
def llama64() -> Policy:
    return tiny_policy("llama", torch.float64)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("checkpointing", [True, False])
def test_gradients_of_every_lora_weight_equal_the_twin(family: str, dtype: torch.dtype, checkpointing: bool) -> None:
    policy = tiny_policy(family, dtype, checkpointing=checkpointing)
    groups = random_groups()
    loss, expected = naive_gradients(policy, groups)
    assert len(expected) == 2 * adapted_layers(family)
    updater = updater_of(policy)
    assert_gradients_close(gradients_of(updater, pack(groups, micro_batch_tokens=10)), expected, TOLERANCE[dtype])
    metrics = updater.update(pack(groups), 0)
    assert metrics["optim/loss"] == pytest.approx(loss, abs=1e-6)
    norm = math.sqrt(sum(gradient.square().sum().item() for gradient in expected.values()))
    assert metrics["optim/grad_norm"] == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_with_an_untied_head_equal_the_twin(family: str) -> None:
    policy, groups = tiny_policy(family, torch.float64, tied=False), random_groups()
    _, expected = naive_gradients(policy, groups)
    assert_gradients_close(gradients_of(updater_of(policy), pack(groups)), expected, 1e-10)


@pytest.mark.parametrize("aggregation", ["grpo", "dapo", "dr_grpo"])
def test_aggregations_equal_the_twin(llama64: Policy, aggregation: str) -> None:
    groups = random_groups()
    loss, expected = naive_gradients(llama64, groups, aggregation=aggregation)
    micro_batches = pack(groups, aggregation=aggregation, micro_batch_tokens=10, max_new_tokens=MAX_NEW_TOKENS)
    updater = updater_of(llama64)
    assert_gradients_close(gradients_of(updater, micro_batches), expected, 1e-10)
    assert updater.update(micro_batches, 0)["optim/loss"] == pytest.approx(loss, abs=1e-12)


REWARDS = [(0.0, 2.0, 0.0), (0.5, 0.5, 0.5), (1.0, None, 0.0), (3.0, 1.0, 2.0)]
"""The second teaches nothing, and one answer of the third has no reward."""


def varied_groups(seed: int) -> list[ScoredGroup]:
    """One to three groups of three answers, everything about them drawn; the first always teaches."""
    draw = random.Random(seed)
    rewards = [(1.0, 0.0, 0.25), *(draw.choice(REWARDS) for _ in range(draw.randint(0, 2)))]
    ids = lambda shortest, longest: [draw.randint(5, 259) for _ in range(draw.randint(shortest, longest))]  # noqa: E731
    return [group_of(ids(2, 8), [ids(1, 9) for _ in range(3)], rewards_G) for rewards_G in rewards]


@functools.cache
def twin_of(family: str, seed: int) -> tuple[Policy, dict[str, Tensor]]:
    """A policy and its naive gradients on `varied_groups`: the twin is slow, and no cut changes it."""
    policy = tiny_policy(family, torch.float64)
    return policy, naive_gradients(policy, varied_groups(seed))[1]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 3),
    budget=st.integers(1, 90),
    tile_tokens=st.one_of(st.integers(1, 15), st.integers(1, 300)),
    chunk=st.integers(1, 40),
    flipped=st.booleans(),
)
def test_no_cut_no_tile_no_chunk_and_no_order_changes_the_gradient(
    monkeypatch: pytest.MonkeyPatch, family: str, seed: int, budget: int, tile_tokens: int, chunk: int, flipped: bool
) -> None:
    monkeypatch.setattr(attention, "TILE_TOKENS", tile_tokens)
    groups = varied_groups(seed)[:: -1 if flipped else 1]
    policy, expected = twin_of(family, seed)
    micro_batches = pack(groups, micro_batch_tokens=budget)
    assert_gradients_close(gradients_of(updater_of(policy, head_chunk_tokens=chunk), micro_batches), expected, 1e-10)
    forwarded = sorted(row for micro in micro_batches for row in micro.rows)
    assert forwarded == [
        (p, g)
        for p, group in enumerate(groups)
        for g, reward in enumerate(group.totals)
        if reward is not None and len(set(group.totals)) > 1
    ]


# Answers that begin alike.

ALIKE = [
    (30, 31, 32, 2),
    (30, 31, 33, 34, 2),
    (30, 31, 32, 2),  # as the first
    (50, 51, 52, 53, 54, 55, 2),
    (30, 31),  # the beginning of others
    (2,),
    (30, 40, 2),
    (30, 40, 41, 42, 43),
    (50, 2),
]
"""One or more of each kind: equal answers, one the beginning of another, nothing in common, forks within forks."""


def alike_groups() -> list[ScoredGroup]:
    """`ALIKE` behind a prompt longer than the tiny models' windows, and mostly answers of one token behind another."""
    rewards = [1.0, 0.0, 0.25, 2.0, -1.0, 0.5, 0.75, 1.5, 0.0]
    second = [(30, 31, 2), (30, 31, 2), (31, 30, 31), *[(2,), (3,)] * 3]
    return [group_of((11, 12, 13, 14, 15, 16), ALIKE, rewards), group_of((30, 31), second, rewards)]


def naive_entropy(policy: Policy, prompt: Sequence[int], completion: Sequence[int]) -> Tensor:
    with torch.no_grad():
        logits_T_V = policy.model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
    logprobs_T_V = torch.log_softmax(logits_T_V / TEMPERATURE, dim=-1)
    return -(logprobs_T_V.exp() * logprobs_T_V).sum(-1)


@pytest.mark.parametrize("budget", [6, 13, 200])
@pytest.mark.parametrize("tile_tokens", [1, 9, 256])
def test_log_probs_and_entropies_of_answers_that_begin_alike(
    monkeypatch: pytest.MonkeyPatch, policy64: Policy, budget: int, tile_tokens: int
) -> None:
    monkeypatch.setattr(attention, "TILE_TOKENS", tile_tokens)
    groups = alike_groups()
    rows = []
    for micro in pack(groups, micro_batch_tokens=budget):
        with torch.no_grad():
            logprobs_BT, entropy_BT = policy64.logprobs(micro, temperature=TEMPERATURE, head_chunk_tokens=4)
        for b, (p, g) in enumerate(micro.rows):
            prompt, completion = groups[p].group.problem.prompt_ids, groups[p].group.rollouts[g].completion_ids
            expected = (
                naive_logprobs(policy64, prompt, completion, TEMPERATURE),
                naive_entropy(policy64, prompt, completion),
            )
            for found_BT, expected_T in zip((logprobs_BT, entropy_BT), expected, strict=True):
                torch.testing.assert_close(found_BT[b, : len(completion)], expected_T, rtol=0, atol=1e-11)
                assert not found_BT[b, len(completion) :].any()
        rows += micro.rows
    assert sorted(rows) == [(p, g) for p, group in enumerate(groups) for g in range(len(group.totals))]


@functools.cache
def alike_twin(family: str, kl_coef: float) -> tuple[float, dict[str, Tensor]]:
    return naive_gradients(tiny_policy(family, torch.float64), alike_groups(), kl_coef=kl_coef)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_gradients_of_answers_that_begin_alike_equal_the_twin(
    monkeypatch: pytest.MonkeyPatch, family: str, checkpointing: bool, kl_coef: float
) -> None:
    loss, expected = alike_twin(family, kl_coef)
    policy = tiny_policy(family, torch.float64, checkpointing=checkpointing)
    updater = updater_of(policy, kl_coef=kl_coef)
    for budget, tile_tokens in ((200, 256), (13, 5)):
        monkeypatch.setattr(attention, "TILE_TOKENS", tile_tokens)
        micro_batches = pack(alike_groups(), micro_batch_tokens=budget)
        assert len(micro_batches) == (1 if budget == 200 else 4)
        assert_gradients_close(gradients_of(updater, micro_batches), expected, 1e-10)
        assert updater.update(micro_batches, 0)["optim/loss"] == pytest.approx(loss, abs=1e-11)


def test_answers_that_begin_alike_give_the_same_bits_again() -> None:
    policy, micro_batches = tiny_policy("gemma2"), pack(alike_groups(), micro_batch_tokens=30)
    first, second = (gradients_of(updater_of(policy), micro_batches) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def forked_groups(seed: int) -> list[ScoredGroup]:
    """One or two groups of four answers of three different tokens, so that they fork in every way."""
    draw = random.Random(seed)
    ids = lambda shortest, longest: [draw.choice((30, 31, 32)) for _ in range(draw.randint(shortest, longest))]  # noqa: E731
    return [group_of(ids(1, 6), [ids(1, 9) for _ in range(4)], (1.0, 0.0, 0.25, 3.0)) for _ in range(1 + seed % 2)]


@functools.cache
def forked_twin(family: str, seed: int) -> tuple[Policy, dict[str, Tensor]]:
    policy = tiny_policy(family, torch.float64)
    return policy, naive_gradients(policy, forked_groups(seed))[1]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 7),
    budget=st.integers(1, 50),
    tile_tokens=st.one_of(st.integers(1, 15), st.just(256)),
    chunk=st.integers(1, 20),
)
def test_no_fork_changes_the_gradient(
    monkeypatch: pytest.MonkeyPatch, family: str, seed: int, budget: int, tile_tokens: int, chunk: int
) -> None:
    monkeypatch.setattr(attention, "TILE_TOKENS", tile_tokens)
    policy, expected = forked_twin(family, seed)
    micro_batches = pack(forked_groups(seed), micro_batch_tokens=budget)
    assert_gradients_close(gradients_of(updater_of(policy, head_chunk_tokens=chunk), micro_batches), expected, 1e-10)


# How often a token is forwarded. Prompts of 3, 1 and 6 tokens, each recognised by its first.

PROMPTS = ((201, 202, 203), (211,), (221, 222, 223, 224, 225, 226))
LENGTHS = ((4, 2, 6), (3, 3, 2), (5, 1, 3))


def forwarded_ids(policy: Policy, micro_batches: Sequence[PackedMicroBatch], **changes: object) -> list[list[int]]:
    """The tokens of every forward of one update."""
    seen: list[list[int]] = []
    embeddings = policy.model.get_base_model().get_input_embeddings()
    handle = embeddings.register_forward_pre_hook(lambda _module, args: seen.append(args[0].flatten().tolist()))
    updater_of(policy, **changes).update(micro_batches, 0)
    handle.remove()
    return seen


@pytest.mark.parametrize(
    ("budget", "sizes", "times"),
    [
        # All tokens of an answer but its last: 3 + 3 + 1 + 5, 1 + 2 + 2 + 1 and 6 + 4 + 0 + 2 tokens.
        (64, [30], (1, 1, 1)),
        (12, [12, 12, 6], (1, 1, 1)),  # each group fits: each prompt once
        (9, [10, 9, 8, 6, 6], (2, 1, 2)),  # 6 + 4 + 0, 3 + 5 + 1, 6 + 2, 3 + 3, 1 + 5
        (1, [10, 8, 8, 6, 4, 3, 3, 2], (3, 3, 2)),
    ],
)
def test_a_prompt_is_forwarded_once_in_each_micro_batch_that_holds_its_answers(
    budget: int, sizes: list[int], times: tuple[int, ...]
) -> None:
    # Answer g begins with the token 20 + 10 g.
    groups = [
        group_of(prompt, [range(20 + 10 * g, 20 + 10 * g + n) for g, n in enumerate(lengths)], (0.0, 1.0, 2.0))
        for prompt, lengths in zip(PROMPTS, LENGTHS, strict=True)
    ]
    micro_batches = pack(groups, micro_batch_tokens=budget)
    policy = tiny_policy()
    forwards = forwarded_ids(policy, micro_batches)
    assert [len(ids) for ids in forwards] == sizes
    for prompt, expected in zip(PROMPTS, times, strict=True):
        for token in prompt:
            counts = [ids.count(token) for ids in forwards]
            assert max(counts) == 1, "twice within one micro-batch"
            assert sum(counts) == expected
    # Every answer is there once, but for the one of a single token, which nothing is predicted from.
    assert [sum(ids.count(first) for ids in forwards) for first in (20, 30, 40)] == [3, 2, 3]
    # The reference forwards the same once more, not the prompts alone or twice.
    both = forwarded_ids(policy, micro_batches, kl_coef=0.1)
    assert both == [ids for ids in forwards for _ in range(2)]


@pytest.mark.parametrize("seed", range(6))
def test_what_is_forwarded_are_the_nodes_of_the_tree_of_all_answers(seed: int) -> None:
    groups = forked_groups(seed)
    forwards = forwarded_ids(tiny_policy(), pack(groups, micro_batch_tokens=1000))
    beginnings = {
        (p, rollout.completion_ids[:length])
        for p, group in enumerate(groups)
        for rollout in group.group.rollouts
        for length in range(1, len(rollout.completion_ids))
    }
    prompts = sum(len(group.group.problem.prompt_ids) for group in groups)
    assert sum(map(len, forwards)) == prompts + len(beginnings)
    whole = sum(len(rollout.completion_ids) - 1 for group in groups for rollout in group.group.rollouts)
    assert len(beginnings) < whole, "something must be shared"


@pytest.mark.parametrize("checkpointing", [True, False])
def test_checkpointing_recomputes_each_layer_and_changes_nothing(llama64: Policy, checkpointing: bool) -> None:
    policy = tiny_policy("llama", torch.float64, checkpointing=checkpointing)
    micro_batches = pack(random_groups(), micro_batch_tokens=10)
    assert len(micro_batches) == 3
    forwards = [0, 0]

    def count(layer: int) -> None:
        forwards[layer] += 1

    for index, layer in enumerate(policy.model.get_base_model().get_decoder().layers):
        # Inside the layer, because hooks of the layer itself stay outside its checkpoint.
        layer.self_attn.register_forward_pre_hook(lambda *_, index=index: count(index))
    gradients = gradients_of(updater_of(policy), micro_batches)
    assert forwards == [len(micro_batches) * (2 if checkpointing else 1)] * 2
    assert_gradients_close(gradients, gradients_of(updater_of(llama64), micro_batches), 1e-12)


def test_dead_groups_change_nothing_whether_skipped_or_not(llama64: Policy) -> None:
    groups = random_groups()
    skipped, kept = pack(groups), pack(groups, skip_dead=False)
    assert [sum(len(micro.rows) for micro in cut) for cut in (skipped, kept)] == [6, 9]
    expected = gradients_of(updater_of(llama64), kept)
    assert_gradients_close(gradients_of(updater_of(llama64), skipped), expected, 1e-10)


def test_an_answer_without_a_reward_leaves_numerator_and_denominator(llama64: Policy) -> None:
    whole = group_of((40, 41), [(5, 6, 7), (8, 2), (9, 10, 11, 2)], (1.0, None, -1.0))
    without = group_of((40, 41), [(5, 6, 7), (9, 10, 11, 2)], (1.0, -1.0))
    for aggregation in ("grpo", "dapo", "dr_grpo"):
        loss, expected = naive_gradients(llama64, [whole], aggregation=aggregation)
        for group in (whole, without):
            micro_batches = pack([group], aggregation=aggregation, max_new_tokens=MAX_NEW_TOKENS)
            assert sorted(len(micro.rows) for micro in micro_batches) == [2]
            updater = updater_of(llama64)
            assert_gradients_close(gradients_of(updater, micro_batches), expected, 1e-10)
            assert updater.update(micro_batches, 0)["optim/loss"] == pytest.approx(loss, abs=1e-12)


def test_kl_to_the_reference_equals_the_twin(policy64: Policy) -> None:
    groups = random_groups()
    loss, expected = naive_gradients(policy64, groups, kl_coef=0.3)
    plain, _ = naive_gradients(policy64, groups)
    micro_batches = pack(groups, skip_dead=False, micro_batch_tokens=10)
    updater = updater_of(policy64, kl_coef=0.3)
    assert_gradients_close(gradients_of(updater, micro_batches), expected, 1e-10)
    metrics = updater.update(micro_batches, 0)
    assert metrics["optim/loss"] == pytest.approx(loss, abs=1e-12)
    # dapo: the loss adds kl_coef times the mean over tokens, which is the metric.
    assert metrics["policy/kl"] == pytest.approx((loss - plain) / 0.3, rel=1e-9)
    assert metrics["policy/kl"] > 1e-3


@pytest.mark.parametrize(("loss", "clip"), [("clip", (0.2, 0.28)), ("gspo", (0.05, 0.08))])
def test_a_second_use_compares_with_the_log_probs_of_the_first(loss: str, clip: tuple[float, float]) -> None:
    policy, groups = tiny_policy("qwen3", torch.float64), random_groups()
    before = {name: parameter.detach().clone() for name, parameter in policy.trainable_parameters().items()}
    old = {
        (p, g): naive_logprobs(policy, group.group.problem.prompt_ids, rollout.completion_ids, TEMPERATURE)
        for p, group in enumerate(groups)
        for g, rollout in enumerate(group.group.rollouts)
    }
    _, first = naive_gradients(policy, groups, loss=loss, clip=clip)
    updater = updater_of(
        policy,
        lr=0.05,
        loss=loss,
        loss_options={"clip_low": clip[0], "clip_high": clip[1]},
        updates_per_rollout=2,
    )
    metrics = updater.update(pack(groups, micro_batch_tokens=10), 0)
    optimizer = updater.optimizer
    assert isinstance(optimizer, RecordingSGD)
    assert_gradients_close(optimizer.gradients[0], first, 1e-10)
    with torch.no_grad():
        for name, parameter in policy.trainable_parameters().items():
            parameter.copy_(before[name] - 0.05 * first[name])
    policy.refresh_adapter()
    second_loss, second = naive_gradients(policy, groups, loss=loss, clip=clip, old=old)
    assert len(optimizer.gradients) == 2
    assert_gradients_close(optimizer.gradients[1], second, 1e-9)
    assert metrics["optim/loss"] == pytest.approx(second_loss, abs=1e-10)
    assert metrics["policy/clip_low"] + metrics["policy/clip_high"] > 0, "some tokens must be clipped"


def test_the_first_use_of_clip_and_gspo_is_one_gradient(llama64: Policy) -> None:
    # All ratios are 1, and T tokens times the mean of T gradients is their sum.
    groups = random_groups()
    clip = gradients_of(updater_of(llama64, loss="clip"), pack(groups))
    assert_gradients_close(gradients_of(updater_of(llama64, loss="gspo"), pack(groups)), clip, 1e-10)
