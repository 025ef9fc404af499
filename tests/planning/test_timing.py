"""The rooflines, with cards whose figures make the sums easy."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowmem_grpo.catalog.known import KNOWN
from lowmem_grpo.catalog.shapes import model_shape
from lowmem_grpo.planning import timing
from lowmem_grpo.planning.timing import estimate_time, rollout_seconds, update_seconds
from lowmem_grpo.planning.workload import Workload
from lowmem_grpo.types import Card, MemorySettings

CARD = Card("test", "cuda", (8, 6), 24 << 30, 400e9, 50e12, 200.0)
LLAMA_8B = Workload(
    shape=KNOWN["llama-3.1-8b-instruct"].shape,
    card=CARD,
    dtype="bfloat16",
    quantized=True,
    decoded=False,
    rank=16,
    targets=None,
    optimizer="adamw",
    prompts_per_step=2,
    group_size=8,
    prompt_tokens=256,
    answer_tokens=1024,
)
SETTINGS = MemorySettings(16, micro_batch_tokens=8440)
WEIGHTS, ADAPTER, HEAD = 6_979_321_856, 41_943_040, 128_256 * 4096
NF4 = 0.5 + 1 / 64 + 1 / 4096
LAUNCHES_S = 32 * 12 * 25e-6


def on(bandwidth: float, flops: float, **values: object) -> Workload:
    card = replace(CARD, bandwidth_bytes_per_s=bandwidth, flops_per_s=flops)
    return replace(LLAMA_8B, card=card, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(("bandwidth", "flops"), [(0.0, 50e12), (400e9, 0.0)])
def test_no_time_for_a_card_of_unknown_speed(bandwidth: float, flops: float) -> None:
    assert estimate_time(on(bandwidth, flops), SETTINGS, 10) is None


def test_a_step_and_a_run() -> None:
    time = estimate_time(LLAMA_8B, SETTINGS, 100)
    assert time is not None
    assert time.step_s == time.rollout_s + time.update_s
    assert time.run_s == 100 * time.step_s
    assert time.kwh == pytest.approx(200 * 0.8 * time.run_s / 3.6e6)
    assert any("full 1024 tokens" in sentence for sentence in time.assumptions)
    open_end = estimate_time(LLAMA_8B, SETTINGS, None)
    assert open_end is not None and open_end.run_s is None and open_end.kwh is None
    no_watts = estimate_time(replace(LLAMA_8B, card=replace(CARD, watts=0.0)), SETTINGS, 100)
    assert no_watts is not None and no_watts.kwh is None and no_watts.run_s == time.run_s


def test_a_decode_step_reads_weights_head_adapter_keys_and_values() -> None:
    # Arithmetic is free, so the prompts cost their decoded weights alone, in one forward of 512 tokens.
    work = on(400e9, 1e30)
    decoding_s = WEIGHTS * (NF4 + 2) / 280e9
    per_step = (
        WEIGHTS * (NF4 + 4)  # 16 rows: decoded, written, and read
        + 2 * (HEAD + ADAPTER)
        + 131_072 * (2 * 256 + 16 * 512)
        + 40 * 16 * 128_256
    )
    expected = decoding_s + 1024 * (per_step / 280e9 + LAUNCHES_S)
    assert rollout_seconds(work, SETTINGS) == pytest.approx(expected, rel=1e-9)
    # Eight rows: two waves, one prompt at a time, half the decoding in a step.
    per_step = WEIGHTS * (NF4 + 2) + 2 * (HEAD + ADAPTER) + 131_072 * (256 + 8 * 512) + 40 * 8 * 128_256
    expected = decoding_s + 2 * 1024 * (per_step / 280e9 + LAUNCHES_S)
    assert rollout_seconds(work, replace(SETTINGS, max_concurrent=8)) == pytest.approx(expected, rel=1e-9)


def test_a_decode_step_of_many_rows_is_bound_by_arithmetic() -> None:
    work = on(1e30, 50e12)
    pairs = 2 * 256**2 / 2
    prefill = (2 * 512 * (WEIGHTS + ADAPTER) + 4 * 32 * 4096 * pairs) / 25e12
    per_step = 16 * (2 * (WEIGHTS + ADAPTER + HEAD) + 4 * 32 * 4096 * (256 + 512)) / 25e12
    assert rollout_seconds(work, SETTINGS) == pytest.approx(prefill + 1024 * (per_step + LAUNCHES_S), rel=1e-9)


def test_an_update_multiplies_three_times_with_every_weight() -> None:
    # Forward, forward again, and the gradient of the inputs; the head forward and back for 16 x 1024 tokens.
    work = on(1e30, 50e12)
    tokens = 2 * (256 + 8 * 1023)
    pairs = 2 * 256**2 / 2 + 16 * 1024 * (256 + 512)
    layers = 2 * 3 * tokens * (WEIGHTS + ADAPTER) + 4.5 * 4 * 32 * 4096 * pairs
    head = 2 * 2 * 16 * 1024 * HEAD
    assert update_seconds(work, SETTINGS) == pytest.approx((layers + head) / 25e12, rel=1e-9)
    assert update_seconds(replace(work, updates_per_rollout=2), SETTINGS) == pytest.approx(2 * (layers + head) / 25e12)
    kept = replace(SETTINGS, activation_checkpointing=False)
    layers = 2 * 2 * tokens * (WEIGHTS + ADAPTER) + 3.5 * 4 * 32 * 4096 * pairs
    assert update_seconds(work, kept) == pytest.approx((layers + head) / 25e12, rel=1e-9)


def test_an_update_decodes_its_weights_once_per_pass_and_micro_batch_and_the_mlp_once_per_tile() -> None:
    work = on(400e9, 1e30)
    decoding_s = WEIGHTS * (NF4 + 2) / 280e9
    chunks_s = 2 * 16 * 1024 / 256 * 2 * HEAD / 280e9
    assert update_seconds(work, SETTINGS) == pytest.approx(2 * 3 * decoding_s + chunks_s, rel=1e-9)
    # One answer a part: 16 micro-batches.
    one = replace(SETTINGS, micro_batch_tokens=1)
    assert update_seconds(work, one) == pytest.approx(16 * 3 * decoding_s + chunks_s, rel=1e-9)
    # 8440 tokens in tiles of 4220: the MLP is 176 160 768 of the 218 103 808 weights of a layer.
    tiled = replace(SETTINGS, mlp_tile_tokens=4220)
    mlp = 176_160_768 / 218_103_808
    assert update_seconds(work, tiled) == pytest.approx(2 * 3 * decoding_s * (1 + mlp) + chunks_s, rel=1e-9)
    held = replace(work, decoded=True)
    assert update_seconds(held, SETTINGS) == pytest.approx(2 * 3 * LAUNCHES_S + chunks_s, rel=1e-9)


def test_small_parts_forward_their_prompt_again() -> None:
    work = on(1e30, 50e12)
    halves = replace(SETTINGS, micro_batch_tokens=256 + 4 * 1023)
    extra_tokens = 2 * 256
    extra_s = update_seconds(work, halves) - update_seconds(work, SETTINGS)
    assert extra_s == pytest.approx(2 * 3 * extra_tokens * (WEIGHTS + ADAPTER) / 25e12, rel=1e-6)


def test_offloading_costs_only_what_the_computation_does_not_hide() -> None:
    offloaded = replace(SETTINGS, offload_activations=True)
    assert update_seconds(LLAMA_8B, offloaded) == update_seconds(LLAMA_8B, SETTINGS)
    fast = on(1e30, 1e30)
    traffic_s = 2 * 32 * 2 * 8440 * 4096 * 2 / timing.PCIE_BYTES_PER_S
    assert update_seconds(fast, offloaded) == pytest.approx(traffic_s, rel=1e-6)
    not_kept = replace(offloaded, activation_checkpointing=False)
    assert update_seconds(fast, not_kept) == update_seconds(fast, replace(not_kept, offload_activations=False))


def test_an_embedding_on_the_host_costs_every_forward() -> None:
    away = replace(SETTINGS, offload_embeddings=True)
    assert rollout_seconds(LLAMA_8B, away) - rollout_seconds(LLAMA_8B, SETTINGS) == pytest.approx(1024e-4, rel=1e-6)
    assert update_seconds(LLAMA_8B, away) - update_seconds(LLAMA_8B, SETTINGS) == pytest.approx(2e-4, rel=1e-3)
    tied = replace(LLAMA_8B, shape=KNOWN["qwen2.5-1.5b-instruct"].shape)
    assert rollout_seconds(tied, away) == rollout_seconds(tied, SETTINGS)


def test_fp32_and_the_reference_cost_their_arithmetic() -> None:
    work = on(1e30, 50e12)
    fp32 = replace(work, dtype="float32")
    assert update_seconds(fp32, SETTINGS) == pytest.approx(4 * update_seconds(work, SETTINGS), rel=1e-6)
    # A fourth pass of the layers and a third product of the head.
    tokens, pairs = 2 * (256 + 8 * 1023), 2 * 256**2 / 2 + 16 * 1024 * (256 + 512)
    more = 2 * tokens * (WEIGHTS + ADAPTER) + 4 * 32 * 4096 * pairs + 2 * 16 * 1024 * HEAD
    with_kl = update_seconds(replace(work, kl=True), SETTINGS)
    assert with_kl - update_seconds(work, SETTINGS) == pytest.approx(more / 25e12, rel=1e-6)


def test_a_tiny_model_is_bound_by_the_host() -> None:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "vocab_size": 10,
        "max_position_embeddings": 64,
    }
    work = replace(LLAMA_8B, shape=model_shape(config, "tiny"), prompt_tokens=4, answer_tokens=10)
    # Ten steps of two layers, and one forward of the prompts.
    assert rollout_seconds(work, SETTINGS) == pytest.approx(11 * 2 * 12 * 25e-6, rel=1e-2)


@given(st.integers(1, 64), st.integers(1, 64), st.sampled_from([1, 1279, 3000, 8440, 20_000]), st.integers(0, 9000))
def test_more_at_once_is_never_slower(rows: int, more: int, tokens: int, more_tokens: int) -> None:
    work = replace(LLAMA_8B, prompts_per_step=8)
    few, many = MemorySettings(rows, micro_batch_tokens=tokens), MemorySettings(rows + more, micro_batch_tokens=tokens)
    waves = [-(-64 // min(64, settings.max_concurrent)) for settings in (few, many)]
    if waves[0] > waves[1]:
        assert rollout_seconds(work, many) < rollout_seconds(work, few)
    larger = replace(few, micro_batch_tokens=tokens + more_tokens)
    assert update_seconds(work, larger) <= update_seconds(work, few)
