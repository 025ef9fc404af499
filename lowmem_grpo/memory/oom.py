"""Out of memory, survived: what counts as it, what is freed then, and which settings were lowered.

Saves: the run. A stage that runs out of memory gives back what it holds, halves a setting and does its work again.
Costs: the work since the last safe point (the prefill of the rows in work, or the micro-batches of one gradient).
Bytes: none.

How a stage recovers:

    try:
        return work()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    release_memory(device)  # not inside the block: the error's traceback holds the frames that hold the tensors
    ...

A wrong guess costs little: what is no lack of memory fails again, however small the pieces, and ends the run.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

__all__ = ["Limits", "OnOutOfMemory", "Recovery", "is_out_of_memory", "release_memory"]

MARKS = (
    "out of memory",  # CUDA and its driver, pinned host memory (cudaHostAlloc), other backends
    "DefaultCPUAllocator:",  # "can't allocate memory" on Linux, "not enough memory" on Windows
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
"""What the messages of plain RuntimeErrors say when memory was asked for and not given."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """What was done about an out-of-memory: a sentence for the user, and what settings were lowered to.

    >>> Recovery("It goes on with 4 answers at a time.", {"max_concurrent": 4}).lowered["max_concurrent"]
    4
    """

    sentence: str
    lowered: Mapping[str, int] = field(default_factory=dict)


OnOutOfMemory = Callable[[Recovery], None]
"""Called after each recovery, before the work begins again."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was asked for and not given, on the card or on the host.

    >>> is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    True
    >>> is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    False
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in MARKS)


def release_memory(device: torch.device) -> None:
    """Free what only cycles hold, and give the allocator's free segments back to the card."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class Limits:
    """The settings that stages lower when they run out of memory, for the checkpoint of a run.

    `places` says of each where it is now: an object and the name of its attribute. What it is when this is made is what
    was configured.

    >>> from types import SimpleNamespace
    >>> engine = SimpleNamespace(max_concurrent=8)
    >>> limits = Limits({"rollout.max_concurrent": (engine, "max_concurrent")})
    >>> engine.max_concurrent = 4
    >>> limits.lowered()
    {'rollout.max_concurrent': [8, 4]}
    """

    def __init__(self, places: Mapping[str, tuple[object, str]]) -> None:
        self._places = dict(places)
        self._configured = {name: getattr(*place) for name, place in self._places.items()}

    def lowered(self) -> dict[str, list[int | None]]:
        """Name -> [configured, now] of those that are no longer as configured; JSON values."""
        now = {name: getattr(*place) for name, place in self._places.items()}
        return {name: [before, now[name]] for name, before in self._configured.items() if now[name] != before}

    def restore(self, lowered: Mapping[str, Sequence[int | None]]) -> dict[str, int | None]:
        """Lower again what `lowered()` of an earlier process says; returns name -> value of what was lowered.

        A limit belongs to the configured value that it was lowered from: where another is configured now, it is void.
        """
        configured = self._configured
        valid = {
            name: now for name, (before, now) in lowered.items() if name in configured and configured[name] == before
        }
        for name, value in valid.items():
            owner, attribute = self._places[name]
            setattr(owner, attribute, value)
        return valid
