"""The plan of a run: does it fit, how long does it take, and what would help. No weight is fetched, no GPU asked."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowmem_grpo.catalog import (
    CARDS,
    KNOWN,
    card_named,
    compute_dtype,
    embedded_source,
    inspect_model,
    known_model,
    model_shape,
    shape_of,
)
from lowmem_grpo.catalog.shapes import ModelShape
from lowmem_grpo.config import Config
from lowmem_grpo.errors import ConfigError
from lowmem_grpo.planning.budget import OPTIMIZER_BYTES, adapter_values, micro_batch
from lowmem_grpo.planning.choosing import (
    Choice,
    Suggestion,
    budget_bytes,
    choose,
    key_of,
    largest_group,
    longest_answer,
    suggestions,
)
from lowmem_grpo.planning.timing import Time, estimate_time
from lowmem_grpo.planning.workload import Workload, check_context, fixed_settings, workload_of
from lowmem_grpo.types import Card, MemorySettings

if TYPE_CHECKING:
    from lowmem_grpo.planning.simulate import Simulation

__all__ = ["Plan", "Refusal", "check_fits", "configured_budget", "make_plan", "models_for"]

NIGHT_S = 8 * 3600
"""A night."""

HOST_PROCESS_BYTES = int(2.5 * 2**30)
"""Host memory of a process with torch and CUDA's libraries beside a card, an assumption."""

ANSWER_LINE_BYTES, ANSWER_TOKEN_BYTES = 300, 6
"""On the disk, of an answer and of each of its tokens: assumptions for text in Latin letters."""

KEPT_PARTS = 5
"""Files of `run.completions_cap_mb` that a run keeps: the open one, and what `RunDir.rotate_completions` keeps."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a run does not fit a card, and what would do.

    `overrides` would make it fit this card and change no gradient: memory settings, or a larger memory.budget_gib where
    the card has more. `smallest_card` is a slug of the table and `largest_model` a repository that fits with the same
    prompts and answers, both under the memory settings of the config; `freed_card` is the smallest card without them.
    """

    workload: Workload
    need_bytes: int
    peak_phase: str
    budget_bytes: int
    overrides: tuple[str, ...]
    smallest_card: str | None
    freed_card: str | None
    largest_model: str | None

    @property
    def sentence(self) -> str:
        """What is wrong."""
        workload = self.workload
        prompts = f"prompts of {workload.prompt_tokens} and " if workload.prompt_tokens > 1 else ""
        lengths = f"{prompts}answers of {workload.answer_tokens} tokens"
        return (
            f"{workload.shape.name} with {lengths} needs {_gib(self.need_bytes)} at its peak, in the "
            f"{self.peak_phase}, and has {_room(workload.card, self.budget_bytes)}"
        )

    @property
    def advice(self) -> str:
        """What would do."""
        if self.smallest_card:
            card = f"the smallest card that would do is {self.smallest_card}"
        else:
            card = "no card in the table would do"
        if self.freed_card != self.smallest_card:
            card += f" ({self.freed_card} where the memory settings are left to the plan)"
        if self.largest_model:
            model = f"the largest known model that fits here is {self.largest_model}"
        else:
            model = "no known model fits here like this"
        settings = [f"{' '.join(self.overrides)} would make it fit"] if self.overrides else []
        return ", ".join([card, model, *settings])


