"""Intervals against hand values and against scipy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from lowmem_grpo.intervals import bootstrap_interval, paired_bootstrap_difference, wilson_interval


def test_wilson_by_hand() -> None:
    # p = .8, n = 10, z = 1.95996, z^2 / n = .384146: centre (.8 + .192073) / 1.384146 = .716740,
    # half 1.95996 * sqrt(.016 + .009604) / 1.384146 = .226578
    assert wilson_interval(8, 10) == pytest.approx((0.490162, 0.943318), abs=1e-6)
    assert wilson_interval(0, 4) == (0.0, pytest.approx(3.841459 / (4 + 3.841459), abs=1e-6))
    assert wilson_interval(4, 4) == (pytest.approx(4 / (4 + 3.841459), abs=1e-6), 1.0)


@settings(deadline=None, derandomize=True)
@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), st.floats(0.5, 0.999))
def test_wilson_equals_scipy(case: tuple[int, int], confidence: float) -> None:
    successes, n = case
    expected = stats.binomtest(successes, n).proportion_ci(confidence, method="wilson")
    assert wilson_interval(successes, n, confidence) == pytest.approx((expected.low, expected.high), abs=1e-9)


@pytest.mark.parametrize(("successes", "n"), [(0, 0), (3, 2), (-1, 2)])
def test_wilson_refuses_impossible_counts(successes: int, n: int) -> None:
    with pytest.raises(ValueError, match=f"got {successes} of {n}"):
        wilson_interval(successes, n)


def test_bootstrap_of_two_values_by_hand() -> None:
    # The mean of two draws from (0, 1) is 0, 1/2, 1 with probability 1/4, 1/2, 1/4.
    assert bootstrap_interval([0.0, 1.0], 0.95) == (0.0, 1.0)
    assert bootstrap_interval([0.0, 1.0], 0.3) == (0.5, 0.5)


@pytest.mark.parametrize("value", [0.1, 0.0, -7.3, 1e12])
def test_equal_values_have_no_width(value: float) -> None:
    assert bootstrap_interval([value] * 7) == (value, value)
    assert bootstrap_interval([value]) == (value, value)


def test_bootstrap_agrees_with_scipy() -> None:
    values = np.random.default_rng(1).gamma(2.0, 0.3, 80)
    expected = stats.bootstrap(
        (values,), np.mean, confidence_level=0.9, n_resamples=10_000, method="percentile", rng=np.random.default_rng(2)
    ).confidence_interval
    assert bootstrap_interval(values.tolist(), 0.9) == pytest.approx((expected.low, expected.high), abs=0.006)


def test_bootstrap_depends_on_the_seed_only() -> None:
    values = [0.0, 0.5, 0.75, 1.0, 0.25]
    assert bootstrap_interval(values, seed=3) == bootstrap_interval(values, seed=3)
    assert bootstrap_interval(values, resamples=50, seed=3) != bootstrap_interval(values, resamples=50, seed=4)


def test_bootstrap_in_blocks_covers_all_resamples() -> None:
    # 3 000 scores exceed one block at 10 000 resamples; the normal approximation is 1.96 * sd / sqrt(n).
    values = np.tile([0.0, 1.0], 1_500)
    low, high = bootstrap_interval(values.tolist(), resamples=2_000)
    assert (low, high) == pytest.approx((0.5 - 0.01789, 0.5 + 0.01789), abs=0.002)


def test_paired_difference_by_hand() -> None:
    mean, (low, high) = paired_bootstrap_difference([0.0, 0.0, 1.0, 1.0], [1.0, 1.0, 1.0, 0.0])
    assert mean == 0.25
    assert (low, high) == (-0.5, 1.0)


def test_paired_difference_sees_the_pairing() -> None:
    # Scores spread over 0 to 1, yet every problem gained exactly a quarter.
    start = [0.0, 0.25, 0.5, 0.75]
    assert paired_bootstrap_difference(start, [s + 0.25 for s in start]) == (0.25, (0.25, 0.25))


def test_paired_difference_agrees_with_scipy() -> None:
    generator = np.random.default_rng(5)
    start = generator.integers(0, 2, 60).astype(float)
    tuned = np.maximum(start, generator.integers(0, 2, 60))
    mean, interval = paired_bootstrap_difference(start.tolist(), tuned.tolist())
    expected = stats.bootstrap(
        (tuned, start),
        lambda a, b, axis: np.mean(a - b, axis=axis),
        paired=True,
        n_resamples=10_000,
        method="percentile",
        rng=np.random.default_rng(6),
    ).confidence_interval
    assert mean == pytest.approx((tuned - start).mean())
    assert interval == pytest.approx((expected.low, expected.high), abs=0.018)  # one problem of sixty is .0167


@pytest.mark.parametrize("values", [[], [1.0, float("nan")], [float("inf")]])
def test_bootstrap_refuses_what_it_cannot_measure(values: list[float]) -> None:
    with pytest.raises(ValueError, match="finite scores only"):
        bootstrap_interval(values)


def test_other_refusals() -> None:
    with pytest.raises(ValueError, match="got 2 and 1 of them"):
        paired_bootstrap_difference([0.0, 1.0], [1.0])
    with pytest.raises(ValueError, match=r"confidence must lie between 0 and 1, got 95"):
        wilson_interval(1, 2, 95)
    with pytest.raises(ValueError, match="resamples must be 1 or more, got 0"):
        bootstrap_interval([1.0], resamples=0)
