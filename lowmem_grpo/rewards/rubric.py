"""The rubric: all reward functions of a run, loaded and checked before a model loads, and how their scores add up.

    total = sum of weight x score over the functions

A function that gives None for every answer of a group is left out of that group. One that gives None for some answers
of a group makes the total of those None: they leave the statistics. Where every function is left out the totals are
None. A failure (an exception, a time-out, a crash, NaN) is a None that is counted and shown.

A step is what is scored between two updates (or one call of `score`). Statistics, and the rules by which a function
that fails ends the run, look at whole steps, however many calls a step is made of.
"""

from __future__ import annotations

import copy
import functools
import itertools
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
    FormChecker,
    Scores,
    Signature,
    call_function,
    text_of,
)
from lowmem_grpo.rewards.overlap import OverlappedScoring
from lowmem_grpo.rewards.process import RewardProcess
from lowmem_grpo.rewards.registry import REWARDS
from lowmem_grpo.types import Group, Problem, ScoredGroup

__all__ = ["RewardSpec", "Rubric"]

TAKEN_LABELS = frozenset({"mean", "within_group_std"})
"""`reward/<label>` is a metric, and these two are other metrics."""

HOPELESS_TIMEOUTS = 3
"""After so many time-outs of single answers, and no success in the step, its other answers are not tried."""

FAILED_STEPS_IN_A_ROW = 3
"""So many steps in a row in which a function failed on every answer stop the run."""

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
    end_call: Callable[[], None] | None = None
    succeeded: bool = False
    failed_steps: int = 0
    last: Statistics = field(default_factory=lambda: _Tally().summary())

    @property
    def columns(self) -> frozenset[str]:
        return self.builtin.needs if self.builtin is not None else self.signature.columns(self.spec.args)

    def may_fail(self, failed_steps: int) -> bool:
        """Whether the run goes on when the function fails on every answer of so many steps in a row."""
        return self.succeeded and failed_steps < FAILED_STEPS_IN_A_ROW


@dataclass(slots=True)
class _Tally:
    """What one function did in one step; `held` are kinds of failure that nobody was told of yet."""

    values: list[float | None] = field(default_factory=list)
    failures: int = 0
    seconds: float = 0.0
    timeouts: int = 0
    last_failure: Failure | None = None
    held: list[Failure] = field(default_factory=list)

    @property
    def succeeded(self) -> bool:
        return self.failures < len(self.values)

    @property
    def hopeless(self) -> bool:
        return self.timeouts >= HOPELESS_TIMEOUTS and not self.succeeded

    def add(self, scores: Scores) -> Scores:
        self.values += scores.values
        self.failures += sum(error is not None for error in scores.errors)
        return scores

    def summary(self) -> Statistics:
        known = [value for value in self.values if value is not None]
        return {
            "mean": statistics.fmean(known) if known else None,
            "std": statistics.pstdev(known) if known else None,
            "seconds": self.seconds,
            "failures": self.failures,
        }


class _Dropped(Exception):
    """Ends the thread of a step that nobody waits for any more."""


