"""The rubric: all reward functions of a run, loaded and checked before a model loads, and how their scores add up.

    total = sum of weight x score over the functions

A function that gives None for every answer of a group is left out of that group. One that gives None for some answers
of a group makes the total of those None: they leave the statistics. Where every function is left out the totals are
None. A failure (an exception, a time-out, a crash, NaN) is a None that is counted and shown.
"""

from __future__ import annotations

import copy
import functools
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Literal

from lowmem_grpo.errors import ConfigError, PluginError, RewardFailed
from lowmem_grpo.plugins import is_file_spec, load_object, split_file_spec
from lowmem_grpo.rewards.base import (
    CORE_INPUTS,
    AnswerChecker,
    AsyncLoop,
    Builtin,
    Failure,
    Scores,
    Signature,
    call_function,
    text_of,
)
from lowmem_grpo.rewards.process import RewardProcess
from lowmem_grpo.rewards.registry import REWARDS
from lowmem_grpo.types import Group, Problem, ScoredGroup

__all__ = ["RewardSpec", "Rubric"]

TAKEN_LABELS = frozenset({"mean", "within_group_std"})
"""`reward/<label>` is a metric, and these two are other metrics."""

HOPELESS_TIMEOUTS = 3
"""After so many time-outs of single answers, and no success in the call, the other answers are not tried."""

FAILED_CALLS_IN_A_ROW = 3
"""So many scoring calls in a row in which a function failed on every answer stop the run."""

RENDERED = "prompt_texts"
"""The rendered prompts, for built-ins that look at what the template wrote. TRL has no such argument, so user
functions do not get it."""

Statistics = dict[str, float | int | None]


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """One entry of the config's `rewards`: a built-in name, "file.py:function", or the name of an in-memory function.

    `args` are the options of a built-in, or keyword arguments of the user's function. `timeout_s` limits one call.
    `label` names it in metrics; None takes the function's name, numbered when it is taken (number, number_2).

    >>> RewardSpec("rewards.py:brevity", weight=0.2).name
    'rewards.py:brevity'
    """

    name: str
    weight: float = 1.0
    args: Mapping[str, Any] = field(default_factory=dict)
    label: str | None = None
    timeout_s: float = 30.0


@dataclass(slots=True)
class _Function:
    """A loaded function: how to call it, and how it has done so far."""

    label: str
    spec: RewardSpec
    signature: Signature
    call: Callable[[Mapping[str, Any], int], Scores | Failure]
    home: Literal["builtin", "file", "memory"]
    builtin: Builtin | None = None
    succeeded: bool = False
    failed_calls: int = 0
    last: Statistics = field(default_factory=lambda: {"mean": None, "std": None, "seconds": 0.0, "failures": 0})

    @property
    def columns(self) -> frozenset[str]:
        return self.builtin.needs if self.builtin is not None else self.signature.columns(self.spec.args)


