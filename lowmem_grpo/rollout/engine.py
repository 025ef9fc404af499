"""The sampler: answers to problems from the live policy, with one KV cache per wave of rows.

This is the plain form: a wave prefills each of its prompts once, copies the prompt's keys and values to the rows of
its answers, and decodes all rows together; a finished row leaves the batch at once. The cache exists only inside
`generate`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

import torch

from lowmem_grpo.errors import DataError, RunFailed
from lowmem_grpo.model import Policy
from lowmem_grpo.rollout.sampling import keyed_uniform, sample_tokens
from lowmem_grpo.types import Group, Problem, Rollout, SamplingParams, StopReason

__all__ = ["BatchEngine", "OnProgress", "RolloutEngine"]

OnProgress = Callable[[int, int, int], None]
"""Called after each decode step with (answers finished, answers asked for, tokens sampled so far)."""


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
    ) -> list[Group]:
        """Sample `group_size` answers to each problem; groups come back in the order of `problems`."""
        ...


@dataclass(slots=True)
class _Row:
    """One answer being written. `group` is the position of its problem in the step."""

    group: int
    answer: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop_reason: StopReason | None = None


class BatchEngine:
    """Decodes all rows of a wave in one batch.

    `max_concurrent` limits the rows of a wave (None: all rows of the call are one wave). Raises DataError when a
    prompt leaves no room for an answer, RunFailed when the model gives non-finite logits.
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
    ) -> list[Group]:
        """See `RolloutEngine.generate`."""
        self._check_lengths(problems, sampling)
        self.policy.sampling_mode()
        rows = [_Row(group, answer) for group in range(len(problems)) for answer in range(group_size)]
        for wave in _batched(rows, self.max_concurrent or len(rows)):
            for _ in self._decode_wave(wave, problems, sampling, step):
                if on_progress is not None:
                    on_progress(
                        sum(r.stop_reason is not None for r in rows), len(rows), sum(len(r.tokens) for r in rows)
                    )
        answers = iter(rows)
        return [Group(p, tuple(self._rollout(row) for row in islice(answers, group_size))) for p in problems]

    def _decode_wave(
        self, rows: Sequence[_Row], problems: Sequence[Problem], sampling: SamplingParams, step: int
    ) -> Iterator[None]:
        """Fill in the tokens of `rows`, yielding after each decode step."""
        live = list(rows)
        batch = _DecodeBatch(self.policy, live, problems)
        while True:
            uniforms_B = [keyed_uniform(self.seed, step, r.group, r.answer, len(r.tokens)) for r in live]
            tokens_B, logprobs_B = sample_tokens(batch.logits_B_V, uniforms_B, sampling)
            for row, token, logprob in zip(live, tokens_B.tolist(), logprobs_B.tolist(), strict=True):
                row.tokens.append(token)
                row.logprobs.append(logprob)
                row.stop_reason = self._stop_reason(row, sampling)
            yield
            staying = [i for i, row in enumerate(live) if row.stop_reason is None]
            if not staying:
                return
            live = [live[i] for i in staying]
            batch.advance(tokens_B, staying)

    def _stop_reason(self, row: _Row, sampling: SamplingParams) -> StopReason | None:
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

    def _rollout(self, row: _Row) -> Rollout:
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


class _DecodeBatch:
    """The cache, masks and next logits of the live rows of one wave."""

    def __init__(self, policy: Policy, rows: Sequence[_Row], problems: Sequence[Problem]) -> None:
        self._policy = policy
        self._device = policy.device
        self._cache = policy.new_cache()
        groups = sorted({row.group for row in rows})
        hidden_P_H, mask_P_T = self._prefill([problems[g].prompt_ids for g in groups])
        prompt_of_row_B = self._tensor([groups.index(row.group) for row in rows])
        # Indexing with repeats copies each prompt's keys and values to its rows.
        self._cache.batch_select_indices(prompt_of_row_B)
        self._mask_B_T = mask_P_T[prompt_of_row_B]
        self.logits_B_V = self._finite(policy.logits(hidden_P_H))[prompt_of_row_B]

    def _prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Forward each prompt once, left-padded; the last hidden state of each (P, H) and the mask (P, T)."""
        longest = max(len(ids) for ids in prompts)
        pads = [longest - len(ids) for ids in prompts]
        ids_P_T = self._tensor(
            [[self._policy.pad_id] * pad + list(ids) for pad, ids in zip(pads, prompts, strict=True)]
        )
        mask_P_T = self._tensor([[0] * pad + [1] * (longest - pad) for pad in pads])
        positions_P_T = (mask_P_T.cumsum(dim=1) - 1).clamp(min=0)
        hidden_P_T_H = self._policy.hidden_states(ids_P_T, mask_P_T, positions_P_T, self._cache)
        return hidden_P_T_H[:, -1], mask_P_T

    def advance(self, tokens_B: torch.Tensor, staying: Sequence[int]) -> None:
        """Drop the rows not in `staying`, feed each remaining row its token and compute its next logits."""
        if len(staying) < len(tokens_B):
            keep_B = self._tensor(staying)
            self._cache.batch_select_indices(keep_B)
            self._mask_B_T, tokens_B = self._mask_B_T[keep_B], tokens_B[keep_B]
        self._mask_B_T = torch.nn.functional.pad(self._mask_B_T, (0, 1), value=1)
        positions_B_1 = self._mask_B_T.sum(dim=1, keepdim=True) - 1
        hidden_B_1_H = self._policy.hidden_states(tokens_B[:, None], self._mask_B_T, positions_B_1, self._cache)
        self.logits_B_V = self._finite(self._policy.logits(hidden_B_1_H[:, -1]))

    def _tensor(self, values: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)

    def _finite(self, logits_B_V: torch.Tensor) -> torch.Tensor:
        if not torch.isfinite(logits_B_V).all():
            raise RunFailed(
                f"{self._policy.base_name} gave non-finite logits while sampling; with float16 try "
                "model.compute_dtype=float32, otherwise lower optim.lr."
            )
        return logits_B_V


def _batched(rows: Sequence[_Row], size: int) -> Iterator[Sequence[_Row]]:
    return (rows[start : start + size] for start in range(0, len(rows), size))
