"""Peak memory of a run by arithmetic: every tensor that our code keeps, in bytes, before anything is downloaded.

A phase has several moments at which it may be at its highest (the update: the head, the backward of one layer's MLP or
norm, that of the last norm). The items of a phase are those of its highest moment, so they add up to its peak, and what
another moment would need is not among them.

Where a formula comes from is said beside it; those of a layer were compared with live bytes of the real layers on fake
tensors (`memory.live`), and agree to about 1 % for Llama, Qwen2.5 and Qwen3 in 16 bits. Only the gaps of the
allocator are fitted, see `GAP_LOGIT_BYTES`. Sampling without top_k, top_p and min_p is assumed; those copy the logits a
few times more.

T are the tokens of a micro-batch, N those that predict something, H the hidden width, I that of the MLP, q and kv those
of all query and key heads, e the bytes of a value in the compute dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lowmem_grpo.catalog.shapes import ModelShape
from lowmem_grpo.planning.workload import Workload
from lowmem_grpo.types import MemorySettings

__all__ = [
    "CONTEXT_BYTES",
    "KV_ITEM",
    "PHASES",
    "Estimate",
    "Item",
    "MicroBatch",
    "adapter_values",
    "estimate",
    "load_items",
    "micro_batch",
    "prefill_tokens",
    "resident_items",
    "rollout_items",
    "update_items",
]

PHASES = ("load", "rollout", "update")

_Sizes = list[tuple[str, float]]
"""Names and bytes that are there at the same moment."""

CONTEXT_BYTES = int(0.7 * 2**30)
"""CUDA context, kernels and cuBLAS workspaces: an assumption until it is measured on a card."""

PROCESS_BYTES = int(0.7 * 2**30)
"""Python, torch and the other libraries, where they share the memory with the model: on a CPU. Measured on Linux: a
quickstart takes .66 to .73 GiB more than its tensors."""

NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Per weight: 4 bits, an 8-bit scale per 64, an fp32 scale of those per 256 (double quantisation, arXiv 2305.14314)."""

SCALE_BYTES = 4 / 64
"""Per weight while it is decoded: its scales in fp32."""

MASTER_BYTES = 4
"""Per adapter value: the fp32 master; as much again for its gradient. The copy is in the compute dtype."""

OPTIMIZER_BYTES = {"adamw": 8.0, "adamw_8bit": 2 + 8 / 256}
"""Per adapter value: two fp32 moments, or two 8-bit ones with an fp32 scale each per 256 values."""

LOGIT_BYTES = 8
"""Head, per logit of a chunk: fp32 logits and their exponentials (`memory.head`)."""

SAMPLED_LOGIT_BYTES = 8
"""Sampler, per logit: in fp32, and lowered by the largest (`rollout.sampling`)."""

SUMMED_LOGIT_BYTES, SUMMED_ROWS = 8, 8
"""Sampler: the sums over words copy up to 8 rows to fp64."""

DECODE_SCORE_BYTES = 12
"""Decode step, per attention score: the raw one, scaled, with the mask added, all fp32 (`DecodeLayout.attend`)."""

OPEN_SCORE_BYTES = 12
"""Update, per score where a softcap keeps fused kernels out: tanh, masked, softmax in fp32, weights, mask."""

NORM_BYTES = 4
"""Per value of a norm's input: transformers computes norms in fp32 and keeps that copy (in fp32 the input itself)."""

NORM_BACKWARD_BYTES = {2: 20, 4: 16}
"""Backward of a layer's norm per T x H, by e: what comes from above, and four fp32 tensors at a time."""

LAST_NORM_BACKWARD_BYTES = 20
"""The same of the norm behind the last layer."""

GAP_LOGIT_BYTES, GAP_WEIGHTS = 4, 2
"""Update on a GPU: what the allocator holds and cannot use, per logit of a chunk and in decoded weights. Not derived
but fitted to what `memory.allocator` reserves for traces of ten models; `scripts/bench_plan.py` compares. The allocated
bytes alone are 3 to 22 % less."""

