"""A memory that runs out on purpose: functions that raise at some of their calls, as an allocator does."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

ALWAYS = range(1, 10**9)
"""All calls."""


@dataclass
class Shortage:
    """The calls, counted from 1, that find no memory.

    Each holds a tensor in its frame when it fails, and the next call of whatever was `given` insists that it is gone: a
    recovery that begins while the error is still there would have freed nothing.
    """

    fails: Container[int] = ()
    calls: int = 0
    held: list[weakref.ref[Tensor]] = field(default_factory=list)

    def given(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which from now on needs memory."""

        @functools.wraps(function)
        def needing(*args: Any, **kwargs: Any) -> Any:
            self.need()
            return function(*args, **kwargs)

        return needing

    def need(self, *_: Any) -> None:
        """One call."""
        self.calls += 1
        assert all(tensor() is None for tensor in self.held), "what the failed call held is still there"
        if self.calls in self.fails:
            self._run_out()

    def _run_out(self) -> None:
        activations = torch.zeros(8)
        self.held.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
