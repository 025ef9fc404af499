"""Rows on their way through the slots: what is computed and stored, and how often, in any schedule."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lowmem_grpo.model import Policy
from lowmem_grpo.rollout.decoding import Decoding, Row, slot_shape
from lowmem_grpo.rollout.slots import SlotShape
from lowmem_grpo.types import Problem, SamplingParams
from tests.helpers import DecoderCalls, naive_logprobs, problems_of, tiny_policy, watch_decoder

SEED, STEP = 3, 4
SAMPLING = SamplingParams(max_new_tokens=6)
FAMILIES = ("llama", "gemma3_text", "mistral")
"""No window, one in some layers, one in all."""


@functools.cache
def policy_of(family: str = "llama") -> Policy:
    return tiny_policy(family, torch.float64)


@dataclass(frozen=True)
class Schedule:
    """Problems whose answers end at given lengths, and the slots that they go through."""

    prompts: tuple[tuple[int, ...], ...]
    lengths_P_G: tuple[tuple[int, ...], ...]
    slots: int
    prompt_slots: int

    @property
    def problems(self) -> list[Problem]:
        return problems_of(*self.prompts)

    @property
    def rows(self) -> list[Row]:
        return [Row(group, g) for group, lengths_G in enumerate(self.lengths_P_G) for g in range(len(lengths_G))]

    def shape(self, policy: Policy) -> SlotShape:
        return SlotShape(
            *policy.kv_shape,
            prompt_slots=self.prompt_slots,
            prompt_tokens=max(map(len, self.prompts)),
            slots=self.slots,
            answer_tokens=SAMPLING.max_new_tokens,
        )

    def decoding(self, policy: Policy, rows: Sequence[Row] | None = None, prefill_tokens: int = 2048) -> Decoding:
        return Decoding(
            policy,
            self.problems,
            self.rows if rows is None else rows,
            self.shape(policy),
            SAMPLING,
            seed=SEED,
            step=STEP,
            stop_reason=lambda row: "length" if len(row.tokens) == self.lengths_P_G[row.group][row.answer] else None,
            prefill_tokens=prefill_tokens,
        )

    def at_once(self) -> Schedule:
        return replace(self, slots=len(self.rows), prompt_slots=len(self.prompts))


MIXED = Schedule(
    prompts=((40, 41, 42), (60,), (50, 51, 52, 53, 54, 55), (40, 41, 42)),
    lengths_P_G=((2, 6, 1), (4, 1, 3), (5, 5, 2), (1, 6, 3)),
    slots=4,
    prompt_slots=2,
)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    count = draw(st.integers(1, 4))
    # Other tokens in every prompt, so that none can be taken for another.
    prompts = tuple(tuple(range(5 + 40 * p, 5 + 40 * p + draw(st.integers(1, 12)))) for p in range(count))
    lengths_P_G = tuple(
        tuple(draw(st.lists(st.integers(1, SAMPLING.max_new_tokens), min_size=1, max_size=4))) for _ in range(count)
    )
    slots = draw(st.integers(1, sum(map(len, lengths_P_G))))
    return Schedule(prompts, lengths_P_G, slots, draw(st.integers(1, min(slots, count))))


@torch.no_grad()
def run(decoding: Decoding, after_each: Callable[[], None] = lambda: None) -> dict[tuple[int, int], Row]:
    """All rows by (group, answer); `after_each` is called after admission, step and retirement."""
    finished: dict[tuple[int, int], Row] = {}
    while decoding.admit():
        after_each()
        decoding.step()
        after_each()
        for row in decoding.retire():
            assert (row.group, row.answer) not in finished
            finished[row.group, row.answer] = row
        after_each()
    return finished


def assert_same_rows(actual: dict[tuple[int, int], Row], expected: dict[tuple[int, int], Row]) -> None:
    assert actual.keys() == expected.keys()
    for key, row in expected.items():
        assert actual[key].tokens == row.tokens
        assert actual[key].logprobs == pytest.approx(row.logprobs, abs=1e-10)
        assert actual[key].stop_reason == row.stop_reason


@functools.cache
@torch.no_grad()
def reference_kv(family: str, ids: tuple[int, ...]) -> Tensor:
    """Keys and values of a sequence from the model's own cache, (layers, 2, KV heads, tokens, D)."""
    cache = policy_of(family).model(input_ids=torch.tensor([ids]), use_cache=True).past_key_values
    return torch.stack([torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers])


