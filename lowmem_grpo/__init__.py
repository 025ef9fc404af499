"""Teach a small language model your own task by GRPO, on one consumer GPU, with one copy of the weights.

The public names are below; nothing heavy is imported before one of them is used.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowmem_grpo.api import Run, baseline, evaluate, load, plan, score, train
    from lowmem_grpo.config import Config

__all__ = ["Config", "Run", "baseline", "evaluate", "load", "plan", "score", "train"]

# On some CPUs it asks, at its import, for a package that speeds up what is decoded only once here.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("lowmem_grpo.config" if name == "Config" else "lowmem_grpo.api"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
