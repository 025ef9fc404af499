"""Where models come from, and what they run on.

`inspect_model` looks, `resolve_model` fetches; `detect_card` describes the device and `compute_dtype` chooses for it.
"""

from __future__ import annotations

from lowmem_grpo.catalog.cards import CARDS, CardSpec, compute_dtype, detect_card, known_card
from lowmem_grpo.catalog.embedded import SMOLLM2_135M, EmbeddedSource, cache_root
from lowmem_grpo.catalog.folder import FAMILIES
from lowmem_grpo.catalog.models import ALIASES, EMBEDDED, ModelInfo, ResolvedModel, inspect_model, resolve_model
from lowmem_grpo.catalog.progress import Progress, download_bar, no_progress

__all__ = [
    "ALIASES",
    "CARDS",
    "EMBEDDED",
    "FAMILIES",
    "SMOLLM2_135M",
    "CardSpec",
    "EmbeddedSource",
    "ModelInfo",
    "Progress",
    "ResolvedModel",
    "cache_root",
    "compute_dtype",
    "detect_card",
    "download_bar",
    "inspect_model",
    "known_card",
    "no_progress",
    "resolve_model",
]
