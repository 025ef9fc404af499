"""The heaviest moments of a rollout: slots full, prompts of full length, answers one token from theirs.

The steps between are left out, since what a row has is its tokens and the contents of its slot, of whatever length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lowmem_grpo.model import Policy
from lowmem_grpo.rollout.decoding import Decoding, Row, slot_shape
from lowmem_grpo.types import Problem, SamplingParams

__all__ = ["decode_longest", "longest_problems"]


def longest_problems(count: int, prompt_tokens: int) -> list[Problem]:
    """Problems of no meaning whose prompts have `prompt_tokens` tokens.

    >>> len(longest_problems(2, 5)[1].prompt_ids)
    5
    """
    return [Problem(f"longest-{index}", "", "", (0,) * prompt_tokens, {}) for index in range(count)]


@torch.no_grad()
def decode_longest(
    policy: Policy,
    problems: Sequence[Problem],
    group_size: int,
    sampling: SamplingParams,
    *,
    max_concurrent: int | None,
    prefill_tokens: int,
    kv_int8: bool = False,
    after_step: Callable[[], None] = lambda: None,
) -> None:
    """Fill the slots with rows of `problems`, sample their first token, and then their last.

    Nothing is kept. `after_step` is called after either step. Raises RunFailed for logits that are not finite.
    """
    policy.sampling_mode()
    rows = [Row(group, answer) for group in range(len(problems)) for answer in range(group_size)]
    decoding = Decoding(
        policy,
        problems,
        rows,
        slot_shape(policy, problems, group_size, sampling.max_new_tokens, max_concurrent),
        sampling,
        seed=0,
        step=0,
        stop_reason=lambda row: None,
        prefill_tokens=prefill_tokens,
        kv_int8=kv_int8,
    )
    decoding.admit()
    decoding.step()
    after_step()
    for row in decoding.live:
        missing = sampling.max_new_tokens - 1 - len(row.tokens)
        row.tokens += row.tokens[-1:] * missing
        row.logprobs += row.logprobs[-1:] * missing
    if sampling.max_new_tokens > 1:
        decoding.step()
        after_step()