class Rubric:
    """Scores groups of answers. Use as a context manager, or `close` it: user files run in a child process.

    Construction loads everything: a wrong name, file, function, option or argument raises PluginError or ConfigError.
    `functions` are callables by name (from a notebook cell); they run in this process, without a time limit, and
    `warnings` says so. `on_problem(label, traceback)` hears of each kind of failure once; `on_output` gets the lines
    that user files print. Both write to stderr unless given, and are called from other threads than the caller's.
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
        self._scoring: OverlappedScoring | None = None
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
            "ends the run, it runs in a thread where time limits by signals do not work, and the run folder cannot "
            "keep its code; put it into a file to be safe"
            for label in in_memory
        )

    @property
    def needs_gold(self) -> bool:
        """Whether a row without a gold in the answer column is of no use."""
        return any("answer" in function.columns for function in self._functions)

    def needed_columns(self) -> dict[str, frozenset[str]]:
        """The data set columns each function cannot do without, by label."""
        return {function.label: function.columns for function in self._functions}

    def asked_forms(self) -> dict[str, tuple[str, ...]]:
        """What built-ins with a positive weight look for literally in an answer, by label; only those that do."""
        builtins = ((function.label, function.builtin) for function in self._functions if function.spec.weight > 0)
        forms = {label: builtin.asks_for for label, builtin in builtins if isinstance(builtin, FormChecker)}
        return {label: asked for label, asked in forms.items() if asked}

    @property
    def best_total(self) -> float | None:
        """The highest reward an answer can get, where built-ins with positive weights say so; else None."""
        parts = [(function.spec.weight, function.builtin) for function in self._functions]
        if any(builtin is None or weight < 0 for weight, builtin in parts):
            return None
        return sum(weight * builtin.best for weight, builtin in parts if builtin is not None)

    def parseable_gold(self, value: Any) -> bool:
        """Whether every built-in answer checker can compare with this gold."""
        builtins = (function.builtin for function in self._functions)
        return all(checker.parseable_gold(value) for checker in builtins if isinstance(checker, AnswerChecker))

    def statistics(self) -> dict[str, Statistics]:
        """By label, of the last step: `mean` and `std` (ddof 0; None without scores), `seconds`, `failures`."""
        return {function.label: dict(function.last) for function in self._functions}

    def state(self) -> dict[str, Any]:
        """What decides whether a failing function ends the run, as JSON values for a checkpoint."""
        return {
            "succeeded": [function.label for function in self._functions if function.succeeded],
            "failed_steps": {function.label: function.failed_steps for function in self._functions},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state` gave; a label that is new starts afresh, one that is gone is ignored."""
        for function in self._functions:
            function.succeeded = function.label in state["succeeded"]
            function.failed_steps = state["failed_steps"].get(function.label, 0)

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
        return _Function(label, spec, signature, call, home, builtin, self._process.close)

    # Scoring

    def score(self, groups: Sequence[Group]) -> list[ScoredGroup]:
        """Scores all answers of the groups, each function in one call with the data set columns repeated per answer.

        Raises RewardFailed when a function returns a wrong number of scores, fails on every answer of a step without
        ever having succeeded, or does so three steps in a row.
        """
        step = self._begin()
        try:
            scored = step.ask(groups)
            step.close()
        finally:
            step.drop()
        return scored

    def scoring(self, problem_count: int) -> OverlappedScoring:
        """A step of so many groups, each handed over (and asked about in a call of its own) when it is sampled.

        Raises RewardFailed as `score` does.
        """
        self._scoring = OverlappedScoring(self._begin(), problem_count)
        return self._scoring

    def _begin(self) -> _Step:
        if self._scoring is not None:  # never two calls at once: user functions need not be thread safe
            self._scoring.settle()
        return _Step(self._functions, self._show)

    def _show(self, label: str, failure: Failure) -> None:
        if (label, failure.line) not in self._shown:
            self._shown.add((label, failure.line))
            self._on_problem(label, failure.traceback)


