"""Every allocation and release of a stretch of code, in order, with the module and the operation that made it.

Replayed through `memory.allocator` it gives what a GPU would have allocated and reserved. Works on real tensors and on
fake ones.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lowmem_grpo.memory.live import LiveBytes

__all__ = ["Allocation", "AllocationTrace"]

Workspace = Callable[[Any, tuple[Any, ...], dict[str, Any]], int]
"""(operation, its arguments) -> bytes that it uses inside its kernel and gives back at its end."""

_BACKWARD = re.compile(r"Backward\d*$")
"""How the name of an autograd node ends, as in `MulBackward0`."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """What is alive at some point: `where` it was made, as in `model.layers.3.mlp: aten.silu.default`."""

    where: str
    bytes: int


class AllocationTrace(LiveBytes):
    """Context manager that writes down `events`: (number, bytes) when something is made, (number, -1) when it is gone.

    `workspace` says what an operation uses inside; `watch` lets the modules of a model be named.
    """

    def __init__(self, workspace: Workspace | None = None) -> None:
        super().__init__()
        self.events: list[tuple[int, int]] = []
        self._made_by: dict[int, tuple[str, object]] = {}
        self._workspace = workspace
        self._modules: list[str] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        inside = self._workspace(func, args, kwargs or {}) if self._workspace else 0
        if not inside:
            return super().__torch_dispatch__(func, types, args, kwargs)
        number = self.next_number()
        self.on_made(number, inside, f"inside {func}")
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.on_freed(number, inside)
        return result

    def on_made(self, number: int, size_bytes: int, what: object) -> None:
        """See `LiveBytes.on_made`."""
        super().on_made(number, size_bytes, what)
        self.events.append((number, size_bytes))
        self._made_by[number] = self._module(), what

    def on_freed(self, number: int, size_bytes: int) -> None:
        """See `LiveBytes.on_freed`."""
        super().on_freed(number, size_bytes)
        self.events.append((number, -1))

    def watch(self, model: nn.Module) -> list[RemovableHandle]:
        """Name allocations by the modules of `model` they are made in; the handles end that."""
        handles = []
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(lambda *_, name=name: self._modules.append(name)))
            handles.append(module.register_forward_hook(lambda *_: self._leave(), always_call=True))
        return handles

    def alive_after(self, index: int) -> list[Allocation]:
        """What is alive right after event `index`, added up by where it was made, the largest first."""
        alive: dict[int, int] = {}
        for number, size_bytes in self.events[: index + 1]:
            if size_bytes < 0:
                alive.pop(number, None)
            else:
                alive[number] = size_bytes
        sums: Counter[tuple[str, object]] = Counter()
        for number, size_bytes in alive.items():
            sums[self._made_by[number]] += size_bytes
        return [Allocation(f"{module}: {what}", size_bytes) for (module, what), size_bytes in sums.most_common()]

    def _leave(self) -> None:
        if self._modules:
            self._modules.pop()

    def _module(self) -> str:
        if self._modules:
            return self._modules[-1]
        node = torch._C._current_autograd_node()
        return "outside the model" if node is None else f"backward of {_BACKWARD.sub('', node.name())}"
