"""The sampler: answers to problems from the live policy, each prompt computed and stored once.

`SlotEngine.generate` runs the rows of a call through the slots (see `lowmem_grpo.rollout.decoding`) and puts finished
rows together to groups. Keys and values exist only inside `generate`.

When the memory runs out, the keys and values go and the rows keep their tokens: they are prefilled again, half as many
at once, and go on. Nothing is sampled again, and the noise of a token depends on its place alone, so the answers are
those of a run that had the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Protocol

import torch

from lowmem_grpo.errors import DataError, OutOfMemoryFailed
from lowmem_grpo.memory.oom import OnOutOfMemory, Recovery, is_out_of_memory, release_memory
from lowmem_grpo.model import Policy
from lowmem_grpo.rollout.decoding import Decoding, Row, slot_shape
from lowmem_grpo.rollout.longest import decode_longest
from lowmem_grpo.rollout.slots import SlotShape
from lowmem_grpo.types import Group, Problem, Rollout, SamplingParams, StopReason

__all__ = ["OnGroup", "OnProgress", "RolloutEngine", "SlotEngine"]

OnProgress = Callable[[int, int, int], None]
"""Called after each decode step with (answers finished, answers asked for, tokens sampled so far)."""

OnGroup = Callable[[int, Group], None]
"""Called with a group's position among the problems, and the group, as soon as its last answer is finished."""

SMALLEST_PREFILL_TOKENS = 256
"""Prefills are not cut any shorter for lack of memory: what needs less than this is not what fills a card."""


class RolloutEngine(Protocol):
    """What the trainer and the evaluation need of a sampler.

    `max_concurrent` and `prefill_tokens` may fall when the memory runs out, and `on_out_of_memory` then hears of it.
    """

    max_concurrent: int | None
    prefill_tokens: int
    on_out_of_memory: OnOutOfMemory | None

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

    def rehearse(self, problems: Sequence[Problem], group_size: int, sampling: SamplingParams) -> None:
        """Go through the heaviest moments of such a call, so that the memory runs out now or not at all."""
        ...


class SlotEngine:
    """Decodes up to `max_concurrent` rows at once (None: all rows of the call), and prefills `prefill_tokens` at once.

    Out of memory, it lowers the first to 1, then the second to 256, for this call and the next ones. `kv_int8` stores
    keys and values in 8 bits: the sampler is then not quite the policy any more (see `lowmem_grpo.rollout.slots`).

    Raises DataError when a prompt leaves no room for an answer, RunFailed when the model gives non-finite logits,
    OutOfMemoryFailed when one row does not fit. After an exception, of a callback too, nothing is kept and the engine
    can be used again.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        seed: int,
        max_concurrent: int | None = None,
        prefill_tokens: int = 2048,
        kv_int8: bool = False,
        on_out_of_memory: OnOutOfMemory | None = None,
    ) -> None:
        self.policy = policy
        self.seed = seed
        self.max_concurrent = max_concurrent
        self.prefill_tokens = prefill_tokens
        self.kv_int8 = kv_int8
        self.on_out_of_memory = on_out_of_memory
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
        groups: dict[int, Group] = {}
        for _ in self._steps(problems, rows, sampling, step):
            for index, rows_G in enumerate(rows_P_G):
                if index not in groups and all(row.stop_reason is not None for row in rows_G):
                    groups[index] = Group(problems[index], tuple(self._rollout(row) for row in rows_G))
                    if on_group is not None:
                        on_group(index, groups[index])
            if on_progress is not None:
                on_progress(sum(r.stop_reason is not None for r in rows), len(rows), sum(len(r.tokens) for r in rows))
        return [groups[index] for index in range(len(problems))]

    def rehearse(self, problems: Sequence[Problem], group_size: int, sampling: SamplingParams) -> None:
        """The heaviest moments of a call with `problems`, before the first one; lowers what has to be lowered."""
        while True:
            try:
                decode_longest(
                    self.policy,
                    problems,
                    group_size,
                    sampling,
                    max_concurrent=self.max_concurrent,
                    prefill_tokens=self.prefill_tokens,
                    kv_int8=self.kv_int8,
                )
                return
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            release_memory(self.policy.device)
            rows = len(problems) * group_size
            shape = slot_shape(self.policy, problems, group_size, sampling.max_new_tokens, self.max_concurrent)
            self._make_room(shape, sampling, rows)

    def _steps(
        self, problems: Sequence[Problem], rows: Sequence[Row], sampling: SamplingParams, step: int
    ) -> Iterator[None]:
        """Bring the rows to their ends, and stop after each step for the caller to look at them."""
        while unfinished := [row for row in rows if row.stop_reason is None]:
            shape = self._shape(problems, unfinished, sampling)
            try:
                yield from self._decode(problems, unfinished, shape, sampling, step)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            else:
                return
            # Not in the block above: while the error lives, so do the frames that hold the keys and values.
            release_memory(self.policy.device)
            yield  # the step that failed may have finished rows
            self._make_room(shape, sampling, sum(row.stop_reason is None for row in unfinished))

    def _decode(
        self,
        problems: Sequence[Problem],
        rows: Sequence[Row],
        shape: SlotShape,
        sampling: SamplingParams,
        step: int,
    ) -> Iterator[None]:
        decoding = Decoding(
            self.policy,
            problems,
            rows,
            shape,
            sampling,
            seed=self.seed,
            step=step,
            stop_reason=lambda row: self._stop_reason(row, sampling),
            prefill_tokens=self.prefill_tokens,
            kv_int8=self.kv_int8,
        )
        while decoding.admit():
            decoding.step()
            decoding.retire()
            yield

    def _shape(self, problems: Sequence[Problem], rows: Sequence[Row], sampling: SamplingParams) -> SlotShape:
        """Slots for the rows and their prompts alone: what is finished needs none."""
        open_problems = [problems[group] for group in sorted({row.group for row in rows})]
        rows_per_problem = -(-len(rows) // len(open_problems))
        slots = min(self.max_concurrent or len(rows), len(rows))
        return slot_shape(self.policy, open_problems, rows_per_problem, sampling.max_new_tokens, slots)

    def _make_room(self, shape: SlotShape, sampling: SamplingParams, unfinished: int) -> None:
        """Lower what `shape` was made of. Raises OutOfMemoryFailed when nothing is left to lower."""
        if shape.slots > 1:
            self.max_concurrent = shape.slots // 2
            recovery = Recovery(
                f"The memory ran out with {shape.slots} answers decoding at once; the {unfinished} unfinished ones "
                f"keep their tokens and go on, {self.max_concurrent} at a time.",
                {"max_concurrent": self.max_concurrent},
            )
        elif self.prefill_tokens > SMALLEST_PREFILL_TOKENS:
            self.prefill_tokens = max(SMALLEST_PREFILL_TOKENS, self.prefill_tokens // 2)
            recovery = Recovery(
                "The memory ran out with one answer decoding at a time; prompts are now forwarded "
                f"{self.prefill_tokens} tokens at a time.",
                {"prefill_tokens": self.prefill_tokens},
            )
        else:
            raise OutOfMemoryFailed(
                "The memory does not suffice to sample one answer at a time: lower rollout.max_new_tokens (now "
                f"{sampling.max_new_tokens}) or data.max_prompt_tokens (the longest prompt here has "
                f"{shape.prompt_tokens} tokens)."
            )
        if self.on_out_of_memory is not None:
            self.on_out_of_memory(recovery)

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