class _Step:
    """The calls of one step, first `ask` as often as there is something to score, then `close`; `drop` at the end.

    While a function has nothing but failures and so may end the run, they are held back: RewardFailed would print the
    same traceback again. `drop` tells what RewardFailed did not.
    """

    def __init__(self, functions: Sequence[_Function], show: Callable[[str, Failure], None]) -> None:
        self._tallies = [(function, _Tally()) for function in functions]
        self._show = show
        self._running: _Function | None = None
        self._is_dropped = False

    def ask(self, groups: Sequence[Group]) -> list[ScoredGroup]:
        """Scores the groups, each function in one call. Raises RewardFailed for a wrong number of scores."""
        inputs = _flatten(groups)
        by_label = {function.label: self._score(function, tally, inputs) for function, tally in self._tallies}
        weights = {function.label: function.spec.weight for function, _ in self._tallies}
        scored, at = [], 0
        for group in groups:
            part = slice(at, at := at + len(group.rollouts))
            values = {label: scores.values[part] for label, scores in by_label.items()}
            errors = {label: scores.errors[part] for label, scores in by_label.items()}
            scored.append(ScoredGroup(group, MappingProxyType(values), _totals(values, weights), _join_errors(errors)))
        return scored

    def close(self) -> None:
        """Notes the statistics. Raises RewardFailed for a function that failed once too often on every answer."""
        for function, tally in self._tallies:
            function.last = tally.summary()
        for function, tally in self._tallies:
            _judge(function, tally)

    def drop(self) -> None:
        """Tells what was held back, and ends an `ask` in another thread as soon as its call is over."""
        self._is_dropped = True
        for function, tally in self._tallies:
            self._tell(function, tally)

    def end_call(self) -> bool:
        """Ends the call that is running; False for one in this process, which nobody can end."""
        function = self._running
        if function is None:  # between two calls, so `drop` has ended it
            return True
        if function.end_call is None:
            return False
        function.end_call()
        return True

    def _score(self, function: _Function, tally: _Tally, inputs: Mapping[str, list[Any]]) -> Scores:
        count = len(inputs["prompts"])
        if count == 0:
            return Scores((), ())
        started = time.monotonic()
        scores = self._try(function, tally, _select(function, inputs), count)
        tally.seconds += time.monotonic() - started
        return scores

    def _try(self, function: _Function, tally: _Tally, inputs: Mapping[str, list[Any]], count: int) -> Scores:
        """One call for all answers, and one for each answer when that fails."""
        if tally.hopeless:
            error = f"not tried: the first {HOPELESS_TIMEOUTS} answers ran out of time"
            return tally.add(Scores((None,) * count, (error,) * count))
        result = self._call(function, inputs, count)
        if isinstance(result, Scores) or count == 1:
            return self._take(function, tally, result)
        hint = f"\n({count} answers in one call; each is tried alone now, a larger timeout_s allows slower calls)"
        self._hold(function, tally, Failure(result.line, result.traceback + hint * result.timed_out))
        ones = [{name: column[i : i + 1] for name, column in inputs.items()} for i in range(count)]
        parts = [self._try(function, tally, one, 1) for one in ones]
        chain = itertools.chain.from_iterable
        return Scores(tuple(chain(part.values for part in parts)), tuple(chain(part.errors for part in parts)))

    def _call(self, function: _Function, inputs: Mapping[str, list[Any]], count: int) -> Scores | Failure:
        self._running = function  # before the look at `_is_dropped`: one of the two threads sees what the other did
        try:
            self._check_dropped()
            result = function.call(inputs, count)
        finally:
            self._running = None
        self._check_dropped()  # then the result may be that of a killed child
        return result

    def _check_dropped(self) -> None:
        if self._is_dropped:
            raise _Dropped

    def _take(self, function: _Function, tally: _Tally, result: Scores | Failure) -> Scores:
        """The result as scores, after counting them and telling or holding back what failed in it."""
        if isinstance(result, Failure):
            tally.timeouts += result.timed_out
            failures, scores = [result], Scores((None,), (result.line,))
        else:
            failures, scores = [Failure(line, line) for line in result.errors if line is not None], result
        tally.add(scores)
        for failure in failures:
            tally.last_failure = failure
        self._hold(function, tally, *failures)
        return scores

    def _hold(self, function: _Function, tally: _Tally, *failures: Failure) -> None:
        """Holds the failures back, and tells all that is held when it cannot be what ends the run."""
        tally.held += failures
        if tally.succeeded or function.may_fail(function.failed_steps + 1):
            self._tell(function, tally)

    def _tell(self, function: _Function, tally: _Tally) -> None:
        held, tally.held = tally.held, []
        for failure in held:
            self._show(function.label, failure)


def _judge(function: _Function, tally: _Tally) -> None:
    """Counts the steps in a row in which the function failed on every answer; too many raise RewardFailed."""
    count = len(tally.values)
    if count == 0:
        return
    if tally.succeeded:
        function.succeeded, function.failed_steps = True, 0
        return
    function.failed_steps += 1
    if not function.may_fail(function.failed_steps):
        assert tally.last_failure is not None
        line, trace = tally.last_failure.line, tally.last_failure.traceback
        tally.held = [failure for failure in tally.held if failure.line != line]
        times = "" if function.failed_steps == 1 else f", {function.failed_steps} times in a row"
        raise RewardFailed(f"reward '{function.label}' failed on every one of {count} answers{times}:\n{trace}")


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
