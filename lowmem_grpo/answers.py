"""Try the rewards of a config on written answers, with no model: the backend of `lowmem-grpo score`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from lowmem_grpo.config import Config, DataConfig, LoadedConfig
from lowmem_grpo.data import DataSpec, RawData, Table, check_columns, read_table
from lowmem_grpo.rewards import RewardSpec, Rubric, score_completions
from lowmem_grpo.rundir import RunDir

__all__ = ["answers_in_file", "answers_in_memory", "reward_specs", "score_answers"]


def reward_specs(config: Config) -> list[RewardSpec]:
    """The rewards of the config in the form the rubric takes."""
    return [RewardSpec(r.name, r.weight, r.args, r.label, r.timeout_s) for r in config.rewards]


def answers_in_file(path: Path) -> Table:
    """The rows of a file of answers; those of a run's completions.jsonl get prompt and columns from its problems.jsonl.

    Raises DataError when the file cannot be read.
    """
    path = path.expanduser()
    table, problems = read_table(path), _problems_beside(path)
    rows = [{**problems.get(str(row.get("problem_id")), {}), **row} for row in table.rows]
    return _with_rows(table, rows)


def answers_in_memory(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Answers of a notebook in the form of a file's."""
    return _with_rows(Table("the given rows", "row", (), tuple(range(1, len(rows) + 1)), ()), rows)


def score_answers(
    loaded: LoadedConfig, answers: Table, *, functions: Mapping[str, Callable[..., Any]] | None = None
) -> dict[str, Any]:
    """Rewards and advantages of the answers, as `score --json` prints them; see `rewards.score_completions`.

    Raises a UserError when a reward cannot be loaded or an answer lacks what a reward needs.
    """
    config = loaded.config
    with Rubric(reward_specs(config), base_dir=loaded.base_dir, functions=functions) as rubric:
        table = _with_reward_columns(answers, config.data, rubric.needed_columns())
        from lowmem_grpo.advantages import ESTIMATORS, check_estimator_options

        options = check_estimator_options(config.algorithm.advantage, config.algorithm.advantage_args)
        estimator = functools.partial(ESTIMATORS[config.algorithm.advantage], **options)
        return score_completions(rubric, table.rows, estimator=estimator, lines=table.lines)


def _with_reward_columns(table: Table, data: DataConfig, needed: Mapping[str, Collection[str]]) -> Table:
    """The rows with their columns under the names that rewards ask for (`needed`: label -> columns)."""
    # A data set may call its gold `completion`; here that is the answer to score, and would always be right.
    mapping = {"answer": data.answer_column, **data.columns}
    mapping = {name: column for name, column in mapping.items() if column in table.columns and column != "completion"}
    rows = [{**row, **{name: row[column] for name, column in mapping.items() if column in row}} for row in table.rows]
    rows = [{"prompt": row[data.prompt_column], **row} if data.prompt_column in row else row for row in rows]
    named = _with_rows(table, rows)
    if "completion" in table.columns:
        spec = DataSpec(table.label, prompt_column=data.prompt_column, answer_column="answer")
        check_columns(RawData(named, None, ""), spec, needed)
    return named


def _with_rows(table: Table, rows: Sequence[Mapping[str, Any]]) -> Table:
    columns = tuple(dict.fromkeys(name for row in rows for name in row))
    return Table(table.label, table.unit, tuple(dict(row) for row in rows), table.lines, columns)


def _problems_beside(path: Path) -> dict[str, dict[str, Any]]:
    """Columns and prompt by problem when the file of answers lies in a run folder, which keeps them apart."""
    run = RunDir(path.absolute().parent)
    if not run.config_path.is_file():
        return {}
    return {row["problem_id"]: {**row["columns"], "prompt": row["prompt"]} for row in run.read("problems")}
