"""Where models come from, and what they run on.

`inspect_model` looks, `resolve_model` fetches, `shape_of` says how big; `detect_card` describes the device,
`card_named` one that need not be here; `compute_dtype` chooses for it.
"""

from __future__ import annotations

from lowmem_grpo.catalog.cards import CARDS, CardSpec, card_named, compute_dtype, detect_card, known_card
from lowmem_grpo.catalog.embedded import SMOLLM2_135M, EmbeddedSource, cache_root
from lowmem_grpo.catalog.folder import FAMILIES
from lowmem_grpo.catalog.known import KNOWN, KnownModel, known_model
from lowmem_grpo.catalog.models import (
    ALIASES,
    EMBEDDED,
    ModelInfo,
    ResolvedModel,
    embedded_source,
    inspect_model,
    resolve_model,
    shape_of,
)
from lowmem_grpo.catalog.progress import Progress, download_bar, no_progress
from lowmem_grpo.catalog.shapes import LinearShape, ModelShape, model_shape

__all__ = [
    "ALIASES",
    "CARDS",
    "EMBEDDED",
    "FAMILIES",
    "KNOWN",
    "SMOLLM2_135M",
    "CardSpec",
    "EmbeddedSource",
    "KnownModel",
    "LinearShape",
    "ModelInfo",
    "ModelShape",
    "Progress",
    "ResolvedModel",
    "cache_root",
    "card_named",
    "compute_dtype",
    "detect_card",
    "download_bar",
    "embedded_source",
    "inspect_model",
    "known_card",
    "known_model",
    "model_shape",
    "no_progress",
    "resolve_model",
    "shape_of",
]
