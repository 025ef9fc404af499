"""The attention function of every model here: packed groups for the update and the prefill, slots for the decode.

Transformers calls `attend` in place of its own kernels. With a `Layout` among the model's arguments the layout says
which token sees which; without one it is ordinary causal attention, so the model stays an ordinary model for everyone.

In a packed sequence a group lies as [prompt, sequence 0, sequence 1, ...] (see `GroupSpan`), and the prompt is there
once: it attends to itself, a sequence to its prefix (the prompt, and what it goes on from of sequences before it) and
to itself. No mask over all tokens exists: a group is computed in tiles, each some whole neighbouring sequences whose
keys are the prefix of the first and the tile; what a later one of them goes on from is part of those.

    a prompt alone                    causal, no mask
    one long sequence alone           causal from the bottom right, no mask (on a CPU there is one)
    short sequences together          a mask of tile x (prefix + tile), shared by all layers
    a window shorter than the group   the same mask with the window by position

A long sequence alone copies the keys of its prefix, of the prompt as of what it shares, so sharing even one token costs
it nothing more.

With flash-attn on a GPU all of a packed sequence is one call of variable length. Where scores are soft-capped
(Gemma 2) and flash-attn is missing, the scores of a tile are computed openly.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import CausalBias, causal_lower_right
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from lowmem_grpo.types import Card, GroupSpan

__all__ = [
    "HeadMath",
    "Kernels",
    "Layout",
    "PackedLayout",
    "capped",
    "kernels_of",
    "masked_attention",
    "softmax",
    "use_layouts",
]

NAME = "lowmem_grpo"
TILE_TOKENS = 256
"""Neighbouring sequences share a tile up to this many tokens: fewer calls, and masks that stay small."""


@dataclass(frozen=True, slots=True)
class HeadMath:
    """What a layer asks of its scores: `scale` times q k, then `softcap * tanh(. / softcap)`; `window` counts the
    tokens a query sees, itself included. None means without.

    >>> HeadMath(0.125).window is None
    True
    """

    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class Kernels:
    """What the attention kernels of a device can do; what they cannot, would make them hold all scores.

    `varlen` says that flash-attn runs a packed sequence in one call. `shared_heads` says that torch's own kernels let
    several query heads share a key head, `masked_shared_heads` that they do so under a mask too, `lower_right` that
    they are causal from the bottom right without a mask.

    >>> Kernels().masked_shared_heads
    True
    """

    varlen: bool = False
    shared_heads: bool = True
    masked_shared_heads: bool = True
    lower_right: bool = False


class Layout(Protocol):
    """Who sees whom in one forward of the model, and where keys and values go."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, math: HeadMath) -> Tensor:
        """Attention of one layer: query (B, heads, T, D), key and value (B, KV heads, T, D) -> (B, T, heads, D)."""
        ...


def use_layouts(model: PreTrainedModel) -> None:
    """Let `model` take `layout=` among its arguments; a call without it works as before."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)  # for calls without a layout, padded ones too
    model.set_attn_implementation(NAME)


def kernels_of(card: Card, dtype: torch.dtype, attention: str = "auto") -> Kernels:
    """The kernels for activations of `dtype` on `card`; `attention` as in the config.

    torch's flash kernel shares key heads, needs 16 bits and capability 8, and takes no mask; its other fused kernel
    takes masks and shares nothing. A CPU shares in any case.
    """
    if card.device == "cpu":
        return Kernels(varlen=attention == "flash_attention_2")
    half = dtype in (torch.float16, torch.bfloat16)
    installed = attention == "auto" and half and importlib.util.find_spec("flash_attn") is not None
    return Kernels(
        varlen=attention == "flash_attention_2" or installed,
        shared_heads=half and card.capability >= (8, 0),
        masked_shared_heads=False,
        lower_right=True,
    )


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    layout: Layout | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every attention layer; pure, since checkpointing runs it twice.

    Shapes as in `Layout.attend`. Without a layout `attention_mask` is the bool mask of `sdpa_mask`, window included,
    or None for plain causal attention.
    """
    math = HeadMath(scaling if scaling is not None else query.shape[-1] ** -0.5, sliding_window, softcap)
    if layout is not None:
        return layout.attend(int(module.layer_idx), query, key, value, math), None  # type: ignore[arg-type]
    if softcap is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling)
    mask = _lower_triangle(query.shape[2], key.shape[2], query.device) if attention_mask is None else attention_mask
    return masked_attention(query, key, value, mask, math).transpose(1, 2), None


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    math: HeadMath,
    *,
    causal: bool = False,
    kernels: Kernels | None = None,
) -> Tensor:
    """Attention under one mask (bool, or None with `causal` from the top left), (B, heads, T, D) in and out."""
    if math.softcap is not None:
        return _open_attention(query, key, value, mask, math)
    kernels = kernels or Kernels()
    grouped = query.shape[1] != key.shape[1]
    plain = mask is None or isinstance(mask, CausalBias)
    if grouped and not (kernels.shared_heads if plain else kernels.masked_shared_heads):
        key, value, grouped = _repeat_heads(key, query), _repeat_heads(value, query), False
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=math.scale, enable_gqa=grouped
    )


