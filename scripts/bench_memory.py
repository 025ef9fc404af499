#!/usr/bin/env python
"""What each memory technique saves and what it costs: every one switched off alone, the others as they are.

    python scripts/bench_memory.py --model llama-3.1-8b-instruct --card rtx4060-8gb
    python scripts/bench_memory.py --model qwen2.5-0.5b-instruct --only head-chunk mlp-tiles --json

The run is prompt 256, answer 1024, 8 answers at once, one answer per micro-batch, and everything on but int8 keys and
values, whose row is about switching them on. Columns:

    saved      by how much the simulated peak of the phase in which the technique acts rises without it
    tracked    what it saves by itself, from its own formula, or from live bytes of the real code on real tensors of one
               layer, scaled up; no simulation is asked
    ratio      saved over tracked: less than 1 where something else is the peak of the phase then. In that case the row
               below shows the technique in a run in which it is at the peak. Of expandable segments the ratio is the
               share of the gaps that goes.
    run        by how much the simulated need of the card rises without it, all phases, as the allocator reserves it; 0
               where another phase is the peak of the run
    step       how much longer a step takes with it, by the planner's rooflines on this card
    CPU        the same of the phase alone, measured on this CPU: a small model, with and without it in turns (--time)

Adapters without copies (`memory.lora`) and prompts stored once cannot be switched off, so they have no row.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from lowmem_grpo.batching import largest_micro_batch
from lowmem_grpo.catalog import card_named, compute_dtype, shape_of
from lowmem_grpo.catalog.shapes import model_shape
from lowmem_grpo.memory.allocator import LARGE_SEGMENT_BYTES
from lowmem_grpo.memory.embedding import offload_embedding
from lowmem_grpo.memory.live import LiveBytes
from lowmem_grpo.model import DTYPES, LoraSpec, Policy, attach_adapter
from lowmem_grpo.optim import SMALLEST_QUANTISED, build_optimizer
from lowmem_grpo.planning.budget import micro_batch
from lowmem_grpo.planning.simulate import Simulation, simulate
from lowmem_grpo.planning.timing import estimate_time
from lowmem_grpo.planning.workload import Workload
from lowmem_grpo.quiet import quiet_loading
from lowmem_grpo.rollout.longest import decode_longest, longest_problems
from lowmem_grpo.rollout.slots import SlotShape
from lowmem_grpo.types import Card, GroupSpan, MemorySettings, SamplingParams
from lowmem_grpo.update import Updater, UpdateSettings

PHASES = ("load", "rollout", "update")
CPU = Card("cpu", "cpu", (0, 0), 8 << 30)
TWIN_TOKENS = 320
"""About so many tokens pass the real layers that stand for one of the run: over `attention.TILE_TOKENS`, so that an
answer is a tile of its own there too."""
TOLERANCE = 0.1
"""How far `saved` may be from `tracked` before another run is shown."""


@dataclass(frozen=True, slots=True)
class Base:
    """A run under settings; `note` says how it differs from what was asked for."""

    workload: Workload
    settings: MemorySettings
    expandable_segments: bool = True
    note: str = ""

    @property
    def tokens(self) -> int:
        """N, tokens of a micro-batch."""
        return micro_batch(self.workload, self.settings).tokens


@dataclass(frozen=True, slots=True)
class Technique:
    """A row of the table.

    `without(base)` is the base with the technique off. `tracked(base)` are the bytes that it saves by itself, `formula`
    says where they come from. `ready(base)` makes a base in which it can be switched, `why_not(base)` says why there is
    none. `at_peak(base)` is a run in which nothing else hides it, on the same card; None where there is none.
    """

    name: str
    phase: str
    formula: str
    without: Callable[[Base], Base]
    tracked: Callable[[Base], float]
    ready: Callable[[Base], Base] = lambda base: base
    why_not: Callable[[Base], str] = lambda base: ""
    at_peak: Callable[[Base], Base | None] = lambda base: None


# ---------------------------------------------------------------------------------------------------------- the runs


def base_of(model: str, card: Card) -> Base:
    """The run that the table is about."""
    workload = Workload(
        shape=shape_of(model),
        card=card,
        dtype=compute_dtype(card)[0],
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
    settings = MemorySettings(
        max_concurrent=8,
        prefill_tokens=256,
        micro_batch_tokens=256 + 1024 - 1,
        offload_activations=True,
        offload_embeddings=not workload.shape.tied,
        head_chunk_tokens=128,
        mlp_tile_tokens=512,
    )
    return Base(workload, settings)


def changed(base: Base, note: str = "", **values: Any) -> Base:
    """The base with other settings or, by their names, other fields of its workload."""
    of_settings = {name: value for name, value in values.items() if hasattr(base.settings, name)}
    of_workload = {name: value for name, value in values.items() if name not in of_settings}
    return replace(
        base,
        settings=replace(base.settings, **of_settings),
        workload=replace(base.workload, **of_workload),
        note="; ".join(part for part in (base.note, note) if part),
    )


def of_model(name: str) -> Callable[[Base], Base]:
    """The same run of another model."""
    return lambda base: replace(base_of(name, base.workload.card), note=name)


def many_prompts(base: Base) -> Base:
    """8 prompts of 2048 tokens with one short answer each: most of the rollout is reading."""
    return changed(
        of_model("qwen2.5-0.5b-instruct")(base),
        "8 prompts of 2048 tokens, one answer of 64 to each",
        prompts_per_step=8,
        group_size=1,
        prompt_tokens=2048,
        answer_tokens=64,
        prefill_tokens=2048,
        micro_batch_tokens=2048 + 64 - 1,
    )


@functools.cache
def simulated(base: Base) -> Simulation:
    """What the card would need."""
    with quiet_loading():
        return simulate(base.workload, base.settings, expandable_segments=base.expandable_segments)


# ----------------------------------------------------------------------------------------------------- tracked bytes


def of_checkpoints(base: Base) -> float:
    """All layers but one keep nothing, and all of them their input: (L - 1) x kept of a layer - L N H e."""
    shape, e = base.workload.shape, base.workload.value_bytes
    return (shape.layers - 1) * kept_by_layer(base) - shape.layers * base.tokens * shape.hidden * e


def of_activation_offload(base: Base) -> float:
    """(L - 2) N H e, as in `memory.offload`."""
    shape = base.workload.shape
    return (shape.layers - 2) * base.tokens * shape.hidden * base.workload.value_bytes


def of_embedding_offload(base: Base) -> float:
    """V H e, as in `memory.embedding`."""
    return base.workload.shape.embedding_parameters * base.workload.value_bytes


def of_tiles(base: Base) -> float:
    """The backward of N tokens less that of t and the gradient of the input, N H e, as in `memory.tiled`."""
    shape, e, tile = base.workload.shape, base.workload.value_bytes, base.settings.mlp_tile_tokens

    def backward(tokens: int) -> int:
        one = tokens * shape.intermediate * e
        return max(6 * one, 5 * one + shape.intermediate * shape.hidden * e)

    return backward(base.tokens) - backward(min(tile, base.tokens)) - base.tokens * shape.hidden * e


def of_head_chunk(base: Base) -> float:
    """(N - chunk) x V x 8, as in `memory.head`; N are the tokens that predict one."""
    predictors = micro_batch(base.workload, base.settings).predictors
    return 8 * base.workload.shape.vocab * (predictors - min(base.settings.head_chunk_tokens, predictors))


def of_8bit_optimizer(base: Base) -> float:
    """8 - (2 + 8 / 256) per value of the adapter's matrices that are not too small for it, as in `optim`."""
    rank, shape = base.workload.rank, base.workload.shape
    matrices = [rank * width for linear in shape.linears for width in (linear.inputs, linear.outputs)]
    values = shape.layers * sum(size for size in matrices if size >= SMALLEST_QUANTISED)
    return values * (8 - (2 + 8 / 256))


