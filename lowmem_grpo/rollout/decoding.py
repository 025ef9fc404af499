"""The rows of one call of the sampler on their way through the slots: admit, step, retire.

    while decoding.admit():     # waiting rows take free slots; a new group's prompt is forwarded, once
        decoding.step()         # every row in a slot gets one more token
        decoding.retire()       # finished rows leave, and the last slots move into the gaps

Rows wait in the order of their groups, so the rows of a group are together in time and its prompt is stored no longer
than they live. With fewer slots than rows the call runs in waves that flow into one another: a slot is filled again
at once, by a row of any prompt. The noise of a token depends on its place (step, group, answer, position) and not on
the slot, so every schedule draws from the same numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lowmem_grpo.errors import RunFailed
from lowmem_grpo.model import Policy
from lowmem_grpo.rollout.sampling import keyed_uniform, nonfinite_rows, sample_tokens
from lowmem_grpo.rollout.slots import DecodeLayout, KVSlots, PrefillLayout, SlotShape, Target
from lowmem_grpo.types import GroupSpan, Problem, SamplingParams, StopReason

__all__ = ["Decoding", "Row", "slot_shape"]


@dataclass(slots=True)
class Row:
    """One answer being written. `group` is the position of its problem in the call.

    An unfinished row may come with tokens already: they are forwarded behind its prompt (which for such rows is
    forwarded again, should it have been before, and once more where they do not fit into one prefill), and it goes on
    from there.
    """

    group: int
    answer: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop_reason: StopReason | None = None


@dataclass(slots=True)
class _Prompt:
    """A prompt slot in use: the group it belongs to, and how many of the group's rows are not finished."""

    group: int
    rows_left: int


