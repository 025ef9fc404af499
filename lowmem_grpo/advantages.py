"""How an answer is measured against its own group: rewards (P, G) -> advantages (P, G).

Pure functions that know no device, no config and no model. What holds for every estimator:

- NaN means "no reward": that answer leaves the statistics of its group and gets advantage 0.
- A group whose rewards are all equal, within `EQUAL_RTOL`, gets exactly 0, and so does a group with fewer than
  two rewards. `is_dead_P` names those groups: they teach nothing.
- The sums are done in float64 and come back in the dtype of the rewards.

>>> import torch
>>> rewards_P_G = torch.tensor([[1.2, 0.2, 0.0, 1.2]], dtype=torch.float64)
>>> [round(a, 2) for a in ESTIMATORS["dr_grpo"](rewards_P_G, torch.tensor([[4, 2, 6, 3]]))[0].tolist()]
[0.55, -0.45, -0.65, 0.55]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol

import torch
from pydantic import Field
from torch import Tensor

from lowmem_grpo.errors import ConfigError
from lowmem_grpo.options import checked, choose, option_defaults, validate_options

__all__ = [
    "EQUAL_RTOL",
    "ESTIMATORS",
    "Estimator",
    "check_estimator_options",
    "estimator_options",
    "is_dead_P",
]

EQUAL_RTOL = 1e-6
"""Rewards whose range is at most this share of the largest magnitude count as equal: about eight fp32 roundings."""

MAD_TO_SD = 1.4826
"""The factor that makes the median absolute deviation of normal data estimate their standard deviation."""

_INPUTS = frozenset({"parts_P_G_F", "steps"})
_Steps = Sequence[Sequence[Sequence[float]]]


class Estimator(Protocol):
    """What is registered in `ESTIMATORS`.

    `rewards_P_G` holds total rewards (NaN = none), `lengths_P_G` answer lengths in tokens, `parts_P_G_F` the scores of
    the single reward functions, `steps` step rewards per answer. Estimators use what they need. Raises ConfigError on a
    wrong option and when a group has one answer only.
    """

    def __call__(
        self,
        rewards_P_G: Tensor,
        lengths_P_G: Tensor,
        *,
        parts_P_G_F: Tensor | None = None,
        steps: _Steps | None = None,
        **options: Any,
    ) -> Tensor: ...


def is_dead_P(rewards_P_G: Tensor) -> Tensor:
    """Which groups carry no signal: bool (P,), True where fewer than two rewards are there or all of them are equal.

    >>> import torch
    >>> is_dead_P(torch.tensor([[0.35, 0.35], [0.0, 1.0], [1.0, float("nan")]])).tolist()
    [True, False, True]
    """
    rewards_P_G = rewards_P_G.double()
    missing_P_G = rewards_P_G.isnan()
    highest_P = rewards_P_G.masked_fill(missing_P_G, -math.inf).amax(1)
    lowest_P = rewards_P_G.masked_fill(missing_P_G, math.inf).amin(1)
    size_P = rewards_P_G.nan_to_num(nan=0.0).abs().amax(1)
    return ((~missing_P_G).sum(1) < 2) | (highest_P - lowest_P <= EQUAL_RTOL * size_P)


def grpo(
    rewards_P_G: Tensor,
    lengths_P_G: Tensor,
    *,
    parts_P_G_F: Tensor | None = None,
    steps: _Steps | None = None,
    ddof: Literal[0, 1] = 1,
    eps: Annotated[float, Field(ge=0)] = 1e-4,
) -> Tensor:
    """(r - mean) / (sd + eps), the z-score in the group; `ddof` 1 divides the variance by G - 1. arXiv 2402.03300."""
    return _per_group(rewards_P_G, lengths_P_G, lambda r_G: (r_G - r_G.mean()) / (r_G.std(correction=ddof) + eps))


def dr_grpo(
    rewards_P_G: Tensor,
    lengths_P_G: Tensor,
    *,
    parts_P_G_F: Tensor | None = None,
    steps: _Steps | None = None,
) -> Tensor:
    """r - mean. Without the division an easy or a hard problem does not weigh more than a mixed one. 2503.20783."""
    return _per_group(rewards_P_G, lengths_P_G, lambda r_G: r_G - r_G.mean())


def rloo(
    rewards_P_G: Tensor,
    lengths_P_G: Tensor,
    *,
    parts_P_G_F: Tensor | None = None,
    steps: _Steps | None = None,
) -> Tensor:
    """r - mean of the other answers, an unbiased baseline. arXiv 2402.14740."""
    return _per_group(rewards_P_G, lengths_P_G, lambda r_G: r_G - (r_G.sum() - r_G) / (len(r_G) - 1))


def median(
    rewards_P_G: Tensor,
    lengths_P_G: Tensor,
    *,
    parts_P_G_F: Tensor | None = None,
    steps: _Steps | None = None,
    scale: Literal["none", "mad", "mad_normal"] = "none",
) -> Tensor:
    """r - median, for skewed groups. arXiv 2601.22582.

    `scale` "mad" divides by the median absolute deviation, "mad_normal" by 1.4826 times it. Where more than half of the
    group is equal that deviation is 0, and the standard deviation (ddof 1) divides instead.
    """

    def rule(r_G: Tensor) -> Tensor:
        centred_G = r_G - _averaging_median(r_G)
        return centred_G if scale == "none" else centred_G / _robust_spread(r_G, centred_G, scale)

    return _per_group(rewards_P_G, lengths_P_G, rule)


def trimmed(
    rewards_P_G: Tensor,
    lengths_P_G: Tensor,
    *,
    parts_P_G_F: Tensor | None = None,
    steps: _Steps | None = None,
    fraction: Annotated[float, Field(ge=0, lt=0.5)] = 0.2,
) -> Tensor:
    """r - mean of the group without its floor(fraction * G) lowest and as many highest.

    Outliers cannot move that baseline; they themselves keep their advantage.
    """

    def rule(r_G: Tensor) -> Tensor:
        count = len(r_G)
        # .29 * 100 is 28.999999999999996 in floating point and must trim 29.
        cut = min(math.floor(fraction * count + 1e-9), (count - 1) // 2)
        return r_G - r_G.sort().values[cut : count - cut].mean()

    return _per_group(rewards_P_G, lengths_P_G, rule)


ESTIMATORS: dict[str, Estimator] = {
    rule.__name__: checked("advantage", _INPUTS)(rule) for rule in (grpo, dr_grpo, rloo, median, trimmed)
}
"""Name -> estimator; a new one is a function with the signature of `Estimator` put in here."""


def estimator_options(name: str) -> dict[str, Any]:
    """The options of an estimator with their defaults; an unknown name raises ConfigError.

    >>> estimator_options("grpo")
    {'ddof': 1, 'eps': 0.0001}
    """
    return option_defaults(choose("advantage", ESTIMATORS, name), _INPUTS)


def check_estimator_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as they will be used; ConfigError on an unknown name, option or value. Needs no rewards."""
    return validate_options("advantage", choose("advantage", ESTIMATORS, name), _INPUTS, options)


