"""Keys and values in slots: their bytes, and the attention of a decode step against its naive twin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lowmem_grpo.attention import HeadMath, PackedLayout
from lowmem_grpo.memory.live import LiveBytes
from lowmem_grpo.rollout.slots import DecodeLayout, KVSlots, PrefillLayout, SlotShape, Target
from lowmem_grpo.types import GroupSpan

CPU = torch.device("cpu")
LAYERS, LAYER, KV_HEADS, WIDTH = 2, 1, 2, 8
GARBAGE = 1e30
SHAPE = SlotShape(layers=2, kv_heads=3, head_width=4, prompt_slots=2, prompt_tokens=10, slots=5, answer_tokens=7)


# Bytes.


# 2 (key, value) x 2 layers x 3 heads x 4 = 48 values a token; 2 x 10 + 5 x 7 = 55 tokens; 2640 values.
@pytest.mark.parametrize(
    ("dtype", "expected_bytes"),
    [(torch.float64, 21120), (torch.float32, 10560), (torch.bfloat16, 5280), (torch.float16, 5280)],
)
def test_bytes_are_those_of_the_tensors(dtype: torch.dtype, expected_bytes: int) -> None:
    assert SHAPE.bytes(dtype) == expected_bytes
    with LiveBytes() as live:
        kv = KVSlots(SHAPE, dtype, CPU)
    assert live.peak_bytes == live.live_bytes == expected_bytes
    assert kv.prompts.untyped_storage().nbytes() + kv.answers.untyped_storage().nbytes() == expected_bytes


@pytest.mark.parametrize(
    ("change", "expected_bytes"),
    [
        ({"layers": 4}, 21120),
        ({"kv_heads": 6}, 21120),
        ({"head_width": 8}, 21120),
        ({"prompt_slots": 3}, 12480),  # ten tokens more
        ({"prompt_tokens": 11}, 10944),  # two
        ({"slots": 6}, 11904),  # seven
        ({"answer_tokens": 8}, 11520),  # five
    ],
)
def test_bytes_follow_every_size(change: dict[str, int], expected_bytes: int) -> None:
    shape = replace(SHAPE, **change)
    with LiveBytes() as live:
        kv = KVSlots(shape, torch.float32, CPU)
    assert shape.bytes(torch.float32) == live.live_bytes == expected_bytes
    assert kv.shape == shape


def test_a_prompt_is_stored_once_for_all_answers() -> None:
    # Qwen2.5-7B: 28 layers, 4 key-value heads of width 128; a prompt of 1000 tokens, 8 answers of 50.
    shared = SlotShape(28, 4, 128, prompt_slots=1, prompt_tokens=1000, slots=8, answer_tokens=50)
    per_row = SlotShape(28, 4, 128, prompt_slots=8, prompt_tokens=1000, slots=8, answer_tokens=50)
    answers_alone = replace(shared, prompt_slots=0).bytes(torch.float16)
    assert answers_alone == 57344 * 400
    assert shared.bytes(torch.float16) - answers_alone == 57_344_000
    assert per_row.bytes(torch.float16) - answers_alone == 458_752_000
    assert per_row.bytes(torch.float16) == 6 * shared.bytes(torch.float16)  # 8400 tokens and 1400


def test_slots_begin_as_zeros() -> None:
    kv = KVSlots(SHAPE, torch.float32, CPU)  # a NaN left in fresh memory would pass through a weight of 0
    assert (kv.prompts.shape, kv.answers.shape) == ((2, 2, 2, 3, 10, 4), (2, 2, 5, 3, 7, 4))
    assert not kv.prompts.any() and not kv.answers.any()


# 660 keys and values of a head: 4 bytes and a scale each; the buffer has 3 heads x 35 tokens x 4.
@pytest.mark.parametrize(
    ("dtype", "expected_bytes"),
    [(torch.float32, 660 * 8 + 420 * 4), (torch.bfloat16, 660 * 6 + 420 * 2), (torch.float16, 660 * 6 + 420 * 2)],
)
def test_bytes_in_int8_are_those_of_the_tensors(dtype: torch.dtype, expected_bytes: int) -> None:
    assert SHAPE.bytes(dtype, int8=True) == expected_bytes
    with LiveBytes() as live:
        kv = KVSlots(SHAPE, dtype, CPU, int8=True)
    assert live.peak_bytes == live.live_bytes == expected_bytes
    assert kv.prompts.dtype == kv.answers.dtype == torch.int8


def test_int8_halves_a_long_cache_but_for_its_scales_and_the_buffer() -> None:
    # Llama-3.1-8B, three answers of 20 000 tokens: 32 layers, 8 key-value heads of width 128.
    shape = SlotShape(32, 8, 128, prompt_slots=1, prompt_tokens=256, slots=3, answer_tokens=20_000)
    plain = 131_072 * 60_256
    assert shape.bytes(torch.float16) == plain
    buffer = 2 * 8 * 128 * 60_000  # of the keys of one layer, or of the values: 1/64 of the plain answers
    assert shape.bytes(torch.float16, int8=True) == plain // 2 * 130 // 128 + buffer


# Moving.


def filled(shape: SlotShape = SHAPE) -> KVSlots:
    """Every value another one."""
    kv = KVSlots(shape, torch.float64, CPU)
    for offset, store in ((0, kv.prompts), (1_000_000, kv.answers)):
        store.copy_(offset + torch.arange(store.numel(), dtype=torch.float64).view(store.shape))
    return kv


def test_a_prompt_moves_whole_and_alone() -> None:
    kv, before = filled(), filled()
    kv.move_prompt(1, 0)
    assert torch.equal(kv.prompts[:, :, 0], before.prompts[:, :, 1])
    assert torch.equal(kv.prompts[:, :, 1], before.prompts[:, :, 1])
    assert torch.equal(kv.answers, before.answers)


@pytest.mark.parametrize("length", [0, 1, 3, 7])
def test_an_answer_moves_up_to_its_length(length: int) -> None:
    kv, before = filled(), filled()
    kv.move_answer(4, 1, length)
    assert torch.equal(kv.answers[:, :, 1, :, :length], before.answers[:, :, 4, :, :length])
    assert torch.equal(kv.answers[:, :, 1, :, length:], before.answers[:, :, 1, :, length:])
    others = [0, 2, 3, 4]
    assert torch.equal(kv.answers[:, :, others], before.answers[:, :, others])
    assert torch.equal(kv.prompts, before.prompts)


def test_scales_move_with_their_values() -> None:
    kv = KVSlots(SHAPE, torch.float32, CPU, int8=True)
    before = []
    for store in (kv.prompt_store, kv.answer_store):
        states = torch.randn(store.values.shape, generator=torch.Generator().manual_seed(0))
        store.write((slice(None), slice(None)), states)
        assert store.scales is not None
        before.append((store.values.clone(), store.scales.clone()))
    kv.move_prompt(1, 0)
    kv.move_answer(4, 1, 3)
    for moved, old in zip((kv.prompts, kv.prompt_store.scales), before[0], strict=True):
        assert moved is not None
        assert torch.equal(moved[:, :, 0], old[:, :, 1]) and torch.equal(moved[:, :, 1], old[:, :, 1])
    for moved, old in zip((kv.answers, kv.answer_store.scales), before[1], strict=True):
        assert moved is not None
        assert torch.equal(moved[:, :, 1, :, :3], old[:, :, 4, :, :3])
        assert torch.equal(moved[:, :, 1, :, 3:], old[:, :, 1, :, 3:])
        assert torch.equal(moved[:, :, [0, 2, 3, 4]], old[:, :, [0, 2, 3, 4]])


# The prefill.


def test_a_prefill_writes_each_sequence_to_its_slot_and_attends_as_packed() -> None:
    generator = torch.Generator().manual_seed(0)
    spans = [GroupSpan(0, 3, (2,)), GroupSpan(5, 4, ())]
    query, key, value = (torch.randn(1, heads, 9, 4, dtype=torch.float64, generator=generator) for heads in (6, 3, 3))
    kv = KVSlots(SHAPE, torch.float64, CPU)
    targets = [Target(0, 3, 1, True), Target(3, 2, 4, False), Target(5, 4, 0, True)]
    math = HeadMath(0.5)
    output = PrefillLayout(PackedLayout(spans, CPU), kv, targets).attend(LAYER, query, key, value, math)
    assert torch.equal(output, PackedLayout(spans, CPU).attend(LAYER, query, key, value, math))
    expected = KVSlots(SHAPE, torch.float64, CPU)
    for kind, states in enumerate((key[0], value[0])):
        expected.prompts[LAYER, kind, 1, :, :3] = states[:, 0:3]
        expected.answers[LAYER, kind, 4, :, :2] = states[:, 3:5]
        expected.prompts[LAYER, kind, 0, :, :4] = states[:, 5:9]
    assert torch.equal(kv.prompts, expected.prompts)
    assert torch.equal(kv.answers, expected.answers)


# The decode.


@dataclass(frozen=True)
class Case:
    """Rows of several prompts, with the keys and values each holds and the new token of each."""

    prompt_lengths: Sequence[int]
    prompt_of_row: Sequence[int]
    answer_lengths: Sequence[int]
    per_kv: int = 2
    seed: int = 0
    dtype: torch.dtype = torch.float64
    garbage: float = GARBAGE

    def random(self, *shape: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.seed + seed)
        return torch.randn(*shape, dtype=torch.float64, generator=generator).to(self.dtype)

    def new(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of the new token of each row."""
        rows = len(self.prompt_of_row)
        heads = (KV_HEADS * self.per_kv, KV_HEADS, KV_HEADS)
        query, key, value = (self.random(rows, n, 1, WIDTH, seed=i) for i, n in enumerate(heads))
        return query, key, value

    def slots(self) -> KVSlots:
        """The stored tokens; garbage in every place that no stored token has."""
        shape = SlotShape(
            LAYERS,
            KV_HEADS,
            WIDTH,
            prompt_slots=len(self.prompt_lengths) + 1,
            prompt_tokens=max(self.prompt_lengths) + 2,
            slots=len(self.prompt_of_row) + 2,
            answer_tokens=max(self.answer_lengths) + 3,
        )
        kv = KVSlots(shape, self.dtype, CPU)
        for offset, store, lengths in ((10, kv.prompts, self.prompt_lengths), (20, kv.answers, self.answer_lengths)):
            states = self.random(*store.shape, seed=offset)
            store.fill_(self.garbage)
            for slot, length in enumerate(lengths):
                store[:, :, slot, :, :length] = states[:, :, slot, :, :length]
        return kv

    def layout(self, kv: KVSlots) -> DecodeLayout:
        return DecodeLayout(kv, self.prompt_of_row, self.prompt_lengths, self.answer_lengths)