def forwarded(calls: DecoderCalls) -> Counter[tuple[int, int]]:
    """How often each (position, token) went through the decoder."""
    return Counter(
        pair
        for call in calls.inputs
        for pair in zip(call["position_ids"].flatten().tolist(), call["input_ids"].flatten().tolist(), strict=True)
    )


def every_token_once(problems: Sequence[Problem], rows: Sequence[Row]) -> Counter[tuple[int, int]]:
    """Each prompt once, and every token of an answer but the last."""
    pairs = [pair for problem in problems for pair in enumerate(problem.prompt_ids)]
    for row in rows:
        pairs += enumerate(row.tokens[:-1], start=len(problems[row.group].prompt_ids))
    return Counter(pairs)


# Sizes.


@pytest.mark.parametrize(
    ("problems", "group_size", "max_concurrent", "slots", "prompt_slots"),
    [
        (3, 4, None, 12, 3),
        (3, 4, 100, 12, 3),
        (3, 4, 12, 12, 3),
        (3, 4, 5, 5, 3),  # two groups, and one more
        (3, 4, 4, 4, 2),
        (3, 4, 1, 1, 1),
        (64, 8, 16, 16, 3),
        (64, 1, 16, 16, 16),
        (1, 8, 4, 4, 1),
    ],
)
def test_slots_of_a_call(
    problems: int, group_size: int, max_concurrent: int | None, slots: int, prompt_slots: int
) -> None:
    prompts = problems_of(*[(40,) * (1 + p) for p in range(problems)])
    shape = slot_shape(policy_of(), prompts, group_size, 50, max_concurrent)
    assert shape == SlotShape(2, 2, 8, prompt_slots, problems, slots, 50)
    # Key and value in two layers with two heads of eight: 64 values of 8 bytes a token.
    assert shape.bytes(torch.float64) == 512 * (prompt_slots * problems + slots * 50)


# Once, and only once.


@given(schedules())
@settings(max_examples=40)
def test_every_token_is_forwarded_once_in_any_schedule(schedule: Schedule) -> None:
    decoding = schedule.decoding(policy_of())

    def check() -> None:
        assert len(decoding.live) <= schedule.slots
        assert len({row.group for row in decoding.live}) <= schedule.prompt_slots
        assert len({(row.group, row.answer) for row in decoding.live}) == len(decoding.live)

    with watch_decoder(policy_of()) as calls:
        rows = run(decoding, check)
    assert {key: len(row.tokens) for key, row in rows.items()} == {
        (p, g): length for p, lengths_G in enumerate(schedule.lengths_P_G) for g, length in enumerate(lengths_G)
    }
    assert forwarded(calls) == every_token_once(schedule.problems, list(rows.values()))


@given(schedules())
@settings(max_examples=12)
def test_every_prompt_is_stored_once_and_each_row_keeps_its_own_keys(schedule: Schedule) -> None:
    decoding = schedule.decoding(policy_of())
    stores = (decoding.kv.prompts, decoding.kv.answers)
    held_bytes = sum(store.untyped_storage().nbytes() for store in stores)
    assert held_bytes == schedule.shape(policy_of()).bytes(torch.float64)
    begun: set[int] = set()
    finished: Counter[int] = Counter()
    with torch.no_grad():
        while decoding.admit():
            begun |= {row.group for row in decoding.live}
            decoding.step()
            finished.update(row.group for row in decoding.retire())
            in_work = [group for group in begun if finished[group] < len(schedule.lengths_P_G[group])]
            assert stored_prompts(decoding, schedule, len(in_work)) == sorted(in_work)
            assert_own_keys(decoding, schedule)
    assert decoding.kv.prompts is stores[0] and decoding.kv.answers is stores[1], "nothing is made anew"


