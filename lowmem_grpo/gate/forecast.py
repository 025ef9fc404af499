"""How many groups will be dead: those whose answers all score the same, and which teach nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lowmem_grpo.advantages import EQUAL_RTOL, is_dead_P

__all__ = ["DeadForecast", "dead_share", "distinct_counts", "enough", "forecast_dead", "forecasts_dead", "tolerance"]

Floats = NDArray[np.float64]

ENOUGH_HALF_WIDTH = 0.1
"""A forecast known to plus or minus this much would hardly change with more prompts."""

COMMON = 0.1
"""A graded reward that makes up this share of all answers is common: groups that are all of it are modelled."""

DRAWS = 4000
"""Draws of what the parts of a graded forecast may be."""

MEAN_CELLS, SPREAD_CELLS = 256, 48
"""The grid of the beta-binomial posterior: cells over the mean of p, and over its spread between prompts."""


@dataclass(frozen=True, slots=True)
class DeadForecast:
    """The expected share of dead groups at a group size, with its central 95 % interval (low, high)."""

    group_size: int
    share: float
    interval: tuple[float, float]
    method: Literal["beta-binomial", "resampling"]


def dead_share(p: float, group_size: int) -> float:
    """The chance that all answers of a group score the same when each is right with probability `p`.

    >>> [round(dead_share(0.1819, size), 3) for size in (2, 4, 8)]
    [0.702, 0.449, 0.201]
    """
    return p**group_size + (1 - p) ** group_size


def forecast_dead(rewards_P_G: Tensor, group_size: int) -> DeadForecast:
    """The share of dead groups to expect at `group_size`, from rewards sampled at any size (NaN = no reward).

    Right-or-wrong rewards (at most two different values in all): the mean of p^G + (1-p)^G, where the success rate p
    varies from prompt to prompt with a beta distribution. The counts of right answers are then beta-binomial (Skellam
    1948); the posterior is summed over a grid, with a uniform prior on the mean of p and on the standard deviation of p
    between prompts as a share of the largest possible one (that is the square root of the correlation inside a prompt).

    Graded rewards: each value that makes up `COMMON` of all answers or more (no credit at all is the usual one) is such
    a hit, and all answers of a group are that value with the mean of p^G. Of the rarer values a prompt's own answers
    are resampled: sum over them of C(n_v, G) / C(n, G), the exact share of its subsets of `group_size` answers that are
    all equal, held at its value for n where the group is larger. What is uncertain about the parts is drawn from their
    posteriors and added up. (Counting the dead groups in the sample is right on average too, but from 64 prompts it is
    off by .1 every tenth time: nearly dead groups tell as much as dead ones, and this listens to them.)

    Raises ValueError where nothing can be said: no reward at all, or graded rewards with one in each group.
    """
    return forecasts_dead(rewards_P_G, [group_size])[0]


def enough(rewards_P_G: Tensor, group_size: int) -> bool:
    """Whether more prompts would hardly change the forecast: some group is alive and half its interval is at most .1.

    Where no group is alive the answer is always no, so that the gate asks all it may before it says stop.
    """
    if is_dead_P(rewards_P_G).all():
        return False
    low, high = forecast_dead(rewards_P_G, group_size).interval
    return high - low <= 2 * ENOUGH_HALF_WIDTH


def forecasts_dead(rewards_P_G: Tensor, sizes: Sequence[int]) -> list[DeadForecast]:
    """`forecast_dead` for several sizes, with one posterior for all."""
    known = [rewards_G[~rewards_G.isnan()].tolist() for rewards_G in rewards_P_G.double()]
    known = [rewards for rewards in known if rewards]
    if not known:
        raise ValueError("a forecast needs at least one reward, got none")
    overall = [reward for rewards in known for reward in rewards]
    if len(distinct_counts(overall)) <= 2:
        split = min(overall) + tolerance(overall)
        hits = np.array([sum(reward > split for reward in rewards) for rewards in known])
        posterior = _Posterior(hits, np.array([len(rewards) for rewards in known]))
        return [posterior.forecast(size, posterior.all_hits(size) + posterior.all_misses(size)) for size in sizes]
    pairs = [rewards for rewards in known if len(rewards) > 1]
    if not pairs:
        raise ValueError("a forecast from graded rewards needs a group with two rewards or more, got none")
    return _graded_forecasts(pairs, sizes)


class _Posterior:
    """What hits out of tries, one pair per prompt, say about how p is spread over prompts.

    With mean m and correlation r the probability of k hits of n is, but for the binomial coefficient,
    prod_{j<k} (m(1-r) + jr) prod_{j<n-k} ((1-m)(1-r) + jr) / prod_{j<n} (1-r + jr), which needs no special case for
    a small r. Axes: M cells of the mean, fine near 0 and 1; R cells of the correlation, fine near 0.
    """

    def __init__(self, hits: NDArray[np.int64], tries: NDArray[np.int64]) -> None:
        edges_M = np.sin(np.linspace(0, np.pi / 2, MEAN_CELLS + 1)) ** 2
        middles_M = np.sin((np.arange(MEAN_CELLS) + 0.5) / MEAN_CELLS * np.pi / 2) ** 2
        self._r_R = ((np.arange(SPREAD_CELLS) + 0.5) / SPREAD_CELLS) ** 2
        self._hit_M_R = middles_M[:, None] * (1 - self._r_R)
        self._miss_M_R = self._hit_M_R[::-1]  # the grid is symmetric in hits and misses
        self._all_R = 1 - self._r_R
        log_M_R = (
            self._log_product(self._hit_M_R, hits)
            + self._log_product(self._miss_M_R, tries - hits)
            - self._log_product(self._all_R, tries)
        )
        mass_M_R = np.exp(log_M_R - log_M_R.max()) * np.diff(edges_M)[:, None]
        self._mass_M_R = mass_M_R / mass_M_R.sum()

    def all_hits(self, size: int) -> Floats:
        """The chance (M, R) that `size` answers to one prompt are all hits."""
        return self._product(self._hit_M_R, size)

    def all_misses(self, size: int) -> Floats:
        """The chance (M, R) that `size` answers to one prompt are all misses."""
        return self._product(self._miss_M_R, size)

    def forecast(self, size: int, share_M_R: Floats) -> DeadForecast:
        """Posterior mean and central 95 % interval of a share that the grid decides."""
        share_N, mass_N = share_M_R.ravel(), self._mass_M_R.ravel()
        order_N = np.argsort(share_N)
        at = np.searchsorted(mass_N[order_N].cumsum(), [0.025, 0.975]).clip(max=len(order_N) - 1)
        low, high = share_N[order_N[at]].tolist()
        mean = self.mean(share_M_R)
        return DeadForecast(size, mean, (min(low, mean), max(high, mean)), "beta-binomial")

    def mean(self, share_M_R: Floats) -> float:
        """Posterior mean of a share that the grid decides."""
        return float((share_M_R * self._mass_M_R).sum())

    def draw(self, share_M_R: Floats, generator: np.random.Generator) -> Floats:
        """`DRAWS` values of a share, drawn from the posterior."""
        cells = np.searchsorted(self._mass_M_R.cumsum(), generator.random(DRAWS)).clip(max=share_M_R.size - 1)
        return share_M_R.ravel()[cells]

    def _log_product(self, start: Floats, counts: NDArray[np.int64]) -> Floats:
        """Sum over the prompts of log prod_{j<count} (start + j r): factor j counts once for each count above j."""
        log_sum = np.zeros_like(start)
        for j in range(counts.max()):
            log_sum += (counts > j).sum() * np.log(start + j * self._r_R)
        return log_sum

    def _product(self, start: Floats, size: int) -> Floats:
        product = np.ones_like(start)
        for j in range(size):
            product *= (start + j * self._r_R) / (self._all_R + j * self._r_R)
        return product


def _graded_forecasts(known: Sequence[Sequence[float]], sizes: Sequence[int]) -> list[DeadForecast]:
    """The forecasts from the rewards of each prompt, two or more: common values one by one, rare ones resampled."""
    overall = [reward for rewards in known for reward in rewards]
    slack, tries = tolerance(overall), np.array([len(rewards) for rewards in known])
    common = [value for value, count in _distinct(overall) if count >= COMMON * len(overall)]
    posteriors = [
        _Posterior(np.array([sum(abs(r - value) <= slack for r in rewards) for rewards in known]), tries)
        for value in common
    ]
    rare = [
        [count for value, count in _distinct(rewards) if all(abs(value - other) > slack for other in common)]
        for rewards in known
    ]
    return [_graded_forecast(posteriors, rare, tries, size) for size in sizes]


def _graded_forecast(
    posteriors: Sequence[_Posterior], rare: Sequence[Sequence[int]], tries: NDArray[np.int64], size: int
) -> DeadForecast:
    rest = sum(_equal_subsets(counts, n, size) for counts, n in zip(rare, tries.tolist(), strict=True))
    share = min(1.0, sum(posterior.mean(posterior.all_hits(size)) for posterior in posteriors) + rest / len(rare))
    generator = np.random.default_rng(0)
    draws = generator.beta(rest + 0.5, len(rare) - rest + 0.5, DRAWS)  # Jeffreys' prior
    for posterior in posteriors:
        draws += posterior.draw(posterior.all_hits(size), generator)
    low, high = np.quantile(draws, [0.025, 0.975]).clip(max=1.0).tolist()
    method: Literal["beta-binomial", "resampling"] = "beta-binomial" if posteriors else "resampling"
    return DeadForecast(size, share, (min(low, share), max(high, share)), method)


def _equal_subsets(counts: Sequence[int], n: int, size: int) -> float:
    """The share of subsets of `size` of a prompt's `n` answers that are all one of these values, whose counts are
    given; of all answers where there are fewer."""
    size = min(size, n)
    return sum(math.comb(times, size) for times in counts) / math.comb(n, size)


def distinct_counts(values: Sequence[float]) -> list[int]:
    """How often each different value occurs, the lowest first; what is equal within `EQUAL_RTOL` counts as one."""
    return [count for _, count in _distinct(values)]


def _distinct(values: Sequence[float]) -> list[tuple[float, int]]:
    """Each different value, the lowest first, with how often it occurs."""
    slack, found = tolerance(values), list[tuple[float, int]]()
    for value in sorted(values):
        if found and value - found[-1][0] <= slack:
            found[-1] = found[-1][0], found[-1][1] + 1
        else:
            found.append((value, 1))
    return found


def tolerance(values: Sequence[float]) -> float:
    return EQUAL_RTOL * max(abs(value) for value in values)