def naive_decode(case: Case, math: HeadMath) -> Tensor:
    """Each row and head alone, in float64: its whole sequence end to end, plain softmax; (rows, 1, heads, D)."""
    kv = case.slots()
    query, new_key, new_value = (states.double() for states in case.new())
    output = torch.zeros(len(query), 1, query.shape[1], WIDTH, dtype=torch.float64)
    for row, (prompt, length) in enumerate(zip(case.prompt_of_row, case.answer_lengths, strict=True)):
        for head in range(query.shape[1]):
            of_kv = head // case.per_kv
            keys, values = (
                torch.cat(
                    [
                        kv.prompts[LAYER, kind, prompt, of_kv, : case.prompt_lengths[prompt]].double(),
                        kv.answers[LAYER, kind, row, of_kv, :length].double(),
                        new[row, of_kv],
                    ]
                )
                for kind, new in enumerate((new_key, new_value))
            )
            scores = math.scale * keys @ query[row, head, 0]
            if math.softcap is not None:
                scores = math.softcap * torch.tanh(scores / math.softcap)
            seen = slice(None) if math.window is None else slice(max(0, len(keys) - math.window), None)
            output[row, 0, head] = torch.softmax(scores[seen], 0) @ values[seen]
    return output


MIXED = Case(prompt_lengths=(5, 1, 9), prompt_of_row=(2, 0, 2, 1, 2, 0), answer_lengths=(3, 0, 6, 2, 0, 1))
MATHS = {
    "plain": HeadMath(0.3),
    "softcap": HeadMath(0.3, softcap=0.8),
    "window over all": HeadMath(0.3, window=100),
    "window into the prompt": HeadMath(0.3, window=5),
    "window of itself": HeadMath(0.3, window=1),
    "window and softcap": HeadMath(0.3, window=4, softcap=0.8),
}


