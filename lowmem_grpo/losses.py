"""Policy losses, pure functions `LossInputs -> LossOutput`, and the weights that aggregate tokens into one number.

With rho = pi / pi_old per token and A its advantage, a loss is `sum(weights * token_loss)` where

    clip    token_loss = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)          arXiv 1707.06347, 2402.03300
    gspo    the same with one ratio s = exp(mean over the answer of log rho)             arXiv 2507.18071

plus `kl_coef` times k3 = exp(ref - logp) - (ref - logp) - 1, the unbiased, never negative estimate of the KL divergence
to the reference. The weights come from `token_weights`, fixed once for the whole update: any split into micro-batches
adds up to the same loss and the same gradient.

On the first pass over a rollout batch `old` is `logp.detach()`: the ratio is exactly 1, the loss is about 0 (the
advantages of a group cancel) and the gradient is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Protocol

import torch
from pydantic import Field
from torch import Tensor

from lowmem_grpo.options import checked, choose, option_defaults, validate_options
from lowmem_grpo.types import LossInputs, LossOutput

__all__ = [
    "AGGREGATIONS",
    "LOG_RATIO_LIMIT",
    "LOSSES",
    "SAMPLER_CORRECTIONS",
    "Loss",
    "Reduce",
    "SamplerCorrection",
    "check_loss_options",
    "loss_options",
    "no_reduce",
    "sampler_correction",
    "token_weights",
]

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to this before exp: e^20 is 5e8, and nothing in a healthy run comes near it."""

Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor of counts over all processes that share one update."""

_INPUTS = frozenset({"kl_coef"})


class Loss(Protocol):
    """What is registered in `LOSSES`. Raises ConfigError on a wrong option."""

    def __call__(self, inputs: LossInputs, *, kl_coef: float = 0.0, **options: Any) -> LossOutput: ...


def clip(
    inputs: LossInputs,
    *,
    kl_coef: float = 0.0,
    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2,
    clip_high: Annotated[float, Field(ge=0)] = 0.2,
    two_sided_delta: Annotated[float, Field(gt=1)] | None = None,
) -> LossOutput:
    """The clipped ratio of every token. `clip_high` .28 is clip-higher (DAPO, arXiv 2503.14476).

    `two_sided_delta` caps the ratio of the unclipped branch, so that a token with A < 0 that became far more likely
    cannot dominate the update (arXiv 2505.07291, there 4).
    """
    ratio_BT = _bounded_exp(_masked_difference(inputs.logprobs_BT, inputs.old_logprobs_BT, inputs.mask_BT))
    return _clipped(inputs, ratio_BT, kl_coef, clip_low, clip_high, two_sided_delta)


def gspo(
    inputs: LossInputs,
    *,
    kl_coef: float = 0.0,
    clip_low: Annotated[float, Field(ge=0, le=1)] = 3e-4,
    clip_high: Annotated[float, Field(ge=0)] = 4e-4,
) -> LossOutput:
    """One ratio for the whole answer (a row), the geometric mean of its token ratios; arXiv 2507.18071.

    The mean moves far less than a single token, hence the tight clip.
    """
    log_ratio_BT = _masked_difference(inputs.logprobs_BT, inputs.old_logprobs_BT, inputs.mask_BT)
    tokens_B1 = inputs.mask_BT.sum(1, keepdim=True).clamp(min=1)
    ratio_B1 = _bounded_exp(log_ratio_BT.sum(1, keepdim=True) / tokens_B1)
    return _clipped(inputs, ratio_B1.expand_as(log_ratio_BT), kl_coef, clip_low, clip_high, None)


LOSSES: dict[str, Loss] = {loss.__name__: checked("loss", _INPUTS)(loss) for loss in (clip, gspo)}
"""Name -> loss; a new one is a function with the signature of `Loss` put in here."""


def loss_options(name: str) -> dict[str, Any]:
    """The options of a loss with their defaults; an unknown name raises ConfigError.

    >>> loss_options("gspo")
    {'clip_low': 0.0003, 'clip_high': 0.0004}
    """
    return option_defaults(choose("loss", LOSSES, name), _INPUTS)


def check_loss_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as they will be used; ConfigError on an unknown name, option or value. Needs no tensors."""
    return validate_options("loss", choose("loss", LOSSES, name), _INPUTS, options)


def no_reduce(counts: Tensor) -> Tensor:
    """The sum over one process."""
    return counts


def _mean_of_answers(lengths_R: Tensor, answers: Tensor, tokens: Tensor, max_new_tokens: int) -> Tensor:
    return 1.0 / (answers * lengths_R)


def _mean_of_tokens(lengths_R: Tensor, answers: Tensor, tokens: Tensor, max_new_tokens: int) -> Tensor:
    return (1.0 / tokens).expand_as(lengths_R)


def _constant_length(lengths_R: Tensor, answers: Tensor, tokens: Tensor, max_new_tokens: int) -> Tensor:
    return (1.0 / (answers * max_new_tokens)).expand_as(lengths_R)


AGGREGATIONS: dict[str, Callable[[Tensor, Tensor, Tensor, int], Tensor]] = {
    "grpo": _mean_of_answers,
    "dapo": _mean_of_tokens,
    "dr_grpo": _constant_length,
}
"""Name -> f(lengths_R, number of answers, number of tokens, max_new_tokens) -> weight of a token of each answer."""