@dataclass(frozen=True, slots=True)
class Plan:
    """What is known about a run before it starts; `to_json` has the form of `lowmem-grpo plan --json`.

    `fixed` are the settings that the config made itself. `answer_limit` and `group_limit` are the longest answer and
    the largest group that fit, 0 where nothing does. `time` is None for a card of unknown speed, `simulation` unless it
    was asked for, `refusal` where the run fits. Where there is a simulation, its peaks decide.
    """

    workload: Workload
    budget_bytes: int
    fixed: Mapping[str, Any]
    choice: Choice
    time: Time | None
    suggestions: tuple[Suggestion, ...]
    answer_limit: int
    group_limit: int
    download_bytes: int
    disk_bytes: int
    host_ram_bytes: int
    refusal: Refusal | None
    simulation: Simulation | None

    @property
    def fits(self) -> bool:
        """Whether the peak is within the budget."""
        return self.refusal is None

    @property
    def peak_bytes(self) -> int:
        """The largest of `phases`."""
        return max(self.phases.values())

    @property
    def peak_phase(self) -> str:
        """The phase that needs the most."""
        return max(self.phases, key=lambda phase: self.phases[phase])

    @property
    def phases(self) -> dict[str, int]:
        """Bytes that the card must have in each phase."""
        return _phases(self.choice, self.simulation)

    @property
    def verdict(self) -> str:
        """Whether it fits, in a sentence."""
        if self.refusal is not None:
            return f"It does not fit: {self.refusal.sentence}."
        return (
            f"It fits: {self.workload.shape.name} needs {_gib(self.peak_bytes)} at its peak, in the {self.peak_phase}, "
            f"and has {_room(self.workload.card, self.budget_bytes)}."
        )

    @property
    def steps_by_morning(self) -> int | None:
        """Steps in eight hours."""
        return None if self.time is None else int(NIGHT_S / self.time.step_s)

    def to_json(self) -> dict[str, Any]:
        """JSON values; sizes in bytes. `peak_bytes` and `phases` are the simulated ones where there is a simulation,
        `planned` and `items` always those of the arithmetic."""
        planned, refusal = self.choice.estimate.to_json(), self.refusal
        return {
            "fits": self.fits,
            "verdict": self.verdict,
            "advice": None if refusal is None else refusal.advice,
            "model": self.workload.shape.name,
            "card": self.workload.card.name,
            "budget_bytes": self.budget_bytes,
            "peak_bytes": self.peak_bytes,
            "phases": self.phases,
            "items": planned.pop("items"),
            "planned": planned,
            "simulated": None if self.simulation is None else self.simulation.to_json(),
            "suggestions": [suggestion.to_json() for suggestion in self.suggestions],
            "chosen": {**asdict(self.choice.settings), "reasons": list(self.choice.reasons)},
            "limits": {"answer_tokens": self.answer_limit, "group_size": self.group_limit},
            "time": self._time_json(),
            "download_bytes": self.download_bytes,
            "disk_bytes": self.disk_bytes,
            "host_ram_bytes": self.host_ram_bytes,
            "smallest_card": None if refusal is None else refusal.smallest_card,
            "largest_model": None if refusal is None else refusal.largest_model,
        }

    def _time_json(self) -> dict[str, Any]:
        """All None for a card of unknown speed."""
        time = self.time
        return {
            "step_s": time and time.step_s,
            "rollout_s": time and time.rollout_s,
            "update_s": time and time.update_s,
            "run_h": None if time is None or time.run_s is None else time.run_s / 3600,
            "kwh": time and time.kwh,
            "steps_by_morning": self.steps_by_morning,
            "assumptions": [] if time is None else list(time.assumptions),
        }


def make_plan(config: Config, card: Card, *, simulate: bool = False) -> Plan:
    """The plan of `config` on `card`, for prompts and answers as long as the config allows.

    `simulate` also runs one step on fake tensors, which takes torch and some seconds, of a large model a minute.

    Raises ModelError for a model that is unknown, unsupported, or whose config lacks a size; DataError for prompt and
    answer beyond the model's context.
    """
    found = _look_up(config)
    dtype, _ = compute_dtype(card, config.model.compute_dtype)
    workload = workload_of(config, found.shape, card, dtype)
    check_context(workload)
    budget, fixed = configured_budget(config, card), fixed_settings(config)
    choice = choose(workload, budget, fixed)
    simulation = _simulation(workload, choice.settings) if simulate else None
    return Plan(
        workload=workload,
        budget_bytes=budget,
        fixed=fixed,
        choice=choice,
        time=estimate_time(workload, choice.settings, config.run.steps),
        suggestions=tuple(suggestions(workload, choice.settings, budget)),
        answer_limit=longest_answer(workload, budget, fixed),
        group_limit=largest_group(workload, budget, fixed),
        download_bytes=found.download_bytes,
        disk_bytes=found.disk_bytes + _run_folder_bytes(config, workload),
        host_ram_bytes=_host_bytes(workload, choice),
        refusal=_refusal(workload, choice, budget, fixed, simulation),
        simulation=simulation,
    )