TILE_TOKENS = 256
"""Answers share an attention tile up to this many tokens (`attention.TILE_TOKENS`)."""


KV_ITEM, CONTEXT_ITEM = "keys and values", "CUDA context"
"""Items that others look for: the sampler's cache, and what torch does not count."""


@dataclass(frozen=True, slots=True)
class Item:
    """Bytes under a name for users. `phase` is one of `PHASES`, "steps" for what rollout and update both hold and the
    load does not (the adapter), or "all".

    >>> Item("4-bit weights", "all", 1 << 30).phase
    'all'
    """

    name: str
    phase: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a run needs, item by item.

    >>> estimate = Estimate((Item("weights", "all", 10), Item("adapter", "steps", 2), Item("logits", "update", 5)))
    >>> estimate.phase_bytes("load"), estimate.phase_bytes("rollout"), estimate.peak_bytes, estimate.peak_phase
    (10, 12, 17, 'update')
    """

    items: tuple[Item, ...]

    def phase_bytes(self, phase: str) -> int:
        """Bytes at the highest moment of a phase."""
        held = {"all", phase} if phase == "load" else {"all", "steps", phase}
        return sum(item.bytes for item in self.items if item.phase in held)

    @property
    def context_bytes(self) -> int:
        """What CUDA itself takes, which torch does not count."""
        return sum(item.bytes for item in self.items if item.name == CONTEXT_ITEM)

    @property
    def peak_phase(self) -> str:
        """The phase that needs the most, of equal ones the first."""
        return max(PHASES, key=self.phase_bytes)

    @property
    def peak_bytes(self) -> int:
        """The most that any phase needs."""
        return self.phase_bytes(self.peak_phase)

    @property
    def resident_bytes(self) -> int:
        """What stays from step to step: weights, adapter, optimizer state and the CUDA context."""
        return sum(item.bytes for item in self.items if item.phase in ("all", "steps"))

    def to_json(self) -> dict[str, Any]:
        """JSON values: `peak_bytes`, `phases` and `items`, as in `plan --json`."""
        return {
            "peak_bytes": self.peak_bytes,
            "phases": {phase: self.phase_bytes(phase) for phase in PHASES},
            "items": [{"name": item.name, "phase": item.phase, "bytes": item.bytes} for item in self.items],
        }


def estimate(workload: Workload, settings: MemorySettings) -> Estimate:
    """The peak of each phase, and what it is made of."""
    return Estimate(
        (
            *resident_items(workload, settings),
            *load_items(workload, settings),
            *rollout_items(workload, settings),
            *update_items(workload, settings),
        )
    )


# --------------------------------------------------------------------------------------------------- resident and load


@functools.lru_cache(maxsize=64)
def adapter_values(shape: ModelShape, rank: int, targets: tuple[str, ...] | None) -> int:
    """Trainable numbers of the adapter; kept, since a search asks for them a thousand times."""
    return shape.lora_parameters(rank, targets)


def resident_items(workload: Workload, settings: MemorySettings) -> tuple[Item, ...]:
    """Weights and context ("all"), adapter and optimizer state ("steps")."""
    shape, e = workload.shape, workload.value_bytes
    weights = shape.linear_parameters
    values = adapter_values(shape, workload.rank, workload.targets)
    copy = 0 if workload.dtype == "float32" else e
    on_gpu = workload.card.device != "cpu"
    if shape.tied:
        embedding = [("embedding and head", shape.embedding_parameters * e)]
    else:
        on_card = 0 if settings.offload_embeddings else shape.embedding_parameters * e
        embedding = [("embedding", on_card), ("head", shape.head_parameters * e)]
    held = [
        ("4-bit weights", weights * NF4_BYTES) if workload.quantized else ("weights", weights * e),
        ("decoded weights", weights * e if workload.quantized and workload.decoded else 0),
        *embedding,
        ("norms and biases", (shape.norm_parameters + shape.bias_parameters) * e),
        (CONTEXT_ITEM, CONTEXT_BYTES if on_gpu else 0),
        ("Python and its libraries", 0 if on_gpu else PROCESS_BYTES),
    ]
    trained = [
        ("adapter", values * MASTER_BYTES),
        ("adapter copy", values * copy),
        ("reference adapter", values * (MASTER_BYTES + copy) if workload.reference_adapter else 0),
        ("optimizer state", values * OPTIMIZER_BYTES[workload.optimizer]),
    ]
    return (*_items("all", held), *_items("steps", trained))


def load_items(workload: Workload, settings: MemorySettings) -> tuple[Item, ...]:
    """The largest weight on its way to 4 bits, and the embedding on its way to the host."""
    parts: list[tuple[str, float]] = []
    if settings.offload_embeddings:
        parts.append(("embedding, not yet on the host", workload.shape.embedding_parameters * workload.value_bytes))
    if workload.quantized and not workload.shape.quantized:
        largest = _largest_weight(workload.shape)
        parts.append(("one weight, not yet quantised", largest * workload.value_bytes))
    return _items("load", parts)


def _largest_weight(shape: ModelShape) -> int:
    return max(linear.inputs * linear.outputs for linear in shape.linears)


def _decoded_weight(workload: Workload) -> float:
    """The largest weight decoded for one product (`memory.lora`), with its scales in fp32; 0 if it is held decoded."""
    if not workload.quantized or workload.decoded:
        return 0.0
    return _largest_weight(workload.shape) * (workload.value_bytes + SCALE_BYTES)


# ------------------------------------------------------------------------------------------------------------- rollout


def prefill_tokens(workload: Workload, settings: MemorySettings) -> int:
    """Prompt tokens that are forwarded at a time at most."""
    return min(
        max(settings.prefill_tokens, workload.prompt_tokens),
        _prompt_slots(workload, settings) * workload.prompt_tokens,
    )


def rollout_items(workload: Workload, settings: MemorySettings) -> tuple[Item, ...]:
    """Keys and values, and the highest of: forwarding prompts, attention of a decode step, sampling from the logits."""
    shape, e = workload.shape, workload.value_bytes
    slots = _slots(workload, settings)
    tokens = workload.prompt_tokens + workload.answer_tokens
    held = [
        (KV_ITEM, _kv_bytes(workload, settings)),
        ("last hidden states", 2 * slots * shape.hidden * e),
    ]
    moments: list[_Sizes] = [
        _forward(workload, settings, max(prefill_tokens(workload, settings), slots)),
        [("attention scores", DECODE_SCORE_BYTES * slots * shape.heads * tokens)],
        [
            (
                "logits of the sampler",
                shape.vocab * (SAMPLED_LOGIT_BYTES * slots + SUMMED_LOGIT_BYTES * min(slots, SUMMED_ROWS)),
            )
        ],
    ]
    return _items("rollout", [*held, *max(moments, key=_sum)])


def _slots(workload: Workload, settings: MemorySettings) -> int:
    return min(settings.max_concurrent, workload.rows)


def _prompt_slots(workload: Workload, settings: MemorySettings) -> int:
    """As in `rollout.decoding.slot_shape`."""
    slots = _slots(workload, settings)
    return min(workload.prompts_per_step, slots, -(-slots // workload.group_size) + 1)


def _kv_bytes(workload: Workload, settings: MemorySettings) -> int:
    """As in `SlotShape.bytes`: in the compute dtype, or one byte a value, a scale per head, and a buffer."""
    shape, e = workload.shape, workload.value_bytes
    prompts = _prompt_slots(workload, settings) * workload.prompt_tokens
    answers = _slots(workload, settings) * workload.answer_tokens
    heads = 2 * shape.layers * shape.kv_heads * (prompts + answers)
    if workload.kv_int8:
        return heads * (shape.head_dim + e) + shape.kv_heads * shape.head_dim * max(prompts, answers) * e
    return heads * shape.head_dim * e


def _forward(workload: Workload, settings: MemorySettings, tokens: int) -> _Sizes:
    """A forward without gradient: the higher of a layer's attention and its MLP.

    Attention: the embedded tokens, the layer's input, the normed one, q, k, v, and three of q's width while it is
    rotated; with norms on q, two fp32 copies of q. MLP: the embedded tokens, the layer's input, that of the MLP's norm
    and the normed one, and three of width I, or two and the weight.
    """
    shape, e = workload.shape, workload.value_bytes
    queries, keys = _widths(shape)
    attention = tokens * e * (3 * shape.hidden + 4 * queries + 2 * keys)
    if _has_head_norms(shape) and e == 2:
        attention = max(attention, tokens * (3 * e * shape.hidden + 10 * queries))
    tile = min(settings.mlp_tile_tokens or tokens, tokens)
    around = tokens * e * shape.hidden * (5 if settings.mlp_tile_tokens else 4)
    wide, weight = _wide_and_weight(workload, tile, most=3, at_weight=2)
    if attention > around + wide + weight:
        return [("prompt activations", attention)]
    return [("prompt activations", around + wide), ("decoded weight", weight)]


def _wide_and_weight(workload: Workload, tokens: int, *, most: int, at_weight: int) -> tuple[float, float]:
    """(bytes of width I, bytes of a decoded weight): `most` tensors alone, or `at_weight` of them beside the weight."""
    one = tokens * workload.shape.intermediate * workload.value_bytes
    weight = _decoded_weight(workload)
    return (most * one, 0.0) if (most - at_weight) * one >= weight else (at_weight * one, weight)


# -------------------------------------------------------------------------------------------------------------- update


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The largest micro-batch of a step: tokens T, and the prompts and answers among them.

    `own` is what an answer adds: all its tokens but the last, from which nothing is predicted. `is_only_one` says that
    all tokens of the step are in it.
    """

    tokens: int
    prompts: int
    answers: int
    own: int
    prompt_tokens: int
    is_only_one: bool

    @property
    def predictors(self) -> int:
        """N, tokens from which others are predicted: those of the answers and the last one of each prompt."""
        return self.tokens - self.prompts * (self.prompt_tokens - 1)

    @property
    def tiles(self) -> int:
        """Attention tiles besides those of the prompts; each repeats the keys of its prompt."""
        return -(-self.answers // self.answers_of_tile)

    @property
    def answers_of_tile(self) -> int:
        """Answers that share a tile."""
        return max(1, TILE_TOKENS // max(1, self.own))


def micro_batch(workload: Workload, settings: MemorySettings) -> MicroBatch:
    """The largest that `batching` may pack: the budget, or one answer with its prompt, or all there is."""
    prompt, own = workload.prompt_tokens, workload.answer_tokens - 1
    group = prompt + workload.group_size * own
    everything = workload.prompts_per_step * group
    tokens = min(everything, max(settings.micro_batch_tokens, prompt + own))
    prompts = max(1, tokens // group)
    answers = max(1, (tokens - prompts * prompt) // own) if own else prompts * workload.group_size
    return MicroBatch(tokens, prompts, answers, own, prompt, is_only_one=tokens == everything)


def update_items(workload: Workload, settings: MemorySettings) -> tuple[Item, ...]:
    """The adapter's gradients, what waits for the backward, and the highest of the head, a layer and the last norm.

    From the second micro-batch on the gradients of the one before are there all along. A single one has them only
    towards the end of its backward, when what all layers kept is gone but for one.
    """
    shape, e = workload.shape, workload.value_bytes
    micro = micro_batch(workload, settings)
    width = micro.tokens * shape.hidden
    gradients = ("adapter gradients", adapter_values(shape, workload.rank, workload.targets) * float(MASTER_BYTES))
    kept, one_kept, layer = _kept(workload, settings, micro)
    of_layer = [[*layer, *_mlp_backward(workload, settings, micro.tokens)]]
    if settings.mlp_tile_tokens:
        of_layer.append([*layer, ("gradients of a norm", NORM_BACKWARD_BYTES[e] * width)])
    last_norm = ("last norm", NORM_BYTES * width)
    chunk = min(settings.head_chunk_tokens, micro.predictors)
    of_head: list[_Sizes] = [
        [
            last_norm,
            ("hidden states", e * (width + 2 * micro.predictors * shape.hidden)),
            ("logits", LOGIT_BYTES * chunk * shape.vocab),
        ],
        [last_norm, ("gradients of the last norm", LAST_NORM_BACKWARD_BYTES * width)],
    ]
    if micro.is_only_one:
        moments = [
            *([*kept, *moment] for moment in (*of_head, *of_layer)),
            *([gradients, *one_kept, *moment] for moment in of_layer),
        ]
    else:
        moments = [[gradients, *kept, *moment] for moment in (*of_head, *of_layer)]
    on_gpu = workload.card.device != "cpu"
    gaps = GAP_LOGIT_BYTES * chunk * shape.vocab + GAP_WEIGHTS * _decoded_weight(workload) if on_gpu else 0
    return _items("update", [*max(moments, key=_sum), ("gaps of the allocator", gaps)])


def _kept(workload: Workload, settings: MemorySettings, micro: MicroBatch) -> tuple[_Sizes, _Sizes, _Sizes]:
    """What waits for the backward of all layers, of one layer, and what the layer at work has besides."""
    shape = workload.shape
    width = micro.tokens * shape.hidden
    recomputes = settings.activation_checkpointing
    layer = [*_layer_core(workload, micro, keeps_input=recomputes), *_whole_mlp(workload, settings, micro.tokens)]
    if not recomputes:
        one, name = _sum(layer), "activations of all layers"
        # Nothing before the first layer needs a gradient, so its first norm keeps nothing.
        return [(name, shape.layers * one - NORM_BYTES * width)], layer, []
    one = float(width * workload.value_bytes)
    name = "layer inputs"
    return (
        [(name, one * (min(2, shape.layers) if settings.offload_activations else shape.layers))],
        [(name, one)],
        layer,
    )


def _layer_core(workload: Workload, micro: MicroBatch, *, keeps_input: bool) -> _Sizes:
    """What one layer keeps for its backward besides its MLP.

    Norms keep an fp32 copy of their input (in fp32 the input itself, of which a checkpoint holds one already); q, k, v
    share their input, as do gate and up (`memory.lora`); attention keeps q, k, v, its output and fp32 log-sum-exps.
    """
    shape, e, tokens = workload.shape, workload.value_bytes, micro.tokens
    queries, keys = _widths(shape)
    norms = _hidden_norms(shape) - (keeps_input and e == 4)
    head_norms = NORM_BYTES * (queries + keys) if _has_head_norms(shape) else 0
    outputs = 1 if workload.has_flash_attn else 2  # the tiles' outputs are joined to a second copy
    return [
        ("norms of one layer", tokens * (norms * NORM_BYTES * shape.hidden + head_norms)),
        ("inputs of one layer's products", 2 * tokens * shape.hidden * e),
        (
            "attention of one layer",
            tokens * ((1 + outputs) * queries * e + 4 * shape.heads) + 2 * e * _key_values(workload, micro),
        ),
        ("scores and masks of one layer", _scores(workload, micro)),
    ]


def _key_values(workload: Workload, micro: MicroBatch) -> int:
    """Numbers of all keys (as many again of values) that attention keeps in one layer (`attention.PackedLayout`).

    The keys as they were made stay, since those of a prompt are a part of them; every tile behind a prompt has a copy
    of the prompt's and its own. Kernels that cannot share a key head get keys as wide as the queries: those before
    capability 8 or in fp32, and under a mask all of a GPU.
    """
    shape = workload.shape
    queries, keys = _widths(shape)
    if workload.has_flash_attn:
        return keys * (micro.tokens + micro.answers * micro.prompt_tokens)
    of_prompts = micro.prompts * micro.prompt_tokens
    of_tiles = micro.tiles * micro.prompt_tokens + micro.tokens - of_prompts
    on_cpu = workload.card.device == "cpu"
    if on_cpu or (workload.value_bytes == 2 and workload.card.capability >= (8, 0)):
        masked = micro.answers_of_tile > 1 or _is_windowed(workload)
        return keys * micro.tokens + (queries if masked and not on_cpu else keys) * of_tiles
    return queries * (of_prompts + of_tiles)


def _is_windowed(workload: Workload) -> bool:
    shape = workload.shape
    return shape.window is not None and shape.window < workload.prompt_tokens + workload.answer_tokens


def _scores(workload: Workload, micro: MicroBatch) -> int:
    """Scores computed openly where they are capped, and the masks that a CPU makes of every tile."""
    own = min(micro.own * micro.answers_of_tile, micro.tokens - micro.prompts * micro.prompt_tokens)
    seen = micro.tiles * own * (micro.prompt_tokens + own)
    # gemma2 caps its scores where its config says nothing, null means no cap.
    capped = workload.shape.config.get("attn_logit_softcapping", workload.shape.family == "gemma2")
    if capped and not workload.has_flash_attn:
        return OPEN_SCORE_BYTES * workload.shape.heads * seen
    return workload.value_bytes * seen if workload.card.device == "cpu" else 0


def _whole_mlp(workload: Workload, settings: MemorySettings, tokens: int) -> _Sizes:
    """Gate, its activation, up and their product; a tiled MLP keeps its input only, which is counted already."""
    if settings.mlp_tile_tokens:
        return []
    return [("MLP of one layer", 4 * tokens * workload.shape.intermediate * workload.value_bytes)]


def _mlp_backward(workload: Workload, settings: MemorySettings, tokens: int) -> _Sizes:
    """Above what is kept: the gradient from above, and two gradients of width I, or one and the weight.

    Tiled (`memory.tiled`): also the gradient of the input, and for one tile six of width I, or five and the weight.
    """
    e, hidden = workload.value_bytes, workload.shape.hidden
    if tile := min(settings.mlp_tile_tokens, tokens):
        wide, weight = _wide_and_weight(workload, tile, most=6, at_weight=5)
        gradients = 2 * tokens * hidden * e
        return [
            ("MLP of one tile", wide + tile * hidden * e),
            ("gradients of one layer", gradients),
            ("decoded weight", weight),
        ]
    wide, weight = _wide_and_weight(workload, tokens, most=2, at_weight=1)
    return [("gradients of one layer", wide + tokens * hidden * e), ("decoded weight", weight)]


# ------------------------------------------------------------------------------------------------------------- helpers


def _widths(shape: ModelShape) -> tuple[int, int]:
    """Width of all query heads and of all key heads."""
    return shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim


def _hidden_norms(shape: ModelShape) -> int:
    """Norms of width H in a layer: 2, or 4 in gemma."""
    return (shape.norm_parameters - shape.hidden) // shape.layers // shape.hidden


def _has_head_norms(shape: ModelShape) -> bool:
    """Whether queries and keys have norms: what norms have beyond whole widths H."""
    return (shape.norm_parameters - shape.hidden) // shape.layers % shape.hidden > 0


def _sum(parts: _Sizes) -> float:
    return sum(size for _, size in parts)


def _items(phase: str, parts: Iterable[tuple[str, float]]) -> tuple[Item, ...]:
    """Whole bytes, without what takes none."""
    return tuple(Item(name, phase, int(size)) for name, size in parts if size)
