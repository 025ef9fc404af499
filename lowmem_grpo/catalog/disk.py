"""Room on the disk, asked before anything is fetched."""

from __future__ import annotations

import shutil
from pathlib import Path

from lowmem_grpo.errors import ModelError

__all__ = ["free_bytes", "gigabytes", "require_free"]


def free_bytes(folder: Path) -> int:
    """Free bytes on the disk of `folder`, which need not exist yet."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def require_free(folder: Path, needed_bytes: int, name: str, variable: str) -> None:
    """Raise ModelError when fewer than `needed_bytes` are free at `folder`; `variable` is what moves that folder."""
    free = free_bytes(folder)
    if free < needed_bytes:
        raise ModelError(
            f"{name} needs {gigabytes(needed_bytes)} of disk at {folder} and only {gigabytes(free)} are free; "
            f"make room, or set {variable} to a folder on a larger disk."
        )


def gigabytes(count: int) -> str:
    """A byte count for a sentence, in units of 10^9.

    >>> gigabytes(98_000_000)
    '0.10 GB'
    """
    return f"{count / 1e9:.2f} GB"
