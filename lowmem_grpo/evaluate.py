"""Held-out score: greedy answers, scored by the same kind of reward functions, with intervals; start against tuned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from lowmem_grpo.intervals import bootstrap_interval, paired_bootstrap_difference, wilson_interval
from lowmem_grpo.rollout import OnProgress, RolloutEngine
from lowmem_grpo.types import Group, Problem, SamplingParams, ScoredGroup

__all__ = ["Evaluation", "Scorer", "compare", "evaluate"]


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
    `failures`.

    >>> Evaluation(("t-0",), ("4",), ("end",), (2,), {"score": (1.0,)}, 0).mean("score")
    1.0
    """

    problem_ids: tuple[str, ...]
    completions: tuple[str, ...]
    stop_reasons: tuple[str, ...]
    lengths: tuple[int, ...]
    readings: Mapping[str, tuple[float, ...]]
    failures: int

    def mean(self, reading: str) -> float:
        """Mean of one reading over the problems."""
        values = self.readings[reading]
        return sum(values) / len(values)

    def to_json(self) -> dict[str, Any]:
        """JSON values that `from_json` reads back equal."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Evaluation:
        """The inverse of `to_json`."""
        fields = {name: tuple(values[name]) for name in ("problem_ids", "completions", "stop_reasons", "lengths")}
        readings = {name: tuple(scores) for name, scores in values["readings"].items()}
        return cls(**fields, readings=readings, failures=values["failures"])


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

    `problems` must not be empty. What is evaluated is whatever the engine's model is right now: tuned, or inside
    `policy.reference()` the start.
    """
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


def compare(start: Evaluation, tuned: Evaluation, *, correct_at: float, split: str) -> dict[str, Any]:
    """Start against tuned on the same problems: the JSON of `eval --json` and of report.json.

    Score intervals are Wilson where every score is 0 or 1, bootstrap otherwise; differences are paired bootstrap
    (95 %). `proven` says that the interval of the score difference lies above 0. Raises ValueError when the two
    evaluations are not of the same problems.
    """
    if start.problem_ids != tuned.problem_ids:
        raise ValueError("start and tuned were evaluated on different problems; the comparison would not be paired")
    difference = _difference(start.readings["score"], tuned.readings["score"])
    return {
        "start": _side(start, correct_at),
        "tuned": _side(tuned, correct_at),
        "difference": difference,
        "correct_difference": _difference(_correct(start, correct_at), _correct(tuned, correct_at)),
        "n": len(start.problem_ids),
        "split": split,
        "proven": difference["interval"][0] > 0,
    }


def _side(evaluation: Evaluation, correct_at: float) -> dict[str, Any]:
    correct = _correct(evaluation, correct_at)
    formats = evaluation.readings.get("format")
    return {
        "score": evaluation.mean("score"),
        "interval": _interval(evaluation.readings["score"]),
        "correct": sum(correct) / len(correct),
        "correct_interval": _interval(correct),
        "format": None if formats is None else sum(formats) / len(formats),
        "truncated": evaluation.stop_reasons.count("length") / len(correct),
        "length_mean": sum(evaluation.lengths) / len(correct),
        "failures": evaluation.failures,
    }


def _correct(evaluation: Evaluation, correct_at: float) -> tuple[float, ...]:
    values = evaluation.readings.get("correct", evaluation.readings["score"])
    # A score computed in floating point may fall a rounding error short of the threshold.
    return tuple(float(value >= correct_at - 1e-9) for value in values)


def _interval(values: Sequence[float]) -> list[float]:
    if all(value in (0.0, 1.0) for value in values):
        return list(wilson_interval(int(sum(values)), len(values)))
    return list(bootstrap_interval(values))


def _difference(start: Sequence[float], tuned: Sequence[float]) -> dict[str, Any]:
    value, interval = paired_bootstrap_difference(start, tuned)
    return {"value": value, "interval": list(interval), "paired": True}
