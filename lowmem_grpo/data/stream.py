"""Which problems each step gets: a pure function of the seed and the step, so a resumed run sees the same ones."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from lowmem_grpo.errors import DataError
from lowmem_grpo.types import Problem

__all__ = ["ProblemStream", "seeded_key"]


def seeded_key(*parts: str | int) -> bytes:
    """A sort key that puts items in a random-looking order that no version of Python or numpy can change.

    >>> sorted(range(4), key=lambda i: seeded_key(0, i)) == sorted([3, 2, 1, 0], key=lambda i: seeded_key(0, i))
    True
    """
    return hashlib.sha256("\0".join(map(str, parts)).encode()).digest()


class ProblemStream:
    """Hands out the training problems, `prompts_per_step` at a time, in a fresh seeded order every epoch.

    Every problem occurs exactly once an epoch, so the last step of an epoch may be smaller. Two problems with equal
    prompts stay two problems. Raises DataError when there are fewer problems than `prompts_per_step`.

    >>> stream = ProblemStream([Problem(f"train-{i}", "?", "?", (1,)) for i in range(5)], prompts_per_step=3, seed=0)
    >>> [len(stream.at(step)) for step in range(4)]
    [3, 2, 3, 2]
    """

    def __init__(self, problems: Sequence[Problem], prompts_per_step: int, seed: int) -> None:
        if len(problems) < max(prompts_per_step, 1):
            raise DataError(
                f"{len(problems)} training problems are fewer than rollout.prompts_per_step={prompts_per_step}; "
                f"set rollout.prompts_per_step to at most {len(problems)} or add rows"
            )
        self._problems = tuple(problems)
        self._prompts_per_step = prompts_per_step
        self._seed = seed
        self._epoch, self._order = -1, [0]

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps in which every problem occurs once."""
        return -(-len(self._problems) // self._prompts_per_step)

    def at(self, step: int) -> tuple[Problem, ...]:
        """The problems of `step`, counted from 0 over the whole run."""
        epoch, part = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            order = sorted(range(len(self._problems)), key=lambda i: seeded_key(self._seed, epoch, i))
            self._epoch, self._order = epoch, order
        first = part * self._prompts_per_step
        return tuple(self._problems[i] for i in self._order[first : first + self._prompts_per_step])

    def describe(self) -> str:
        """One line for the console.

        >>> ProblemStream([Problem(f"train-{i}", "?", "?", (1,)) for i in range(5)], 3, 0).describe()
        '5 training problems, 3 a step: 2 steps an epoch, the last of them with 2'
        """
        count, size = len(self._problems), self._prompts_per_step
        line = f"{count} training problems, {size} a step: {self.steps_per_epoch} steps an epoch"
        return f"{line}, the last of them with {count % size}" if count % size else line
