"""Held-out score: greedy answers, scored by the same kind of reward functions; start against tuned, with intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from lowmem_grpo.intervals import (
    bootstrap_interval,
    exact_paired_p,
    paired_bootstrap_difference,
    paired_differences,
    paired_wilson_difference,
    pass_at_k,
    wilson_interval,
)
from lowmem_grpo.rollout import OnProgress, RolloutEngine
from lowmem_grpo.types import Group, Problem, SamplingParams, ScoredGroup

__all__ = ["SAMPLES_STEP", "Evaluation", "Scorer", "compare", "evaluate", "sampled_scores"]

SAMPLES_STEP = 1 << 40
"""The step that keys the noise of sampled answers: training counts from 1, greedy answers are 0, the gate is below."""

SIGNIFICANCE = 0.05
"""A gain counts as proven below this p-value, which goes with the 95 % of the intervals."""

SHOWN_EXAMPLES = 5
"""Problems shown at most of those that got better, and of those that got worse."""


class Scorer(Protocol):
    """What the evaluation needs of a rubric: scores by reading, `score` and where they exist `correct`, `format`."""

    def score(self, groups: Sequence[Group]) -> list[ScoredGroup]:
        """Score every answer of every group."""
        ...


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Greedy answers to the problems of one split, one entry per problem.

    `readings` maps "score", and where the metric tells them apart "correct" (right, however it is written) and
    "format" (written as asked, right or wrong), to numbers. An answer whose scoring failed counts 0 and is in
    `failures`. `sampled_P_G` holds, where answers were sampled besides (see `sampled_scores`), the score of each.

    >>> Evaluation(("t-0",), ("4",), ("end",), (2,), {"score": (1.0,)}, 0).mean("score")
    1.0
    """

    problem_ids: tuple[str, ...]
    completions: tuple[str, ...]
    stop_reasons: tuple[str, ...]
    lengths: tuple[int, ...]
    readings: Mapping[str, tuple[float, ...]]
    failures: int
    sampled_P_G: tuple[tuple[float | None, ...], ...] = ()

    @property
    def is_unscored(self) -> bool:
        """True when scoring failed on every answer: the readings are all 0 and say nothing."""
        return self.failures == len(self.problem_ids)

    def mean(self, reading: str) -> float:
        """Mean of one reading over the problems."""
        values = self.readings[reading]
        return sum(values) / len(values)

    def to_json(self) -> dict[str, Any]:
        """JSON values that `from_json` reads back equal."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Evaluation:
        """The inverse of `to_json`; keys that are no fields are left out."""
        fields = {name: tuple(values[name]) for name in ("problem_ids", "completions", "stop_reasons", "lengths")}
        readings = {name: tuple(scores) for name, scores in values["readings"].items()}
        sampled_P_G = tuple(tuple(scores) for scores in values.get("sampled_P_G", ()))
        return cls(**fields, readings=readings, failures=values["failures"], sampled_P_G=sampled_P_G)


def evaluate(
    engine: RolloutEngine,
    problems: Sequence[Problem],
    scorer: Scorer,
    *,
    max_new_tokens: int,
    stop: Sequence[str] = (),
    on_progress: OnProgress | None = None,
) -> Evaluation:
    """Answer every problem greedily, once, in the engine's batches, and score the answers.

    What is evaluated is whatever the engine's model is right now: tuned, or inside `policy.reference()` the start.
    Raises ValueError when there are no problems.
    """
    _must_not_be_empty(problems)
    sampling = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, stop=tuple(stop))
    groups = engine.generate(problems, 1, sampling, step=0, on_progress=on_progress)
    scored = scorer.score(groups)
    rollouts = [group.group.rollouts[0] for group in scored]
    readings = {
        label: tuple(0.0 if (score := group.scores[label][0]) is None else score for group in scored)
        for label in scored[0].scores
    }
    return Evaluation(
        problem_ids=tuple(group.group.problem.id for group in scored),
        completions=tuple(rollout.text for rollout in rollouts),
        stop_reasons=tuple(rollout.stop_reason for rollout in rollouts),
        lengths=tuple(len(rollout.completion_ids) for rollout in rollouts),
        readings=readings,
        failures=sum(any(score is None for (score,) in group.scores.values()) for group in scored),
    )


def sampled_scores(
    engine: RolloutEngine,
    problems: Sequence[Problem],
    scorer: Scorer,
    *,
    samples: int,
    sampling: SamplingParams,
    on_progress: OnProgress | None = None,
) -> tuple[tuple[float | None, ...], ...]:
    """Sample `samples` answers to every problem: the "correct" reading of each, or its score; None where it failed.

    The noise is that of `SAMPLES_STEP`, so start and tuned draw from the same random numbers, which training never
    uses. Raises ValueError when there are no problems.
    """
    _must_not_be_empty(problems)
    scored = scorer.score(engine.generate(problems, samples, sampling, step=SAMPLES_STEP, on_progress=on_progress))
    return tuple(group.scores["correct" if "correct" in group.scores else "score"] for group in scored)


def compare(
    start: Evaluation, tuned: Evaluation, *, problems: Sequence[Problem], correct_at: float, split: str
) -> dict[str, Any]:
    """Start against tuned on the same problems: the JSON of `eval --json` and of report.json.

    `problems` hold those of the evaluations, found by id. Of each side: score, correct (a "correct" reading, or else
    the score, of at least `correct_at`) and format where the metric tells it apart, with 95 % intervals, Wilson where
    every value is 0 or 1 ("kind" is then "binary" for the score), bootstrap otherwise ("graded"); and "pass_at_k" where
    answers were sampled, k being the powers of two up to their number, and that number.

    A difference has a paired interval, Newcombe's where both sides are 0 or 1, bootstrap otherwise, and an exact
    p-value. `proven` needs both: the score difference's interval above 0 and a p-value below .05, see `_is_proven` for
    answers that could not be scored. "changed" counts problems by what became of their score, "examples" are those
    that changed most. Raises ValueError when the evaluations are not of the same problems, or of none.
    """
    if start.problem_ids != tuned.problem_ids:
        raise ValueError("start and tuned were evaluated on different problems; the comparison would not be paired")
    _must_not_be_empty(start.problem_ids)
    scores = start.readings["score"], tuned.readings["score"]
    difference = _difference(*scores)
    changes = paired_differences(*scores).tolist()
    better, worse = sum(change > 0 for change in changes), sum(change < 0 for change in changes)
    formats = [side.readings["format"] for side in (start, tuned) if "format" in side.readings]
    return {
        "start": _side(start, correct_at),
        "tuned": _side(tuned, correct_at),
        "difference": difference,
        "correct_difference": _difference(_correct(start, correct_at), _correct(tuned, correct_at)),
        **({"format_difference": _difference(*formats)} if len(formats) == 2 else {}),
        "n": len(start.problem_ids),
        "split": split,
        "kind": "binary" if all(map(_is_binary, scores)) else "graded",
        "changed": {"better": better, "worse": worse, "same": len(changes) - better - worse},
        "examples": _examples(start, tuned, changes, problems),
        "proven": _is_proven(start, tuned, difference),
    }


def _must_not_be_empty(problems: Sequence[object]) -> None:
    if not problems:
        raise ValueError("there are no problems to evaluate; an evaluation needs at least one")


def _side(evaluation: Evaluation, correct_at: float) -> dict[str, Any]:
    count = len(evaluation.problem_ids)
    correct = _correct(evaluation, correct_at)
    formats = evaluation.readings.get("format")
    return {
        "score": evaluation.mean("score"),
        "interval": _interval(evaluation.readings["score"]),
        "correct": sum(correct) / count,
        "correct_interval": _interval(correct),
        "format": None if formats is None else evaluation.mean("format"),
        **({} if formats is None else {"format_interval": _interval(formats)}),
        **(_pass_at_k(evaluation.sampled_P_G, correct_at) if evaluation.sampled_P_G else {}),
        "truncated": evaluation.stop_reasons.count("length") / count,
        "length_mean": sum(evaluation.lengths) / count,
        "failures": evaluation.failures,
    }


def _correct(evaluation: Evaluation, correct_at: float) -> tuple[float, ...]:
    values = evaluation.readings.get("correct", evaluation.readings["score"])
    return tuple(float(_is_correct(value, correct_at)) for value in values)


def _is_correct(value: float, correct_at: float) -> bool:
    # A score computed in floating point may fall a rounding error short of the threshold.
    return value >= correct_at - 1e-9


def _pass_at_k(sampled_P_G: Sequence[Sequence[float | None]], correct_at: float) -> dict[str, Any]:
    """pass@k over the problems by k as text; a sampled answer that could not be scored counts as wrong."""
    samples = len(sampled_P_G[0])
    right_P = [sum(v is not None and _is_correct(v, correct_at) for v in values_G) for values_G in sampled_P_G]
    ks = [*(1 << i for i in range(samples.bit_length()) if 1 << i < samples), samples]
    return {
        "pass_at_k": {str(k): sum(pass_at_k(samples, right, k) for right in right_P) / len(right_P) for k in ks},
        "sampled_failures": sum(value is None for values_G in sampled_P_G for value in values_G),
    }


def _is_binary(values: Sequence[float]) -> bool:
    return all(value in (0.0, 1.0) for value in values)


def _interval(values: Sequence[float]) -> list[float]:
    if _is_binary(values):
        return list(wilson_interval(int(sum(values)), len(values)))
    return list(bootstrap_interval(values))


def _difference(start: Sequence[float], tuned: Sequence[float]) -> dict[str, Any]:
    if _is_binary(start) and _is_binary(tuned):
        value, interval = paired_wilson_difference(start, tuned)
    else:
        value, interval = paired_bootstrap_difference(start, tuned)
    return {"value": value, "interval": list(interval), "paired": True, "p_value": exact_paired_p(start, tuned)}


def _is_proven(start: Evaluation, tuned: Evaluation, difference: Mapping[str, Any]) -> bool:
    """Whether the gain is beyond chance, and beyond what failures of the metric can explain.

    A failure counts 0, which before training would look like a gain. So the gain has to be larger than if each of
    them had been the best score seen before training, and the worst after it.
    """
    scores = (0.0, *start.readings["score"], *tuned.readings["score"])
    in_doubt = (start.failures * max(scores) - tuned.failures * min(scores)) / len(start.problem_ids)
    return bool(difference["interval"][0] > in_doubt and difference["p_value"] < SIGNIFICANCE)


def _examples(
    start: Evaluation, tuned: Evaluation, changes: Sequence[float], problems: Sequence[Problem]
) -> dict[str, list[dict[str, Any]]]:
    """The problems whose score rose most and fell most, with both answers; ties in the order of the problems."""
    by_id = {problem.id: problem for problem in problems}

    def example(index: int) -> dict[str, Any]:
        problem = by_id[start.problem_ids[index]]
        return {
            "problem_id": problem.id,
            "prompt": problem.prompt,
            "answer": problem.columns.get("answer"),
            "start": start.completions[index],
            "tuned": tuned.completions[index],
            "start_score": start.readings["score"][index],
            "tuned_score": tuned.readings["score"][index],
        }

    order = sorted(range(len(changes)), key=lambda index: -abs(changes[index]))  # stable: ties stay in order
    wins = [index for index in order if changes[index] > 0][:SHOWN_EXAMPLES]
    losses = [index for index in order if changes[index] < 0][:SHOWN_EXAMPLES]
    return {"wins": [example(index) for index in wins], "losses": [example(index) for index in losses]}
