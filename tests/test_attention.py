"""Who sees whom: tiles and masks by hand, packed groups against every sequence alone, and calls without a layout."""

from __future__ import annotations

import itertools
import math
import sys
import types
from collections.abc import Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.bias import CausalBias

from lowmem_grpo import attention
from lowmem_grpo.attention import HeadMath, PackedLayout, flash_attention_available
from lowmem_grpo.types import GroupSpan
from tests.helpers import assert_gradients_close, gradients_of, pack, random_groups, tiny_policy, updater_of
from tests.tiny import FAMILIES, tiny_model

CPU = torch.device("cpu")
HEADS, KV_HEADS, WIDTH = 4, 2, 3
SCALE = 0.6


def spans_of(*groups: tuple[int, tuple[int, ...]]) -> list[GroupSpan]:
    """Spans behind one another, each given as the length of its prompt and those of its answers."""
    spans: list[GroupSpan] = []
    for prompt, answers in groups:
        spans.append(GroupSpan(sum(span.tokens for span in spans), prompt, answers))
    return spans


def tiles_of(span: GroupSpan) -> list[tuple[tuple[int, int], tuple[int, ...], bool]]:
    """(first token and end, lengths, whether the prompt is among them) of each tile."""
    tiles = list(attention._tiles(span))
    assert all(tile.prompt == slice(span.start, span.start + span.prompt_length) for tile in tiles)
    return [((tile.tokens.start, tile.tokens.stop), tile.lengths, tile.has_prompt) for tile in tiles]


def mask_of(span: GroupSpan, tile: int, window: int | None = None) -> list[str]:
    """The mask of a tile, one string per query, `x` where it sees the key."""
    mask = attention._tile_mask(list(attention._tiles(span))[tile], window, CPU)
    return ["".join("x" if seen else "." for seen in row) for row in mask.tolist()]


# Tiles.


@pytest.mark.parametrize(
    ("tile_tokens", "expected"),
    [
        (100, [((10, 21), (3, 2, 4, 1, 1), True)]),
        (11, [((10, 21), (3, 2, 4, 1, 1), True)]),
        (10, [((10, 20), (3, 2, 4, 1), True), ((20, 21), (1,), False)]),
        (6, [((10, 15), (3, 2), True), ((15, 21), (4, 1, 1), False)]),
        (5, [((10, 15), (3, 2), True), ((15, 20), (4, 1), False), ((20, 21), (1,), False)]),
        # Sequences are never cut, however small the tile.
        (
            1,
            [
                ((10, 13), (3,), True),
                ((13, 15), (2,), False),
                ((15, 19), (4,), False),
                ((19, 20), (1,), False),
                ((20, 21), (1,), False),
            ],
        ),
    ],
)
def test_tiles_are_neighbouring_whole_sequences(
    monkeypatch: pytest.MonkeyPatch, tile_tokens: int, expected: list[object]
) -> None:
    monkeypatch.setattr(attention, "TILE_TOKENS", tile_tokens)
    assert tiles_of(GroupSpan(10, 3, (2, 4, 1, 1))) == expected


def test_a_prompt_without_answers_is_one_tile() -> None:
    assert tiles_of(GroupSpan(7, 4, ())) == [((7, 11), (4,), True)]


@pytest.mark.parametrize(
    ("tile_tokens", "farthest"), [(100, [3 + 4]), (5, [3 + 2, 3 + 4]), (1, [3, 3 + 2, 3 + 4, 3 + 1])]
)
def test_how_far_the_last_token_of_a_tile_can_see(
    monkeypatch: pytest.MonkeyPatch, tile_tokens: int, farthest: list[int]
) -> None:
    monkeypatch.setattr(attention, "TILE_TOKENS", tile_tokens)
    assert [tile.farthest for tile in attention._tiles(GroupSpan(0, 3, (2, 4, 1)))] == farthest


# Masks.


def test_the_mask_of_a_whole_group_by_hand() -> None:
    assert mask_of(GroupSpan(5, 2, (3, 2)), 0) == [
        "x......",  # the prompt
        "xx.....",
        "xxx....",  # the first answer
        "xxxx...",
        "xxxxx..",
        "xx...x.",  # the second answer: the prompt and itself
        "xx...xx",
    ]


