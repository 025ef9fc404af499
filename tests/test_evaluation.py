"""Held-out scores, and start against tuned with intervals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from lowmem_grpo.evaluation import SAMPLES_STEP, Evaluation, compare, evaluate, sampled_scores
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
        return [Group(problem, (rollout,) * group_size) for problem, rollout in zip(problems, rollouts, strict=True)]


class FakeScorer:
    """Gives each reading the listed scores, one per problem, or a row per problem with one per answer."""

    def __init__(self, **readings: Sequence[Any]) -> None:
        self.readings = readings

    def score(self, groups: Sequence[Group]) -> list[ScoredGroup]:
        return [self._scored(group, i) for i, group in enumerate(groups)]

    def _scored(self, group: Group, i: int) -> ScoredGroup:
        rows = {name: values[i] for name, values in self.readings.items()}
        scores = {name: row if isinstance(row, tuple) else (row,) for name, row in rows.items()}
        assert all(len(row) == len(group.rollouts) for row in scores.values())
        return ScoredGroup(group, scores, (None,) * len(group.rollouts), (None,) * len(group.rollouts))


PROBLEMS = problems_of((5,), (6,), (7,), (8,))


def evaluation(score: Sequence[float], **more: Sequence[float]) -> Evaluation:
    count = len(score)
    readings = {"score": tuple(score), **{name: tuple(values) for name, values in more.items()}}
    ids = tuple(f"p-{i}" for i in range(count))
    return Evaluation(ids, ("x",) * count, ("end",) * count, (3,) * count, readings, 0)


def report_of(start: Evaluation, tuned: Evaluation, *, correct_at: float = 1.0, split: str = "test") -> dict[str, Any]:
    """`compare` of evaluations of the problems p-0, p-1, ..."""
    problems = problems_of(*[(5,)] * len(start.problem_ids))
    return compare(start, tuned, problems=problems, correct_at=correct_at, split=split)


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


# --------------------------------------------------------------------------------------------- sampled answers


def test_sampled_answers_use_noise_of_their_own() -> None:
    engine, seen = FakeEngine(), lambda *_: None
    sampling = SamplingParams(max_new_tokens=9, temperature=0.7, top_p=0.9, stop=("\n",))
    scorer = FakeScorer(score=[(1.0, 0.0)] * 3 + [(0.5, None)], format=[(0.0, 0.0)] * 4)
    scores = sampled_scores(engine, PROBLEMS, scorer, samples=2, sampling=sampling, on_progress=seen)
    assert scores == ((1.0, 0.0), (1.0, 0.0), (1.0, 0.0), (0.5, None))
    assert engine.asked == [{"group_size": 2, "sampling": sampling, "step": SAMPLES_STEP, "on_progress": seen}]
    assert SAMPLES_STEP > 10**9  # no run trains as long


def test_sampled_answers_are_read_leniently_where_the_metric_can() -> None:
    scorer = FakeScorer(score=[(0.0, 0.0)] * 4, correct=[(1.0, 0.0)] * 4)
    sampling = SamplingParams(max_new_tokens=9)
    assert sampled_scores(FakeEngine(), PROBLEMS, scorer, samples=2, sampling=sampling) == ((1.0, 0.0),) * 4


def test_with_a_real_engine_start_and_tuned_draw_from_the_same_numbers() -> None:
    class FirstToken:
        def score(self, groups: Sequence[Group]) -> list[ScoredGroup]:
            none = (None,) * 5
            first = [tuple(float(r.completion_ids[0]) for r in group.rollouts) for group in groups]
            return [ScoredGroup(g, {"score": row}, none, none) for g, row in zip(groups, first, strict=True)]

    policy, problems = tiny_policy(live=False), problems_of((40, 41, 42), (60,))
    sampling = SamplingParams(max_new_tokens=3, temperature=1.0)
    drawn = [
        sampled_scores(
            SlotEngine(policy, seed=0, max_concurrent=rows), problems, FirstToken(), samples=5, sampling=sampling
        )
        for rows in (None, 2)
    ]
    with policy.reference():  # an adapter that has not moved changes nothing, so neither may the noise
        drawn.append(sampled_scores(SlotEngine(policy, seed=0), problems, FirstToken(), samples=5, sampling=sampling))
    assert drawn[0] == drawn[1] == drawn[2]
    assert len(set(drawn[0][0])) > 1


def test_pass_at_k_by_hand() -> None:
    # Of 5 answers 0, 1 and 5 are right. pass@1: 0, 1/5, 1. pass@2: 0, 2/5, 1. pass@4: 0, 4/5, 1. pass@5: 0, 1, 1.
    none, one, all_five = (0.0,) * 5, (0.0, 0.6, 0.1 + 0.2, 0.0, None), (1.0, 0.7, 0.6, 0.6, 0.9)
    sampled = replace(evaluation([0.0, 0.0, 1.0]), sampled_P_G=(none, one, all_five))
    side = report_of(evaluation([0.0, 0.0, 1.0]), sampled, correct_at=0.6)["tuned"]
    assert list(side["pass_at_k"]) == ["1", "2", "4", "5"]
    assert list(side["pass_at_k"].values()) == pytest.approx([1.2 / 3, 1.4 / 3, 1.8 / 3, 2 / 3])
    assert side["sampled_failures"] == 1


@pytest.mark.parametrize(
    ("samples", "ks"), [(1, ["1"]), (2, ["1", "2"]), (3, ["1", "2", "3"]), (8, ["1", "2", "4", "8"])]
)
def test_pass_at_k_is_given_at_the_powers_of_two_and_at_all(samples: int, ks: list[str]) -> None:
    sampled = replace(evaluation([0.0, 1.0]), sampled_P_G=((0.0,) * samples, (1.0,) * samples))
    assert report_of(sampled, sampled)["start"]["pass_at_k"] == {k: 0.5 for k in ks}


def test_without_samples_there_is_no_pass_at_k() -> None:
    side = report_of(evaluation([0.0, 1.0]), evaluation([0.0, 1.0]))["start"]
    assert not {"pass_at_k", "sampled_failures"} & side.keys()


def test_json_keeps_sampled_scores_and_reads_files_from_before_them() -> None:
    result = replace(evaluation([1.0, 0.5]), sampled_P_G=((1.0, None), (0.0, 0.25)))
    values = json.loads(json.dumps({**result.to_json(), "adapter_sha256": "ab"}))
    assert Evaluation.from_json(values) == result
    del values["sampled_P_G"]
    assert Evaluation.from_json(values) == replace(result, sampled_P_G=())


# --------------------------------------------------------------------------------------------- start against tuned


def test_right_or_wrong_by_hand() -> None:
    start, tuned = evaluation([1.0] * 4 + [0.0] * 6), evaluation([1.0] * 8 + [0.0] * 2)
    report = report_of(start, tuned)
    assert (report["n"], report["split"], report["kind"]) == (10, "test", "binary")
    assert (report["start"]["score"], report["tuned"]["score"]) == (0.4, 0.8)
    # Wilson, 95 %: 4 and 8 of 10.
    assert report["start"]["interval"] == pytest.approx([0.1682, 0.6873], abs=5e-5)
    assert report["tuned"]["interval"] == pytest.approx([0.4902, 0.9433], abs=5e-5)
    assert report["tuned"]["correct_interval"] == report["tuned"]["interval"]
    # Newcombe, worked out in test_intervals; four gains and no loss by chance: 2 / 2^4.
    assert report["difference"] == {
        "value": 0.4,
        "interval": pytest.approx([0.011030, 0.653195], abs=1e-6),
        "paired": True,
        "p_value": 0.125,
    }
    assert report["correct_difference"] == report["difference"]
    assert report["proven"] is False  # for all that the interval lies above 0
    assert report["changed"] == {"better": 4, "worse": 0, "same": 6}
    assert report["tuned"]["format"] is None
    assert "format_interval" not in report["tuned"] and "format_difference" not in report
    assert (report["tuned"]["truncated"], report["tuned"]["length_mean"], report["tuned"]["failures"]) == (0.0, 3.0, 0)


def test_pairing_matters() -> None:
    # Equal means, but every problem changed: the difference is 0 and far from sure.
    start, tuned = evaluation([1.0, 0.0] * 10), evaluation([0.0, 1.0] * 10)
    report = report_of(start, tuned)
    # 10 of 20 is .5 -+ .200702, and phi is -1: the distances add up.
    assert report["difference"]["interval"] == pytest.approx([-0.401404, 0.401404], abs=1e-6)
    assert (report["difference"]["value"], report["difference"]["p_value"]) == (0.0, 1.0)
    assert report["changed"] == {"better": 10, "worse": 10, "same": 0}
    # The same answers on both sides: much surer, but twenty problems cannot show that nothing changed.
    same = report_of(start, start)
    assert same["difference"]["interval"] == pytest.approx([-0.089757, 0.089757], abs=1e-6)
    assert same["changed"] == {"better": 0, "worse": 0, "same": 20}
    assert (report["proven"], same["proven"]) == (False, False)


@pytest.mark.parametrize(
    ("start", "tuned", "proven"),
    [
        pytest.param([0.0] * 2, [1.0] * 2, False, id="two problems, both gained: p is 1/2"),
        pytest.param([0.0] * 5, [1.0] * 5, False, id="five: p is 1/16"),
        pytest.param([0.0] * 6, [1.0] * 6, True, id="six: p is 1/32"),
        pytest.param([1.0] * 4 + [0.0] * 6, [1.0] * 10, True, id="six of ten"),
        pytest.param([1.0] * 4 + [0.0] * 6, [1.0] * 5 + [0.0] * 5, False, id="one of ten"),
        pytest.param([1.0] * 6, [0.0] * 6, False, id="worse"),
        pytest.param([0.2] * 2, [0.5] * 2, False, id="two graded: the bootstrap has no width"),
        pytest.param([0.2] * 5 + [0.9], [0.5] * 5 + [0.95], True, id="six graded, all better"),
        pytest.param([0.2] * 5 + [0.9], [0.5] * 5 + [0.1], False, id="six graded, one much worse"),
        pytest.param([-0.5] * 8, [-0.1] * 8, True, id="negative scores"),
    ],
)
def test_proven_needs_the_interval_above_0_and_a_small_p(start: list[float], tuned: list[float], proven: bool) -> None:
    assert report_of(evaluation(start), evaluation(tuned))["proven"] is proven


@pytest.mark.parametrize(
    ("start", "tuned", "failed", "proven"),
    [
        pytest.param([0.0] * 8, [1.0] * 8, (0, 0), True, id="no failure"),
        pytest.param([0.0] * 8, [1.0] * 8, (8, 0), False, id="nothing was scored before training"),
        pytest.param([0.5] * 8, [0.0] * 8, (0, 8), False, id="nothing was scored after it"),
        pytest.param([-0.5] * 8, [0.0] * 8, (0, 8), False, id="and 0 is more than the score before"),
        pytest.param([-0.5] * 8, [0.0] * 8, (0, 0), True, id="unless it is the score"),
        # The lower limit is 1 - 1.41421 * .324414 = .5412 of 8 problems: 4 failures could be a gain of .5, 5 of .625.
        pytest.param([0.0] * 8, [1.0] * 8, (4, 0), True, id="the gain is more than what failed"),
        pytest.param([0.0] * 8, [1.0] * 8, (5, 0), False, id="what failed could be the gain"),
    ],
)
def test_a_gain_that_failures_of_the_metric_may_explain_is_not_proven(
    start: list[float], tuned: list[float], failed: tuple[int, int], proven: bool
) -> None:
    sides = [replace(evaluation(s), failures=count) for s, count in zip((start, tuned), failed, strict=True)]
    report = report_of(*sides)
    assert report["proven"] is proven
    assert (report["start"]["failures"], report["tuned"]["failures"]) == failed
    assert [side.is_unscored for side in sides] == [count == 8 for count in failed]


def test_graded_scores_get_a_bootstrap_interval() -> None:
    # One half is .2 and one half .6: mean .4, sd of the mean .2 / sqrt(50) = .0283, interval about 1.96 of that.
    report = report_of(evaluation([0.2, 0.6] * 25), evaluation([0.3, 0.7] * 25), correct_at=0.6, split="dev")
    assert (report["kind"], report["split"]) == ("graded", "dev")
    assert report["start"]["interval"] == pytest.approx([0.4 - 0.0554, 0.4 + 0.0554], abs=0.006)
    assert report["difference"]["value"] == pytest.approx(0.1)
    assert report["difference"]["interval"] == pytest.approx([0.1, 0.1])
    assert report["difference"]["p_value"] == 2 / 2**50
    # Right or wrong is binary also where the scores are not: 25 of 50, Wilson .5 -+ .133555.
    assert (report["start"]["correct"], report["tuned"]["correct"]) == (0.5, 0.5)
    assert report["start"]["correct_interval"] == pytest.approx([0.366445, 0.633555], abs=1e-6)
    low, high = report["correct_difference"]["interval"]
    assert low == -high < -0.01


def test_graded_differences_get_the_exact_test_of_graded_scores() -> None:
    report = report_of(evaluation([0.5, 0.5, 0.5]), evaluation([1.0, 0.75, 0.25]))
    # +-.5 +-.25 +-.25: six of the eight sums are as large as .5 = .5 + .25 - .25.
    assert report["difference"]["p_value"] == 6 / 8
    assert report["correct_difference"]["p_value"] == 1.0
    assert report["changed"] == {"better": 2, "worse": 1, "same": 0}


def test_one_graded_side_makes_the_comparison_graded() -> None:
    report = report_of(evaluation([0.0] * 4 + [1.0] * 4), evaluation([0.5] * 8))
    assert report["kind"] == "graded"
    assert report["start"]["interval"] == pytest.approx([0.2152, 0.7848], abs=1e-4)  # Wilson 4 of 8
    # Four rose by .5 and four fell: resampled sums are binomial (8, 1/2) / 8 - 1/2, whose middle 95 % is 1 to 7.
    assert report["difference"]["interval"] == pytest.approx([-0.375, 0.375])


def test_ability_and_format_are_told_apart() -> None:
    start = evaluation([0.0, 0.0, 0.0, 1.0], correct=[1.0, 1.0, 0.0, 1.0], format=[0.0, 0.0, 0.0, 1.0])
    tuned = evaluation([1.0, 1.0, 0.0, 1.0], correct=[1.0, 1.0, 0.0, 1.0], format=[1.0, 1.0, 1.0, 1.0])
    report = report_of(start, tuned)
    assert (report["start"]["correct"], report["tuned"]["correct"]) == (0.75, 0.75)
    assert (report["start"]["format"], report["tuned"]["format"]) == (0.25, 1.0)
    assert report["difference"]["value"] == 0.5
    assert (report["correct_difference"]["value"], report["correct_difference"]["p_value"]) == (0.0, 1.0)
    # 1 of 4 and 4 of 4: Wilson (.045587, .699358) and (.510109, 1).
    assert report["start"]["format_interval"] == pytest.approx([0.045587, 0.699358], abs=1e-6)
    assert report["tuned"]["format_interval"] == pytest.approx([0.510109, 1.0], abs=1e-6)
    assert (report["format_difference"]["value"], report["format_difference"]["p_value"]) == (0.75, 2 / 8)
    # phi 0: .75 - sqrt(.489891^2 + .449358^2), .75 + .204413
    assert report["format_difference"]["interval"] == pytest.approx([0.085233, 0.954413], abs=1e-6)


def test_a_format_that_one_side_lacks_has_no_difference() -> None:
    report = report_of(evaluation([0.0, 1.0]), evaluation([1.0, 1.0], format=[1.0, 1.0]))
    assert (report["start"]["format"], report["tuned"]["format"]) == (None, 1.0)
    assert "format_difference" not in report


@pytest.mark.parametrize(("correct_at", "expected"), [(0.3, 0.75), (0.5, 0.5), (1.0, 0.25)])
def test_correct_at_counts_scores_from_there_on(correct_at: float, expected: float) -> None:
    # .1 + .2 is a rounding error above .3 and 1 - .7 one below it: both count.
    scores = evaluation([1.0, 0.1, 1 - 0.7, 0.5])
    assert report_of(scores, scores, correct_at=correct_at)["start"]["correct"] == expected


def test_other_problems_are_refused() -> None:
    with pytest.raises(ValueError, match="different problems"):
        report_of(evaluation([1.0, 0.0]), evaluation([1.0]))


def test_no_problems_are_refused() -> None:
    engine = FakeEngine()
    for attempt in (
        lambda: evaluate(engine, [], FakeScorer(), max_new_tokens=8),
        lambda: sampled_scores(engine, [], FakeScorer(), samples=2, sampling=SamplingParams(max_new_tokens=8)),
        lambda: report_of(evaluation([]), evaluation([])),
    ):
        with pytest.raises(ValueError, match="there are no problems to evaluate"):
            attempt()
    assert engine.asked == []


def test_one_problem_is_enough_to_be_evaluated() -> None:
    report = report_of(evaluation([0.0]), evaluation([1.0]))
    assert report["n"] == 1
    assert report["tuned"]["interval"] == pytest.approx([0.2065, 1.0], abs=5e-5)
    assert (report["difference"]["p_value"], report["proven"]) == (1.0, False)


def test_length_and_truncation_are_reported() -> None:
    result = evaluate(FakeEngine(), PROBLEMS, FakeScorer(score=[1.0, None, 0.0, 0.0]), max_new_tokens=8)
    side = report_of(result, result)["start"]
    assert (side["truncated"], side["length_mean"], side["failures"]) == (0.25, 19 / 4, 1)


# --------------------------------------------------------------------------------------------- examples


def test_examples_are_the_largest_changes_first_with_both_answers() -> None:
    start, tuned = [0.0, 0.5, 0.0, 0.3, 1.0, 1.0], [0.5, 0.5, 1.0, 0.1 + 0.2, 0.75, 0.0]
    before = replace(evaluation(start), completions=tuple(f"before {i}" for i in range(6)))
    after = replace(evaluation(tuned), completions=tuple(f"after {i}" for i in range(6)))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1"}]
    problems = problems_of(*[(5,)] * 6)
    problems[2] = replace(problems[2], prompt=messages, columns={"answer": 2, "level": "easy"})
    # In any order, among others.
    report = compare(before, after, problems=[*problems_of((9,))[1:], *problems[::-1]], correct_at=1.0, split="test")
    assert report["changed"] == {"better": 2, "worse": 2, "same": 2}
    assert [example["problem_id"] for example in report["examples"]["wins"]] == ["p-2", "p-0"]
    assert [example["problem_id"] for example in report["examples"]["losses"]] == ["p-5", "p-4"]
    assert report["examples"]["wins"][0] == {
        "problem_id": "p-2",
        "prompt": messages,
        "answer": 2,
        "start": "before 2",
        "tuned": "after 2",
        "start_score": 0.0,
        "tuned_score": 1.0,
    }
    last = report["examples"]["losses"][1]
    assert (last["prompt"], last["answer"], last["start_score"], last["tuned_score"]) == ("prompt 4", None, 1.0, 0.75)


def test_examples_are_few_and_ties_keep_the_order_of_the_problems() -> None:
    tuned = [0.5] * 3 + [1.0] * 3 + [0.5] * 3
    report = report_of(evaluation([0.0] * len(tuned)), evaluation(tuned))
    ids = [example["problem_id"] for example in report["examples"]["wins"]]
    assert ids == ["p-3", "p-4", "p-5", "p-0", "p-1"]
    assert report["examples"]["losses"] == []
    assert report["changed"]["better"] == len(tuned)


def test_the_report_is_json() -> None:
    report = report_of(evaluation([0.25, 1.0], format=[0.0, 1.0]), evaluation([1.0, 0.5], format=[1.0, 1.0]))
    assert json.loads(json.dumps(report, allow_nan=False)) == report
