"""Held-out scores, and start against tuned with intervals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from lowmem_grpo.evaluate import Evaluation, compare, evaluate
from lowmem_grpo.rollout import OnProgress, SlotEngine
from lowmem_grpo.types import Group, Problem, Rollout, SamplingParams, ScoredGroup
from tests.helpers import problems_of, tiny_policy

TEXTS = ["4", "five", "", "#### 6"]
LENGTHS = [1, 4, 8, 6]
REASONS = ["end", "stop", "length", "end"]


class FakeEngine:
    """Answers with the texts above and remembers how it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def generate(
        self,
        problems: Sequence[Problem],
        group_size: int,
        sampling: SamplingParams,
        *,
        step: int,
        on_progress: OnProgress | None = None,
    ) -> list[Group]:
        self.asked.append({"group_size": group_size, "sampling": sampling, "step": step, "on_progress": on_progress})
        rollouts = [
            Rollout((7,) * n, (True,) * n, (0.0,) * n, reason, text)  # type: ignore[arg-type]
            for n, reason, text in zip(LENGTHS, REASONS, TEXTS, strict=True)
        ]
        return [Group(problem, (rollout,)) for problem, rollout in zip(problems, rollouts, strict=True)]


class FakeScorer:
    """Gives each reading the listed scores, one per problem."""

    def __init__(self, **readings: Sequence[float | None]) -> None:
        self.readings = readings

    def score(self, groups: Sequence[Group]) -> list[ScoredGroup]:
        return [
            ScoredGroup(group, {name: (values[i],) for name, values in self.readings.items()}, (None,), (None,))
            for i, group in enumerate(groups)
        ]


PROBLEMS = problems_of((5,), (6,), (7,), (8,))


def evaluation(score: Sequence[float], **more: Sequence[float]) -> Evaluation:
    count = len(score)
    readings = {"score": tuple(score), **{name: tuple(values) for name, values in more.items()}}
    ids = tuple(f"p-{i}" for i in range(count))
    return Evaluation(ids, ("x",) * count, ("end",) * count, (3,) * count, readings, 0)


def test_answers_are_greedy_one_per_problem_and_cut_at_the_stop_strings() -> None:
    engine, seen = FakeEngine(), lambda *_: None
    evaluate(engine, PROBLEMS, FakeScorer(score=[0] * 4), max_new_tokens=9, stop=["\n"], on_progress=seen)
    assert engine.asked == [
        {
            "group_size": 1,
            "sampling": SamplingParams(max_new_tokens=9, temperature=0.0, stop=("\n",)),
            "step": 0,
            "on_progress": seen,
        }
    ]


def test_readings_by_hand() -> None:
    scorer = FakeScorer(score=[1.0, 0.5, 0.0, 0.0], correct=[1.0, 1.0, 0.0, 1.0], format=[1.0, 0.0, 0.0, 0.0])
    result = evaluate(FakeEngine(), PROBLEMS, scorer, max_new_tokens=8)
    assert result.problem_ids == ("p-0", "p-1", "p-2", "p-3")
    assert (result.completions, result.lengths) == (tuple(TEXTS), tuple(LENGTHS))
    assert result.stop_reasons == tuple(REASONS)
    assert {name: result.mean(name) for name in result.readings} == {"score": 0.375, "correct": 0.75, "format": 0.25}
    assert result.failures == 0


def test_a_failed_score_counts_0_and_its_answer_as_a_failure() -> None:
    scorer = FakeScorer(score=[1.0, None, 1.0, None], correct=[1.0, None, 1.0, 1.0])
    result = evaluate(FakeEngine(), PROBLEMS, scorer, max_new_tokens=8)
    assert result.readings == {"score": (1.0, 0.0, 1.0, 0.0), "correct": (1.0, 0.0, 1.0, 1.0)}
    assert result.failures == 2


def test_json_gives_back_an_equal_evaluation() -> None:
    result = evaluate(FakeEngine(), PROBLEMS, FakeScorer(score=[1.0, 0.1, None, 0.0]), max_new_tokens=8)
    assert Evaluation.from_json(json.loads(json.dumps(result.to_json()))) == result


def test_with_a_real_engine_the_answers_are_the_likeliest_tokens_and_the_start_is_the_base() -> None:
    policy = tiny_policy()
    problems, scorer = problems_of((40, 41, 42), (60,)), FakeScorer(score=[0.0, 0.0])
    tuned = evaluate(SlotEngine(policy, seed=0), problems, scorer, max_new_tokens=6)
    assert evaluate(SlotEngine(policy, seed=1, max_concurrent=1), problems, scorer, max_new_tokens=6) == tuned
    with policy.reference():
        start = evaluate(SlotEngine(policy, seed=0), problems, scorer, max_new_tokens=6)
    bare = tiny_policy(live=False)
    assert evaluate(SlotEngine(bare, seed=0), problems, scorer, max_new_tokens=6) == start
    assert start.completions != tuned.completions


