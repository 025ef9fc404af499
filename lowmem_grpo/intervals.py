"""Intervals around a score and around paired differences, an exact paired test, and pass@k.

Right or wrong: Wilson, and for differences Newcombe's interval, which is made of two Wilson intervals. Graded scores:
bootstrap. Beside each difference stands an exact p-value, because with few problems a bootstrap can be of width 0.

Written out here because they are a few lines and the package needs no statistics library for anything else; the tests
compare them with one. Every function raises ValueError when there is nothing to measure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "bootstrap_interval",
    "exact_paired_p",
    "paired_bootstrap_difference",
    "paired_differences",
    "paired_wilson_difference",
    "pass_at_k",
    "wilson_interval",
]

_BLOCK_DRAWS = 1_000_000
"""Draws held at a time: 10 000 resamples of 10 000 scores at once would take 800 MB."""

_ROUNDING = 1e-9
"""Two sums closer than this share of what they are made of are equal but for rounding."""

_ALL_FLIPS_UP_TO = 16
"""With so many differences every combination of signs is looked at (65 536), with more a sample of them."""

_RANDOM_FLIPS = 100_000


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


def paired_differences(start: Sequence[float], tuned: Sequence[float]) -> NDArray[np.float64]:
    """tuned - start (P,) over the same problems in the same order, exactly 0 where they differ by rounding only.

    Raises ValueError for sides of unequal length, and as all functions here.

    >>> paired_differences([0.3, 1.0], [0.1 + 0.2, 0.5]).tolist()
    [0.0, -0.5]
    """
    if len(start) != len(tuned):
        raise ValueError(f"paired scores must belong to the same problems, got {len(start)} and {len(tuned)} of them")
    before, after = _finite(start), _finite(tuned)
    differences = after - before
    smallest = _ROUNDING * max(np.abs(before).max(), np.abs(after).max())
    return np.where(np.abs(differences) <= smallest, 0.0, differences)


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
    differences = paired_differences(start, tuned)
    return float(differences.mean()), bootstrap_interval(differences.tolist(), confidence, resamples, seed)


def paired_wilson_difference(
    start: Sequence[float], tuned: Sequence[float], confidence: float = 0.95
) -> tuple[float, tuple[float, float]]:
    """Rate of tuned - rate of start for scores of 0 or 1 on the same problems, and its score interval (low, high).

    Newcombe 1998, Statistics in Medicine 17:2635-2650, method 10. The distances from each rate to its Wilson limits
    add up like the sides of a triangle, tuned's lower with start's upper distance and the other way round, with the
    correlation phi of the pairs as the cosine of the angle. A positive phi is corrected for continuity. The interval
    lies inside [-1, 1] and has a width even where all problems changed in the same way, or none did.

    Raises ValueError for a score that is neither 0 nor 1, and as `paired_differences`.

    >>> value, (low, high) = paired_wilson_difference([0, 0], [1, 1])
    >>> value, round(low, 2), high
    (1.0, 0.07, 1.0)
    """
    changes, n = paired_differences(start, tuned), len(start)
    for score in (*start, *tuned):
        if score not in (0, 1):
            raise ValueError(f"right-or-wrong scores must be 0 or 1, got {score}")
    gained, lost = int((changes > 0).sum()), int((changes < 0).sum())
    right_before = int(sum(start))
    right_after, both = right_before - lost + gained, right_before - lost
    phi = _corrected_phi(both, lost, gained, n - both - lost - gained)
    (down_before, up_before), (down_after, up_after) = (
        _distances(right, n, confidence) for right in (right_before, right_after)
    )
    value = (gained - lost) / n
    low = value - math.sqrt(down_after**2 - 2 * phi * down_after * up_before + up_before**2)
    high = value + math.sqrt(up_after**2 - 2 * phi * up_after * down_before + down_before**2)
    return value, (low, high)


def exact_paired_p(start: Sequence[float], tuned: Sequence[float]) -> float:
    """Two-sided p-value of "start and tuned are equally good": how often chance alone gives so large a difference.

    If they are, each difference might as well have had the other sign, so the observed sum of differences is compared
    with the sums under all 2^D signs of the D differences that are not 0 (the randomisation test of paired data,
    Fisher 1935, chapter III). Where all have one size, as for right or wrong, that is the binomial test on the signs
    (McNemar's test in its exact form, 1947). Otherwise every combination of signs counts up to D = 16; above, 100 000
    that are drawn with a fixed seed, with the observed one among them, which is (b + 1) / (m + 1): Phipson and Smyth
    2010, Statistical Applications in Genetics and Molecular Biology 9:39. Without a difference it is 1.

    >>> exact_paired_p([0, 0, 0, 0, 1], [1, 1, 1, 1, 1])
    0.125
    """
    differences = paired_differences(start, tuned)
    changes_D = differences[differences != 0]
    if len(changes_D) == 0:
        return 1.0
    sizes_D = np.abs(changes_D)
    if np.ptp(sizes_D) <= _ROUNDING * sizes_D.max():
        return _sign_test_p(int((changes_D > 0).sum()), len(changes_D))
    observed = abs(changes_D.sum()) - _ROUNDING * sizes_D.sum()
    exact = len(sizes_D) <= _ALL_FLIPS_UP_TO
    as_large, count = int(not exact), 2 ** len(sizes_D) if exact else _RANDOM_FLIPS + 1
    for flips_R_D in _all_flips(len(sizes_D)) if exact else _random_flips(len(sizes_D)):
        sums_R = 2 * (flips_R_D @ sizes_D) - sizes_D.sum()
        as_large += int((np.abs(sums_R) >= observed).sum())
    return as_large / count


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate, from `n` answers of which `correct` are right, that at least one of `k` answers is right.

    1 - C(n - correct, k) / C(n, k), arXiv 2107.03374; the quotient is multiplied up factor by factor in logarithms, so
    it neither overflows nor loses a small chance. Raises ValueError unless 1 <= k <= n and 0 <= correct <= n.

    >>> round(pass_at_k(10, 3, 1), 4), round(pass_at_k(10, 3, 2), 4), pass_at_k(10, 3, 8)
    (0.3, 0.5333, 1.0)
    """
    if not 1 <= k <= n or not 0 <= correct <= n:
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= correct <= n, got k={k}, n={n}, correct={correct}")
    if k > n - correct:
        return 1.0
    fewer, more = sorted((k, correct))
    return abs(math.expm1(math.fsum(math.log1p(-more / (n - i)) for i in range(fewer))))


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


def _distances(successes: int, n: int, confidence: float) -> tuple[float, float]:
    """How far the Wilson limits lie below and above the rate."""
    low, high = wilson_interval(successes, n, confidence)
    return successes / n - low, high - successes / n


def _corrected_phi(both: int, lost: int, gained: int, neither: int) -> float:
    """Correlation of the two sides of a paired table; 0 where one side is all right or all wrong."""
    n = both + lost + gained + neither
    right_before, right_after = both + lost, both + gained
    scale = right_before * (n - right_before) * right_after * (n - right_after)
    excess = float(both * neither - lost * gained)
    if excess > 0:
        excess = max(excess - n / 2, 0.0)
    return excess / math.sqrt(scale) if scale else 0.0


def _sign_test_p(positive: int, n: int) -> float:
    """Two-sided binomial test of `positive` of `n` signs against a half, in whole numbers until the last division."""
    ways, term = 0, 1
    for i in range(min(positive, n - positive) + 1):
        ways += term
        term = term * (n - i) // (i + 1)
    return min(1.0, 2 * ways / 2**n)


def _all_flips(count: int) -> Iterator[NDArray[np.int64]]:
    yield np.arange(2**count)[:, None] >> np.arange(count) & 1


def _random_flips(count: int) -> Iterator[NDArray[np.int8]]:
    generator = np.random.default_rng(0)
    rows = max(1, _BLOCK_DRAWS // count)
    for done in range(0, _RANDOM_FLIPS, rows):
        yield generator.integers(2, size=(min(rows, _RANDOM_FLIPS - done), count), dtype=np.int8)