@pytest.mark.parametrize("math", MATHS.values(), ids=MATHS)
@pytest.mark.parametrize("per_kv", [1, 2, 3])
def test_a_decode_step_is_attention_over_each_whole_row(math: HeadMath, per_kv: int) -> None:
    case = replace(MIXED, per_kv=per_kv)
    kv = case.slots()
    output = case.layout(kv).attend(LAYER, *case.new(), math)
    assert output.shape == (6, 1, KV_HEADS * per_kv, WIDTH)
    assert (output - naive_decode(case, math)).abs().max() < 1e-12


@pytest.mark.parametrize(
    "case",
    [
        Case((4,), (0,), (0,)),
        Case((1,), (0,), (5,)),
        Case((3,), (0, 0, 0, 0), (0, 0, 0, 0)),
        Case((3, 7, 2), (1,), (4,)),  # two prompts whose rows are not there yet
        Case((2, 2), (1, 1, 1, 0), (1, 8, 3, 0)),
        Case((1, 1, 1, 1), (3, 2, 1, 0), (0, 1, 2, 3)),
    ],
)
def test_rows_and_prompts_of_any_number(case: Case) -> None:
    for math in MATHS.values():
        output = case.layout(case.slots()).attend(LAYER, *case.new(), math)
        assert (output - naive_decode(case, math)).abs().max() < 1e-12


