"""The self-checks at the first live step: silent in every honest run, and one right name for each sabotage."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lowmem_grpo.model import LoraSpec, ModelSpec, Policy, load_policy, load_tokenizer
from lowmem_grpo.optim import build_optimizer
from lowmem_grpo.rollout import SlotEngine
from lowmem_grpo.selfcheck import FirstStepCheck, agreement_limit, has_a_gradient
from lowmem_grpo.types import Finding, PackedMicroBatch, SamplingParams, ScoredGroup
from lowmem_grpo.update import Updater
from tests.helpers import CPU, adapted_layers, group_of, pack, problems_of, shake_adapter, tiny_policy, updater_of
from tests.tiny import FAMILIES, save_tiny

TEMPERATURE = 0.7
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def sampled_groups(policy: Policy) -> list[ScoredGroup]:
    """Two groups of four answers by the live policy."""
    engine, sampling, rewards = SlotEngine(policy, seed=3), SamplingParams(8, temperature=TEMPERATURE), (1.0, 0, 0, 0.5)
    groups = engine.generate(problems_of((40, 41, 42), (60, 61)), 4, sampling, step=1)
    return [ScoredGroup(group, {"reward": rewards}, rewards, (None,) * 4) for group in groups]


def sampled_micro_batches(policy: Policy) -> list[PackedMicroBatch]:
    """Those groups, cut into several micro-batches."""
    return pack(sampled_groups(policy), micro_batch_tokens=24)


def updater_for(policy: Policy, lr: float, **changes: Any) -> Updater:
    settings = updater_of(policy, lr=lr, **changes).settings
    optimizer = build_optimizer("adamw", policy.trainable_parameters(), lr=1.0, weight_decay=0.01)
    return Updater(policy, settings, optimizer)


@dataclass(frozen=True)
class Outcome:
    findings: tuple[Finding, ...]
    conclusive: bool
    metrics: Mapping[str, float]

    @property
    def kinds(self) -> list[str]:
        return [finding.kind for finding in self.findings]

    @property
    def only(self) -> Finding:
        (finding,) = self.findings
        return finding


def first_step(
    policy: Policy, micro_batches: Sequence[PackedMicroBatch] | None = None, *, lr: float = 1e-4, **changes: Any
) -> Outcome:
    """One checked update, as the trainer makes it."""
    micro_batches = sampled_micro_batches(policy) if micro_batches is None else micro_batches
    updater = updater_for(policy, lr, **changes)
    check = FirstStepCheck(policy, micro_batches, temperature=TEMPERATURE, head_chunk_tokens=5)
    metrics = updater.update(micro_batches, 0)
    return Outcome(check.findings(metrics), check.conclusive, metrics)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def adapter(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained adapter of the tiny llama, as peft writes it."""
    policy = loaded(folder, quantization="none")
    shake_adapter(policy)
    path = tmp_path_factory.mktemp("adapters") / "trained"
    policy.model.save_pretrained(path)
    return path


def loaded(folder: Path, continue_from: Path | None = None, **spec: Any) -> Policy:
    lora = LoraSpec(rank=4, alpha=8, continue_from=continue_from)
    return load_policy(ModelSpec(folder, "tiny", **spec), lora, CPU, load_tokenizer(folder))


# Honest runs.


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_honest_first_step_has_no_finding(family: str, dtype: torch.dtype) -> None:
    outcome = first_step(tiny_policy(family, dtype, live=False))
    assert (outcome.kinds, outcome.conclusive) == ([], True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "changes",
    [{"kl_coef": 0.1}, {"updates_per_rollout": 2}, {"max_grad_norm": 1e-6}, {"lr": 1e-6}, {"lr": 1e-9}, {"lr": 1e-2}],
    ids=str,
)
def test_settings_that_change_the_step_raise_no_alarm(dtype: torch.dtype, changes: dict[str, Any]) -> None:
    assert first_step(tiny_policy(dtype=dtype, live=False), **changes).kinds == []


