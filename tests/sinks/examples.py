"""Reports and groups for the tests of the sinks."""

from __future__ import annotations

from typing import Any

from lowmem_grpo.types import Group, Problem, Rollout, RunInfo, ScoredGroup, StepReport, StopReason

INFO = RunInfo("quickstart-2026-01-31", "runs/q", "tiny", "cpu", 4, 2, 4, 24)

QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 17 + 28?"}]

ADVANTAGES = (0.75, -0.25, -0.25, -0.25)

REPORT: dict[str, Any] = {
    "start": {"score": 0.41, "interval": [0.345, 0.48], "correct": 0.4, "format": 0.83},
    "tuned": {"score": 0.77, "interval": [0.707, 0.823], "correct": 0.76, "format": 1.0},
    "difference": {"value": 0.36, "interval": [0.28, 0.43], "paired": True},
    "correct_difference": {"value": 0.36, "interval": [0.27, 0.44], "paired": True},
    "n": 200,
    "split": "test",
    "seconds": 493.0,
    "peak_memory_bytes": 2**31,
    "adapter": "runs/q/adapter",
    "steps": 40,
    "proven": True,
}


def group(
    texts: tuple[str, ...] = ("45", "46", "", "35"), totals: tuple[float | None, ...] = (1.0, 0.0, 0.0, 0.0)
) -> ScoredGroup:
    """Answers to one sum; the last one ran into the token limit."""
    problem = Problem("train-12", QUESTION, "", (1,), {"answer": "45", "image": object()})
    reasons: list[StopReason] = ["end" for _ in texts[1:]]
    reasons.append("length")
    rollouts = tuple(
        Rollout((7, 2), (True, True), (-0.5, -0.1), reason, text) for reason, text in zip(reasons, texts, strict=True)
    )
    return ScoredGroup(Group(problem, rollouts), {"number": totals}, totals, (None,) * len(texts))


def report(step: int, *, sample: bool = False, **metrics: float) -> StepReport:
    values = {"reward/mean": step / 8, "optim/loss": -3e-9, "time/step_s": 10.0}
    values.update({name.replace("__", "/"): value for name, value in metrics.items()})
    return StepReport(step, 4, values, group() if sample else None, ADVANTAGES if sample else ())
