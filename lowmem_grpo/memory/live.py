"""How many bytes of tensors are alive while code runs: counted from the operations, not asked from the machine.

Saves nothing; measures what the other modules save, on any device and on fake tensors, and gives the same numbers on
every run (resident memory and allocator statistics do not). Costs one Python call per operation.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lowmem_grpo.memory.host import in_host_memory

__all__ = ["LiveBytes", "tensors_in"]

_DEVICE = torch.ops.prim.device.default
"""Fake tensors are asked for their device as often as for everything else together."""


class LiveBytes(TorchDispatchMode):
    """Context manager with `live_bytes` and `peak_bytes` of the storages made inside it.

    What existed before counts 0 unless it was given to `count`, what is made for the host counts 0, views count once.
    Memory an operation uses inside its kernel is not seen, nor what `torch.tensor` makes of numbers.

    >>> with LiveBytes() as live:
    ...     x = torch.zeros(100) + 1  # the zeros die once the sum exists
    >>> live.live_bytes, live.peak_bytes
    (400, 800)
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known: set[int] = set()
        self._made = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch wraps every call of `__torch_dispatch__` in two more

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not _DEVICE and (unknown := self._unknown(tensors_in(result))):
            # What went in was there before, or is known.
            given = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
            for key, storage in unknown.items():
                if key not in given:
                    self._remember(storage, 0 if in_host_memory() else storage.nbytes(), func)
        return result

    def count(self, tensors: Iterable[torch.Tensor], what: object) -> None:
        """Let tensors that were made before count."""
        for storage in self._unknown(tensors).values():
            self._remember(storage, storage.nbytes(), what)

    def on_made(self, number: int, size_bytes: int, what: object) -> None:
        """A storage was made by `what`, mostly an operation; numbers rise and are never used twice."""
        self.live_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def on_freed(self, number: int, size_bytes: int) -> None:
        """A storage that `on_made` heard of is gone."""
        self.live_bytes -= size_bytes

    def next_number(self) -> int:
        """A number for the next thing that is made."""
        self._made += 1
        return self._made

    def _unknown(self, tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
        """The storages of the tensors that were not heard of before, by their address."""
        storages = [tensor.untyped_storage() for tensor in tensors]
        return {storage._cdata: storage for storage in storages if storage._cdata not in self._known}

    def _remember(self, storage: torch.UntypedStorage, size_bytes: int, what: object) -> None:
        number = self.next_number()
        self._known.add(storage._cdata)
        weakref.finalize(storage, self._forget, storage._cdata, number, size_bytes)
        if size_bytes:
            self.on_made(number, size_bytes, what)

    def _forget(self, key: int, number: int, size_bytes: int) -> None:
        self._known.discard(key)
        if size_bytes:
            self.on_freed(number, size_bytes)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors among the leaves of nested lists, tuples and dicts.

    >>> len(tensors_in([torch.zeros(1), {"a": (torch.zeros(1), 2)}]))
    2
    """
    if isinstance(tree, torch.Tensor):
        return [tree]
    found: list[torch.Tensor] = []
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, list | tuple):
        return found
    for branch in tree:
        if isinstance(branch, torch.Tensor):
            found.append(branch)
        elif isinstance(branch, list | tuple | dict):
            found += tensors_in(branch)
    return found
