"""A model of torch's CUDA caching allocator: what a trace of allocations makes it reserve on the card.

Saves nothing; tells how much more than the live tensors a run takes from the card, on a machine without one.
Costs pure Python, a few microseconds per event.

Rules, read from torch 2.13 (`c10/core/AllocatorConfig.h`, installed with torch, for the sizes) and from
`c10/cuda/CUDACachingAllocator.cpp` of pytorch/pytorch (commit 001074d2 for the placement, its "Note [Expandable
Segments]" for the pages):

- A request is rounded up to 512 bytes (kMinBlockSize); up to 1 MiB (kSmallSize) it goes to the small pool, else to the
  large one. A request of 0 bytes takes nothing.
- The pool's smallest free block that fits is taken, of equal ones that at the lowest address. It is split where
  the rest is at least 512 bytes (small pool, or expandable segments) or more than 1 MiB (large pool); otherwise the
  whole block counts as allocated.
- Where none fits, the small pool asks the driver for a segment of 2 MiB (kSmallBuffer); the large one for 20 MiB
  when the request is under 10 MiB (large_segment_size, kMinLargeAlloc), else for the request rounded up to 2 MiB
  (kRoundLarge).
- A freed block merges with free neighbours of its segment. Segments stay reserved until `empty_cache`, which torch
  also calls when the driver refuses a segment; it gives back the segments without a live block.
- With expandable segments a pool has one segment, mapped in pages of 2 MiB (small) or 20 MiB (large). It grows at
  the lowest address where free blocks and unmapped pages in a row have room, which is its end as long as nothing was
  unmapped. Best fit takes a block in front of unmapped pages for as large as it could become. `empty_cache`
  unmaps the pages that lie wholly inside free blocks.

Not modelled: several streams, CUDA graphs, the settings other than expandable_segments, and where the driver puts a new
segment (here always above the earlier ones; it decides only between free blocks of equal size).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

__all__ = ["CachingAllocator", "Replay", "SimulatedOutOfMemory"]

MIB = 1 << 20
MIN_BLOCK_BYTES = 512
MAX_SMALL_BYTES = MIB
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
MIN_OWN_SEGMENT_BYTES = 10 * MIB
OWN_SEGMENT_STEP_BYTES = 2 * MIB

LARGE_POOL_ADDRESS = 1 << 60
"""The small pool's addresses begin at 0, far below."""
UNMAPPED_PAGES = 1 << 30
"""Address space of an expandable segment: endless. Torch's has 1 1/8 of the card, and a second one follows it."""


class SimulatedOutOfMemory(MemoryError):
    """A request that does not fit under the limit even after the cached segments are given back; sizes in bytes."""

    def __init__(self, requested_bytes: int, reserved_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"A request of {requested_bytes} bytes does not fit: {reserved_bytes} of {limit_bytes} bytes stay reserved."
        )
        self.requested_bytes = requested_bytes
        self.reserved_bytes = reserved_bytes
        self.limit_bytes = limit_bytes


