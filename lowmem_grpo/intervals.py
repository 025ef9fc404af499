"""Intervals around a score: Wilson for right or wrong, bootstrap for graded scores and for paired differences.

Written out here because they are a few lines and the package needs no statistics library for anything else; the tests
compare them with one. Every function raises ValueError when there is nothing to measure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

__all__ = ["bootstrap_interval", "paired_bootstrap_difference", "wilson_interval"]

_BLOCK_DRAWS = 1_000_000
"""Draws held at a time: 10 000 resamples of 10 000 scores at once would take 800 MB."""


def wilson_interval(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Score interval (low, high) of a success rate, inside [0, 1] and sensible near both ends. Wilson 1927.

    >>> low, high = wilson_interval(8, 10)
    >>> round(low, 4), round(high, 4)
    (0.4902, 0.9433)
    """
    _check_confidence(confidence)
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"an interval needs n of 1 or more and successes from 0 to n, got {successes} of {n}")
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    rate, shrink = successes / n, 1 + z * z / n
    centre = (rate + z * z / (2 * n)) / shrink
    half = z * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n)) / shrink
    # At the ends centre and half are equal on paper; rounding must not move the bound off 0 or 1.
    return (0.0 if successes == 0 else centre - half, 1.0 if successes == n else centre + half)


def bootstrap_interval(
    values: Sequence[float], confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval (low, high) of the mean of `values`; the same seed gives the same interval.

    Values that are all equal give an interval of width 0. Efron and Tibshirani 1993, chapter 13.
    """
    _check_confidence(confidence)
    scores = _finite(values)
    if resamples < 1:
        raise ValueError(f"resamples must be 1 or more, got {resamples}")
    # Around the first value, so that equal values give exactly zero width.
    means = scores[0] + _resampled_means(scores - scores[0], resamples, np.random.default_rng(seed))
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def paired_bootstrap_difference(
    start: Sequence[float],
    tuned: Sequence[float],
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> tuple[float, tuple[float, float]]:
    """Mean of tuned - start over the same problems in the same order, and its bootstrap interval (low, high).

    Problems are resampled, not answers: both scores of a problem stay together.
    """
    if len(start) != len(tuned):
        raise ValueError(f"paired scores must belong to the same problems, got {len(start)} and {len(tuned)} of them")
    differences = _finite(tuned) - _finite(start)
    return float(differences.mean()), bootstrap_interval(differences.tolist(), confidence, resamples, seed)


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")


def _finite(values: Sequence[float]) -> NDArray[np.float64]:
    scores = np.asarray(values, dtype=np.float64)
    if scores.size == 0 or not np.isfinite(scores).all():
        raise ValueError(f"an interval needs at least one score and finite scores only, got {scores.size} scores")
    return scores


def _resampled_means(
    scores: NDArray[np.float64], resamples: int, generator: np.random.Generator
) -> NDArray[np.float64]:
    n = len(scores)
    rows = max(1, _BLOCK_DRAWS // n)
    blocks = [
        scores[generator.integers(n, size=(min(rows, resamples - done), n))].mean(axis=1)
        for done in range(0, resamples, rows)
    ]
    return np.concatenate(blocks)
