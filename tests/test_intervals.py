"""Intervals, the paired test and pass@k against hand values, against scipy and by counting every case."""

from __future__ import annotations

import functools
import itertools
import math
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from lowmem_grpo.intervals import (
    bootstrap_interval,
    exact_paired_p,
    paired_bootstrap_difference,
    paired_differences,
    paired_wilson_difference,
    pass_at_k,
    wilson_interval,
)

Pairs = tuple[list[int], list[int]]


def paired_table(both: int, lost: int, gained: int, neither: int) -> Pairs:
    """Scores of start and tuned: right on both sides, only before, only after, on neither."""
    start = [1] * (both + lost) + [0] * (gained + neither)
    return start, [1] * both + [0] * lost + [1] * gained + [0] * neither


PAIRS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=60).map(
    lambda pairs: ([before for before, _ in pairs], [after for _, after in pairs])
)


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


def test_a_difference_of_rounding_is_none() -> None:
    start, tuned = [0.3, 1.0, 0.0], [0.1 + 0.2, 0.5, 1 - 0.9 - 0.1]
    assert paired_differences(start, tuned).tolist() == [0.0, -0.5, 0.0]
    assert paired_bootstrap_difference([0.3, 0.3, 0.3], [0.1 + 0.2] * 3) == (0.0, (0.0, 0.0))
    # Small scores differ by more than rounding.
    assert paired_differences([1e-12, 0.0], [3e-12, 0.0]).tolist() == pytest.approx([2e-12, 0.0], abs=1e-20)


# --------------------------------------------------------------------------------------------- Newcombe


def test_newcombe_where_every_problem_went_from_wrong_to_right() -> None:
    # Wilson of 0 and of n are (0, w) and (1 - w, 1) with w = z^2 / (n + z^2), phi is 0: low is 1 - sqrt(2) w.
    for n, low in ((1, -0.122109), (2, 0.069985), (200, 0.973349)):
        value, interval = paired_wilson_difference([0] * n, [1] * n)
        assert (value, interval) == (1.0, (pytest.approx(low, abs=1e-6), 1.0))


def test_newcombe_where_nothing_changed() -> None:
    # 10 of 20 is .5 -+ .200702 on both sides, phi is (100 - 10) / 100: half .200702 sqrt(2 - 2 * .9).
    assert paired_wilson_difference(*paired_table(10, 0, 0, 10)) == (
        0.0,
        pytest.approx((-0.089757, 0.089757), abs=1e-6),
    )
    # All right: 20 of 20 is (.838875, 1), phi 0.
    assert paired_wilson_difference(*paired_table(20, 0, 0, 0)) == (0.0, pytest.approx((-0.161125, 0.161125), abs=1e-6))


def test_newcombe_by_hand() -> None:
    # 4 and 8 of 10, Wilson (.168180, .687326) and (.490162, .943318); phi (8 - 5) / sqrt(384) = .153093;
    # low .4 - sqrt(.309838^2 - 2 phi .309838 .287326 + .287326^2), high .4 + sqrt(.143318^2 - ... + .231820^2).
    value, interval = paired_wilson_difference(*paired_table(4, 0, 4, 2))
    assert (value, interval) == (0.4, pytest.approx((0.011030, 0.653195), abs=1e-6))
    # A negative phi, (0 - 9) / 9 = -1, stays as it is: 3 of 6 is .5 -+ .312384, and the distances add up.
    assert paired_wilson_difference(*paired_table(0, 3, 3, 0)) == (0.0, pytest.approx((-0.624767, 0.624767), abs=1e-6))


def test_newcombe_as_published() -> None:
    # Altman and others, Statistics with Confidence (2000), table 6.2; Fagerland and others, Statistical Analysis of
    # Contingency Tables (2017), airway hyper-responsiveness before and after a transplantation.
    assert paired_wilson_difference(*paired_table(14, 0, 5, 22))[1] == pytest.approx((0.011, 0.226), abs=5e-4)
    assert paired_wilson_difference(*paired_table(1, 1, 7, 12))[1] == pytest.approx((0.026, 0.507), abs=5e-4)


@settings(deadline=None, derandomize=True)
@given(PAIRS, st.floats(0.5, 0.999))
def test_newcombe_is_symmetric_and_inside_its_bounds(pairs: Pairs, confidence: float) -> None:
    start, tuned = pairs
    value, (low, high) = paired_wilson_difference(start, tuned, confidence)
    assert value == pytest.approx((sum(tuned) - sum(start)) / len(start))
    assert -1 - 1e-12 <= low <= value <= high <= 1 + 1e-12 and low < high
    mirrored = (pytest.approx(-value), pytest.approx((-high, -low)))
    assert paired_wilson_difference(tuned, start, confidence) == mirrored
    assert paired_wilson_difference([1 - s for s in start], [1 - s for s in tuned], confidence) == mirrored


