"""The numbers of metrics.jsonl, worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from lowmem_grpo.advantages import is_dead_P
from lowmem_grpo.batching import rewards_tensor
from lowmem_grpo.metrics import rollout_metrics
from lowmem_grpo.types import ScoredGroup
from tests.helpers import group_of


def metrics_of(groups: list[ScoredGroup]) -> dict[str, float]:
    rewards_P_G, lengths_P_G = rewards_tensor(groups)
    return rollout_metrics(groups, rewards_P_G, lengths_P_G, is_dead_P(rewards_P_G))


def answers(*rewards: float | None, lengths: tuple[int, ...] = (), **more: object) -> ScoredGroup:
    lengths = lengths or (1,) * len(rewards)
    return group_of((5,), [[7] * length for length in lengths], rewards, **more)  # type: ignore[arg-type]


def test_two_groups_by_hand() -> None:
    first = answers(
        1.2,
        0.2,
        0.0,
        1.2,
        lengths=(4, 2, 6, 3),
        texts=["102", "112", "100", "102"],
        reasons=["end", "end", "length", "stop"],
        scores={"number": (1.0, 0.0, 0.0, 1.0), "tags": (0.2, 0.2, 0.0, 0.2)},
    )
    second = answers(
        1.0,
        1.0,
        1.0,
        1.0,
        lengths=(1, 1, 1, 2),
        texts=["4", "4", "4", "4"],
        reasons=["end", "end", "end", "length"],
        scores={"number": (1.0, 1.0, 1.0, 1.0), "tags": (0.0, 0.0, 0.0, 0.0)},
    )
    metrics = metrics_of([first, second])
    # Around .65 the first group is .55, -.45, -.65, .55: mean square .3075, mean cube
    # (.166375 - .091125 - .274625 + .166375) / 4 = -.00825; the dead group has no skew.
    assert metrics == pytest.approx(
        {
            "reward/mean": (2.6 + 4.0) / 8,
            "reward/within_group_std": 0.554527 / 2,
            "reward/missing": 0.0,
            "reward/number": 6 / 8,
            "reward/tags": 0.6 / 8,
            "groups/zero_variance": 0.5,
            "groups/skew": -0.00825 / 0.3075**1.5,
            "completion/length_mean": 20 / 8,
            "completion/length_max": 6.0,
            "completion/truncated": 2 / 8,
            "completion/unique": (3 / 4 + 1 / 4) / 2,
        },
        abs=1e-6,
    )


@pytest.mark.parametrize(
    ("rewards", "skew"),
    [
        ((1.0, 0.0, 0.0, 0.0), 2 / math.sqrt(3)),  # one right among wrong ones: (1 - 2 p) / sqrt(p (1 - p)), p = 1/4
        ((0.0, 1.0, 1.0, 1.0), -2 / math.sqrt(3)),
        ((1.0, 0.0, 0.0, 1.0), 0.0),
    ],
)
def test_skew_says_whether_right_answers_are_rare(rewards: tuple[float, ...], skew: float) -> None:
    assert metrics_of([answers(*rewards)])["groups/skew"] == pytest.approx(skew)
    # The mean over live groups only.
    both = metrics_of([answers(*rewards), answers(*(1 - r for r in rewards)), answers(0.5, 0.5, 0.5, 0.5)])
    assert both["groups/skew"] == pytest.approx(0.0)


def test_missing_rewards_leave_every_statistic() -> None:
    group = answers(1.0, None, 0.0, None, scores={"judge": (1.0, None, 0.0, None)})
    metrics = metrics_of([group, answers(None, None, None, None, scores={"judge": (None,) * 4})])
    assert metrics["reward/missing"] == 6 / 8
    assert metrics["reward/mean"] == 0.5
    assert metrics["reward/judge"] == 0.5
    assert metrics["reward/within_group_std"] == 0.5
    assert metrics["groups/zero_variance"] == 0.5
    assert metrics["groups/skew"] == 0.0
    assert all(math.isfinite(value) for value in metrics.values())


def test_no_reward_at_all_leaves_no_not_a_number() -> None:
    metrics = metrics_of([answers(None, None, scores={"judge": (None, None), "tags": (0.5, 0.0)})])
    assert metrics == {
        "groups/zero_variance": 1.0,
        "completion/length_mean": 1.0,
        "completion/length_max": 1.0,
        "completion/truncated": 0.0,
        "completion/unique": 1.0,
        "reward/missing": 1.0,
        "reward/tags": 0.25,
    }


def test_equal_rewards_have_a_mean_and_no_skew() -> None:
    metrics = metrics_of([answers(0.35, 0.35, 0.35, texts=["a", "a", "b"])])
    assert metrics["reward/mean"] == pytest.approx(0.35)
    assert metrics["reward/within_group_std"] == pytest.approx(0.0, abs=1e-15)
    assert metrics["completion/unique"] == pytest.approx(2 / 3)
    assert "groups/skew" not in metrics


def test_values_are_plain_numbers() -> None:
    metrics = metrics_of([answers(1.0, 0.0)])
    assert {type(value) for value in metrics.values()} == {float}
    assert not any(isinstance(value, torch.Tensor) for value in metrics.values())
