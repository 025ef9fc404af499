"""Set up torch's CUDA allocator once, before the first allocation on the card: little waste, and an error at the end.

Saves what fixed segments waste when sizes change from step to step (`memory.allocator` replays both ways).
Costs nothing measurable after the first growth; on Windows the margin below, so that it never spills.

What is known, and what follows:

- Torch reads PYTORCH_ALLOC_CONF, then its alias PYTORCH_CUDA_ALLOC_CONF (libc10 of 2.13, `c10/core/AllocatorConfig.h`;
  2.9.1 ignored the first for CUDA, 2.11 does not: pytorch issue 183387). It may have read them by the time this runs,
  so `torch._C._accelerator_setAllocatorSettings` sets the allocator, the call that torch 2.13 names in place of
  the deprecated `torch.cuda.memory._set_allocator_settings`. What the user has set stays as it is.
- Native Windows: builds up to 2.13 have no expandable segments and only warn (`c10/cuda/CUDAAllocatorConfig.h`;
  pytorch pull request 189163 ports them).
- WSL2: with drivers before R615 the first allocation in an expandable segment can fail with "CUDA driver error"
  (pytorch issue 192330, a fault of the WSL driver that NVIDIA confirmed). So both keep fixed segments.
- On Windows the driver moves memory into system memory instead of refusing it (CUDA Sysmem Fallback Policy, since
  driver 536.40), and under WSL2 the policy that forbids it is not respected (microsoft/WSL issue 11050). So there the
  process gets a cap, at which torch raises `torch.OutOfMemoryError`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from lowmem_grpo.types import Card

__all__ = [
    "AllocatorSetup",
    "CudaAllocator",
    "TorchCudaAllocator",
    "cap_bytes",
    "configure_allocator",
    "is_wsl_or_windows",
    "uses_expandable_segments",
]

USER_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""In the order in which torch looks for settings that are not CUDA's alone; the first that is set counts."""

EXPANDABLE = "expandable_segments:True"

MIN_MARGIN_BYTES = 512 << 20
MARGIN_SHARE = 0.05
"""Of the card, for what the desktop and CUDA itself may still take. An assumption until measured."""


@dataclass(frozen=True, slots=True)
class AllocatorSetup:
    """What the allocator of this run was set to, for environment.json.

    `user_settings` are the variables that the user had set, by name. `cap_bytes` is None where nothing was capped.

    >>> AllocatorSetup(expandable_segments=True).to_json()
    {'expandable_segments': True, 'cap_bytes': None, 'user_settings': {}}
    """

    expandable_segments: bool = False
    cap_bytes: int | None = None
    user_settings: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)


class CudaAllocator(Protocol):
    """The three calls into torch that this needs."""

    def set_settings(self, settings: str) -> None:
        """Set the allocator, in the notation of PYTORCH_ALLOC_CONF."""

    def memory(self, device: str) -> tuple[int, int]:
        """(free, total) bytes of the device."""

    def set_fraction(self, fraction: float, device: str) -> None:
        """Let this process reserve at most that share of the device's total memory."""


class TorchCudaAllocator:
    """`CudaAllocator` on the real thing."""

    def set_settings(self, settings: str) -> None:
        torch._C._accelerator_setAllocatorSettings(settings)

    def memory(self, device: str) -> tuple[int, int]:
        return torch.cuda.mem_get_info(device)

    def set_fraction(self, fraction: float, device: str) -> None:
        # "cuda" without an index is refused here, though mem_get_info takes it; None is the current device.
        torch.cuda.set_per_process_memory_fraction(fraction, torch.device(device).index)


def configure_allocator(
    card: Card,
    *,
    windows: bool | None = None,
    environ: Mapping[str, str] = os.environ,
    allocator: CudaAllocator | None = None,
) -> AllocatorSetup:
    """Set up the allocator of this process for the card; call it before the first allocation there.

    Expandable segments on Linux, a cap below the free memory on Windows and WSL (`windows`, asked of the machine when
    None), nothing on a CPU. Where the user has set PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF the segments stay as
    that says, and so does a `per_process_memory_fraction` in it.
    """
    if card.device == "cpu":
        return AllocatorSetup()
    windows = is_wsl_or_windows() if windows is None else windows
    allocator = allocator or TorchCudaAllocator()
    user_settings = {name: environ[name] for name in USER_VARIABLES if environ.get(name)}
    expandable = uses_expandable_segments(windows=windows, environ=environ)
    if expandable and not user_settings:
        allocator.set_settings(EXPANDABLE)
    cap = None
    if windows and not any("per_process_memory_fraction" in settings for settings in user_settings.values()):
        free, total = allocator.memory(card.device)
        cap = cap_bytes(free, total)
        allocator.set_fraction(cap / total, card.device)
    return AllocatorSetup(expandable, cap, user_settings)


def uses_expandable_segments(*, windows: bool, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a run has expandable segments: as the user's settings say, else everywhere but on Windows and WSL.

    >>> uses_expandable_segments(windows=False, environ={})
    True
    >>> uses_expandable_segments(windows=False, environ={"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"})
    False
    """
    settings = next((environ[name] for name in USER_VARIABLES if environ.get(name)), None)
    if settings is None:
        return not windows
    return EXPANDABLE in settings.replace(" ", "").split(",")


def cap_bytes(free_bytes: int, total_bytes: int) -> int:
    """What the allocator may reserve of a card under Windows: the free memory less 5 % of the card, 512 MiB at least.

    >>> cap_bytes(7 << 30, 8 << 30) / (1 << 30)
    6.5
    """
    return max(0, free_bytes - max(MIN_MARGIN_BYTES, round(MARGIN_SHARE * total_bytes)))


def is_wsl_or_windows(platform: str = sys.platform, version_file: Path = Path("/proc/version")) -> bool:
    """Whether Windows manages the card's memory: natively, or under WSL, whose kernel says that it is Microsoft's."""
    if platform != "linux":
        return platform == "win32"
    try:
        return "microsoft" in version_file.read_text().lower()
    except OSError:
        return False
