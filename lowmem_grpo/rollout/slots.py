"""Keys and values of the sampler: each prompt once, and a slot per answer being written, allocated once.

Saves: a group's prompt is stored once for all its answers, not once per answer (with a prompt of 1000 tokens and
G = 8 on a 7B: 57 MB instead of 459), and nothing is concatenated per token. Costs: the scores of the prompt part are
computed in the order of the groups and brought back into the order of the rows.

Bytes: 2 x layers x KV heads x head width x bytes per value x (prompt slots x longest prompt + slots x most new tokens).

A query sees its group's prompt and its own answer. The scores of both parts are computed apart, put side by side for
one softmax, and the two weighted sums are added: exact attention over the whole row. Sharing the prompt's part of a
decode step among the rows of a group is known as bifurcated attention (arXiv 2403.08845) or Hydragen (2402.05099).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowmem_grpo.attention import HeadMath, PackedLayout, capped, softmax

__all__ = ["DecodeLayout", "KVSlots", "PrefillLayout", "SlotShape", "Target"]


@dataclass(frozen=True, slots=True)
class SlotShape:
    """The sizes that `KVSlots` is made of.

    >>> SlotShape(2, 4, 8, prompt_slots=1, prompt_tokens=100, slots=8, answer_tokens=50).bytes(torch.float16)
    128000
    """

    layers: int
    kv_heads: int
    head_width: int
    prompt_slots: int
    prompt_tokens: int
    slots: int
    answer_tokens: int

    def bytes(self, dtype: torch.dtype) -> int:
        """Bytes of all keys and values."""
        tokens = self.prompt_slots * self.prompt_tokens + self.slots * self.answer_tokens
        return 2 * self.layers * self.kv_heads * self.head_width * tokens * dtype.itemsize


class KVSlots:
    """Prompt slots (one per group in work) and answer slots (one per row in work), for all layers.

    Slots in use are always the first ones: `move_prompt` and `move_answer` close the gap that a finished one leaves.
    What lies beyond a slot's length does not count, so lengths live with the caller and may start anywhere.
    """

    def __init__(self, shape: SlotShape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        common = (shape.layers, 2)
        # Key and value side by side: one slot moves in one copy. Zeros, because an unseen token's weight of 0 times
        # whatever lay in fresh memory may be NaN.
        self.prompts = torch.zeros(
            *common,
            shape.prompt_slots,
            shape.kv_heads,
            shape.prompt_tokens,
            shape.head_width,
            dtype=dtype,
            device=device,
        )
        self.answers = torch.zeros(
            *common, shape.slots, shape.kv_heads, shape.answer_tokens, shape.head_width, dtype=dtype, device=device
        )

    def move_prompt(self, source: int, target: int) -> None:
        """Copy one prompt slot onto another."""
        self.prompts[:, :, target] = self.prompts[:, :, source]

    def move_answer(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of one answer slot onto another."""
        self.answers[:, :, target, :, :length] = self.answers[:, :, source, :, :length]


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
            store = self._kv.prompts if target.is_prompt else self._kv.answers
            store[layer, 0, target.slot, :, : target.length] = key[0, :, tokens]
            store[layer, 1, target.slot, :, : target.length] = value[0, :, tokens]
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
        own_k, own_v = self._append(layer, key, value)
        prompt_k, prompt_v = self._kv.prompts[layer, :, : self._prompts, :, : self._longest_prompt]
        query = query.view(rows, kv_heads, heads // kv_heads, width)
        scores = torch.cat([self._prompt_scores(query, prompt_k), _scores(query, own_k)], dim=-1)
        scores = capped(scores * math.scale, math.softcap) + self._mask(math.window, scores.dtype)
        weights_prompt, weights_own = softmax(scores, value.dtype).split(
            [self._longest_prompt, self._longest_answer], dim=-1
        )
        output = weights_own @ own_v + self._prompt_values(weights_prompt, prompt_v)
        return output.view(rows, 1, heads, width)

    def _append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new token of each row; returns keys and values of the rows, (rows, KV heads, longest, D) each."""
        states = self._kv.answers[layer]
        states[0, self._all_rows, :, self._answer_lengths] = key[:, :, 0]
        states[1, self._all_rows, :, self._answer_lengths] = value[:, :, 0]
        own = states[:, : self._rows, :, : self._longest_answer]
        return own[0], own[1]

    def _prompt_scores(self, query: Tensor, prompt_k: Tensor) -> Tensor:
        """Scores of each row against its prompt, (rows, KV heads, heads per KV head, prompt tokens)."""
        return self._by_row(_scores(self._by_prompt(query), prompt_k), query.shape[2])

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


def _scores(query: Tensor, key: Tensor) -> Tensor:
    """query @ key^T over the last axis, in at least fp32: in 16 bits the rounding of scores, which grow with the width
    of a head, would be most of the difference between sampler and trainer."""
    key = key.transpose(2, 3)
    if query.dtype not in (torch.float16, torch.bfloat16):
        return query @ key
    if query.is_cuda:
        scores = torch.bmm(query.flatten(0, 1), key.flatten(0, 1), out_dtype=torch.float32)
        return scores.unflatten(0, query.shape[:2])
    return query.float() @ key.float()


def _positions_in_groups(prompt_of_row: Sequence[int], prompts: int) -> list[tuple[int, int]]:
    """(prompt slot, position among the rows of that prompt) of each row."""
    counts = [0] * prompts
    positions = []
    for prompt in prompt_of_row:
        positions.append((prompt, counts[prompt]))
        counts[prompt] += 1
    return positions
