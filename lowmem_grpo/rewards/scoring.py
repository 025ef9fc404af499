"""Trying rewards on given answers, without a model: what `lowmem-grpo score` prints."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lowmem_grpo.errors import DataError
from lowmem_grpo.rewards.base import text_of
from lowmem_grpo.rewards.rubric import Rubric
from lowmem_grpo.types import Group, Problem, Rollout, ScoredGroup

if TYPE_CHECKING:
    import torch

__all__ = ["score_completions"]

PER_ANSWER = frozenset(
    {"problem_id", "prompt", "completion", "completion_ids", "tokens"}
    | {"step", "group", "stop_reason", "rewards", "reward", "advantage", "error"}
)
"""Keys of a row that are not columns of the data set; a run's completions.jsonl has most of them."""

Estimator = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]


def score_completions(
    rubric: Rubric, rows: Sequence[Mapping[str, Any]], *, estimator: Estimator, lines: Sequence[int] | None = None
) -> dict[str, Any]:
    """Scores rows `{"problem_id" (or "prompt"), "completion", ...columns}` and measures each answer in its group.

    Rows of one problem (and one `step` and `group`, when they have them) are a group, wherever they stand; the
    result keeps the order of the rows. `estimator(rewards_P_G, lengths_P_G)` is called group by group (P = 1) with
    NaN where there is no reward; a group of one answer has no advantage (None). Lengths are in tokens where
    `completion_ids` are given, else all 1. `lines` are the rows' line numbers for messages (1, 2, ... unless
    given).

    Gives `{"rows": [...], "groups": [...], "functions": {...}}`. Raises DataError on a row that cannot be used, naming
    its line.
    """
    if not rows:
        raise DataError("there are no rows to score: each line needs problem_id or prompt, and completion")
    lines = list(range(1, len(rows) + 1)) if lines is None else lines
    members: dict[tuple[str, str], list[int]] = {}
    for i, (row, line) in enumerate(zip(rows, lines, strict=True)):
        members.setdefault(_group_key(row, line), []).append(i)
    _check_columns(rubric, rows)
    groups = [_group(f"prompt-{n}", rows, lines, at) for n, at in enumerate(members.values(), start=1)]
    scored = rubric.score(groups)
    by_row: dict[int, dict[str, Any]] = {}
    for group, at in zip(scored, members.values(), strict=True):
        by_row |= dict(zip(at, _row_reports(group, estimator), strict=True))
    return {
        "rows": [by_row[i] for i in range(len(rows))],
        "groups": [_group_report(group) for group in scored],
        "functions": rubric.statistics(),
    }


def _group_key(row: Mapping[str, Any], line: int) -> tuple[str, str]:
    if not isinstance(row, Mapping):
        raise DataError(f"line {line} holds {row!r:.60}, not an object with problem_id or prompt, and completion")
    if row.get("completion") is None:
        raise DataError(f"line {line} has no completion; it has {', '.join(row) or 'no keys'}")
    if not _is_text_or_messages(row["completion"]):
        raise DataError(f"line {line}: completion is {row['completion']!r:.60}, not text or a list of messages")
    name = "problem_id" if row.get("problem_id") is not None else "prompt"
    if row.get(name) is None:
        raise DataError(f"line {line} has neither problem_id nor prompt, so it belongs to no group")
    if row.get("prompt") is not None and not _is_text_or_messages(row["prompt"]):
        raise DataError(f"line {line}: prompt is {row['prompt']!r:.60}, not text or a list of messages")
    return f"{name}={row[name]!r}", f"step={row.get('step')!r}, group={row.get('group')!r}"


def _check_columns(rubric: Rubric, rows: Sequence[Mapping[str, Any]]) -> None:
    found = sorted({name for row in rows for name in _columns(row)})
    for label, needed in rubric.needed_columns().items():
        for name in sorted(needed.difference(found)):
            raise DataError(
                f"reward '{label}' needs the column '{name}'; besides prompt and completion the rows have "
                f"{', '.join(found) or 'nothing'}"
            )


def _is_text_or_messages(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(m, Mapping) for m in value))


def _group(unnamed: str, rows: Sequence[Mapping[str, Any]], lines: Sequence[int], at: Sequence[int]) -> Group:
    first = rows[at[0]]
    columns = _columns(first)
    for i in at[1:]:
        differing = [name for name in {**columns, **_columns(rows[i])} if columns.get(name) != rows[i].get(name)]
        if differing:
            raise DataError(
                f"line {lines[i]}: {(name := differing[0])} is {rows[i].get(name)!r:.60} but "
                f"{columns.get(name)!r:.60} in line {lines[at[0]]} of the same problem"
            )
    prompt = first.get("prompt") or ""
    problem = Problem(str(first.get("problem_id", unnamed)), prompt, text_of(prompt), (), columns)
    return Group(problem, tuple(_rollout(rows[i]) for i in at))


def _columns(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in PER_ANSWER}


def _rollout(row: Mapping[str, Any]) -> Rollout:
    ids = tuple(row.get("completion_ids") or ())
    return Rollout(ids, (True,) * len(ids), (0.0,) * len(ids), "end", text_of(row["completion"]))


def _row_reports(group: ScoredGroup, estimator: Estimator) -> list[dict[str, Any]]:
    advantages = _advantages(group, estimator)
    return [
        {
            "problem_id": group.group.problem.id,
            "rewards": {label: scores[i] for label, scores in group.scores.items()},
            "reward": total,
            "advantage": advantages[i],
            "error": group.errors[i],
        }
        for i, total in enumerate(group.totals)
    ]


def _advantages(group: ScoredGroup, estimator: Estimator) -> list[float | None]:
    if len(group.totals) < 2:
        return [None] * len(group.totals)
    import torch

    rewards_P_G = torch.tensor([[math.nan if r is None else r for r in group.totals]], dtype=torch.float64)
    lengths_P_G = torch.tensor([[max(1, len(rollout.completion_ids)) for rollout in group.group.rollouts]])
    return list(estimator(rewards_P_G, lengths_P_G)[0].tolist())


def _group_report(group: ScoredGroup) -> dict[str, Any]:
    known = [total for total in group.totals if total is not None]
    return {
        "problem_id": group.group.problem.id,
        "answers": len(group.totals),
        "mean": statistics.fmean(known) if known else None,
        "std": statistics.pstdev(known) if known else None,
        "zero_variance": len(known) < 2 or math.isclose(min(known), max(known), rel_tol=1e-6, abs_tol=0.0),
    }
