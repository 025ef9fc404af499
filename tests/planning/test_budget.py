"""The arithmetic of the memory, with numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lowmem_grpo.catalog.known import KNOWN
from lowmem_grpo.catalog.shapes import model_shape
from lowmem_grpo.planning.budget import CONTEXT_BYTES, PHASES, Estimate, Item, estimate, micro_batch, prefill_tokens
from lowmem_grpo.planning.workload import Workload
from lowmem_grpo.types import Card, MemorySettings

GIB = 2**30
CARD = Card("test", "cuda", (8, 6), 8 * GIB)
LLAMA_8B = Workload(
    shape=KNOWN["llama-3.1-8b-instruct"].shape,
    card=CARD,
    dtype="bfloat16",
    quantized=True,
    decoded=False,
    rank=16,
    targets=None,
    optimizer="adamw_8bit",
    prompts_per_step=1,
    group_size=8,
    prompt_tokens=256,
    answer_tokens=1024,
)
PLAIN = MemorySettings(8, micro_batch_tokens=1)
"""One answer per micro-batch; checkpointing, nothing offloaded."""
LEAN = replace(PLAIN, offload_activations=True, offload_embeddings=True, mlp_tile_tokens=512, head_chunk_tokens=128)

TINY = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 10,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def sizes(workload: Workload, settings: MemorySettings, phase: str) -> dict[str, int]:
    return {item.name: item.bytes for item in estimate(workload, settings).items if item.phase == phase}


def workload_of(name: str, **values: object) -> Workload:
    return replace(LLAMA_8B, shape=KNOWN[name].shape, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("qwen2.5-1.5b-instruct", 1.76),
        ("llama-3.1-8b-instruct", 5.03),
        ("qwen2.5-14b-instruct", 8.50),
        ("qwen2.5-32b-instruct", 17.14),
    ],
)
def test_weights_and_context_with_an_untied_embedding_on_the_host(name: str, gib: float) -> None:
    held = estimate(workload_of(name), LEAN)
    assert sum(item.bytes for item in held.items if item.phase == "all") / GIB == pytest.approx(gib, abs=0.006)


def test_what_stays_of_an_8b() -> None:
    # 218 103 808 linear weights a layer and 81 920 adapter values per rank and layer.
    assert sizes(LLAMA_8B, PLAIN, "all") == {
        "4-bit weights": 3_600_416_768,
        "embedding": 2 * 128_256 * 4096,
        "head": 2 * 128_256 * 4096,
        "norms and biases": 2 * 65 * 4096,
        "CUDA context": CONTEXT_BYTES,
    }
    values = 16 * 32 * 81_920
    assert sizes(LLAMA_8B, PLAIN, "steps") == {
        "adapter": 4 * values,
        "adapter copy": 2 * values,
        "optimizer state": 2 * values + 8 * values // 256,
    }


def test_the_other_ways_to_hold_weights_and_adapter() -> None:
    kept = sizes(replace(LLAMA_8B, decoded=True), PLAIN, "all")
    assert kept["decoded weights"] == 2 * 32 * 218_103_808
    plain = sizes(replace(LLAMA_8B, quantized=False), PLAIN, "all")
    assert plain["weights"] == kept["decoded weights"] and "4-bit weights" not in plain
    values = 16 * 32 * 81_920
    continued = sizes(replace(LLAMA_8B, reference_adapter=True, optimizer="adamw"), PLAIN, "steps")
    assert continued["reference adapter"] == 6 * values and continued["optimizer state"] == 8 * values
    assert sizes(replace(LLAMA_8B, targets=("q_proj",)), PLAIN, "steps")["adapter"] == 4 * 16 * 32 * 8192


def test_only_an_untied_embedding_can_leave_the_card() -> None:
    assert "embedding" not in sizes(LLAMA_8B, LEAN, "all")
    tied = sizes(workload_of("qwen2.5-1.5b-instruct"), LEAN, "all")
    assert tied["embedding and head"] == 2 * 151_936 * 1536


def test_the_load_holds_no_adapter_but_one_weight_on_its_way_to_4_bits() -> None:
    assert sizes(LLAMA_8B, PLAIN, "load") == {"one weight, not yet quantised": 2 * 4096 * 14_336}
    planned = estimate(LLAMA_8B, PLAIN)
    adapter = sum(item.bytes for item in planned.items if item.phase == "steps")
    assert planned.phase_bytes("load") == planned.resident_bytes - adapter + 2 * 4096 * 14_336
    assert sizes(replace(LLAMA_8B, quantized=False), PLAIN, "load") == {}
    ready = replace(LLAMA_8B, shape=replace(LLAMA_8B.shape, quantized=True))
    assert sizes(ready, PLAIN, "load") == {}


def test_the_rollout_of_an_8b() -> None:
    # The highest moment is the MLP of 256 prompt tokens: four of width 4096, two of 14 336 and a decoded weight.
    assert sizes(LLAMA_8B, PLAIN, "rollout") == {
        "keys and values": 131_072 * (256 + 8 * 1024),
        "last hidden states": 2 * 8 * 4096 * 2,
        "prompt activations": 256 * 2 * (4 * 4096 + 2 * 14_336),
        "decoded weight": 4096 * 14_336 * 2 + 4096 * 14_336 // 16,
    }


def test_keys_and_values_follow_the_slots() -> None:
    per_token = 131_072
    four_prompts = replace(LLAMA_8B, prompts_per_step=4)
    # 12 rows are of two prompts, and a third may begin.
    assert sizes(four_prompts, MemorySettings(12), "rollout")["keys and values"] == per_token * (3 * 256 + 12 * 1024)
    assert sizes(four_prompts, MemorySettings(99), "rollout")["keys and values"] == per_token * (4 * 256 + 32 * 1024)
    int8 = sizes(replace(LLAMA_8B, kv_int8=True), PLAIN, "rollout")["keys and values"]
    assert int8 == 2 * 32 * 8 * 8448 * 130 + 8 * 128 * 8 * 1024 * 2


def test_prompts_are_forwarded_together_or_one_at_a_time() -> None:
    many = replace(LLAMA_8B, prompts_per_step=16, prompt_tokens=300)
    assert prefill_tokens(many, MemorySettings(128)) == 2048
    assert prefill_tokens(many, MemorySettings(8)) == 600
    assert prefill_tokens(many, MemorySettings(128, prefill_tokens=100)) == 300


def test_a_huge_vocabulary_makes_sampling_the_highest_moment() -> None:
    shape = model_shape({**TINY, "vocab_size": 100_000}, "tiny")
    work = replace(LLAMA_8B, shape=shape, prompt_tokens=1, answer_tokens=2)
    # Two fp32 copies of all rows, and an fp64 one of eight of them.
    assert sizes(replace(work, group_size=20), MemorySettings(20), "rollout")["logits of the sampler"] == 100_000 * (
        20 * 8 + 8 * 8
    )


def test_the_backward_of_one_layer_of_an_8b() -> None:
    # T = 256 + 1023; the keys are there as made and once more in the answer's tile, prompt included.
    tokens = 1279
    assert sizes(LLAMA_8B, PLAIN, "update") == {
        "adapter gradients": 4 * 16 * 32 * 81_920,
        "layer inputs": 32 * tokens * 4096 * 2,
        "norms of one layer": 2 * tokens * 4096 * 4,
        "inputs of one layer's products": 2 * tokens * 4096 * 2,
        "attention of one layer": tokens * (3 * 4096 * 2 + 32 * 4) + 2 * 2 * 1024 * (tokens + tokens),
        "MLP of one layer": 4 * tokens * 14_336 * 2,
        "gradients of one layer": tokens * 2 * (14_336 + 4096),
        "decoded weight": 4096 * 14_336 * 2 + 4096 * 14_336 // 16,
        "gaps of the allocator": 4 * 256 * 128_256 + 2 * (4096 * 14_336 * 2 + 4096 * 14_336 // 16),
    }


def test_gradients_of_a_single_micro_batch_come_when_the_layer_inputs_are_gone() -> None:
    name, inputs = "adapter gradients", "layer inputs"
    one_answer = replace(LLAMA_8B, group_size=1)
    update = sizes(one_answer, PLAIN, "update")
    assert name not in update and update[inputs] == 32 * 1279 * 4096 * 2
    # An adapter that outweighs 31 of the inputs puts the peak at the first layer, where the backward ends.
    large = sizes(replace(one_answer, rank=64), PLAIN, "update")
    assert large[name] == 4 * 64 * 32 * 81_920 and large[inputs] == 1279 * 4096 * 2


@pytest.mark.parametrize(
    ("name", "kib"), [("llama-3.1-8b-instruct", 248), ("qwen2.5-7b-instruct", 289), ("qwen3-8b", 244)]
)
def test_a_layer_per_token_is_what_live_bytes_of_the_real_layers_were(name: str, kib: int) -> None:
    # Weights held decoded, and beside the layer inputs 8, 7 and 8 KiB of the gradient that comes from above.
    work = workload_of(name, decoded=True)
    update = sizes(work, replace(PLAIN, head_chunk_tokens=64), "update")
    layer = {name: size for name, size in update.items() if "layer" in name}
    above = 2 * work.shape.hidden
    per_token = (sum(layer.values()) - layer["layer inputs"]) / 1279 - above
    assert per_token / 1024 == pytest.approx(kib, abs=0.5)


def test_a_tiled_mlp_leaves_the_attention_and_one_tile() -> None:
    work = replace(LLAMA_8B, decoded=True)
    tiled = sizes(work, replace(PLAIN, mlp_tile_tokens=512, head_chunk_tokens=64), "update")
    assert tiled["MLP of one tile"] == 512 * 2 * (6 * 14_336 + 4096)
    assert tiled["gradients of one layer"] == 2 * 1279 * 4096 * 2
    assert "MLP of one layer" not in tiled
    # Of small tiles the backward of the norm is the highest moment, 20 bytes per value.
    small = sizes(work, replace(PLAIN, mlp_tile_tokens=64, head_chunk_tokens=64), "update")
    assert small["gradients of a norm"] == 20 * 1279 * 4096


def test_offloading_leaves_two_layer_inputs_on_the_card() -> None:
    offloaded = sizes(LLAMA_8B, replace(PLAIN, offload_activations=True), "update")
    assert offloaded["layer inputs"] == 2 * 1279 * 4096 * 2


def test_without_checkpointing_every_layer_keeps_its_activations() -> None:
    kept = sizes(LLAMA_8B, replace(PLAIN, activation_checkpointing=False), "update")
    tokens = 1279
    layer = (
        2 * tokens * 4096 * 4
        + 2 * tokens * 4096 * 2
        + tokens * (3 * 4096 * 2 + 32 * 4)
        + 2 * 2 * 1024 * 2 * tokens
        + 4 * tokens * 14_336 * 2
    )
    assert kept["activations of all layers"] == 32 * layer - 4 * tokens * 4096
    assert "layer inputs" not in kept


def test_the_head_is_the_highest_moment_of_a_small_model_with_a_large_vocabulary() -> None:
    update = sizes(workload_of("qwen2.5-1.5b-instruct"), replace(PLAIN, head_chunk_tokens=1024), "update")
    assert update["logits"] == 8 * 1024 * 151_936
    assert update["last norm"] == 4 * 1279 * 1536
    assert update["hidden states"] == 2 * 1536 * (1279 + 2 * 1024)


def test_a_cpu_has_no_context_and_no_copies_in_16_bits() -> None:
    work = replace(
        LLAMA_8B,
        shape=model_shape(TINY, "tiny"),
        card=Card("cpu", "cpu", (0, 0), 8 * GIB),
        dtype="float32",
        decoded=True,
        prompt_tokens=3,
        answer_tokens=5,
        group_size=2,
        prompts_per_step=2,
        rank=1,
    )
    # 8 x 8 twice, 8 x 4 twice and 8 x 16 three times in each of two layers.
    weights = 2 * (128 + 64 + 384)
    held = sizes(work, PLAIN, "all")
    assert held == {
        "4-bit weights": int(weights * (0.5 + 1 / 64 + 1 / 4096)),
        "decoded weights": 4 * weights,
        "embedding and head": 4 * 80,
        "norms and biases": 4 * 5 * 8,
        "Python and its libraries": int(0.7 * GIB),
    }
    assert "adapter copy" not in sizes(work, PLAIN, "steps")
    # A norm keeps its input, and the first one's is the checkpoint. Both answers are one tile, which sees 3 + 8 tokens.
    update = sizes(work, MemorySettings(2, micro_batch_tokens=3 + 2 * 4), "update")
    tokens = 3 + 2 * 4
    assert update["layer inputs"] == 2 * tokens * 8 * 4
    assert update["norms of one layer"] == tokens * 8 * 4
    assert update["scores and masks of one layer"] == 4 * 8 * (3 + 8)
    assert "decoded weight" not in update and "gaps of the allocator" not in update


def test_kernels_that_cannot_share_key_heads_get_copies_as_wide_as_the_queries() -> None:
    name = "attention of one layer"
    shared = sizes(LLAMA_8B, PLAIN, "update")[name]
    turing = replace(LLAMA_8B, dtype="float16", card=replace(CARD, capability=(7, 5)))
    # Prompt alone and prompt with answer, 4096 wide, in place of 2 x 1279 tokens of 1024.
    assert sizes(turing, PLAIN, "update")[name] - shared == 2 * 2 * (4096 * (256 + 1279) - 1024 * 2 * 1279)
    flash = sizes(replace(LLAMA_8B, has_flash_attn=True), PLAIN, "update")[name]
    assert shared - flash == 1279 * 4096 * 2 + 2 * 2 * 1024 * 1023


@pytest.mark.parametrize(
    ("budget", "tokens", "prompts", "answers"),
    [(1, 1279, 1, 1), (2400, 2400, 1, 2), (8192, 8192, 1, 7), (10**6, 2 * 8440, 2, 16)],
)
def test_the_largest_micro_batch(budget: int, tokens: int, prompts: int, answers: int) -> None:
    micro = micro_batch(replace(LLAMA_8B, prompts_per_step=2), MemorySettings(8, micro_batch_tokens=budget))
    assert (micro.tokens, micro.prompts, micro.answers) == (tokens, prompts, answers)
    assert micro.predictors == tokens - 255 * prompts


def test_capped_scores_are_computed_openly() -> None:
    gemma = workload_of("gemma-2-2b-it")
    settings = replace(PLAIN, head_chunk_tokens=1)
    assert sizes(gemma, settings, "update")["scores and masks of one layer"] == 12 * 8 * 1023 * 1279


def test_short_answers_share_a_tile() -> None:
    micro = micro_batch(replace(LLAMA_8B, answer_tokens=65), MemorySettings(8))
    assert (micro.own, micro.answers_of_tile, micro.tiles) == (64, 4, 2)


def test_answers_of_one_token_add_nothing_to_their_prompt() -> None:
    micro = micro_batch(replace(LLAMA_8B, answer_tokens=1), MemorySettings(8))
    assert (micro.tokens, micro.answers, micro.predictors) == (256, 8, 1)


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_every_known_model_has_an_estimate(name: str) -> None:
    planned = estimate(workload_of(name), PLAIN)
    assert planned.peak_bytes > planned.resident_bytes > KNOWN[name].shape.parameters // 2


def test_phases_add_up_and_the_json_says_the_same() -> None:
    planned = Estimate((Item("a", "all", 1), Item("b", "steps", 20), Item("c", "load", 300), Item("d", "update", 4000)))
    assert [planned.phase_bytes(phase) for phase in PHASES] == [301, 21, 4021]
    assert planned.to_json()["phases"] == {"load": 301, "rollout": 21, "update": 4021}
    assert (planned.peak_phase, planned.peak_bytes, planned.resident_bytes) == ("update", 4021, 21)
    assert planned.to_json()["items"][1] == {"name": "b", "phase": "steps", "bytes": 20}


@given(
    st.sampled_from(["qwen2.5-0.5b-instruct", "llama-3.1-8b-instruct", "qwen3-4b"]),
    st.fixed_dictionaries(
        {"answer_tokens": st.integers(2, 5000), "prompt_tokens": st.integers(1, 3000), "rank": st.integers(1, 64)}
    ),
    st.sampled_from(["answer_tokens", "prompt_tokens", "rank"]),
    st.integers(1, 1000),
)
def test_more_work_never_needs_less(name: str, values: dict[str, int], grown: str, by: int) -> None:
    less, more = workload_of(name, **values), workload_of(name, **{**values, grown: values[grown] + by})
    for settings in (PLAIN, LEAN):
        smaller, larger = estimate(less, settings), estimate(more, settings)
        assert all(smaller.phase_bytes(phase) <= larger.phase_bytes(phase) for phase in PHASES)


@given(
    st.sampled_from(["max_concurrent", "prefill_tokens", "micro_batch_tokens", "head_chunk_tokens"]),
    st.integers(1, 9000),
    st.integers(0, 9000),
    st.booleans(),
)
def test_larger_settings_never_need_less(name: str, value: int, more: int, checkpointing: bool) -> None:
    work = replace(LLAMA_8B, prompts_per_step=3)
    small_settings, large_settings = (
        replace(PLAIN, activation_checkpointing=checkpointing, **{name: size}) for size in (value, value + more)
    )
    # Where all tokens of a step come into one micro-batch, it no longer meets the gradients of another.
    assume(micro_batch(work, small_settings).is_only_one == micro_batch(work, large_settings).is_only_one)
    small, large = estimate(work, small_settings), estimate(work, large_settings)
    assert all(small.phase_bytes(phase) <= large.phase_bytes(phase) for phase in PHASES)