@functools.cache
def all_tables(n: int) -> list[tuple[tuple[int, ...], float, float]]:
    """Every paired table of n problems with its interval."""
    tables = [
        (both, lost, gained, n - both - lost - gained)
        for both, lost, gained in itertools.product(range(n + 1), repeat=3)
        if both + lost + gained <= n
    ]
    return [(table, *paired_wilson_difference(*paired_table(*table))[1]) for table in tables]


@pytest.mark.parametrize(
    "chances",
    [
        (0.4, 0.1, 0.1, 0.4),
        (0.4, 0.05, 0.2, 0.35),
        (0.1, 0.02, 0.5, 0.38),
        (0.7, 0.05, 0.15, 0.1),
        (0.25, 0.25, 0.25, 0.25),
        (0.3, 0.3, 0.3, 0.1),
        (0.05, 0.01, 0.9, 0.04),
    ],
)
def test_newcombe_covers_the_true_difference_95_times_of_100(chances: tuple[float, ...]) -> None:
    # Not simulated: the chances of all 12 341 tables of 40 problems are added up. Tolerance: 94 to 97 %.
    ways = math.lgamma(41)
    covered, total = 0.0, 0.0
    for table, low, high in all_tables(40):
        log_chance = ways + sum(k * math.log(p) - math.lgamma(k + 1) for k, p in zip(table, chances, strict=True))
        total += math.exp(log_chance)
        if low <= chances[2] - chances[1] <= high:
            covered += math.exp(log_chance)
    assert total == pytest.approx(1.0)
    assert 0.94 <= covered <= 0.97


def test_newcombe_refuses_graded_scores() -> None:
    with pytest.raises(ValueError, match=r"right-or-wrong scores must be 0 or 1, got 0\.5"):
        paired_wilson_difference([0.0, 1.0], [0.5, 1.0])
    with pytest.raises(ValueError, match="got 2 and 1 of them"):
        paired_wilson_difference([0, 1], [1])
    with pytest.raises(ValueError, match="at least one score"):
        paired_wilson_difference([], [])


# --------------------------------------------------------------------------------------------- exact test


@pytest.mark.parametrize(
    ("differences", "p"),
    [
        pytest.param([0.0, 0.0], 1.0, id="none"),
        pytest.param([1.0], 1.0, id="one"),
        pytest.param([1.0, 1.0], 0.5, id="two"),
        pytest.param([1.0] * 6, 2 / 64, id="six of one sign"),
        pytest.param([-1.0] * 6, 2 / 64, id="six of the other"),
        pytest.param([1.0] * 7 + [-1.0, 0.0], 2 * (1 + 8) / 256, id="seven against one"),
        pytest.param([1.0, -1.0], 1.0, id="even"),
        pytest.param([1.0, 2.0, 3.0], 2 / 8, id="graded, all of one sign"),
        pytest.param([3.0, 1.0, -1.0], 6 / 8, id="graded: 5, 3, 3 and their negatives are as large as 3"),
        pytest.param([0.1, 0.2, -0.3], 1.0, id="a sum of 0 but for rounding"),
        pytest.param([0.1] * 3 + [0.3, 0.3 - 0.1 - 0.1 - 0.1], 2 / 16, id="a difference of rounding is none"),
    ],
)
def test_exact_p_by_hand(differences: list[float], p: float) -> None:
    assert exact_paired_p([0.0] * len(differences), differences) == pytest.approx(p, abs=1e-15)


@settings(deadline=None, derandomize=True)
@given(PAIRS)
def test_exact_p_of_right_or_wrong_is_mcnemars(pairs: Pairs) -> None:
    gained = sum(before < after for before, after in zip(*pairs, strict=True))
    changed = sum(before != after for before, after in zip(*pairs, strict=True))
    expected = stats.binomtest(gained, changed).pvalue if changed else 1.0
    assert exact_paired_p(*pairs) == pytest.approx(expected, rel=1e-9)
    # The size of a step does not matter.
    assert exact_paired_p([0.7 * s for s in pairs[0]], [0.7 * s for s in pairs[1]]) == exact_paired_p(*pairs)


