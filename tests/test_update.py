"""What an update does to the weights, when it does nothing, and what it reports."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from lowmem_grpo import update as update_module
from lowmem_grpo.errors import NonFiniteFailed, OutOfMemoryFailed
from lowmem_grpo.memory.oom import Recovery
from lowmem_grpo.model import Policy
from lowmem_grpo.optim import build_optimizer, optimizer_state
from lowmem_grpo.rollout import SlotEngine
from lowmem_grpo.types import PackedMicroBatch, SamplingParams, ScoredGroup
from lowmem_grpo.update import Updater
from tests.helpers import (
    RecordingSGD,
    adapted_layers,
    assert_gradients_close,
    gradients_of,
    group_of,
    naive_logprobs,
    pack,
    problems_of,
    random_groups,
    tiny_policy,
    updater_of,
)
from tests.shortage import ALWAYS, Shortage
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


# When the memory runs out.


@dataclass
class Memory:
    """An updater of a run that may run short of memory, and what its batch is packed into."""

    policy: Policy
    groups: list[ScoredGroup]
    updater: Updater
    recoveries: list[Recovery]

    @classmethod
    def of(cls, *, micro_batch_tokens: int = 64, **changes: object) -> Memory:
        policy = tiny_policy("gemma3_text", torch.float64)
        made = updater_of(policy, micro_batch_tokens=micro_batch_tokens, **({"lr": 0.05} | changes))  # type: ignore
        recoveries: list[Recovery] = []
        updater = Updater(policy, made.settings, made.optimizer, on_out_of_memory=recoveries.append)
        return cls(policy, random_groups(policy), updater, recoveries)

    def packed(self, tokens: int) -> list[PackedMicroBatch]:
        return pack(self.groups, skip_dead=False, micro_batch_tokens=tokens)

    def update(self) -> dict[str, float]:
        return self.updater.update(self.packed(self.updater.micro_batch_tokens), 0, repack=self.packed)

    @property
    def gradients(self) -> list[dict[str, Tensor]]:
        optimizer = self.updater.optimizer
        assert isinstance(optimizer, RecordingSGD)
        return optimizer.gradients

    def in_need(self, patch: pytest.MonkeyPatch, place: str, shortage: Shortage) -> None:
        """Let the shortage strike in one part of the update."""
        if place == "backward":
            for parameter in self.policy.trainable_parameters().values():
                parameter.register_hook(shortage.need)
        elif place == "recomputation":
            layer = self.policy.model.get_base_model().get_decoder().layers[1]
            patch.setattr(layer.mlp, "forward", shortage.given(layer.mlp.forward))
        else:
            owner, name = {
                "forward": (self.policy, "hidden_states"),
                "log-probs": (self.policy, "logprobs"),
                "loss": (update_module, "sampler_correction"),
            }[place]
            patch.setattr(owner, name, shortage.given(getattr(owner, name)))


TWICE = {"kl_coef": 0.1, "updates_per_rollout": 2, "loss_options": {"clip_low": 0.01, "clip_high": 0.01}}
"""Forwards of reference and policy, and two uses, of which the second has ratios off 1."""


@pytest.mark.parametrize("place", ["forward", "recomputation", "log-probs", "loss", "backward"])
def test_the_gradient_is_the_same_wherever_the_memory_runs_out(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.setattr(update_module, "release_memory", lambda _: None)  # see the same test of the engine
    whole, counter = Memory.of(micro_batch_tokens=24, **TWICE), Shortage()
    with monkeypatch.context() as patch:
        whole.in_need(patch, place, counter)
        metrics = whole.update()
    assert counter.calls >= 4 and len(whole.gradients) == 2
    assert metrics["policy/clip_low"] + metrics["policy/clip_high"] > 0, "old log-probs count, or this shows nothing"
    for number in sorted({1, 2, *range(3, counter.calls, max(1, counter.calls // 12)), counter.calls}):
        short, shortage = Memory.of(micro_batch_tokens=24, **TWICE), Shortage([number])
        with monkeypatch.context() as patch:
            short.in_need(patch, place, shortage)
            again = short.update()
        assert len(shortage.held) == 1
        # The larger of two micro-batches has 23 tokens.
        assert [recovery.lowered for recovery in short.recoveries] == [{"micro_batch_tokens": 11}]
        assert (short.updater.micro_batch_tokens, short.updater.head_chunk_tokens) == (11, 5)
        assert len(short.gradients) == 2, "one optimizer step for each use"
        for gradients, expected in zip(short.gradients, whole.gradients, strict=True):
            assert_gradients_close(gradients, expected, 1e-10)
        for name, weight in weights_of(short.policy).items():
            torch.testing.assert_close(weight, whole.policy.trainable_parameters()[name], rtol=0, atol=1e-12)
        assert again == pytest.approx(metrics, abs=1e-9)
        assert not short.policy.model.training
        assert all(parameter.grad is None for parameter in short.policy.model.parameters())


@pytest.mark.parametrize("fails", [[1, 2], [1, 2, 5], [2, 3, 6, 9]])
def test_the_gradient_is_the_same_however_often_the_memory_runs_out(
    monkeypatch: pytest.MonkeyPatch, fails: list[int]
) -> None:
    whole, short = Memory.of(**TWICE), Memory.of(**{**TWICE, "head_chunk_tokens": 128})
    whole.update()
    short.in_need(monkeypatch, "forward", Shortage(fails))
    short.update()
    for gradients, expected in zip(short.gradients, whole.gradients, strict=True):
        assert_gradients_close(gradients, expected, 1e-10)
    # All 34 tokens; groups of 12, 11 and 11; answers, of which the longest takes 9 and cannot be divided.
    expected_limits = [{"micro_batch_tokens": 17}, {"micro_batch_tokens": 6}]
    expected_limits += [{"head_chunk_tokens": 64}, {"head_chunk_tokens": 32}]
    assert [recovery.lowered for recovery in short.recoveries] == expected_limits[: len(fails)]


def test_the_limits_are_kept_for_the_next_update(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory.of()
    with monkeypatch.context() as patch:
        memory.in_need(patch, "forward", Shortage([1]))
        memory.update()
    assert memory.recoveries == [
        Recovery(
            "The memory ran out in an update of 34 tokens at once; its gradient is computed again with "
            "memory.micro_batch_tokens=17.",
            {"micro_batch_tokens": 17},
        )
    ]
    sizes: list[int] = []
    hidden_states = memory.policy.hidden_states
    monkeypatch.setattr(
        memory.policy, "hidden_states", lambda ids, *rest: sizes.append(ids.shape[1]) or hidden_states(ids, *rest)
    )
    memory.update()
    assert len(sizes) > 1 and max(sizes) <= 17
    assert len(memory.recoveries) == 1


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_memory_too_small_for_one_answer_ends_in_a_sentence(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    memory = Memory.of(micro_batch_tokens=24, head_chunk_tokens=100)
    before = weights_of(memory.policy)
    memory.in_need(monkeypatch, place, Shortage(ALWAYS))
    with pytest.raises(OutOfMemoryFailed) as caught:
        memory.update()
    assert str(caught.value) == (
        "The memory does not suffice for the update of a single answer (9 tokens with its prompt): set "
        "memory.mlp_tile_tokens, switch memory.offload_activations on, or lower rollout.max_new_tokens."
    )
    assert caught.value.__context__ is None, "it would hold the frames that hold the tensors"
    assert [recovery.lowered for recovery in memory.recoveries] == [
        {"micro_batch_tokens": 11},
        {"micro_batch_tokens": 5},
        {"head_chunk_tokens": 50},
        {"head_chunk_tokens": 32},
    ]
    assert (memory.gradients, memory.updater.is_half_done) == ([], False)
    assert bit_equal(weights_of(memory.policy), before)
    assert all(parameter.grad is None for parameter in memory.policy.model.parameters())


def test_without_a_way_to_pack_again_only_the_head_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory.of(head_chunk_tokens=64)
    memory.in_need(monkeypatch, "forward", Shortage([1]))
    memory.updater.update(memory.packed(64), 0)
    assert [recovery.lowered for recovery in memory.recoveries] == [{"head_chunk_tokens": 32}]


def test_other_errors_are_not_taken_for_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory.of()
    monkeypatch.setattr(memory.policy, "logprobs", lambda *_, **__: torch.zeros(2, 3) @ torch.zeros(2, 3))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        memory.update()
    assert memory.recoveries == []


def stepping_updater(name: str) -> tuple[Updater, list[Recovery]]:
    policy, recoveries = tiny_policy(dtype=torch.float32), list[Recovery]()
    optimizer = build_optimizer(name, policy.trainable_parameters(), lr=0.01, weight_decay=0.1)
    settings = updater_of(policy, lr=0.01).settings
    return Updater(policy, settings, optimizer, on_out_of_memory=recoveries.append), recoveries


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit"])
@pytest.mark.parametrize("number", [1, 2, 9])
def test_an_optimizer_that_cannot_make_its_state_is_asked_once_more(
    monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    (whole, _), (short, recoveries) = stepping_updater(name), stepping_updater(name)
    micro_batches = pack(random_groups())
    whole.update(micro_batches, 0)
    zeros_like = torch.zeros_like
    step, shortage = short.optimizer.step, Shortage([number])

    def stepping() -> object:
        with monkeypatch.context() as patch:
            patch.setattr(torch, "zeros_like", shortage.given(zeros_like))
            return step()

    monkeypatch.setattr(short.optimizer, "step", stepping)
    if name == "adamw_8bit" and number > 2:
        # It makes the state of a parameter when it comes to it: those before it have moved.
        with pytest.raises(OutOfMemoryFailed):
            short.update(micro_batches, 0)
        assert short.is_half_done
        return
    short.update(micro_batches, 0)
    assert recoveries == [Recovery("The memory ran out before an optimizer step; it was tried once more.")]
    assert bit_equal(weights_of(short.policy), weights_of(whole.policy))
    states = [optimizer_state(updater.optimizer, updater.parameters) for updater in (short, whole)]
    assert bit_equal(*states)


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit"])
@pytest.mark.parametrize("part", ["weights", "moments"])
def test_an_optimizer_step_that_is_half_taken_is_not_taken_again(
    monkeypatch: pytest.MonkeyPatch, name: str, part: str
) -> None:
    updater, recoveries = stepping_updater(name)
    micro_batches = pack(random_groups())
    updater.update(micro_batches, 0)
    first = next(iter(updater.parameters.values()))

    @torch.no_grad()
    def half_a_step() -> None:
        (first if part == "weights" else updater.optimizer.state[first]["exp_avg"]).mul_(0.5)
        Shortage(ALWAYS).need()

    monkeypatch.setattr(updater.optimizer, "step", half_a_step)
    with pytest.raises(OutOfMemoryFailed, match=r"^The memory ran out in an optimizer step: lower lora.rank, .*\.$"):
        updater.update(micro_batches, 1)
    assert recoveries == []
    assert updater.is_half_done


def test_a_norm_that_cannot_be_taken_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    (whole, _), (short, recoveries) = stepping_updater("adamw"), stepping_updater("adamw")
    micro_batches = pack(random_groups())
    whole.update(micro_batches, 0)
    clip = torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", Shortage([1]).given(clip))
    short.update(micro_batches, 0)
    assert len(recoveries) == 1
    assert bit_equal(weights_of(short.policy), weights_of(whole.policy))


def test_a_step_that_never_finds_memory_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    updater, _ = stepping_updater("adamw")
    before = weights_of(updater.policy)
    monkeypatch.setattr(updater.optimizer, "step", Shortage(ALWAYS).need)
    with pytest.raises(OutOfMemoryFailed, match="in an optimizer step"):
        updater.update(pack(random_groups()), 0)
    assert bit_equal(weights_of(updater.policy), before)


# A sampler that is not quite the policy.


@pytest.mark.parametrize(("kind", "weights"), [("truncate", (0.5, 2.0, 1.0)), ("mask", (0.5, 4.0, 1.0))])
@pytest.mark.parametrize("uses", [1, 2])
def test_tokens_weigh_what_the_policy_makes_of_them(kind: str, weights: tuple[float, ...], uses: int) -> None:
    policy = tiny_policy(dtype=torch.float64)
    true = naive_logprobs(policy, (40, 41), (5, 6, 2), TEMPERATURE)
    # The policy finds the first token half as likely as the sampler did, the second four times as likely.
    sampler = (true - torch.tensor([0.5, 4.0, 1.0], dtype=torch.float64).log() - 1e-9).tolist()
    short = naive_logprobs(policy, (40, 41), (7,), TEMPERATURE)
    group = group_of((40, 41), [(5, 6, 2), (7,)], (1.0, 0.0), logprobs=[sampler, (short - math.log(10.0)).tolist()])
    micro_batches = pack([group])
    last = 2.0 if kind == "truncate" else 0.0  # 10 is outside of [.5, 5]
    updater = updater_of(policy, sampler_correction=kind, updates_per_rollout=uses)
    metrics = updater.update(micro_batches, 0)
    assert metrics["policy/sampler_weight"] == pytest.approx((sum(weights) + last) / 4, abs=1e-6)
    [micro] = micro_batches
    weight_BT = torch.tensor([weights, (last, 1.0, 1.0)], dtype=torch.float64)
    rows = [[*row] for row in micro.rows]
    weighed = replace(micro, weights_BT=micro.weights_BT * weight_BT[[g for _, g in rows]])
    expected = gradients_of(updater_of(policy), [weighed])
    optimizer = updater.optimizer
    assert isinstance(optimizer, RecordingSGD)
    for gradients in optimizer.gradients:
        assert_gradients_close(gradients, expected, 1e-7)


def test_the_correction_is_that_of_the_policy_that_sampled() -> None:
    policy = tiny_policy(dtype=torch.float64)
    updater = updater_of(policy, lr=0.5, sampler_correction="truncate", updates_per_rollout=2)
    metrics = updater.update(pack(random_groups(policy)), 0)
    # Sampler and policy agreed at the first use, so no token weighs other than 1 at the second.
    assert metrics["policy/sampler_weight"] == pytest.approx(1.0, abs=1e-10)
    assert metrics["policy/clip_low"] + metrics["policy/clip_high"] > 0, "the policy has moved, or this shows nothing"


def test_without_a_correction_there_is_no_metric_of_it() -> None:
    assert "policy/sampler_weight" not in updater_of(tiny_policy()).update(pack(random_groups()), 0)