@dataclass(frozen=True, slots=True)
class Replay:
    """Peaks of a replay, in bytes, and where the first was.

    `peak_index` is the event, from 0, that first made `peak_allocated_bytes`; -1 where none went above what was
    allocated before the replay.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_index: int


class CachingAllocator:
    """Places allocations as torch does. `limit_bytes` is what the driver gives at most, None without limit.

    torch.cuda's `memory_allocated` and `memory_reserved` are `allocated_bytes` and `reserved_bytes` here.

    >>> allocator = CachingAllocator()
    >>> weight, bias = allocator.allocate(12 << 20), allocator.allocate(100)
    >>> allocator.allocated_bytes - (12 << 20), allocator.reserved_bytes >> 20
    (512, 14)
    >>> allocator.free(weight)
    >>> allocator.reserved_bytes >> 20
    14
    >>> allocator.empty_cache()
    >>> allocator.reserved_bytes >> 20
    2
    """

    def __init__(self, *, expandable_segments: bool = False, limit_bytes: int | None = None) -> None:
        kind = _ExpandableSegment if expandable_segments else _FixedSegments
        self._small: _Pool = kind(small=True)
        self._large: _Pool = kind(small=False)
        self._limit_bytes = limit_bytes
        self._live: dict[int, tuple[_Pool, _Block] | None] = {}
        self._handles: dict[int, int] = {}
        self._next_handle = 0
        self.allocated_bytes = 0
        """Bytes of the live blocks, each as large as it was cut."""
        self.reserved_bytes = 0
        """Bytes taken from the driver."""
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0

    def allocate(self, size_bytes: int) -> int:
        """Place `size_bytes` and return a handle for `free`.

        Raises SimulatedOutOfMemory over the limit, ValueError for a negative size.
        """
        if size_bytes < 0:
            raise ValueError(f"An allocation has {size_bytes} bytes; it needs 0 or more.")
        handle = self._next_handle
        self._live[handle] = self._place(_round_up(size_bytes, MIN_BLOCK_BYTES)) if size_bytes else None
        self._next_handle += 1
        return handle

    def free(self, handle: int) -> None:
        """Free an allocation; its memory stays reserved. Raises ValueError when it is not live."""
        if handle not in self._live:
            raise ValueError(f"Handle {handle} is not live; free what `allocate` returned, once.")
        placed = self._live.pop(handle)
        if placed:
            pool, block = placed
            self.allocated_bytes -= block.size
            pool.blocks.give_back(block)

    def placement(self, handle: int) -> range:
        """The addresses of a live allocation, empty for one of 0 bytes. Raises KeyError when it is not live."""
        placed = self._live[handle]
        return range(placed[1].address, placed[1].address + placed[1].size) if placed else range(0)

    def empty_cache(self) -> None:
        """Give back what is wholly free: segments, or pages of expandable ones."""
        self.reserved_bytes -= self._large.release() + self._small.release()

    def reset_peaks(self) -> None:
        """Let the peaks begin at what is allocated and reserved now."""
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def replay(self, events: Iterable[tuple[int, int]]) -> Replay:
        """Run (key, bytes) allocations and (key, -1) frees in order, from the present state, and return the peaks.

        A key lives from its allocation to its free and may then be used again; a later replay may free what an
        earlier one allocated. Raises SimulatedOutOfMemory over the limit, ValueError for a key allocated twice or
        freed without being live.

        >>> CachingAllocator().replay([(1, 12 << 20), (2, 512), (1, -1), (1, 600)])
        Replay(peak_allocated_bytes=12583424, peak_reserved_bytes=14680064, peak_index=1)
        """
        self.reset_peaks()
        peak_index = -1
        for index, (key, size_bytes) in enumerate(events):
            if size_bytes == -1:
                if key not in self._handles:
                    raise ValueError(f"Event {index} frees {key}, which is not live.")
                self.free(self._handles.pop(key))
                continue
            if key in self._handles:
                raise ValueError(f"Event {index} allocates {key}, which is live already; free it first.")
            peak_before = self.peak_allocated_bytes
            self._handles[key] = self.allocate(size_bytes)
            if self.peak_allocated_bytes > peak_before:
                peak_index = index
        return Replay(self.peak_allocated_bytes, self.peak_reserved_bytes, peak_index)

    def _place(self, size: int) -> tuple[_Pool, _Block]:
        pool = self._small if size <= MAX_SMALL_BYTES else self._large
        block = pool.take(size) or self._grow(pool, size)
        pool.blocks.use(block, size)
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return pool, block

    def _grow(self, pool: _Pool, size: int) -> _Block:
        if self._exceeds_limit(pool, size):
            self.empty_cache()
            if self._limit_bytes is not None and self._exceeds_limit(pool, size):
                raise SimulatedOutOfMemory(size, self.reserved_bytes, self._limit_bytes)
        self.reserved_bytes += pool.growth_bytes(size)
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return pool.grow(size)

    def _exceeds_limit(self, pool: _Pool, size: int) -> bool:
        return self._limit_bytes is not None and self.reserved_bytes + pool.growth_bytes(size) > self._limit_bytes


@dataclass(slots=True, eq=False)
class _Block:
    """A range of addresses of one segment, and its neighbours there.

    It is in use, or in one of the lists of `_Blocks`, or on its way from one to the other.
    """

    address: int
    size: int
    before: _Block | None = None
    after: _Block | None = None
    in_use: bool = False
    mapped: bool = True


class _Sized(NamedTuple):
    """An entry of the free list: ordered by size, then address; the block is never compared, as addresses differ."""

    size: int
    address: int
    block: _Block


class _Blocks:
    """The blocks of a pool that are not in use, and how blocks are cut and joined."""

    def __init__(self, min_rest_bytes: int) -> None:
        self._min_rest_bytes = min_rest_bytes
        self.free: list[_Sized] = []
        self.unmapped: list[tuple[int, _Block]] = []
        """(address, block) in order; only expandable segments have such blocks."""

    def add(self, block: _Block) -> None:
        """Put a block that is not in use into the list it belongs to."""
        if block.mapped:
            insort(self.free, _Sized(block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def remove(self, block: _Block) -> None:
        """Take a block out of its list; its size must be the one it was added with."""
        # A tuple sorts right before a longer one that begins with it.
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]

    def use(self, block: _Block, size: int) -> None:
        """Cut the block to `size` if the rest is worth it, and mark it as in use."""
        if block.size - size >= self._min_rest_bytes:
            self.add(self.cut(block, size))
        block.in_use = True

    def cut(self, block: _Block, size: int) -> _Block:
        """Cut the block, in no list, to `size`, and return the rest, in no list either."""
        rest = _Block(block.address + size, block.size - size, block, block.after, mapped=block.mapped)
        if block.after:
            block.after.before = rest
        block.size, block.after = size, rest
        return rest

    def give_back(self, block: _Block) -> _Block:
        """Join a block, in no list, with the neighbours that are like it, add the result and return it."""
        block.in_use = False
        if (after := block.after) and _alike(block, after):
            self.remove(after)
            _join(block, after)
        if (before := block.before) and _alike(before, block):
            self.remove(before)
            _join(before, block)
            block = before
        self.add(block)
        return block


class _Pool(Protocol):
    """A pool with one kind of segments."""

    blocks: _Blocks

    def __init__(self, *, small: bool) -> None: ...

    def take(self, size: int) -> _Block | None:
        """The free block to use for `size`, taken out of its list, or None."""

    def growth_bytes(self, size: int) -> int:
        """What `grow` would take from the driver now."""

    def grow(self, size: int) -> _Block:
        """Take memory from the driver for a block of at least `size` bytes, in no list."""

    def release(self) -> int:
        """Give back to the driver what is wholly free, and return how many bytes that was."""


class _FixedSegments(_Pool):
    """Segments that keep the size they were asked for with."""

    def __init__(self, *, small: bool) -> None:
        # Sizes are multiples of 512: this much is the least above 1 MiB.
        self.blocks = _Blocks(MIN_BLOCK_BYTES if small else MAX_SMALL_BYTES + MIN_BLOCK_BYTES)
        self._next_address = 0 if small else LARGE_POOL_ADDRESS

    def take(self, size: int) -> _Block | None:
        free = self.blocks.free
        index = bisect_left(free, (size,))
        return free.pop(index).block if index < len(free) else None

    def growth_bytes(self, size: int) -> int:
        if size <= MAX_SMALL_BYTES:
            return SMALL_SEGMENT_BYTES
        return LARGE_SEGMENT_BYTES if size < MIN_OWN_SEGMENT_BYTES else _round_up(size, OWN_SEGMENT_STEP_BYTES)

    def grow(self, size: int) -> _Block:
        block = _Block(self._next_address, self.growth_bytes(size))
        self._next_address += block.size
        return block

    def release(self) -> int:
        whole = [entry.block for entry in self.blocks.free if not (entry.block.before or entry.block.after)]
        for block in whole:
            self.blocks.remove(block)
        return sum(block.size for block in whole)


class _ExpandableSegment(_Pool):
    """One segment, mapped page by page."""

    def __init__(self, *, small: bool) -> None:
        self._page_bytes = SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES
        self._base = 0 if small else LARGE_POOL_ADDRESS
        self.blocks = _Blocks(MIN_BLOCK_BYTES)
        self.blocks.add(_Block(self._base, UNMAPPED_PAGES * self._page_bytes, mapped=False))

    def take(self, size: int) -> _Block | None:
        free = self.blocks.free
        index = bisect_left(free, (size,))
        if index == len(free):
            return None
        while index + 1 < len(free) and _room(free[index + 1].block) < _room(free[index].block):
            index += 1
        return free.pop(index).block

    def growth_bytes(self, size: int) -> int:
        block: _Block | None = self._lowest_room(size)
        mapped = covered = 0
        while block and covered < size:
            gained = block.size if block.mapped else self._pages_of(block, size - covered)
            mapped += 0 if block.mapped else gained
            covered += gained
            block = block.after
        return mapped

    def grow(self, size: int) -> _Block:
        block = self._lowest_room(size)
        if not block.mapped:
            block = self._map(block, size)
        while block.size < size:
            assert block.after is not None and not block.after.mapped
            block = self._map(block.after, size - block.size)
        self.blocks.remove(block)
        return block

    def release(self) -> int:
        return sum(self._unmap(entry.block) for entry in [*self.blocks.free])

    def _lowest_room(self, size: int) -> _Block:
        """The first of blocks in a row, free or unmapped, that together have room; the row has unmapped pages."""
        starts = (gap.before if gap.before and not gap.before.in_use else gap for _, gap in self.blocks.unmapped)
        return next(start for start in starts if _has_room(start, size))

    def _pages_of(self, gap: _Block, size: int) -> int:
        """Bytes of the pages of an unmapped block to map for `size`, or for as much of it as there is."""
        return min(gap.size, _round_up(size, self._page_bytes))

    def _map(self, gap: _Block, size: int) -> _Block:
        """Map the first pages of an unmapped block; returns the free block, joined and listed, that they are in."""
        self.blocks.remove(gap)
        pages = self._pages_of(gap, size)
        if pages < gap.size:
            self.blocks.add(self.blocks.cut(gap, pages))
        gap.mapped = True
        return self.blocks.give_back(gap)

    def _unmap(self, block: _Block) -> int:
        """Unmap the pages wholly inside a free block; returns their bytes."""
        start = self._base + _round_up(block.address - self._base, self._page_bytes)
        end = block.address + block.size
        end -= (end - self._base) % self._page_bytes
        if start >= end:
            return 0
        self.blocks.remove(block)
        pages = block
        if start > block.address:
            pages = self.blocks.cut(block, start - block.address)
            self.blocks.add(block)
        if pages.address + pages.size > end:
            self.blocks.add(self.blocks.cut(pages, end - start))
        pages.mapped = False
        self.blocks.give_back(pages)
        return end - start


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step


def _alike(lower: _Block, higher: _Block) -> bool:
    """Whether two neighbours are both free, or both unmapped."""
    return not lower.in_use and not higher.in_use and lower.mapped == higher.mapped


def _join(lower: _Block, higher: _Block) -> None:
    lower.size += higher.size
    lower.after = higher.after
    if higher.after:
        higher.after.before = lower


def _room(block: _Block) -> int:
    """What a free block can become: its size and that of the unmapped pages behind it."""
    return block.size + (block.after.size if block.after and not block.after.mapped else 0)


def _has_room(start: _Block, size: int) -> bool:
    block: _Block | None = start
    while block and not block.in_use and size > 0:
        size -= block.size
        block = block.after
    return size <= 0
