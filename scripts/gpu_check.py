#!/usr/bin/env python
"""Plan, simulation and measurement of one GRPO step next to each other, on this machine's card.

Each model has the real shape, real classes and random weights, so nothing is downloaded: the base is packed to 4 bits
layer by layer, never more than one weight is there in 16. Then it fills the sampler's slots, makes the last token of
answers of full length, and runs the largest micro-batch of the update, as `planning/simulate.py` does on fake tensors.
Answers of a few dozen tokens and a second update give the speeds. A model that does not fit into what is left of memory
or time is skipped, and the report says why. Loading is that of this script: how transformers reads files is not
measured.

Without a GPU, and with --tiny, the same runs on the CPU with a tiny model, and live bytes are counted from the
operations (`memory/trace.py`) in place of CUDA's own statistics.

    python scripts/gpu_check.py --json check.json
    python scripts/gpu_check.py --models qwen2.5-1.5b qwen2.5-7b --minutes 4

Exit status: 0 all was measured or skipped with a reason, 2 a wrong argument, 4 the memory ran out or nothing ran.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lowmem_grpo.catalog.known import KNOWN
from lowmem_grpo.catalog.shapes import ModelShape, model_shape
from lowmem_grpo.errors import ConfigError, UserError, nearest
from lowmem_grpo.types import Card, MemorySettings

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from lowmem_grpo.model import Policy
    from lowmem_grpo.planning.workload import Workload
    from lowmem_grpo.types import PackedMicroBatch
    from lowmem_grpo.update import Updater

GIB = 1 << 30
Draw = Callable[["torch.Size", "torch.dtype"], "torch.Tensor"]
"""Makes one random weight of a shape and a dtype."""

NOTHING: Mapping[str, int] = MappingProxyType({})

PHASES = ("load", "rollout", "update")

WEIGHT_STD = 0.02
"""Of the random weights, the usual one at the start of a training: norms keep activations and logits finite."""

WARM_STEPS, TIMED_STEPS = 4, 32
"""Decode steps before the clock runs, and under the clock."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model under settings. `cap_bytes` is what the card is made to have, context included; None: all of it."""

    shape: ModelShape
    settings: MemorySettings
    quantized: bool = True
    group_size: int = 8
    prompts_per_step: int = 2
    prompt_tokens: int = 256
    answer_tokens: int = 1024
    optimizer: str = "adamw_8bit"
    cap_bytes: int | None = None


PLAIN = MemorySettings(max_concurrent=8)
LEAN = MemorySettings(
    max_concurrent=8,
    micro_batch_tokens=1280,
    offload_activations=True,
    offload_embeddings=True,
    head_chunk_tokens=128,
    mlp_tile_tokens=512,
)

GPU_CASES: Mapping[str, Case] = {
    "qwen2.5-0.5b": Case(KNOWN["qwen2.5-0.5b-instruct"].shape, PLAIN),
    "qwen2.5-1.5b": Case(KNOWN["qwen2.5-1.5b-instruct"].shape, PLAIN),
    "qwen2.5-7b": Case(KNOWN["qwen2.5-7b-instruct"].shape, PLAIN),
    "qwen2.5-32b": Case(KNOWN["qwen2.5-32b-instruct"].shape, LEAN, cap_bytes=24 * GIB),
}
"""From the smallest to the largest."""

