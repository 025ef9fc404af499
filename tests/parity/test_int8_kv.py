"""Keys and values in int8 against plain ones: what attention makes of the rounding, and the bytes of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lowmem_grpo.attention import HeadMath, PackedLayout
from lowmem_grpo.memory.live import LiveBytes
from lowmem_grpo.rollout.slots import DecodeLayout, KVSlots, PrefillLayout, SlotShape, Target
from lowmem_grpo.types import GroupSpan

CPU = torch.device("cpu")
KV_HEADS, WIDTH, SCALE = 2, 8, 0.3
HALF_STEP = 1 / 254
"""Of the largest value of a head: 127 steps reach it, and a value is half a step from one of them."""


@dataclass(frozen=True)
class Case:
    """One prompt, its rows of some length, and the new token of each row; `step` > 0 rounds states to multiples."""

    prompt_length: int
    answer_lengths: Sequence[int]
    dtype: torch.dtype = torch.float64
    seed: int = 0
    step: float = 0.0

    def states(self, heads: int, tokens: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * self.seed + seed)
        states = torch.randn(1, heads, tokens, WIDTH, dtype=torch.float64, generator=generator)
        if self.step:
            states = (40 * states).round().clamp(-127, 127)
            states[..., 0] = 127.0  # every head reaches the largest multiple
            states = states * self.step
        return states.to(self.dtype)

    def decode(self, int8: bool) -> tuple[Tensor, KVSlots]:
        """Prefill of the prompt and the rows, and one decode step on top; (rows, heads, D)."""
        rows = len(self.answer_lengths)
        shape = SlotShape(1, KV_HEADS, WIDTH, 1, self.prompt_length + 2, rows + 1, max(self.answer_lengths) + 2)
        kv = KVSlots(shape, self.dtype, CPU, int8=int8)
        span = GroupSpan(0, self.prompt_length, tuple(self.answer_lengths))
        targets, start = [Target(0, self.prompt_length, 0, True)], self.prompt_length
        for slot, length in enumerate(self.answer_lengths):
            targets.append(Target(start, length, slot, False))
            start += length
        heads = (2 * KV_HEADS, KV_HEADS, KV_HEADS)
        packed = [self.states(n, span.tokens, seed) for seed, n in enumerate(heads)]
        PrefillLayout(PackedLayout([span], CPU), kv, targets).attend(0, *packed, HeadMath(SCALE))
        new = [self.states(n, rows, seed + 10).transpose(0, 2) for seed, n in enumerate(heads)]
        layout = DecodeLayout(kv, [0] * rows, [self.prompt_length], self.answer_lengths)
        return layout.attend(0, *new, HeadMath(SCALE))[:, 0], kv

    def bound(self) -> float:
        """How far the two outputs may be apart, from the largest values alone.

        Each key is wrong by HALF_STEP x its largest in every component, so a score by at most
        e = scale x |q|_1 x HALF_STEP x largest key; the softmax weights change by factors within exp(+-2e), so the
        output by (exp(2e) - 1) x largest value, and by HALF_STEP x largest value for the values themselves.
        """
        tokens, rows = self.prompt_length + sum(self.answer_lengths), len(self.answer_lengths)
        key, value = (
            max(self.states(KV_HEADS, n, seed).abs().max().item() for n, seed in ((tokens, kind), (rows, kind + 10)))
            for kind in (1, 2)
        )
        query = self.states(2 * KV_HEADS, rows, 10).abs().sum(-1).max().item()
        error = SCALE * query * HALF_STEP * key
        return (math.exp(2 * error) - 1 + HALF_STEP) * value


@given(st.integers(1, 12), st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(0, 99))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_the_output_is_wrong_by_no_more_than_the_rounding_of_keys_and_values(
    prompt_length: int, answer_lengths: list[int], seed: int
) -> None:
    case = Case(prompt_length, answer_lengths, seed=seed)
    plain, rounded = case.decode(int8=False)[0], case.decode(int8=True)[0]
    assert 0 < (rounded - plain).abs().max().item() <= case.bound()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_in_other_dtypes_the_relative_error_is_that_of_rounding(dtype: torch.dtype) -> None:
    case = Case(40, (30, 7, 0, 19), dtype=dtype)
    plain, rounded = (case.decode(int8=int8)[0].double() for int8 in (False, True))
    assert 0 < (rounded - plain).abs().max().item() <= case.bound()
    # Errors of many values have both signs: of the norm far less is left than the bound allows.
    assert (rounded - plain).norm() / plain.norm() < 0.02


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("step", [2.0**-7, 2.0**-4])
def test_multiples_of_the_scale_lose_nothing(dtype: torch.dtype, step: float) -> None:
    case = Case(12, (5, 0, 9), dtype=dtype, step=step)
    (plain, _), (rounded, kv) = case.decode(int8=False), case.decode(int8=True)
    assert kv.answers.abs().amax().item() == 127
    assert torch.equal(rounded, plain)


def test_the_slots_of_a_long_decode_have_half_the_bytes() -> None:
    shape = SlotShape(
        layers=32, kv_heads=2, head_width=64, prompt_slots=1, prompt_tokens=50, slots=4, answer_tokens=200
    )
    new = [torch.zeros(4, heads, 1, 64, dtype=torch.float16) for heads in (4, 2, 2)]
    peaks = {}
    for int8 in (False, True):
        with LiveBytes() as live:
            kv = KVSlots(shape, torch.float16, CPU, int8=int8)
            held = live.live_bytes
            assert held == shape.bytes(torch.float16, int8)
            DecodeLayout(kv, [0] * 4, [50], [199] * 4).attend(0, *new, HeadMath(SCALE))
        peaks[int8] = live.peak_bytes - held
    # 2 x 32 x 2 heads of 850 tokens: 128 bytes each, or 64 and a scale; the keys of one layer's answers on top.
    assert shape.bytes(torch.float16) == 128 * 850 * 128
    assert shape.bytes(torch.float16, int8=True) == 128 * 850 * 66 + 2 * 800 * 64 * 2
    # A step decodes into the buffer, so it needs what a plain one does, and the encoding of four new tokens.
    assert peaks[True] <= peaks[False] + 4 * 2 * 64 * 8