def configured_budget(config: Config, card: Card) -> int:
    """Bytes that the run may use: memory.budget_gib, on a GPU no more than it has.

    On a CPU the configured figure counts as it is, since what is free there changes from one minute to the next.
    """
    usable, given = budget_bytes(card, None), config.memory.budget_gib
    if given == "auto":
        return usable
    configured = budget_bytes(card, given)
    return configured if card.device == "cpu" else min(configured, usable)


def check_fits(workload: Workload, choice: Choice, budget: int, fixed: Mapping[str, Any]) -> None:
    """Raise ConfigError unless the choice fits: what it needs, and the settings, card and model that would do."""
    if (refusal := _refusal(workload, choice, budget, fixed)) is not None:
        raise ConfigError(f"{refusal.sentence}: {refusal.advice}; `lowmem-grpo plan` ranks all that would make it fit.")


def models_for(card: Card | None) -> list[dict[str, Any]]:
    """Every known model, the smallest first: sizes, licence, and how an ordinary run fits on `card`.

    Ordinary is a prompt of 256 tokens, 8 answers of 512 and an adapter of rank 16. Without a card, `card` and what
    depends on it are None.
    """
    by_size = sorted(KNOWN.items(), key=lambda entry: entry[1].shape.parameters)
    return [
        {
            "name": name,
            "repo": known.repo,
            "parameters": known.shape.parameters,
            "licence": known.licence,
            "download_bytes": known.download_bytes,
            **_ordinary_run(known.shape, card),
        }
        for name, known in by_size
    ]


def _ordinary_run(shape: ModelShape, card: Card | None) -> dict[str, Any]:
    if card is None:
        return {"card": None, "fits": None, "peak_bytes": None, "step_s": None}
    dtype, _ = compute_dtype(card)
    workload = Workload(shape, card, dtype, True, card.device == "cpu", 16, None, "adamw", 1, 8, 256, 512)
    choice = choose(workload, budget_bytes(card, None))
    time = estimate_time(workload, choice.settings, None)
    return {
        "card": card.name,
        "fits": choice.fits,
        "peak_bytes": choice.estimate.peak_bytes,
        "step_s": None if time is None else time.step_s,
    }


# ---------------------------------------------------------------------------------------------------------- the verdict


def _phases(choice: Choice, simulation: Simulation | None) -> dict[str, int]:
    if simulation is None:
        return dict(choice.estimate.to_json()["phases"])
    return {name: phase.reserved_bytes + simulation.context_bytes for name, phase in simulation.phases.items()}


def _simulation(workload: Workload, settings: MemorySettings) -> Simulation:
    from lowmem_grpo.planning.simulate import simulate
    from lowmem_grpo.quiet import quiet_loading

    with quiet_loading():
        return simulate(workload, settings)


def _refusal(
    workload: Workload, choice: Choice, budget: int, fixed: Mapping[str, Any], simulation: Simulation | None = None
) -> Refusal | None:
    """None where it fits. What a simulation needs above the arithmetic is left free in every search."""
    phases = _phases(choice, simulation)
    peak_phase = max(phases, key=lambda phase: phases[phase])
    need = phases[peak_phase]
    if need <= budget:
        return None
    extra = max(0, need - choice.estimate.peak_bytes)
    smallest_card = _smallest_card(workload, fixed, extra)
    return Refusal(
        workload,
        need,
        peak_phase,
        budget,
        _fitting_overrides(workload, choice, fixed, need, budget, extra),
        smallest_card,
        _smallest_card(workload, {}, extra) if fixed else smallest_card,
        _largest_model(workload, budget - extra, fixed),
    )


def _fitting_overrides(
    workload: Workload, choice: Choice, fixed: Mapping[str, Any], need: int, budget: int, extra: int
) -> tuple[str, ...]:
    """One memory setting that would make it fit, or else several, or a budget that the card has room for; or nothing.

    Of several those of the config are enough, unless a simulation needs more than the rest is chosen by.
    """
    single = [one for one in suggestions(workload, choice.settings, budget) if one.fits and not one.changes_training]
    if single and not extra:
        return single[0].overrides
    free = choose(workload, budget - extra)
    if free.fits:
        before, after = asdict(choice.settings), asdict(free.settings)
        changed = [name for name in after if after[name] != before[name] and (name in fixed or extra)]
        return tuple(f"{key_of(name)}={json.dumps(after[name])}" for name in changed)
    if need <= budget_bytes(workload.card, None):
        return (f"memory.budget_gib={math.ceil(need / 2**30 * 10) / 10:g}",)
    return ()