def _per_group(rewards_P_G: Tensor, lengths_P_G: Tensor, rule: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a rule to the rewards that are there, group by group, in float64; dead groups stay exactly 0."""
    assert rewards_P_G.shape == lengths_P_G.shape, (rewards_P_G.shape, lengths_P_G.shape)
    assert rewards_P_G.is_floating_point() and not rewards_P_G.isinf().any()
    if rewards_P_G.shape[1] < 2:
        raise ConfigError("a group of 1 answer has nothing to be compared with: set rollout.group_size to 2 or more")
    rewards64_P_G = rewards_P_G.double()
    advantages_P_G = torch.zeros_like(rewards64_P_G)
    for p in (~is_dead_P(rewards_P_G)).nonzero().flatten().tolist():
        valid_G = ~rewards64_P_G[p].isnan()
        advantages_P_G[p, valid_G] = rule(rewards64_P_G[p, valid_G])
    return advantages_P_G.to(rewards_P_G.dtype)


def _averaging_median(values_G: Tensor) -> Tensor:
    # torch.median takes the lower of the two middle values; the quantile interpolates between them.
    return values_G.quantile(0.5)


def _robust_spread(r_G: Tensor, centred_G: Tensor, scale: str) -> Tensor:
    mad = _averaging_median(centred_G.abs())
    if mad <= EQUAL_RTOL * r_G.abs().max():  # rounding noise in equal rewards must not become a divisor
        return r_G.std(correction=1)
    return mad if scale == "mad" else MAD_TO_SD * mad
