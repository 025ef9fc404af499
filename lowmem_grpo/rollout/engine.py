"""The sampler: answers to problems from the live policy, each prompt computed and stored once.

`SlotEngine.generate` runs the rows of a call through the slots (see `lowmem_grpo.rollout.decoding`) and puts finished
rows together to groups. Keys and values exist only inside `generate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Protocol

import torch

from lowmem_grpo.errors import DataError
from lowmem_grpo.model import Policy
from lowmem_grpo.rollout.decoding import Decoding, Row, slot_shape
from lowmem_grpo.types import Group, Problem, Rollout, SamplingParams, StopReason

__all__ = ["OnGroup", "OnProgress", "RolloutEngine", "SlotEngine"]

OnProgress = Callable[[int, int, int], None]
"""Called after each decode step with (answers finished, answers asked for, tokens sampled so far)."""

OnGroup = Callable[[int, Group], None]
"""Called with a group's position among the problems, and the group, as soon as its last answer is finished."""


class RolloutEngine(Protocol):
    """What the trainer and the evaluation need of a sampler."""

    def generate(
        self,
        problems: Sequence[Problem],
        group_size: int,
        sampling: SamplingParams,
        *,
        step: int,
        on_progress: OnProgress | None = None,
        on_group: OnGroup | None = None,
    ) -> list[Group]:
        """Sample `group_size` answers to each of the problems (at least one); groups come back in their order."""
        ...


class SlotEngine:
    """Decodes up to `max_concurrent` rows at once (None: all rows of the call).

    Raises DataError when a prompt leaves no room for an answer, RunFailed when the model gives non-finite logits. After
    an exception, of a callback too, nothing is kept and the engine can be used again.
    """

    def __init__(self, policy: Policy, *, seed: int, max_concurrent: int | None = None) -> None:
        self.policy = policy
        self.seed = seed
        self.max_concurrent = max_concurrent
        self._special_ids = frozenset(policy.tokenizer.all_special_ids)

    @torch.no_grad()
    def generate(
        self,
        problems: Sequence[Problem],
        group_size: int,
        sampling: SamplingParams,
        *,
        step: int,
        on_progress: OnProgress | None = None,
        on_group: OnGroup | None = None,
    ) -> list[Group]:
        """See `RolloutEngine.generate`."""
        self._check_lengths(problems, sampling)
        self.policy.sampling_mode()
        rows_P_G = [[Row(group, answer) for answer in range(group_size)] for group in range(len(problems))]
        rows = [row for rows_G in rows_P_G for row in rows_G]
        decoding = self._decoding(problems, rows, group_size, sampling, step)
        groups: dict[int, Group] = {}
        while decoding.admit():
            decoding.step()
            for index in dict.fromkeys(row.group for row in decoding.retire()):
                if all(row.stop_reason is not None for row in rows_P_G[index]):
                    groups[index] = Group(problems[index], tuple(self._rollout(row) for row in rows_P_G[index]))
                    if on_group is not None:
                        on_group(index, groups[index])
            if on_progress is not None:
                on_progress(sum(r.stop_reason is not None for r in rows), len(rows), sum(len(r.tokens) for r in rows))
        return [groups[index] for index in range(len(problems))]

    def _decoding(
        self, problems: Sequence[Problem], rows: Sequence[Row], group_size: int, sampling: SamplingParams, step: int
    ) -> Decoding:
        return Decoding(
            self.policy,
            problems,
            rows,
            slot_shape(self.policy, problems, group_size, sampling.max_new_tokens, self.max_concurrent),
            sampling,
            seed=self.seed,
            step=step,
            stop_reason=lambda row: self._stop_reason(row, sampling),
        )

    def _stop_reason(self, row: Row, sampling: SamplingParams) -> StopReason | None:
        if row.tokens[-1] in self.policy.end_ids:
            return "end"
        if sampling.stop and self._ends_with_stop(row.tokens, sampling.stop):
            return "stop"
        return "length" if len(row.tokens) >= sampling.max_new_tokens else None

    def _ends_with_stop(self, tokens: Sequence[int], stop: Sequence[str]) -> bool:
        # Special tokens leave no text; any other carries at least one byte, so this tail covers the longest stop
        # string wherever it ends.
        size = 4 + max(len(s.encode()) for s in stop)
        tail = list(islice((token for token in reversed(tokens) if token not in self._special_ids), size))
        text = self.policy.tokenizer.decode(tail[::-1], skip_special_tokens=True)
        return any(s in text for s in stop)

    def _rollout(self, row: Row) -> Rollout:
        assert row.stop_reason is not None
        text = self.policy.tokenizer.decode(row.tokens, skip_special_tokens=True)
        return Rollout(tuple(row.tokens), (True,) * len(row.tokens), tuple(row.logprobs), row.stop_reason, text)

    def _check_lengths(self, problems: Sequence[Problem], sampling: SamplingParams) -> None:
        room = self.policy.max_positions - sampling.max_new_tokens
        for problem in problems:
            if len(problem.prompt_ids) > room:
                raise DataError(
                    f"The prompt of {problem.id} has {len(problem.prompt_ids)} tokens and with rollout.max_new_tokens="
                    f"{sampling.max_new_tokens} exceeds the model's context of {self.policy.max_positions}."
                )
