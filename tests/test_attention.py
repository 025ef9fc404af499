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
from lowmem_grpo.attention import HeadMath, Kernels, PackedLayout, kernels_of
from lowmem_grpo.types import Card, GroupSpan
from tests.helpers import assert_gradients_close, gradients_of, pack, random_groups, tiny_policy, updater_of
from tests.tiny import FAMILIES, tiny_model

CPU = torch.device("cpu")
HEADS, KV_HEADS, WIDTH = 4, 2, 3
SCALE = 0.6


Sequences = tuple[int | tuple[int, int], ...]
"""Sequences behind a prompt: tokens of their own, or (shared with the path before, own)."""


def spans_of(*groups: tuple[int, Sequences]) -> list[GroupSpan]:
    """Spans behind one another, each given as the length of its prompt and its sequences."""
    spans: list[GroupSpan] = []
    for prompt, sequences in groups:
        pairs = [(0, sequence) if isinstance(sequence, int) else sequence for sequence in sequences]
        shared, own = tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs)
        spans.append(GroupSpan(sum(span.tokens for span in spans), prompt, own, shared if any(shared) else ()))
    return spans


def tiles_of(span: GroupSpan) -> list[tuple[tuple[int, int], tuple[int, ...], bool]]:
    """(first token and end, lengths, whether the prompt is among them) of each tile."""
    tiles = list(attention._tiles(span))
    return [((tile.tokens.start, tile.tokens.stop), tile.lengths, not tile.prefix) for tile in tiles]


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


# Shared beginnings. A prompt of 2 (tokens 0 1), then [2 3 4], [2 3 | 5], [2 | 6 7], [2 6 7 | 8], [| 9].
FORKS = spans_of((2, (3, (2, 1), (1, 2), (3, 1), 1)))[0]


def test_positions_and_prefixes_of_forks_by_hand() -> None:
    assert FORKS.tokens == 10
    assert FORKS.position_ids() == [0, 1, 2, 3, 4, 4, 3, 4, 5, 2]
    assert [[i for part in prefix for i in part] for prefix in FORKS.prefixes()] == [
        [0, 1],
        [0, 1, 2, 3],
        [0, 1, 2],
        [0, 1, 2, 6, 7],
        [0, 1],
    ]


def test_nothing_shared_is_the_same_as_no_shared_lengths() -> None:
    plain, zeros = GroupSpan(4, 3, (2, 1)), GroupSpan(4, 3, (2, 1), (0, 0))
    assert plain.position_ids() == zeros.position_ids() == [0, 1, 2, 3, 4, 3]
    assert plain.prefixes() == zeros.prefixes() == [(range(4, 7),), (range(4, 7),)]


@pytest.mark.parametrize("span", [GroupSpan(0, 3, (2, 1), (0, 3)), GroupSpan(0, 3, (2,), (1,))])
def test_more_is_shared_than_there_is(span: GroupSpan) -> None:
    with pytest.raises(ValueError, match="1 tokens more than the path before it has"):
        span.prefixes()


def test_shared_lengths_have_one_number_for_each_sequence() -> None:
    with pytest.raises(ValueError, match="zip"):
        GroupSpan(0, 3, (2, 1), (0,)).position_ids()


def test_the_mask_of_forks_in_one_tile_by_hand() -> None:
    assert mask_of(FORKS, 0) == [
        "x.........",
        "xx........",
        "xxx.......",
        "xxxx......",
        "xxxxx.....",
        "xxxx.x....",  # position 4 behind 2 3
        "xxx...x...",  # positions 3 and 4 behind 2
        "xxx...xx..",
        "xxx...xxx.",  # behind all of that path
        "xx.......x",
    ]


def test_a_window_on_forks_counts_along_the_path() -> None:
    assert mask_of(FORKS, 0, window=3)[5:] == [
        "..xx.x....",
        ".xx...x...",
        "..x...xx..",
        "......xxx.",
        "xx.......x",
    ]