def test_the_mask_of_answers_alone_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "TILE_TOKENS", 4)
    span = GroupSpan(0, 3, (2, 1, 1))
    assert [tile[1] for tile in tiles_of(span)] == [(3,), (2, 1, 1)]
    assert mask_of(span, 0) == ["x..", "xx.", "xxx"]
    # Keys are the three of the prompt, then those of the tile.
    assert mask_of(span, 1) == ["xxxx...", "xxxxx..", "xxx..x.", "xxx...x"]


def test_a_window_counts_by_position_and_the_token_itself() -> None:
    # Positions: prompt 0 1 2, first answer 3 4, second answer 3 4 5.
    assert mask_of(GroupSpan(0, 3, (2, 3)), 0, window=3) == [
        "x.......",
        "xx......",
        "xxx.....",
        ".xxx....",
        "..xxx...",
        ".xx..x..",
        "..x..xx.",
        ".....xxx",
    ]
    assert mask_of(GroupSpan(0, 3, (2,)), 0, window=1) == ["x....", ".x...", "..x..", "...x.", "....x"]


def test_a_window_of_answers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "TILE_TOKENS", 3)
    assert mask_of(GroupSpan(4, 3, (1, 2)), 1, window=2) == ["..xx..", "..x.x.", "....xx"]


# Packed groups against every sequence alone.


def naive_attention(
    query_h_T_D: Tensor, key_h_T_D: Tensor, value_h_T_D: Tensor, math_of: HeadMath, queries: int
) -> Tensor:
    """The last `queries` tokens of one sequence, (queries, heads, D), head by head and token by token."""
    heads, length, _ = key_h_T_D.shape
    outputs = []
    for i in range(length - queries, length):
        first = 0 if math_of.window is None else max(0, i + 1 - math_of.window)
        seen = slice(first, i + 1)
        of_heads = []
        for h in range(query_h_T_D.shape[0]):
            kv = h * heads // query_h_T_D.shape[0]
            scores = key_h_T_D[kv, seen] @ query_h_T_D[h, i] * math_of.scale
            if math_of.softcap is not None:
                scores = math_of.softcap * (scores / math_of.softcap).tanh()
            of_heads.append(torch.softmax(scores, -1) @ value_h_T_D[kv, seen])
        outputs.append(torch.stack(of_heads))
    return torch.stack(outputs)


def naive_packed(spans: Sequence[GroupSpan], states: Sequence[Tensor], math_of: HeadMath) -> Tensor:
    """(1, N, heads, D): the prompt alone, and each answer behind a prompt of its own."""
    parts = []
    for span in spans:
        prompt = list(range(span.start, span.start + span.prompt_length))
        parts.append(naive_attention(*(s[0][:, prompt] for s in states), math_of, len(prompt)))
        start = span.start + span.prompt_length
        for length in span.answer_lengths:
            alone = [*prompt, *range(start, start + length)]
            parts.append(naive_attention(*(s[0][:, alone] for s in states), math_of, length))
            start += length
    return torch.cat(parts)[None]


def random_states(tokens: int, seed: int = 0, kv_heads: int = KV_HEADS) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(1, heads, tokens, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()
        for heads in (HEADS, kv_heads, kv_heads)
    )
    return query, key, value


def value_and_gradients(output: Tensor, states: Sequence[Tensor]) -> list[Tensor]:
    direction = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).reshape(output.shape)
    return [output.detach(), *torch.autograd.grad((output * direction).sum(), list(states))]


def assert_same(actual: Sequence[Tensor], expected: Sequence[Tensor], atol: float = 1e-12) -> None:
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=atol)


SPANS = st.lists(
    st.tuples(st.integers(1, 6), st.lists(st.integers(1, 6), max_size=3).map(tuple)), min_size=1, max_size=3
)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 3, 100])
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(groups=SPANS, tile_tokens=st.sampled_from([1, 4, 9, 300]), kv_heads=st.sampled_from([1, 2, 4]))
def test_packed_groups_equal_every_sequence_alone(
    monkeypatch: pytest.MonkeyPatch,
    softcap: float | None,
    window: int | None,
    groups: list[tuple[int, tuple[int, ...]]],
    tile_tokens: int,
    kv_heads: int,
) -> None:
    monkeypatch.setattr(attention, "TILE_TOKENS", tile_tokens)
    spans, math_of = spans_of(*groups), HeadMath(SCALE, window, softcap)
    states = random_states(sum(span.tokens for span in spans), kv_heads=kv_heads)
    output = PackedLayout(spans, CPU).attend(0, *states, math_of)
    expected = value_and_gradients(naive_packed(spans, states, math_of), states)
    assert_same(value_and_gradients(output, states), expected)


