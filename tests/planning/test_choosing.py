"""The choice of settings: fits whenever anything fits, the quickest of what fits, and says why."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowmem_grpo.catalog.cards import card_named
from lowmem_grpo.catalog.known import KNOWN
from lowmem_grpo.planning.budget import estimate
from lowmem_grpo.planning.choosing import (
    budget_bytes,
    candidates,
    choose,
    largest_group,
    longest_answer,
    suggestions,
)
from lowmem_grpo.planning.timing import estimate_time
from lowmem_grpo.planning.workload import Workload
from lowmem_grpo.types import Card, MemorySettings

GIB = 2**30
LLAMA_8B = Workload(
    shape=KNOWN["llama-3.1-8b-instruct"].shape,
    card=card_named("rtx4060-8gb"),
    dtype="bfloat16",
    quantized=True,
    decoded=False,
    rank=16,
    targets=None,
    optimizer="adamw_8bit",
    prompts_per_step=1,
    group_size=8,
    prompt_tokens=256,
    answer_tokens=1024,
)
FASTEST = MemorySettings(8, micro_batch_tokens=8192, activation_checkpointing=False)


def workload_of(name: str, **values: Any) -> Workload:
    return replace(LLAMA_8B, shape=KNOWN[name].shape, **values)


def step_s(workload: Workload, chosen: MemorySettings) -> float:
    time = estimate_time(workload, chosen, None)
    assert time is not None
    return time.step_s


def every_setting(workload: Workload) -> Iterator[MemorySettings]:
    """All that `choose` may pick for one group of 4 and prompts of 256."""
    tokens = [estimate_tokens // 2**i for estimate_tokens in [256 + 4 * (workload.answer_tokens - 1)] for i in range(3)]
    floor = 256 + workload.answer_tokens - 1
    for rows, micro, (recompute, offload), embedding, chunk, tile in itertools.product(
        (4, 2, 1),
        [*(t for t in tokens if t > floor), floor],
        ((False, False), (True, False), (True, True)),
        (False, True),
        (256, 128, 64),
        (0, 2048, 1024, 512, 256, 128),
    ):
        # The size of a prefill is of no account with one prompt.
        yield MemorySettings(rows, 2048, micro, recompute, offload, embedding, chunk, tile)


@pytest.mark.parametrize(
    ("name", "card", "answer", "gib", "rows", "slower"),
    [
        ("qwen2.5-1.5b-instruct", "rtx3060laptop-6gb", 1024, 2.5, 8, 1.2),
        ("llama-3.1-8b-instruct", "rtx4060-8gb", 1024, 6.7, 8, 1.2),
        ("llama-3.1-8b-instruct", "t4-16gb", 20_000, 13.5, 3, 1.5),
        ("qwen2.5-14b-instruct", "rtx3060-12gb", 1024, 10.5, 4, 1.3),
        ("qwen2.5-32b-instruct", "rtx3090-24gb", 1024, 21.5, 8, 1.3),
    ],
)
def test_the_five_targets(name: str, card: str, answer: int, gib: float, rows: int, slower: float) -> None:
    dtype = "float16" if card.startswith("t4") else "bfloat16"
    work = workload_of(name, card=card_named(card), answer_tokens=answer, dtype=dtype)
    choice = choose(work, int(gib * GIB), {"max_concurrent": rows})
    assert choice.fits and choice.settings.max_concurrent == rows
    assert choice.estimate.peak_bytes <= gib * GIB
    plain = MemorySettings(rows, micro_batch_tokens=1)
    assert step_s(work, choice.settings) <= slower * step_s(work, plain)


def test_with_room_for_all_the_fastest_settings_are_chosen() -> None:
    choice = choose(LLAMA_8B, 1000 * GIB)
    assert choice.settings == FASTEST
    assert choice.fits and choice.reasons == ()


def test_every_change_has_a_reason_with_what_it_saves() -> None:
    work = replace(LLAMA_8B, prompts_per_step=4)
    choice = choose(work, int(6.7 * GIB))
    assert choice.fits and choice.settings.offload_embeddings and choice.settings.max_concurrent == 8
    assert "32 answers would decode at once; 8 do, so that keys and values fit: 3.1 GiB less in the rollout" in (
        choice.reasons
    )
    fastest = replace(FASTEST, max_concurrent=32)
    changed = sum(getattr(choice.settings, name) != getattr(fastest, name) for name in FASTEST.__dataclass_fields__)
    assert len(choice.reasons) == changed


def test_what_the_user_has_set_stays() -> None:
    fixed = {"activation_checkpointing": False, "max_concurrent": 3, "head_chunk_tokens": 100, "mlp_tile_tokens": 0}
    choice = choose(LLAMA_8B, int(6.7 * GIB), fixed)
    assert {name: getattr(choice.settings, name) for name in fixed} == fixed
    # Nothing is offloaded where nothing is checkpointed.
    assert not choice.settings.offload_activations and not choice.fits
    asked = choose(LLAMA_8B, 1000 * GIB, {"offload_activations": True})
    assert asked.settings.activation_checkpointing
    with pytest.raises(ValueError, match="fixed names 'rank', which is no setting"):
        choose(LLAMA_8B, GIB, {"rank": 8})


def test_a_cpu_offloads_nothing() -> None:
    card = Card("cpu", "cpu", (0, 0), 8 * GIB)
    work = workload_of("smollm2-135m-instruct", card=card, dtype="float32", decoded=True)
    choice = choose(work, int(1.8 * GIB))
    assert choice.fits and choice.settings.activation_checkpointing
    assert not choice.settings.offload_activations and not choice.settings.offload_embeddings
    assert not any("offload" in change.overrides[0] for change in candidates(choice.settings, work))


def test_the_choice_is_the_quickest_of_all_that_fit() -> None:
    work = replace(LLAMA_8B, group_size=4)
    found = [(estimate(work, tried).peak_bytes, step_s(work, tried)) for tried in every_setting(work)]
    leanest = min(peak for peak, _ in found)
    for budget in (leanest, int(leanest * 1.02), int(leanest * 1.1), 2 * leanest):
        choice = choose(work, budget)
        assert choice.fits
        assert step_s(work, choice.settings) == pytest.approx(min(s for peak, s in found if peak <= budget), rel=1e-9)
    too_small = choose(work, leanest - 1)
    assert not too_small.fits and too_small.estimate.peak_bytes == leanest


@settings(max_examples=25)
@given(
    st.sampled_from(["smollm2-135m-instruct", "qwen2.5-7b-instruct", "qwen3-8b", "gemma-3-1b-it"]),
    st.integers(1, 6),
    st.integers(1, 16),
    st.integers(1, 3000),
    st.integers(2, 3000),
    st.floats(0.5, 20.0),
    st.floats(1.0, 3.0),
)
def test_a_larger_budget_never_gives_a_slower_choice(
    name: str, prompts: int, group: int, prompt: int, answer: int, gib: float, factor: float
) -> None:
    work = workload_of(
        name, prompts_per_step=prompts, group_size=group, prompt_tokens=prompt, answer_tokens=answer, dtype="float16"
    )
    small, large = choose(work, int(gib * GIB)), choose(work, int(gib * factor * GIB))
    for choice, budget in ((small, int(gib * GIB)), (large, int(gib * factor * GIB))):
        assert choice.fits == (choice.estimate.peak_bytes <= budget)
        assert choice.estimate == estimate(work, choice.settings)
    assert large.fits or not small.fits
    if small.fits:
        assert step_s(work, large.settings) <= step_s(work, small.settings) * (1 + 1e-9)


def test_without_the_speed_of_the_card_the_choice_is_made_all_the_same() -> None:
    unknown = replace(LLAMA_8B, card=Card("unknown", "cuda", (8, 6), 8 * GIB))
    choice = choose(unknown, int(6.7 * GIB))
    assert choice.fits
    listed = suggestions(unknown, MemorySettings(8), int(6.7 * GIB))
    assert listed and all(one.extra_s_per_step is None for one in listed)


def test_suggestions_put_first_what_fits_and_leaves_the_training_alone() -> None:
    plain = MemorySettings(8)
    peak = estimate(LLAMA_8B, plain).peak_bytes
    listed = suggestions(LLAMA_8B, plain, peak - 200 * 2**20)
    assert [(one.fits, one.changes_training) for one in listed] == sorted(
        ((one.fits, one.changes_training) for one in listed), key=lambda pair: (not pair[0], pair[1])
    )
    assert listed[0].fits and not listed[0].changes_training
    by_key = {one.overrides[0]: one for one in listed}
    # 1002 MiB, and what a step of 1024 forwards more costs.
    embedding = by_key["memory.offload_embeddings=true"]
    assert embedding.saves_bytes == 2 * 128_256 * 4096 == peak - embedding.peak_bytes
    assert embedding.extra_s_per_step == pytest.approx(0.1, rel=0.05)
    assert all(one.saves_bytes > 0 for one in listed)
    keys = [override.partition("=")[0] for override in by_key]
    assert len(keys) == len(set(keys))
    assert embedding.to_json()["overrides"] == ("memory.offload_embeddings=true",)


def test_suggestions_take_the_mildest_value_that_fits() -> None:
    # 8 rows of 1024 tokens are 1 GiB; half of the answers' tokens are enough for a budget of 300 MiB less.
    work = replace(LLAMA_8B, answer_tokens=8192)
    peak = estimate(work, MemorySettings(8)).peak_bytes
    by_key = {one.overrides[0].partition("=")[0]: one for one in suggestions(work, MemorySettings(8), peak - GIB)}
    assert by_key["rollout.max_concurrent"].overrides == ("rollout.max_concurrent=4",)
    assert by_key["rollout.max_new_tokens"].overrides == ("rollout.max_new_tokens=4096",)
    assert by_key["rollout.max_new_tokens"].changes_training and not by_key["rollout.max_concurrent"].changes_training


def test_int8_keys_and_values_are_listed_but_never_chosen() -> None:
    work = replace(LLAMA_8B, answer_tokens=8192)
    (int8,) = (change for change in candidates(MemorySettings(8), work) if "kv_dtype" in change.overrides[0])
    assert int8.changes_training and int8.workload.kv_int8 and int8.settings == MemorySettings(8)
    assert not choose(work, int(6.2 * GIB)).fits  # and the workload is not touched: there is nothing to touch it with


def test_candidates_are_single_changes() -> None:
    work = replace(LLAMA_8B, optimizer="adamw", quantized=True, decoded=True)
    names = FASTEST.__dataclass_fields__
    for change in candidates(FASTEST, work):
        assert len(change.overrides) == 1
        fields = [name for name in names if getattr(change.settings, name) != getattr(FASTEST, name)]
        assert len(fields) + (change.workload != work) == 1
        assert change.changes_training == (change.workload != replace(work, decoded=change.workload.decoded))
    overrides = [change.overrides[0] for change in candidates(FASTEST, work)]
    assert len(overrides) == len(set(overrides))
    assert {"model.weights=4bit", "optim.name=adamw_8bit", "memory.mlp_tile_tokens=512"} <= set(overrides)
    # Without checkpoints there is nothing to offload.
    assert "memory.offload_activations=true" not in overrides


def test_the_longest_answer_fits_and_one_more_token_does_not() -> None:
    budget = int(13.5 * GIB)
    most = longest_answer(LLAMA_8B, budget, {"max_concurrent": 3})
    assert 20_000 <= most < 30_000
    fits = [
        choose(replace(LLAMA_8B, answer_tokens=tokens), budget, {"max_concurrent": 3}).fits
        for tokens in (most, most + 1)
    ]
    assert fits == [True, False]
    assert longest_answer(workload_of("smollm2-135m-instruct"), 100 * GIB) == 8192 - 256
    assert longest_answer(LLAMA_8B, GIB) == 0


def test_the_largest_group() -> None:
    assert largest_group(LLAMA_8B, int(6.7 * GIB)) == 256  # in waves
    assert largest_group(LLAMA_8B, GIB) == 0


@pytest.mark.parametrize(("configured", "expected"), [(None, 980), (1.5, 3 * 2**29)])
def test_the_budget_is_what_the_user_gives_or_the_card_less_2_percent(configured: float | None, expected: int) -> None:
    assert budget_bytes(Card("test", "cuda", (8, 6), 1000), configured) == expected
