"""The allocator model: each rule with numbers worked out by hand, and properties of any trace."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowmem_grpo.memory.allocator import CachingAllocator, SimulatedOutOfMemory

MIB = 1 << 20


def allocator_with(*sizes: int, expandable_segments: bool = False) -> tuple[CachingAllocator, list[int]]:
    allocator = CachingAllocator(expandable_segments=expandable_segments)
    return allocator, [allocator.allocate(size) for size in sizes]


def offsets(allocator: CachingAllocator, handles: list[int]) -> list[int]:
    """Where the allocations begin, counted from the first."""
    starts = [allocator.placement(handle).start for handle in handles]
    return [start - starts[0] for start in starts]


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (0, 0, 0),
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),  # the largest of the small pool
        (MIB + 1, MIB + 512, 20 * MIB),  # the smallest of the large pool
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),  # from here on a segment of its own
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),  # the rest is over 1 MiB, and cut off
        (11 * MIB, 12 * MIB, 12 * MIB),  # the rest is 1 MiB, not more: it stays with the block
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),
    ],
)
def test_rounding_and_segments(size: int, allocated: int, reserved: int) -> None:
    allocator, _ = allocator_with(size)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (allocated, reserved)


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (11 * MIB, 11 * MIB, 20 * MIB),  # pages of 20 MiB, and any rest of 512 bytes or more is cut
        (20 * MIB, 20 * MIB, 20 * MIB),
        (20 * MIB + 1, 20 * MIB + 512, 40 * MIB),
    ],
)
def test_rounding_and_pages_of_expandable_segments(size: int, allocated: int, reserved: int) -> None:
    allocator, _ = allocator_with(size, expandable_segments=True)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (allocated, reserved)


def test_a_small_segment_is_cut_down_to_512_bytes() -> None:
    allocator, handles = allocator_with(MIB, MIB - 512, 512)
    assert allocator.reserved_bytes == 2 * MIB
    assert offsets(allocator, handles) == [0, MIB, 2 * MIB - 512]
    allocator.allocate(1)
    assert allocator.reserved_bytes == 4 * MIB


def test_the_two_pools_do_not_share_segments() -> None:
    # 20 MiB of the large pool are nearly free, and the small request does not use them.
    allocator, _ = allocator_with(2 * MIB, 512)
    assert allocator.reserved_bytes == 22 * MIB


def test_of_the_free_blocks_the_smallest_that_fits_is_taken_and_of_equal_ones_the_lowest() -> None:
    # In one segment of 20 MiB: 4, 2, 3, 2, 3 MiB and 6 MiB of rest; then the 4 and both 3 are freed.
    allocator, handles = allocator_with(*(size * MIB for size in (4, 2, 3, 2, 3, 2)))
    for freed in (handles[0], handles[2], handles[4]):
        allocator.free(freed)
    base = allocator.placement(handles[1]).start - 4 * MIB
    placed = [allocator.allocate(size * MIB) for size in (3, 3, 3)]
    assert [allocator.placement(handle).start - base for handle in placed] == [6 * MIB, 11 * MIB, 0]
    # The 4 MiB block gave 3 and has 1 MiB left, which is not more than 1 MiB: it was not cut.
    assert len(allocator.placement(placed[2])) == 4 * MIB
    assert allocator.allocated_bytes == (2 + 3 + 2 + 3 + 2 + 4) * MIB


def test_freed_neighbours_merge_whatever_the_order() -> None:
    for order in ((0, 1, 2), (0, 2, 1), (2, 1, 0), (1, 0, 2)):
        allocator, handles = allocator_with(6 * MIB, 6 * MIB, 8 * MIB)
        assert allocator.reserved_bytes == 20 * MIB
        for index in order:
            allocator.free(handles[index])
        whole = allocator.allocate(20 * MIB)
        assert allocator.reserved_bytes == 20 * MIB
        assert len(allocator.placement(whole)) == 20 * MIB


def test_neighbours_in_different_segments_do_not_merge() -> None:
    allocator, handles = allocator_with(12 * MIB, 12 * MIB)
    for handle in handles:
        allocator.free(handle)
    allocator.allocate(24 * MIB)
    assert allocator.reserved_bytes == 48 * MIB


def test_growing_sizes_leave_fixed_segments_behind_but_not_expandable_ones() -> None:
    # A batch one larger each time: 20, 40, 60 MiB, each freed before the next comes.
    events = [event for key, size in enumerate((20, 40, 60)) for event in ((key, size * MIB), (key, -1))]
    fixed = CachingAllocator().replay(events)
    expandable = CachingAllocator(expandable_segments=True).replay(events)
    assert fixed.peak_allocated_bytes == expandable.peak_allocated_bytes == 60 * MIB
    assert fixed.peak_reserved_bytes == (20 + 40 + 60) * MIB
    assert expandable.peak_reserved_bytes == 60 * MIB


def test_empty_cache_releases_only_segments_without_a_live_block() -> None:
    allocator, (kept, freed, large) = allocator_with(512, 512, 12 * MIB)
    allocator.free(freed)
    allocator.free(large)
    assert allocator.reserved_bytes == 14 * MIB
    allocator.empty_cache()
    assert allocator.reserved_bytes == 2 * MIB
    allocator.free(kept)
    allocator.empty_cache()
    assert (allocator.reserved_bytes, allocator.peak_reserved_bytes) == (0, 14 * MIB)


def test_empty_cache_unmaps_whole_free_pages_and_the_gap_is_filled_first() -> None:
    allocator, handles = allocator_with(20 * MIB, 40 * MIB, 20 * MIB, expandable_segments=True)
    allocator.free(handles[1])
    allocator.empty_cache()
    assert allocator.reserved_bytes == 40 * MIB
    refilled = allocator.allocate(25 * MIB)
    assert offsets(allocator, [handles[0], refilled]) == [0, 20 * MIB]
    assert allocator.reserved_bytes == 80 * MIB
    # 15 MiB of the gap are free: 16 go to the end, on a page of their own.
    last = allocator.allocate(16 * MIB)
    assert offsets(allocator, [handles[0], last]) == [0, 80 * MIB]
    assert allocator.reserved_bytes == 100 * MIB


def test_a_page_with_a_live_block_stays_mapped() -> None:
    allocator, handles = allocator_with(5 * MIB, 30 * MIB, 5 * MIB, expandable_segments=True)
    allocator.free(handles[1])  # 5 to 35 MiB: of pages 0 to 20 and 20 to 40 neither is wholly free
    allocator.empty_cache()
    assert allocator.reserved_bytes == 40 * MIB
    # Of 5 to 55 MiB the page of 20 to 40 is.
    allocator, handles = allocator_with(5 * MIB, 50 * MIB, 5 * MIB, expandable_segments=True)
    allocator.free(handles[1])
    allocator.empty_cache()
    assert allocator.reserved_bytes == 40 * MIB
    # 15 MiB are free on each side of the gap; those in front of it could grow into it, so the others are taken.
    assert offsets(allocator, [handles[0], allocator.allocate(15 * MIB)]) == [0, 40 * MIB]
    assert allocator.reserved_bytes == 40 * MIB
    # 15 MiB and the page make room for 35, of which 20 are mapped anew.
    assert offsets(allocator, [handles[0], allocator.allocate(35 * MIB)]) == [0, 5 * MIB]
    assert allocator.reserved_bytes == 60 * MIB


def test_the_end_of_an_expandable_segment_is_left_to_what_needs_it() -> None:
    # A hole of 12 MiB, and 8 MiB free at the end: the end fits 8 more tightly, but it could become larger.
    allocator, handles = allocator_with(12 * MIB, 20 * MIB, expandable_segments=True)
    allocator.free(handles[0])
    assert offsets(allocator, [handles[1], allocator.allocate(8 * MIB)]) == [0, -12 * MIB]


def test_over_the_limit_the_cache_is_released_and_only_then_it_fails() -> None:
    allocator = CachingAllocator(limit_bytes=40 * MIB)
    first, second = allocator.allocate(20 * MIB), allocator.allocate(20 * MIB)
    allocator.free(first)
    with pytest.raises(SimulatedOutOfMemory, match="22020096 bytes does not fit: 20971520 of 41943040") as failure:
        allocator.allocate(21 * MIB)
    assert isinstance(failure.value, MemoryError)
    assert (failure.value.requested_bytes, failure.value.reserved_bytes) == (21 * MIB, 20 * MIB)
    third = allocator.allocate(18 * MIB)  # the failure left the allocator as it was, with its cache released
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (38 * MIB, 38 * MIB)
    for handle in (second, third):
        allocator.free(handle)
    allocator.allocate(40 * MIB)
    assert allocator.reserved_bytes == allocator.peak_reserved_bytes == 40 * MIB


def test_expandable_segments_fit_under_a_limit_that_fixed_ones_do_not() -> None:
    # Two fixed segments of 20 MiB, each with 9 MiB live and 11 free: neither can go, and 30 more are asked.
    events = [(0, 9 * MIB), (1, 9 * MIB), (2, 9 * MIB), (3, 9 * MIB), (1, -1), (3, -1), (4, 30 * MIB)]
    with pytest.raises(SimulatedOutOfMemory):
        CachingAllocator(limit_bytes=69 * MIB).replay(events)
    assert CachingAllocator(limit_bytes=70 * MIB).replay(events).peak_reserved_bytes == 70 * MIB
    # In one row, the last 13 of 40 MiB are free at the end, and one page more is enough.
    expandable = CachingAllocator(expandable_segments=True, limit_bytes=60 * MIB).replay(events)
    assert expandable.peak_reserved_bytes == 60 * MIB
    with pytest.raises(SimulatedOutOfMemory):
        CachingAllocator(expandable_segments=True, limit_bytes=59 * MIB).replay(events)


def test_peaks_are_those_since_the_reset() -> None:
    allocator, (handle,) = allocator_with(20 * MIB)
    allocator.free(handle)
    assert (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes) == (20 * MIB, 20 * MIB)
    allocator.reset_peaks()
    allocator.allocate(2 * MIB)
    assert (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes) == (2 * MIB, 20 * MIB)


def test_a_replay_names_the_first_event_of_the_peak_and_goes_on_from_an_earlier_one() -> None:
    allocator = CachingAllocator()
    load = allocator.replay([(7, 20 * MIB), (8, 512), (9, 0)])
    assert (load.peak_allocated_bytes, load.peak_reserved_bytes, load.peak_index) == (20 * MIB + 512, 22 * MIB, 1)
    step = allocator.replay([(1, 2 * MIB), (1, -1), (1, 2 * MIB), (9, -1), (7, -1), (7, 4 * MIB)])
    assert (step.peak_allocated_bytes, step.peak_reserved_bytes, step.peak_index) == (22 * MIB + 512, 42 * MIB, 0)
    assert allocator.replay([(7, -1)]).peak_index == -1


def test_what_is_not_live_cannot_be_freed() -> None:
    allocator, (handle,) = allocator_with(100)
    allocator.free(handle)
    with pytest.raises(ValueError, match="Handle 0 is not live"):
        allocator.free(handle)
    with pytest.raises(ValueError, match="Event 1 frees 5"):
        allocator.replay([(6, 100), (5, -1)])
    with pytest.raises(ValueError, match="Event 0 allocates 6"):
        allocator.replay([(6, 100)])
    with pytest.raises(ValueError, match="-2 bytes"):
        allocator.allocate(-2)


SIZES = st.one_of(
    st.integers(0, 2 * MIB),
    st.integers(0, 48 * MIB),
    st.sampled_from([512, MIB, MIB + 1, 2 * MIB, 5 * MIB, 10 * MIB - 512, 10 * MIB, 11 * MIB, 20 * MIB, 40 * MIB]),
)
STEPS = st.lists(st.one_of(SIZES, st.just("empty"), st.tuples(st.just("free"), st.integers(0, 99))), max_size=60)


@given(STEPS, st.booleans(), st.none() | st.integers(0, 150 * MIB))
def test_live_blocks_never_overlap_and_the_sums_are_right(
    steps: list[int | str | tuple[str, int]], expandable_segments: bool, limit_bytes: int | None
) -> None:
    allocator = CachingAllocator(expandable_segments=expandable_segments, limit_bytes=limit_bytes)
    live: dict[int, int] = {}
    for step in steps:
        if isinstance(step, int):
            try:
                live[allocator.allocate(step)] = step
            except SimulatedOutOfMemory as failure:
                assert failure.reserved_bytes == allocator.reserved_bytes
        elif step == "empty":
            allocator.empty_cache()
        elif live:
            handle = list(live)[int(step[1]) % len(live)]
            del live[handle]
            allocator.free(handle)
        ranges = sorted((allocator.placement(handle) for handle in live), key=lambda r: (r.start, r.stop))
        assert all(len(allocator.placement(handle)) >= size for handle, size in live.items())
        assert all(one.stop <= two.start for one, two in pairwise(ranges) if two)
        assert sum(map(len, ranges)) == allocator.allocated_bytes <= allocator.reserved_bytes
        assert allocator.reserved_bytes % (2 * MIB) == 0
        assert limit_bytes is None or allocator.reserved_bytes <= limit_bytes
    for handle in live:
        allocator.free(handle)
    allocator.empty_cache()
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 0)


@dataclass
class NaiveAllocator:
    """Fixed segments the slow way: each is (small, lengths with a flag), and every request looks at all of them."""

    segments: list[tuple[bool, list[list[int]]]] = field(default_factory=list)

    def allocate(self, key: int, size_bytes: int) -> None:
        size = (size_bytes + 511) // 512 * 512
        small = size <= MIB
        fits = [
            (block[0], s, b)
            for s, (segment_small, blocks) in enumerate(self.segments)
            for b, block in enumerate(blocks)
            if segment_small == small and block[1] < 0 and block[0] >= size
        ]
        if not fits:
            new = 2 * MIB if small else 20 * MIB if size < 10 * MIB else (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
            self.segments.append((small, [[new, -1]]))
            fits = [(new, len(self.segments) - 1, 0)]
        length, s, b = min(fits)
        rest = length - size
        cut = rest >= 512 if small else rest > MIB
        self.segments[s][1][b : b + 1] = [[size, key], [rest, -1]] if cut else [[length, key]]

    def free(self, key: int) -> None:
        for _, blocks in self.segments:
            for block in blocks:
                block[1] = -1 if block[1] == key else block[1]
            for b in range(len(blocks) - 1, 0, -1):
                if blocks[b][1] < 0 and blocks[b - 1][1] < 0:
                    blocks[b - 1][0] += blocks.pop(b)[0]

    def totals(self) -> tuple[int, int]:
        blocks = [block for _, blocks in self.segments for block in blocks]
        return sum(length for length, key in blocks if key >= 0), sum(length for length, _ in blocks)


@given(st.lists(st.one_of(SIZES.filter(bool), st.tuples(st.integers(0, 99))), max_size=60))
def test_the_slow_way_agrees(steps: list[int | tuple[int]]) -> None:
    allocator, naive, live = CachingAllocator(), NaiveAllocator(), list[int]()
    for step in steps:
        if isinstance(step, int):
            live.append(allocator.allocate(step))
            naive.allocate(live[-1], step)
        elif live:
            handle = live.pop(step[0] % len(live))
            allocator.free(handle)
            naive.free(handle)
        assert (allocator.allocated_bytes, allocator.reserved_bytes) == naive.totals()
