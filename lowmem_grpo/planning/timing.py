"""How long a step takes, by two rooflines: a decode step reads the weights, an update multiplies with them.

Each part takes the longer of its bytes over the card's bandwidth and its operations over the card's arithmetic, both at
the share of the data sheet that is assumed below, until a measured step corrects it. Answers of the full length are
assumed, so real runs are quicker.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowmem_grpo.planning.budget import NF4_BYTES, adapter_values, micro_batch, prefill_tokens
from lowmem_grpo.planning.workload import Workload
from lowmem_grpo.types import MemorySettings

__all__ = ["Time", "estimate_time", "rollout_seconds", "update_seconds"]

# All of these are assumptions until a card is measured.

ARITHMETIC_SHARE = 0.5
"""Of the data sheet's 16-bit operations per second, in products of some hundred rows and more."""

FP32_SHARE = 0.25
"""Of the 16-bit rate, in fp32."""

BANDWIDTH_SHARE = 0.7
"""Of the data sheet's bandwidth."""

PCIE_BYTES_PER_S = 12e9
"""Between pinned host memory and the card, one way."""

LAUNCH_S = 25e-6
"""Host time of one operation: Python, torch and the launch of its kernel."""

LAYER_LAUNCHES = 12
"""Operations that the host waits for per layer of a decode step; the rest run beside kernels that take longer."""

HOST_ROWS_S = 1e-4
"""A forward with the embedding on the host: ids over, rows gathered and back, the card idle."""

FUSED_ROWS = 16
"""Rows from which a decode step decodes whole 4-bit weights instead of multiplying them as they are. bitsandbytes' own
figure differs by card and matrix from 4 to 128; it is where both cost the same, so below it the cost grows by row."""

SAMPLER_BYTES = 40
"""Read and written per logit by the sampler: five passes over fp32."""

WATTS_SHARE = 0.8
"""Of the board power, on average."""


@dataclass(frozen=True, slots=True)
class Time:
    """Seconds of a step and of a run, and its energy; `run_s` is None without a number of steps.

    `kwh` is None then too, and where the card's power is unknown. `assumptions` are sentences for the user.
    """

    rollout_s: float
    update_s: float
    step_s: float
    run_s: float | None
    kwh: float | None
    assumptions: tuple[str, ...]


def estimate_time(workload: Workload, settings: MemorySettings, steps: int | None) -> Time | None:
    """The time of a step and of `steps` of them; None when the card's bandwidth or arithmetic is unknown."""
    card = workload.card
    if card.bandwidth_bytes_per_s <= 0 or card.flops_per_s <= 0:
        return None
    rollout_s, update_s = rollout_seconds(workload, settings), update_seconds(workload, settings)
    step_s = rollout_s + update_s
    run_s = None if steps is None else steps * step_s
    kwh = None if run_s is None or card.watts <= 0 else card.watts * WATTS_SHARE * run_s / 3.6e6
    return Time(rollout_s, update_s, step_s, run_s, kwh, _assumptions(workload))


def _assumptions(workload: Workload) -> tuple[str, ...]:
    card = workload.card
    sentences = [
        f"every answer has the full {workload.answer_tokens} tokens; shorter ones take less",
        f"{card.name} reaches {ARITHMETIC_SHARE:.0%} of its arithmetic and {BANDWIDTH_SHARE:.0%} of its bandwidth",
        f"the host needs {LAYER_LAUNCHES * LAUNCH_S * 1e6:.0f} us per layer of a decode step",
        "rewards, evaluation and checkpoints are not counted",
    ]
    if card.watts > 0:
        sentences.append(f"the card draws {WATTS_SHARE:.0%} of its {card.watts:.0f} W, the computer around it nothing")
    return tuple(sentences)


@dataclass(frozen=True, slots=True)
class _Rates:
    """What the card reaches: bytes and operations per second."""

    bytes_per_s: float
    flops_per_s: float

    def seconds(self, bytes_moved: float, flops: float) -> float:
        """The longer of both."""
        return max(bytes_moved / self.bytes_per_s, flops / self.flops_per_s)


