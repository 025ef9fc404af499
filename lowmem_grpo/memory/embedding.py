"""The input embedding in host memory: only the rows of the tokens at hand come to the card.

Saves: the embedding of a model whose head is a matrix of its own. With V = 128 256 words and H = 4096 that is 1.05 GB
in 16 bits, there as long as the run lasts for a look-up of a few rows.
Costs: per forward the ids come to the host, which waits for the card (at every decode step too, and no CUDA graph can
hold it), and N x H values go back. They go through pinned memory; the weight is not pinned, since it never moves as a
whole.
Bytes, with e bytes per value: on the card V H e less, and N H e for the rows, which a look-up on the card makes too. On
the host V H e for good and N H e pinned for a while.

The values are copies, so not a bit changes. A family's factor (gemma) is multiplied on the card, as it was. Where
embedding and head are one tensor the head needs it on the card, so nothing would be saved.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowmem_grpo.errors import ModelError
from lowmem_grpo.memory.host import host_memory

__all__ = ["is_offloaded", "offload_embedding"]


def offload_embedding(model: Any, device: torch.device) -> int:
    """Move the input embedding of `model` to the host; it takes ids on any device and gives rows on `device`.

    Returns the bytes that this freed on the card: 0 when the embedding was on the host already. `model` is a model of
    transformers, wrapped by peft or not yet. The module stays where it is in the model, and the weight in the state
    dict; `model.device`, the device of the first parameter, may become that of the host.

    Raises ModelError, before anything is changed, when embedding and head are the same tensor, when the embedding is
    trained, and when it is more than a look-up times a factor.
    """
    embedding = model.get_input_embeddings()
    if is_offloaded(embedding):
        return 0
    _check_embedding(embedding, model.get_output_embeddings())
    weight = embedding.weight
    with host_memory():
        host = torch.empty(weight.shape, dtype=weight.dtype, device="cpu")
    host.copy_(weight.detach())
    embedding.weight = nn.Parameter(host, requires_grad=False)
    embedding.offloaded = _Offloaded(device)
    embedding.forward = types.MethodType(_offloaded_forward, embedding)
    return weight.numel() * weight.element_size()


def is_offloaded(embedding: nn.Module) -> bool:
    """Whether the weight of this embedding lies in host memory because of `offload_embedding`."""
    return isinstance(getattr(embedding, "offloaded", None), _Offloaded)


@dataclass(frozen=True, slots=True)
class _Offloaded:
    """Marks an embedding whose rows go to `device`."""

    device: torch.device


def _offloaded_forward(embedding: Any, ids: Tensor) -> Tensor:
    device, weight_V_H = embedding.offloaded.device, embedding.weight
    shape = (*ids.shape, weight_V_H.shape[1])
    with host_memory():
        ids_N = ids.to("cpu").reshape(-1)
        host_N_H = torch.empty(
            (ids_N.shape[0], shape[-1]), dtype=weight_V_H.dtype, device="cpu", pin_memory=device.type == "cuda"
        )
        torch.index_select(weight_V_H, 0, ids_N, out=host_N_H)
    # Not `.to(device)`: where the card is the CPU, or stands for one, that would hand on what lies on the host.
    rows = torch.empty(shape, dtype=weight_V_H.dtype, device=device)
    rows.view(-1, shape[-1]).copy_(host_N_H, non_blocking=True)
    scale = getattr(embedding, "embed_scale", None)
    return rows if scale is None else rows * scale.to(rows.dtype)


def _check_embedding(embedding: Any, head: Any) -> None:
    kind = type(embedding)
    if not isinstance(embedding, nn.Embedding) or (
        kind.forward is not nn.Embedding.forward and not isinstance(getattr(embedding, "embed_scale", None), Tensor)
    ):
        raise ModelError(
            f"The input embedding is a {kind.__name__}, which computes more than a look-up; "
            "set memory.offload_embeddings=false."
        )
    if head is not None and head.weight is embedding.weight:
        raise ModelError(
            "The input embedding and the head of this model are the same tensor, so offloading saves nothing; "
            "set memory.offload_embeddings=false."
        )
    if embedding.weight.requires_grad:
        raise ModelError("The input embedding is trained, so it has to stay on the card; freeze it first.")
