"""How the batched engine works: what is forwarded when, when an answer ends, and what it refuses."""

from __future__ import annotations

import weakref
from collections import Counter

import pytest
import torch
from transformers import DynamicCache

from lowmem_grpo.errors import DataError, RunFailed
from lowmem_grpo.model import Policy
from lowmem_grpo.rollout import BatchEngine
from lowmem_grpo.types import Rollout, SamplingParams
from tests.helpers import END_IDS, byte_ids, naive_logprobs, problems_of, script_answer, tiny_policy, watch_decoder
from tests.tiny import FAMILIES


@pytest.fixture(scope="module")
def policy() -> Policy:
    return tiny_policy(end_ids=END_IDS)


def answer_to(policy: Policy, prompt: list[int], sampling: SamplingParams) -> Rollout:
    [group] = BatchEngine(policy, seed=0).generate(problems_of(prompt), 1, sampling, step=1)
    return group.rollouts[0]


# What goes through the decoder.


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointing_leaves_the_cache_on(family: str) -> None:
    policy = tiny_policy(family, checkpointing=True, end_ids=[2])
    policy.update_mode()  # as an update leaves it when it is interrupted
    with watch_decoder(policy) as calls:
        rollout = answer_to(policy, [40, 41, 42], SamplingParams(max_new_tokens=5, temperature=1.0))
    assert calls.shapes == [(1, 3), (1, 1), (1, 1), (1, 1), (1, 1)]
    assert len(rollout.completion_ids) == 5


def test_a_prompt_is_left_padded_and_its_positions_start_at_its_first_token() -> None:
    policy = tiny_policy(end_ids=[2])
    with watch_decoder(policy) as calls:
        BatchEngine(policy, seed=0).generate(problems_of((40, 41), (50, 51, 52, 53)), 2, SamplingParams(2), step=1)
    prefill, decode = calls.inputs
    assert prefill["input_ids"].tolist() == [[2, 2, 40, 41], [50, 51, 52, 53]]
    assert prefill["attention_mask"].tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]
    assert prefill["position_ids"].tolist() == [[0, 0, 0, 1], [0, 1, 2, 3]]
    assert decode["attention_mask"].tolist() == [[0, 0, 1, 1, 1]] * 2 + [[1, 1, 1, 1, 1]] * 2
    assert decode["position_ids"].tolist() == [[2], [2], [4], [4]]


@pytest.mark.parametrize(
    ("max_concurrent", "prefills"),
    [
        (None, [(2, 4)]),
        (6, [(2, 4)]),
        (3, [(1, 4), (1, 2)]),
        # Waves of two: the middle one holds the last answer to the first prompt and the first to the second.
        (2, [(1, 4), (2, 4), (1, 2)]),
        (1, [(1, 4)] * 3 + [(1, 2)] * 3),
    ],
)
def test_each_prompt_is_forwarded_once_per_wave(
    policy: Policy, max_concurrent: int | None, prefills: list[tuple[int, int]]
) -> None:
    engine = BatchEngine(policy, seed=0, max_concurrent=max_concurrent)
    with watch_decoder(policy) as calls:
        groups = engine.generate(problems_of((50, 51, 52, 53), (40, 41)), 3, SamplingParams(6), step=1)
    assert [shape for shape in calls.shapes if shape[1] > 1] == prefills
    # Every token but the last of each answer is fed back exactly once.
    fed = sum(rows for rows, length in calls.shapes if length == 1)
    assert fed == sum(len(rollout.completion_ids) - 1 for group in groups for rollout in group.rollouts)


def test_finished_rows_leave_the_batch_at_once(policy: Policy) -> None:
    with watch_decoder(policy) as calls:
        groups = BatchEngine(policy, seed=0).generate(problems_of((40, 41, 42), (60,)), 8, SamplingParams(12), step=1)
    lengths = [len(rollout.completion_ids) for group in groups for rollout in group.rollouts]
    living = [sum(length > position for length in lengths) for position in range(1, max(lengths))]
    assert calls.shapes == [(2, 3), *((rows, 1) for rows in living)]
    assert len(set(living)) > 3, "rows must finish at different times, or this shows nothing"


def test_nothing_is_decoded_for_a_limit_of_one(policy: Policy) -> None:
    with watch_decoder(policy) as calls:
        [group] = BatchEngine(policy, seed=0).generate(problems_of((40, 41)), 4, SamplingParams(1), step=1)
    assert calls.shapes == [(1, 2)]
    assert [len(rollout.completion_ids) for rollout in group.rollouts] == [1] * 4