@pytest.mark.parametrize("updating", [True, False])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_checkpointing_and_mode_do_not_matter_and_are_left_alone(checkpointing: bool, updating: bool) -> None:
    policy = tiny_policy(checkpointing=checkpointing, live=False)
    micro_batches = sampled_micro_batches(policy)
    if updating:
        policy.update_mode()
    check = FirstStepCheck(policy, micro_batches, temperature=TEMPERATURE, head_chunk_tokens=5)
    assert policy.model.training == updating
    metrics = updater_for(policy, 1e-4).update(micro_batches, 0)
    assert check.findings(metrics) == ()
    assert not policy.model.training


@pytest.mark.parametrize("weights", ["4bit", "dequantized"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("continued", [True, False])
def test_quantised_weights_and_a_continued_adapter_raise_no_alarm(
    folder: Path, adapter: Path, weights: str, dtype: str, continued: bool
) -> None:
    policy = loaded(folder, adapter if continued else None, weights=weights, compute_dtype=dtype)
    assert first_step(policy, kl_coef=0.1).kinds == []


@pytest.mark.parametrize("lr", [1e-6, 1e-9, 1e-12])
def test_a_continued_adapter_need_not_move_below_its_rounding(folder: Path, adapter: Path, lr: float) -> None:
    assert first_step(loaded(folder, adapter, quantization="none"), lr=lr).kinds == []


def test_no_hook_is_left_behind() -> None:
    policy = tiny_policy(live=False)
    micro_batches = sampled_micro_batches(policy)
    hooks = lambda: sum(len(p._post_accumulate_grad_hooks or ()) for p in policy.model.parameters())  # noqa: E731
    check = FirstStepCheck(policy, micro_batches, temperature=TEMPERATURE, head_chunk_tokens=5)
    assert hooks() == adapted_layers("llama")
    check.close()
    assert hooks() == 0
    first_step(policy, micro_batches)
    assert hooks() == 0


def test_a_step_that_was_skipped_decides_nothing_and_the_next_one_does() -> None:
    policy = tiny_policy(dtype=torch.float16, live=False)
    micro_batches = sampled_micro_batches(policy)
    broken = [replace(micro, weights_BT=micro.weights_BT * math.inf) for micro in micro_batches]
    outcome = first_step(policy, broken)
    assert (outcome.kinds, outcome.conclusive, outcome.metrics["optim/skipped"]) == ([], False, 1.0)
    assert first_step(policy, micro_batches).conclusive


# Sabotage.


def test_a_learning_rate_of_0_is_the_only_thing_named() -> None:
    finding = first_step(tiny_policy(live=False), lr=0.0).only
    assert (finding.kind, finding.severity, finding.fixes[0].overrides) == (
        "learning rate",
        "error",
        ("optim.lr=1e-4",),
    )


def lora_b_of(policy: Policy) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in policy.model.named_parameters() if "lora_B" in name}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("frozen", "words"), [(1, "A part of the"), (14, "The whole")])
def test_frozen_layers_are_counted_and_the_first_is_named(dtype: torch.dtype, frozen: int, words: str) -> None:
    policy = tiny_policy(dtype=dtype, live=False)
    for parameter in list(lora_b_of(policy).values())[-frozen:]:
        parameter.requires_grad_(False)
    finding = first_step(policy).only
    first = "layers.1.mlp.down_proj" if frozen == 1 else "layers.0.self_attn.q_proj"
    assert finding.kind == "frozen adapter"
    assert finding.sentence.startswith(f"{words} adapter is frozen")
    assert (
        f"{frozen} of 14 lora_B had no gradient and {frozen} did not move, the first of them model.{first})"
        in finding.sentence
    )


def test_a_cut_gradient_names_the_layers_behind_the_cut() -> None:
    policy = tiny_policy(live=False)
    attention = policy.model.get_base_model().model.layers[1].self_attn
    attention.register_forward_hook(lambda _module, _args, output: (output[0].detach(), *output[1:]))
    finding = first_step(policy).only
    assert finding.kind == "frozen adapter"
    assert "4 of 14 lora_B had no gradient and 4 did not move, the first of them model.layers.1.self_attn.q_proj" in (
        finding.evidence
    )