@st.composite
def cases(draw: st.DrawFn) -> Case:
    prompt_lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    rows = draw(st.lists(st.tuples(st.integers(0, len(prompt_lengths) - 1), st.integers(0, 6)), min_size=1, max_size=7))
    prompt_of_row, answer_lengths = zip(*rows, strict=True)
    return Case(
        prompt_lengths, prompt_of_row, answer_lengths, per_kv=draw(st.integers(1, 3)), seed=draw(st.integers(0, 99))
    )


@given(cases(), st.none() | st.integers(1, 12), st.none() | st.sampled_from([0.5, 30.0]))
@settings(max_examples=60)
def test_a_decode_step_equals_its_twin(case: Case, window: int | None, softcap: float | None) -> None:
    math = HeadMath(0.4, window, softcap)
    output = case.layout(case.slots()).attend(LAYER, *case.new(), math)
    assert (output - naive_decode(case, math)).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("math", MATHS.values(), ids=MATHS)
def test_in_16_bits_only_weights_and_values_are_rounded(dtype: torch.dtype, math: HeadMath) -> None:
    case = replace(MIXED, dtype=dtype, garbage=6e4)
    kv = case.slots()
    output = case.layout(kv).attend(LAYER, *case.new(), math)
    assert output.dtype == dtype
    values = torch.cat([kv.prompts[LAYER, 1].flatten(), kv.answers[LAYER, 1].flatten()])
    largest = values[values < 1e3].abs().max().item()
    # Weights sum to 1: one rounding of the weights, one of each part of the sum, one of their sum.
    bound = 4 * torch.finfo(dtype).eps * largest
    assert (output.double() - naive_decode(case, math)).abs().max() < bound


