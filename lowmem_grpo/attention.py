"""The attention function of every model here: packed groups for the update and the prefill, slots for the decode.

Transformers calls `attend` in place of its own kernels. With a `Layout` among the model's arguments the layout says
which token sees which; without one it is ordinary causal attention, so the model stays an ordinary model for everyone.

In a packed sequence a group lies as [prompt, answer 0, answer 1, ...], and the prompt is there once: it attends to
itself, each answer to the prompt and to itself. No mask over all tokens exists: a group is computed in tiles, each
some whole neighbouring sequences whose keys are the prompt and the tile.

    a prompt alone                    causal, no mask
    one long answer alone             causal from the bottom right, no mask (materialised only on a CPU)
    short sequences together          a mask of tile x (prompt + tile), shared by all layers
    a window shorter than the group   the same mask with the window by position

With flash-attn on a GPU all of a packed sequence is one call of variable length. Where scores are soft-capped
(Gemma 2) and flash-attn is missing, the scores of a tile are computed openly.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from lowmem_grpo.types import GroupSpan

__all__ = [
    "HeadMath",
    "Layout",
    "PackedLayout",
    "capped",
    "flash_attention_available",
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


def flash_attention_available(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether flash-attn is installed and can be used for tensors of this kind."""
    return (
        device.type == "cuda"
        and dtype in (torch.float16, torch.bfloat16)
        and importlib.util.find_spec("flash_attn") is not None
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
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, math: HeadMath, *, causal: bool = False
) -> Tensor:
    """Attention under one mask (bool, or None with `causal` from the top left), (B, heads, T, D) in and out."""
    if math.softcap is not None:
        return _open_attention(query, key, value, mask, math)
    grouped = query.shape[1] != key.shape[1]
    if grouped and query.is_cuda and mask is not None:
        # With a mask the fused kernels of a GPU do not share key heads, and the fallback would hold all scores.
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
    """Neighbouring sequences of one group: tokens [start, end) of the packed sequence, keys the prompt and these.

    `lengths` are those of the sequences; `has_prompt` says that the first of them is the prompt itself.
    """

    prompt: slice
    tokens: slice
    lengths: tuple[int, ...]
    has_prompt: bool

    @property
    def prompt_length(self) -> int:
        return self.prompt.stop - self.prompt.start

    @property
    def farthest(self) -> int:
        """The number of tokens that the last token of the longest sequence can see."""
        longest_answer = max(self.lengths[1:] if self.has_prompt else self.lengths, default=0)
        return self.prompt_length + longest_answer


class PackedLayout:
    """Attention within a packed sequence (1, N) made of `spans`, one behind the other.

    `flash` uses flash-attn's kernel. Masks are made at first use and shared by the layers; they depend on nothing
    else, so a repeated call gives the same result.
    """

    def __init__(self, spans: Sequence[GroupSpan], device: torch.device, *, flash: bool = False) -> None:
        self._spans = tuple(spans)
        self._device = device
        self._flash = flash
        self._tiles = tuple(tile for span in spans for tile in _tiles(span))
        self._masks: dict[tuple[int, int | None], Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, math: HeadMath) -> Tensor:
        """See `Layout.attend`; B is 1 and T the N tokens of the packed sequence."""
        if self._flash:
            return self._flash_varlen(query, key, value, math)
        parts = [self._attend_tile(tile, query, key, value, math) for tile in self._tiles]
        return (torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]).transpose(1, 2)

    def _attend_tile(self, tile: _Tile, query: Tensor, key: Tensor, value: Tensor, math: HeadMath) -> Tensor:
        query = query[:, :, tile.tokens]
        if tile.has_prompt:
            key, value = key[:, :, tile.tokens], value[:, :, tile.tokens]
        else:
            key, value = (
                torch.cat([states[:, :, tile.prompt], states[:, :, tile.tokens]], dim=2) for states in (key, value)
            )
        windowed = math.window is not None and math.window < tile.farthest
        if len(tile.lengths) == 1 and not windowed and math.softcap is None:
            if tile.has_prompt:
                return masked_attention(query, key, value, None, math, causal=True)
            return masked_attention(query, key, value, causal_lower_right(query.shape[2], key.shape[2]), math)
        return masked_attention(query, key, value, self._mask(tile, math.window if windowed else None), math)

    def _mask(self, tile: _Tile, window: int | None) -> Tensor:
        name = (tile.tokens.start, window)
        if name not in self._masks:
            self._masks[name] = _tile_mask(tile, window, self._device)
        return self._masks[name]

    def _flash_varlen(self, query: Tensor, key: Tensor, value: Tensor, math: HeadMath) -> Tensor:
        """One call for everything: each sequence is queries of its own over keys of its prompt and itself.

        flash-attn aligns causality and window at the bottom right, which is just what a prompt in front needs.
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
        for span in self._spans:
            prompt = range(span.start, span.start + span.prompt_length)
            start = prompt.stop
            keys.append(prompt)
            sizes_q.append(span.prompt_length)
            sizes_k.append(span.prompt_length)
            for length in span.answer_lengths:
                keys += [prompt, range(start, start + length)]
                sizes_q.append(length)
                sizes_k.append(span.prompt_length + length)
                start += length
        index_K = torch.tensor([token for part in keys for token in part], device=self._device)
        return index_K, self._boundaries(sizes_q), self._boundaries(sizes_k), max(sizes_q), max(sizes_k)

    def _boundaries(self, sizes: Sequence[int]) -> Tensor:
        return F.pad(torch.tensor(sizes).cumsum(0), (1, 0)).to(self._device, torch.int32)


def _tiles(span: GroupSpan) -> Iterator[_Tile]:
    """Cut a group into tiles: whole sequences, together as long as they stay under TILE_TOKENS."""
    prompt = slice(span.start, span.start + span.prompt_length)
    start, lengths, has_prompt = span.start, [span.prompt_length], True
    for length in span.answer_lengths:
        if sum(lengths) + length > TILE_TOKENS:
            yield _Tile(prompt, slice(start, start + sum(lengths)), tuple(lengths), has_prompt)
            start, lengths, has_prompt = start + sum(lengths), [], False
        lengths.append(length)
    yield _Tile(prompt, slice(start, start + sum(lengths)), tuple(lengths), has_prompt)


def _tile_mask(tile: _Tile, window: int | None, device: torch.device) -> Tensor:
    """Who sees whom, bool (tile, keys): the prompt and the own sequence, not later tokens, not beyond the window."""
    prompt_length = tile.prompt_length
    sequence_q = torch.repeat_interleave(torch.arange(len(tile.lengths)), torch.tensor(tile.lengths)) + 1
    starts = [0 if tile.has_prompt and i == 0 else prompt_length for i in range(len(tile.lengths))]
    position_q = torch.cat([torch.arange(n) + start for start, n in zip(starts, tile.lengths, strict=True)])
    if tile.has_prompt:
        sequence_q -= 1  # the prompt is sequence 0
        sequence_k, position_k = sequence_q, position_q
    else:
        sequence_k = torch.cat([torch.zeros(prompt_length, dtype=torch.long), sequence_q])
        position_k = torch.cat([torch.arange(prompt_length), position_q])
    distance = position_q[:, None] - position_k
    mask = ((sequence_k == 0) | (sequence_q[:, None] == sequence_k)) & (distance >= 0)
    if window is not None:
        mask &= distance < window
    return mask.to(device)