def test_progress_counts_answers_and_tokens_over_all_waves(policy: Policy) -> None:
    seen: list[tuple[int, int, int]] = []
    engine = BatchEngine(policy, seed=0, max_concurrent=2)
    groups = engine.generate(
        problems_of((40, 41), (50,)), 2, SamplingParams(6), step=1, on_progress=lambda *counts: seen.append(counts)
    )
    lengths = [[len(rollout.completion_ids) for rollout in group.rollouts] for group in groups]
    assert len(seen) == max(lengths[0]) + max(lengths[1])
    assert seen[0] == (sum(length == 1 for length in lengths[0]), 4, 2)
    assert seen[max(lengths[0]) - 1] == (2, 4, sum(lengths[0]))
    assert seen[-1] == (4, 4, sum(lengths[0]) + sum(lengths[1]))


# When an answer ends.


def test_every_end_token_of_the_model_and_of_the_tokenizer_ends_an_answer() -> None:
    policy = tiny_policy(end_ids=range(100, 180))  # the tokenizer adds 2
    assert policy.end_ids == {2, *range(100, 180)}
    groups = BatchEngine(policy, seed=0).generate(problems_of((40, 41), (60,)), 16, SamplingParams(10), step=1)
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
    groups = BatchEngine(policy, seed=0).generate(problems_of((40, 41, 42), (60,)), 4, sampling, step=1)
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
    first, second = BatchEngine(policy, seed=0).generate(twice, 3, SamplingParams(8), step=1)
    assert [group.problem.id for group in (first, second)] == ["p-0", "p-1"]
    answers = [rollout.completion_ids for group in (first, second) for rollout in group.rollouts]
    assert len(set(answers)) == 6


@pytest.mark.parametrize(("seed", "step"), [(1, 1), (0, 2)])
def test_seed_and_step_change_the_answers_and_nothing_else_does(policy: Policy, seed: int, step: int) -> None:
    def answers(seed: int, step: int) -> list[tuple[int, ...]]:
        [group] = BatchEngine(policy, seed=seed).generate(problems_of((40, 41)), 4, SamplingParams(8), step=step)
        return [rollout.completion_ids for rollout in group.rollouts]

    torch.manual_seed(1)
    before = answers(0, 1)
    torch.manual_seed(2)
    assert answers(0, 1) == before
    assert all(new != old for new, old in zip(answers(seed, step), before, strict=True))


def test_keys_and_values_live_only_inside_generate(monkeypatch: pytest.MonkeyPatch, policy: Policy) -> None:
    caches: list[weakref.ref[DynamicCache]] = []
    new_cache = policy.new_cache

    def watched() -> DynamicCache:
        cache = new_cache()
        caches.append(weakref.ref(cache))
        return cache

    monkeypatch.setattr(policy, "new_cache", watched)
    alive_per_step: list[int] = []
    BatchEngine(policy, seed=0, max_concurrent=2).generate(
        problems_of((40, 41, 42)),
        4,
        SamplingParams(4),
        step=1,
        on_progress=lambda *_: alive_per_step.append(sum(cache() is not None for cache in caches)),
    )
    assert len(caches) == 2
    assert set(alive_per_step) == {1}, "the cache of a wave is gone when the next one starts"
    assert [cache() for cache in caches] == [None, None]


# What is refused.


def test_a_prompt_that_leaves_no_room_is_refused(policy: Policy) -> None:
    problems = problems_of((40,), tuple([40] * 509))  # the context holds 512
    with pytest.raises(
        DataError, match=r"prompt of p-1 has 509 tokens and with rollout.max_new_tokens=4 exceeds .* 512"
    ):
        BatchEngine(policy, seed=0).generate(problems, 1, SamplingParams(4), step=1)


def test_a_prompt_that_just_fits_is_answered(policy: Policy) -> None:
    assert len(answer_to(policy, [40] * 511, SamplingParams(1)).completion_ids) == 1


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_logits_stop_the_run(monkeypatch: pytest.MonkeyPatch, after: int, value: float) -> None:
    policy = tiny_policy(end_ids=[2])
    own, calls = policy.logits, iter(range(10))

    def logits(hidden_B_H: torch.Tensor) -> torch.Tensor:
        logits_B_V = own(hidden_B_H)
        if next(calls) == after:
            logits_B_V[-1, 7] = value
        return logits_B_V

    monkeypatch.setattr(policy, "logits", logits)
    with pytest.raises(RunFailed, match="tiny gave non-finite logits while sampling"):
        BatchEngine(policy, seed=0).generate(problems_of((40, 41)), 2, SamplingParams(8), step=1)
