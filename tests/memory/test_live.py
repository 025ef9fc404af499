"""Live bytes, counted from the operations: what counts, what does not, and the same on fake tensors."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from lowmem_grpo.memory.host import host_memory, in_host_memory
from lowmem_grpo.memory.live import LiveBytes, tensors_in

MODES: list[Callable[[], AbstractContextManager[object]]] = [nullcontext, FakeTensorMode]


@pytest.fixture(params=MODES, ids=["real", "fake"])
def mode(request: pytest.FixtureRequest) -> AbstractContextManager[object]:
    """Real tensors, or fake ones; each test enters it, for the bytes are the same."""
    made: AbstractContextManager[object] = request.param()
    return made


def test_bytes_come_and_go(mode: AbstractContextManager[object]) -> None:
    with mode, LiveBytes() as live:
        x = torch.zeros(100)
        assert (live.live_bytes, live.peak_bytes) == (400, 400)
        y = x.to(torch.float64)
        assert (live.live_bytes, live.peak_bytes) == (1200, 1200)
        del x
        assert (live.live_bytes, live.peak_bytes) == (800, 1200)
        y = y[:0].clone()
        assert (live.live_bytes, live.peak_bytes) == (0, 1200)


def test_the_peak_can_begin_anew(mode: AbstractContextManager[object]) -> None:
    with mode, LiveBytes() as live:
        x = torch.zeros(100) + 1
        assert live.peak_bytes == 800
        live.peak_bytes = live.live_bytes
        x = x.half()
        assert (live.live_bytes, live.peak_bytes) == (200, 600)


def test_what_was_there_before_counts_nothing(mode: AbstractContextManager[object]) -> None:
    with mode:
        before = torch.zeros(10, 10)
        with LiveBytes() as live:
            view = before.t()[2:]
            view.add_(1)
            before[0].fill_(2.0)
            alias = view.detach()
            torch.add(before, 1, out=before)
            halves = before.split(5)
            again = halves[1].view(-1)
            assert live.peak_bytes == 0
            own = before + again[0]
            assert live.live_bytes == live.peak_bytes == own.untyped_storage().nbytes() == 400
        del alias


def test_views_and_changes_in_place_count_once(mode: AbstractContextManager[object]) -> None:
    with mode, LiveBytes() as live:
        x = torch.zeros(4, 25)
        parts = [*x.unbind(), x.t(), x.view(-1), x.detach().relu_()]
        assert live.peak_bytes == 400
        del x
        assert live.live_bytes == 400  # a view keeps the storage
        parts.clear()
        assert live.live_bytes == 0


def test_several_results_of_one_operation(mode: AbstractContextManager[object]) -> None:
    with mode, LiveBytes() as live:
        values, places = torch.zeros(5, 4).max(dim=1)
        assert (live.live_bytes, live.peak_bytes) == (5 * 4 + 5 * 8, 80 + 60)
        del places
        assert live.live_bytes == 20
        del values


def test_counting_what_was_made_before(mode: AbstractContextManager[object]) -> None:
    with mode:
        weight, other = torch.zeros(10), torch.zeros(5)
        seen = torch.zeros(2)
        with LiveBytes() as live:
            seen.add_(1)
            live.count([weight, weight.view(2, 5), weight.detach()], "weights")
            live.count([weight, other], "weights")
            live.count([seen], "weights")  # an operation on it before changes nothing
            assert live.live_bytes == live.peak_bytes == 40 + 20 + 8
            del weight
            assert live.live_bytes == 28


def test_what_is_made_for_the_host_counts_nothing(mode: AbstractContextManager[object]) -> None:
    with mode, LiveBytes() as live:
        with host_memory():
            kept = torch.zeros(100)
            assert in_host_memory()
        assert not in_host_memory()
        kept.add_(1)
        view = kept.view(10, 10)
        assert live.peak_bytes == 0
        back = view.clone()
        assert live.live_bytes == back.untyped_storage().nbytes() == 400
        with host_memory():
            back.copy_(view)
        del back
        assert (live.live_bytes, live.peak_bytes) == (0, 400)


def test_the_host_is_left_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), host_memory(), host_memory():
        raise ZeroDivisionError
    assert not in_host_memory()


def test_an_address_that_is_used_again_is_a_new_storage(mode: AbstractContextManager[object]) -> None:
    with mode, LiveBytes() as live:
        addresses = set()
        for _ in range(50):
            x = torch.zeros(1000)
            addresses.add(x.untyped_storage()._cdata)
            assert live.live_bytes == 4000
            del x
            assert live.live_bytes == 0
    assert len(addresses) < 50
    assert live.peak_bytes == 4000


def test_a_backward_counts_too(mode: AbstractContextManager[object]) -> None:
    with mode:
        x = torch.ones(100, requires_grad=True)
        with LiveBytes() as live:
            y = x.exp()  # keeps its result
            loss = (y * 2).sum()
            assert live.live_bytes == 400 + 4
            del y, loss
            assert live.live_bytes == 0
            x.exp().sum().backward()
            assert live.live_bytes == 400  # the gradient
            x.grad = None
            assert live.live_bytes == 0


def test_checkpointing_is_seen(mode: AbstractContextManager[object]) -> None:
    """A chain of ten keeps ten results, or its input alone until the backward."""
    chain = torch.nn.Sequential(*(torch.nn.Tanh() for _ in range(10)))
    with mode:
        kept = []
        for run in (chain, lambda x: checkpoint(chain, x, use_reentrant=False)):
            x = torch.ones(100, requires_grad=True)
            with LiveBytes() as live:
                y = run(x)
                kept.append(live.live_bytes)
                y.sum().backward()
    assert kept == [4000, 400]


def test_bytes_freed_after_the_block_still_go(mode: AbstractContextManager[object]) -> None:
    with mode:
        with LiveBytes() as live:
            x = torch.zeros(10)
        y = torch.zeros(10)
        assert live.live_bytes == 40
        del x, y
    assert live.live_bytes == 0


def test_two_counters_see_the_same(mode: AbstractContextManager[object]) -> None:
    with mode, LiveBytes() as outer:
        x = torch.zeros(10)
        with LiveBytes() as inner:
            y = x + 1
        assert (outer.live_bytes, inner.live_bytes) == (80, 40)
        del x, y
        assert (outer.live_bytes, inner.live_bytes) == (0, 0)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50)), max_size=30))
def test_live_bytes_are_those_of_the_tensors_that_are_held(steps: list[tuple[int, int]]) -> None:
    """Make, copy, look at and drop tensors in any order."""
    held: list[Tensor] = []
    with LiveBytes() as live:
        peak = 0
        for kind, size in steps:
            if kind == 0 or not held:
                held.append(torch.zeros(size, dtype=torch.float64))
            elif kind == 1:
                held.append(held[size % len(held)].clone())
            elif kind == 2:
                held.append(held[size % len(held)][:1])
            else:
                held.pop(size % len(held))
            storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in held}
            assert live.live_bytes == sum(storages.values())
            peak = max(peak, live.live_bytes)
        assert live.peak_bytes == peak
        held.clear()
        assert live.live_bytes == 0


def test_nothing_is_kept_alive(mode: AbstractContextManager[object]) -> None:
    with mode:
        before = torch.zeros(3)
        with LiveBytes() as live:
            x = before + 1
            y = x.view(3, 1)
        del x, y
        gc.collect()
        assert live.live_bytes == 0


TREES = st.recursive(
    st.one_of(st.just("tensor"), st.integers(), st.none()),
    lambda branch: st.one_of(
        st.lists(branch, max_size=4), st.tuples(branch, branch), st.dictionaries(st.integers(), branch, max_size=3)
    ),
)


@given(TREES)
def test_tensors_of_a_tree_come_in_order(tree: object) -> None:
    planted: list[Tensor] = []

    def plant(node: object) -> object:
        if node == "tensor":
            planted.append(torch.zeros(1))
            return planted[-1]
        if isinstance(node, dict):
            return {key: plant(value) for key, value in node.items()}
        if isinstance(node, list | tuple):
            return type(node)(plant(value) for value in node)
        return node

    found = tensors_in(plant(tree))
    assert [id(tensor) for tensor in found] == [id(tensor) for tensor in planted]