@pytest.mark.parametrize("math", MATHS.values(), ids=MATHS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_lies_beyond_the_lengths_changes_nothing(math: HeadMath, dtype: torch.dtype) -> None:
    outputs = [
        case.layout(case.slots()).attend(LAYER, *case.new(), math)
        for case in (replace(MIXED, dtype=dtype, garbage=garbage) for garbage in (0.0, 1.0, GARBAGE, -GARBAGE))
    ]
    assert all(torch.equal(output, outputs[0]) for output in outputs[1:])


def test_a_step_writes_the_new_token_behind_each_answer_and_nothing_else() -> None:
    kv, before = MIXED.slots(), MIXED.slots()
    query, key, value = MIXED.new()
    MIXED.layout(kv).attend(LAYER, query, key, value, HeadMath(0.3))
    for row, length in enumerate(MIXED.answer_lengths):
        before.answers[LAYER, 0, row, :, length] = key[row, :, 0]
        before.answers[LAYER, 1, row, :, length] = value[row, :, 0]
    assert torch.equal(kv.answers, before.answers)
    assert torch.equal(kv.prompts, before.prompts)


def test_positions_go_on_from_prompt_and_answer() -> None:
    assert MIXED.layout(MIXED.slots()).position_ids.tolist() == [9 + 3, 5 + 0, 9 + 6, 1 + 2, 9 + 0, 5 + 1]


def test_one_layout_serves_layers_with_and_without_a_window() -> None:
    kv = MIXED.slots()
    layout = MIXED.layout(kv)
    for math in (MATHS["plain"], MATHS["window into the prompt"], MATHS["plain"], MATHS["window of itself"]):
        output = layout.attend(LAYER, *MIXED.new(), math)
        assert (output - naive_decode(MIXED, math)).abs().max() < 1e-12


def test_a_repeated_step_gives_the_same() -> None:
    kv = MIXED.slots()
    first = MIXED.layout(kv).attend(LAYER, *MIXED.new(), HeadMath(0.3))
    assert torch.equal(MIXED.layout(kv).attend(LAYER, *MIXED.new(), HeadMath(0.3)), first)


# What reading costs, and on which device the scores are made for.


def test_plain_slots_are_read_without_a_copy() -> None:
    kv = filled()
    with LiveBytes() as live:
        read = kv.answer_store.read((LAYER, 1, slice(4), slice(None), slice(3)))
    assert live.peak_bytes == 0
    assert read.untyped_storage().data_ptr() == kv.answers.untyped_storage().data_ptr()
    assert torch.equal(read, kv.answers[LAYER, 1, :4, :, :3])


def test_int8_slots_are_decoded_into_the_buffer_as_far_as_they_are_used() -> None:
    kv = KVSlots(SHAPE, torch.float16, CPU, int8=True)
    states = torch.tensor([[127.0, -1.0, 63.6, 0.0]] * 3, dtype=torch.float16)
    index = (LAYER, 1, 2, slice(None), 0)
    kv.answer_store.write(index, states)
    buffer = kv.answer_store.decoded
    assert buffer is not None
    buffer.fill_(-7.0)
    with LiveBytes() as live:
        read = kv.answer_store.read((LAYER, 1, slice(3), slice(None), slice(1)))
    assert live.peak_bytes == 0
    assert (read.dtype, read.shape) == (torch.float16, (3, 3, 1, 4))
    assert read[2, :, 0].tolist() == [[127.0, -1.0, 64.0, 0.0]] * 3
    assert not read[:2].any()
    assert (buffer[36:] == -7).all() and (buffer[:36] != -7).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-7, 1e-4, 1.0, 6e4])
def test_a_value_is_wrong_by_half_a_scale_at_most(dtype: torch.dtype, size: float) -> None:
    kv = KVSlots(SHAPE, dtype, CPU, int8=True)
    states = (size * (2 * torch.rand(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) - 1)).to(
        dtype
    )
    index = (0, 0, 1, slice(None), 5)
    kv.prompt_store.write(index, states)
    error = (kv.prompt_store.read(index).double() - states.double()).abs()
    largest = states.abs().amax(-1, keepdim=True).double()
    # 1/254 of the largest, and the roundings of the scale and of the product; below the normal numbers half of them.
    eps, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).tiny
    assert (error <= largest * (1 / 254 + eps) + tiny / 2).all()


def test_what_is_not_finite_is_not_hidden() -> None:
    kv = KVSlots(SHAPE, torch.float32, CPU, int8=True)
    for broken in (torch.nan, torch.inf, -torch.inf):
        index = (0, 0, 0, slice(None), 0)
        kv.prompt_store.write(index, torch.tensor([[1.0, broken, 2.0, 3.0]] * 3))
        assert not kv.prompt_store.read(index)[:, 1].isfinite().any()


class Products(TorchDispatchMode):
    """The matrix products that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "bmm" in str(func):
            self.names.add(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_fake_tensors_take_the_way_of_the_device_they_stand_for(on_gpu: bool, int8: bool) -> None:
    shape = SlotShape(LAYERS, KV_HEADS, WIDTH, prompt_slots=3, prompt_tokens=9, slots=6, answer_tokens=9)
    with FakeTensorMode(), Products() as products:
        kv = KVSlots(shape, torch.float16, CPU, int8=int8, on_gpu=on_gpu)
        new = (torch.empty(6, heads, 1, WIDTH, dtype=torch.float16) for heads in (4, KV_HEADS, KV_HEADS))
        output = MIXED.layout(kv).attend(LAYER, *new, HeadMath(0.3))
    assert (output.shape, output.dtype) == ((6, 1, 4, WIDTH), torch.float16)
    assert products.names == {"aten.bmm.default"} | ({"aten.bmm.dtype"} if on_gpu else set())


def test_the_device_says_whether_it_is_a_gpu_unless_told() -> None:
    assert not KVSlots(SHAPE, torch.float16, CPU).on_gpu
    assert KVSlots(SHAPE, torch.float16, CPU, on_gpu=True).on_gpu
