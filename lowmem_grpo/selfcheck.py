"""The self-checks at the first live step: proof that a run trains the policy that samples, against the right reference.

A run whose adapter gets no gradient, whose sampler multiplies with an old copy or whose reference moves along looks
healthy: rewards come in, losses are printed, nothing is learnt. All of that shows at the first optimizer step, for a
few forwards of the smallest micro-batch before and after it.

What is compared, and how close it has to be:

*   Sampler and trainer, and policy and reference before the step, are one policy computed in two ways. On the same
    kernels the second pair is equal bit for bit (B is 0 and adds exact zeros, or the reference adapter equals the
    policy's); where a backend takes another path with the adapter off, both pairs differ by rounding, and
    `agreement_limit` bounds it. A head in bfloat16 rounds a logit between 16 and 32 to a multiple of 1/8: measured
    with SmolLM2-135M (logits of 21) a mean gap of .046 in bfloat16, .005 in float16, 3e-6 in float32; two answers
    swapped give .6, a temperature that is 1.3 times too high .4.
*   The weights of `lora_B` are compared bit for bit: they start at 0, where every step shows, and otherwise a
    movement is only asked for where the learning rate is above the rounding of the weights.
*   Log-probs of the policy are compared bit for bit too, so a rate of 1e-6 is seen. A B that moved by less than the
    rounding of the activations may change none of them (in 16 bits that is every usual rate): then only the copies
    that are multiplied with are compared with their fp32 masters.
*   The reference is said to move when it changed and is now the policy bit for bit, or by more than the bounds above:
    a kernel that sums in another order from call to call is no moving reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from lowmem_grpo.model import POLICY_ADAPTER, Policy
from lowmem_grpo.types import Finding, Fix, PackedMicroBatch

__all__ = ["FirstStepCheck", "agreement_limit", "has_a_gradient"]


def agreement_limit(dtype: torch.dtype, *, temperature: float, logit: float) -> float:
    """How far two computations of one policy in `dtype` may be apart: mean absolute difference of log-probs, in nats.

    1e-4 in fp32 and wider, .02 in 16 bits, or the rounding of logits of the size `logit` (a mean absolute value) where
    that is more. All of it is the rounding of logits, so a temperature below 1 magnifies it.

    >>> agreement_limit(torch.float32, temperature=1.0, logit=21.0)
    0.0001
    >>> agreement_limit(torch.bfloat16, temperature=0.5, logit=2.0)
    0.04
    >>> agreement_limit(torch.bfloat16, temperature=1.0, logit=16.0)
    0.125
    """
    floor = 0.02 if torch.finfo(dtype).bits == 16 else 1e-4
    return max(floor, torch.finfo(dtype).eps * logit) / min(1.0, temperature)


def has_a_gradient(micro_batches: Sequence[PackedMicroBatch]) -> bool:
    """Whether the advantages of an update add up to a gradient at all.

    They do not where no group is live (a KL penalty has no gradient while policy and reference are equal), nor where
    equal answers to one prompt got rewards of their own and their advantages cancel. Such a step proves nothing.
    """
    pulls: dict[tuple[int, tuple[int, ...]], Tensor] = {}
    largest = 0.0
    for micro in micro_batches:
        pulls_M = (micro.advantages_BT * micro.weights_BT)[micro.mask_BT].double().cpu()
        largest = max(largest, _largest(pulls_M))
        lengths_B = micro.mask_BT.sum(dim=1).tolist()
        answers = zip(micro.rows, micro.targets_M.cpu().split(lengths_B), pulls_M.split(lengths_B), strict=True)
        for (group, _), tokens_T, pull_T in answers:
            key = group, tuple(tokens_T.tolist())
            pulls[key] = pulls[key] + pull_T if key in pulls else pull_T
    return any(_largest(pull_T) > 1e-9 * largest for pull_T in pulls.values())  # what is left of a sum is rounding


@dataclass(frozen=True, slots=True)
class _Measured:
    """Log-probs (M,) of the sampled tokens of one micro-batch."""

    policy_M: Tensor
    reference_M: Tensor


class FirstStepCheck:
    """Made right before the first update that `has_a_gradient`, asked right after it.

        check = FirstStepCheck(policy, micro_batches, temperature=1.0, head_chunk_tokens=256)
        findings = check.findings(updater.update(micro_batches, 0))

    `exact_sampler` is False where the sampler is another policy on purpose (int8 keys and values).
    Keeps a copy of every `lora_B` on the CPU and watches their gradients through hooks until `findings` or `close`.
    The mode of the model (sampling or update) is left as it was.
    """

    def __init__(
        self,
        policy: Policy,
        micro_batches: Sequence[PackedMicroBatch],
        *,
        temperature: float,
        head_chunk_tokens: int,
        exact_sampler: bool = True,
    ) -> None:
        self._policy = policy
        self._exact_sampler = exact_sampler
        self._micro = min(micro_batches, key=lambda micro: len(micro.input_ids_N))
        self._temperature, self._head_chunk_tokens = temperature, head_chunk_tokens
        self._masters = _policy_lora_b(policy.model)
        self._start = {name: master.detach().to("cpu", copy=True) for name, master in self._masters.items()}
        self._before = self._measure()
        self._limit = agreement_limit(policy.dtype, temperature=temperature, logit=self._mean_logit())
        self._without_gradient = set(self._masters)
        self._hooks = [
            master.register_post_accumulate_grad_hook(self._noting(name))
            for name, master in self._masters.items()
            if master.requires_grad
        ]
        self.conclusive = False
        """After `findings`: False when every optimizer step of the update was skipped, so the next one has to tell."""

    def close(self) -> None:
        """Stop watching the gradients."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def findings(self, metrics: Mapping[str, float]) -> tuple[Finding, ...]:
        """What is wrong, the most likely root first; empty for a run that trains.

        `metrics` are those that `Updater.update` returned. Nothing is judged when the update had no finite gradient
        (`conclusive` says so).
        """
        self.close()
        moved = self._movements()
        self.conclusive = metrics["optim/skipped"] == 0 or any(moved.values())
        if not self.conclusive:
            return ()
        after, lr = self._measure(), metrics["optim/lr"]
        found = (
            self._zero_rate(lr),
            self._frozen_adapter(moved, lr),
            self._sampler_gap(metrics["policy/sampler_gap"]),
            self._reference_at_start(),
            self._reference_moves(after),
            self._policy_stands_still(after, moved),
        )
        return tuple(finding for finding in found if finding is not None)

    # Measuring.

    @torch.no_grad()
    def _measure(self) -> _Measured:
        was_training = self._policy.model.training
        self._policy.sampling_mode()
        policy_M = self._logprobs()
        with self._policy.reference():
            reference_M = self._logprobs()
        if was_training:
            self._policy.update_mode()
        return _Measured(policy_M, reference_M)

    def _logprobs(self) -> Tensor:
        logprobs_BT, _ = self._policy.logprobs(
            self._micro, temperature=self._temperature, head_chunk_tokens=self._head_chunk_tokens
        )
        return logprobs_BT[self._micro.mask_BT]

    @torch.no_grad()
    def _mean_logit(self) -> float:
        """Mean absolute logit of the sampled tokens, before a softcap, without the other words."""
        micro, policy = self._micro, self._policy
        layout = policy.packed_layout(micro.spans)
        hidden_N_H = policy.hidden_states(micro.input_ids_N[None], micro.position_ids_N[None], layout)[0]
        head_M_H = policy.model.get_base_model().get_output_embeddings().weight[micro.targets_M]
        return (hidden_N_H[micro.predictors_M].float() * head_M_H.float()).sum(dim=1).abs().mean().item()

    def _noting(self, name: str) -> Any:
        def note(master: Tensor) -> None:
            # Once seen it is not looked at again: each look waits for the device.
            if name in self._without_gradient and master.grad is not None and bool(master.grad.any()):
                self._without_gradient.discard(name)

        return note

    def _movements(self) -> dict[str, float]:
        """The largest change of any value of each lora_B."""
        return {name: _largest(master.detach().cpu() - self._start[name]) for name, master in self._masters.items()}

    # Judging.

    def _zero_rate(self, lr: float) -> Finding | None:
        if lr > 0:
            return None
        return Finding(
            "learning rate",
            "error",
            "the learning rate is 0, so nothing can be learnt",
            f"the first optimizer step had optim/lr {lr:g}",
            (Fix("set a learning rate", ("optim.lr=1e-4",)),),
        )

    def _frozen_adapter(self, moved: Mapping[str, float], lr: float) -> Finding | None:
        resting = {name for name, change in moved.items() if change == 0 and self._should_move(name, lr)}
        if not (frozen := [name for name in self._masters if name in self._without_gradient | resting]):
            return None
        count, total = len(frozen), len(self._masters)
        return Finding(
            "frozen adapter",
            "error",
            "the whole adapter is frozen" if count == total else "a part of the adapter is frozen",
            f"at the first step, with a learning rate of {lr:g}, {len(self._without_gradient)} of {total} lora_B "
            f"had no gradient and {len(resting)} did not move, the first of them {frozen[0]}",
            (
                Fix("let lora_B require a gradient, give it to the optimizer and do not detach what it computes"),
                Fix("train other layers with lora.target_modules"),
            ),
        )

    def _should_move(self, name: str, lr: float) -> bool:
        """Whether a step of `lr`, which is what Adam takes first, is above the rounding of these weights."""
        start = self._start[name]
        return lr > torch.finfo(start.dtype).eps * _largest(start)

    def _sampler_gap(self, gap: float) -> Finding | None:
        if gap <= self._limit or not self._exact_sampler:
            return None
        return Finding(
            "sampler gap",
            "error",
            "answers, tokens and log-probs of sampler and update do not belong together: shuffled answers, another "
            "temperature, a dropout, a wrong position or mask, or a kernel in half precision",
            f"the mean |sampler - trainer log-prob| is {gap:.3g} nats, at most {self._limit:g} is rounding "
            f"in {_name(self._policy.dtype)}",
            (
                Fix(
                    "run once with plain attention and full precision",
                    ("model.attention=sdpa", "model.compute_dtype=float32"),
                ),
                Fix("report it with the run folder if the gap stays"),
            ),
        )

    def _reference_at_start(self) -> Finding | None:
        difference_M = (self._before.reference_M - self._before.policy_M).double()
        distance = difference_M.abs().mean().item()
        if distance <= self._limit:
            return None
        kl = (difference_M.expm1() - difference_M).mean().item()  # the k3 estimate, joschu.net/blog/kl-approx.html
        return Finding(
            "reference at start",
            "error",
            "the reference is not what the run began from",
            f"before the first step the KL to the reference is {kl:.3g} instead of 0, and log-probs of policy and "
            f"reference are {distance:.3g} nats apart, at most {self._limit:g} is rounding "
            f"in {_name(self._policy.dtype)}",
            (Fix("start a new run; one that goes on from an adapter names it in lora.continue_from"),),
        )

    def _reference_moves(self, after: _Measured) -> Finding | None:
        change = _mean_distance(after.reference_M, self._before.reference_M)
        if change <= self._limit and (change == 0 or not torch.equal(after.reference_M, after.policy_M)):
            return None
        return Finding(
            "reference moves",
            "error",
            "the reference moves with the policy: the adapter is left on in it, so a KL penalty holds nothing back",
            f"the first step changed the reference's log-probs by {change:.3g} nats on average, "
            f"and the policy's by {_mean_distance(after.policy_M, self._before.policy_M):.3g}",
            (Fix("switch the adapter off inside Policy.reference()"),),
        )

    def _policy_stands_still(self, after: _Measured, moved: Mapping[str, float]) -> Finding | None:
        stale, total = _stale_layers(self._policy.model)
        visible = max(moved.values()) > torch.finfo(self._policy.dtype).eps
        if not stale and not (visible and torch.equal(after.policy_M, self._before.policy_M)):
            return None
        change = _mean_distance(after.policy_M, self._before.policy_M)
        return Finding(
            "policy stands still",
            "error",
            "the optimizer moved the adapter but the sampler multiplies with an old copy of it",
            f"lora_B changed by up to {max(moved.values()):.3g}, {stale} of {total} layers have a copy that differs "
            f"from its master, and the policy's log-probs changed by {change:.3g} nats on average",
            (Fix("call Policy.refresh_adapter() after every change of the adapter"),),
        )


def _policy_lora_b(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name of the adapted layer -> its lora_B in the policy adapter, trainable or not."""
    ending = f".lora_B.{POLICY_ADAPTER}.weight"
    return {
        name.removesuffix(ending).removeprefix("base_model.model."): parameter
        for name, parameter in model.named_parameters()
        if name.endswith(ending)
    }


def _stale_layers(model: nn.Module) -> tuple[int, int]:
    """How many adapted layers multiply with something else than their masters as the compute dtype rounds them."""
    adapters = [module.lean[1][POLICY_ADAPTER] for module in model.modules() if isinstance(module, LoraLayer)]
    stale = [
        adapter
        for adapter in adapters
        if not torch.equal(adapter.a_R_I, adapter.master_a_R_I.to(adapter.a_R_I.dtype))
        or not torch.equal(adapter.b_O_R, adapter.master_b_O_R.to(adapter.b_O_R.dtype))
    ]
    return len(stale), len(adapters)


def _largest(values: Tensor) -> float:
    return values.abs().max().item()


def _mean_distance(one_M: Tensor, other_M: Tensor) -> float:
    return (one_M - other_M).double().abs().mean().item()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
