"""Scoring beside sampling: groups are scored in a thread of their own while other groups are still being sampled."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol

from lowmem_grpo.types import Group, ScoredGroup

__all__ = ["OverlappedScoring", "Step"]

POLL_S = 0.1
"""A wait is cut into pieces of this length: on Windows a Ctrl-C comes through only between them."""


class Step(Protocol):
    """One step of a rubric, as `OverlappedScoring` sees it."""

    def ask(self, groups: Sequence[Group]) -> list[ScoredGroup]:
        """Scores the groups, each function in one call."""
        ...

    def close(self) -> None:
        """Statistics and rules over all that was asked; raises RewardFailed."""
        ...

    def drop(self) -> None:
        """Makes every later call of `ask`, and the one that is running, end with an exception; harmless at the end."""
        ...

    def end_call(self) -> bool:
        """Ends the function call that is running; False for one in this process, which nobody can end."""
        ...


class OverlappedScoring:
    """Scores the groups of one step while others are sampled; make it with `Rubric.scoring` and use it in a `with`.

    One thread asks the functions about one group after the other, in the order of `add`, so the calls do not depend
    on how fast the sampler is. Leaving the block before `result` drops the groups that wait, kills the call that runs
    in the child process, and leaves a call in this process behind: nothing can end that one, and the rubric's next
    step waits for it.

        with rubric.scoring(len(problems)) as scoring:
            engine.generate(problems, ..., on_group=scoring.add)
            scored = scoring.result()
    """

    def __init__(self, step: Step, problem_count: int) -> None:
        self._step = step
        self._problem_count = problem_count
        self._jobs: queue.SimpleQueue[tuple[int, Group] | None] = queue.SimpleQueue()
        self._added: set[int] = set()
        self._scored: dict[int, ScoredGroup] = {}
        self._failure: BaseException | None = None
        self._is_open = False
        # Not Thread.join: an interrupt in it makes Python 3.11 and 3.12 take a running thread for a finished one.
        self._ended = threading.Event()
        self._ended.set()

    def __enter__(self) -> OverlappedScoring:
        self._is_open = True
        self._ended.clear()
        threading.Thread(target=self._score_all, name="reward-scoring", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        self._step.drop()
        self._jobs.put(None)
        while not self._ended.wait(POLL_S) and self._step.end_call():
            pass

    def add(self, index: int, group: Group) -> None:
        """Hands over the finished group of the step's problem number `index` (from 0), and returns at once.

        Raises what scoring an earlier group raised, such as RewardFailed.
        """
        self._raise_failure()
        if index in self._added or not 0 <= index < self._problem_count:
            raise ValueError(f"group {index} was added twice or is not one of {self._problem_count}")
        self._added.add(index)
        self._jobs.put((index, group))

    def result(self) -> list[ScoredGroup]:
        """Waits until all groups are scored, closes the step, and gives them in the order of `index`; call it once.

        Raises what scoring raised, and RewardFailed for a function that failed on every answer of the step.
        """
        self._raise_failure()
        if len(self._added) < self._problem_count:
            raise ValueError(f"only {len(self._added)} of {self._problem_count} groups were added")
        self._jobs.put(None)
        self._wait()
        self._raise_failure()
        self._step.close()
        return [self._scored[index] for index in range(self._problem_count)]

    def settle(self) -> None:
        """Waits for a call that was left behind. Raises RuntimeError inside the `with` block."""
        if self._is_open:
            raise RuntimeError("a step is being scored: leave its `with` block before anything else is scored")
        self._wait()

    def _wait(self) -> None:
        while not self._ended.wait(POLL_S):
            pass

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _score_all(self) -> None:
        try:
            for index, group in iter(self._jobs.get, None):
                (self._scored[index],) = self._step.ask([group])
        except BaseException as error:  # whatever it is, the main thread raises it
            self._failure = error
        finally:
            self._ended.set()
