"""The naive twin of the whole update: one answer per right-padded row, its prompt in front, a stock peft model.

Nothing is shared and nothing is lean: every answer forwards its prompt again, padding is computed and thrown away, and
attention and adapter layers are those of transformers and peft. Tests compare its gradients with the updater's, the
benchmark its time and memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from peft import PeftModel
from torch import Tensor

from lowmem_grpo.batching import rewards_tensor
from lowmem_grpo.losses import LOSSES
from lowmem_grpo.memory.head import chunked_logprobs
from lowmem_grpo.types import LossInputs, Rollout, ScoredGroup

__all__ = ["RowMicroBatch", "row_logprobs", "row_micro_batches", "row_update"]


@dataclass(frozen=True, slots=True)
class RowMicroBatch:
    """Rows of prompt and answer, T the longest of them; `mask_BT` marks the tokens that the policy sampled.

    `advantages_BT` and `weights_BT` are 0 off the mask.
    """

    input_ids_BT: Tensor
    attention_mask_BT: Tensor
    position_ids_BT: Tensor
    mask_BT: Tensor
    advantages_BT: Tensor
    weights_BT: Tensor
    rows: tuple[tuple[int, int], ...]
    """(group index, answer index) of each row."""


def row_micro_batches(
    groups: Sequence[ScoredGroup],
    advantages_P_G: Tensor,
    counted_P_G: Tensor,
    live_P: Tensor,
    weigh: Callable[[Tensor], Tensor],
    *,
    micro_batch_tokens: int,
    pad_id: int,
    device: torch.device,
) -> list[RowMicroBatch]:
    """Rows sorted by falling length, cut so that rows x longest row is at most `micro_batch_tokens`.

    The other arguments are those of `lowmem_grpo.batching.pack_groups`. A row above the budget goes alone.
    """
    _, lengths_P_G = rewards_tensor(groups)
    weights_P_G = weigh((lengths_P_G * counted_P_G).flatten()).reshape(lengths_P_G.shape)
    rows = [(int(p), int(g)) for p, g in (counted_P_G & live_P[:, None]).nonzero()]
    rows.sort(key=lambda row: -len(_row_ids(groups, row)))  # stable: equal lengths keep their order
    sizes = [len(_row_ids(groups, row)) for row in rows]
    return [
        _micro_batch(groups, rows[cut], advantages_P_G, weights_P_G, pad_id=pad_id, device=device)
        for cut in _cuts(sizes, micro_batch_tokens)
    ]


def row_logprobs(model: PeftModel, micro: RowMicroBatch, temperature: float, head_chunk_tokens: int) -> Tensor:
    """Log-probs of the sampled tokens, (B, T), 0 off the mask, with gradient; the head runs in chunks."""
    base = model.get_base_model()
    hidden_B_T_H = base.get_decoder()(
        input_ids=micro.input_ids_BT,
        attention_mask=micro.attention_mask_BT,
        position_ids=micro.position_ids_BT,
        use_cache=False,
    ).last_hidden_state
    head = base.get_output_embeddings()
    # The token at position t is predicted by the hidden state at t - 1; a prompt is never empty.
    logprobs_M, _ = chunked_logprobs(
        hidden_B_T_H[:, :-1][micro.mask_BT[:, 1:]],
        head.weight,
        micro.input_ids_BT[micro.mask_BT],
        temperature=temperature,
        chunk_tokens=head_chunk_tokens,
        bias_V=head.bias,
        softcap=getattr(base.config, "final_logit_softcapping", None),
    )
    zeros_BT = torch.zeros(micro.mask_BT.shape, dtype=logprobs_M.dtype, device=logprobs_M.device)
    return zeros_BT.masked_scatter(micro.mask_BT, logprobs_M)


def row_update(
    model: PeftModel,
    groups: Sequence[ScoredGroup],
    advantages_P_G: Tensor,
    counted_P_G: Tensor,
    live_P: Tensor,
    weigh: Callable[[Tensor], Tensor],
    *,
    micro_batch_tokens: int,
    pad_id: int,
    temperature: float,
    head_chunk_tokens: int,
) -> float:
    """Forward and backward of every micro-batch on the first use of a rollout batch; returns the loss.

    Adds the gradients to `.grad`. Train or eval mode is the caller's choice: checkpointing acts in train mode only.
    """
    total = 0.0
    micro_batches = row_micro_batches(
        groups,
        advantages_P_G,
        counted_P_G,
        live_P,
        weigh,
        micro_batch_tokens=micro_batch_tokens,
        pad_id=pad_id,
        device=model.device,
    )
    for micro in micro_batches:
        logprobs_BT = row_logprobs(model, micro, temperature, head_chunk_tokens)
        inputs = LossInputs(
            logprobs_BT=logprobs_BT,
            old_logprobs_BT=logprobs_BT.detach(),
            ref_logprobs_BT=None,
            advantages_BT=micro.advantages_BT,
            mask_BT=micro.mask_BT,
            weights_BT=micro.weights_BT,
        )
        loss = LOSSES["clip"](inputs).loss
        loss.backward()
        total += loss.item()
    return total


def _row_ids(groups: Sequence[ScoredGroup], row: tuple[int, int]) -> list[int]:
    group = groups[row[0]].group
    return [*group.problem.prompt_ids, *group.rollouts[row[1]].completion_ids]


def _cuts(falling_sizes: Sequence[int], budget: int) -> Iterator[slice]:
    """Neighbouring rows whose padded size fits the budget; at least one row each."""
    start = 0
    while start < len(falling_sizes):
        rows = max(1, budget // falling_sizes[start])
        yield slice(start, start + rows)
        start += rows


def _micro_batch(
    groups: Sequence[ScoredGroup],
    rows: Sequence[tuple[int, int]],
    advantages_P_G: Tensor,
    weights_P_G: Tensor,
    *,
    pad_id: int,
    device: torch.device,
) -> RowMicroBatch:
    ids = [_row_ids(groups, row) for row in rows]
    shape = (len(rows), max(map(len, ids)))
    input_ids_BT = torch.full(shape, pad_id)
    attention_mask_BT, mask_BT = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.bool)
    for b, ((p, g), ids_T) in enumerate(zip(rows, ids, strict=True)):
        answer: Rollout = groups[p].group.rollouts[g]
        input_ids_BT[b, : len(ids_T)] = torch.tensor(ids_T)
        attention_mask_BT[b, : len(ids_T)] = 1
        mask_BT[b, len(ids_T) - len(answer.sampled_T) : len(ids_T)] = torch.tensor(answer.sampled_T)
    index_B_2 = torch.tensor(rows)
    advantages_B, weights_B = (
        values_P_G[index_B_2[:, 0], index_B_2[:, 1]] for values_P_G in (advantages_P_G, weights_P_G)
    )
    return RowMicroBatch(
        input_ids_BT=input_ids_BT.to(device),
        attention_mask_BT=attention_mask_BT.to(device),
        position_ids_BT=(attention_mask_BT.cumsum(dim=1) - 1).to(device),
        mask_BT=mask_BT.to(device),
        advantages_BT=(advantages_B[:, None] * mask_BT).to(device),
        weights_BT=(weights_B[:, None] * mask_BT).to(device),
        rows=tuple(rows),
    )
