"""How many bytes of tensors are alive while code runs: counted from the operations, not asked from the machine.

Saves nothing; measures what the other modules save, on any device and on fake tensors, and gives the same numbers on
every run (resident memory and allocator statistics do not). Costs one Python call per operation.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["LiveBytes"]


class LiveBytes(TorchDispatchMode):
    """Context manager with `live_bytes` and `peak_bytes` of the storages made inside it.

    What existed before counts 0, views count once. Memory an operation uses inside its kernel is not seen.

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

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for tensor in _tensors((args, kwargs)):
            self._see(tensor, made_here=False)
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._see(tensor, made_here=True)
        return result

    def _see(self, tensor: torch.Tensor, *, made_here: bool) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._known:
            return
        size_bytes = storage.nbytes() if made_here else 0
        self._known.add(storage._cdata)
        self.live_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._forget, storage._cdata, size_bytes)

    def _forget(self, key: int, size_bytes: int) -> None:
        self._known.discard(key)
        self.live_bytes -= size_bytes


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