def _open_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, math: HeadMath) -> Tensor:
    scores = query @ _repeat_heads(key, query).transpose(2, 3) * math.scale
    scores = capped(scores, math.softcap)
    if mask is not None:
        # Not -inf: a padding token that sees nothing would become NaN, and through its value everyone else's.
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return softmax(scores, value.dtype) @ _repeat_heads(value, query)


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    """`softcap * tanh(scores / softcap)`, or the scores themselves."""
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def softmax(scores: Tensor, dtype: torch.dtype) -> Tensor:
    """Softmax over the last axis, computed in at least fp32."""
    return torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(dtype)


def _repeat_heads(key: Tensor, query: Tensor) -> Tensor:
    return key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)


def _lower_triangle(queries: int, keys: int, device: torch.device) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Neighbouring sequences of one group, the prompt being one too; keys are `prefix` and `tokens`.

    `prefix` is what the first sequence sees wholly, empty for the prompt. `begins` are the positions at which the
    sequences begin in their conversation, `lengths` their tokens. Sequence i goes on from what lies before `begins[i]`
    on the path of the one before it, so sequences of the tile see the prefix up to the lowest of the begins so far.
    """

    prefix: tuple[range, ...]
    tokens: range
    begins: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def farthest(self) -> int:
        """The number of tokens that the last token of the longest conversation can see."""
        return max(begin + length for begin, length in zip(self.begins, self.lengths, strict=True))


class PackedLayout:
    """Attention within a packed sequence (1, N) made of `spans`, one behind the other.

    `kernels` are those of the device. Masks are made at first use and shared by the layers; they depend on nothing
    else, so a repeated call gives the same result.
    """

    def __init__(self, spans: Sequence[GroupSpan], device: torch.device, kernels: Kernels | None = None) -> None:
        self._spans = tuple(spans)
        self._device = device
        self._kernels = kernels or Kernels()
        self._tiles = tuple(tile for span in spans for tile in _tiles(span))
        self._masks: dict[tuple[int, int | None], Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, math: HeadMath) -> Tensor:
        """See `Layout.attend`; B is 1 and T the N tokens of the packed sequence."""
        if self._kernels.varlen:
            return self._flash_varlen(query, key, value, math)
        sizes, pieces_of_tiles = self._pieces
        # Split once, not sliced tile by tile: the backward of every slice is as large as the whole.
        queries = query.split([len(tile.tokens) for tile in self._tiles], dim=2)
        keys, values = key.split(sizes, dim=2), value.split(sizes, dim=2)
        parts = [
            self._attend_tile(tile, own_query, _joined(keys, pieces), _joined(values, pieces), math)
            for tile, own_query, pieces in zip(self._tiles, queries, pieces_of_tiles, strict=True)
        ]
        return _joined(parts, range(len(parts))).transpose(1, 2)

    def _attend_tile(self, tile: _Tile, query: Tensor, key: Tensor, value: Tensor, math: HeadMath) -> Tensor:
        windowed = math.window is not None and math.window < tile.farthest
        kernels = self._kernels
        if len(tile.lengths) == 1 and not windowed and math.softcap is None:
            if not tile.prefix:
                return masked_attention(query, key, value, None, math, causal=True, kernels=kernels)
            if kernels.lower_right:
                mask: Tensor = causal_lower_right(query.shape[2], key.shape[2])
                return masked_attention(query, key, value, mask, math, kernels=kernels)
        mask = self._mask(tile, math.window if windowed else None)
        return masked_attention(query, key, value, mask, math, kernels=kernels)

    @functools.cached_property
    def _pieces(self) -> tuple[list[int], list[list[int]]]:
        """The sizes of the pieces into which the tiles cut keys and values, and the pieces of each tile in order."""
        needed = [(*tile.prefix, tile.tokens) for tile in self._tiles]
        edges = sorted({edge for parts in needed for part in parts for edge in (part.start, part.stop)})
        number = {edge: i for i, edge in enumerate(edges)}
        sizes = [stop - start for start, stop in itertools.pairwise(edges)]
        return sizes, [[i for part in parts for i in range(number[part.start], number[part.stop])] for parts in needed]

    def _mask(self, tile: _Tile, window: int | None) -> Tensor:
        name = (tile.tokens.start, window)
        if name not in self._masks:
            self._masks[name] = _tile_mask(tile, window, self._device)
        return self._masks[name]

    def _flash_varlen(self, query: Tensor, key: Tensor, value: Tensor, math: HeadMath) -> Tensor:
        """One call for everything: each sequence is queries of its own over keys of its prefix and itself.

        flash-attn aligns causality and window at the bottom right, which is just what a prefix in front needs.
        """
        from flash_attn import flash_attn_varlen_func

        index_K, starts_q, starts_k, longest_q, longest_k = self._varlen
        output = flash_attn_varlen_func(
            query[0].transpose(0, 1),
            key[0].transpose(0, 1)[index_K],
            value[0].transpose(0, 1)[index_K],
            starts_q,
            starts_k,
            longest_q,
            longest_k,
            softmax_scale=math.scale,
            causal=True,
            window_size=(-1, -1) if math.window is None else (math.window - 1, 0),
            softcap=math.softcap or 0.0,
        )
        return output[None]

    @functools.cached_property
    def _varlen(self) -> tuple[Tensor, Tensor, Tensor, int, int]:
        """Which tokens the keys are, (K,), the boundaries of the sequences in queries and keys, and their longest."""
        keys: list[range] = []
        sizes_q: list[int] = []
        sizes_k: list[int] = []
        for prefix, own in (sequence for span in self._spans for sequence in _sequences(span)):
            keys += [*prefix, own]
            sizes_q.append(len(own))
            sizes_k.append(sum(map(len, prefix)) + len(own))
        index_K = torch.tensor([token for part in keys for token in part], device=self._device)
        return index_K, self._boundaries(sizes_q), self._boundaries(sizes_k), max(sizes_q), max(sizes_k)

    def _boundaries(self, sizes: Sequence[int]) -> Tensor:
        return F.pad(torch.tensor(sizes).cumsum(0), (1, 0)).to(self._device, torch.int32)


def _joined(pieces: Sequence[Tensor], chosen: Sequence[int]) -> Tensor:
    """The chosen pieces behind one another; a single one is not copied."""
    return torch.cat([pieces[i] for i in chosen], dim=2) if len(chosen) > 1 else pieces[chosen[0]]


def _sequences(span: GroupSpan) -> Iterator[tuple[tuple[range, ...], range]]:
    """(prefix, own tokens) of the prompt, which has no prefix, and of each sequence behind it."""
    end = span.start + span.prompt_length
    yield (), range(span.start, end)
    for prefix, own in zip(span.prefixes(), span.answer_lengths, strict=True):
        yield prefix, range(end, end + own)
        end += own


def _tiles(span: GroupSpan) -> Iterator[_Tile]:
    """Cut a group into tiles: whole sequences, together as long as they stay under TILE_TOKENS."""
    members: list[tuple[tuple[range, ...], range]] = []
    for sequence in _sequences(span):
        if members and sequence[1].stop - members[0][1].start > TILE_TOKENS:
            yield _tile(members)
            members = []
        members.append(sequence)
    yield _tile(members)


def _tile(members: Sequence[tuple[tuple[range, ...], range]]) -> _Tile:
    return _Tile(
        prefix=members[0][0],
        tokens=range(members[0][1].start, members[-1][1].stop),
        begins=tuple(sum(map(len, prefix)) for prefix, _ in members),
        lengths=tuple(len(own) for _, own in members),
    )


def _tile_mask(tile: _Tile, window: int | None, device: torch.device) -> Tensor:
    """Who sees whom, bool (tile, keys): the own path, not later tokens, not beyond the window by position."""
    lengths, begins = torch.tensor(tile.lengths), torch.tensor(tile.begins)
    # The prefix is number 0, the sequences are numbered from 1.
    number_q = torch.repeat_interleave(torch.arange(len(lengths)), lengths) + 1
    position_q = torch.cat([torch.arange(begin, begin + n) for begin, n in zip(tile.begins, tile.lengths, strict=True)])
    number_k = torch.cat([torch.zeros(tile.begins[0], dtype=torch.long), number_q])
    position_k = torch.cat([torch.arange(tile.begins[0]), position_q])
    # How far along number j sequence i still goes: the lowest of the begins of j + 1 to i, all of it for i = j.
    later = torch.arange(1, len(lengths) + 1)[:, None] > torch.arange(len(lengths) + 1)
    reach = torch.where(later, begins[:, None], tile.farthest).cummin(dim=0).values
    distance = position_q[:, None] - position_k
    mask = (number_k <= number_q[:, None]) & (distance >= 0) & (position_k < reach[number_q - 1][:, number_k])
    if window is not None:
        mask &= distance < window
    return mask.to(device)
