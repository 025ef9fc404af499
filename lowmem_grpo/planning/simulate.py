"""The peak of a step by running it: the real sampler and the real update on fake tensors, in seconds, with no weights.

It contains no formula: what the code allocates is written down operation by operation and replayed through a model of
torch's caching allocator. Two things are not run. Loading is imitated, since there are no weights to load: each layer
is held in 16 bits while it is packed. And answers are not decoded token by token: two steps are, the second at full
length, where the keys and values have been allocated all along.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch

from lowmem_grpo.batching import largest_micro_batch
from lowmem_grpo.memory.allocator import CachingAllocator
from lowmem_grpo.memory.decoded import hold_decoded_weights
from lowmem_grpo.memory.embedding import is_offloaded, offload_embedding
from lowmem_grpo.memory.live import tensors_in
from lowmem_grpo.memory.trace import Allocation, AllocationTrace
from lowmem_grpo.model import DTYPES, POLICY_ADAPTER, REFERENCE_ADAPTER, LoraSpec, Policy, attach_adapter
from lowmem_grpo.optim import build_optimizer
from lowmem_grpo.planning.budget import CONTEXT_BYTES, PROCESS_BYTES
from lowmem_grpo.planning.imagined import BLOCK, imagined_base, imagined_card, workspace_of
from lowmem_grpo.planning.workload import Workload
from lowmem_grpo.quiet import quiet_loading
from lowmem_grpo.rollout.longest import decode_longest, longest_problems
from lowmem_grpo.types import MemorySettings, SamplingParams
from lowmem_grpo.update import Updater, UpdateSettings

__all__ = ["Phase", "Simulation", "leave_gradients", "simulate", "start_optimizer", "updater_for"]

SHOWN = 12
"""Entries of the list of what was alive at a peak."""


@dataclass(frozen=True, slots=True)
class Phase:
    """The peak of one phase, in bytes, CUDA context not included, and the largest of what was alive at it."""

    allocated_bytes: int
    reserved_bytes: int
    largest: tuple[Allocation, ...]


@dataclass(frozen=True, slots=True)
class Simulation:
    """Peaks by phase ("load", "rollout", "update"). `weights_bytes` are those of the frozen base."""

    phases: dict[str, Phase]
    weights_bytes: int
    context_bytes: int

    @property
    def peak_bytes(self) -> int:
        """What the card must have: the largest reserved peak and the context."""
        return max(phase.reserved_bytes for phase in self.phases.values()) + self.context_bytes

    @property
    def peak_phase(self) -> str:
        """The phase that needs the most."""
        return max(self.phases, key=lambda name: self.phases[name].reserved_bytes)

    def to_json(self) -> dict[str, Any]:
        """JSON values, for `plan --json`."""
        return {**asdict(self), "peak_bytes": self.peak_bytes, "peak_phase": self.peak_phase}


class _ImaginedPolicy(Policy):
    def check_head(self) -> None:
        """There are no values to compare."""


def simulate(workload: Workload, settings: MemorySettings, *, expandable_segments: bool = True) -> Simulation:
    """Trace one step of `workload` under `settings`, every prompt and every answer of the longest kind.

    Takes seconds, for very deep models a minute. Raises ModelError for what a run would refuse.
    """
    on_gpu = workload.card.device != "cpu"
    trace, marks = AllocationTrace(workspace_of if on_gpu else None), dict[str, tuple[int, int]]()
    with imagined_card(workload.card):
        policy = _imagined_policy(workload, settings)
        updater = updater_for(policy, workload, settings)
        handles = trace.watch(policy.model)
        problems = longest_problems(workload.prompts_per_step, workload.prompt_tokens)
        with trace:
            with _marked(trace, marks, "load"):
                _load(trace, policy)
            weights_bytes = trace.live_bytes
            trace.count(policy.adapter_tensors(), "adapter")
            start_optimizer(updater)
            with _marked(trace, marks, "rollout"):
                decode_longest(
                    policy,
                    problems,
                    workload.group_size,
                    SamplingParams(workload.answer_tokens),
                    max_concurrent=settings.max_concurrent,
                    prefill_tokens=settings.prefill_tokens,
                    kv_int8=workload.kv_int8,
                )
            with _marked(trace, marks, "update"):
                micro_batch = largest_micro_batch(
                    problems,
                    workload.group_size,
                    workload.answer_tokens,
                    micro_batch_tokens=settings.micro_batch_tokens,
                    device=policy.device,
                )
                if len(micro_batch.input_ids_N) < workload.tokens:
                    leave_gradients(updater)
                updater.update([micro_batch], 0)
        for handle in handles:
            handle.remove()
    return Simulation(
        phases=_replayed(trace, marks, expandable_segments),
        weights_bytes=weights_bytes,
        context_bytes=CONTEXT_BYTES if on_gpu else PROCESS_BYTES,
    )


@contextmanager
def _marked(trace: AllocationTrace, marks: dict[str, tuple[int, int]], phase: str) -> Iterator[None]:
    """Remember which events belong to a phase."""
    first = len(trace.events)
    yield
    marks[phase] = (first, len(trace.events))


def _replayed(trace: AllocationTrace, marks: dict[str, tuple[int, int]], expandable_segments: bool) -> dict[str, Phase]:
    allocator = CachingAllocator(expandable_segments=expandable_segments)
    phases: dict[str, Phase] = {}
    done = 0
    for name, (first, last) in marks.items():
        allocator.replay(trace.events[done:first])
        allocator.empty_cache()  # as `model.load_policy` and `PeakProbe.reset` do
        peak = allocator.replay(trace.events[first:last])
        done = last
        largest = trace.alive_after(first + peak.peak_index)
        phases[name] = Phase(peak.peak_allocated_bytes, peak.peak_reserved_bytes, tuple(largest[:SHOWN]))
    return phases


# ------------------------------------------------------------------------------------------ the parts


def _imagined_policy(workload: Workload, settings: MemorySettings) -> Policy:
    dtype = DTYPES[workload.dtype]
    base = imagined_base(workload.shape, dtype, quantized=workload.quantized)
    if workload.decoded:
        hold_decoded_weights(base, dtype)
    if settings.offload_embeddings:
        offload_embedding(base, torch.device("cpu"))
    lora = LoraSpec(rank=workload.rank, target_modules=workload.targets or "all-linear")
    with quiet_loading():
        model = attach_adapter(base, lora)
        if workload.reference_adapter:
            model.add_adapter(REFERENCE_ADAPTER, model.peft_config[POLICY_ADAPTER])
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(f".{POLICY_ADAPTER}." in name)
    tokenizer: Any = SimpleNamespace(eos_token_id=0, all_special_ids=[])
    return _ImaginedPolicy(
        model,
        tokenizer,
        workload.card,
        base_name=workload.shape.name,
        activation_checkpointing=settings.activation_checkpointing,
        offload_activations=settings.offload_activations,
        mlp_tile_tokens=settings.mlp_tile_tokens,
        attention="sdpa",
        device=torch.device("cpu"),
    )


def updater_for(policy: Policy, workload: Workload, settings: MemorySettings) -> Updater:
    """The update of a workload, with an optimizer that has no state yet."""
    update_settings = UpdateSettings(
        loss="clip",
        loss_options={},
        kl_coef=0.1 if workload.kl else 0.0,
        temperature=1.0,
        head_chunk_tokens=settings.head_chunk_tokens,
        max_grad_norm=1.0,
        updates_per_rollout=workload.updates_per_rollout,
        lr_of=lambda update: 1e-4,
    )
    optimizer = build_optimizer(workload.optimizer, policy.trainable_parameters(), lr=1e-4, weight_decay=0.0)
    return Updater(policy, update_settings, optimizer)


def _load(trace: AllocationTrace, policy: Policy) -> None:
    """Weights one after the other; a 4-bit one is there unpacked until it is packed, beside two fp32 scales for each of
    its blocks (measured), and what goes to the host is loaded onto the card first."""
    embedding = policy.model.get_input_embeddings()
    host_bytes = embedding.weight.nbytes if is_offloaded(embedding) else 0
    if host_bytes:
        trace.on_made(host := trace.next_number(), host_bytes, "an embedding on its way to the host")
    for tensor in _base_tensors(policy):
        if host_bytes and tensor is embedding.weight:
            continue
        state, number = getattr(tensor, "quant_state", None), trace.next_number()
        values = 2 * tensor.numel()
        unpacked_bytes = values * state.dtype.itemsize + 2 * 4 * values // BLOCK if state is not None else 0
        if unpacked_bytes:
            trace.on_made(number, unpacked_bytes, "a weight being packed")
        trace.count([tensor], "weights")
        if unpacked_bytes:
            trace.on_freed(number, unpacked_bytes)
    if host_bytes:
        trace.on_freed(host, host_bytes)


def _base_tensors(policy: Policy) -> Iterator[torch.Tensor]:
    """In the order in which transformers loads them, that of their names; then what is decoded from them."""
    base = policy.model.get_base_model()
    named = (*base.named_parameters(), *base.named_buffers())
    for name, tensor in sorted(named, key=lambda entry: entry[0]):
        if ".lora_" not in name:
            yield tensor
            yield from _scales(getattr(tensor, "quant_state", None))
    for module in base.modules():
        if (decoded := getattr(module, "decoded_weight", None)) is not None:
            yield decoded


def _scales(state: Any) -> Iterator[torch.Tensor]:
    """The tensors of a bitsandbytes QuantState."""
    if state is not None:
        yield from tensors_in([state.absmax, state.code, state.offset])
        yield from _scales(state.state2)


def leave_gradients(updater: Updater) -> None:
    """Give every master a gradient, as micro-batches before would have."""
    for parameter in updater.parameters.values():
        parameter.grad = torch.zeros_like(parameter)


def start_optimizer(updater: Updater) -> None:
    """One step on gradients of no meaning, so that the optimizer has its state, as from the second step of a run on."""
    leave_gradients(updater)
    updater.optimizer.step()
    updater.optimizer.zero_grad(set_to_none=True)