LONG = [(2, (5, 1)), (7, (3, 12, 4, 2)), (1, (1,)), (4, ())]


@pytest.mark.parametrize("math_of", [HeadMath(SCALE), HeadMath(SCALE, 3), HeadMath(SCALE, None, 2.0)])
def test_a_repeated_call_gives_the_same_bits(math_of: HeadMath) -> None:
    spans = spans_of(*LONG)
    layout, states = PackedLayout(spans, CPU), random_states(sum(span.tokens for span in spans))
    # As checkpointing repeats it, with other layers in between.
    first = value_and_gradients(layout.attend(0, *states, math_of), states)
    layout.attend(1, *states, HeadMath(0.1, 2))
    again = value_and_gradients(layout.attend(0, *states, math_of), states)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def shape_of(mask: object) -> tuple[int, ...]:
    """(queries, keys) of a mask, or () of none."""
    if isinstance(mask, CausalBias):
        return mask.seq_len_q, mask.seq_len_kv
    return tuple(mask.shape) if isinstance(mask, Tensor) else ()


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("tile_tokens", [1, 6, 20])
def test_no_mask_is_larger_than_a_tile_and_its_prompt(
    monkeypatch: pytest.MonkeyPatch, tile_tokens: int, window: int | None
) -> None:
    monkeypatch.setattr(attention, "TILE_TOKENS", tile_tokens)
    given_masks: list[tuple[int, ...]] = []
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def watched(query: Tensor, key: Tensor, value: Tensor, **options: object) -> Tensor:
        given_masks.append(shape_of(options["attn_mask"]))
        return sdpa(query, key, value, **options)  # type: ignore[arg-type]

    # The module's own name for it, since torch compares the function with its own when it unfolds a causal bias.
    monkeypatch.setattr(attention, "F", types.SimpleNamespace(scaled_dot_product_attention=watched))
    spans = spans_of(*LONG)
    PackedLayout(spans, CPU).attend(0, *random_states(sum(span.tokens for span in spans)), HeadMath(SCALE, window))
    tiles = [tile for span in spans for tile in attention._tiles(span)]
    assert len(given_masks) == len(tiles)
    for shape, tile in zip(given_masks, tiles, strict=True):
        size = sum(tile.lengths)
        assert size <= tile_tokens or len(tile.lengths) == 1
        assert shape in ((), (size, size if tile.has_prompt else tile.prompt_length + size))
        if tile.lengths == (tile.prompt_length,) and tile.has_prompt and window is None:
            assert shape == (), "a prompt alone needs no mask"


def test_masks_are_made_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int | None] = []
    tile_mask = attention._tile_mask

    def counted(tile: attention._Tile, window: int | None, device: torch.device) -> Tensor:
        made.append(window)
        return tile_mask(tile, window, device)

    monkeypatch.setattr(attention, "_tile_mask", counted)
    spans = spans_of((3, (2, 4)), (2, (1, 1)))
    layout, states = PackedLayout(spans, CPU), random_states(13)
    for layer in range(4):
        # A window of 4 reaches over the second group, which then shares the mask without a window.
        layout.attend(layer, *states, HeadMath(SCALE, 4 if layer % 2 else None))
    assert made == [None, None, 4]