def test_exact_p_of_many_problems() -> None:
    start, tuned = paired_table(3_000, 480, 600, 1_000)
    assert exact_paired_p(start, tuned) == pytest.approx(stats.binomtest(600, 1_080).pvalue, rel=1e-9)


@pytest.mark.parametrize("n", [3, 9, 16])
def test_exact_p_of_graded_scores_agrees_with_scipy(n: int) -> None:
    generator = np.random.default_rng(n)
    start, tuned = generator.random(n), generator.random(n) + 0.2
    expected = stats.permutation_test(
        (tuned, start), lambda a, b: np.mean(a - b), permutation_type="samples", n_resamples=math.inf
    )
    assert exact_paired_p(start.tolist(), tuned.tolist()) == pytest.approx(expected.pvalue, abs=1e-12)


def test_exact_p_is_below_a_level_no_oftener_than_the_level_says() -> None:
    # If start and tuned are equally good, all signs are equally likely: look at every one of them.
    sizes = [0.1, 0.2, 0.2, 0.35, 0.5, 0.5, 0.9, 1.0]
    signs = itertools.product((-1, 1), repeat=8)
    p_values = [exact_paired_p([0.0] * 8, [a * b for a, b in zip(sizes, one, strict=True)]) for one in signs]
    for level in (0.01, 0.05, 0.1, 0.5):
        assert sum(p <= level for p in p_values) / 256 <= level
    assert min(p_values) == 2 / 256


def test_with_more_than_16_differences_flips_are_drawn() -> None:
    differences = np.random.default_rng(8).normal(0.3, 1.0, 17)
    flips = (np.arange(2**17)[:, None] >> np.arange(17) & 1) * 2 - 1
    exact = float((np.abs(flips @ differences) >= abs(differences.sum()) - 1e-12).mean())
    drawn = exact_paired_p([0.0] * 17, differences.tolist())
    assert 0.05 < exact < 0.95
    assert drawn == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / 100_000))
    assert drawn == exact_paired_p([0.0] * 17, differences.tolist())
    # No draw of 100 000 comes near: the observed one is the only one so large, and p is never 0.
    assert exact_paired_p([0.0] * 40, np.linspace(0.5, 1.0, 40).tolist()) == 1 / 100_001


def test_drawn_flips_are_held_in_blocks() -> None:
    tuned = np.random.default_rng(0).random(300).tolist()
    tracemalloc.start()
    exact_paired_p([0.0] * 300, tuned)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 30e6  # all at once: 240 MB


# --------------------------------------------------------------------------------------------- pass@k


def test_pass_at_k_by_hand() -> None:
    # Of 4 answers 2 are right: of the 6 pairs one has none.
    assert [pass_at_k(4, 2, k) for k in (1, 2, 3, 4)] == pytest.approx([0.5, 5 / 6, 1.0, 1.0])
    assert (pass_at_k(8, 0, 8), pass_at_k(8, 1, 8), pass_at_k(1, 1, 1)) == (0.0, 1.0, 1.0)
    assert math.copysign(1, pass_at_k(8, 0, 2)) == 1  # not -0.0, which would be printed


@settings(deadline=None, derandomize=True)
@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_the_choices(case: tuple[int, int, int]) -> None:
    n, correct, k = case
    expected = 1 - Fraction(math.comb(n - correct, k), math.comb(n, k))
    assert pass_at_k(n, correct, k) == pytest.approx(float(expected), rel=1e-11)


def test_pass_at_k_of_many_answers() -> None:
    assert pass_at_k(10**6, 1, 1) == pytest.approx(1e-6, rel=1e-12)
    assert pass_at_k(10**6, 3, 10**5) == pytest.approx(0.271, abs=1e-5)
    assert pass_at_k(10**6, 500_000, 500_000) == 1.0


@pytest.mark.parametrize(("n", "correct", "k"), [(4, 2, 5), (4, 2, 0), (4, 5, 1), (4, -1, 1), (0, 0, 1)])
def test_pass_at_k_refuses_what_cannot_be(n: int, correct: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"got k={k}, n={n}, correct={correct}"):
        pass_at_k(n, correct, k)


# --------------------------------------------------------------------------------------------- refusals


def test_other_refusals() -> None:
    with pytest.raises(ValueError, match="got 2 and 1 of them"):
        paired_bootstrap_difference([0.0, 1.0], [1.0])
    with pytest.raises(ValueError, match=r"confidence must lie between 0 and 1, got 95"):
        wilson_interval(1, 2, 95)
    with pytest.raises(ValueError, match="resamples must be 1 or more, got 0"):
        bootstrap_interval([1.0], resamples=0)
