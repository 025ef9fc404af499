"""The simulator against the real code on real tensors, by hand where that can be done, and as its answers must be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lowmem_grpo.batching import largest_micro_batch
from lowmem_grpo.catalog import resolve_model, shape_of
from lowmem_grpo.catalog.shapes import ModelShape, model_shape
from lowmem_grpo.errors import ModelError
from lowmem_grpo.memory.allocator import CachingAllocator
from lowmem_grpo.memory.trace import Allocation, AllocationTrace
from lowmem_grpo.model import LoraSpec, ModelSpec, Policy, load_policy, load_tokenizer
from lowmem_grpo.planning.simulate import Simulation, leave_gradients, simulate, start_optimizer, updater_for
from lowmem_grpo.planning.workload import Workload
from lowmem_grpo.rollout.longest import decode_longest, longest_problems
from lowmem_grpo.types import Card, MemorySettings, SamplingParams
from tests.helpers import CPU
from tests.tiny import FAMILIES, save_tiny, tiny_config

AMPERE, TURING = Card("RTX 3060", "cuda", (8, 6), 12 << 30), Card("T4", "cuda", (7, 5), 16 << 30)
BLOCK_BYTES = 512
SETTINGS = MemorySettings(max_concurrent=3, micro_batch_tokens=60, head_chunk_tokens=16)


def tiny_shape(family: str = "llama", *, tied: bool = True) -> ModelShape:
    return model_shape(tiny_config(family, tied=tied).to_dict(), family)


def workload_of(shape: ModelShape, card: Card = CPU, dtype: str = "float32", **changes: Any) -> Workload:
    """Two groups of four answers of twelve tokens to prompts of nine; unquantised unless `changes` says otherwise."""
    workload = Workload(
        shape=shape,
        card=card,
        dtype=dtype,
        quantized=False,
        decoded=False,
        rank=4,
        targets=None,
        optimizer="adamw",
        prompts_per_step=2,
        group_size=4,
        prompt_tokens=9,
        answer_tokens=12,
    )
    return replace(workload, **changes)


# ---- against the real code on real tensors


def load(folder: Path, workload: Workload, settings: MemorySettings) -> Policy:
    """The policy that a run of the workload on a CPU loads."""
    spec = ModelSpec(
        folder,
        base_name="real",
        quantization="nf4" if workload.quantized else "none",
        weights="dequantized" if workload.decoded else "4bit",
        compute_dtype=workload.dtype,
        activation_checkpointing=settings.activation_checkpointing,
        offload_activations=settings.offload_activations,
        offload_embeddings=settings.offload_embeddings,
        mlp_tile_tokens=settings.mlp_tile_tokens,
    )
    return load_policy(spec, LoraSpec(rank=workload.rank), workload.card, load_tokenizer(folder))


def weights_of(policy: Policy, settings: MemorySettings) -> Iterator[Tensor]:
    """The frozen base as it lies on the card."""
    base = policy.model.get_base_model()
    embedding = base.get_input_embeddings().weight
    for name, tensor in (*base.named_parameters(), *base.named_buffers()):
        if ".lora_" in name or (settings.offload_embeddings and tensor is embedding):
            continue
        yield tensor
        state = getattr(tensor, "quant_state", None)
        while state is not None:
            yield from (value for value in vars(state).values() if isinstance(value, Tensor))
            state = state.state2
    yield from (module.decoded_weight for module in base.modules() if hasattr(module, "decoded_weight"))


def traced_peaks(policy: Policy, workload: Workload, settings: MemorySettings) -> dict[str, int]:
    """Peaks above the weights of a real rollout and a real update, each block as large as the allocator cuts it.

    The rows jump from their first token to their last, as in the simulator.
    """
    updater = updater_for(policy, workload, settings)
    problems = longest_problems(workload.prompts_per_step, workload.prompt_tokens)
    allocator, peaks, done = CachingAllocator(expandable_segments=True), dict[str, int](), 0

    def peak() -> int:
        nonlocal done
        first, done = done, len(trace.events)
        return allocator.replay(trace.events[first:done]).peak_allocated_bytes

    with AllocationTrace() as trace:
        trace.count(weights_of(policy, settings), "weights")
        peaks["weights"] = peak()
        trace.count(policy.adapter_tensors(), "adapter")
        start_optimizer(updater)
        peak()
        decode_longest(
            policy,
            problems,
            workload.group_size,
            SamplingParams(workload.answer_tokens),
            max_concurrent=settings.max_concurrent,
            prefill_tokens=settings.prefill_tokens,
            kv_int8=workload.kv_int8,
        )
        peaks["rollout"] = peak() - peaks["weights"]
        micro_batch = largest_micro_batch(
            problems,
            workload.group_size,
            workload.answer_tokens,
            micro_batch_tokens=settings.micro_batch_tokens,
            device=policy.device,
        )
        if len(micro_batch.input_ids_N) < workload.tokens:
            leave_gradients(updater)  # of the micro-batches before
        updater.update([micro_batch], 0)
        peaks["update"] = peak() - peaks["weights"]
    return peaks


def assert_as_simulated(folder: Path, workload: Workload, settings: MemorySettings) -> dict[str, int]:
    """Compare peaks above the weights, and the weights, to the byte; returns the real ones.

    The simulated rollout has a block more at most: on real tensors what `torch.tensor` makes is not seen.
    """
    simulation = simulate(workload, settings)
    policy = load(folder, workload, settings)
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in weights_of(policy, settings)}
    assert simulation.weights_bytes == sum(storages.values())
    real = traced_peaks(policy, workload, settings)
    excess = {
        phase: simulation.phases[phase].allocated_bytes - real["weights"] - real[phase]
        for phase in ("rollout", "update")
    }
    assert excess["update"] == 0, excess
    assert excess["rollout"] in (0, BLOCK_BYTES), excess
    return real


def smollm2(shape: ModelShape, **changes: Any) -> Workload:
    """A prompt of 24 tokens and 8 answers of 48."""
    sizes = dict(rank=16, prompts_per_step=1, group_size=8, prompt_tokens=24, answer_tokens=48)
    return workload_of(shape, **(sizes | changes))


def test_the_embedded_model_needs_what_the_simulator_says() -> None:
    """5 % is promised."""
    settings = MemorySettings(max_concurrent=8, micro_batch_tokens=300)
    workload = smollm2(shape_of("smollm2-135m-instruct"))
    real = assert_as_simulated(resolve_model("smollm2-135m-instruct").path, workload, settings)
    assert real["rollout"] > 50 << 20
    assert real["update"] > 100 << 20


@pytest.mark.parametrize(("decoded", "dtype"), [(True, "float32"), (False, "bfloat16")])
def test_the_embedded_model_in_four_bits_needs_what_the_simulator_says(
    decoded: bool, dtype: str, tmp_path: Path
) -> None:
    """Its first three layers, which is quicker."""
    folder = resolve_model("smollm2-135m-instruct").path
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(folder / name)
    workload = smollm2(model_shape(config, "smollm2"), quantized=True, decoded=decoded, dtype=dtype)
    settings = MemorySettings(max_concurrent=8, micro_batch_tokens=300)
    assert_as_simulated(tmp_path, workload, settings)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "quantized"), [("float32", False), ("bfloat16", True)])
def test_every_family_needs_what_the_simulator_says(family: str, dtype: str, quantized: bool, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, family)
    assert_as_simulated(folder, workload_of(tiny_shape(family), dtype=dtype, quantized=quantized), SETTINGS)


TECHNIQUES: dict[str, dict[str, Any]] = {
    "no checkpointing": {"activation_checkpointing": False},
    "activations on the host": {"offload_activations": True},
    "embedding on the host": {"offload_embeddings": True},
    "tiled MLP": {"mlp_tile_tokens": 16},
    "small chunks of the head": {"head_chunk_tokens": 3},
    "prompts one by one": {"prefill_tokens": 60, "max_concurrent": 8, "prompt_tokens": 60, "answer_tokens": 2},
    "one row at a time": {"max_concurrent": 1},
    "all answers in one micro-batch": {"micro_batch_tokens": 1000},
    "int8 cache": {"kv_int8": True, "answer_tokens": 50},
    "penalty": {"kl": True},
    "8-bit optimizer": {"optimizer": "adamw_8bit", "rank": 64},
    "decoded weights": {"decoded": True},
    "each batch twice": {"updates_per_rollout": 2},
    "answers of one token": {"answer_tokens": 1},
}


@pytest.mark.parametrize("changes", TECHNIQUES.values(), ids=TECHNIQUES)
def test_with_every_technique_it_needs_what_the_simulator_says(changes: dict[str, Any], tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, tied=False)
    settings = replace(SETTINGS, **{name: value for name, value in changes.items() if hasattr(SETTINGS, name)})
    others = {name: value for name, value in changes.items() if not hasattr(SETTINGS, name)}
    workload = workload_of(tiny_shape(tied=False), dtype="bfloat16", quantized=True, **others)
    assert_as_simulated(folder, workload, settings)


# ---- what it says by itself


def assert_sound(simulation: Simulation) -> None:
    """What holds for any simulation."""
    assert list(simulation.phases) == ["load", "rollout", "update"]
    for name, phase in simulation.phases.items():
        assert phase.reserved_bytes >= phase.allocated_bytes > 0, name
        sizes = [made.bytes for made in phase.largest]
        assert sizes == sorted(sizes, reverse=True)
        assert sum(sizes) <= phase.allocated_bytes
    for name in ("rollout", "update"):
        assert Allocation("outside the model: weights", simulation.weights_bytes) in simulation.phases[name].largest
    assert simulation.peak_bytes == simulation.context_bytes + max(p.reserved_bytes for p in simulation.phases.values())
    assert json.loads(json.dumps(simulation.to_json()))["peak_bytes"] == simulation.peak_bytes


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("card", "dtype", "quantized"), [(AMPERE, "bfloat16", True), (TURING, "float16", False)])
def test_every_family_runs_on_every_card(family: str, card: Card, dtype: str, quantized: bool) -> None:
    assert_sound(simulate(workload_of(tiny_shape(family), card, dtype, quantized=quantized), SETTINGS))


WIDE = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 1024,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def wide(**changes: Any) -> Workload:
    return workload_of(model_shape(WIDE, "wide"), AMPERE, "bfloat16", quantized=True, **changes)


@pytest.mark.parametrize("offload_embeddings", [False, True])
def test_the_load_by_hand(offload_embeddings: bool) -> None:
    simulation = simulate(wide(), replace(SETTINGS, offload_embeddings=offload_embeddings))
    matrix = 100 * 64 * 2  # embedding, and head
    # 4 bits a weight, a scale of a byte per 64, of those one of 4 bytes per 256; codes of 16 and 256 values, an offset
    small = 4096 // 2 + 4096 // 64 + 4 + (16 + 256 + 1) * 4  # q, k, v, o
    large = 65536 // 2 + 65536 // 64 + 4 * 4 + (16 + 256 + 1) * 4  # gate, up, down
    norms, frequencies = 3 * 64 * 2, 2 * 16 * 4
    weights_bytes = 2 * matrix + 4 * small + 3 * large + norms + frequencies
    assert simulation.weights_bytes == weights_bytes - (matrix if offload_embeddings else 0)
    # In blocks of 512 bytes, by name: head, embedding, a norm, down, gate, and at the highest moment up is packed: it
    # is there in 16 bits, with two fp32 numbers for each 64 of its values.
    small, large = 2048 + 4 * 512 + 1024, 32768 + 1024 + 3 * 512 + 1024
    packing = 65536 * 2 + 65536 // 8
    assert simulation.phases["load"].allocated_bytes == 2 * matrix + 512 + 2 * large + packing + 32768
    assert simulation.phases["load"].largest[0] == Allocation("outside the model: a weight being packed", packing)
    # The attention, the other norms and rotary frequencies come later.
    resident = 2 * matrix + 4 * small + 3 * large + (3 + 2) * 512
    assert resident < simulation.phases["load"].allocated_bytes < simulation.phases["update"].allocated_bytes
    assert_sound(simulation)


def test_a_reference_adapter_is_another_adapter_and_its_copy() -> None:
    alone, both = (simulate(wide(reference_adapter=way), SETTINGS).phases["rollout"] for way in (False, True))
    # In 16 bits: rank 4; q, k, v, o of 64 x 64, gate, up and down of 64 and 1024; fp32 masters and a copy.
    values = 4 * (4 * (64 + 64) + 3 * (64 + 1024))
    assert both.allocated_bytes - alone.allocated_bytes == values * (4 + 2)


def test_what_is_alive_at_the_peak_is_named_by_module() -> None:
    """One group of 9 + 4 x 11 tokens; without checkpointing an MLP keeps three products of 1024 values a token."""
    settings = replace(SETTINGS, activation_checkpointing=False)
    largest = simulate(wide(prompts_per_step=1), settings).phases["update"].largest
    mlp = "base_model.model.model.layers.0.mlp"
    assert Allocation(f"{mlp}.act_fn: aten.silu.default", 53 * 1024 * 2) in largest
    assert Allocation(f"{mlp}.gate_proj: bitsandbytes.gemm_4bit.default", 53 * 1024 * 2) in largest
    assert Allocation(f"{mlp}.up_proj: bitsandbytes.gemm_4bit.default", 53 * 1024 * 2) in largest


def test_a_card_decodes_weights_inside_its_products() -> None:
    """Of 12 tokens, on a card; a product of 4 rows and a CPU need nothing inside."""
    settings = replace(SETTINGS, max_concurrent=1)
    for card, rows, decodes in ((AMPERE, 12, True), (AMPERE, 4, False), (CPU, 12, False)):
        workload = replace(wide(prompt_tokens=rows, answer_tokens=4, group_size=1, prompts_per_step=1), card=card)
        inside = [made for made in simulate(workload, settings).phases["rollout"].largest if "inside" in made.where]
        assert [made.bytes for made in inside] == ([65536 * 2 + 2 * 1024 * 4] if decodes else [])


def test_the_same_question_has_the_same_answer() -> None:
    assert simulate(wide(), SETTINGS) == simulate(wide(), SETTINGS)


@pytest.mark.parametrize("expandable_segments", [True, False])
def test_segments_change_what_is_reserved(expandable_segments: bool) -> None:
    simulation = simulate(wide(), SETTINGS, expandable_segments=expandable_segments)
    assert_sound(simulation)
    # Expandable segments grow by 2 MiB and 20 MiB; this run needs one of the first kind, or of the second as well.
    assert all(phase.reserved_bytes % (2 << 20) == 0 for phase in simulation.phases.values())


@pytest.mark.parametrize(
    ("phase", "name", "values"),
    [
        ("rollout", "answer_tokens", [1, 2, 12, 40]),
        ("rollout", "prompt_tokens", [1, 9, 40]),
        ("rollout", "max_concurrent", [1, 5, 8]),
        ("update", "answer_tokens", [1, 2, 12, 40]),
        ("update", "micro_batch_tokens", [1, 60, 200]),
        ("update", "group_size", [1, 4]),
        ("update", "rank", [1, 64]),
    ],
)
def test_more_work_never_needs_less(phase: str, name: str, values: list[int]) -> None:
    settings = MemorySettings(max_concurrent=8, micro_batch_tokens=1000, head_chunk_tokens=16)
    workload = workload_of(tiny_shape("qwen3"), AMPERE, "bfloat16", quantized=True)
    peaks = []
    for value in values:
        if hasattr(settings, name):
            simulation = simulate(workload, replace(settings, **{name: value}))
        else:
            simulation = simulate(replace(workload, **{name: value}), settings)
        assert_sound(simulation)
        peaks.append(simulation.phases[phase].allocated_bytes)
    assert peaks == sorted(peaks)
    assert peaks[0] < peaks[-1]


def test_what_a_run_refuses_is_refused() -> None:
    with pytest.raises(ModelError, match="same tensor"):
        simulate(workload_of(tiny_shape(tied=True), AMPERE), replace(SETTINGS, offload_embeddings=True))
    with pytest.raises(ModelError, match="matches no layer"):
        simulate(workload_of(tiny_shape(), AMPERE, targets=("attention",)), SETTINGS)


def test_adapters_on_some_layers_need_less() -> None:
    some, all_of_them = (simulate(wide(targets=targets, rank=64), SETTINGS) for targets in (("q_proj", "v_proj"), None))
    # fp32 masters of rank 64, and the 16-bit copies of them
    adapters = [64 * (4 + 2) * sizes for sizes in (2 * 128, 4 * 128 + 3 * 1088)]
    for simulation, size in zip((some, all_of_them), adapters, strict=True):
        assert Allocation("outside the model: adapter", size) in simulation.phases["update"].largest
    assert some.peak_bytes <= all_of_them.peak_bytes
