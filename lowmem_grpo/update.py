"""One update of the adapter from one rollout batch: forward and backward per micro-batch, then the optimizer step.

When the memory runs out in a micro-batch, the gradient that is half there is thrown away, and the same use of the batch
begins again with smaller micro-batches: the gradient is the same for any packing (see `lowmem_grpo.batching`), and no
optimizer step is taken twice.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lowmem_grpo.errors import NonFiniteFailed, OutOfMemoryFailed
from lowmem_grpo.losses import LOSSES, SamplerCorrection, sampler_correction
from lowmem_grpo.memory.oom import OnOutOfMemory, Recovery, is_out_of_memory, release_memory
from lowmem_grpo.model import Policy
from lowmem_grpo.types import LossInputs, PackedMicroBatch

__all__ = ["Repack", "UpdateSettings", "Updater"]

Result = TypeVar("Result")
Repack = Callable[[int], Sequence[PackedMicroBatch]]
"""Packs the same rollout batch into micro-batches of at most so many tokens."""

NON_FINITE_LIMIT = 10
"""Optimizer steps in a row with non-finite gradients after which a run stops."""

SMALLEST_HEAD_CHUNK_TOKENS = 32
"""The head's chunks are not made any smaller for lack of memory: these logits are a few MB."""


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """What an update needs to know besides its micro-batches.

    `lr_of` maps the index of an optimizer step (from 0) to its learning rate. `updates_per_rollout` is how often
    the same rollout batch is used, the mu of arXiv 2402.03300. `micro_batch_tokens` and `head_chunk_tokens` are what an
    `Updater` starts with. `sampler_correction` weighs each token by how much likelier the policy makes it than the
    sampler did (see `losses.sampler_correction`); the metric `policy/sampler_weight` is the mean of these weights.

    >>> UpdateSettings("clip", {}, 0.0, 1.0, 256, 1.0, 1, lambda update: 1e-4).updates_per_rollout
    1
    """

    loss: str
    loss_options: Mapping[str, Any]
    kl_coef: float
    temperature: float
    head_chunk_tokens: int
    max_grad_norm: float
    updates_per_rollout: int
    lr_of: Callable[[int], float]
    micro_batch_tokens: int = 2048
    sampler_correction: SamplerCorrection = "none"


@dataclass(slots=True)
class _Sums:
    """Running sums over the tokens of an update."""

    tokens: int = 0
    by_name: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def means(self) -> dict[str, float]:
        return {name: value / self.tokens for name, value in self.by_name.items()}