def token_weights(name: str, lengths_R: Tensor, *, max_new_tokens: int, reduce: Reduce = no_reduce) -> Tensor:
    """The weight that each token of each answer has in the loss of the whole update: float64 (R,).

    `lengths_R` are the token counts of all answers of the update, 0 for an answer that is masked out: it weighs 0 and
    is not counted. "grpo" is the mean over answers of the mean over tokens, "dapo" the mean over all tokens, "dr_grpo"
    the sum over answers x max_new_tokens (arXiv 2402.03300, 2503.14476, 2503.20783). `reduce` sums the two counts over
    processes. An unknown name raises ConfigError.

    >>> import torch
    >>> token_weights("grpo", torch.tensor([2, 0, 8]), max_new_tokens=10).tolist()
    [0.25, 0.0, 0.0625]
    """
    aggregation = choose("aggregation", AGGREGATIONS, name)
    lengths_R = lengths_R.double()
    takes_part_R = lengths_R > 0
    answers, tokens = reduce(torch.stack([takes_part_R.sum().double(), lengths_R.sum()]))
    # where, not multiplication: the weight of a masked-out answer may be inf before it is dropped
    return torch.where(takes_part_R, aggregation(lengths_R, answers, tokens, max_new_tokens), 0.0)


SamplerCorrection = Literal["none", "truncate", "mask"]
"""What is done about a sampler that is not quite the policy: an int8 KV cache, other kernels."""

SAMPLER_CORRECTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": torch.ones_like,
    "truncate": lambda ratio_BT: ratio_BT.clamp(max=2.0),
    "mask": lambda ratio_BT: torch.where((ratio_BT >= 0.5) & (ratio_BT <= 5.0), ratio_BT, 0.0),
}
"""Name -> f(probability under the trainer / probability under the sampler) -> weight of a token."""


def sampler_correction(
    logprobs_BT: Tensor, sampler_logprobs_BT: Tensor, mask_BT: Tensor, kind: SamplerCorrection
) -> Tensor:
    """The importance weight of each sampled token, to multiply its weight in the loss with: (B, T), detached.

    With w = exp(logprobs - sampler_logprobs), both at the sampling temperature and of the policy that sampled (on later
    passes over a rollout batch too), "truncate" is min(w, 2) (truncated importance sampling: Yao et al. 2025, "Your
    efficient RL framework secretly brings you off-policy RL training"), "mask" is w inside [.5, 5] and 0 outside
    (IcePop, masked importance sampling), "none" is 1. The log-ratio is clamped to LOG_RATIO_LIMIT; off the mask it
    counts as 0, so the weight is 1 there. An unknown kind raises ConfigError.

    >>> trainer, sampler = torch.log(torch.tensor([[0.8, 0.25, 0.1]])), torch.log(torch.tensor([[0.2, 0.2, 0.4]]))
    >>> sampler_correction(trainer, sampler, torch.tensor([[True, True, False]]), "truncate")
    tensor([[2.0000, 1.2500, 1.0000]])
    """
    correct = choose("sampler correction", SAMPLER_CORRECTIONS, kind)
    log_ratio_BT = _masked_difference(logprobs_BT.detach(), sampler_logprobs_BT, mask_BT)
    weight_BT: Tensor = correct(_bounded_exp(log_ratio_BT))
    return weight_BT


def _masked_difference(a_BT: Tensor, b_BT: Tensor, mask_BT: Tensor) -> Tensor:
    # Masked before any exp: inf off the mask would turn the 0 of the mask's gradient into NaN.
    return torch.where(mask_BT, a_BT - b_BT, 0.0)


def _bounded_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _clipped(
    inputs: LossInputs,
    ratio_BT: Tensor,
    kl_coef: float,
    clip_low: float,
    clip_high: float,
    two_sided_delta: float | None,
) -> LossOutput:
    """The clipped surrogate with the KL term, weighted and summed, and the sums for the metrics."""
    mask_BT = inputs.mask_BT
    advantages_BT = torch.where(mask_BT, inputs.advantages_BT, 0.0)
    unclipped_BT = ratio_BT if two_sided_delta is None else ratio_BT.clamp(max=two_sided_delta)
    clipped_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    token_loss_BT = -torch.minimum(unclipped_BT * advantages_BT, clipped_BT * advantages_BT)
    sums = {
        "policy/clip_low": ((advantages_BT < 0) & (ratio_BT < 1 - clip_low)).sum(),
        "policy/clip_high": ((advantages_BT > 0) & (ratio_BT > 1 + clip_high)).sum(),
    }
    assert (inputs.ref_logprobs_BT is None) == (kl_coef == 0), (
        "reference log-probs come with kl_coef > 0, never without"
    )
    if inputs.ref_logprobs_BT is not None:
        kl_BT = _k3(inputs.logprobs_BT, inputs.ref_logprobs_BT, mask_BT)
        token_loss_BT = token_loss_BT + kl_coef * kl_BT
        sums["policy/kl"] = kl_BT.detach().sum()
    loss = (inputs.weights_BT * token_loss_BT).sum()
    values = torch.stack([value.double() for value in sums.values()]).tolist()  # one device sync for all of them
    return LossOutput(loss, dict(zip(sums, values, strict=True)))


def _k3(logprobs_BT: Tensor, ref_logprobs_BT: Tensor, mask_BT: Tensor) -> Tensor:
    difference_BT = _masked_difference(ref_logprobs_BT, logprobs_BT, mask_BT)
    difference_BT = difference_BT.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return difference_BT.expm1() - difference_BT
