"""Layer inputs wait for the backward in host memory instead of on the card.

Under activation checkpointing a decoder layer keeps its input (1, N, H) and computes the rest again. The inputs of all
layers lie there from the forward to the backward, though the backward needs one after the other, the last one first.

Saves: the inputs of L layers, all but two or three. The last layer's input, which the backward asks for at once, stays
on the card, and so does one that autograd holds anyway (the first layer's, where it is a leaf that needs a gradient).
What the final norm and the head keep is not touched.
Costs: no arithmetic. Each input crosses the bus twice, beside the computation: out while its own layer runs forward,
back while the layer after it runs backward. A layer of an 8B model moves 8 KiB per token in 16 bits and computes some
0.4 GFLOP per token, so a bus of 10 GB/s keeps up with 500 TFLOP/s. Pinning host memory is slow, but blocks go back to a
pool and serve the next micro-batch.
Bytes, with e bytes per value: on the card 2 N H e while the backward runs, instead of L N H e: the input in use and the
one on its way (one more where the first layer's stays). On the host (L - 1) N H e, each input rounded up to whole
blocks of 4 MiB: pinned memory that is not freed again. The blocks have one size, a power of two: torch rounds pinned
memory up to one, which for whole inputs could double it.

The values are copies, so not a bit changes. Moving checkpoints to the host is known from ZeRO-R (arXiv 1910.02054).
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lowmem_grpo.errors import ModelError
from lowmem_grpo.memory.host import host_memory

__all__ = ["ActivationOffload"]

BLOCK_BYTES = 4 << 20


class ActivationOffload:
    """Moves what the layers of `decoder` keep to the host, for forwards made inside `saving()`.

    The backward may come later and outside of it, after several forwards, twice with `retain_graph`, or never: what a
    graph has on the host goes back to the pool when the graph is freed. `host_bytes` is what the pool has made so far.

    Raises ModelError when a layer does not checkpoint its activations.

        offload = ActivationOffload(model.get_decoder())
        with offload.saving():
            loss = forward()
        loss.backward()
    """

    def __init__(self, decoder: nn.Module, *, block_bytes: int = BLOCK_BYTES) -> None:
        self._layers: list[Any] = list(decoder.get_submodule("layers").children())
        if not all(getattr(layer, "gradient_checkpointing", False) for layer in self._layers):
            raise ModelError(
                "memory.offload_activations moves what activation checkpointing keeps, and a layer has none; "
                "set memory.activation_checkpointing=true."
            )
        self._blocks = _HostBlocks(block_bytes)
        self._lane: _Lane | None = None
        # The input whose copy to the host may not be finished, and the newest link of the chain of this forward.
        self._leaving: tuple[Tensor, Any] | None = None
        self._newest: weakref.ref[_Parked] | None = None

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory made so far, in use or not."""
        return self._blocks.made_bytes

    @property
    def host_bytes_in_use(self) -> int:
        """Bytes of host memory that wait for a backward."""
        return self._blocks.made_bytes - self._blocks.free_bytes

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Inside, a forward with gradients in train mode parks its layers' inputs; any other stays as it is."""
        plain = [layer._gradient_checkpointing_func for layer in self._layers]
        packs = [self._send] * (len(plain) - 1) + [self._keep]
        for layer, checkpoint, pack in zip(self._layers, plain, packs, strict=True):
            layer._gradient_checkpointing_func = partial(self._checkpoint, checkpoint, pack)
        try:
            yield
        finally:
            for layer, checkpoint in zip(self._layers, plain, strict=True):
                layer._gradient_checkpointing_func = checkpoint
            self._settle()
            self._newest = None

    def _checkpoint(
        self, checkpoint: Callable[..., Any], pack: Callable[[Tensor], _Parked], layer: Callable[..., Any], *args: Any
    ) -> Any:
        # The positional arguments, of a decoder layer its hidden state, are all that these hooks see: within the layer
        # the checkpoint has hooks of its own, and keyword arguments (rotary angles, positions) it keeps by reference.
        with saved_tensors_hooks(pack, _fetch):
            return checkpoint(layer, *args)

    def _keep(self, tensor: Tensor) -> _Parked:
        self._settle()
        return self._linked(_Kept(tensor.detach(), self._newest))

    def _send(self, tensor: Tensor) -> _Parked:
        if tensor.is_leaf and tensor.requires_grad:
            return self._keep(tensor)
        self._settle()
        lane = self._lane_to(tensor.device)
        parked = _Sent(tensor.detach().contiguous(), self._blocks, lane, self._newest)
        self._leaving = parked.departure()
        return self._linked(parked)

    def _linked(self, parked: _Parked) -> _Parked:
        self._newest = weakref.ref(parked)
        return parked

    def _settle(self) -> None:
        """Let the card's memory of the input that left last be used again, but by nothing before its copy is done."""
        if self._leaving is not None:
            assert self._lane is not None
            self._lane.wait(self._leaving[1])
            self._leaving = None

    def _lane_to(self, device: torch.device) -> _Lane:
        if self._lane is None:
            self._lane = _lane_beside(device)
        return self._lane


