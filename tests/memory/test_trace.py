"""The trace of allocations: every event in order, who made it, and what was alive at any of them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from lowmem_grpo.memory.allocator import CachingAllocator
from lowmem_grpo.memory.host import host_memory
from lowmem_grpo.memory.live import LiveBytes
from lowmem_grpo.memory.trace import Allocation, AllocationTrace

aten = torch.ops.aten


@pytest.mark.parametrize("mode", [nullcontext(), FakeTensorMode()])
def test_events_by_hand(mode: AbstractContextManager[object]) -> None:
    with mode, AllocationTrace() as trace:
        x = torch.zeros(10)  # 1
        y = x.view(2, 5).double() + 1  # 2 and 3
        del x
        with host_memory():
            z = y.clone()  # 4, on the host
        y = z.half()  # 5
    assert trace.events == [(1, 40), (2, 80), (3, 80), (2, -1), (1, -1), (5, 20), (3, -1)]
    assert (trace.live_bytes, trace.peak_bytes) == (20, 200)
    del y, z
    assert trace.events[-1] == (5, -1)


def test_what_is_empty_makes_no_event() -> None:
    with AllocationTrace() as trace:
        x = torch.zeros(0)
        x.add_(1)
        del x
    assert trace.events == []


def test_counted_tensors_are_events_too() -> None:
    weight = torch.zeros(10)
    with AllocationTrace() as trace:
        trace.count([weight, weight.t()], "weights")
    assert trace.events == [(1, 40)]
    assert trace.alive_after(0) == [Allocation("outside the model: weights", 40)]


class Half(nn.Module):
    """A layer of two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x) + self.part(x * 2)


def test_allocations_are_named_by_module_and_operation() -> None:
    model = nn.Sequential(Half(), nn.ReLU())
    with AllocationTrace() as trace:
        handles = trace.watch(model)
        x = torch.zeros(10)
        y = model(x)
        for handle in handles:
            handle.remove()
        z = model(x)
    # zeros, the two halves with the product between them, their sum
    assert [size for _, size in trace.events[:4]] == [40] * 4
    assert trace.alive_after(3) == [
        Allocation("0.part: aten.tanh.default", 80),
        Allocation("outside the model: aten.zeros.default", 40),
        Allocation("0: aten.mul.Tensor", 40),
    ]
    assert Allocation("0: aten.add.Tensor", 40) in trace.alive_after(5)
    assert trace.alive_after(len(trace.events) - 1) == [
        Allocation("outside the model: aten.zeros.default", 40),
        Allocation("1: aten.relu.default", 40),
        Allocation("outside the model: aten.relu.default", 40),
    ]
    del y, z


def test_what_is_alive_is_added_up_the_largest_first() -> None:
    with AllocationTrace() as trace:
        kept = [torch.zeros(2), torch.zeros(3), torch.ones(4)]
        first = len(trace.events) - 1
        kept.pop(0)
        kept.append(torch.zeros(1000))
    zeros, ones = "outside the model: aten.zeros.default", "outside the model: aten.ones.default"
    assert trace.alive_after(-1) == trace.alive_after(0)[:0]
    assert trace.alive_after(0) == [Allocation(zeros, 8)]
    assert trace.alive_after(first) == [Allocation(zeros, 20), Allocation(ones, 16)]
    assert trace.alive_after(len(trace.events) - 1) == [Allocation(zeros, 4012), Allocation(ones, 16)]


def test_the_backward_is_named_by_its_nodes_and_a_recomputation_by_its_modules() -> None:
    model = nn.Sequential(Half())
    x = torch.ones(10, requires_grad=True)
    with AllocationTrace() as trace:
        handles = trace.watch(model)
        checkpoint(model, x, use_reentrant=False).exp().sum().backward()
        for handle in handles:
            handle.remove()
    made_by: dict[str, int] = {}
    for index, (_, size) in enumerate(trace.events):
        if size > 0:
            for made in trace.alive_after(index):
                made_by[made.where] = max(made_by.get(made.where, 0), made.bytes)
    assert made_by["backward of Exp: aten.mul.Tensor"] == 40
    assert "backward of Tanh: aten.tanh_backward.default" in made_by
    assert not any("Backward" in where for where in made_by)
    # tanh is kept for the backward only in the recomputation: both of them then live at once.
    assert made_by["0.part: aten.tanh.default"] == 80


def test_an_error_in_a_module_leaves_it() -> None:
    model = nn.Sequential(nn.Tanh(), nn.Linear(3, 3))
    with AllocationTrace() as trace:
        trace.watch(model)
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.zeros(1, 4))
        x = torch.zeros(5)
    assert trace.alive_after(len(trace.events) - 1) == [
        Allocation("outside the model: aten.zeros.default", x.untyped_storage().nbytes())
    ]


def test_workspace_is_there_while_the_operation_runs() -> None:
    def workspace(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        return 1000 * args[0].numel() if func is aten.exp.default else 0

    x = torch.zeros(2)
    with AllocationTrace(workspace) as trace:
        y = x.exp()
        z = y + 1
    assert trace.events == [(1, 2000), (2, 8), (1, -1), (3, 8)]
    assert (trace.peak_bytes, trace.live_bytes) == (2008, 16)
    assert trace.alive_after(1)[0] == Allocation("outside the model: inside aten.exp.default", 2000)
    del z


def test_a_replay_gives_the_peak_of_the_trace() -> None:
    """Sizes are multiples of 512 bytes, which the allocator does not round."""
    x = torch.ones(128, 8, requires_grad=True)
    with AllocationTrace() as trace, LiveBytes() as live:
        for _ in range(3):
            (x.exp() * x.tanh()).sum(1).square().backward(torch.ones(128))
    replay = CachingAllocator().replay(trace.events)
    assert replay.peak_allocated_bytes == trace.peak_bytes == live.peak_bytes
    alive = trace.alive_after(replay.peak_index)
    assert sum(made.bytes for made in alive) == trace.peak_bytes
