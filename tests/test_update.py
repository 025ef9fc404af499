"""What an update does to the weights, when it does nothing, and what it reports."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lowmem_grpo.errors import NonFiniteFailed
from lowmem_grpo.model import Policy
from lowmem_grpo.optim import build_optimizer, optimizer_state
from lowmem_grpo.rollout import SlotEngine
from lowmem_grpo.types import PackedMicroBatch, SamplingParams, ScoredGroup
from lowmem_grpo.update import Updater
from tests.helpers import (
    adapted_layers,
    gradients_of,
    group_of,
    naive_logprobs,
    pack,
    problems_of,
    random_groups,
    tiny_policy,
    updater_of,
)
from tests.tiny import FAMILIES

TEMPERATURE = 0.7


def adamw_updater(policy: Policy, lr: float = 1e-3, **changes: object) -> Updater:
    """As `updater_of`, with the optimizer of real runs."""
    updater = updater_of(policy, lr=lr, **changes)
    optimizer = build_optimizer("adamw", policy.trainable_parameters(), lr=lr, weight_decay=0.0)
    return Updater(policy, updater.settings, optimizer)


def weights_of(policy: Policy) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in policy.trainable_parameters().items()}


def bit_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def broken(micro_batches: Sequence[PackedMicroBatch]) -> list[PackedMicroBatch]:
    """The last micro-batch gets a gradient that is not a number."""
    *whole, last = micro_batches
    return [*whole, replace(last, weights_BT=last.weights_BT * math.nan)]


def sampled_groups(policy: Policy, rewards: Sequence[float], groups: int = 2) -> list[ScoredGroup]:
    """Groups answered by the live policy, each with the same rewards."""
    engine, sampling = SlotEngine(policy, seed=3), SamplingParams(8, temperature=TEMPERATURE)
    answered = engine.generate(problems_of((40, 41, 42), (60,))[:groups], len(rewards), sampling, step=1)
    return [
        ScoredGroup(group, {"reward": tuple(rewards)}, tuple(rewards), (None,) * len(rewards)) for group in answered
    ]


# The first live step.


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "gap"), [(torch.float32, 1e-4), (torch.float64, 1e-12)])
def test_the_first_live_step_moves_every_lora_b_and_agrees_with_the_sampler(
    family: str, dtype: torch.dtype, gap: float
) -> None:
    policy = tiny_policy(family, dtype, live=False)
    micro_batches = pack(sampled_groups(policy, [1.0, 0.0, 0.0, 0.0]), micro_batch_tokens=40)
    recorded = gradients_of(updater_of(policy), micro_batches)
    assert {name for name in recorded if "lora_B" in name} == {
        n for n in policy.trainable_parameters() if "lora_B" in n
    }
    assert all(recorded[name].abs().max() > 0 for name in recorded if "lora_B" in name)
    before = weights_of(policy)
    metrics = adamw_updater(policy, kl_coef=0.1).update(micro_batches, 0)
    after = weights_of(policy)
    assert sum("lora_B" in name for name in after) == adapted_layers(family)
    assert all(not torch.equal(after[name], before[name]) for name in after if "lora_B" in name)
    # While B is 0 nothing reaches A.
    assert all(torch.equal(after[name], before[name]) for name in after if "lora_A" in name)
    assert metrics["policy/sampler_gap"] <= gap
    assert metrics["policy/kl"] == 0.0
    assert (metrics["optim/lr"], metrics["optim/skipped"]) == (1e-3, 0.0)


def test_the_sampler_gap_is_the_mean_over_tokens() -> None:
    policy = tiny_policy(dtype=torch.float64)
    group = group_of((40, 41), [(5, 6, 2), (7,)], (1.0, 0.0))
    true = [naive_logprobs(policy, (40, 41), rollout.completion_ids, TEMPERATURE) for rollout in group.group.rollouts]
    shifted = [(true[0] + torch.tensor([0.3, -0.1, 0.0], dtype=torch.float64)).tolist(), (true[1] - 0.2).tolist()]
    off = group_of((40, 41), [(5, 6, 2), (7,)], (1.0, 0.0), logprobs=shifted)
    for budget in (1, 100):
        metrics = updater_of(policy).update(pack([off], micro_batch_tokens=budget), 0)
        assert metrics["policy/sampler_gap"] == pytest.approx((0.3 + 0.1 + 0.0 + 0.2) / 4, abs=1e-12)


def test_the_sampler_gap_is_that_of_the_first_use() -> None:
    policy = tiny_policy(dtype=torch.float64)
    micro_batches = pack(random_groups(policy))
    metrics = updater_of(policy, lr=0.05, updates_per_rollout=3).update(micro_batches, 0)
    assert metrics["policy/sampler_gap"] < 1e-12


def test_the_entropy_is_the_mean_over_tokens_of_the_tempered_softmax() -> None:
    policy, groups = tiny_policy(dtype=torch.float64), random_groups()[:1]
    entropies = []
    for rollout in groups[0].group.rollouts:
        prompt = groups[0].group.problem.prompt_ids
        ids = torch.tensor([[*prompt, *rollout.completion_ids]])
        with torch.no_grad():
            logits_T_V = policy.model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        entropies += torch.distributions.Categorical(logits=logits_T_V / TEMPERATURE).entropy().tolist()
    metrics = updater_of(policy).update(pack(groups, micro_batch_tokens=12), 0)
    assert len(entropies) == 12
    assert metrics["policy/entropy"] == pytest.approx(sum(entropies) / 12, abs=1e-10)


# Loss and gradient.


def test_a_loss_of_zero_still_has_a_gradient() -> None:
    policy = tiny_policy(dtype=torch.float64)
    micro_batches = pack(sampled_groups(policy, [1.0, 0.0, 0.0, 0.0]), aggregation="grpo")
    metrics = updater_of(policy).update(micro_batches, 0)
    assert abs(metrics["optim/loss"]) < 1e-12
    assert metrics["optim/grad_norm"] > 1e-2


def test_equal_rewards_teach_nothing() -> None:
    policy = tiny_policy(dtype=torch.float64)
    groups = sampled_groups(policy, [1.0, 1.0, 1.0, 1.0])
    assert pack(groups) == []
    before, updater = weights_of(policy), updater_of(policy, lr=1.0)
    metrics = updater.update(pack(groups, skip_dead=False), 0)
    assert (metrics["optim/loss"], metrics["optim/grad_norm"]) == (0.0, 0.0)
    assert bit_equal(weights_of(policy), before)


def test_the_gradient_is_clipped_by_its_norm() -> None:
    policy, micro_batches = tiny_policy(dtype=torch.float64), pack(random_groups())
    whole = gradients_of(updater_of(policy), micro_batches)
    norm = math.sqrt(sum(gradient.square().sum().item() for gradient in whole.values()))
    assert norm > 0.01
    updater = updater_of(policy, max_grad_norm=0.01)
    clipped = gradients_of(updater, micro_batches)
    for name, gradient in whole.items():
        # torch divides by the norm + 1e-6
        torch.testing.assert_close(clipped[name], gradient * 0.01 / (norm + 1e-6), rtol=1e-9, atol=0)
    assert updater.update(micro_batches, 0)["optim/grad_norm"] == pytest.approx(norm, rel=1e-12)


def test_each_use_has_its_own_learning_rate() -> None:
    policy = tiny_policy()
    rates: list[float] = []
    updater = updater_of(policy, updates_per_rollout=3, lr_of=lambda update: 0.01 * update)
    step = updater.optimizer.step
    updater.optimizer.step = lambda: rates.append(updater.optimizer.param_groups[0]["lr"]) or step()  # type: ignore
    metrics = updater.update(pack(random_groups()), 6)
    assert rates == pytest.approx([0.06, 0.07, 0.08])
    assert metrics["optim/lr"] == pytest.approx(0.08)


def test_a_step_in_sgd_goes_down_the_gradient() -> None:
    policy, micro_batches = tiny_policy(dtype=torch.float64), pack(random_groups())
    before, updater = weights_of(policy), updater_of(policy, lr=0.5)
    gradients = gradients_of(updater, micro_batches)
    for name, weight in weights_of(policy).items():
        torch.testing.assert_close(weight, before[name] - 0.5 * gradients[name], rtol=1e-12, atol=1e-15)


def test_progress_counts_micro_batches() -> None:
    seen: list[tuple[int, int]] = []
    micro_batches = pack(random_groups(), micro_batch_tokens=10)
    updater_of(tiny_policy(), updates_per_rollout=2).update(micro_batches, 0, lambda *counts: seen.append(counts))
    assert seen == [(1, 3), (2, 3), (3, 3)] * 2


def test_the_policy_is_left_ready_to_sample_and_without_gradients() -> None:
    policy = tiny_policy()
    modes: list[bool] = []
    policy.model.get_base_model().get_decoder().layers[0].self_attn.register_forward_pre_hook(
        lambda module, _args: modes.append(module.training)
    )
    updater_of(policy).update(pack(random_groups(), micro_batch_tokens=1000), 0)
    assert modes == [True, True], "forward and recomputation run in train mode"
    assert not policy.model.training
    assert all(parameter.grad is None for parameter in policy.model.parameters())


# Steps that must not happen.


@pytest.mark.parametrize("when", ["first", "later"])
def test_a_non_finite_gradient_is_skipped_bit_for_bit(when: str) -> None:
    policy, micro_batches = tiny_policy(), pack(random_groups(), micro_batch_tokens=24)
    updater = adamw_updater(policy)
    if when == "later":
        updater.update(micro_batches, 0)
    before, state = weights_of(policy), optimizer_state(updater.optimizer, updater.parameters)
    metrics = updater.update(broken(micro_batches), 1)
    assert metrics["optim/skipped"] == 1.0
    assert math.isnan(metrics["optim/grad_norm"])
    assert bit_equal(weights_of(policy), before)
    assert bit_equal(optimizer_state(updater.optimizer, updater.parameters), state)
    assert updater.skipped_in_a_row == 1
    # The bad gradient is gone: the next step is as if it had never been.
    assert updater.update(micro_batches, 2)["optim/skipped"] == 0.0
    assert updater.skipped_in_a_row == 0
    assert all(weight.isfinite().all() for weight in weights_of(policy).values())


def test_ten_skipped_steps_in_a_row_stop_the_run() -> None:
    policy, micro_batches = tiny_policy(), pack(random_groups())
    updater = adamw_updater(policy, lr=2e-4)
    for _ in range(9):
        updater.update(broken(micro_batches), 0)
    updater.update(micro_batches, 0)  # one good step and the count starts again
    for _ in range(9):
        updater.update(broken(micro_batches), 0)
    assert updater.skipped_in_a_row == 9
    with pytest.raises(NonFiniteFailed, match=r"10 optimizer steps in a row .* lower optim.lr \(now 0.0002\)"):
        updater.update(broken(micro_batches), 0)


def test_every_skipped_use_of_a_rollout_batch_is_counted() -> None:
    updater = adamw_updater(tiny_policy(), updates_per_rollout=3)
    assert updater.update(broken(pack(random_groups())), 0)["optim/skipped"] == 3.0


def test_no_micro_batches_mean_no_step_even_with_momentum() -> None:
    policy = tiny_policy()
    updater = adamw_updater(policy)
    updater.update(pack(random_groups()), 0)
    before, state = weights_of(policy), optimizer_state(updater.optimizer, updater.parameters)
    metrics = updater.update([], 5)
    assert metrics == {"optim/loss": 0.0, "optim/grad_norm": 0.0, "optim/skipped": 0.0, "optim/lr": 1e-3}
    assert bit_equal(weights_of(policy), before)
    assert bit_equal(optimizer_state(updater.optimizer, updater.parameters), state)


def test_the_base_never_moves() -> None:
    policy = tiny_policy()
    base = {name: p.detach().clone() for name, p in policy.model.named_parameters() if "lora" not in name}
    updater = adamw_updater(policy, lr=0.1)
    for step in range(2):
        updater.update(pack(random_groups()), step)
    now = {name: p.detach() for name, p in policy.model.named_parameters() if "lora" not in name}
    assert bit_equal(now, base)


def test_two_runs_from_the_same_start_are_bit_equal() -> None:
    finals = []
    for _ in range(2):
        policy = tiny_policy()
        updater = adamw_updater(policy)
        for step in range(3):
            groups = sampled_groups(policy, [1.0, 0.0, 0.5, 0.0])
            updater.update(pack(groups, micro_batch_tokens=40), step)
        finals.append(weights_of(policy))
    assert bit_equal(*finals)


# The 16-bit copies of the adapter.


def logits_of(policy: Policy) -> Tensor:
    with torch.no_grad():
        return policy.model(input_ids=torch.arange(5, 17)[None]).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("uses", [1, 2])
def test_after_an_update_the_policy_multiplies_with_the_new_masters(dtype: torch.dtype, uses: int) -> None:
    policy, fresh = tiny_policy(dtype=dtype), tiny_policy(dtype=dtype, live=False)
    before = logits_of(policy)
    adamw_updater(policy, lr=0.05, updates_per_rollout=uses).update(pack(random_groups()), 0)
    fresh.load_adapter_state(policy.adapter_state())
    assert torch.equal(logits_of(policy), logits_of(fresh))
    assert not torch.equal(logits_of(policy), before)


def test_the_second_use_in_16_bits_sees_the_first_step() -> None:
    policy = tiny_policy(dtype=torch.bfloat16)
    metrics = updater_of(policy, lr=0.5, updates_per_rollout=2).update(pack(random_groups()), 0)
    # With stale copies every ratio would still be 1 and nothing clipped.
    assert metrics["policy/clip_low"] + metrics["policy/clip_high"] > 0


# Float16, whose small activation gradients need a loss scale.


def test_float16_scales_the_loss_and_not_the_gradient() -> None:
    half, full = tiny_policy(dtype=torch.float16), tiny_policy(dtype=torch.float32)
    micro_batches = pack(random_groups())
    updater, plain = updater_of(half), updater_of(full)
    assert (updater.scaler.is_enabled(), plain.scaler.is_enabled()) == (True, False)
    assert updater.scaler.get_scale() == 4096
    expected = gradients_of(plain, micro_batches)
    for name, gradient in gradients_of(updater, micro_batches).items():
        assert gradient.dtype == torch.float32
        assert (gradient - expected[name]).norm() < 0.05 * expected[name].norm(), name


def test_float16_halves_its_scale_after_a_skipped_step() -> None:
    policy, micro_batches = tiny_policy(dtype=torch.float16), pack(random_groups())
    updater = adamw_updater(policy)
    before = weights_of(policy)
    assert updater.update(broken(micro_batches), 0)["optim/skipped"] == 1.0
    assert bit_equal(weights_of(policy), before)
    assert updater.scaler.get_scale() == 2048
    assert updater.update(micro_batches, 1)["optim/skipped"] == 0.0
    assert updater.scaler.get_scale() == 2048
    assert not bit_equal(weights_of(policy), before)