# flash-attn.


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
) -> Tensor:
    """What the documentation of flash-attn 2.6 says about it: q (tokens, heads, D), causal from the bottom right.

    Query i of a sequence sees the keys [i + K - Q - left, i + K - Q + right]; -1 is without limit; softcap 0 is off.
    """
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    bounds_q, bounds_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    assert (bounds_q[-1], bounds_k[-1]) == (len(q), len(k))
    assert max_seqlen_q == max(b - a for a, b in itertools.pairwise(bounds_q))
    assert max_seqlen_k == max(b - a for a, b in itertools.pairwise(bounds_k))
    outputs = []
    for edges_q, edges_k in zip(itertools.pairwise(bounds_q), itertools.pairwise(bounds_k), strict=True):
        of_q, of_k = slice(*edges_q), slice(*edges_k)
        keys, values = (states[of_k].repeat_interleave(q.shape[1] // k.shape[1], 1) for states in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[of_q], keys) * softmax_scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        queries, count = scores.shape[1:]
        behind = torch.arange(count) - (torch.arange(queries)[:, None] + count - queries)
        left, right = (math.inf if size < 0 else size for size in window_size)
        seen = (behind >= -left) & (behind <= (min(right, 0) if causal else right))
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -math.inf).softmax(-1), values))
    return torch.cat(outputs)


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn as its documentation describes it: these tests check what is passed to it, not its kernel."""
    module = types.ModuleType("flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)


@pytest.mark.usefixtures("flash_attn")
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_what_flash_attention_is_given_means_the_same(window: int | None, softcap: float | None) -> None:
    spans, math_of = spans_of(*LONG), HeadMath(SCALE, window, softcap)
    states = random_states(sum(span.tokens for span in spans))
    flash, plain = (PackedLayout(spans, CPU, flash=way).attend(0, *states, math_of) for way in (True, False))
    assert_same(value_and_gradients(flash, states), value_and_gradients(plain, states))


@pytest.mark.usefixtures("flash_attn")
@pytest.mark.parametrize("family", FAMILIES)
def test_an_update_with_flash_attention_has_the_same_gradients(family: str) -> None:
    micro_batches = pack(random_groups())
    plain, flash = (tiny_policy(family, torch.float64, attention=way) for way in ("sdpa", "flash_attention_2"))
    assert_gradients_close(
        gradients_of(updater_of(flash), micro_batches), gradients_of(updater_of(plain), micro_batches), 1e-10
    )


def test_flash_attention_needs_the_package_a_gpu_and_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name == "flash_attn" else None)
    assert flash_attention_available(gpu, torch.float16)
    assert flash_attention_available(gpu, torch.bfloat16)
    assert not flash_attention_available(gpu, torch.float32)
    assert not flash_attention_available(CPU, torch.bfloat16)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not flash_attention_available(gpu, torch.bfloat16)


# Without a layout.


PADDED_IDS = torch.tensor([[2, 2, 2, 11, 12, 13, 14, 15, 16], [21, 22, 23, 24, 25, 26, 27, 28, 29], [2] * 7 + [31, 32]])
REAL = torch.tensor([[0] * 3 + [1] * 6, [1] * 9, [0] * 7 + [1] * 2])


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_layout_the_model_is_the_stock_model(family: str) -> None:
    policy, stock = tiny_policy(family), tiny_model(family)
    stock.set_attn_implementation("eager")
    positions = (REAL.cumsum(1) - 1).clamp(min=0)
    calls: list[dict[str, Tensor]] = [
        {"input_ids": PADDED_IDS, "attention_mask": REAL, "position_ids": positions},
        {"input_ids": PADDED_IDS[1:2], "attention_mask": REAL[1:2]},
        {"input_ids": PADDED_IDS[1:2]},
    ]
    for call in calls:
        with torch.no_grad(), policy.reference():
            ours = policy.model(**call).logits
        with torch.no_grad():
            expected = stock(**call).logits
        real = call.get("attention_mask", torch.ones_like(call["input_ids"])).bool()
        torch.testing.assert_close(ours[real], expected[real], rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_layout_tokens_come_one_by_one_from_a_cache(family: str) -> None:
    policy = tiny_policy(family)
    with torch.no_grad():
        whole = policy.model(input_ids=PADDED_IDS[1:2]).logits
        output = policy.model(input_ids=PADDED_IDS[1:2, :6], use_cache=True)
        steps = [output.logits]
        for t in range(6, 9):
            output = policy.model(input_ids=PADDED_IDS[1:2, t : t + 1], cache=output.cache, use_cache=True)
            steps.append(output.logits)
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=0, atol=1e-4)