class Rubric:
    """Scores groups of answers. Use as a context manager, or `close` it: user files run in a child process.

    Construction loads everything: a wrong name, file, function, option or argument raises PluginError or ConfigError.
    `functions` are callables by name (from a notebook cell); they run in this process, without a time limit, and
    `warnings` says so. `on_problem(label, traceback)` hears of each kind of failure once; `on_output` gets the lines
    that user files print. Both write to stderr unless given.
    """

    def __init__(
        self,
        specs: Sequence[RewardSpec],
        *,
        base_dir: Path,
        functions: Mapping[str, Callable[..., Any]] | None = None,
        on_problem: Callable[[str, str], None] | None = None,
        on_output: Callable[[str], None] | None = None,
    ) -> None:
        if not specs:
            raise ConfigError("rewards is empty: name at least one reward function, such as number")
        self._base_dir = base_dir
        self._in_memory = dict(functions or {})
        self._on_problem = on_problem or _print_problem
        self._process = RewardProcess(on_output or _print_line)
        self._loop = AsyncLoop()
        self._shown: set[tuple[str, str]] = set()
        try:
            labels = _labels(specs)
            self._functions = [self._load(spec, label) for spec, label in zip(specs, labels, strict=True)]
        except BaseException:
            self.close()
            raise

    # What the rubric is

    @property
    def labels(self) -> tuple[str, ...]:
        """The unique names of the functions, in the order of the specs."""
        return tuple(function.label for function in self._functions)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences worth telling before a run starts."""
        in_memory = (function.label for function in self._functions if function.home == "memory")
        return tuple(
            f"reward '{label}' is a function of this process: it has no time limit, an endless loop or a crash in it "
            "ends the run, and the run folder cannot keep its code; put it into a file to be safe"
            for label in in_memory
        )

    @property
    def needs_gold(self) -> bool:
        """Whether a row without a gold in the answer column is of no use."""
        return any("answer" in function.columns for function in self._functions)

    def needed_columns(self) -> dict[str, frozenset[str]]:
        """The data set columns each function cannot do without, by label."""
        return {function.label: function.columns for function in self._functions}

    def parseable_gold(self, value: Any) -> bool:
        """Whether every built-in answer checker can compare with this gold."""
        builtins = (function.builtin for function in self._functions)
        return all(checker.parseable_gold(value) for checker in builtins if isinstance(checker, AnswerChecker))

    def statistics(self) -> dict[str, Statistics]:
        """By label, of the last `score` call: `mean` and `std` (ddof 0; None without scores), `seconds`, `failures`."""
        return {function.label: dict(function.last) for function in self._functions}

    def close(self) -> None:
        """Ends the child process and the event loop; the rubric is of no use afterwards."""
        self._process.close()
        self._loop.close()

    def __enter__(self) -> Rubric:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Loading

    def _load(self, spec: RewardSpec, label: str) -> _Function:
        _check_spec(spec, label)
        if spec.name in self._in_memory:
            function = self._in_memory[spec.name]
            return self._local(spec, label, function, "memory")
        if is_file_spec(spec.name):
            split_file_spec(spec.name, kind="reward", base_dir=self._base_dir)  # before a child is started for nothing
            return self._remote(spec, label, "file")
        known = {**REWARDS, **self._in_memory}
        factory = load_object(spec.name, registry=known, kind="reward", base_dir=self._base_dir)
        builtin: Builtin = factory(**spec.args)
        if builtin.in_worker:
            return self._remote(spec, label, "builtin", builtin)
        return self._local(spec, label, builtin, "builtin", builtin)

    def _local(
        self,
        spec: RewardSpec,
        label: str,
        function: Callable[..., Any],
        home: Literal["builtin", "memory"],
        builtin: Builtin | None = None,
    ) -> _Function:
        if not callable(function):
            raise PluginError(f"reward '{spec.name}' is a {type(function).__name__}, not a function")
        signature = Signature.of(function)
        args = spec.args if builtin is None else {}
        if unknown := signature.unknown_argument(args):
            raise ConfigError(f"reward '{spec.name}' {unknown}")

        def call(inputs: Mapping[str, Any], count: int) -> Scores | Failure:
            if home == "memory":  # it may change what it gets, and the problems are used again
                inputs = copy.deepcopy(dict(inputs))
            return call_function(function, {**inputs, **args}, count, label, self._loop)

        return _Function(label, spec, signature, call, home, builtin)

    def _remote(
        self, spec: RewardSpec, label: str, home: Literal["builtin", "file"], builtin: Builtin | None = None
    ) -> _Function:
        signature = self._process.load(label, spec.name, self._base_dir, spec.args)
        call = functools.partial(self._process.call, label, timeout_s=spec.timeout_s)
        return _Function(label, spec, signature, call, home, builtin)

    # Scoring

    def score(self, groups: Sequence[Group]) -> list[ScoredGroup]:
        """Scores all answers of the groups, each function in one call with the data set columns repeated per answer.

        Raises RewardFailed when a function returns a wrong number of scores, fails on every answer of a call without
        ever having succeeded, or does so three calls in a row.
        """
        inputs = _flatten(groups)
        by_label = {function.label: self._run(function, inputs) for function in self._functions}
        weights = {function.label: function.spec.weight for function in self._functions}
        scored, at = [], 0
        for group in groups:
            part = slice(at, at := at + len(group.rollouts))
            values = {label: scores.values[part] for label, scores in by_label.items()}
            errors = {label: scores.errors[part] for label, scores in by_label.items()}
            scored.append(ScoredGroup(group, MappingProxyType(values), _totals(values, weights), _join_errors(errors)))
        return scored

    def _run(self, function: _Function, inputs: Mapping[str, list[Any]]) -> Scores:
        count = len(inputs["prompts"])
        if count == 0:
            return Scores((), ())
        started = time.monotonic()
        scores, trace = self._ask(function, _select(function, inputs), count)
        failures = sum(error is not None for error in scores.errors)
        function.last = _summary(scores, failures, time.monotonic() - started)
        if failures < count:
            function.succeeded, function.failed_calls = True, 0
            return scores
        function.failed_calls += 1
        if not function.succeeded or function.failed_calls >= FAILED_CALLS_IN_A_ROW:
            times = "" if function.failed_calls == 1 else f", {function.failed_calls} calls in a row"
            raise RewardFailed(f"reward '{function.label}' failed on every one of {count} answers{times}:\n{trace}")
        return scores

    def _ask(self, function: _Function, inputs: Mapping[str, list[Any]], count: int) -> tuple[Scores, str]:
        """The scores and the last traceback; one answer is asked at a time when the call for all of them fails."""
        result = function.call(inputs, count)
        if isinstance(result, Failure) and count > 1:
            hint = f"\n({count} answers in one call; each is tried alone now, a larger timeout_s allows slower calls)"
            self._show(function.label, result.line, result.traceback + hint * result.timed_out)
            return self._ask_each(function, inputs, count)
        return self._read(function.label, result)

    def _ask_each(self, function: _Function, inputs: Mapping[str, list[Any]], count: int) -> tuple[Scores, str]:
        values: list[float | None] = []
        errors: list[str | None] = []
        trace, timeouts = "", 0
        for i in range(count):
            if timeouts == i == HOPELESS_TIMEOUTS:
                values += [None] * (count - i)
                errors += [f"not tried: the first {i} answers ran out of time"] * (count - i)
                break
            result = function.call({name: column[i : i + 1] for name, column in inputs.items()}, 1)
            timeouts += isinstance(result, Failure) and result.timed_out
            scores, new_trace = self._read(function.label, result)
            values += scores.values
            errors += scores.errors
            trace = new_trace or trace
        return Scores(tuple(values), tuple(errors)), trace

    def _read(self, label: str, result: Scores | Failure) -> tuple[Scores, str]:
        """The result as scores and the last traceback in it, after showing what is new in it."""
        if isinstance(result, Failure):
            self._show(label, result.line, result.traceback)
            return Scores((None,), (result.line,)), result.traceback
        lines = [line for line in result.errors if line is not None]
        for line in lines:
            self._show(label, line, line)
        return result, lines[-1] if lines else ""

    def _show(self, label: str, line: str, trace: str) -> None:
        if (label, line) not in self._shown:
            self._shown.add((label, line))
            self._on_problem(label, trace)


def _print_problem(label: str, trace: str) -> None:
    print(f"reward '{label}' failed (shown once):\n{trace}", file=sys.stderr)


def _print_line(line: str) -> None:
    print(line, file=sys.stderr)


def _check_spec(spec: RewardSpec, label: str) -> None:
    if isinstance(spec.weight, bool) or not isinstance(spec.weight, int | float) or not math.isfinite(spec.weight):
        raise ConfigError(f"the weight of reward '{label}' is {spec.weight!r} but should be a finite number")
    if not spec.timeout_s > 0:
        raise ConfigError(f"timeout_s of reward '{label}' is {spec.timeout_s!r} but should be above 0 seconds")


def _labels(specs: Sequence[RewardSpec]) -> list[str]:
    """The given labels, and for the others the function's name with a number where it is taken."""
    given = [spec.label for spec in specs if spec.label is not None]
    for label in given:
        if label in TAKEN_LABELS or given.count(label) > 1:
            why = "another metric is called so" if label in TAKEN_LABELS else "two rewards have it"
            raise ConfigError(f"the label '{label}' cannot be used: {why}; choose another")
    taken = {*TAKEN_LABELS, *given}
    labels = []
    for spec in specs:
        name = spec.name.rpartition(":")[2]
        numbered = [name, *(f"{name}_{i}" for i in range(2, len(specs) + 4))]
        label = spec.label or next(candidate for candidate in numbered if candidate not in taken)
        taken.add(label)
        labels.append(label)
    return labels