def test_right_or_wrong_by_hand() -> None:
    start, tuned = evaluation([1.0] * 4 + [0.0] * 6), evaluation([1.0] * 8 + [0.0] * 2)
    report = compare(start, tuned, correct_at=1.0, split="test")
    assert (report["n"], report["split"]) == (10, "test")
    assert (report["start"]["score"], report["tuned"]["score"]) == (0.4, 0.8)
    # Wilson, 95 %: 4 and 8 of 10.
    assert report["start"]["interval"] == pytest.approx([0.1682, 0.6873], abs=5e-5)
    assert report["tuned"]["interval"] == pytest.approx([0.4902, 0.9433], abs=5e-5)
    assert report["tuned"]["correct_interval"] == report["tuned"]["interval"]
    assert report["difference"]["value"] == pytest.approx(0.4)
    assert report["difference"]["paired"] is True
    # Four of ten differences are 1: resampled sums are binomial (10, .4), whose middle 95 % is 1 to 7.
    assert report["difference"]["interval"] == pytest.approx([0.1, 0.7])
    assert report["proven"] is True
    assert report["tuned"]["format"] is None
    assert (report["tuned"]["truncated"], report["tuned"]["length_mean"], report["tuned"]["failures"]) == (0.0, 3.0, 0)


def test_pairing_matters() -> None:
    # Equal means, but every problem changed: the difference is 0 and far from sure.
    start, tuned = evaluation([1.0, 0.0] * 10), evaluation([0.0, 1.0] * 10)
    report = compare(start, tuned, correct_at=1.0, split="test")
    low, high = report["difference"]["interval"]
    assert report["difference"]["value"] == 0.0
    assert -0.6 < low < -0.3 and 0.3 < high < 0.6
    # The same answers on both sides: sure that nothing changed.
    same = compare(start, start, correct_at=1.0, split="test")
    assert same["difference"] == {"value": 0.0, "interval": [0.0, 0.0], "paired": True}
    assert (report["proven"], same["proven"]) == (False, False)


@pytest.mark.parametrize(
    ("tuned", "proven"),
    [
        ([1.0] * 5 + [0.0] * 5, False),  # one gained: the interval touches 0
        ([0.0] * 10, False),  # worse
        ([1.0] * 10, True),
    ],
)
def test_not_proven_unless_the_interval_is_above_0(tuned: list[float], proven: bool) -> None:
    start = evaluation([1.0] * 4 + [0.0] * 6)
    assert compare(start, evaluation(tuned), correct_at=1.0, split="test")["proven"] is proven


def test_graded_scores_get_a_bootstrap_interval() -> None:
    # One half is .2 and one half .6: mean .4, sd of the mean .2 / sqrt(50) = .0283, interval about 1.96 of that.
    report = compare(evaluation([0.2, 0.6] * 25), evaluation([0.3, 0.7] * 25), correct_at=0.6, split="dev")
    assert report["start"]["interval"] == pytest.approx([0.4 - 0.0554, 0.4 + 0.0554], abs=0.006)
    assert report["difference"]["value"] == pytest.approx(0.1)
    assert report["difference"]["interval"] == pytest.approx([0.1, 0.1])
    assert (report["start"]["correct"], report["tuned"]["correct"]) == (0.5, 0.5)


def test_ability_and_format_are_told_apart() -> None:
    start = evaluation([0.0, 0.0, 0.0, 1.0], correct=[1.0, 1.0, 0.0, 1.0], format=[0.0, 0.0, 0.0, 1.0])
    tuned = evaluation([1.0, 1.0, 0.0, 1.0], correct=[1.0, 1.0, 0.0, 1.0], format=[1.0, 1.0, 1.0, 1.0])
    report = compare(start, tuned, correct_at=1.0, split="test")
    assert (report["start"]["correct"], report["tuned"]["correct"]) == (0.75, 0.75)
    assert (report["start"]["format"], report["tuned"]["format"]) == (0.25, 1.0)
    assert report["difference"]["value"] == 0.5
    assert report["correct_difference"] == {"value": 0.0, "interval": [0.0, 0.0], "paired": True}


@pytest.mark.parametrize(("correct_at", "expected"), [(0.3, 0.75), (0.5, 0.5), (1.0, 0.25)])
def test_correct_at_counts_scores_from_there_on(correct_at: float, expected: float) -> None:
    # .1 + .2 is a rounding error above .3 and 1 - .7 one below it: both count.
    scores = evaluation([1.0, 0.1, 1 - 0.7, 0.5])
    assert compare(scores, scores, correct_at=correct_at, split="dev")["start"]["correct"] == expected


def test_other_problems_are_refused() -> None:
    with pytest.raises(ValueError, match="different problems"):
        compare(evaluation([1.0, 0.0]), evaluation([1.0]), correct_at=1.0, split="test")


def test_one_problem_is_enough_to_be_evaluated() -> None:
    report = compare(evaluation([0.0]), evaluation([1.0]), correct_at=1.0, split="test")
    assert report["n"] == 1
    assert report["tuned"]["interval"] == pytest.approx([0.2065, 1.0], abs=5e-5)


def test_length_and_truncation_are_reported() -> None:
    result = evaluate(FakeEngine(), PROBLEMS, FakeScorer(score=[1.0, None, 0.0, 0.0]), max_new_tokens=8)
    side = compare(result, result, correct_at=1.0, split="test")["start"]
    assert (side["truncated"], side["length_mean"], side["failures"]) == (0.25, 19 / 4, 1)