_TINY_SHAPE = model_shape(
    {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1024,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    },
    "tiny",
)
_TINY = Case(
    _TINY_SHAPE,
    MemorySettings(max_concurrent=6, micro_batch_tokens=192, head_chunk_tokens=32),
    quantized=False,
    group_size=4,
    prompt_tokens=48,
    answer_tokens=64,
    optimizer="adamw",
)
TINY_CASES: Mapping[str, Case] = {
    "tiny": replace(_TINY, shape=model_shape({**_TINY_SHAPE.config, "tie_word_embeddings": True}, "tiny")),
    "tiny-nf4": replace(_TINY, quantized=True),
    "tiny-lean": replace(
        _TINY,
        quantized=True,
        settings=replace(_TINY.settings, offload_activations=True, offload_embeddings=True, mlp_tile_tokens=64),
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check; returns the exit status."""
    args = _parser().parse_args(arguments)
    started = time.monotonic()
    try:
        others_bytes = nvml_used_bytes()
        card, cases = _prepared(args)
        report = run(cases, card, deadline=started + 60 * args.minutes, others_bytes=others_bytes)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(table(report))
    return 0 if report["rows"] and not report["failed"] else 4


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too, in bytes and seconds")
    parser.add_argument("--minutes", type=float, default=8.0, help="no model is begun that would not end by then")
    parser.add_argument("--models", nargs="+", metavar="NAME", help=f"some of {', '.join((*GPU_CASES, *TINY_CASES))}")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    return parser


def _prepared(args: argparse.Namespace) -> tuple[Card, dict[str, Case]]:
    """The card and the cases by name. Raises ConfigError for a wrong argument."""
    choices = chosen(args.models, TINY_CASES if args.tiny else {**GPU_CASES, **TINY_CASES})
    if not args.minutes > 0:
        raise ConfigError(f"--minutes is {args.minutes:g}; write a number above 0.")
    if args.json is not None and not args.json.parent.is_dir():
        raise ConfigError(f"--json {args.json}: there is no folder {args.json.parent}.")
    from lowmem_grpo.catalog.cards import detect_card
    from lowmem_grpo.memory.cap import configure_allocator

    card = detect_card("cpu" if args.tiny else "auto")
    kind = TINY_CASES if card.device == "cpu" else GPU_CASES
    if wrong := [name for name in args.models or () if name not in kind]:
        need, place = ("a GPU", "no GPU") if card.device == "cpu" else ("--tiny", "a GPU")
        raise ConfigError(f"{wrong[0]} needs {need}, and there is {place} here; choose from {', '.join(kind)}.")
    if card.device == "cpu" and not args.tiny:
        print("There is no GPU here, so a tiny model is checked on the CPU.", file=sys.stderr)
    configure_allocator(card)
    return card, {name: case for name, case in choices.items() if name in kind}


def chosen(names: Sequence[str] | None, cases: Mapping[str, Case]) -> dict[str, Case]:
    """The cases with these names, in the order of the table; None: all. Raises ConfigError for an unknown name."""
    for name in names or ():
        if name not in cases:
            close = nearest(name, cases)
            hint = f" (did you mean {close}?)" if close else ""
            raise ConfigError(f"There is no model {name!r} in this check{hint}; choose from {', '.join(cases)}.")
    return {name: case for name, case in cases.items() if names is None or name in names}


# ------------------------------------------------------------------------------------------------------------ the run


def run(
    cases: Mapping[str, Case], card: Card, *, deadline: float, others_bytes: Mapping[str, int] = NOTHING
) -> dict[str, Any]:
    """Every case that memory and time have room for, as JSON values; `deadline` is a time of `time.monotonic`.

    `others_bytes` is what was in use on each card (by UUID) before CUDA began in this process.
    """
    import torch

    report: dict[str, Any] = {
        "card": asdict(card),
        "torch": torch.__version__,
        "rows": [],
        "skipped": [],
        "failed": [],
    }
    pace: float | None = None  # seconds per parameter, from the model before
    for name, case in cases.items():
        left = deadline - time.monotonic()
        if reason := why_not(case, card, left_s=left, seconds=pace and pace * case.shape.parameters):
            report["skipped"].append({"model": name, "reason": reason})
            continue
        row, failure = _tried(name, case, card, others_bytes)
        _release(card)
        if failure:
            report["failed"].append({"model": name, "reason": failure})
        else:
            report["rows"].append(row)
            pace = row["seconds"] / case.shape.parameters
    return report


def why_not(case: Case, card: Card, *, left_s: float, seconds: float | None) -> str:
    """Why a model is not begun, or "". `seconds` is what it may take, None where nothing is known yet."""
    from lowmem_grpo.planning.budget import estimate

    if left_s <= 0 or (seconds or 0) > left_s:
        need = "" if seconds is None else f"It may take {seconds:.0f} s and "
        return f"{need}{max(left_s, 0):.0f} s are left; raise --minutes, or name it alone with --models."
    needed = estimate(workload_of(case, card), case.settings).peak_bytes
    room = min(card.memory_bytes, case.cap_bytes or card.memory_bytes)
    if needed > room:
        return f"Its plan needs {needed / GIB:.1f} GiB and there are {room / GIB:.1f} GiB."
    return ""


def _tried(name: str, case: Case, card: Card, others_bytes: Mapping[str, int]) -> tuple[dict[str, Any], str]:
    """The row of a case and "", or nothing and why it failed."""
    from lowmem_grpo.errors import OutOfMemoryFailed
    from lowmem_grpo.memory.oom import is_out_of_memory

    try:
        return check(name, case, card, others_bytes), ""
    except (RuntimeError, OutOfMemoryFailed) as error:
        if not (isinstance(error, OutOfMemoryFailed) or is_out_of_memory(error)):
            raise
        return {}, f"The memory ran out: {str(error).splitlines()[0]}"


def _release(card: Card) -> None:
    import torch

    from lowmem_grpo.memory.oom import release_memory

    release_memory(torch.device(card.device))


def check(name: str, case: Case, card: Card, others_bytes: Mapping[str, int] = NOTHING) -> dict[str, Any]:
    """One model: planned, simulated and measured, as a row of the report. `others_bytes` as in `run`.

    Bytes of the phases are without the CUDA context. Raises RuntimeError or OutOfMemoryFailed where memory runs out.
    """
    from lowmem_grpo.memory.cap import is_wsl_or_windows, uses_expandable_segments
    from lowmem_grpo.planning.budget import estimate
    from lowmem_grpo.planning.simulate import simulate
    from lowmem_grpo.quiet import quiet_loading

    began = time.monotonic()
    workload = workload_of(case, card)
    plan = estimate(workload, case.settings)
    expandable = card.device != "cpu" and uses_expandable_segments(windows=is_wsl_or_windows())
    with quiet_loading():
        simulation = simulate(workload, case.settings, expandable_segments=expandable)
    with capped(case, card):
        measured = measure(case, card, others_bytes)
    return {
        "model": name,
        "settings": asdict(case.settings) | _workload_json(workload) | {"cap_bytes": case.cap_bytes},
        "planned": {phase: plan.phase_bytes(phase) - plan.context_bytes for phase in PHASES},
        "planned_context_bytes": plan.context_bytes,
        "simulated": {
            phase: {"allocated_bytes": peak.allocated_bytes, "reserved_bytes": peak.reserved_bytes}
            for phase, peak in simulation.phases.items()
        },
        "measured": measured.phases,
        "weights_bytes": {"simulated": simulation.weights_bytes, "measured": measured.weights_bytes},
        "context_bytes": measured.context_bytes,
        "decode_tokens_per_s": measured.decode_tokens_per_s,
        "update_tokens_per_s": measured.update_tokens_per_s,
        "roofline": rooflines(workload, case.settings, measured),
        "recoveries": measured.recoveries,
        "seconds": round(time.monotonic() - began, 1),
    }


def workload_of(case: Case, card: Card) -> Workload:
    """The case on the card, as planner and simulator take it."""
    from lowmem_grpo.catalog.cards import compute_dtype
    from lowmem_grpo.planning.workload import Workload

    return Workload(
        shape=case.shape,
        card=card,
        dtype=compute_dtype(card)[0],
        quantized=case.quantized,
        decoded=False,
        rank=16,
        targets=None,
        optimizer=case.optimizer,
        prompts_per_step=case.prompts_per_step,
        group_size=case.group_size,
        prompt_tokens=case.prompt_tokens,
        answer_tokens=case.answer_tokens,
    )


def _workload_json(workload: Workload) -> dict[str, Any]:
    return {f.name: getattr(workload, f.name) for f in fields(workload) if f.name not in ("shape", "card")}


@contextmanager
def capped(case: Case, card: Card) -> Iterator[None]:
    """Inside, torch reserves no more than the case's cap leaves beside an assumed CUDA context."""
    from lowmem_grpo.planning.budget import CONTEXT_BYTES

    if case.cap_bytes is None or card.device == "cpu":
        yield
        return
    import torch

    device = torch.device(card.device).index  # "cuda" without an index is refused, None is the current device
    total = torch.cuda.mem_get_info(card.device)[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, (case.cap_bytes - CONTEXT_BYTES) / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


# -------------------------------------------------------------------------------------------------------- measurement


@dataclass(slots=True)
class Measured:
    """What a case took: bytes by phase, speeds, and the settings that were lowered for lack of memory."""

    phases: dict[str, dict[str, int | None]]
    weights_bytes: int
    context_bytes: int | None = None
    decode_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    decode_tokens: float = 0.0
    """Tokens of an answer at the middle of the timed steps."""
    update_tokens_per_s: float = 0.0
    update_s: float = 0.0
    update_tokens: int = 0
    update_predictors: int = 0
    recoveries: list[str] = field(default_factory=list)


class Meter(Protocol):
    """Measures phases of what runs inside `watching()`."""

    def watching(self) -> AbstractContextManager[object]:
        """Around all that is measured."""

    def count(self, tensors: Iterator[torch.Tensor]) -> None:
        """Tensors of the model that were made before, on the device."""

    def reset(self) -> None:
        """A phase begins."""

    def peak(self) -> dict[str, int | None]:
        """Since `reset`: the most bytes allocated, and reserved where there is such a thing."""

    def live_bytes(self) -> int:
        """What is allocated now."""

    def context_bytes(self) -> int | None:
        """What CUDA itself takes of the card, None without one."""


class TraceMeter:
    """On a CPU: live bytes counted from the operations."""

    def __init__(self) -> None:
        from lowmem_grpo.memory.trace import AllocationTrace

        self._trace = AllocationTrace()

    def watching(self) -> AbstractContextManager[object]:
        return self._trace

    def count(self, tensors: Iterator[torch.Tensor]) -> None:
        self._trace.count(tensors, "made before")

    def reset(self) -> None:
        gc.collect()
        self._trace.peak_bytes = self._trace.live_bytes

    def peak(self) -> dict[str, int | None]:
        return {"allocated_bytes": self._trace.peak_bytes, "reserved_bytes": None}

    def live_bytes(self) -> int:
        return self._trace.live_bytes

    def context_bytes(self) -> None:
        return None


class CardMeter:
    """On a GPU: CUDA's statistics. `others_bytes` as in `run`."""

    def __init__(self, device: str, others_bytes: Mapping[str, int]) -> None:
        self._device, self._others_bytes = device, others_bytes

    def watching(self) -> AbstractContextManager[object]:
        return ExitStack()

    def count(self, tensors: Iterator[torch.Tensor]) -> None:
        pass

    def reset(self) -> None:
        import torch

        from lowmem_grpo.memory.oom import release_memory

        torch.cuda.synchronize(self._device)
        release_memory(torch.device(self._device))  # as `memory.peak` does, so that a phase has a reserve of its own
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> dict[str, int | None]:
        import torch

        torch.cuda.synchronize(self._device)
        return {
            "allocated_bytes": torch.cuda.max_memory_allocated(self._device),
            "reserved_bytes": torch.cuda.max_memory_reserved(self._device),
        }

    def live_bytes(self) -> int:
        import torch

        return torch.cuda.memory_allocated(self._device)

    def context_bytes(self) -> int:
        """Without NVML other programs on the card are in it."""
        import torch

        free, total = torch.cuda.mem_get_info(self._device)
        in_use, others = total - free, 0
        uuid = f"GPU-{torch.cuda.get_device_properties(self._device).uuid}"
        if uuid in self._others_bytes:
            in_use, others = nvml_used_bytes()[uuid], self._others_bytes[uuid]
        return in_use - others - torch.cuda.memory_reserved(self._device)


def nvml_used_bytes() -> dict[str, int]:
    """Memory in use of every card, by UUID; nothing where the driver's library cannot be asked."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return {pynvml.nvmlDeviceGetUUID(handle): pynvml.nvmlDeviceGetMemoryInfo(handle).used for handle in handles}
    except pynvml.NVMLError:
        return {}
    finally:
        pynvml.nvmlShutdown()


def measure(case: Case, card: Card, others_bytes: Mapping[str, int] = NOTHING) -> Measured:
    """Run the case on the card: load, rollout and update under the meter, then both speeds."""
    import torch

    from lowmem_grpo.batching import largest_micro_batch
    from lowmem_grpo.memory.embedding import offload_embedding
    from lowmem_grpo.planning.simulate import leave_gradients, start_optimizer, updater_for
    from lowmem_grpo.rollout.longest import decode_longest, longest_problems
    from lowmem_grpo.types import SamplingParams

    workload, device = workload_of(case, card), torch.device(card.device)
    meter: Meter = TraceMeter() if card.device == "cpu" else CardMeter(card.device, others_bytes)
    settings, problems = case.settings, longest_problems(case.prompts_per_step, case.prompt_tokens)
    skeleton = empty_base(case.shape, workload.dtype)
    peaks: dict[str, dict[str, int | None]] = {}
    with meter.watching():
        meter.count(skeleton.buffers())
        meter.reset()
        base = random_base(skeleton, device, quantized=case.quantized)
        if settings.offload_embeddings:
            offload_embedding(base, device)
        peaks["load"], weights_bytes = meter.peak(), meter.live_bytes()
        policy = policy_of(base, workload, settings)
        updater = updater_for(policy, workload, settings)
        recoveries: list[str] = []
        updater.on_out_of_memory = lambda recovery: recoveries.append(recovery.sentence)
        start_optimizer(updater)
        meter.reset()
        decode_longest(
            policy,
            problems,
            case.group_size,
            SamplingParams(case.answer_tokens),
            max_concurrent=settings.max_concurrent,
            prefill_tokens=settings.prefill_tokens,
        )
        peaks["rollout"] = meter.peak()
        meter.reset()
        micro = largest_micro_batch(
            problems,
            case.group_size,
            case.answer_tokens,
            micro_batch_tokens=settings.micro_batch_tokens,
            device=device,
        )
        if len(micro.input_ids_N) < workload.tokens:
            leave_gradients(updater)
        updater.update([micro], 0)
        peaks["update"] = meter.peak()
    measured = Measured(peaks, weights_bytes, meter.context_bytes(), recoveries=recoveries)
    time_update(measured, updater, micro)
    time_decoding(measured, policy, workload, settings)
    return measured


def empty_base(shape: ModelShape, dtype: str) -> PreTrainedModel:
    """The model of a shape: its parameters have no memory, its buffers (rotary frequencies) are real."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    from lowmem_grpo.model import DTYPES

    values = dict(shape.config)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with init_empty_weights(include_buffers=False), no_init_weights():
        return AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype])


def random_base(
    model: PreTrainedModel, device: torch.device, *, quantized: bool, draw: Draw | None = None
) -> PreTrainedModel:
    """Give an empty base random weights on `device`, layer by layer, as `model.load_base` would return it.

    `draw(shape, dtype)` makes one weight on the device; None: normal numbers of WEIGHT_STD. Norms are ones.
    """
    draw = draw or functools.partial(_normal, device=device)
    head = model.get_output_embeddings()
    for child in list(model.children()):
        if child is not head:
            _fill(child, device, quantized, draw)
        elif not model.config.tie_word_embeddings:
            _fill(child, device, False, draw)
    model.tie_weights()
    model.requires_grad_(False)
    model.is_loaded_in_4bit = quantized  # what peft asks
    return model.eval()


def _fill(module: Any, device: torch.device, quantized: bool, draw: Draw) -> None:
    """Weights for a module and those in it, in the order of the model."""
    from torch import nn

    for name, parameter in list(module.named_parameters(recurse=False)):
        if parameter.is_meta:
            values = draw(parameter.shape, parameter.dtype)
            if parameter.dim() == 1 and name == "weight":
                values.fill_(1.0)
            setattr(module, name, nn.Parameter(values, requires_grad=False))
    for name, buffer in list(module.named_buffers(recurse=False)):
        setattr(module, name, buffer.to(device))
    for name, child in list(module.named_children()):
        if quantized and type(child) is nn.Linear:
            child = _packed_layer(child, device, draw)
            setattr(module, name, child)
        _fill(child, device, quantized, draw)


def _normal(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    import torch

    return torch.empty(shape, dtype=dtype, device=device).normal_(std=WEIGHT_STD)


def _packed_layer(linear: Any, device: torch.device, draw: Draw) -> Any:
    """A 4-bit layer of the shape of `linear`, with the flags that `model.load_base` sets; its bias stays empty."""
    import torch
    from bitsandbytes.nn import Linear4bit, Params4bit

    dtype = linear.weight.dtype
    with torch.device("meta"):
        layer = Linear4bit(linear.in_features, linear.out_features, bias=False, compute_dtype=dtype, quant_type="nf4")
    layer.weight = Params4bit(
        draw(linear.weight.shape, dtype), compress_statistics=True, quant_type="nf4", module=layer
    ).to(device)
    layer.bias = linear.bias
    layer.compute_type_is_set, layer.support_avx512bf16_for_cpu = True, False
    return layer


def policy_of(base: PreTrainedModel, workload: Workload, settings: MemorySettings) -> Policy:
    """The policy around a base, as `model.load_policy` makes it."""
    from lowmem_grpo.model import LoraSpec, Policy, attach_adapter
    from lowmem_grpo.quiet import quiet_loading

    with quiet_loading():
        model = attach_adapter(base, LoraSpec(rank=workload.rank))
    tokenizer: Any = SimpleNamespace(eos_token_id=0, all_special_ids=[], decode=lambda ids, **_: "")
    return Policy(
        model,
        tokenizer,
        workload.card,
        base_name=workload.shape.name,
        activation_checkpointing=settings.activation_checkpointing,
        offload_activations=settings.offload_activations,
        mlp_tile_tokens=settings.mlp_tile_tokens,
        attention="sdpa",
    )


# ------------------------------------------------------------------------------------------------------------- speeds


def time_update(measured: Measured, updater: Updater, micro: PackedMicroBatch) -> None:
    """One more update: kernels are loaded by now."""
    _wait_for(updater.policy.device)
    began = time.perf_counter()
    updater.update([micro], 1)
    _wait_for(updater.policy.device)
    measured.update_s = time.perf_counter() - began
    measured.update_tokens = len(micro.input_ids_N)
    measured.update_predictors = len(micro.predictors_M.unique())
    measured.update_tokens_per_s = measured.update_tokens / measured.update_s


def _wait_for(device: torch.device) -> None:
    """Let the card finish what it was given."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_decoding(measured: Measured, policy: Policy, workload: Workload, settings: MemorySettings) -> None:
    """Answers of a few dozen tokens from the real sampler, prompts of full length, all slots in use."""
    from lowmem_grpo.rollout.engine import SlotEngine
    from lowmem_grpo.rollout.longest import longest_problems
    from lowmem_grpo.types import SamplingParams

    answers = min(settings.max_concurrent, workload.rows)
    group_size = min(workload.group_size, answers)
    problems = longest_problems(answers // group_size, workload.prompt_tokens)
    engine = SlotEngine(policy, seed=0, max_concurrent=answers, prefill_tokens=settings.prefill_tokens)
    ticks: list[tuple[float, int]] = []
    engine.generate(
        problems,
        group_size,
        SamplingParams(WARM_STEPS + TIMED_STEPS),
        step=1,
        on_progress=lambda done, rows, tokens: ticks.append((time.perf_counter(), tokens)),
    )
    (began, first), (ended, last) = ticks[WARM_STEPS - 1], ticks[-1]
    steps = len(ticks) - WARM_STEPS
    measured.decode_tokens_per_s = (last - first) / (ended - began)
    measured.decode_step_s = (ended - began) / steps
    measured.decode_tokens = WARM_STEPS + steps / 2


def rooflines(workload: Workload, settings: MemorySettings, measured: Measured) -> dict[str, float]:
    """Shares of what the card's data sheet allows; empty where the card is not known.

    "decode" is the bytes that one step must read at least (4-bit weights, head, each prompt's and answer's keys and
    values once) over the step's time and the bandwidth. "update" is the products with frozen weights (forward, once
    more where layers are recomputed, backward to the inputs; the head forward and backward), 2 operations each, over
    time and arithmetic: attention and adapter, a few percent, are not counted.
    """
    from lowmem_grpo.planning.budget import NF4_BYTES

    shape, card = workload.shape, workload.card
    if not (card.bandwidth_bytes_per_s and card.flops_per_s):
        return {}
    e = workload.value_bytes
    answers = min(settings.max_concurrent, workload.rows)
    groups = answers // min(workload.group_size, answers)
    tokens = groups * workload.prompt_tokens + answers * measured.decode_tokens
    weights = shape.linear_parameters * (NF4_BYTES if workload.quantized else e)
    read = weights + shape.vocab * shape.hidden * e + shape.kv_values_per_token * e * tokens
    passes = 3 if settings.activation_checkpointing else 2
    flops = 2 * passes * shape.linear_parameters * measured.update_tokens
    flops += 4 * shape.vocab * shape.hidden * measured.update_predictors
    return {
        "decode": read / measured.decode_step_s / card.bandwidth_bytes_per_s,
        "update": flops / measured.update_s / card.flops_per_s,
    }


# -------------------------------------------------------------------------------------------------------------- table


def table(report: Mapping[str, Any]) -> str:
    """The report for people. A column "off" says how far the one before it lies from the measurement."""
    on_cpu = report["card"]["device"] == "cpu"
    unit, size = ("MiB", 1 << 20) if on_cpu else ("GiB", GIB)
    lines = [f"{report['card']['name']}, torch {report['torch']}; peaks in {unit} without the CUDA context"]
    for row in report["rows"]:
        cells = {phase: _cells(row, phase, size) for phase in PHASES}
        if row is report["rows"][0]:
            lines.append(f"{'model':<14}{'phase':<9}" + "".join(f"  {name}" for name, _ in cells[PHASES[0]]))
        for phase in PHASES:
            values = "".join(f"  {value:>{len(name)}}" for name, value in cells[phase])
            lines.append(f"{row['model']:<14}{phase:<9}{values}")
        lines.append("  " + _speeds(row))
        lines += [f"  {sentence}" for sentence in row["recoveries"]]
    lines += [f"{entry['model']} was skipped: {entry['reason']}" for entry in report["skipped"]]
    lines += [f"{entry['model']} failed: {entry['reason']}" for entry in report["failed"]]
    return "\n".join(lines)


def _cells(row: Mapping[str, Any], phase: str, size: int) -> list[tuple[str, str]]:
    """(column, value) of one line; the plan foretells what is reserved, where anything is."""
    planned, simulated, measured = row["planned"][phase], row["simulated"][phase], row["measured"][phase]
    kinds = ("allocated", "reserved") if measured["reserved_bytes"] else ("allocated",)
    cells = []
    for kind in kinds:
        actual = measured[f"{kind}_bytes"]
        plan = [("  planned", planned)] if kind == kinds[-1] else []
        for name, predicted in (*plan, ("simulated", simulated[f"{kind}_bytes"])):
            cells.append((name, f"{predicted / size:.2f}"))
            cells.append(("    off", f"{error_percent(predicted, actual):+.1f}%"))
        cells.append((f" {kind}", f"{actual / size:.2f}"))
    return cells


def error_percent(predicted: float, actual: float) -> float:
    """How far the prediction lies above (or below, negative) the measurement.

    >>> error_percent(110, 100)
    10.0
    """
    return 100 * (predicted - actual) / actual


def _speeds(row: Mapping[str, Any]) -> str:
    shares = {name: f" ({100 * share:.0f} % of the card's)" for name, share in row["roofline"].items()}
    parts = [
        f"decode {row['decode_tokens_per_s']:.0f} tokens/s{shares.get('decode', '')}",
        f"update {row['update_tokens_per_s']:.0f} tokens/s{shares.get('update', '')}",
        *([f"CUDA context {row['context_bytes'] / GIB:.2f} GiB"] if row["context_bytes"] is not None else []),
        f"{row['seconds']:.0f} s in all",
    ]
    return ", ".join(parts)


if __name__ == "__main__":
    raise SystemExit(main())
