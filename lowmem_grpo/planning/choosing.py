"""Which settings a run takes: of all combinations that fit, the one with the least time for a step.

Each setting has a short ladder of values from the fastest to the leanest. Rollout and update share only the weights and
the tiles of the MLPs, so each phase is searched on its own: some hundred estimates, no heuristics. The choice therefore
fits whenever any combination fits, and a larger budget never gives a slower one. What the user has set is a ladder of
one value. Nothing that changes the training is chosen; `suggestions` names such changes, and says so.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

from lowmem_grpo.planning.budget import (
    Estimate,
    Item,
    estimate,
    load_items,
    micro_batch,
    resident_items,
    rollout_items,
    update_items,
)
from lowmem_grpo.planning.timing import estimate_time, rollout_seconds, update_seconds
from lowmem_grpo.planning.workload import Workload
from lowmem_grpo.types import Card, MemorySettings

__all__ = [
    "Change",
    "Choice",
    "Suggestion",
    "budget_bytes",
    "candidates",
    "choose",
    "key_of",
    "largest_group",
    "longest_answer",
    "suggestions",
]

SAFETY_SHARE = 0.02
"""Of the usable memory, left free."""

PREFILL_TOKENS = (2048, 1024, 512, 256)
MICRO_BATCH_TOKENS = 8192
"""The largest micro-batch that is tried; more tokens make no product faster."""
HEAD_CHUNK_TOKENS = (256, 128, 64)
MLP_TILE_TOKENS = (0, 2048, 1024, 512, 256, 128)

SMALLEST_ANSWER_TOKENS, SMALLEST_RANK, SMALLEST_GROUP = 16, 4, 2
"""What `candidates` suggests at the least."""

MOST_ANSWERS = 256
"""Where `largest_group` stops: waves make larger groups fit as well, they only take their time."""

NOMINAL_CPU, NOMINAL_GPU = (20e9, 200e9), (300e9, 30e12)
"""Bytes and operations per second by which settings are ranked where those of the card are unknown."""

NO_FIXED: Mapping[str, Any] = MappingProxyType({})

Ladders = Mapping[str, tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Change:
    """One change that may lower the memory: what to write on the command line, and what the run is then.

    `changes_training` says that the run learns differently.
    """

    text: str
    overrides: tuple[str, ...]
    workload: Workload
    settings: MemorySettings
    changes_training: bool = False


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A change with what it brings: the peak then, the bytes saved, and what it costs in time.

    `extra_s_per_step` is negative where the step gets shorter, None where the card's speed is unknown.
    """

    text: str
    overrides: tuple[str, ...]
    peak_bytes: int
    saves_bytes: int
    extra_s_per_step: float | None
    fits: bool
    changes_training: bool

    def to_json(self) -> dict[str, Any]:
        """JSON values, for `plan --json`."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Choice:
    """Settings, what they need, why each differs from the fastest, and whether they fit (else they are the leanest)."""

    settings: MemorySettings
    estimate: Estimate
    reasons: tuple[str, ...]
    fits: bool


def budget_bytes(card: Card, configured: float | None) -> int:
    """Bytes that a plan may fill: what the user set, in GiB, or the usable memory of the card less 2 %.

    >>> budget_bytes(Card("x", "cuda", (8, 6), 1000), None), budget_bytes(Card("x", "cuda", (8, 6), 1000), 2.0)
    (980, 2147483648)
    """
    return int(configured * 2**30) if configured is not None else int(card.memory_bytes * (1 - SAFETY_SHARE))


def key_of(name: str) -> str:
    """Where the config has a field of MemorySettings.

    >>> key_of("max_concurrent"), key_of("mlp_tile_tokens")
    ('rollout.max_concurrent', 'memory.mlp_tile_tokens')
    """
    return "rollout.max_concurrent" if name == "max_concurrent" else f"memory.{name}"


# -------------------------------------------------------------------------------------------------------------- ladders


def _ladders(workload: Workload) -> dict[str, tuple[Any, ...]]:
    """Values of each setting, the fastest first."""
    on_gpu = workload.card.device != "cpu"
    return {
        "offload_embeddings": (False, True) if on_gpu and not workload.shape.tied else (False,),
        "max_concurrent": _concurrency(workload.rows),
        "prefill_tokens": _down_to(PREFILL_TOKENS, workload.prompt_tokens),
        "activation_checkpointing": (False, True),
        "micro_batch_tokens": _micro_batches(workload),
        "offload_activations": (False, True) if on_gpu else (False,),
        "head_chunk_tokens": HEAD_CHUNK_TOKENS,
        "mlp_tile_tokens": MLP_TILE_TOKENS,
    }


def _concurrency(rows: int) -> tuple[int, ...]:
    """The fewest rows for 1, 2, 3, ... waves: 32, 16, 11, 8, ..., 1."""
    return tuple(dict.fromkeys(-(-rows // waves) for waves in range(1, rows + 1)))


def _down_to(values: tuple[int, ...], floor: int) -> tuple[int, ...]:
    """The values, none after the first that is not above the floor: smaller ones change nothing."""
    above = tuple(itertools.takewhile(lambda value: value > floor, values))
    return values[: len(above) + 1]


def _micro_batches(workload: Workload) -> tuple[int, ...]:
    """All tokens of a step (or the largest micro-batch), halved down to one answer with its prompt."""
    everything, smallest = (
        micro_batch(workload, MemorySettings(1, micro_batch_tokens=tokens)).tokens for tokens in (MICRO_BATCH_TOKENS, 1)
    )
    halves = itertools.takewhile(lambda tokens: tokens > smallest, (everything >> i for i in itertools.count()))
    return (*halves, smallest)


# --------------------------------------------------------------------------------------------------------------- choose


@dataclass(frozen=True, slots=True)
class _Option:
    """Settings of one phase: seconds, steps away from the fastest, bytes above the resident ones."""

    seconds: float
    distance: int
    bytes: int
    values: Mapping[str, Any]


def choose(workload: Workload, budget_bytes: int, fixed: Mapping[str, Any] = NO_FIXED) -> Choice:
    """The quickest settings that fit `budget_bytes`, or the leanest if none do.

    `fixed` names fields of `MemorySettings` that keep the value they have there. On a CPU nothing is offloaded.

    Raises ValueError for a name in `fixed` that is no setting.
    """
    ladders = _with_fixed(_ladders(workload), fixed)
    best = min(_plans(_ranked(workload), budget_bytes, ladders), key=lambda plan: _preference(plan, budget_bytes))
    settings = MemorySettings(**best.values)
    fastest = MemorySettings(**{name: values[0] for name, values in ladders.items()})
    reasons = tuple(_reasons(workload, fastest, settings, tuple(ladders)))
    return Choice(settings, estimate(workload, settings), reasons, best.bytes <= budget_bytes)


def _with_fixed(ladders: Ladders, fixed: Mapping[str, Any]) -> Ladders:
    if unknown := set(fixed) - set(ladders):
        raise ValueError(f"fixed names {sorted(unknown)[0]!r}, which is no setting; there are {', '.join(ladders)}.")
    return {name: (fixed[name],) if name in fixed else values for name, values in ladders.items()}


def _ranked(workload: Workload) -> Workload:
    """The workload on a card whose speed is known, if need be a nominal one: settings are ranked by it."""
    card = workload.card
    if card.bandwidth_bytes_per_s > 0 and card.flops_per_s > 0:
        return workload
    bandwidth, flops = NOMINAL_CPU if card.device == "cpu" else NOMINAL_GPU
    return replace(workload, card=replace(card, bandwidth_bytes_per_s=bandwidth, flops_per_s=flops))


def _plans(workload: Workload, budget_bytes: int, ladders: Ladders) -> Iterator[_Option]:
    """For each choice of what the phases share, the best of each phase put together: time of both, highest peak."""
    for values, distance in _combinations(ladders, ("offload_embeddings", "mlp_tile_tokens")):
        settings = replace(MemorySettings(1), **values)
        resident = resident_items(workload, settings)
        held = _bytes(resident)
        loading = _bytes(item for item in resident if item.phase == "all") + _bytes(load_items(workload, settings))
        rollout = _best(_rollout_options(workload, settings, ladders), budget_bytes - held)
        update = _best(_update_options(workload, settings, ladders), budget_bytes - held)
        yield _Option(
            rollout.seconds + update.seconds,
            distance + rollout.distance + update.distance,
            max(loading, held + max(rollout.bytes, update.bytes)),
            {**values, **rollout.values, **update.values},
        )


def _combinations(ladders: Ladders, names: tuple[str, ...]) -> Iterator[tuple[dict[str, Any], int]]:
    """Every combination of the values of these settings, and how many rungs it lies below the fastest."""
    rungs = [list(enumerate(ladders[name])) for name in names]
    for combination in itertools.product(*rungs):
        yield {name: value for name, (_, value) in zip(names, combination, strict=True)}, sum(i for i, _ in combination)


def _rollout_options(workload: Workload, settings: MemorySettings, ladders: Ladders) -> Iterator[_Option]:
    for values, distance in _combinations(ladders, ("max_concurrent", "prefill_tokens")):
        tried = replace(settings, **values)
        yield _Option(rollout_seconds(workload, tried), distance, _bytes(rollout_items(workload, tried)), values)


def _update_options(workload: Workload, settings: MemorySettings, ladders: Ladders) -> Iterator[_Option]:
    names = ("activation_checkpointing", "micro_batch_tokens", "offload_activations", "head_chunk_tokens")
    is_open = any(len(ladders[name]) > 1 for name in ("activation_checkpointing", "offload_activations"))
    for values, distance in _combinations(ladders, names):
        # Only what activation checkpointing keeps can be offloaded.
        if is_open and values["offload_activations"] and not values["activation_checkpointing"]:
            continue
        tried = replace(settings, **values)
        yield _Option(update_seconds(workload, tried), distance, _bytes(update_items(workload, tried)), values)


def _best(options: Iterable[_Option], room_bytes: int) -> _Option:
    return min(options, key=lambda option: _preference(option, room_bytes))


def _preference(option: _Option, room_bytes: int) -> tuple[float, ...]:
    """Sorts the quickest that fits first, of equal ones the nearest to the fastest settings; else the leanest."""
    if option.bytes <= room_bytes:
        return 0, option.seconds, option.distance, option.bytes
    return 1, option.bytes, option.seconds, option.distance


def _bytes(items: Iterable[Item]) -> int:
    return sum(item.bytes for item in items)


# -------------------------------------------------------------------------------------------------------------- reasons

_REASONS: Mapping[str, str] = {
    "offload_embeddings": "the embedding would lie on the card; it lies in host memory",
    "max_concurrent": "{before} answers would decode at once; {after} do, so that keys and values fit",
    "prefill_tokens": "prompts would be forwarded {before} tokens at a time; it is {after}",
    "activation_checkpointing": "the activations of all layers would be kept; they are computed again instead",
    "micro_batch_tokens": "a micro-batch would have {before} tokens; it has {after}",
    "offload_activations": "layer inputs would wait on the card for the backward; they wait in host memory",
    "head_chunk_tokens": "the head would work on {before} tokens at a time; it works on {after}",
    "mlp_tile_tokens": "MLPs would work on {before} tokens at a time; they work on {after}",
}

_ADVICE: Mapping[str, str] = {
    "offload_embeddings": "keep the embedding in host memory",
    "max_concurrent": "decode {after} answers at once instead of {before}",
    "prefill_tokens": "forward prompts {after} tokens at a time instead of {before}",
    "activation_checkpointing": "compute activations again instead of keeping them",
    "micro_batch_tokens": "take micro-batches of {after} tokens instead of {before}",
    "offload_activations": "let layer inputs wait in host memory",
    "head_chunk_tokens": "let the head work on {after} tokens at a time instead of {before}",
    "mlp_tile_tokens": "let MLPs work on {after} tokens at a time instead of {before}",
}


def _filled(sentences: Mapping[str, str], name: str, before: Any, after: Any) -> str:
    return sentences[name].format(before=before or "all", after=after or "all")


def _reasons(
    workload: Workload, fastest: MemorySettings, chosen: MemorySettings, names: Sequence[str]
) -> Iterator[str]:
    """One sentence for each setting that differs from the fastest, with what it saves when made after those before."""
    settings = fastest
    for name in names:
        before, after = getattr(settings, name), getattr(chosen, name)
        if before == after:
            continue
        changed = replace(settings, **{name: after})
        yield _filled(_REASONS, name, before, after) + _saving(workload, settings, changed)
        settings = changed


def _saving(workload: Workload, before: MemorySettings, after: MemorySettings) -> str:
    """`: 4.1 GiB less in the rollout`, the phase with the larger saving; empty where none has one."""
    old, new = estimate(workload, before), estimate(workload, after)
    saved, phase = max((old.phase_bytes(phase) - new.phase_bytes(phase), phase) for phase in ("rollout", "update"))
    return f": {_size(saved)} less in the {phase}" if saved > 0 else ""


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 / 10 else f"{count / 2**20:.0f} MiB"


# ---------------------------------------------------------------------------------------------------------- suggestions


def candidates(settings: MemorySettings, workload: Workload) -> list[Change]:
    """Single changes that may lower the memory: each leaner value of each setting, then what alters the training."""
    return [*_leaner_settings(settings, workload), *_leaner_training(settings, workload)]


def _leaner_settings(settings: MemorySettings, workload: Workload) -> Iterator[Change]:
    for name, values in _ladders(workload).items():
        before = getattr(settings, name)
        for after in values:
            if not _is_leaner(name, after, before):
                continue
            if name == "offload_activations" and not settings.activation_checkpointing:
                continue
            overrides = (f"{key_of(name)}={str(after).lower()}",)
            text = _filled(_ADVICE, name, before, after)
            yield Change(text, overrides, workload, replace(settings, **{name: after}))
    if workload.quantized and workload.decoded and workload.card.device != "cpu":
        packed = replace(workload, decoded=False)
        yield Change("decode 4-bit weights at every use", ("model.weights=4bit",), packed, settings)


def _is_leaner(name: str, after: Any, before: Any) -> bool:
    """Switches save when on, sizes when smaller; a tile size of 0 is all tokens."""
    if isinstance(after, bool):
        return after and not before
    return 0 < after < (before or after + 1) if name == "mlp_tile_tokens" else after < before


def _leaner_training(settings: MemorySettings, workload: Workload) -> Iterator[Change]:
    def change(text: str, override: str, **values: Any) -> Change:
        return Change(text, (override,), replace(workload, **values), settings, changes_training=True)

    for tokens in _halves(workload.answer_tokens, SMALLEST_ANSWER_TOKENS):
        text = f"limit answers to {tokens} tokens instead of {workload.answer_tokens}"
        yield change(text, f"rollout.max_new_tokens={tokens}", answer_tokens=tokens)
    for rank in _halves(workload.rank, SMALLEST_RANK):
        text = f"take an adapter of rank {rank} instead of {workload.rank}"
        yield change(text, f"lora.rank={rank}", rank=rank)
    if workload.optimizer == "adamw":
        yield change("keep the optimizer's moments in 8 bits", "optim.name=adamw_8bit", optimizer="adamw_8bit")
    for size in _halves(workload.group_size, SMALLEST_GROUP):
        text = f"sample {size} answers to a prompt instead of {workload.group_size}"
        yield change(text, f"rollout.group_size={size}", group_size=size)
    if not workload.kv_int8:
        text = "keep keys and values in 8 bits, which makes the sampler another policy"
        yield change(text, "rollout.kv_dtype=int8", kv_int8=True)
    if not workload.quantized:
        yield change("quantise the weights to 4 bits", "model.quantization=nf4", quantized=True)


def _halves(value: int, smallest: int) -> Iterator[int]:
    """value / 2, value / 4, ... as long as they are not below the smallest.

    >>> list(_halves(100, 16))
    [50, 25]
    """
    while (value := value // 2) >= smallest:
        yield value


def suggestions(workload: Workload, settings: MemorySettings, budget_bytes: int) -> list[Suggestion]:
    """What single changes bring, each setting once: its mildest value that fits, else the one that saves most.

    Sorted: what makes it fit first, then what leaves the training as it is, then by time. Changes that save nothing
    are left out.
    """
    peak, step_s = estimate(workload, settings).peak_bytes, _step_seconds(workload, settings)
    by_key: dict[str, list[Suggestion]] = {}
    for change in candidates(settings, workload):
        peak_then, step_then = (
            estimate(change.workload, change.settings).peak_bytes,
            _step_seconds(change.workload, change.settings),
        )
        extra_s = None if step_s is None or step_then is None else step_then - step_s
        suggestion = Suggestion(
            change.text,
            change.overrides,
            peak_then,
            peak - peak_then,
            extra_s,
            peak_then <= budget_bytes,
            change.changes_training,
        )
        if suggestion.saves_bytes > 0:
            by_key.setdefault(change.overrides[0].partition("=")[0], []).append(suggestion)
    found = [
        next((one for one in same if one.fits), max(same, key=lambda one: one.saves_bytes)) for same in by_key.values()
    ]
    return sorted(found, key=lambda one: (not one.fits, one.changes_training, one.extra_s_per_step or 0.0))


def _step_seconds(workload: Workload, settings: MemorySettings) -> float | None:
    time = estimate_time(workload, settings, None)
    return None if time is None else time.step_s


# --------------------------------------------------------------------------------------------------------------- limits


def longest_answer(workload: Workload, budget_bytes: int, fixed: Mapping[str, Any] = NO_FIXED) -> int:
    """The most `answer_tokens` that fit with the settings chosen anew, up to the model's context; 0 when none do."""

    def fits(tokens: int) -> bool:
        return choose(replace(workload, answer_tokens=tokens), budget_bytes, fixed).fits

    return _largest(fits, workload.shape.max_positions - workload.prompt_tokens)


def largest_group(workload: Workload, budget_bytes: int, fixed: Mapping[str, Any] = NO_FIXED) -> int:
    """The largest `group_size` that fits with the settings chosen anew, up to `MOST_ANSWERS`; 0 when none does.

    Fix `max_concurrent` to ask for groups that decode in so many rows at once.
    """

    def fits(size: int) -> bool:
        return choose(replace(workload, group_size=size), budget_bytes, fixed).fits

    return _largest(fits, MOST_ANSWERS)


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number from 1 to `most` that fits, 0 if none does; what fits below one that fits is not asked.

    >>> _largest(lambda n: n * n < 50, 100)
    7
    """
    if most < 1 or not fits(1):
        return 0
    if fits(most):
        return most
    least, beyond = 1, most
    while beyond - least > 1:
        middle = (least + beyond) // 2
        least, beyond = (middle, beyond) if fits(middle) else (least, middle)
    return least