def _rates(workload: Workload) -> _Rates:
    card = workload.card
    share = ARITHMETIC_SHARE * (FP32_SHARE if workload.dtype == "float32" else 1.0)
    return _Rates(card.bandwidth_bytes_per_s * BANDWIDTH_SHARE, card.flops_per_s * share)


def _decodes(workload: Workload) -> bool:
    return workload.quantized and not workload.decoded


def _decoding_seconds(workload: Workload) -> float:
    """Decoding every weight once: 4 bits read, the decoded ones written."""
    if not _decodes(workload):
        return 0.0
    bytes_moved = workload.shape.linear_parameters * (NF4_BYTES + workload.value_bytes)
    return bytes_moved / _rates(workload).bytes_per_s


def _products(workload: Workload) -> int:
    """Numbers that every token is multiplied with, without the head: linear layers and the adapter."""
    return workload.shape.linear_parameters + adapter_values(workload.shape, workload.rank, workload.targets)


def _host_rows_seconds(workload: Workload, settings: MemorySettings) -> float:
    return HOST_ROWS_S if settings.offload_embeddings and not workload.shape.tied else 0.0


# ------------------------------------------------------------------------------------------------------------- rollout


def rollout_seconds(workload: Workload, settings: MemorySettings) -> float:
    """Seconds to sample all answers of a step: the prompts forwarded, then `answer_tokens` steps per wave of rows."""
    rows = min(settings.max_concurrent, workload.rows)
    waves = -(-workload.rows // rows)
    step_s = _decode_step_seconds(workload, rows) + _host_rows_seconds(workload, settings)
    return _prefill_seconds(workload, settings) + waves * workload.answer_tokens * step_s


def _decode_step_seconds(workload: Workload, rows: int) -> float:
    """One token for each of `rows`, at half the length of an answer."""
    shape, e = workload.shape, workload.value_bytes
    head = shape.vocab * shape.hidden
    prompts = -(-rows // workload.group_size)
    length = workload.prompt_tokens + workload.answer_tokens / 2
    kv_tokens = prompts * workload.prompt_tokens + rows * workload.answer_tokens / 2
    kv_bytes = shape.kv_values_per_token * kv_tokens * (1 if workload.kv_int8 else e)
    adapter = adapter_values(shape, workload.rank, workload.targets)
    bytes_moved = _weight_bytes(workload, rows) + (head + adapter) * e + kv_bytes + SAMPLER_BYTES * rows * shape.vocab
    attention = 4 * shape.layers * shape.heads * shape.head_dim * length
    flops = rows * (2 * (_products(workload) + head) + attention)
    return _rates(workload).seconds(bytes_moved, flops) + shape.layers * LAYER_LAUNCHES * LAUNCH_S


def _weight_bytes(workload: Workload, rows: int) -> float:
    """Bytes read and written for the linear weights of a decode step."""
    weights, e = workload.shape.linear_parameters, workload.value_bytes
    if not _decodes(workload):
        return weights * e
    # Decoded: 4 bits read, written in the compute dtype, read again by the product.
    return weights * (NF4_BYTES + 2 * e * min(1.0, rows / FUSED_ROWS))


def _prefill_seconds(workload: Workload, settings: MemorySettings) -> float:
    shape = workload.shape
    tokens = workload.prompts_per_step * workload.prompt_tokens
    forwards = -(-tokens // prefill_tokens(workload, settings))
    pairs = workload.prompts_per_step * workload.prompt_tokens**2 / 2
    flops = 2 * tokens * _products(workload) + 4 * shape.layers * shape.heads * shape.head_dim * pairs
    device_s = flops / _rates(workload).flops_per_s + forwards * _decoding_seconds(workload)
    return max(device_s, forwards * shape.layers * LAYER_LAUNCHES * LAUNCH_S)


# -------------------------------------------------------------------------------------------------------------- update


@dataclass(frozen=True, slots=True)
class _Parts:
    """How the step's answers are packed: micro-batches, tokens forwarded in all, and tokens of one micro-batch."""

    micro_batches: int
    tokens: int
    largest: int


def _parts(workload: Workload, settings: MemorySettings) -> _Parts:
    """Whole groups together while they fit, else the answers of a group in parts that each forward the prompt."""
    micro = micro_batch(workload, settings)
    prompt, prompts = workload.prompt_tokens, workload.prompts_per_step
    group = prompt + workload.group_size * micro.own
    if micro.tokens >= group:
        count = -(-prompts // (micro.tokens // group))
        return _Parts(count, prompts * group, micro.tokens)
    answers = max(1, (micro.tokens - prompt) // micro.own)
    parts = prompts * -(-workload.group_size // answers)
    return _Parts(parts, parts * prompt + workload.rows * micro.own, micro.tokens)


def update_seconds(workload: Workload, settings: MemorySettings) -> float:
    """Seconds of the forwards and backwards of a step. A frozen weight needs no gradient: a backward is one product."""
    shape, parts = workload.shape, _parts(workload, settings)
    reference = int(workload.kl)
    recomputed = int(settings.activation_checkpointing)
    passes = 2 + recomputed + reference
    # Tiles compute an MLP again by themselves where no checkpoint does.
    mlp_passes = passes + (settings.mlp_tile_tokens > 0 and not recomputed)
    mlp = _mlp_share(workload)
    tokens_passes = (mlp * mlp_passes + (1 - mlp) * passes) * parts.tokens
    rates = _rates(workload)
    flops = 2 * _products(workload) * tokens_passes + _attention_flops(workload) * (2.5 + 1 + recomputed + reference)
    tiles = -(-parts.largest // settings.mlp_tile_tokens) if settings.mlp_tile_tokens else 1
    decodings = parts.micro_batches * (mlp * mlp_passes * tiles + (1 - mlp) * passes)
    device_s = flops / rates.flops_per_s + decodings * _decoding_seconds(workload)
    host_s = parts.micro_batches * passes * shape.layers * LAYER_LAUNCHES * LAUNCH_S
    layers_s = max(device_s, host_s, _offload_seconds(workload, settings, parts))
    fixed_s = parts.micro_batches * (1 + reference) * _host_rows_seconds(workload, settings)
    return workload.updates_per_rollout * (layers_s + _head_seconds(workload, settings) + fixed_s)


def _mlp_share(workload: Workload) -> float:
    """Of the weights of a layer, those of the MLP: the matrices that the width I is a side of."""
    shape = workload.shape
    of_mlp = ("gate_proj", "up_proj", "gate_up_proj", "down_proj")
    mlp = sum(linear.inputs * linear.outputs for linear in shape.linears if linear.name in of_mlp)
    return mlp * shape.layers / shape.linear_parameters


def _attention_flops(workload: Workload) -> float:
    """Of one forward over all answers, each over its prompt and the half of itself that is before a token."""
    shape, prompt, answer = workload.shape, workload.prompt_tokens, workload.answer_tokens
    pairs = workload.prompts_per_step * prompt**2 / 2 + workload.rows * answer * (prompt + answer / 2)
    return 4 * shape.layers * shape.heads * shape.head_dim * pairs


def _head_seconds(workload: Workload, settings: MemorySettings) -> float:
    """Two products per chunk (`memory.head`), and one more for the reference; small chunks read the head too often."""
    head = workload.shape.vocab * workload.shape.hidden
    predictors = workload.rows * workload.answer_tokens
    products = 2 + int(workload.kl)
    per_chunk = _rates(workload).seconds(head * workload.value_bytes, 2 * head * settings.head_chunk_tokens)
    return products * predictors / settings.head_chunk_tokens * per_chunk


def _offload_seconds(workload: Workload, settings: MemorySettings, parts: _Parts) -> float:
    """Layer inputs to the host and back, beside the computation: only what takes longer than that counts."""
    if not (settings.offload_activations and settings.activation_checkpointing):
        return 0.0
    shape = workload.shape
    return 2 * shape.layers * parts.tokens * shape.hidden * workload.value_bytes / PCIE_BYTES_PER_S