def stored_prompts(decoding: Decoding, schedule: Schedule, slots: int) -> list[int]:
    """Which groups' prompts lie in the first prompt slots, by their keys and values."""
    assert slots <= schedule.prompt_slots
    return sorted(
        group
        for slot in range(slots)
        for group, prompt in enumerate(schedule.prompts)
        if torch.allclose(
            decoding.kv.prompts[:, :, slot, :, : len(prompt)], reference_kv("llama", prompt), rtol=0, atol=1e-12
        )
    )


def assert_own_keys(decoding: Decoding, schedule: Schedule) -> None:
    for slot, row in enumerate(decoding.live):
        prompt, stored = schedule.prompts[row.group], row.tokens[:-1]
        expected = reference_kv("llama", (*prompt, *stored))[..., len(prompt) :, :]
        held = decoding.kv.answers[:, :, slot, :, : len(stored)]
        assert torch.allclose(held, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_each_row_alone(family: str) -> None:
    policy = policy_of(family)
    rows = run(MIXED.decoding(policy))
    assert len(rows) == 12
    for row in rows.values():
        expected = naive_logprobs(policy, MIXED.prompts[row.group], row.tokens, 1.0)
        assert row.logprobs == pytest.approx(expected.tolist(), abs=1e-10)


@given(schedules())
@settings(max_examples=20)
def test_every_schedule_draws_the_same(schedule: Schedule) -> None:
    assert_same_rows(run(schedule.decoding(policy_of())), run(schedule.at_once().decoding(policy_of())))


# Order.


def rows_per_step(decoding: Decoding) -> list[list[tuple[int, int]]]:
    steps = []
    with torch.no_grad():
        while decoding.admit():
            steps.append([(row.group, row.answer) for row in decoding.live])
            decoding.step()
            decoding.retire()
    return steps


def test_the_last_rows_move_into_the_gaps() -> None:
    decoding = Schedule(((40,),), ((1, 3, 1, 2),), slots=4, prompt_slots=1).decoding(policy_of())
    with torch.no_grad():
        assert decoding.admit()
        decoding.step()
        assert [row.answer for row in decoding.retire()] == [0, 2]
        assert [row.answer for row in decoding.live] == [3, 1]
        assert decoding.admit()
        decoding.step()
        assert [row.answer for row in decoding.retire()] == [3]
        assert [row.answer for row in decoding.live] == [1]
        assert decoding.admit()
        decoding.step()
        assert [row.answer for row in decoding.retire()] == [1]
        assert not decoding.admit()


def test_waiting_rows_take_free_slots_in_their_order() -> None:
    schedule = Schedule(((40,), (50, 51)), ((1, 2), (3, 1, 1)), slots=2, prompt_slots=2)
    assert rows_per_step(schedule.decoding(policy_of())) == [
        [(0, 0), (0, 1)],
        [(0, 1), (1, 0)],
        [(1, 0), (1, 1)],
        [(1, 0), (1, 2)],
    ]


def test_rows_wait_while_no_prompt_slot_is_free() -> None:
    schedule = Schedule(((40,), (50,), (60,)), ((1, 3), (1, 4), (1, 1)), slots=4, prompt_slots=2)
    assert rows_per_step(schedule.decoding(policy_of())) == [
        [(0, 0), (0, 1), (1, 0), (1, 1)],
        [(1, 1), (0, 1)],  # two slots are free, but both prompts are needed
        [(1, 1), (0, 1)],
        [(1, 1), (2, 0), (2, 1)],
    ]


# Rows that come with tokens.


def copies(rows: dict[tuple[int, int], Row], kept: Callable[[int, int], int]) -> list[Row]:
    """The rows in their order, with the first so many tokens of each."""
    return [Row(p, g, row.tokens[: kept(p, g)], row.logprobs[: kept(p, g)]) for (p, g), row in sorted(rows.items())]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kept", [0, 1, 3, 5])
def test_rows_with_tokens_go_on_as_if_never_interrupted(family: str, kept: int) -> None:
    policy = policy_of(family)
    whole = run(MIXED.at_once().decoding(policy))
    lengths = MIXED.lengths_P_G
    # Every length from 0 to one less than the answer has, unequal within a group.
    started = copies(whole, lambda p, g: min(kept + (p + g) % 2, lengths[p][g] - 1))
    with watch_decoder(policy) as calls:
        rows = run(MIXED.at_once().decoding(policy, started))
    assert_same_rows(rows, whole)
    assert forwarded(calls) == every_token_once(MIXED.problems, list(rows.values()))
    assert_same_rows(run(MIXED.decoding(policy, copies(whole, lambda p, g: min(kept, lengths[p][g] - 1)))), whole)


@given(st.data())
@settings(max_examples=25)
def test_rows_with_any_numbers_of_tokens_go_on_in_any_schedule(data: st.DataObject) -> None:
    policy, schedule = policy_of("gemma3_text"), data.draw(schedules())
    whole = run(schedule.at_once().decoding(policy))
    kept = {
        (p, g): data.draw(st.integers(0, length - 1))
        for p, lengths_G in enumerate(schedule.lengths_P_G)
        for g, length in enumerate(lengths_G)
    }
    assert_same_rows(run(schedule.decoding(policy, copies(whole, lambda p, g: kept[p, g]))), whole)


def test_rows_of_one_group_come_with_different_numbers_of_tokens() -> None:
    schedule = Schedule(((40, 41, 42),), ((6, 6, 6, 6),), slots=4, prompt_slots=1)
    whole = run(schedule.decoding(policy_of()))
    started = copies(whole, lambda _, g: (0, 5, 2, 4)[g])
    decoding = schedule.decoding(policy_of(), started)
    with watch_decoder(policy_of()) as calls, torch.no_grad():
        decoding.admit()
        decoding.step()
    [prefill] = calls.inputs
    assert prefill["input_ids"].tolist() == [
        [40, 41, 42, *started[1].tokens[:5], *started[2].tokens[:2], *started[3].tokens[:4]]
    ]
    assert prefill["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 3, 4, 3, 4, 5, 6]]
    assert [len(row.tokens) for row in decoding.live] == [1, 6, 3, 5]


def test_prompts_with_their_rows_are_cut_into_several_forwards() -> None:
    schedule = MIXED.at_once()
    whole = run(schedule.decoding(policy_of()))
    started = copies(whole, lambda p, g: min(2, schedule.lengths_P_G[p][g] - 1))
    # 3 + 1 + 2, 1 + 2 + 2, 6 + 2 + 2 + 1 and 3 + 2 + 2 tokens.
    with watch_decoder(policy_of()) as calls:
        rows = run(schedule.decoding(policy_of(), started, prefill_tokens=11))
    assert [shape for shape in calls.shapes if shape[1] > 1] == [(1, 11), (1, 11), (1, 7)]
    assert_same_rows(rows, whole)


def test_the_rows_of_one_prompt_are_cut_into_several_forwards_too() -> None:
    schedule = Schedule(((40, 41, 42), (50,)), ((6, 6, 6, 6), (6, 6)), slots=6, prompt_slots=2)
    whole = run(schedule.decoding(policy_of()))
    started = copies(whole, lambda p, g: ((2, 3, 5, 1), (0, 4))[p][g])
    with watch_decoder(policy_of()) as calls:
        rows = run(schedule.decoding(policy_of(), started, prefill_tokens=7))
    # 3 + 2, 3 + 3, 3 + 5 (more than 7, and alone), 3 + 1; the second group 1 + 4.
    assert calls.shapes[:6] == [(1, 5), (1, 6), (1, 8), (1, 4), (1, 5), (5, 1)]
    assert [call["input_ids"][0, :3].tolist() for call in calls.inputs[:4]] == [[40, 41, 42]] * 4
    assert calls.inputs[1]["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5]]
    assert_same_rows(rows, whole)


@given(st.data())
@settings(max_examples=25)
def test_however_prefills_are_cut_rows_go_on_as_if_never_interrupted(data: st.DataObject) -> None:
    policy, schedule = policy_of("mistral"), data.draw(schedules())
    whole = run(schedule.at_once().decoding(policy))
    kept = {key: data.draw(st.integers(0, len(row.tokens) - 1)) for key, row in whole.items()}
    budget = data.draw(st.integers(1, 30))
    with watch_decoder(policy) as calls:
        rows = run(schedule.decoding(policy, copies(whole, lambda p, g: kept[p, g]), prefill_tokens=budget))
    assert_same_rows(rows, whole)
    longest = max(len(schedule.prompts[p]) + tokens for (p, _), tokens in kept.items())
    assert all(length <= max(budget, longest) for rows, length in calls.shapes if rows == 1)


# From any length.


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("back_to", [1, 2, 4])
def test_a_row_set_back_by_hand_draws_the_same_again(family: str, back_to: int) -> None:
    schedule = Schedule(((40, 41, 42, 43, 44), (50,)), ((6, 6), (6, 6)), slots=4, prompt_slots=2)
    decoding = schedule.decoding(policy_of(family))
    with torch.no_grad():
        decoding.admit()
        for _ in range(5):
            decoding.step()
        before = [(list(row.tokens), list(row.logprobs)) for row in decoding.live]
        for row in decoding.live[::2]:
            del row.tokens[back_to:], row.logprobs[back_to:]
        decoding.step()
        for row, (tokens, logprobs) in list(zip(decoding.live, before, strict=True))[::2]:
            assert row.tokens == tokens[: back_to + 1]
            assert row.logprobs == pytest.approx(logprobs[: back_to + 1], abs=1e-10)
        assert [len(row.tokens) for row in decoding.live] == [back_to + 1, 6, back_to + 1, 6]


def stepped(schedule: Schedule, family: str) -> Iterator[Decoding]:
    """A decoding after each of its steps, nobody retired."""
    decoding = schedule.decoding(policy_of(family))
    decoding.admit()
    while True:
        decoding.step()
        yield decoding


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("known", [1, 3, 5])
@torch.no_grad()
def test_a_step_needs_no_more_than_tokens_and_stored_keys(family: str, known: int) -> None:
    schedule = Schedule(((40, 41, 42, 43, 44), (50,)), ((6, 6, 6), (6, 6)), slots=5, prompt_slots=2)
    ahead = stepped(schedule, family)
    for _ in range(known):
        source = next(ahead)
    other = next(stepped(schedule, family))
    # The rows of the other decoding, in another order of slots within each group.
    order = [2, 0, 1, 4, 3]
    other.live[:] = [Row(r.group, r.answer, list(r.tokens), list(r.logprobs)) for r in (source.live[i] for i in order)]
    other.kv.answers.fill_(1e30)
    for slot, i in enumerate(order):
        other.kv.answers[:, :, slot, :, : known - 1] = source.kv.answers[:, :, i, :, : known - 1]
    other.step()
    next(ahead)
    for slot, i in enumerate(order):
        assert other.live[slot].tokens == source.live[i].tokens
        assert other.live[slot].logprobs == pytest.approx(source.live[i].logprobs, abs=1e-10)
        assert len(other.live[slot].tokens) == known + 1
