"""Keys and values of the sampler: each prompt once, and a slot per answer being written, allocated once.

Saves: a group's prompt is stored once for all its answers, not once per answer (with a prompt of 1000 tokens and
G = 8 on a 7B: 57 MB instead of 459), and nothing is concatenated per token. Costs: the scores of the prompt part are
computed in the order of the groups and brought back into the order of the rows.

Bytes: 2 x layers x KV heads x head width x bytes per value x (prompt slots x longest prompt + slots x most new tokens).

With `int8` the keys and values of a token lie as one byte each, with one scale in the compute dtype per token, KV head
and kind (the largest of the head over 127).

Saves: in 16 bits 49 % of that at a head width of 128, 48 % at 64, less the buffer below.
Costs: what is stored is decoded again for every new token, and the sampler is not quite the policy any more: a value is
wrong by up to 1/254 of the largest of its head, so the update needs `losses.sampler_correction`.
Bytes: 2 x layers x KV heads x (head width + bytes per scale) x the tokens as above, and a buffer of KV heads x head
width x bytes per value x max(prompt slots x longest prompt, slots x most new tokens), into which first the keys, then
the values of one layer's prompts or answers are decoded, as far as they are used. With long answers it is 1/(2 layers)
of the plain cache. It is made once: buffers that grow with the answers would leave gaps in the allocator.

A query sees its group's prompt and its own answer. The scores of both parts are computed apart, put side by side for
one softmax, and the two weighted sums are added: exact attention over the whole row. Sharing the prompt's part of a
decode step among the rows of a group is known as bifurcated attention (arXiv 2403.08845) or Hydragen (2402.05099).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.attention import HeadMath, PackedLayout, capped, softmax

__all__ = ["DecodeLayout", "KVSlots", "PrefillLayout", "SlotShape", "Target"]


@dataclass(frozen=True, slots=True)
class SlotShape:
    """The sizes that `KVSlots` is made of.

    >>> shape = SlotShape(2, 4, 8, prompt_slots=1, prompt_tokens=100, slots=8, answer_tokens=50)
    >>> shape.bytes(torch.float16), shape.bytes(torch.float16, int8=True)
    (128000, 105600)
    """

    layers: int
    kv_heads: int
    head_width: int
    prompt_slots: int
    prompt_tokens: int
    slots: int
    answer_tokens: int

    @property
    def decoded_values(self) -> int:
        """Values of the keys of one layer's prompts or answers, whichever has more."""
        tokens = max(self.prompt_slots * self.prompt_tokens, self.slots * self.answer_tokens)
        return self.kv_heads * tokens * self.head_width

    def bytes(self, dtype: torch.dtype, int8: bool = False) -> int:
        """Bytes of all keys and values in `dtype`, or of int8 ones with their scales and the buffer in `dtype`."""
        tokens = self.prompt_slots * self.prompt_tokens + self.slots * self.answer_tokens
        heads = 2 * self.layers * self.kv_heads * tokens
        if int8:
            return heads * (self.head_width + dtype.itemsize) + self.decoded_values * dtype.itemsize
        return heads * self.head_width * dtype.itemsize


class _Store:
    """Keys and values of one kind of slot: (layers, 2, slots, KV heads, tokens, D).

    An index names places of the axes before D. With int8 values `scales` has those axes, and `decoded` is the buffer
    that `read` fills.
    """

    def __init__(self, values: Tensor, scales: Tensor | None, decoded: Tensor | None) -> None:
        self.values, self.scales, self.decoded = values, scales, decoded

    def write(self, index: tuple[Any, ...], states: Tensor) -> None:
        """Put the states of these places, in the compute dtype."""
        if self.scales is None:
            self.values[index] = states
        else:
            self.values[index], self.scales[index] = _encoded(states)

    def read(self, index: tuple[Any, ...]) -> Tensor:
        """The states of these places of one layer and kind, in the compute dtype.

        With int8 they lie in the buffer: they hold until the next read of any store.
        """
        values = self.values[index]
        if self.scales is None or self.decoded is None:
            return values
        # One product of int8 and 16 bits in one kernel, without a copy in between.
        return torch.mul(values, self.scales[index][..., None], out=self.decoded[: values.numel()].view(values.shape))

    def move(self, source: tuple[Any, ...], target: tuple[Any, ...]) -> None:
        """Copy what lies at one place to another, as it is."""
        for stored in (self.values, self.scales):
            if stored is not None:
                stored[target] = stored[source]


