"""How the engine works: what is forwarded when, when an answer and a group end, and what it refuses."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch

from lowmem_grpo.errors import DataError, ModelError, OutOfMemoryFailed, RunFailed
from lowmem_grpo.memory.oom import Recovery
from lowmem_grpo.model import Policy, end_token_ids
from lowmem_grpo.rollout import SlotEngine, decoding
from lowmem_grpo.rollout import engine as engine_module
from lowmem_grpo.rollout.slots import KVSlots, SlotShape
from lowmem_grpo.types import Group, Rollout, SamplingParams
from tests.helpers import END_IDS, byte_ids, naive_logprobs, problems_of, script_answer, tiny_policy, watch_decoder
from tests.shortage import ALWAYS, Shortage
from tests.tiny import FAMILIES, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def policy() -> Policy:
    return tiny_policy(end_ids=END_IDS)


def answer_to(policy: Policy, prompt: list[int], sampling: SamplingParams) -> Rollout:
    [group] = SlotEngine(policy, seed=0).generate(problems_of(prompt), 1, sampling, step=1)
    return group.rollouts[0]


def lengths_of(groups: Sequence[Group]) -> list[list[int]]:
    return [[len(rollout.completion_ids) for rollout in group.rollouts] for group in groups]


def ids_of(groups: Sequence[Group]) -> list[list[tuple[int, ...]]]:
    return [[rollout.completion_ids for rollout in group.rollouts] for group in groups]


def watch_slots(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[KVSlots]]:
    """A weak reference to every store of keys and values that is made from now on."""
    stores: list[weakref.ref[KVSlots]] = []

    def watched(*args: Any, **options: Any) -> KVSlots:
        store = KVSlots(*args, **options)
        stores.append(weakref.ref(store))
        return store

    monkeypatch.setattr(decoding, "KVSlots", watched)
    return stores


# What goes through the decoder.


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointing_does_not_reach_the_sampler(family: str) -> None:
    policy = tiny_policy(family, checkpointing=True, end_ids=[2])
    policy.update_mode()  # as an update leaves it when it is interrupted
    with watch_decoder(policy) as calls:
        rollout = answer_to(policy, [40, 41, 42], SamplingParams(max_new_tokens=5, temperature=1.0))
    assert calls.shapes == [(1, 3), (1, 1), (1, 1), (1, 1), (1, 1)]
    assert len(rollout.completion_ids) == 5


def test_prompts_lie_behind_one_another_and_decode_positions_go_on_from_each() -> None:
    policy = tiny_policy(end_ids=[2])
    with watch_decoder(policy) as calls:
        groups = SlotEngine(policy, seed=0).generate(
            problems_of((40, 41), (50, 51, 52, 53)), 2, SamplingParams(3), step=1
        )
    prefill, *decodes = calls.inputs
    assert prefill["input_ids"].tolist() == [[40, 41, 50, 51, 52, 53]]
    assert prefill["position_ids"].tolist() == [[0, 1, 0, 1, 2, 3]]
    assert [decode["position_ids"].tolist() for decode in decodes] == [[[2], [2], [4], [4]], [[3], [3], [5], [5]]]
    fed = [[[ids[t]] for ids_G in ids_of(groups) for ids in ids_G] for t in range(2)]
    assert [decode["input_ids"].tolist() for decode in decodes] == fed


@pytest.mark.parametrize(
    ("max_concurrent", "prefills"),
    [
        (None, [(1, 6)]),
        (100, [(1, 6)]),
        (6, [(1, 6)]),
        (4, [(1, 6)]),  # three answers to the first prompt, one to the second
        (3, [(1, 4), (1, 2)]),
        (2, [(1, 4), (1, 2)]),
        (1, [(1, 4), (1, 2)]),
    ],
)
def test_each_prompt_is_forwarded_once_per_call(
    policy: Policy, max_concurrent: int | None, prefills: list[tuple[int, int]]
) -> None:
    engine = SlotEngine(policy, seed=0, max_concurrent=max_concurrent)
    with watch_decoder(policy) as calls:
        groups = engine.generate(problems_of((50, 51, 52, 53), (40, 41)), 3, SamplingParams(6), step=1)
    assert [shape for shape in calls.shapes if shape[1] > 1] == prefills
    # Every token but the last of each answer is fed back exactly once.
    fed = sum(rows for rows, length in calls.shapes if length == 1)
    assert fed == sum(length - 1 for lengths_G in lengths_of(groups) for length in lengths_G)


def test_prompts_are_forwarded_together_up_to_a_number_of_tokens(policy: Policy) -> None:
    problems = problems_of(*((40,) * length for length in (4, 3, 3, 9, 2)))
    whole = SlotEngine(policy, seed=0).generate(problems, 2, SamplingParams(1), step=1)
    with watch_decoder(policy) as calls:
        cut = SlotEngine(policy, seed=0, prefill_tokens=7).generate(problems, 2, SamplingParams(1), step=1)
    assert calls.shapes == [(1, 7), (1, 3), (1, 9), (1, 2)], "4 + 3 fit, and 9 goes alone"
    assert ids_of(cut) == ids_of(whole)


def test_keys_in_8_bits_are_asked_for_and_come(monkeypatch: pytest.MonkeyPatch, policy: Policy) -> None:
    dtypes: list[torch.dtype] = []
    stores = watch_slots(monkeypatch)

    def note(*_: int) -> None:
        [store] = [store() for store in stores]
        assert store is not None
        dtypes.append(store.answers.dtype)

    SlotEngine(policy, seed=0, kv_int8=True).generate(problems_of((40, 41)), 2, SamplingParams(1), step=1)
    stores.clear()
    for kv_int8 in (False, True):
        engine = SlotEngine(policy, seed=0, kv_int8=kv_int8)
        engine.generate(problems_of((40, 41)), 2, SamplingParams(1), step=1, on_progress=note)
        stores.clear()
    assert dtypes == [torch.float32, torch.int8]


def test_finished_rows_leave_at_once(policy: Policy) -> None:
    with watch_decoder(policy) as calls:
        groups = SlotEngine(policy, seed=0).generate(problems_of((40, 41, 42), (60,)), 8, SamplingParams(12), step=1)
    lengths = [length for lengths_G in lengths_of(groups) for length in lengths_G]
    living = [sum(length > position for length in lengths) for position in range(1, max(lengths))]
    assert calls.shapes == [(1, 4), *((rows, 1) for rows in living)]
    assert len(set(living)) > 3, "rows must finish at different times, or this shows nothing"


def test_a_free_slot_is_filled_at_once(policy: Policy) -> None:
    problems = problems_of((40, 41, 42), (60,), (70, 71))  # with five slots for groups of four, all prompts fit
    counts = [0]
    with watch_decoder(policy) as calls:
        groups = SlotEngine(policy, seed=0, max_concurrent=5).generate(
            problems, 4, SamplingParams(12), step=1, on_progress=lambda _done, _all, tokens: counts.append(tokens)
        )
    rows_per_step, decoded_per_step = [], []
    waiting = [length for lengths_G in lengths_of(groups) for length in lengths_G]
    live: list[int] = []
    while waiting or live:
        decoded_per_step.append(len(live))  # the first token of a new row comes with its prompt
        while waiting and len(live) < 5:
            live.append(waiting.pop(0))
        rows_per_step.append(len(live))
        live = [length - 1 for length in live if length > 1]
    assert [after - before for before, after in pairwise(counts)] == rows_per_step
    # A prompt of one token starts at position 0, which no decode does.
    decodes = [
        shape for shape, call in zip(calls.shapes, calls.inputs, strict=True) if call["position_ids"].flatten()[0] > 0
    ]
    assert decodes == [(rows, 1) for rows in decoded_per_step if rows]
    assert rows_per_step.count(5) > 3, "as long as rows wait, five decode"


def test_nothing_is_decoded_for_a_limit_of_one(policy: Policy) -> None:
    with watch_decoder(policy) as calls:
        [group] = SlotEngine(policy, seed=0).generate(problems_of((40, 41)), 4, SamplingParams(1), step=1)
    assert calls.shapes == [(1, 2)]
    assert [len(rollout.completion_ids) for rollout in group.rollouts] == [1] * 4


def test_progress_counts_answers_and_tokens(policy: Policy) -> None:
    seen: list[tuple[int, int, int]] = []
    groups = SlotEngine(policy, seed=0).generate(
        problems_of((40, 41), (50,)), 2, SamplingParams(6), step=1, on_progress=lambda *counts: seen.append(counts)
    )
    lengths = [length for lengths_G in lengths_of(groups) for length in lengths_G]
    assert seen == [
        (sum(length <= step for length in lengths), 4, sum(min(length, step) for length in lengths))
        for step in range(1, max(lengths) + 1)
    ]
    assert seen[-1] == (4, 4, sum(lengths))


@pytest.mark.parametrize("max_concurrent", [4, 1])
def test_progress_goes_on_over_refills(policy: Policy, max_concurrent: int) -> None:
    seen: list[tuple[int, int, int]] = []
    groups = SlotEngine(policy, seed=0, max_concurrent=max_concurrent).generate(
        problems_of((40, 41), (50,)), 3, SamplingParams(6), step=1, on_progress=lambda *counts: seen.append(counts)
    )
    total = sum(length for lengths_G in lengths_of(groups) for length in lengths_G)
    assert seen == sorted(seen)
    assert seen[-1] == (6, 6, total)
    if max_concurrent == 1:
        assert [tokens for _, _, tokens in seen] == list(range(1, total + 1))


@pytest.mark.parametrize("max_concurrent", [None, 6, 6000])
def test_slots_are_no_more_than_rows(
    monkeypatch: pytest.MonkeyPatch, policy: Policy, max_concurrent: int | None
) -> None:
    stores = watch_slots(monkeypatch)
    groups = SlotEngine(policy, seed=0, max_concurrent=max_concurrent).generate(
        problems_of((40, 41), (50,)), 3, SamplingParams(6), step=1, on_progress=lambda *_: check_shape(stores)
    )
    assert [len(lengths_G) for lengths_G in lengths_of(groups)] == [3, 3]
    assert len(stores) == 1


def check_shape(stores: Sequence[weakref.ref[KVSlots]]) -> None:
    [store] = [store() for store in stores]
    assert store is not None
    assert (store.shape.slots, store.shape.prompt_slots, store.shape.prompt_tokens) == (6, 2, 2)


# When a group is done.


def test_a_group_is_handed_over_as_soon_as_its_last_answer_is_finished(policy: Policy) -> None:
    problems = problems_of((40, 41, 42), (60,), (70, 71), (80,))
    steps_done: list[int] = []
    handed: list[tuple[int, int, Group]] = []
    groups = SlotEngine(policy, seed=0).generate(
        problems,
        3,
        SamplingParams(12),
        step=1,
        on_progress=lambda finished, *_: steps_done.append(finished),
        on_group=lambda index, group: handed.append((index, len(steps_done) + 1, group)),
    )
    steps = [max(lengths_G) for lengths_G in lengths_of(groups)]
    assert sorted((index, step) for index, step, _ in handed) == list(enumerate(steps))
    assert [step for _, step, _ in handed] == sorted(steps)
    assert all(group is groups[index] for index, _, group in handed)
    assert [group.problem for group in groups] == problems
    assert min(steps) < max(steps), "groups must end at different times, or this shows nothing"


@pytest.mark.parametrize("max_concurrent", [1, 2, 5])
def test_every_group_is_handed_over_once_while_others_wait(policy: Policy, max_concurrent: int) -> None:
    problems = problems_of((40, 41, 42), (60,), (70, 71))
    handed: list[int] = []
    finished = [0]
    finished_before: list[int] = []

    def on_group(index: int, group: Group) -> None:
        assert group.problem is problems[index]
        handed.append(index)
        finished_before.append(finished[-1])

    groups = SlotEngine(policy, seed=0, max_concurrent=max_concurrent).generate(
        problems, 3, SamplingParams(12), step=1, on_progress=lambda done, *_: finished.append(done), on_group=on_group
    )
    assert sorted(handed) == [0, 1, 2]
    assert finished_before[0] < 6, "the first group comes while two others are not finished"
    if max_concurrent == 1:
        assert (handed, finished_before) == ([0, 1, 2], [2, 5, 8])
    assert ids_of(groups) == ids_of(SlotEngine(policy, seed=0).generate(problems, 3, SamplingParams(12), step=1))


# When an answer ends.


def test_every_end_token_of_the_model_and_of_the_tokenizer_ends_an_answer() -> None:
    policy = tiny_policy(end_ids=range(100, 180))  # the tokenizer adds 2
    assert policy.end_ids == {2, *range(100, 180)}
    groups = SlotEngine(policy, seed=0).generate(problems_of((40, 41), (60,)), 16, SamplingParams(10), step=1)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    for rollout in rollouts:
        *inner, last = rollout.completion_ids
        assert not policy.end_ids & set(inner)
        assert rollout.stop_reason == ("end" if last in policy.end_ids else "length")
    assert Counter(rollout.stop_reason for rollout in rollouts)["end"] > 16
    assert len({rollout.completion_ids[-1] for rollout in rollouts}) > 8, "many different end tokens were seen"


@pytest.mark.parametrize(
    ("script", "kept", "reason"),
    [
        ([5, 6, 2, 2, 2], (5, 6, 2), "end"),
        ([5, 6, 7, 8, 9], (5, 6, 7, 8, 9), "length"),
        ([5, 6, 7, 8, 2], (5, 6, 7, 8, 2), "end"),
        ([2], (2,), "end"),
    ],
)
def test_the_first_end_token_counts_and_nothing_after_it(
    monkeypatch: pytest.MonkeyPatch, script: list[int], kept: tuple[int, ...], reason: str
) -> None:
    policy = tiny_policy()
    script_answer(monkeypatch, policy, script)
    rollout = answer_to(policy, [40], SamplingParams(5))
    assert (rollout.completion_ids, rollout.stop_reason) == (kept, reason)
    assert rollout.sampled_T == (True,) * len(kept)
    assert rollout.truncated == (reason == "length")
    # Special tokens leave no trace in the text.
    assert byte_ids(rollout.text) == [token for token in kept if token != 2]


@pytest.mark.parametrize(
    ("written", "stop", "kept"),
    [
        ("1 + 1 = 2\nUser: more", ["\n"], "1 + 1 = 2\n"),
        ("done</answer> and more", ["</answer>"], "done</answer>"),  # nine tokens long
        ("aab aaab", ["aaab"], "aab aaab"),  # the false start does not count
        ("one, two", ["zzz", ","], "one,"),  # any of several
        ("x</answer>y", ["</answer>", "answer"], "x</answer"),  # the one that is complete first
        ("10 → 20", ["→"], "10 →"),  # one character in three tokens
        ("a→→→end.", ["end"], "a→→→end"),  # the tail that is looked at begins inside a character
        ("Grüße, é!", ["é!"], "Grüße, é!"),
        ("no stop here", ["STOP"], "no stop here"),
        ("→" * 4, ["\N{RIGHTWARDS DOUBLE ARROW}", "\N{INVERTED QUESTION MARK}"], "→" * 4),  # shared bytes are no match
    ],
)
def test_stop_strings(
    monkeypatch: pytest.MonkeyPatch, policy: Policy, written: str, stop: list[str], kept: str
) -> None:
    tokens = byte_ids(written)
    policy = tiny_policy()
    script_answer(monkeypatch, policy, tokens)
    rollout = answer_to(policy, [40], SamplingParams(len(tokens), stop=tuple(stop)))
    assert rollout.text == kept
    assert rollout.completion_ids == tuple(byte_ids(kept))
    stopped = any(s in written for s in stop)
    assert rollout.stop_reason == ("stop" if stopped else "length")
    assert rollout.truncated is not stopped


def test_an_answer_that_completes_its_stop_string_at_the_limit_is_not_truncated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = tiny_policy()
    script_answer(monkeypatch, policy, byte_ids("ab."))
    assert answer_to(policy, [40], SamplingParams(3, stop=(".",))).stop_reason == "stop"


def test_special_tokens_inside_a_stop_string_do_not_hide_it(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy()
    [a, b] = byte_ids("ab")
    script_answer(monkeypatch, policy, [a, *[1] * 9, b, a, a])  # 1 is <|im_start|>, which the text leaves out
    rollout = answer_to(policy, [40], SamplingParams(13, stop=("ab",)))
    assert (rollout.text, rollout.stop_reason) == ("ab", "stop")


# What is drawn.


def test_filters_leave_log_probs_those_of_the_full_softmax(policy: Policy) -> None:
    sampling = SamplingParams(6, temperature=0.7, top_k=5, top_p=0.8, min_p=0.1)
    groups = SlotEngine(policy, seed=0).generate(problems_of((40, 41, 42), (60,)), 4, sampling, step=1)
    for group in groups:
        for rollout in group.rollouts:
            full = naive_logprobs(policy, group.problem.prompt_ids, rollout.completion_ids, 0.7)
            assert rollout.sampler_logprobs_T == pytest.approx(full.tolist(), abs=1e-4)
            ids = torch.tensor([[*group.problem.prompt_ids, *rollout.completion_ids]])
            with torch.no_grad():
                logits_T_V = policy.model(input_ids=ids).logits[0, len(group.problem.prompt_ids) - 1 : -1]
            ranks_T = (logits_T_V > logits_T_V.gather(1, ids[0, len(group.problem.prompt_ids) :, None])).sum(dim=1)
            assert ranks_T.max() < 5


def test_equal_prompts_are_groups_of_their_own(policy: Policy) -> None:
    twice = problems_of((40, 41, 42), (40, 41, 42))
    first, second = SlotEngine(policy, seed=0).generate(twice, 3, SamplingParams(8), step=1)
    assert [group.problem.id for group in (first, second)] == ["p-0", "p-1"]
    answers = [rollout.completion_ids for group in (first, second) for rollout in group.rollouts]
    assert len(set(answers)) == 6


@pytest.mark.parametrize(("seed", "step"), [(1, 1), (0, 2)])
def test_seed_and_step_change_the_answers_and_nothing_else_does(policy: Policy, seed: int, step: int) -> None:
    def answers(seed: int, step: int) -> list[tuple[int, ...]]:
        [group] = SlotEngine(policy, seed=seed).generate(problems_of((40, 41)), 4, SamplingParams(8), step=step)
        return [rollout.completion_ids for rollout in group.rollouts]

    torch.manual_seed(1)
    before = answers(0, 1)
    torch.manual_seed(2)
    assert answers(0, 1) == before
    assert all(new != old for new, old in zip(answers(seed, step), before, strict=True))


# What is kept.


def test_keys_and_values_live_only_inside_generate(monkeypatch: pytest.MonkeyPatch, policy: Policy) -> None:
    stores = watch_slots(monkeypatch)
    alive_per_step: list[int] = []
    for _ in range(2):
        SlotEngine(policy, seed=0, max_concurrent=2).generate(
            problems_of((40, 41, 42)),
            4,
            SamplingParams(4),
            step=1,
            on_progress=lambda *_: alive_per_step.append(sum(store() is not None for store in stores)),
        )
    assert len(stores) == 2
    assert set(alive_per_step) == {1}, "those of one call are gone when the next one starts"
    assert [store() for store in stores] == [None, None]


class Interruption(BaseException):
    """What no `except Exception` would catch, as a stop by signal is."""


def raise_in_on_group(_: pytest.MonkeyPatch, __: Policy, error: BaseException) -> dict[str, Callable[..., None]]:
    def on_group(index: int, group: Group) -> None:
        raise error

    return {"on_group": on_group}


def raise_in_on_progress(_: pytest.MonkeyPatch, __: Policy, error: BaseException) -> dict[str, Callable[..., None]]:
    def on_progress(finished: int, answers: int, tokens: int) -> None:
        if finished:
            raise error

    return {"on_progress": on_progress}


def raise_in_decode(
    monkeypatch: pytest.MonkeyPatch, policy: Policy, error: BaseException
) -> dict[str, Callable[..., None]]:
    own, calls = policy.tokenizer.decode, iter(range(1000))

    def decode(*args: Any, **kwargs: Any) -> str:
        if next(calls) == 4:
            raise error
        return own(*args, **kwargs)

    monkeypatch.setattr(policy.tokenizer, "decode", decode)
    return {}


@pytest.mark.parametrize("break_it", [raise_in_on_group, raise_in_on_progress, raise_in_decode])
@pytest.mark.parametrize("kind", [ValueError, Interruption])
def test_an_exception_comes_through_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
    policy: Policy,
    kind: type[BaseException],
    break_it: Callable[[pytest.MonkeyPatch, Policy, BaseException], dict[str, Callable[..., None]]],
) -> None:
    problems, sampling = problems_of((40, 41, 42), (60,), (70, 71)), SamplingParams(8)
    expected = SlotEngine(policy, seed=0, max_concurrent=4).generate(problems, 3, sampling, step=1)
    engine, error = SlotEngine(policy, seed=0, max_concurrent=4), kind("broken")
    with monkeypatch.context() as patch:
        stores = watch_slots(patch)
        callbacks = break_it(patch, policy, error)
        with pytest.raises(kind) as caught:
            engine.generate(problems, 3, sampling, step=1, **callbacks)
    assert caught.value is error
    assert (str(error), error.__cause__, error.__context__) == ("broken", None, None)
    assert len(stores) == 1
    del caught
    error.__traceback__ = None  # it holds the frames of the call
    assert stores[0]() is None
    assert engine.generate(problems, 3, sampling, step=1) == expected


# When the memory runs out.


OOM_PROBLEMS = problems_of((40, 41, 42), (60,), (50, 51, 52, 53), (70, 71))
OOM_SAMPLING = SamplingParams(9)


def needing(patch: pytest.MonkeyPatch, policy: Policy, place: str, shortage: Shortage) -> None:
    """Let the shortage strike where the engine asks for memory."""
    owner, name = {
        "slots": (decoding, "KVSlots"),
        "forward": (policy, "hidden_states"),
        "head": (policy, "logits"),
        "sampling": (decoding, "sample_tokens"),
        "moving": (KVSlots, "move_answer"),
    }[place]
    patch.setattr(owner, name, shortage.given(getattr(owner, name)))


def sampled(engine: SlotEngine, **callbacks: Any) -> list[Group]:
    return engine.generate(OOM_PROBLEMS, 4, OOM_SAMPLING, step=1, **callbacks)


def assert_same_groups(groups: Sequence[Group], expected: Sequence[Group]) -> None:
    assert ids_of(groups) == ids_of(expected)
    for group, other in zip(groups, expected, strict=True):
        for rollout, twin in zip(group.rollouts, other.rollouts, strict=True):
            assert (rollout.text, rollout.stop_reason) == (twin.text, twin.stop_reason)
            assert rollout.sampler_logprobs_T == pytest.approx(twin.sampler_logprobs_T, abs=1e-10)


@pytest.fixture(scope="module")
def policy64() -> Policy:
    return tiny_policy("gemma3_text", torch.float64, end_ids=END_IDS)


@pytest.mark.parametrize("place", ["slots", "forward", "head", "sampling", "moving"])
def test_answers_are_the_same_wherever_the_memory_runs_out(
    monkeypatch: pytest.MonkeyPatch, policy64: Policy, place: str
) -> None:
    # A collection takes longer than all the rest, and what the failed call held has to be gone without one.
    monkeypatch.setattr(engine_module, "release_memory", lambda _: None)
    whole, counter = sampled(SlotEngine(policy64, seed=0, max_concurrent=6)), Shortage()
    with monkeypatch.context() as patch:
        needing(patch, policy64, place, counter)
        sampled(SlotEngine(policy64, seed=0, max_concurrent=6))
    assert counter.calls >= (1 if place == "slots" else 6)
    for number in range(1, counter.calls + 1):
        handed: list[int] = []
        recoveries: list[Recovery] = []
        engine = SlotEngine(policy64, seed=0, max_concurrent=6, on_out_of_memory=recoveries.append)
        with monkeypatch.context() as patch:
            shortage = Shortage([number])
            needing(patch, policy64, place, shortage)
            groups = sampled(engine, on_group=lambda index, _, handed=handed: handed.append(index))
        assert_same_groups(groups, whole)
        assert sorted(handed) == [0, 1, 2, 3], "each group once"
        assert (len(shortage.held), len(recoveries)) == (1, 1)
        assert recoveries[0].lowered == {"max_concurrent": 3}
        assert (engine.max_concurrent, engine.prefill_tokens) == (3, 2048)


@pytest.mark.parametrize("fails", [[1, 2], [1, 4], [3, 4], [2, 5, 9], [2, 3, 4, 5]])
def test_answers_are_the_same_however_often_the_memory_runs_out(
    monkeypatch: pytest.MonkeyPatch, policy64: Policy, fails: list[int]
) -> None:
    whole = sampled(SlotEngine(policy64, seed=0))
    recoveries: list[Recovery] = []
    engine = SlotEngine(policy64, seed=0, max_concurrent=12, on_out_of_memory=recoveries.append)
    with monkeypatch.context() as patch:
        needing(patch, policy64, "forward", Shortage(fails))
        assert_same_groups(sampled(engine), whole)
    expected = [{"max_concurrent": 6}, {"max_concurrent": 3}, {"max_concurrent": 1}, {"prefill_tokens": 1024}]
    assert [recovery.lowered for recovery in recoveries] == expected[: len(fails)]


def test_nothing_is_sampled_twice_and_what_was_sampled_is_prefilled(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy(dtype=torch.float64, end_ids=[2])
    tokens, drawn, draw = [0], list[int](), decoding.sample_tokens
    monkeypatch.setattr(
        decoding, "sample_tokens", lambda logits, *more: drawn.append(len(logits)) or draw(logits, *more)
    )
    needing(monkeypatch, policy, "forward", Shortage([4]))
    with watch_decoder(policy) as calls:
        groups = SlotEngine(policy, seed=0).generate(
            problems_of((40, 41, 42), (50, 51)),
            2,
            SamplingParams(6),
            step=1,
            on_progress=lambda *counts: tokens.append(counts[2]),
        )
    assert lengths_of(groups) == [[6, 6], [6, 6]]
    # The third decode fails. Of four rows two go on at once, and two when those are done.
    assert drawn == [4, 4, 4, *[2] * 6]
    assert tokens == [0, 4, 8, 12, 12, 14, 16, 18, 20, 22, 24], "none is lost on the way"
    begun = [[rollout.completion_ids[:3] for rollout in group.rollouts] for group in groups]
    assert calls.shapes == [(1, 5), (4, 1), (4, 1), (1, 9), (2, 1), (2, 1), (1, 8), (2, 1), (2, 1)]
    assert calls.inputs[3]["input_ids"].tolist() == [[40, 41, 42, *begun[0][0], *begun[0][1]]]
    assert calls.inputs[6]["input_ids"].tolist() == [[50, 51, *begun[1][0], *begun[1][1]]]


def test_rows_that_go_on_are_prefilled_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy(dtype=torch.float64, end_ids=[2])
    problems, sampling = problems_of((40, 41, 42), (50, 51)), SamplingParams(8)
    whole = SlotEngine(policy, seed=0).generate(problems, 4, sampling, step=1)
    assert lengths_of(whole) == [[8] * 4] * 2
    needing(monkeypatch, policy, "forward", Shortage([6]))
    with watch_decoder(policy) as calls:
        engine = SlotEngine(policy, seed=0, prefill_tokens=14)
        assert_same_groups(engine.generate(problems, 4, sampling, step=1), whole)
    prefills = [shape for shape in calls.shapes if shape[1] > 1]
    # The prompts; then 3 + 5 + 5 and, with the prompt again, 3 + 5 + 5; the second group 2 + 5 + 5 twice as well.
    assert prefills == [(1, 5), (1, 13), (1, 13), (1, 12), (1, 12)]


@pytest.mark.parametrize("place", ["slots", "forward", "moving"])
def test_the_old_keys_and_values_are_gone_before_there_are_new_ones(
    monkeypatch: pytest.MonkeyPatch, policy64: Policy, place: str
) -> None:
    stores = watch_slots(monkeypatch)
    shortage = Shortage([2])
    make = decoding.KVSlots

    def checked(*args: Any, **options: Any) -> KVSlots:
        assert [store() for store in stores if store() is not None] == []
        return make(*args, **options)

    monkeypatch.setattr(decoding, "KVSlots", checked)
    needing(monkeypatch, policy64, "forward" if place == "slots" else place, Shortage([2]))
    if place == "slots":
        needing(monkeypatch, policy64, "slots", shortage)
    sampled(SlotEngine(policy64, seed=0, max_concurrent=6))
    assert len(stores) == 2


def test_only_unfinished_rows_get_slots_again(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy(end_ids=[2])
    script = {(0, 0): 1, (0, 1): 1, (0, 2): 1, (1, 0): 5, (1, 1): 5, (1, 2): 5}
    monkeypatch.setattr(
        SlotEngine,
        "_stop_reason",
        lambda _, row, __: "length" if len(row.tokens) == script[row.group, row.answer] else None,
    )
    shapes: list[SlotShape] = []
    make = decoding.KVSlots
    monkeypatch.setattr(
        decoding, "KVSlots", lambda shape, *rest, **more: shapes.append(shape) or make(shape, *rest, **more)
    )
    needing(monkeypatch, policy, "forward", Shortage([3]))
    engine = SlotEngine(policy, seed=0, max_concurrent=6)
    engine.generate(problems_of((40,) * 9, (50, 51)), 3, SamplingParams(5), step=1)
    assert [(s.slots, s.prompt_slots, s.prompt_tokens, s.answer_tokens) for s in shapes] == [(6, 2, 9, 5), (3, 1, 2, 5)]


def test_the_limit_is_kept_for_the_next_calls_and_the_callback_hears_a_sentence(
    monkeypatch: pytest.MonkeyPatch, policy64: Policy
) -> None:
    recoveries: list[Recovery] = []
    engine = SlotEngine(policy64, seed=0, on_out_of_memory=recoveries.append)
    with monkeypatch.context() as patch:
        needing(patch, policy64, "slots", Shortage([1]))
        sampled(engine)
    assert engine.max_concurrent == 8
    assert recoveries == [
        Recovery(
            "The memory ran out with 16 answers decoding at once; the 16 unfinished ones keep their tokens and go on, "
            "8 at a time.",
            {"max_concurrent": 8},
        )
    ]
    stores: list[int] = []
    make = decoding.KVSlots
    monkeypatch.setattr(
        decoding, "KVSlots", lambda shape, *rest, **more: stores.append(shape.slots) or make(shape, *rest, **more)
    )
    sampled(engine)
    assert (stores, len(recoveries)) == ([8], 1)


@pytest.mark.parametrize("place", ["slots", "forward", "head", "sampling"])
def test_a_memory_too_small_for_one_answer_ends_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, policy64: Policy, place: str
) -> None:
    recoveries: list[Recovery] = []
    engine = SlotEngine(policy64, seed=0, max_concurrent=6, prefill_tokens=1000, on_out_of_memory=recoveries.append)
    needing(monkeypatch, policy64, place, Shortage(ALWAYS))
    with pytest.raises(OutOfMemoryFailed) as caught:
        sampled(engine)
    assert str(caught.value) == (
        "The memory does not suffice to sample one answer at a time: lower rollout.max_new_tokens (now 9) or "
        "data.max_prompt_tokens (the longest prompt here has 4 tokens)."
    )
    assert caught.value.__context__ is None, "it would hold the frames that hold the tensors"
    assert [recovery.lowered for recovery in recoveries] == [
        {"max_concurrent": 3},
        {"max_concurrent": 1},
        {"prefill_tokens": 500},
        {"prefill_tokens": 256},
    ]


def test_a_prefill_that_was_small_already_is_not_lowered(monkeypatch: pytest.MonkeyPatch, policy64: Policy) -> None:
    engine = SlotEngine(policy64, seed=0, max_concurrent=1, prefill_tokens=100)
    needing(monkeypatch, policy64, "forward", Shortage(ALWAYS))
    with pytest.raises(OutOfMemoryFailed):
        sampled(engine)
    assert (engine.max_concurrent, engine.prefill_tokens) == (1, 100)


def test_other_errors_and_those_of_callbacks_are_not_taken_for_a_lack_of_memory(
    monkeypatch: pytest.MonkeyPatch, policy64: Policy
) -> None:
    recoveries: list[Recovery] = []
    engine = SlotEngine(policy64, seed=0, on_out_of_memory=recoveries.append)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):  # a reward model on the card, say
        sampled(engine, on_group=Shortage([1]).need)
    monkeypatch.setattr(policy64, "logits", lambda _: torch.zeros(2, 3) @ torch.zeros(2, 3))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        sampled(engine)
    assert (recoveries, engine.max_concurrent) == ([], None)


# What is refused.


@pytest.mark.parametrize(("length", "max_new_tokens"), [(509, 4), (512, 1), (600, 4)])
def test_a_prompt_that_leaves_no_room_is_refused(policy: Policy, length: int, max_new_tokens: int) -> None:
    problems = problems_of((40,), (40,) * length)  # the context holds 512
    with watch_decoder(policy) as calls, pytest.raises(DataError) as caught:
        SlotEngine(policy, seed=0).generate(problems, 1, SamplingParams(max_new_tokens), step=1)
    assert str(caught.value) == (
        f"The prompt of p-1 has {length} tokens and with rollout.max_new_tokens={max_new_tokens} exceeds the model's "
        "context of 512."
    )
    assert calls.shapes == [], "it is known before anything is computed"


def test_a_prompt_that_just_fits_is_answered(policy: Policy) -> None:
    assert len(answer_to(policy, [40] * 511, SamplingParams(1)).completion_ids) == 1


def break_logits(monkeypatch: pytest.MonkeyPatch, policy: Policy, value: float, after: int) -> None:
    """One value among the logits of the last row, after so many tokens."""
    own, calls = policy.logits, iter(range(10))

    def logits(hidden_B_H: torch.Tensor) -> torch.Tensor:
        logits_B_V = own(hidden_B_H)
        if next(calls) == after:
            logits_B_V[-1, 7] = value
        return logits_B_V

    monkeypatch.setattr(policy, "logits", logits)


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_logits_stop_the_run(monkeypatch: pytest.MonkeyPatch, after: int, value: float) -> None:
    policy = tiny_policy(end_ids=[2])
    break_logits(monkeypatch, policy, value, after)
    with pytest.raises(RunFailed) as caught:
        SlotEngine(policy, seed=0).generate(problems_of((40, 41), (50,)), 2, SamplingParams(8), step=1)
    assert str(caught.value) == (
        f"tiny gave non-finite logits while sampling token {after + 1} of an answer to p-1; with float16 try "
        "model.compute_dtype=float32, otherwise lower optim.lr."
    )


def test_non_finite_logits_name_the_row_and_not_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy(end_ids=[2])
    script_answer(monkeypatch, policy, [5] * 9)
    break_logits(monkeypatch, policy, float("nan"), after=5)
    with pytest.raises(RunFailed, match=r"while sampling token 2 of an answer to p-1;"):
        # Each answer takes four steps, and the only slot then goes to the second problem.
        SlotEngine(policy, seed=0, max_concurrent=1).generate(
            problems_of((40, 41), (50,)), 1, SamplingParams(4), step=1
        )


@pytest.mark.parametrize(
    ("listed", "kept"), [([2, 264], {2}), ([5, 263, 5000, -1], {2, 5, 263}), (264, {2}), (None, {2})]
)
def test_end_tokens_outside_the_vocabulary_are_left_out(listed: int | list[int] | None, kept: set[int]) -> None:
    base = tiny_model()  # 264 words
    base.generation_config.eos_token_id = listed
    assert end_token_ids(base, tiny_tokenizer()) == kept


def test_only_end_tokens_outside_the_vocabulary_are_refused() -> None:
    base, tokenizer = tiny_model(), tiny_tokenizer()
    base.generation_config.eos_token_id = [5000, 264]
    tokenizer.eos_token = None
    with pytest.raises(ModelError) as caught:
        end_token_ids(base, tokenizer)
    assert str(caught.value) == (
        "The end token 264 is outside the model's vocabulary of 264, so no answer could ever end: the tokenizer "
        "belongs to another model."
    )