def test_the_masks_of_forks_over_a_tile_border_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "TILE_TOKENS", 5)
    assert tiles_of(FORKS) == [((0, 5), (2, 3), True), ((5, 10), (1, 2, 1, 1), False)]
    # Keys of the second tile: 0 1 and 2 3, then 5 to 9. Its second sequence sees one token less of the prefix.
    assert mask_of(FORKS, 1) == [
        "xxxxx....",
        "xxx..x...",
        "xxx..xx..",
        "xxx..xxx.",
        "xx......x",
    ]
    assert mask_of(FORKS, 1, window=2) == [
        "...xx....",
        "..x..x...",
        ".....xx..",
        "......xx.",
        ".x......x",
    ]


def test_a_prefix_that_comes_back_after_a_shorter_one_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt 0, then [1 2 3], a tile border, [1 | 4], [1 4 | 5]: the last sees 4 at position 2, not 2."""
    monkeypatch.setattr(attention, "TILE_TOKENS", 4)
    [span] = spans_of((1, (3, (1, 1), (2, 1))))
    assert tiles_of(span) == [((0, 4), (1, 3), True), ((4, 6), (1, 1), False)]
    assert mask_of(span, 1) == ["xxx.", "xxxx"]
    [other] = spans_of((1, (3, (2, 1), (1, 2), (3, 1))))
    assert mask_of(other, 1) == ["xxxx...", "xx..x..", "xx..xx.", "xx..xxx"]


def test_a_long_sequence_alone_needs_no_mask_whatever_it_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "TILE_TOKENS", 1)
    monkeypatch.setattr(attention, "_tile_mask", None)  # making one would fail
    span = FORKS
    states = random_states(span.tokens)
    output = PackedLayout([span], CPU, Kernels(lower_right=True)).attend(0, *states, HeadMath(SCALE))
    assert_same([output.detach()], [naive_packed([span], states, HeadMath(SCALE)).detach()])


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
    """(1, N, heads, D): the prompt alone, and each sequence behind a prompt and a path of its own."""
    parts = []
    for span in spans:
        prompt = list(range(span.start, span.start + span.prompt_length))
        parts.append(naive_attention(*(s[0][:, prompt] for s in states), math_of, len(prompt)))
        end, path = prompt[-1] + 1, []
        for shared, own in zip(span.shared_lengths or [0] * len(span.answer_lengths), span.answer_lengths, strict=True):
            path = [*path[:shared], *range(end, end + own)]
            alone = [*prompt, *path]
            parts.append(naive_attention(*(s[0][:, alone] for s in states), math_of, own))
            end += own
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


@st.composite
def drawn_sequences(draw: st.DrawFn) -> Sequences:
    """Up to four sequences, each sharing anything from nothing to all of the path before it."""
    sequences: list[tuple[int, int]] = []
    path = 0
    for own in draw(st.lists(st.integers(1, 6), max_size=4)):
        sequences.append((draw(st.integers(0, path)), own))
        path = sum(sequences[-1])
    return tuple(sequences)


SPANS = st.lists(st.tuples(st.integers(1, 6), drawn_sequences()), min_size=1, max_size=3)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 3, 100])
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(groups=SPANS, tile_tokens=st.sampled_from([1, 4, 9, 300]), kv_heads=st.sampled_from([1, 2, 4]))
def test_packed_groups_equal_every_sequence_alone(
    monkeypatch: pytest.MonkeyPatch,
    softcap: float | None,
    window: int | None,
    groups: list[tuple[int, Sequences]],
    tile_tokens: int,
    kv_heads: int,
) -> None:
    monkeypatch.setattr(attention, "TILE_TOKENS", tile_tokens)
    spans, math_of = spans_of(*groups), HeadMath(SCALE, window, softcap)
    states = random_states(sum(span.tokens for span in spans), kv_heads=kv_heads)
    output = PackedLayout(spans, CPU).attend(0, *states, math_of)
    expected = value_and_gradients(naive_packed(spans, states, math_of), states)
    assert_same(value_and_gradients(output, states), expected)


LONG: list[tuple[int, Sequences]] = [
    (2, (5, 1)),
    (7, (3, 12, 4, 2)),
    (1, (1,)),
    (4, ()),
    (3, (8, (5, 2), (7, 9), (1, 3), 2)),
]


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
def test_no_mask_is_larger_than_a_tile_and_its_prefix(
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
        assert shape in ((), (size, tile.begins[0] + size))
        if not tile.prefix and len(tile.lengths) == 1 and window is None:
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
    flash, plain = (PackedLayout(spans, CPU, Kernels(varlen=way)).attend(0, *states, math_of) for way in (True, False))
    assert_same(value_and_gradients(flash, states), value_and_gradients(plain, states))


def test_the_keys_of_flash_attention_by_hand() -> None:
    index_K, starts_q, starts_k, longest_q, longest_k = PackedLayout([FORKS], CPU, Kernels(varlen=True))._varlen
    keys = [[0, 1], [0, 1, 2, 3, 4], [0, 1, 2, 3, 5], [0, 1, 2, 6, 7], [0, 1, 2, 6, 7, 8], [0, 1, 9]]
    assert index_K.tolist() == [i for of_sequence in keys for i in of_sequence]
    assert starts_q.tolist() == [0, 2, 5, 6, 8, 9, 10]
    assert starts_k.tolist() == [0, 2, 7, 12, 17, 23, 26]
    assert (longest_q, longest_k) == (3, 6)


@pytest.mark.usefixtures("flash_attn")
@pytest.mark.parametrize("family", FAMILIES)
def test_an_update_with_flash_attention_has_the_same_gradients(family: str) -> None:
    micro_batches = pack(random_groups())
    plain, flash = (tiny_policy(family, torch.float64, attention=way) for way in ("sdpa", "flash_attention_2"))
    assert_gradients_close(
        gradients_of(updater_of(flash), micro_batches), gradients_of(updater_of(plain), micro_batches), 1e-10
    )


def test_flash_attention_needs_the_package_a_gpu_and_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, cpu = Card("RTX 3060", "cuda", (8, 6), 12 << 30), Card("cpu", "cpu", (0, 0), 12 << 30)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name == "flash_attn" else None)
    assert kernels_of(gpu, torch.float16).varlen
    assert kernels_of(gpu, torch.bfloat16).varlen
    assert not kernels_of(gpu, torch.bfloat16, "sdpa").varlen
    assert not kernels_of(gpu, torch.float32).varlen
    assert not kernels_of(cpu, torch.bfloat16).varlen
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not kernels_of(gpu, torch.bfloat16).varlen


@pytest.mark.parametrize(
    ("device", "capability", "dtype", "shared", "masked"),
    [
        ("cuda", (8, 6), torch.bfloat16, True, False),
        ("cuda", (7, 5), torch.float16, False, False),
        ("cuda", (8, 6), torch.float32, False, False),
        ("cpu", (0, 0), torch.float32, True, True),
    ],
)
def test_which_kernels_share_key_heads(
    device: str, capability: tuple[int, int], dtype: torch.dtype, shared: bool, masked: bool
) -> None:
    kernels = kernels_of(Card("card", device, capability, 12 << 30), dtype, "sdpa")
    assert (kernels.shared_heads, kernels.masked_shared_heads) == (shared, masked)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_key_heads_repeated_for_a_kernel_give_the_same(shared: bool, masked: bool) -> None:
    spans, math_of = spans_of(*LONG), HeadMath(SCALE)
    states = random_states(sum(span.tokens for span in spans))
    kernels = Kernels(shared_heads=shared, masked_shared_heads=masked)
    repeated, plain = (PackedLayout(spans, CPU, k).attend(0, *states, math_of) for k in (kernels, Kernels()))
    assert_same(value_and_gradients(repeated, states), value_and_gradients(plain, states))


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
