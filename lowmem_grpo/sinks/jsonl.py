"""The sink that writes the run folder: metrics.jsonl, events.jsonl, completions.jsonl and problems.jsonl."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from lowmem_grpo.rundir import RunDir
from lowmem_grpo.sinks import Sink
from lowmem_grpo.types import Event, Problem, ScoredGroup, StepReport

__all__ = ["JsonlSink", "completion_rows", "event_row", "problem_row", "write_groups"]


class JsonlSink(Sink):
    """Metrics and events to their files. The answers of a step come through `write_groups`, not through a sink."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir

    def step(self, report: StepReport) -> None:
        self._run_dir.append("metrics", {"step": report.step, **report.metrics})

    def event(self, event: Event) -> None:
        self._run_dir.append("events", event_row(event))


def event_row(event: Event) -> dict[str, Any]:
    """One line of events.jsonl; `time` is seconds since the epoch."""
    return {
        "time": round(time.time(), 3),
        "step": event.step,
        "kind": event.kind,
        "severity": event.severity,
        "message": event.message,
        "data": dict(event.data),
    }


def problem_row(problem: Problem) -> dict[str, Any]:
    """One line of problems.jsonl: the prompt in its own form, and those columns that JSON can hold."""
    columns = {name: value for name, value in problem.columns.items() if _is_json(value)}
    return {"problem_id": problem.id, "prompt": problem.prompt, "columns": columns}


def _is_json(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_json(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(_is_json(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def completion_rows(step: int, number: int, scored: ScoredGroup, advantages_G: Sequence[float]) -> list[dict[str, Any]]:
    """The lines of completions.jsonl of one group, in the order of its answers.

    `group` is the number of the group within its step (the same problem may be drawn twice); `tokens` counts what the
    policy sampled; `error` is there only for an answer whose reward failed.
    """
    rows = []
    parts = zip(scored.group.rollouts, scored.totals, scored.errors, advantages_G, strict=True)
    for index, (rollout, reward, error, advantage) in enumerate(parts):
        row: dict[str, Any] = {
            "step": step,
            "problem_id": scored.group.problem.id,
            "group": number,
            "completion": rollout.text,
            "stop_reason": rollout.stop_reason,
            "rewards": {name: scores[index] for name, scores in scored.scores.items()},
            "reward": reward,
            "advantage": advantage,
            "tokens": sum(rollout.sampled_T),
        }
        rows.append(row if error is None else {**row, "error": error})
    return rows


def write_groups(
    run_dir: RunDir, step: int, groups: Sequence[ScoredGroup], advantages_P_G: Sequence[Sequence[float]]
) -> None:
    """Write the answers of a step, and the problems not seen before. Raises RunFailed when the disk is full."""
    run_dir.extend("problems", [problem_row(scored.group.problem) for scored in groups])
    rows = []
    for number, (scored, advantages_G) in enumerate(zip(groups, advantages_P_G, strict=True)):
        rows += completion_rows(step, number, scored, advantages_G)
    run_dir.extend("completions", rows)