class KVSlots:
    """Prompt slots (one per group in work) and answer slots (one per row in work), for all layers.

    Slots in use are always the first ones: `move_prompt` and `move_answer` close the gap that a finished one leaves.
    What lies beyond a slot's length does not count, so lengths live with the caller and may start anywhere.

    `dtype` is what goes in and comes out; with `int8` it is stored as the module says. `on_gpu` says whether `device`
    stands for a GPU, which fake tensors do not tell; None: it does if it is one.
    """

    def __init__(
        self,
        shape: SlotShape,
        dtype: torch.dtype,
        device: torch.device,
        *,
        int8: bool = False,
        on_gpu: bool | None = None,
    ) -> None:
        self.shape = shape
        self.on_gpu = device.type == "cuda" if on_gpu is None else on_gpu
        decoded = torch.empty(shape.decoded_values, dtype=dtype, device=device) if int8 else None

        def store(slots: int, tokens: int) -> _Store:
            # Key and value side by side: one slot moves in one copy. Zeros, because an unseen token's weight of 0 times
            # whatever lay in fresh memory may be NaN.
            axes = (shape.layers, 2, slots, shape.kv_heads, tokens)
            values = torch.zeros(*axes, shape.head_width, dtype=torch.int8 if int8 else dtype, device=device)
            return _Store(values, torch.zeros(axes, dtype=dtype, device=device) if int8 else None, decoded)

        self.prompt_store = store(shape.prompt_slots, shape.prompt_tokens)
        self.answer_store = store(shape.slots, shape.answer_tokens)

    @property
    def prompts(self) -> Tensor:
        """Keys and values of the prompts as they are stored: (layers, 2, prompt slots, KV heads, tokens, D)."""
        return self.prompt_store.values

    @property
    def answers(self) -> Tensor:
        """Keys and values of the answers as they are stored: (layers, 2, slots, KV heads, tokens, D)."""
        return self.answer_store.values

    def move_prompt(self, source: int, target: int) -> None:
        """Copy one prompt slot onto another."""
        everywhere = slice(None)
        self.prompt_store.move((everywhere, everywhere, source), (everywhere, everywhere, target))

    def move_answer(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of one answer slot onto another."""
        everywhere, tokens = slice(None), slice(length)
        self.answer_store.move(
            (everywhere, everywhere, source, everywhere, tokens), (everywhere, everywhere, target, everywhere, tokens)
        )


def _encoded(states: Tensor) -> tuple[Tensor, Tensor]:
    """int8 values (..., D) and their scales (...): at most half a scale wrong.

    >>> values, scales = _encoded(torch.tensor([[127.0, -3.4, 0.0]]))
    >>> values.tolist(), scales.tolist()
    ([[127, -3, 0]], [1.0])
    """
    # Never below the smallest normal number: a head of zeros has a scale too, and float16 loses digits below.
    scales = (states.abs().amax(-1).div_(127)).clamp_(min=torch.finfo(states.dtype).tiny)
    # In fp32: a quotient up to 127 has no room for a fraction in bfloat16. The rounding of a scale cannot make it 128.
    steps = states.to(torch.promote_types(states.dtype, torch.float32)) / scales[..., None]
    return steps.round_().to(torch.int8), scales


@dataclass(frozen=True, slots=True)
class Target:
    """Where the keys and values of `length` tokens from `start` of a packed sequence go."""

    start: int
    length: int
    slot: int
    is_prompt: bool


class PrefillLayout:
    """A packed sequence whose keys and values are written to slots on the way."""

    def __init__(self, packed: PackedLayout, kv: KVSlots, targets: Sequence[Target]) -> None:
        self._packed, self._kv, self._targets = packed, kv, targets

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, math: HeadMath) -> Tensor:
        """See `Layout.attend`."""
        for target in self._targets:
            tokens = slice(target.start, target.start + target.length)
            store = self._kv.prompt_store if target.is_prompt else self._kv.answer_store
            for kind, states in enumerate((key, value)):
                store.write((layer, kind, target.slot, slice(None), slice(target.length)), states[0, :, tokens])
        return self._packed.attend(layer, query, key, value, math)


class DecodeLayout:
    """One new token for each of the first rows of `kv`.

    `prompt_of_row` names the prompt slot of each row, `prompt_lengths` the tokens in each prompt slot in use,
    `answer_lengths` the tokens that each answer slot holds before this step; the new one is written behind them.
    `position_ids` (rows,) are the positions of the new tokens.
    """

    def __init__(
        self, kv: KVSlots, prompt_of_row: Sequence[int], prompt_lengths: Sequence[int], answer_lengths: Sequence[int]
    ) -> None:
        self._kv = kv
        device = kv.answers.device
        self._rows = len(prompt_of_row)
        self._prompts = len(prompt_lengths)
        self._longest_prompt = max(prompt_lengths)
        self._longest_answer = max(answer_lengths) + 1
        of_prompt = _positions_in_groups(prompt_of_row, self._prompts)
        self._group_size = max(position for _, position in of_prompt) + 1
        flat = [prompt * self._group_size + position for prompt, position in of_prompt]
        back = [0] * (self._prompts * self._group_size)  # an empty place computes row 0 again, and nobody reads it
        for row, place in enumerate(flat):
            back[place] = row
        indices = torch.tensor([*flat, *back, *prompt_of_row, *prompt_lengths, *answer_lengths]).to(device)
        self._place_of_row, self._row_of_place, prompt_of_row_R, prompt_lengths_P, self._answer_lengths = indices.split(
            [self._rows, len(back), self._rows, self._prompts, self._rows]
        )
        self._all_rows = torch.arange(self._rows, device=device)
        self.position_ids = prompt_lengths_P[prompt_of_row_R] + self._answer_lengths
        self._masks: dict[int | None, Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, math: HeadMath) -> Tensor:
        """See `Layout.attend`; B is the rows and T is 1."""
        rows, heads, _, width = query.shape
        kv_heads = key.shape[1]
        self._append(layer, key, value)
        query = query.view(rows, kv_heads, heads // kv_heads, width)
        # Every read is used before the next one: int8 slots decode all of them into one buffer.
        scores = torch.cat(
            [
                self._prompt_scores(query, self._read_prompts(layer, 0)),
                self._scores(query, self._read_answers(layer, 0)),
            ],
            dim=-1,
        )
        scores = capped(scores * math.scale, math.softcap) + self._mask(math.window, scores.dtype)
        weights_prompt, weights_own = softmax(scores, value.dtype).split(
            [self._longest_prompt, self._longest_answer], dim=-1
        )
        output = weights_own @ self._read_answers(layer, 1) + self._prompt_values(
            weights_prompt, self._read_prompts(layer, 1)
        )
        return output.view(rows, 1, heads, width)

    def _append(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write the new token of each row."""
        for kind, states in enumerate((key, value)):
            index = (layer, kind, self._all_rows, slice(None), self._answer_lengths)
            self._kv.answer_store.write(index, states[:, :, 0])

    def _read_prompts(self, layer: int, kind: int) -> Tensor:
        """Keys (kind 0) or values (1) of the prompts in use, (prompts, KV heads, longest, D)."""
        places = (slice(self._prompts), slice(None), slice(self._longest_prompt))
        return self._kv.prompt_store.read((layer, kind, *places))

    def _read_answers(self, layer: int, kind: int) -> Tensor:
        """The same of the rows with their new token, (rows, KV heads, longest, D)."""
        places = (slice(self._rows), slice(None), slice(self._longest_answer))
        return self._kv.answer_store.read((layer, kind, *places))

    def _prompt_scores(self, query: Tensor, prompt_k: Tensor) -> Tensor:
        """Scores of each row against its prompt, (rows, KV heads, heads per KV head, prompt tokens)."""
        return self._by_row(self._scores(self._by_prompt(query), prompt_k), query.shape[2])

    def _scores(self, query: Tensor, key: Tensor) -> Tensor:
        """query @ key^T over the last axis, in at least fp32: in 16 bits the rounding of scores, which grow with the
        width of a head, would be most of the difference between sampler and trainer."""
        key = key.transpose(2, 3)
        if query.dtype not in (torch.float16, torch.bfloat16):
            return query @ key
        if self._kv.on_gpu:
            scores = torch.bmm(query.flatten(0, 1), key.flatten(0, 1), out_dtype=torch.float32)
            return scores.unflatten(0, query.shape[:2])
        return query.float() @ key.float()

    def _prompt_values(self, weights: Tensor, prompt_v: Tensor) -> Tensor:
        return self._by_row(self._by_prompt(weights) @ prompt_v, weights.shape[2])

    def _by_prompt(self, states: Tensor) -> Tensor:
        """(rows, KV heads, heads per KV head, X) -> (prompts, KV heads, rows of a prompt x heads per KV head, X)."""
        _, kv_heads, per_kv, last = states.shape
        grouped = states[self._row_of_place].view(self._prompts, self._group_size, kv_heads, per_kv, last)
        return grouped.transpose(1, 2).reshape(self._prompts, kv_heads, self._group_size * per_kv, last)

    def _by_row(self, states: Tensor, per_kv: int) -> Tensor:
        """The inverse of `_by_prompt`, without the empty places."""
        _, kv_heads, _, last = states.shape
        grouped = states.view(self._prompts, kv_heads, self._group_size, per_kv, last).transpose(1, 2)
        return grouped.reshape(-1, kv_heads, per_kv, last)[self._place_of_row]

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """0 where a row may look and -inf elsewhere, (rows, 1, 1, prompt tokens + answer tokens)."""
        if window not in self._masks:
            self._masks[window] = self._make_mask(window, dtype)
        return self._masks[window]

    def _make_mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        prompt_length_R1 = (self.position_ids - self._answer_lengths)[:, None]
        position_prompt, position_own = (
            torch.arange(n, device=self.position_ids.device) for n in (self._longest_prompt, self._longest_answer)
        )
        seen = torch.cat([position_prompt < prompt_length_R1, position_own <= self._answer_lengths[:, None]], dim=1)
        if window is not None:
            position_own_RT = position_own + prompt_length_R1
            position = torch.cat([position_prompt.expand(self._rows, -1), position_own_RT], dim=1)
            seen &= self.position_ids[:, None] - position < window
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)[:, None, None]


def _positions_in_groups(prompt_of_row: Sequence[int], prompts: int) -> list[tuple[int, int]]:
    """(prompt slot, position among the rows of that prompt) of each row."""
    counts = [0] * prompts
    positions = []
    for prompt in prompt_of_row:
        positions.append((prompt, counts[prompt]))
        counts[prompt] += 1
    return positions
