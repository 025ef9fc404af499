"""Advantages against values worked out by hand, and the properties that hold for any group."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lowmem_grpo.advantages import ESTIMATORS, check_estimator_options, estimator_options, is_dead_P
from lowmem_grpo.errors import ConfigError

NAN = float("nan")
REWARDS = [1.2, 0.2, 0.0, 1.2]
CALM = settings(deadline=None, derandomize=True, max_examples=30)
NAMES = ["grpo", "dr_grpo", "rloo", "median", "trimmed"]


def advantages(name: str, *groups: list[float], dtype: torch.dtype = torch.float64, **options: object) -> Tensor:
    rewards_P_G = torch.tensor(groups, dtype=dtype)
    return ESTIMATORS[name](rewards_P_G, torch.ones_like(rewards_P_G), **options)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("grpo", {"ddof": 0, "eps": 0}, [0.991837, -0.811503, -1.172171, 0.991837]),
        ("grpo", {"ddof": 1, "eps": 1e-4}, [0.858822, -0.702672, -1.014971, 0.858822]),
        ("grpo", {}, [0.858822, -0.702672, -1.014971, 0.858822]),
        ("dr_grpo", {}, [0.55, -0.45, -0.65, 0.55]),
        ("rloo", {}, [0.733333, -0.6, -0.866667, 0.733333]),
        ("median", {}, [0.5, -0.5, -0.7, 0.5]),
        ("median", {"scale": "mad"}, [1.0, -1.0, -1.4, 1.0]),
        ("median", {"scale": "mad_normal"}, [0.674491, -0.674491, -0.944287, 0.674491]),
        ("trimmed", {"fraction": 0.25}, [0.5, -0.5, -0.7, 0.5]),
        ("trimmed", {"fraction": 0.2}, [0.55, -0.45, -0.65, 0.55]),
    ],
)
def test_values(name: str, options: dict[str, object], expected: list[float]) -> None:
    assert advantages(name, REWARDS, **options)[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_trimmed_baseline_ignores_the_outlier() -> None:
    # floor(.2 * 6) = 1: the mean of .2, .2, .4, 1.2 is .5
    result = advantages("trimmed", [0.0, 0.2, 0.2, 0.4, 1.2, 10.0])[0].tolist()
    assert result == pytest.approx([-0.5, -0.3, -0.3, -0.1, 0.7, 9.5])


def test_trimmed_counts_are_not_lost_to_rounding() -> None:
    # .29 * 100 is 28.999999999999996: 29 from each end must go, which leaves 42 of the values 29 .. 70.
    rewards = [float(i * i) for i in range(100)]
    expected = sum(i * i for i in range(29, 71)) / 42
    assert advantages("trimmed", rewards, fraction=0.29)[0, 0].item() == pytest.approx(-expected)


def test_trimmed_always_leaves_something() -> None:
    # Three rewards, one cut from each end: the baseline is the middle one.
    assert advantages("trimmed", [0.0, 1.0, 5.0], fraction=0.49)[0].tolist() == [-1.0, 0.0, 4.0]


def test_median_averages_the_middle_two() -> None:
    assert advantages("median", [0.0, 1.0, 2.0, 10.0])[0].tolist() == [-1.5, -0.5, 0.5, 8.5]


@pytest.mark.parametrize("scale", ["mad", "mad_normal"])
@pytest.mark.parametrize("third", [0.3, 0.1 + 0.2])  # the second is 0.30000000000000004: a divisor of 5e-17
def test_median_without_deviation_falls_back_to_sd(scale: str, third: float) -> None:
    # Distances to the median are 0, 0, 0, 2; sd with ddof 1 of [.3, .3, .3, 2.3] is sqrt(4 - 4 / 4) / sqrt(3) = 1
    result = advantages("median", [0.3, 0.3, third, 2.3], scale=scale)[0].tolist()
    assert result == pytest.approx([0.0, 0.0, 0.0, 2.0])


@pytest.mark.parametrize("name", NAMES)
def test_equal_rewards_give_exactly_zero(name: str) -> None:
    assert advantages(name, [0.35] * 7, dtype=torch.float32).tolist() == [[0.0] * 7]
    nearly = [0.1 + 0.2, 0.3, 0.3, 0.3]
    assert advantages(name, nearly, [1e9 + 1, 1e9, 1e9, 1e9]).tolist() == [[0.0] * 4] * 2


@pytest.mark.parametrize("name", NAMES)
def test_small_but_real_spread_counts(name: str) -> None:
    assert (advantages(name, [1e-9, 2e-9, 3e-9, 9e-9], [1.0, 1.0001, 1.0, 1.0002]) != 0).any(1).all()


def test_missing_reward_leaves_the_statistics() -> None:
    # mean 0, sd1 of [1, 0, -1] is 1
    result = advantages("grpo", [1.0, NAN, 0.0, -1.0])[0].tolist()
    assert result == pytest.approx([1 / 1.0001, 0.0, 0.0, -1 / 1.0001])
    assert result[1] == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_missing_reward_is_as_if_the_answer_were_not_there(name: str) -> None:
    with_gap = advantages(name, [1.2, 0.2, NAN, 0.0, 1.2])[0]
    without = advantages(name, REWARDS)[0]
    assert with_gap.tolist() == [*without[:2].tolist(), 0.0, *without[2:].tolist()]


@pytest.mark.parametrize("name", NAMES)
def test_fewer_than_two_rewards_give_zero(name: str) -> None:
    assert advantages(name, [NAN, 1.0, NAN], [NAN] * 3).tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("name", NAMES)
def test_one_answer_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.group_size to 2 or more"):
        advantages(name, [1.0], [0.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dtype_comes_back(dtype: torch.dtype) -> None:
    assert advantages("grpo", REWARDS, dtype=dtype).dtype == dtype


def test_sums_are_done_in_float64() -> None:
    # In fp32 the mean of 1e8 and 1e8 + 8 and its deviations would lose digits; the sum of squares certainly would.
    result = advantages("grpo", [1e5, 1e5 + 1, 1e5 + 2], dtype=torch.float32, eps=0)
    assert result[0].tolist() == [-1.0, 0.0, 1.0]


def test_dead_groups() -> None:
    groups = [[0.35] * 3, [0.0, 0.0, 1.0], [NAN, 1.0, NAN], [NAN] * 3, [NAN, 1.0, 1.0], [NAN, 1.0, 2.0], [0.0] * 3]
    dead_P = is_dead_P(torch.tensor(groups))
    assert dead_P.tolist() == [True, False, True, True, True, False, True]


GROUP = hnp.arrays(np.float64, st.tuples(st.integers(1, 4), st.integers(2, 9)), elements=st.integers(-8, 8).map(float))
SUM_TO_ZERO = ["grpo", "dr_grpo", "rloo"]


def run(name: str, rewards: np.ndarray) -> Tensor:
    rewards_P_G = torch.from_numpy(rewards)
    return ESTIMATORS[name](rewards_P_G, torch.ones_like(rewards_P_G))


@pytest.mark.parametrize("name", NAMES)
@CALM
@given(rewards=GROUP, shift=st.integers(-50, 50))
def test_shift_of_all_rewards_changes_nothing(name: str, rewards: np.ndarray, shift: int) -> None:
    torch.testing.assert_close(run(name, rewards + shift), run(name, rewards), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", SUM_TO_ZERO)
@CALM
@given(rewards=GROUP)
def test_group_sums_to_zero(name: str, rewards: np.ndarray) -> None:
    assert run(name, rewards).sum(1).abs().max() < 1e-9


@CALM
@given(rewards=GROUP)
def test_rloo_is_dr_grpo_stretched(rewards: np.ndarray) -> None:
    size = rewards.shape[1]
    torch.testing.assert_close(run("rloo", rewards), size / (size - 1) * run("dr_grpo", rewards), rtol=0, atol=1e-9)


@CALM
@given(rewards=GROUP)
def test_grpo_has_unit_spread(rewards: np.ndarray) -> None:
    rewards_P_G = torch.from_numpy(rewards)
    result = ESTIMATORS["grpo"](rewards_P_G, torch.ones_like(rewards_P_G), eps=0)
    expected_P = 1.0 - is_dead_P(rewards_P_G).double()
    torch.testing.assert_close(result.std(1, correction=1), expected_P)


@pytest.mark.parametrize("name", NAMES)
@CALM
@given(rewards=GROUP, seed=st.integers(0, 100))
def test_order_of_answers_does_not_matter(name: str, rewards: np.ndarray, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(rewards.shape[1])
    torch.testing.assert_close(run(name, rewards[:, order]), run(name, rewards)[:, order], rtol=0, atol=1e-9)


def test_options_come_from_the_signature() -> None:
    assert {name: estimator_options(name) for name in NAMES} == {
        "grpo": {"ddof": 1, "eps": 1e-4},
        "dr_grpo": {},
        "rloo": {},
        "median": {"scale": "none"},
        "trimmed": {"fraction": 0.2},
    }
    assert list(ESTIMATORS) == NAMES


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("grpo", {"dof": 0}, "advantage 'grpo' has no option 'dof', did you mean 'ddof'?; it takes ddof, eps"),
        ("rloo", {"eps": 0}, "advantage 'rloo' has no option 'eps'; it takes none"),
        ("grpo", {"ddof": 2}, "option ddof of advantage 'grpo' is 2 but should be 0 or 1"),
        ("grpo", {"eps": -1}, "option eps of advantage 'grpo' is -1 but should be greater than or equal to 0"),
        ("grpo", {"eps": NAN}, "option eps of advantage 'grpo' is nan but should be a finite number"),
        ("trimmed", {"fraction": 0.5}, "option fraction of advantage 'trimmed' is 0.5 but should be less than 0.5"),
        (
            "median",
            {"scale": "madd"},
            "option scale of advantage 'median' is 'madd' but should be 'none', 'mad' or 'mad_normal', "
            "did you mean 'mad'?",
        ),
    ],
)
def test_wrong_option_is_one_sentence(name: str, options: dict[str, object], sentence: str) -> None:
    with_rewards: Callable[[], object] = lambda: advantages(name, REWARDS, **options)  # noqa: E731
    for call in (with_rewards, lambda: check_estimator_options(name, options)):
        with pytest.raises(ConfigError) as caught:
            call()
        assert str(caught.value) == sentence


def test_unknown_estimator_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no advantage 'drgrpo', did you mean 'dr_grpo'\?; the choices are grpo, "):
        check_estimator_options("drgrpo", {})


def test_number_as_text_is_a_number() -> None:
    assert check_estimator_options("grpo", {"eps": "1e-3"}) == {"eps": 1e-3}