def test_layers_that_the_optimizer_does_not_hold_are_frozen_though_they_have_a_gradient() -> None:
    policy = tiny_policy(live=False)
    micro_batches, updater = sampled_micro_batches(policy), updater_for(policy, 1e-4)
    parameters = policy.trainable_parameters()
    held = {name: p for name, p in parameters.items() if "layers.1" not in name}
    updater.optimizer = build_optimizer("adamw", held, lr=1.0, weight_decay=0.0)
    check = FirstStepCheck(policy, micro_batches, temperature=TEMPERATURE, head_chunk_tokens=5)
    (finding,) = check.findings(updater.update(micro_batches, 0))
    assert finding.kind == "frozen adapter"
    assert "0 of 14 lora_B had no gradient and 7 did not move" in finding.evidence


@pytest.mark.parametrize("lr", [1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize("continued", [True, False])
def test_a_reference_with_the_adapter_on_moves(
    monkeypatch: pytest.MonkeyPatch, folder: Path, adapter: Path, lr: float, continued: bool
) -> None:
    policy = loaded(folder, adapter if continued else None, quantization="none")
    monkeypatch.setattr(policy, "reference", contextlib.nullcontext)
    assert first_step(policy, lr=lr, kl_coef=0.1).kinds == ["reference moves"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_reference_with_the_adapter_on_moves_in_16_bits(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    policy = tiny_policy(dtype=dtype, live=False)
    monkeypatch.setattr(policy, "reference", contextlib.nullcontext)
    assert first_step(policy, lr=1e-4).kinds == ["reference moves"]


def test_a_reference_that_drifts_elsewhere_moves_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the layers are left on, so it follows the policy without being it."""
    policy = tiny_policy(live=False)
    monkeypatch.setattr(policy, "_lora_layers", policy._lora_layers[::2])
    assert first_step(policy, lr=1e-2).kinds == ["reference moves"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_another_start_than_the_reference_is_named(dtype: torch.dtype) -> None:
    outcome = first_step(tiny_policy(dtype=dtype), kl_coef=0.1)  # a live adapter, and the base as its reference
    assert outcome.kinds == ["reference at start"]
    assert "the KL to the reference is" in outcome.only.evidence


def test_another_adapter_as_reference_is_named(folder: Path, adapter: Path) -> None:
    policy = loaded(folder, adapter, quantization="none")
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B.reference" in name:
                parameter.mul_(-1)
    assert first_step(policy).kinds == ["reference at start"]


def shuffled_logprobs(micro: PackedMicroBatch) -> PackedMicroBatch:
    return replace(micro, sampler_logprobs_BT=micro.sampler_logprobs_BT.roll(1, dims=0))


def one_token_too_late(micro: PackedMicroBatch) -> PackedMicroBatch:
    return replace(micro, sampler_logprobs_BT=micro.sampler_logprobs_BT.roll(1, dims=1))


def positions_from_0(micro: PackedMicroBatch) -> PackedMicroBatch:
    return replace(micro, position_ids_N=torch.arange(len(micro.input_ids_N)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spoil", [shuffled_logprobs, one_token_too_late, positions_from_0])
def test_what_does_not_belong_together_is_a_sampler_gap(
    dtype: torch.dtype, spoil: Callable[[PackedMicroBatch], PackedMicroBatch]
) -> None:
    policy = tiny_policy(dtype=dtype, live=False)
    outcome = first_step(policy, [spoil(micro) for micro in sampled_micro_batches(policy)])
    assert outcome.kinds == ["sampler gap"]
    assert f"{outcome.metrics['policy/sampler_gap']:.3g} nats" in outcome.only.evidence


def test_answers_of_another_group_are_a_sampler_gap() -> None:
    policy = tiny_policy(live=False)
    one, other = sampled_groups(policy)
    swapped = [
        replace(one, group=replace(one.group, rollouts=other.group.rollouts)),
        replace(other, group=replace(other.group, rollouts=one.group.rollouts)),
    ]
    assert first_step(policy, pack(swapped, micro_batch_tokens=24)).kinds == ["sampler gap"]


def test_another_temperature_in_the_update_is_a_sampler_gap() -> None:
    policy = tiny_policy(live=False)
    assert first_step(policy, temperature=TEMPERATURE * 1.05).kinds == ["sampler gap"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lr", [1e-4, 1e-6])
def test_old_copies_of_the_adapter_are_named_at_any_rate(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, lr: float
) -> None:
    policy = tiny_policy(dtype=dtype, live=False)
    monkeypatch.setattr(policy, "refresh_adapter", lambda: None)
    finding = first_step(policy, lr=lr).only
    assert finding.kind == "policy stands still"
    assert "14 of 14 layers have a copy that differs" in finding.evidence


@pytest.mark.parametrize("lr", [1e-4, 1e-6])
def test_a_sampler_beside_the_adapter_stands_still(monkeypatch: pytest.MonkeyPatch, lr: float) -> None:
    policy = tiny_policy(live=False)
    whole = policy.logprobs

    def logprobs(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        with contextlib.nullcontext() if torch.is_grad_enabled() else policy.reference():
            return whole(*args, **options)

    monkeypatch.setattr(policy, "logprobs", logprobs)
    finding = first_step(policy, lr=lr).only
    assert finding.kind == "policy stands still"
    assert "0 of 14 layers" in finding.evidence


def test_two_roots_are_two_findings_the_likelier_first(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy(live=False)
    monkeypatch.setattr(policy, "reference", contextlib.nullcontext)
    micro_batches = [shuffled_logprobs(micro) for micro in sampled_micro_batches(policy)]
    assert first_step(policy, micro_batches).kinds == ["sampler gap", "reference moves"]


# What the check costs.


def test_few_forwards_of_the_smallest_micro_batch() -> None:
    policy = tiny_policy(live=False)
    micro_batches = sampled_micro_batches(policy)
    sizes = [len(micro.input_ids_N) for micro in micro_batches]
    assert min(sizes) < max(sizes)
    seen: list[int] = []
    policy.model.get_base_model().get_decoder().register_forward_pre_hook(
        lambda _module, _args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    check = FirstStepCheck(policy, micro_batches, temperature=TEMPERATURE, head_chunk_tokens=5)
    assert seen == [min(sizes)] * 3
    metrics = updater_for(policy, 1e-4).update(micro_batches, 0)
    seen.clear()
    check.findings(metrics)
    assert seen == [min(sizes)] * 2


# Bounds, and steps that prove nothing.


@pytest.mark.parametrize(
    ("dtype", "temperature", "logit", "limit"),
    [
        (torch.float64, 1.0, 100.0, 1e-4),
        (torch.float32, 2.0, 21.0, 1e-4),
        (torch.float32, 0.5, 21.0, 2e-4),
        (torch.float16, 1.0, 16.0, 0.02),
        (torch.bfloat16, 1.0, 2.0, 0.02),
        (torch.bfloat16, 1.0, 16.0, 0.125),
        (torch.bfloat16, 0.5, 16.0, 0.25),
    ],
)
def test_the_limit_grows_with_the_rounding_of_the_logits(
    dtype: torch.dtype, temperature: float, logit: float, limit: float
) -> None:
    assert agreement_limit(dtype, temperature=temperature, logit=logit) == pytest.approx(limit)


@pytest.mark.parametrize(
    ("completions", "rewards", "expected"),
    [
        ([(5, 2), (6, 2)], (1.0, 0.0), True),
        ([(5, 2), (6, 2)], (1.0, 1.0), False),
        ([(5, 2), (5, 2)], (1.0, 0.0), False),  # equal answers whose advantages cancel
        ([(5, 2), (5, 2), (6, 2)], (1.0, 0.0, 0.5), False),
        ([(5, 2), (5, 2), (6, 2)], (1.0, 0.0, 0.0), True),
        ([(5, 2), (5,)], (1.0, 0.0), True),
        ([(5, 2), (6, 2)], (1e-12, 0.0), True),
    ],
)
@pytest.mark.parametrize("budget", [3, 64])
def test_a_step_without_a_gradient_proves_nothing(
    completions: list[tuple[int, ...]], rewards: tuple[float, ...], expected: bool, budget: int
) -> None:
    groups = [group_of((40,), completions, rewards)]
    assert has_a_gradient(pack(groups, skip_dead=False, micro_batch_tokens=budget)) is expected


def test_no_micro_batch_has_no_gradient() -> None:
    assert not has_a_gradient([])
