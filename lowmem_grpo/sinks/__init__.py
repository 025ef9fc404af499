"""Where a run reports to: files, the terminal, and whatever else implements `Sink`.

Setting up a sink may end the run, as a wrong setting should; reporting may not: `Fanout` drops a sink that fails and
says so once. The exception is `jsonl`, because a run without its files is worth nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from lowmem_grpo.errors import PluginError, nearest
from lowmem_grpo.types import Event, RunInfo, ScoredGroup, StepReport

if TYPE_CHECKING:
    from lowmem_grpo.rundir import RunDir

__all__ = ["SINKS", "Fanout", "Sink", "make_sinks"]


class Sink(Protocol):
    """One place that a run reports to. `start` comes first and once, `close` last and once.

    A sink that names this class as its base need only define what it listens to.
    """

    def start(self, info: RunInfo) -> None:
        """The run begins, or goes on at `info.first_step`."""
        return None

    def progress(self, phase: str, done: int, total: int, detail: str = "") -> None:
        """`phase` is "gate" (before the first step), "rollout", "reward", "update" or "evaluate"; total 0: unknown."""
        return None

    def sample(self, step: int, group: ScoredGroup, advantages_G: Sequence[float]) -> None:
        """A scored group, as soon as it exists, before its step is over."""
        return None

    def step(self, report: StepReport) -> None:
        """A step is over."""
        return None

    def event(self, event: Event) -> None:
        """Something happened that is not a metric."""
        return None

    def report(self, report: Mapping[str, Any]) -> None:
        """The final report, the content of report.json."""
        return None

    def close(self) -> None:
        """Nothing more will come."""
        return None


def _jsonl(run_dir: RunDir) -> Sink:
    from lowmem_grpo.sinks.jsonl import JsonlSink

    return JsonlSink(run_dir)


def _console(run_dir: RunDir) -> Sink:
    from lowmem_grpo.sinks.console import ConsoleSink

    return ConsoleSink()


def _picture(run_dir: RunDir) -> Sink:
    from lowmem_grpo.sinks.picture import PictureSink

    return PictureSink(run_dir)


SINKS: dict[str, Callable[[RunDir], Sink]] = {"jsonl": _jsonl, "console": _console, "picture": _picture}
"""Built-in sinks by name; an entry added here can be named in `make_sinks`."""


def make_sinks(names: Sequence[str], run_dir: RunDir) -> dict[str, Sink]:
    """The sinks called `names`, in that order. Raises PluginError for a name that is not in `SINKS`."""
    for name in names:
        if name not in SINKS:
            hint = nearest(name, SINKS)
            choices = " or ".join(sorted(SINKS)) + (f" (did you mean {hint}?)" if hint else "")
            raise PluginError(f"There is no sink {name!r}: choose {choices}.")
    return {name: SINKS[name](run_dir) for name in names}


class Fanout:
    """A `Sink` that hands everything to several sinks, and keeps the run going when one of them fails.

    `on_problem` gets one sentence when a sink is dropped. Errors of `start`, and of the sinks named in `essential`,
    are raised.
    """

    def __init__(
        self,
        sinks: Mapping[str, Sink],
        on_problem: Callable[[str], None],
        *,
        essential: Sequence[str] = ("jsonl",),
    ) -> None:
        self._sinks = dict(sinks)
        self._on_problem = on_problem
        self._essential = frozenset(essential)

    @property
    def alive(self) -> tuple[str, ...]:
        """Names of the sinks that have not been dropped."""
        return tuple(self._sinks)

    def start(self, info: RunInfo) -> None:
        """Start every sink; the first error ends the run, after the sinks started before it are closed."""
        started: list[Sink] = []
        try:
            for sink in self._sinks.values():
                sink.start(info)
                started.append(sink)
        except BaseException:
            for sink in started:
                sink.close()
            raise

    def progress(self, phase: str, done: int, total: int, detail: str = "") -> None:
        self._each(lambda sink: sink.progress(phase, done, total, detail))

    def sample(self, step: int, group: ScoredGroup, advantages_G: Sequence[float]) -> None:
        self._each(lambda sink: sink.sample(step, group, advantages_G))

    def step(self, report: StepReport) -> None:
        self._each(lambda sink: sink.step(report))

    def event(self, event: Event) -> None:
        self._each(lambda sink: sink.event(event))

    def report(self, report: Mapping[str, Any]) -> None:
        self._each(lambda sink: sink.report(report))

    def close(self) -> None:
        self._each(lambda sink: sink.close())

    def _each(self, call: Callable[[Sink], None]) -> None:
        problems = []
        for name, sink in list(self._sinks.items()):
            try:
                call(sink)
            except Exception as error:
                if name in self._essential:
                    raise
                del self._sinks[name]
                problems.append(f"The {name} output failed and is off from here on: {type(error).__name__}: {error}")
        for problem in problems:  # last, because it may come back as an event
            self._on_problem(problem)
