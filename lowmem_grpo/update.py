"""One update of the adapter from one rollout batch: forward and backward per micro-batch, then the optimizer step."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lowmem_grpo.errors import NonFiniteFailed
from lowmem_grpo.losses import LOSSES
from lowmem_grpo.model import Policy
from lowmem_grpo.types import LossInputs, PackedMicroBatch

__all__ = ["UpdateSettings", "Updater"]

NON_FINITE_LIMIT = 10
"""Optimizer steps in a row with non-finite gradients after which a run stops."""


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """What an update needs to know besides its micro-batches.

    `lr_of` maps the index of an optimizer step (from 0) to its learning rate. `updates_per_rollout` is how often
    the same rollout batch is used, the mu of arXiv 2402.03300.

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
    optimizer steps left out because their gradient was not finite.
    """

    def __init__(self, policy: Policy, settings: UpdateSettings, optimizer: torch.optim.Optimizer) -> None:
        self.policy = policy
        self.settings = settings
        self.optimizer = optimizer
        self.parameters = policy.trainable_parameters()
        half = next(policy.model.get_base_model().get_decoder().parameters()).dtype == torch.float16
        self.scaler = torch.amp.GradScaler(policy.device.type, init_scale=2.0**12, enabled=half)
        self.skipped_in_a_row = 0

    def update(
        self,
        micro_batches: Sequence[PackedMicroBatch],
        first_update: int,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> dict[str, float]:
        """Use one rollout batch `updates_per_rollout` times; returns metrics of the last pass.

        No micro-batches (every group dead) means no optimizer step: momentum alone must not move the adapter.
        Raises NonFiniteFailed after ten skipped optimizer steps in a row.
        """
        metrics = {"optim/loss": 0.0, "optim/grad_norm": 0.0, "optim/skipped": 0.0}
        metrics["optim/lr"] = self.settings.lr_of(first_update)
        if not micro_batches:
            return metrics
        self.policy.update_mode()
        old_logprobs: list[torch.Tensor] = []
        for use in range(self.settings.updates_per_rollout):
            loss, sums, new_logprobs = self._backward(micro_batches, old_logprobs, on_progress)
            if not old_logprobs:
                # On the first pass the policy still is the one that sampled, so its log-probs are the old ones.
                old_logprobs = new_logprobs
                metrics["policy/sampler_gap"] = _sampler_gap(micro_batches, new_logprobs)
            lr = self.settings.lr_of(first_update + use)
            norm = self._optimizer_step(lr)
            metrics |= {"optim/loss": loss, "optim/grad_norm": norm, "optim/lr": lr} | sums.means()
            metrics["optim/skipped"] += float(not math.isfinite(norm))
        self.policy.sampling_mode()
        return metrics

    def _backward(
        self,
        micro_batches: Sequence[PackedMicroBatch],
        old_logprobs: Sequence[torch.Tensor],
        on_progress: Callable[[int, int], None] | None,
    ) -> tuple[float, _Sums, list[torch.Tensor]]:
        """Add up the gradients of all micro-batches; each graph is freed before the next forward."""
        total, sums, new_logprobs = 0.0, _Sums(), []
        loss_fn, settings = LOSSES[self.settings.loss], self.settings
        for index, micro in enumerate(micro_batches):
            reference_BT = self._reference_logprobs(micro) if settings.kl_coef > 0 else None
            logprobs_BT, entropy_BT = self._logprobs(micro)
            inputs = LossInputs(
                logprobs_BT=logprobs_BT,
                old_logprobs_BT=old_logprobs[index] if old_logprobs else logprobs_BT.detach(),
                ref_logprobs_BT=reference_BT,
                advantages_BT=micro.advantages_BT,
                mask_BT=micro.mask_BT,
                weights_BT=micro.weights_BT,
            )
            output = loss_fn(inputs, kl_coef=settings.kl_coef, **settings.loss_options)
            self.scaler.scale(output.loss).backward()
            total += output.loss.item()
            sums.tokens += int(micro.mask_BT.sum())
            for name, value in {**output.sums, "policy/entropy": entropy_BT.sum().item()}.items():
                sums.by_name[name] += value
            new_logprobs.append(logprobs_BT.detach())
            if on_progress is not None:
                on_progress(index + 1, len(micro_batches))
        return total, sums, new_logprobs

    def _logprobs(self, micro: PackedMicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        return self.policy.logprobs(
            micro, temperature=self.settings.temperature, head_chunk_tokens=self.settings.head_chunk_tokens
        )

    @torch.no_grad()
    def _reference_logprobs(self, micro: PackedMicroBatch) -> torch.Tensor:
        with self.policy.reference():
            return self._logprobs(micro)[0]

    def _optimizer_step(self, lr: float) -> float:
        """Clip and step, unless the gradient is not finite; returns its norm before clipping."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.settings.max_grad_norm).item()
        if math.isfinite(norm):
            self.scaler.step(self.optimizer)
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


def _sampler_gap(micro_batches: Sequence[PackedMicroBatch], logprobs: Sequence[torch.Tensor]) -> float:
    """Mean absolute difference of sampler and trainer log-probs, over the tokens of the update."""
    gaps = [
        (micro.sampler_logprobs_BT - new_BT)[micro.mask_BT].abs().double()
        for micro, new_BT in zip(micro_batches, logprobs, strict=True)
    ]
    return torch.cat(gaps).mean().item()