def of_int8_kv(base: Base) -> float:
    """`SlotShape.bytes` of `rollout.slots`, in the compute dtype less in int8."""
    workload, settings = base.workload, base.settings
    shape, slots = workload.shape, min(settings.max_concurrent, workload.rows)
    kv = SlotShape(
        shape.layers,
        shape.kv_heads,
        shape.head_dim,
        prompt_slots=min(workload.prompts_per_step, slots, -(-slots // workload.group_size) + 1),
        prompt_tokens=workload.prompt_tokens,
        slots=slots,
        answer_tokens=workload.answer_tokens,
    )
    dtype = DTYPES[workload.dtype]
    return kv.bytes(dtype) - kv.bytes(dtype, int8=True)


def of_prefill(base: Base) -> float:
    """The forward of all prompts less that of a piece."""
    prompts, at_once = base.workload.prompts_per_step, base.settings.prefill_tokens // base.workload.prompt_tokens
    return forward_peak(base, prompts) - forward_peak(base, at_once)


def of_expandable_segments(base: Base) -> float:
    """What fixed segments reserve beyond live bytes, these rounded up to the pages of expandable ones."""
    with_fixed = simulated(replace(base, expandable_segments=False))
    return with_fixed.peak_bytes - with_fixed.context_bytes - _whole_pages(with_fixed)


def _whole_pages(simulation: Simulation) -> int:
    """The highest live bytes of any phase, in pages."""
    live = max(phase.allocated_bytes for phase in simulation.phases.values())
    return math.ceil(live / LARGE_SEGMENT_BYTES) * LARGE_SEGMENT_BYTES


# ----------------------------------------------------------------------------------- one layer on real tensors


def kept_by_layer(base: Base) -> float:
    """Live bytes that one layer keeps for its backward without a checkpoint: two layers less one, at fewer tokens."""
    workload = base.workload
    share = max(1.0, base.tokens / TWIN_TOKENS)
    prompt = max(1, round(workload.prompt_tokens / share))
    own = max(1, round((base.tokens - workload.prompt_tokens) / share))
    span = GroupSpan(0, prompt, (own,))
    kept = [_forward_bytes(base, layers, [span], base.settings.mlp_tile_tokens, grad=True)[0] for layers in (1, 2)]
    return (kept[1] - kept[0]) * base.tokens / span.tokens


def forward_peak(base: Base, prompts: int) -> float:
    """Peak live bytes of a forward of `prompts` prompts without a gradient, measured at fewer tokens."""
    length = base.workload.prompt_tokens
    short = max(1, TWIN_TOKENS // base.workload.prompts_per_step)
    share = length / short
    spans = [GroupSpan(index * short, short, ()) for index in range(prompts)]
    tile = math.ceil(base.settings.mlp_tile_tokens / share)
    return _forward_bytes(base, 2, spans, tile, grad=False)[1] * share


def _forward_bytes(base: Base, layers: int, spans: Sequence[GroupSpan], tile: int, *, grad: bool) -> tuple[int, int]:
    """(bytes alive after the forward, their peak) above the weights of a model of so many layers."""
    plain = MemorySettings(max_concurrent=1, activation_checkpointing=False, mlp_tile_tokens=tile)
    policy = real_policy(_layers_of(base.workload, layers), plain, drawn=False)
    policy.update_mode()
    ids = torch.zeros(1, sum(span.tokens for span in spans), dtype=torch.long)
    positions = torch.tensor([[position for span in spans for position in span.position_ids()]])
    layout = policy.packed_layout(spans)
    with LiveBytes() as live, torch.set_grad_enabled(grad):
        hidden = policy.hidden_states(ids, positions, layout)
        kept = live.live_bytes
        del hidden
    return kept, live.peak_bytes


def _layers_of(workload: Workload, layers: int) -> Workload:
    """Some layers of the model with hardly any words, in 16 bits or more: what is kept does not depend on weights."""
    few = {"num_hidden_layers": layers, "vocab_size": 16, "tie_word_embeddings": True}
    return replace(
        workload, shape=model_shape({**workload.shape.config, **few}, "some layers"), card=CPU, quantized=False
    )


def real_policy(workload: Workload, settings: MemorySettings, *, drawn: bool) -> Policy:
    """A policy of real tensors on this CPU; its frozen weights are drawn at random, or 0, which takes less time."""
    config = dict(workload.shape.config)
    with quiet_loading(), nullcontext() if drawn else no_init_weights():
        base = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(config.pop("model_type"), **config), dtype=DTYPES[workload.dtype]
        ).requires_grad_(False)
    for weight in () if drawn else base.parameters():
        weight.zero_()
    if settings.offload_embeddings:
        offload_embedding(base, torch.device("cpu"))
    tokenizer: Any = SimpleNamespace(eos_token_id=0, all_special_ids=[], decode=lambda ids, **_: "")
    return Policy(
        attach_adapter(base, LoraSpec(rank=workload.rank)),
        tokenizer,
        workload.card,
        base_name=workload.shape.name,
        activation_checkpointing=settings.activation_checkpointing,
        offload_activations=settings.offload_activations,
        mlp_tile_tokens=settings.mlp_tile_tokens,
        attention="sdpa",
    )


# --------------------------------------------------------------------------------------------------------- techniques


def _no_embedding_of_its_own(base: Base) -> str:
    return "embedding and head are one tensor" if base.workload.shape.tied else ""


def _one_piece(base: Base) -> str:
    prompts, length = base.workload.prompts_per_step, base.workload.prompt_tokens
    whole = prompts * length <= max(base.settings.prefill_tokens, length)
    return f"{prompts} x {length} prompt tokens are one piece" if whole else ""


LLAMA, QWEN = of_model("llama-3.1-8b-instruct"), of_model("qwen2.5-0.5b-instruct")

TECHNIQUES = (
    Technique(
        "activation-checkpointing",
        "update",
        "(L - 1) x kept by a real layer - L N H e",
        without=lambda base: changed(base, activation_checkpointing=False),
        tracked=of_checkpoints,
        ready=lambda base: changed(base, "layer inputs on the card", offload_activations=False),
    ),
    Technique(
        "activation-offload",
        "update",
        "(L - 2) N H e",
        without=lambda base: changed(base, offload_activations=False),
        tracked=of_activation_offload,
    ),
    Technique(
        "embedding-offload",
        "update",
        "V H e",
        without=lambda base: changed(base, offload_embeddings=False),
        tracked=of_embedding_offload,
        why_not=_no_embedding_of_its_own,
        at_peak=LLAMA,
    ),
    Technique(
        "mlp-tiles",
        "update",
        "backward of N tokens - that of a tile - N H e",
        without=lambda base: changed(base, mlp_tile_tokens=0),
        tracked=of_tiles,
        at_peak=LLAMA,
    ),
    Technique(
        "head-chunk",
        "update",
        "8 V (N - chunk)",
        without=lambda base: changed(base, head_chunk_tokens=base.tokens),
        tracked=of_head_chunk,
        at_peak=QWEN,
    ),
    Technique(
        "8bit-adamw",
        "update",
        "(6 - 1/32) per adapter value",
        without=lambda base: changed(base, optimizer="adamw"),
        tracked=of_8bit_optimizer,
    ),
    Technique(
        "int8-kv",
        "rollout",
        "SlotShape.bytes, 16 bits - int8",
        without=lambda base: changed(base, kv_int8=False),
        tracked=of_int8_kv,
        ready=lambda base: changed(base, "switched on", kv_int8=True),
    ),
    Technique(
        "prefill-pieces",
        "rollout",
        "forward of all prompts - that of a piece, real layers",
        without=lambda base: changed(base, prefill_tokens=base.workload.prompts_per_step * base.workload.prompt_tokens),
        tracked=of_prefill,
        why_not=_one_piece,
        at_peak=many_prompts,
    ),
    Technique(
        "expandable-segments",
        "reserved",
        "reserved in fixed segments - live bytes in whole pages",
        without=lambda base: replace(base, expandable_segments=False),
        tracked=of_expandable_segments,
        at_peak=of_model("qwen2.5-3b-instruct"),
    ),
)
"""In the order of the table."""


# --------------------------------------------------------------------------------------------------------------- rows


@dataclass(frozen=True, slots=True)
class Saving:
    """What a technique saves in one run, in bytes. `time_ratio` is a step with it over one without it."""

    note: str
    saved_bytes: int
    tracked_bytes: int
    run_bytes: int
    time_ratio: float | None

    @property
    def ratio(self) -> float:
        """Saved over tracked."""
        return self.saved_bytes / self.tracked_bytes

    @property
    def is_at_peak(self) -> bool:
        """Whether nothing hides it."""
        return abs(self.ratio - 1) <= TOLERANCE


@dataclass(frozen=True, slots=True)
class Row:
    """A technique in the run that was asked for, None where it cannot act there, and where it is at the peak."""

    technique: Technique
    why_not: str
    here: Saving | None
    at_peak: Saving | None
    cpu_ratio: float | None

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        here, at_peak = (
            None if saving is None else asdict(saving) | {"ratio": saving.ratio} for saving in (self.here, self.at_peak)
        )
        return {
            "technique": self.technique.name,
            "phase": self.technique.phase,
            "formula": self.technique.formula,
            "why_not": self.why_not,
            "here": here,
            "at_peak": at_peak,
            "cpu_ratio": self.cpu_ratio,
        }


def row_of(technique: Technique, base: Base, *, timed: bool) -> Row:
    """The technique in the run `base`, and in another one where it is hidden in that."""
    why_not = technique.why_not(technique.ready(base))
    here = None if why_not else saving_of(technique, technique.ready(base))
    other = None if here is not None and here.is_at_peak else technique.at_peak(base)
    at_peak = None if other is None else saving_of(technique, technique.ready(other))
    return Row(technique, why_not, here, at_peak, cpu_ratio(technique) if timed else None)


def saving_of(technique: Technique, base: Base) -> Saving:
    """By simulation of `base` and of the same without the technique, and by its formula."""
    without = technique.without(base)
    with_it, without_it = simulated(base), simulated(without)
    run_bytes = without_it.peak_bytes - with_it.peak_bytes
    saved = run_bytes if technique.phase == "reserved" else _allocated(technique, without_it, with_it)
    times = [estimate_time(one.workload, one.settings, None) for one in (base, without)]
    ratio = None if times[0] is None or times[1] is None else times[0].step_s / times[1].step_s
    return Saving(base.note, saved, round(technique.tracked(base)), run_bytes, ratio)


def _allocated(technique: Technique, without_it: Simulation, with_it: Simulation) -> int:
    before, after = (one.phases[technique.phase].allocated_bytes for one in (without_it, with_it))
    return before - after


# ---------------------------------------------------------------------------------------------------- time on this CPU


def timed_base() -> Base:
    """6 layers of the widths of SmolLM2-135M with a head of their own, in fp32 on this CPU."""
    config = {**shape_of("smollm2-135m-instruct").config, "num_hidden_layers": 6, "tie_word_embeddings": False}
    workload = Workload(
        shape=model_shape(config, "6 layers of SmolLM2-135M"),
        card=CPU,
        dtype="float32",
        quantized=False,
        decoded=False,
        rank=16,
        targets=None,
        optimizer="adamw_8bit",
        prompts_per_step=4,
        group_size=1,
        prompt_tokens=64,
        answer_tokens=256,
    )
    settings = MemorySettings(
        max_concurrent=4,
        prefill_tokens=64,
        micro_batch_tokens=64 + 256 - 1,
        offload_activations=True,
        offload_embeddings=True,
        head_chunk_tokens=32,
        mlp_tile_tokens=128,
    )
    return Base(workload, settings)


def cpu_ratio(technique: Technique, rounds: int = 5) -> float | None:
    """Seconds of the phase with the technique over those without it, the median of rounds of both in turns; None for
    what a CPU does not do."""
    if technique.phase == "reserved":
        return None
    base = technique.ready(timed_base())
    act = {"update": updating, "rollout": sampling}[technique.phase]
    with_it, without_it = act(base), act(technique.without(base))
    with_it(), without_it()
    return statistics.median(_seconds(with_it) / _seconds(without_it) for _ in range(rounds))


def _seconds(act: Callable[[], object]) -> float:
    """Of the CPU, in this process: other programs on the machine count less than by the clock on the wall."""
    began = time.process_time()
    act()
    return time.process_time() - began


def updating(base: Base) -> Callable[[], object]:
    """An update on the largest micro-batch, ready to be called."""
    workload, settings = base.workload, base.settings
    policy = real_policy(workload, settings, drawn=True)
    micro = largest_micro_batch(
        longest_problems(workload.prompts_per_step, workload.prompt_tokens),
        workload.group_size,
        workload.answer_tokens,
        micro_batch_tokens=settings.micro_batch_tokens,
        device=policy.device,
    )
    update_settings = UpdateSettings(
        loss="clip",
        loss_options={},
        kl_coef=0.0,
        temperature=1.0,
        head_chunk_tokens=settings.head_chunk_tokens,
        max_grad_norm=1.0,
        updates_per_rollout=1,
        lr_of=lambda update: 1e-4,
    )
    optimizer = build_optimizer(workload.optimizer, policy.trainable_parameters(), lr=1e-4, weight_decay=0.0)
    updater = Updater(policy, update_settings, optimizer)
    return functools.partial(updater.update, [micro], 0)


def sampling(base: Base) -> Callable[[], object]:
    """The prompts of a step and two tokens of each answer, ready to be called."""
    workload, settings = base.workload, base.settings
    return functools.partial(
        decode_longest,
        real_policy(workload, settings, drawn=True),
        longest_problems(workload.prompts_per_step, workload.prompt_tokens),
        workload.group_size,
        SamplingParams(workload.answer_tokens),
        max_concurrent=settings.max_concurrent,
        prefill_tokens=settings.prefill_tokens,
        kv_int8=workload.kv_int8,
    )


# -------------------------------------------------------------------------------------------------------------- table


def table(base: Base, rows: Sequence[Row]) -> str:
    """The rows for people, and which of the techniques do not pay in this run."""
    workload = base.workload
    peaks = simulated(base)
    phases = ", ".join(f"{phase} {peaks.phases[phase].allocated_bytes / 2**20:.0f}" for phase in PHASES)
    lines = [
        f"{workload.shape.name}, {workload.card.name}: prompt {workload.prompt_tokens}, answer "
        f"{workload.answer_tokens}, {base.settings.max_concurrent} answers at once",
        f"MiB allocated: {phases}; the run needs {peaks.peak_bytes / 2**20:.0f} with the CUDA context",
        f"{'technique':<26}{'phase':<9}{'saved':>8}{'tracked':>9}{'ratio':>7}{'run':>8}{'step':>8}{'CPU':>8}",
    ]
    for row in rows:
        lines.append(_line(row.technique.name, row.technique.phase, row.here, row.cpu_ratio, row.why_not))
        if row.at_peak is not None:
            lines.append(_line("  at its peak", row.technique.phase, row.at_peak, None, ""))
    needless = [row.technique.name for row in rows if row.here is None or row.here.run_bytes <= peaks.peak_bytes / 100]
    lines.append(f"do not lower the need of this run by 1 %: {', '.join(needless) or 'none'}")
    return "\n".join(lines)


def _line(name: str, phase: str, saving: Saving | None, cpu: float | None, why_not: str) -> str:
    figures = f"{name:<26}{phase:<9}"
    if saving is None:
        figures += f"{'-':>8}{'-':>9}{'-':>7}{'-':>8}{'-':>8}"
    else:
        sizes = [size / 2**20 for size in (saving.saved_bytes, saving.tracked_bytes, saving.run_bytes)]
        figures += f"{sizes[0]:>8.1f}{sizes[1]:>9.1f}{saving.ratio:>7.2f}{sizes[2]:>8.1f}{_percent(saving.time_ratio)}"
    note = why_not or (saving.note if saving else "")
    return figures + _percent(cpu) + (f"  {note}" if note else "")


def _percent(ratio: float | None) -> str:
    """How much longer, in 8 columns."""
    return f"{'-':>8}" if ratio is None else f"{100 * (ratio - 1):>+7.1f}%"


def main() -> None:
    """Measure the techniques and print a table or JSON."""
    args = _arguments()
    card = card_named(args.card)
    base = base_of(args.model, card)
    rows = [row_of(one, base, timed=args.time) for one in TECHNIQUES if one.name in (args.only or ALL)]
    if args.json:
        print(json.dumps({"settings": vars(args), "rows": [row.to_json() for row in rows]}))
    else:
        print(table(base, rows))


ALL = [technique.name for technique in TECHNIQUES]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b-instruct")
    parser.add_argument("--card", default="rtx4060-8gb")
    parser.add_argument("--only", nargs="+", choices=ALL, metavar="TECHNIQUE", help=f"some of {', '.join(ALL)}")
    parser.add_argument("--time", action="store_true", help="measure the time on this CPU too, side by side")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table, sizes in bytes")
    return parser.parse_args()


if __name__ == "__main__":
    main()