def slot_shape(
    policy: Policy, problems: Sequence[Problem], group_size: int, max_new_tokens: int, max_concurrent: int | None
) -> SlotShape:
    """The slots of a call: `max_concurrent` rows (None: all), and the prompts of so many rows.

    One prompt more than full groups need lets the next group begin while the last rows of another still decode.
    """
    slots = min(max_concurrent or len(problems) * group_size, len(problems) * group_size)
    return SlotShape(
        *policy.kv_shape,
        prompt_slots=min(len(problems), slots, -(-slots // group_size) + 1),
        prompt_tokens=max(len(problem.prompt_ids) for problem in problems),
        slots=slots,
        answer_tokens=max_new_tokens,
    )


class Decoding:
    """Rows in slots and rows waiting; owns the keys and values, which go when it goes.

    What a row has is `row.tokens` and the keys and values of its slot, nothing else, so a step can start from any
    length. `stop_reason(row)` says whether a row that has just got a token is finished. Prompts, and the rows that come
    with tokens, are forwarded together up to `prefill_tokens` (what is longer goes alone): it keeps activations small.
    `kv_int8` stores keys and values in 8 bits (see `lowmem_grpo.rollout.slots`).

    Where the memory runs out in a step, either every row in a slot has got its token or none has, so the unfinished
    rows can go on in another Decoding.
    """

    def __init__(
        self,
        policy: Policy,
        problems: Sequence[Problem],
        rows: Sequence[Row],
        shape: SlotShape,
        sampling: SamplingParams,
        *,
        seed: int,
        step: int,
        stop_reason: Callable[[Row], StopReason | None],
        prefill_tokens: int = 2048,
        kv_int8: bool = False,
    ) -> None:
        on_gpu = torch.device(policy.card.device).type == "cuda"
        self.kv = KVSlots(shape, policy.dtype, policy.device, int8=kv_int8, on_gpu=on_gpu)
        self.live: list[Row] = []
        """The row in each answer slot in use."""
        self._policy, self._problems, self._sampling = policy, problems, sampling
        self._seed, self._step, self._stop_reason = seed, step, stop_reason
        self._prefill_tokens = prefill_tokens
        self._waiting = deque(sorted(rows, key=lambda row: row.group))  # groups one after the other, see above
        self._rows_of_group = [0] * len(problems)
        for row in rows:
            self._rows_of_group[row.group] += 1
        self._prompts: list[_Prompt] = []  # by prompt slot
        self._fresh = 0  # the last so many rows in slots have been forwarded already, by the prefill
        states = torch.zeros(2, shape.slots, policy.hidden_width, dtype=policy.dtype, device=policy.device)
        self._hidden_S_H, self._prompt_hidden_S_H = states  # after the last token of each row, of each prompt

    # ------------------------------------------------------------------------------------------ admit

    def admit(self) -> bool:
        """Give free slots to waiting rows; False when no row is left anywhere."""
        first, known = len(self.live), len(self._prompts)
        while self._waiting and len(self.live) < self.kv.shape.slots and self._has_prompt_slot(self._waiting[0].group):
            self.live.append(self._waiting.popleft())
        new_groups = {prompt.group for prompt in self._prompts[known:]}
        for batch in self._prefill_batches(self.live[first:], new_groups):
            self._prefill(batch)
        for slot in range(first, len(self.live)):
            if not self.live[slot].tokens:
                self._hidden_S_H[slot] = self._prompt_hidden_S_H[self._prompt_slot(self.live[slot].group)]
        self._fresh = len(self.live) - first
        return bool(self.live)

    def _has_prompt_slot(self, group: int) -> bool:
        """Whether the group has a prompt slot; a free one is given to it."""
        if all(prompt.group != group for prompt in self._prompts):
            if len(self._prompts) == self.kv.shape.prompt_slots:
                return False
            self._prompts.append(_Prompt(group, self._rows_of_group[group]))
        return True

    def _prompt_slot(self, group: int) -> int:
        return next(slot for slot, prompt in enumerate(self._prompts) if prompt.group == group)

    def _prefill_batches(self, rows: Sequence[Row], new_groups: set[int]) -> Iterator[dict[int, list[Row]]]:
        """Group -> rows that come with tokens, for every prompt to forward, cut at `prefill_tokens`."""
        batch: dict[int, list[Row]] = {}
        size = 0
        for group, written, tokens in self._prefill_parts(rows, new_groups):
            if batch and size + tokens > self._prefill_tokens:
                yield batch
                batch, size = {}, 0
            batch[group], size = written, size + tokens
        if batch:
            yield batch

    def _prefill_parts(self, rows: Sequence[Row], new_groups: set[int]) -> Iterator[tuple[int, list[Row], int]]:
        """(group, its rows that come with tokens, tokens with the prompt): a group, or as much of it as fits.

        Two parts of one group never fit into one batch, or they would not have been cut.
        """
        wanted: dict[int, list[Row]] = {}
        for row in rows:
            if row.group in new_groups or row.tokens:
                wanted.setdefault(row.group, []).extend([row] if row.tokens else [])
        for group, written in wanted.items():
            part: list[Row] = []
            size = prompt = len(self._problems[group].prompt_ids)
            for row in written:
                if part and size + len(row.tokens) > self._prefill_tokens:
                    yield group, part, size
                    part, size = [], prompt
                part.append(row)
                size += len(row.tokens)
            yield group, part, size

    def _prefill(self, batch: dict[int, list[Row]]) -> None:
        """Forward the prompts of the groups, with the tokens of the rows behind them, into their slots."""
        spans: list[GroupSpan] = []
        targets: list[Target] = []
        ids: list[int] = []
        for group, written in batch.items():
            prompt_ids = self._problems[group].prompt_ids
            spans.append(GroupSpan(len(ids), len(prompt_ids), tuple(len(row.tokens) for row in written)))
            for tokens, slot, is_prompt in [
                (prompt_ids, self._prompt_slot(group), True),
                *((row.tokens, self._slot(row), False) for row in written),
            ]:
                targets.append(Target(len(ids), len(tokens), slot, is_prompt))
                ids += tokens
        layout = PrefillLayout(self._policy.packed_layout(spans), self.kv, targets)
        positions = [position for span in spans for position in span.position_ids()]
        hidden_N_H = self._policy.hidden_states(self._tensor([ids]), self._tensor([positions]), layout)[0]
        for target in targets:
            store_S_H = self._prompt_hidden_S_H if target.is_prompt else self._hidden_S_H
            store_S_H[target.slot] = hidden_N_H[target.start + target.length - 1]

    def _slot(self, row: Row) -> int:
        return next(slot for slot, other in enumerate(self.live) if other is row)

    # ------------------------------------------------------------------------------------------ step

    def step(self) -> None:
        """One more token for every row in a slot. Raises RunFailed when the logits of a row are not finite."""
        self._forward_last_tokens(self.live[: len(self.live) - self._fresh])
        self._fresh = 0
        logits_B_V = self._policy.logits(self._hidden_S_H[: len(self.live)])
        self._check_finite(logits_B_V)
        uniforms_B = [
            keyed_uniform(self._seed, self._step, row.group, row.answer, len(row.tokens)) for row in self.live
        ]
        tokens_B, logprobs_B = sample_tokens(logits_B_V, uniforms_B, self._sampling)
        for row, token, logprob in zip(self.live, tokens_B.tolist(), logprobs_B.tolist(), strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)
            row.stop_reason = self._stop_reason(row)

    def _forward_last_tokens(self, rows: Sequence[Row]) -> None:
        if not rows:
            return
        layout = DecodeLayout(
            self.kv,
            [self._prompt_slot(row.group) for row in rows],
            [len(self._problems[prompt.group].prompt_ids) for prompt in self._prompts],
            [len(row.tokens) - 1 for row in rows],
        )
        tokens_B = self._tensor([row.tokens[-1] for row in rows])
        hidden_B_1_H = self._policy.hidden_states(tokens_B[:, None], layout.position_ids[:, None], layout)
        self._hidden_S_H[: len(rows)] = hidden_B_1_H[:, 0]

    def _check_finite(self, logits_B_V: Tensor) -> None:
        if broken := nonfinite_rows(logits_B_V):
            row = self.live[broken[0]]
            raise RunFailed(
                f"{self._policy.base_name} gave non-finite logits while sampling token {len(row.tokens) + 1} of an "
                f"answer to {self._problems[row.group].id}; with float16 try model.compute_dtype=float32, otherwise "
                "lower optim.lr."
            )

    # ------------------------------------------------------------------------------------------ retire

    def retire(self) -> list[Row]:
        """Take finished rows out of their slots and return them, by slot; their prompts go with the last of them."""
        finished = [row for row in self.live if row.stop_reason is not None]
        for slot in reversed(range(len(self.live))):
            if self.live[slot].stop_reason is not None:
                self._prompts[self._prompt_slot(self.live[slot].group)].rows_left -= 1
                self._close_answer_gap(slot)
        for slot in reversed(range(len(self._prompts))):
            if self._prompts[slot].rows_left == 0:
                self._close_prompt_gap(slot)
        return finished

    def _close_answer_gap(self, slot: int) -> None:
        last = self.live.pop()
        if slot < len(self.live):
            self.live[slot] = last
            # The newest token is not stored before the next step.
            self.kv.move_answer(len(self.live), slot, len(last.tokens) - 1)

    def _close_prompt_gap(self, slot: int) -> None:
        last = self._prompts.pop()
        if slot < len(self._prompts):
            self._prompts[slot] = last
            self.kv.move_prompt(len(self._prompts), slot)
            self._prompt_hidden_S_H[slot] = self._prompt_hidden_S_H[len(self._prompts)]

    def _tensor(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._policy.device)
