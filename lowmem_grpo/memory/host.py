"""Which tensors lie in host memory: on a machine without a GPU, and on fake tensors, the device does not tell."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["host_memory", "in_host_memory"]

_HOST: ContextVar[bool] = ContextVar("host", default=False)


@contextmanager
def host_memory() -> Iterator[None]:
    """Inside, new tensors are made for the host: `memory.trace` does not count them to the device."""
    token = _HOST.set(True)
    try:
        yield
    finally:
        _HOST.reset(token)


def in_host_memory() -> bool:
    """Whether a tensor made now is made for the host."""
    return _HOST.get()