class Updater:
    """Holds the optimizer and the loss scale; `update` is the whole algorithm after the advantages.

    `scaler` only acts with float16 weights, whose activation gradients would underflow. `skipped_in_a_row` counts
    optimizer steps left out because their gradient was not finite. `micro_batch_tokens`, what to pack a batch with, and
    `head_chunk_tokens` fall when the memory runs out, and stay there. `is_half_done` tells after an exception whether
    the update had come to its first optimizer step.
    """

    def __init__(
        self,
        policy: Policy,
        settings: UpdateSettings,
        optimizer: torch.optim.Optimizer,
        *,
        on_out_of_memory: OnOutOfMemory | None = None,
    ) -> None:
        self.policy = policy
        self.settings = settings
        self.optimizer = optimizer
        self.on_out_of_memory = on_out_of_memory
        self.parameters = policy.trainable_parameters()
        half = next(policy.model.get_base_model().get_decoder().parameters()).dtype == torch.float16
        self.scaler = torch.amp.GradScaler(policy.device.type, init_scale=2.0**12, enabled=half)
        self.skipped_in_a_row = 0
        self.micro_batch_tokens = settings.micro_batch_tokens
        self.head_chunk_tokens = settings.head_chunk_tokens
        self.is_half_done = False

    def update(
        self,
        micro_batches: Sequence[PackedMicroBatch],
        first_update: int,
        on_progress: Callable[[int, int], None] | None = None,
        *,
        repack: Repack | None = None,
    ) -> dict[str, float]:
        """Use one rollout batch `updates_per_rollout` times; returns metrics of the last pass.

        No micro-batches (every group dead) means no optimizer step: momentum alone must not move the adapter. Where the
        memory runs out, `repack` gives the smaller micro-batches to go on with.

        Raises NonFiniteFailed after ten skipped optimizer steps in a row, OutOfMemoryFailed when the memory does not
        suffice for the smallest micro-batches, or runs out when an optimizer step is half taken.
        """
        self.is_half_done = False
        metrics = {"optim/loss": 0.0, "optim/grad_norm": 0.0, "optim/skipped": 0.0}
        metrics["optim/lr"] = self.settings.lr_of(first_update)
        if not micro_batches:
            return metrics
        self.policy.update_mode()
        old_logprobs: dict[tuple[int, int], Tensor] = {}
        for use in range(self.settings.updates_per_rollout):
            while (done := self._try_backward(micro_batches, old_logprobs, on_progress)) is None:
                micro_batches = self._smaller(micro_batches, repack)
            loss, sums, new_logprobs = done
            if not old_logprobs:
                # On the first pass the policy still is the one that sampled, so its log-probs are the old ones.
                old_logprobs = _by_row(micro_batches, new_logprobs)
                metrics["policy/sampler_gap"] = _sampler_gap(micro_batches, new_logprobs)
            lr = self.settings.lr_of(first_update + use)
            norm = self._optimizer_step(lr)
            metrics |= {"optim/loss": loss, "optim/grad_norm": norm, "optim/lr": lr} | sums.means()
            metrics["optim/skipped"] += float(not math.isfinite(norm))
        self.policy.sampling_mode()
        self.is_half_done = False
        return metrics

    def rehearse(self, repack: Repack) -> None:
        """The forward and backward of what `repack` gives for the present `micro_batch_tokens`, without a step; lowers
        what has to be lowered."""
        self.policy.update_mode()
        micro_batches = repack(self.micro_batch_tokens)
        while self._try_backward(micro_batches, {}, None) is None:
            micro_batches = self._smaller(micro_batches, repack)
        self.optimizer.zero_grad(set_to_none=True)
        self.policy.sampling_mode()

    def _try_backward(
        self,
        micro_batches: Sequence[PackedMicroBatch],
        old_logprobs: Mapping[tuple[int, int], Tensor],
        on_progress: Callable[[int, int], None] | None,
    ) -> tuple[float, _Sums, list[Tensor]] | None:
        """`_backward`, or None and no gradient at all when the memory ran out."""
        try:
            return self._backward(micro_batches, old_logprobs, on_progress)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        # Not in the block above: while the error lives, so do the frames that hold the activations.
        self.optimizer.zero_grad(set_to_none=True)
        release_memory(self.policy.device)
        return None

    def _smaller(self, micro_batches: Sequence[PackedMicroBatch], repack: Repack | None) -> Sequence[PackedMicroBatch]:
        """What to go on with after an out-of-memory: smaller micro-batches, or the same ones and smaller head chunks.

        Raises OutOfMemoryFailed when neither can get any smaller.
        """
        largest = _largest(micro_batches)
        tokens = max(1, min(self.micro_batch_tokens, largest) // 2)
        smaller = repack(tokens) if repack is not None else micro_batches
        if _largest(smaller) < largest:
            self.micro_batch_tokens = tokens
            self._tell(
                f"The memory ran out in an update of {largest} tokens at once; its gradient is computed again with "
                f"memory.micro_batch_tokens={tokens}.",
                micro_batch_tokens=tokens,
            )
            return smaller
        # The largest micro-batch is one answer, which no packing divides.
        if self.head_chunk_tokens > SMALLEST_HEAD_CHUNK_TOKENS:
            self.head_chunk_tokens = max(SMALLEST_HEAD_CHUNK_TOKENS, self.head_chunk_tokens // 2)
            self._tell(
                f"The memory ran out in the update of a single answer ({largest} tokens with its prompt); its gradient "
                f"is computed again with memory.head_chunk_tokens={self.head_chunk_tokens}.",
                head_chunk_tokens=self.head_chunk_tokens,
            )
            return micro_batches
        raise OutOfMemoryFailed(
            f"The memory does not suffice for the update of a single answer ({largest} tokens with its prompt): set "
            "memory.mlp_tile_tokens, switch memory.offload_activations on, or lower rollout.max_new_tokens."
        )

    def _backward(
        self,
        micro_batches: Sequence[PackedMicroBatch],
        old_logprobs: Mapping[tuple[int, int], Tensor],
        on_progress: Callable[[int, int], None] | None,
    ) -> tuple[float, _Sums, list[Tensor]]:
        """Add up the gradients of all micro-batches; each graph is freed before the next forward."""
        total, sums, new_logprobs = 0.0, _Sums(), []
        loss_fn, settings = LOSSES[self.settings.loss], self.settings
        for index, micro in enumerate(micro_batches):
            reference_BT = self._reference_logprobs(micro) if settings.kl_coef > 0 else None
            logprobs_BT, entropy_BT = self._logprobs(micro)
            old_BT = _rows_of(micro, old_logprobs) if old_logprobs else logprobs_BT.detach()
            weight_BT = sampler_correction(
                old_BT, micro.sampler_logprobs_BT, micro.mask_BT, settings.sampler_correction
            )
            inputs = LossInputs(
                logprobs_BT=logprobs_BT,
                old_logprobs_BT=old_BT,
                ref_logprobs_BT=reference_BT,
                advantages_BT=micro.advantages_BT,
                mask_BT=micro.mask_BT,
                weights_BT=micro.weights_BT * weight_BT,
            )
            output = loss_fn(inputs, kl_coef=settings.kl_coef, **settings.loss_options)
            self.scaler.scale(output.loss).backward()
            total += output.loss.item()
            sums.tokens += int(micro.mask_BT.sum())
            values = {**output.sums, "policy/entropy": entropy_BT.sum().item()}
            if settings.sampler_correction != "none":
                values["policy/sampler_weight"] = (weight_BT * micro.mask_BT).sum().item()
            for name, value in values.items():
                sums.by_name[name] += value
            new_logprobs.append(logprobs_BT.detach())
            if on_progress is not None:
                on_progress(index + 1, len(micro_batches))
        return total, sums, new_logprobs

    def _logprobs(self, micro: PackedMicroBatch) -> tuple[Tensor, Tensor]:
        return self.policy.logprobs(
            micro, temperature=self.settings.temperature, head_chunk_tokens=self.head_chunk_tokens
        )

    @torch.no_grad()
    def _reference_logprobs(self, micro: PackedMicroBatch) -> Tensor:
        with self.policy.reference():
            return self._logprobs(micro)[0]

    def _optimizer_step(self, lr: float) -> float:
        """Clip and step, unless the gradient is not finite; returns its norm before clipping."""
        self.is_half_done = True
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self._all_or_nothing(lambda: self.scaler.unscale_(self.optimizer))
        norm = self._all_or_nothing(self._clip)
        if math.isfinite(norm):
            self._all_or_nothing(lambda: self.scaler.step(self.optimizer))
            self.policy.refresh_adapter()
            self.skipped_in_a_row = 0
        else:
            self.skipped_in_a_row += 1
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.skipped_in_a_row >= NON_FINITE_LIMIT:
            raise NonFiniteFailed(
                f"{NON_FINITE_LIMIT} optimizer steps in a row had non-finite gradients; lower optim.lr "
                f"(now {lr:g}) or set model.compute_dtype=float32."
            )
        return norm

    def _clip(self) -> float:
        return torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.settings.max_grad_norm).item()

    def _all_or_nothing(self, act: Callable[[], Result]) -> Result:
        """`act`, and once more when the memory ran out before it had changed anything.

        No step may be taken twice or by halves, and it happens in place. What an optimizer allocates at its first step
        comes before its first change; past that OutOfMemoryFailed is raised.
        """
        state = {parameter: dict(entries) for parameter, entries in self.optimizer.state.items()}
        before = self._versions(state)
        try:
            return act()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        self.optimizer.state.clear()  # of new state a part may be missing
        self.optimizer.state.update(state)
        if self._versions(state) == before:
            release_memory(self.policy.device)
            self._tell("The memory ran out before an optimizer step; it was tried once more.")
            try:
                return act()
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
        raise OutOfMemoryFailed(
            "The memory ran out in an optimizer step: lower lora.rank, or free memory that other programs hold on the "
            "card, and resume from the last checkpoint."
        )

    def _versions(self, state: Mapping[Tensor, Mapping[str, Any]]) -> list[int]:
        """How often each tensor that a step works on was changed in place, by torch's own count."""
        entries = (entry for values in state.values() for entry in values.values())
        tensors = [*self.parameters.values(), *(entry for entry in entries if isinstance(entry, Tensor))]
        gradients = (parameter.grad for parameter in self.parameters.values())
        return [tensor._version for tensor in (*tensors, *gradients) if tensor is not None]

    def _tell(self, sentence: str, **lowered: int) -> None:
        if self.on_out_of_memory is not None:
            self.on_out_of_memory(Recovery(sentence, lowered))


def _largest(micro_batches: Sequence[PackedMicroBatch]) -> int:
    """Tokens of the largest micro-batch."""
    return max(len(micro.input_ids_N) for micro in micro_batches)


def _by_row(micro_batches: Sequence[PackedMicroBatch], values: Sequence[Tensor]) -> dict[tuple[int, int], Tensor]:
    """(group, answer) -> its values, padded as in its micro-batch: what is known whatever is packed with what."""
    return {
        row: values_T
        for micro, values_BT in zip(micro_batches, values, strict=True)
        for row, values_T in zip(micro.rows, values_BT, strict=True)
    }


def _rows_of(micro: PackedMicroBatch, by_row: Mapping[tuple[int, int], Tensor]) -> Tensor:
    """The values (B, T) of the rows of a micro-batch: behind an answer there is only padding, here and there."""
    return pad_sequence([by_row[row][: micro.mask_BT.shape[1]] for row in micro.rows], batch_first=True)


def _sampler_gap(micro_batches: Sequence[PackedMicroBatch], logprobs: Sequence[Tensor]) -> float:
    """Mean absolute difference of sampler and trainer log-probs, over the tokens of the update."""
    gaps = [
        (micro.sampler_logprobs_BT - new_BT)[micro.mask_BT].abs().double()
        for micro, new_BT in zip(micro_batches, logprobs, strict=True)
    ]
    return torch.cat(gaps).mean().item()
