"""Each memory technique switched off alone raises the simulated peak by the bytes it saves, worked out here by hand.

Every run is one in which the technique acts at the peak of its phase, with it and without it. MiB are 2**20 bytes; N
are the tokens of a micro-batch, e = 2 the bytes of a value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lowmem_grpo.catalog.shapes import ModelShape, model_shape
from lowmem_grpo.planning.simulate import Simulation, simulate
from lowmem_grpo.planning.workload import Workload
from lowmem_grpo.types import Card, MemorySettings

CARD = Card("test", "cuda", (8, 6), 12 << 30)
MIB = 1 << 20

Run = tuple[Workload, MemorySettings, bool]
"""What `simulated` takes: the last says whether segments are expandable."""


def llama(**sizes: Any) -> ModelShape:
    """H = 256, I = 1024, 4 query heads and 2 key heads of width 64, so keys are 128 wide; V = 32768, untied."""
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 32768,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    }
    return model_shape({**config, **sizes}, "invented")


def run_of(shape: ModelShape, **values: Any) -> Run:
    """One prompt of 64 tokens with 4 answers of 1024, one per micro-batch (N = 64 + 1023 = 1087), with changes."""
    workload = Workload(
        shape=shape,
        card=CARD,
        dtype="bfloat16",
        quantized=True,
        decoded=False,
        rank=16,
        targets=None,
        optimizer="adamw_8bit",
        prompts_per_step=1,
        group_size=4,
        prompt_tokens=64,
        answer_tokens=1024,
    )
    settings = MemorySettings(max_concurrent=4, micro_batch_tokens=1087)
    return changed((workload, settings, True), **values)


def changed(run: Run, **values: Any) -> Run:
    workload, settings, expandable = run
    of_settings = {name: value for name, value in values.items() if hasattr(settings, name)}
    of_workload = {name: value for name, value in values.items() if hasattr(workload, name)}
    assert len(of_settings) + len(of_workload) == len(values)
    return replace(workload, **of_workload), replace(settings, **of_settings), expandable


@functools.cache
def simulated(run: Run) -> Simulation:
    workload, settings, expandable = run
    return simulate(workload, settings, expandable_segments=expandable)


def allocated(phase: str) -> Callable[[Run], int]:
    return lambda run: simulated(run).phases[phase].allocated_bytes


def reserved(phase: str) -> Callable[[Run], int]:
    return lambda run: simulated(run).phases[phase].reserved_bytes


# 2 layers; the head is the peak of the update: 256 x 32768 logits.
SHALLOW = run_of(llama(), offload_embeddings=True)

# 6 layers with a small vocabulary and hardly any adapter; the backward of the last layer is the peak of the update.
DEEP = run_of(llama(num_hidden_layers=6, vocab_size=4096), rank=1, head_chunk_tokens=64)

# An MLP 8 times as wide as the model: at a quarter of the tokens its backward is more than that of a norm.
WIDE = run_of(llama(intermediate_size=2048, vocab_size=4096), head_chunk_tokens=64, mlp_tile_tokens=272)

# 8 prompts of 256 tokens, an answer of 32 to each, all at once.
READING = run_of(
    llama(vocab_size=4096),
    prompts_per_step=8,
    group_size=1,
    prompt_tokens=256,
    answer_tokens=32,
    max_concurrent=8,
    prefill_tokens=256,
)

# A weight of the MLP takes 1024 x 14336 / 2 = 7 MiB in 4 bits; all others less than 1 MiB, so they are small for torch.
SEVENS = run_of(
    llama(
        num_hidden_layers=4,
        hidden_size=1024,
        intermediate_size=14336,
        num_attention_heads=8,
        num_key_value_heads=1,
        vocab_size=8192,
        tie_word_embeddings=True,
    )
)

# Kept by one layer per token: two norms in fp32, their outputs, q, attention's outputs of the tiles and joined, k and v
# and both again for the tile of the answer, log-sum-exps of 4 heads, and four of width I in the MLP.
KEPT = 2 * 4 * 256 + 2 * 2 * 256 + 3 * 2 * 256 + 4 * 2 * 128 + 4 * 4 + 4 * 2 * 1024

# A forward without gradient, per token: four of width H, cos and sin of 64 each, and n of width I. At few tokens two of
# those beside a decoded weight of 1024 x 256 and its scales (8 bytes per 64) are more than three.
AROUND = 2 * (4 * 256 + 2 * 64)
DECODED = 1024 * 256 * (2 + 8 / 64)

CASES: dict[str, tuple[Callable[[Run], int], Run, Run, float]] = {
    # 5 of 6 layers keep nothing but their input of 2 H bytes per token, and the sixth has one too.
    "activation checkpointing": (
        allocated("update"),
        DEEP,
        changed(DEEP, activation_checkpointing=False),
        1087 * (5 * KEPT - 6 * 2 * 256),
    ),
    # L - 2 = 4 layer inputs.
    "activation offload": (
        allocated("update"),
        changed(DEEP, offload_activations=True),
        DEEP,
        4 * 1087 * 256 * 2,
    ),
    "embedding offload": (
        allocated("update"),
        SHALLOW,
        changed(SHALLOW, offload_embeddings=False),
        32768 * 256 * 2,
    ),
    # Six of width I for 1087 - 272 tokens less; the gradient of the input, N x H, is made beforehand.
    "MLP tiles": (
        allocated("update"),
        WIDE,
        changed(WIDE, mlp_tile_tokens=0),
        6 * (1087 - 272) * 2048 * 2 - 1087 * 256 * 2,
    ),
    # fp32 logits and their exponentials of 256 tokens instead of the 1024 that predict one.
    "head chunk": (
        allocated("update"),
        SHALLOW,
        changed(SHALLOW, head_chunk_tokens=1087),
        (1024 - 256) * 32768 * 8,
    ),
    # 8 bytes less two and two scales of 4 bytes per 256 values. In a layer A has 16 x 256 six times and 16 x 1024, B
    # 256 x 16 three times and 1024 x 16 twice; B of k and v, 128 x 16, has too few values for 8 bits.
    "8-bit AdamW": (
        allocated("update"),
        SHALLOW,
        changed(SHALLOW, optimizer="adamw"),
        2 * 16 * (6 * 256 + 1024 + 3 * 256 + 2 * 1024) * (8 - 2 - 2 * 4 / 256),
    ),
    # 2 layers x (key, value) x 2 heads, 64 + 4 x 1024 tokens: 64 values of 2 bytes, or of 1 and a scale of 2; and a
    # buffer for the keys of one layer's answers.
    "int8 keys and values": (
        allocated("rollout"),
        changed(SHALLOW, kv_int8=True),
        SHALLOW,
        2 * 2 * 2 * (64 + 4 * 1024) * (64 * 2 - (64 + 2)) - 2 * 64 * 4 * 1024 * 2,
    ),
    "prefill in pieces": (
        allocated("rollout"),
        READING,
        changed(READING, prefill_tokens=8 * 256),
        8 * 256 * (AROUND + 3 * 2 * 1024) - 256 * (AROUND + 2 * 2 * 1024) - DECODED,
    ),
    # 12 weights of 7 MiB, two per segment of 20 MiB: 6 x 20, and 16 for the embedding and 28 for a weight on its way.
    # In pages of 20 MiB the 12 x 7 + 16 + 28 = 128 take 140. The small pool is the same.
    "expandable segments": (
        reserved("load"),
        SEVENS,
        (*SEVENS[:2], False),
        (6 * 20 + 16 + 28 - 140) * MIB,
    ),
}
"""Technique -> what is compared, the run with it, the run without it, the bytes it saves."""


@pytest.mark.parametrize("technique", CASES)
def test_without_a_technique_the_peak_rises_by_its_tracked_bytes(technique: str) -> None:
    peak, with_it, without_it, tracked_bytes = CASES[technique]
    assert peak(without_it) - peak(with_it) == pytest.approx(tracked_bytes, rel=0.1)