def _flatten(groups: Sequence[Group]) -> dict[str, list[Any]]:
    """The arguments of one call for every answer of the groups, in order; a column a problem lacks is None there."""
    pairs = [(group.problem, rollout) for group in groups for rollout in group.rollouts]
    columns = {name: None for problem, _ in pairs for name in problem.columns if name not in CORE_INPUTS}
    return {
        "prompts": [problem.prompt for problem, _ in pairs],
        "completions": [_in_form(problem, rollout.text) for problem, rollout in pairs],
        "completion_ids": [list(rollout.completion_ids) for _, rollout in pairs],
        **{name: [problem.columns.get(name) for problem, _ in pairs] for name in columns},
        RENDERED: [problem.prompt_text or text_of(problem.prompt) for problem, _ in pairs],
    }


def _in_form(problem: Problem, text: str) -> str | list[dict[str, Any]]:
    return text if isinstance(problem.prompt, str) else [{"role": "assistant", "content": text}]


def _select(function: _Function, inputs: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    if function.builtin is not None:
        wanted = {*function.signature.accepted, *function.builtin.needs}
        return {name: column for name, column in inputs.items() if name in wanted}
    columns = {name: column for name, column in inputs.items() if name != RENDERED and name not in function.spec.args}
    return function.signature.select(columns)


def _totals(values: Mapping[str, Sequence[float | None]], weights: Mapping[str, float]) -> tuple[float | None, ...]:
    present = {label: scores for label, scores in values.items() if any(score is not None for score in scores)}
    answers = len(next(iter(values.values())))
    totals: list[float | None] = []
    for i in range(answers):
        parts = [(weights[label], scores[i]) for label, scores in present.items()]
        known = [weight * score for weight, score in parts if score is not None]
        totals.append(math.fsum(known) if parts and len(known) == len(parts) else None)
    return tuple(totals)


def _join_errors(errors: Mapping[str, Sequence[str | None]]) -> tuple[str | None, ...]:
    """One entry per answer: `label: last line` of each function that failed on it."""
    rows = zip(*errors.values(), strict=True)
    joined = ("; ".join(f"{name}: {line}" for name, line in zip(errors, row, strict=True) if line) for row in rows)
    return tuple(text or None for text in joined)


def _summary(scores: Scores, failures: int, seconds: float) -> Statistics:
    known = [value for value in scores.values if value is not None]
    return {
        "mean": statistics.fmean(known) if known else None,
        "std": statistics.pstdev(known) if known else None,
        "seconds": seconds,
        "failures": failures,
    }