def _fetch(parked: _Parked) -> Tensor:
    tensor = parked.fetch()
    before = parked.before() if parked.before is not None else None
    if before is not None:
        before.prefetch()
    return tensor


class _Parked(Protocol):
    """A layer's input between forward and backward; `before` is that of the layer before, the next one needed."""

    before: weakref.ref[_Parked] | None

    def prefetch(self) -> None:
        """Start what `fetch` would have to wait for."""

    def fetch(self) -> Tensor:
        """The tensor, on the card."""


class _Kept:
    """An input that stays on the card."""

    def __init__(self, tensor: Tensor, before: weakref.ref[_Parked] | None) -> None:
        self.before = before
        self._tensor = tensor

    def prefetch(self) -> None:
        pass

    def fetch(self) -> Tensor:
        return self._tensor


class _Sent:
    """An input that lies in blocks of host memory, and gives them back when it dies."""

    def __init__(self, tensor: Tensor, blocks: _HostBlocks, lane: _Lane, before: weakref.ref[_Parked] | None) -> None:
        self.before = before
        self._shape, self._dtype, self._device = tensor.shape, tensor.dtype, tensor.device
        self._blocks, self._lane = blocks, lane
        self._arriving: tuple[Tensor, Any] | None = None
        self._host: list[Tensor] = []
        self._host = blocks.take(tensor)
        self._source: Tensor | None = tensor

    def departure(self) -> tuple[Tensor, Any]:
        """Start the copy to the host; the tensor must live until the mark that comes with it is waited for."""
        assert self._source is not None
        source, self._source = self._source, None
        return source, self._lane.start(*self._pieces(source, to_host=True))

    def prefetch(self) -> None:
        if self._arriving is None:
            tensor = torch.empty(self._shape, dtype=self._dtype, device=self._device)
            self._arriving = tensor, self._lane.start(*self._pieces(tensor, to_host=False))

    def fetch(self) -> Tensor:
        self.prefetch()
        assert self._arriving is not None
        (tensor, mark), self._arriving = self._arriving, None
        self._lane.wait(mark)
        return tensor

    def _pieces(self, tensor: Tensor, *, to_host: bool) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Targets and sources of the copies."""
        card = tensor.view(-1).split(self._host[0].numel())
        host = [block[: piece.numel()] for block, piece in zip(self._host, card, strict=True)]
        return (host, card) if to_host else (card, host)

    def __del__(self) -> None:
        # A copy on its way to a tensor that nobody will read: the tensor's memory must not be used before it is done.
        if self._arriving is not None:
            self._lane.wait(self._arriving[1])
        # The next copy into or out of the blocks runs on the same lane, so after those under way.
        self._blocks.give(self._host)


class _HostBlocks:
    """Blocks of host memory, all of one size in bytes, made when none is free and kept for good."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._free: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        self.made_bytes = 0

    @property
    def free_bytes(self) -> int:
        return sum(len(blocks) for blocks in self._free.values()) * self._block_bytes

    def take(self, tensor: Tensor) -> list[Tensor]:
        """As many blocks of the tensor's dtype as it needs; pinned if it is on a GPU."""
        count = -(-tensor.numel() * tensor.element_size() // self._block_bytes)
        free = self._free[tensor.dtype]
        while len(free) < count:
            free.append(self._made(tensor))
        return [free.pop() for _ in range(count)]

    def give(self, blocks: Sequence[Tensor]) -> None:
        for block in blocks:
            self._free[block.dtype].append(block)

    def _made(self, tensor: Tensor) -> Tensor:
        size, pinned = self._block_bytes // tensor.element_size(), tensor.device.type == "cuda"
        with host_memory():
            block = torch.empty(size, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
        self.made_bytes += self._block_bytes
        return block


class _Lane(Protocol):
    """Where copies run: one after the other, each after what was computed before it was started."""

    def start(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Any:
        """Start copying and return a mark; the tensors on the card must live until the mark is waited for."""

    def wait(self, mark: Any) -> None:
        """Let what is computed from now on come after the copies up to the mark."""


class _StreamLane:
    """Copies beside the computation, on a CUDA stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def start(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> torch.cuda.Event:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def wait(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)


class _DirectLane:
    """Copies at once: for the CPU and for fake tensors."""

    def start(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    def wait(self, mark: None) -> None:
        pass


def _lane_beside(device: torch.device) -> _Lane:
    return _StreamLane(device) if device.type == "cuda" else _DirectLane()
