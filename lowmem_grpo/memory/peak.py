"""Measure the peak memory of a phase: allocator peak on a GPU, resident high-water mark of the process on a CPU."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

__all__ = ["PeakProbe"]


class PeakProbe:
    """`reset()` at the start of a phase, `peak_bytes()` at its end.

    On a GPU this is what torch reserved at most, pieces that it could not fill included. On Linux the resident
    high-water mark of the process is reset through /proc; where that is not allowed, the peak is that of the whole
    process so far.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def reset(self) -> None:
        """Forget the peak so far, and on a GPU give back what the allocator holds of the phase before, whose pieces
        have other sizes."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            pass  # not Linux, or not permitted: the mark then covers the whole process

    def peak_bytes(self) -> int:
        """The peak since `reset`, in bytes."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_reserved(self._device)
        try:
            status = Path("/proc/self/status").read_text()
        except OSError:
            return psutil.Process().memory_info().rss
        line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