def _smallest_card(workload: Workload, fixed: Mapping[str, Any], extra: int) -> str | None:
    """The first card of the table, by memory, on which the run fits."""
    too_small: set[tuple[int, bool]] = set()
    for slug, spec in CARDS.items():
        kind = (spec.usable_bytes, spec.capability >= (8, 0))
        if kind in too_small:
            continue
        card = card_named(slug)
        if choose(_on_card(workload, card), budget_bytes(card, None) - extra, fixed).fits:
            return slug
        too_small.add(kind)
    return None


def _on_card(workload: Workload, card: Card) -> Workload:
    """The same run on another card; of a run on a CPU, the one that a GPU would have."""
    on_cpu = workload.card.device == "cpu"
    keeps_float32 = workload.dtype == "float32" and not on_cpu
    dtype, _ = compute_dtype(card, "float32" if keeps_float32 else "auto")
    return replace(workload, card=card, dtype=dtype, decoded=workload.decoded and not on_cpu)


def _largest_model(workload: Workload, budget: int, fixed: Mapping[str, Any]) -> str | None:
    """The known model of most parameters that fits into the budget with the same prompts and answers."""
    longest = workload.prompt_tokens + workload.answer_tokens
    for known in sorted(KNOWN.values(), key=lambda known: -known.shape.parameters):
        if known.shape.max_positions >= longest and choose(replace(workload, shape=known.shape), budget, fixed).fits:
            return known.repo
    return None


def _room(card: Card, budget: int) -> str:
    """`11.39 GiB on rtx3060-12gb`, with the setting that allows no more."""
    setting = " (memory.budget_gib)" if budget != budget_bytes(card, None) else ""
    return f"{_gib(budget)} on {card.name}{setting}"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"


# ------------------------------------------------------------------------------------------------ the model, disk, host


@dataclass(frozen=True, slots=True)
class _Found:
    """A model's sizes, the bytes still to fetch, and those that the disk needs for it."""

    shape: ModelShape
    download_bytes: int
    disk_bytes: int


def _look_up(config: Config) -> _Found:
    """What is still to fetch; of a model known from the table all of it, since nobody looks into the cache."""
    name, revision = config.model.name, config.model.revision
    if source := embedded_source(name, revision):
        missing = inspect_model(name).download_bytes
        return _Found(shape_of(name), missing, source.build_bytes if missing else 0)
    if Path(name).expanduser().exists():
        return _Found(shape_of(name), 0, 0)
    if revision is None and (known := known_model(name)):
        return _Found(model_shape(known.config, name), known.download_bytes, known.download_bytes)
    info = inspect_model(name, revision=revision)
    return _Found(model_shape(info.config, name), info.download_bytes, info.download_bytes)


def _run_folder_bytes(config: Config, workload: Workload) -> int:
    """The checkpoints (adapter, best adapter, two moments; one more while it is written), the adapter, the answers."""
    values = adapter_values(workload.shape, workload.rank, workload.targets)
    checkpoint = values * (4 + 4 + OPTIMIZER_BYTES[workload.optimizer])
    most = KEPT_PARTS * config.run.completions_cap_mb << 20
    answer = ANSWER_LINE_BYTES + ANSWER_TOKEN_BYTES * workload.answer_tokens
    answers = most if config.run.steps is None else min(most, config.run.steps * workload.rows * answer)
    return int((config.run.keep_checkpoints + 1) * checkpoint) + 4 * values + answers


def _host_bytes(workload: Workload, choice: Choice) -> int:
    """System memory: the process, what was moved there, on a CPU everything."""
    shape, e, settings = workload.shape, workload.value_bytes, choice.settings
    if workload.card.device == "cpu":
        return choice.estimate.peak_bytes
    tokens = micro_batch(workload, settings).tokens
    inputs = (shape.layers - 1) * shape.hidden * tokens * e if settings.offload_activations else 0
    embedding = shape.embedding_parameters * e if settings.offload_embeddings and not shape.tied else 0
    return HOST_PROCESS_BYTES + inputs + embedding
