"""The gate: forecasts against simulated groups and hand values; each finding on a sick sample and its healthy twin."""

from __future__ import annotations

import itertools
import json
import math
import random
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from lowmem_grpo.advantages import is_dead_P
from lowmem_grpo.config_text import apply_override
from lowmem_grpo.gate import (
    GateReport,
    GateSample,
    GateSettings,
    crossed_groups,
    dead_share,
    enough,
    forecast_dead,
    judge,
)
from lowmem_grpo.rewards import RewardSpec, Rubric
from lowmem_grpo.types import Finding, Group, Problem, Rollout, ScoredGroup

NAN = math.nan
IM_END, END = 7, 2
SPECIAL = {END: "</s>", IM_END: "<|im_end|>"}


# Samples


def answer(text: str, *, ids: Sequence[int] = (5, END), cut: bool = False) -> Rollout:
    return Rollout(tuple(ids), (True,) * len(ids), (-0.5,) * len(ids), "length" if cut else "end", text)


def scored(
    p: int,
    rewards: Sequence[float | None],
    *,
    rollouts: Sequence[Rollout] = (),
    prompt_text: str = "What is it?",
    errors: Sequence[str | None] = (),
    **columns: Any,
) -> ScoredGroup:
    rollouts = rollouts or [answer(f"text {g}") for g in range(len(rewards))]
    problem = Problem(f"train-{p}", "q", prompt_text, (5,), columns)
    errors = tuple(errors) or (None,) * len(rewards)
    return ScoredGroup(Group(problem, tuple(rollouts)), {"r": tuple(rewards)}, tuple(rewards), errors)


def sample_of(*rewards_P: Sequence[float | None], **more: Any) -> GateSample:
    return GateSample(
        tuple(scored(p, rewards, **more) for p, rewards in enumerate(rewards_P)), frozenset({END}), SPECIAL
    )


def judged(sample: GateSample, **changes: Any) -> GateReport:
    size = len(sample.groups[0].totals)
    return judge(sample, GateSettings(**{"group_size": size, "max_new_tokens": 64, **changes}))


def kinds(report: GateReport) -> list[str]:
    return [finding.kind for finding in report.findings]


def the(kind: str, report: GateReport) -> Finding:
    (finding,) = [finding for finding in report.findings if finding.kind == kind]
    return finding


def overrides(finding: Finding) -> list[str]:
    return [override for fix in finding.fixes for override in fix.overrides]


HEALTHY = [(1.0, 0.0, 1.0, 0.0), (0.0, 1.0, 1.0, 1.0)] * 8


def sampled(p_P: np.ndarray, group_size: int, rng: np.random.Generator) -> torch.Tensor:
    return torch.tensor((rng.random((len(p_P), group_size)) < p_P[:, None]).astype(float))


def rates(kind: tuple[float, ...], count: int, rng: np.random.Generator) -> np.ndarray:
    return np.full(count, kind[0]) if len(kind) == 1 else rng.beta(*kind, count)


# The forecast


def test_dead_share_is_symmetric_and_by_hand() -> None:
    assert dead_share(0.5, 2) == 0.5
    assert dead_share(0.1, 3) == pytest.approx(0.001 + 0.729)
    assert dead_share(0.1819, 8) == pytest.approx(dead_share(1 - 0.1819, 8)) == pytest.approx(0.201, abs=5e-4)
    assert dead_share(0.0, 16) == dead_share(1.0, 16) == 1.0


@pytest.mark.parametrize("kind", [(0.05,), (0.5,), (0.95,), (0.2, 0.8), (1.0, 1.0), (0.1, 0.1)])
@pytest.mark.parametrize("seed", [1, 2])
def test_forecasts_agree_with_simulated_groups(kind: tuple[float, ...], seed: int) -> None:
    rng = np.random.default_rng(seed)
    p_P = rates(kind, 64, rng)
    rewards_P_G = sampled(p_P, 8, rng)
    for size in (2, 4, 8, 16, 32):
        forecast = forecast_dead(rewards_P_G, size)
        truth = is_dead_P(sampled(np.tile(p_P, 63), size, rng)).double().mean().item()
        assert forecast.method == "beta-binomial" and forecast.group_size == size
        # Far from what was sampled more is left to the model, and prompts that are all alike lie at its edge.
        assert forecast.share == pytest.approx(truth, abs=0.1 if size <= 8 else 0.15)


def test_the_intervals_cover_the_truth() -> None:
    covered = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        low, high = forecast_dead(sampled(rng.beta(0.4, 1.2, 48), 8, rng), 8).interval
        truth = math.exp(sum(math.log((0.4 + j) / (1.6 + j)) for j in range(8)))
        truth += math.exp(sum(math.log((1.2 + j) / (1.6 + j)) for j in range(8)))
        covered.append(low <= truth <= high)
    assert sum(covered) >= 35  # 38 of 40 expected; 34 or fewer has a chance below 4 %


def test_the_posterior_agrees_with_scipys_beta_binomial_on_another_grid() -> None:
    rewards_P_G = torch.tensor([[1.0, 0, 0, 0], [1, 1, 1, NAN], [0, 0, 0, 0], [1, 1, 0, 0], [0, NAN, NAN, NAN]])
    mean, spread = np.meshgrid((np.arange(300) + 0.5) / 300, (np.arange(200) + 0.5) / 200)
    a, b = mean * (1 / spread**2 - 1), (1 - mean) * (1 / spread**2 - 1)
    log = sum(stats.betabinom.logpmf(k, n, a, b) for k, n in [(1, 4), (3, 3), (0, 4), (2, 4), (0, 1)])
    mass = np.exp(log - log.max())
    for size in (2, 6):
        dead = stats.betabinom.pmf(0, size, a, b) + stats.betabinom.pmf(size, size, a, b)
        expected = (dead * mass).sum() / mass.sum()
        assert forecast_dead(rewards_P_G, size).share == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("value", [0.0, 1.0, -0.3])
def test_a_constant_reward_is_not_a_certainty(value: float) -> None:
    forecast = forecast_dead(torch.full((16, 8), value), 8)
    low, high = forecast.interval
    assert forecast.share > 0.95 and 0.75 < low < 0.9 and 0.995 < high <= 1.0
    more = forecast_dead(torch.full((64, 8), value), 8)
    assert more.share > forecast.share and more.interval[0] > low


def test_which_value_is_right_does_not_matter() -> None:
    rewards_P_G = sampled(np.random.default_rng(0).beta(0.5, 2, 20), 8, np.random.default_rng(1))
    for other in (1 - rewards_P_G, 0.2 + 3 * rewards_P_G, -rewards_P_G):
        first, second = forecast_dead(rewards_P_G, 8), forecast_dead(other, 8)
        assert first.share == pytest.approx(second.share, abs=1e-12)
        assert first.interval == pytest.approx(second.interval, abs=1e-9)


def test_rare_values_are_resampled_by_hand() -> None:
    """Twelve prompts with values of their own, so none is common."""
    own = [[p + 0.1, p + 0.1, p + 0.1, p + 0.2] for p in range(6)] + [[p + 0.1] * 4 for p in range(6, 12)]
    rewards_P_G = torch.tensor(own, dtype=torch.float64)
    # pairs: C(3,2) / 6 and 1; triples: 1 / 4 and 1; all four: 0 and 1; larger groups as all four
    for size, share in ((2, 0.75), (3, 0.625), (4, 0.5), (8, 0.5)):
        forecast = forecast_dead(rewards_P_G, size)
        assert forecast.share == pytest.approx(share) and forecast.method == "resampling"
    noisy_P_G = rewards_P_G * (1 + 1e-8 * torch.arange(4, dtype=torch.float64))
    assert forecast_dead(noisy_P_G, 3).share == pytest.approx(0.625)


def test_common_values_are_modelled_and_rare_ones_added() -> None:
    """A third value that is never dead changes nothing of two that are; what is added to them adds up."""
    rng = np.random.default_rng(5)
    low_P_G = sampled(rng.beta(1, 3, 40), 8, rng)
    graded = forecast_dead(torch.cat([low_P_G, torch.tensor([[0.5, 0.7] + [0.0] * 6])]), 8)
    assert graded.method == "beta-binomial" and graded.share == pytest.approx(forecast_dead(low_P_G, 8).share, abs=0.03)
    distinct_P_G = torch.arange(320, dtype=torch.float64).reshape(40, 8) + 2
    half = forecast_dead(torch.cat([torch.zeros(40, 8), distinct_P_G]), 8)
    assert half.share == pytest.approx(0.5, abs=0.03) and half.interval[0] < 0.5 < half.interval[1]


def test_graded_rewards_with_gaps() -> None:
    rewards_P_G = torch.tensor([[1.0, 1.0, NAN, 0.0], [0.5, NAN, NAN, NAN], [NAN] * 4])
    assert forecast_dead(rewards_P_G, 2).method == "beta-binomial"
    with pytest.raises(ValueError, match="two rewards or more"):
        forecast_dead(torch.tensor([[1.0, NAN], [0.5, NAN], [0.1, NAN]]), 2)
    with pytest.raises(ValueError, match="at least one reward"):
        forecast_dead(torch.full((2, 2), NAN), 2)


@pytest.mark.parametrize("rate", [0.02, 0.1, 0.5])
def test_graded_forecasts_agree_with_simulated_groups(rate: float) -> None:
    rng = np.random.default_rng(3)

    def draw(count: int, size: int) -> torch.Tensor:
        p_P = np.full(count, rate)
        return sampled(p_P, size, rng) + 0.2 * sampled(np.full(count, 0.97), size, rng)

    rewards_P_G = draw(64, 8)
    for size in (2, 4, 8, 16, 32):
        truth = is_dead_P(draw(4000, size)).double().mean().item()
        assert forecast_dead(rewards_P_G, size).share == pytest.approx(truth, abs=0.1 if size <= 8 else 0.15)


VALUES = st.sampled_from([0.0, 1.0, 0.2, NAN])


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.integers(2, 6).flatmap(lambda n: st.lists(st.lists(VALUES, min_size=n, max_size=n), min_size=1, max_size=6)))
def test_forecasts_fall_with_the_group_size_and_lie_in_their_interval(rows: list[list[float]]) -> None:
    rewards_P_G = torch.tensor(rows, dtype=torch.float64)
    try:
        forecasts = [forecast_dead(rewards_P_G, size) for size in (2, 3, 5, 8, 16, 64)]
    except ValueError:
        assert (rewards_P_G.isnan().sum(1) >= rewards_P_G.shape[1] - 1).all()
        return
    shares = [forecast.share for forecast in forecasts]
    assert all(late <= early + 1e-9 for early, late in itertools.pairwise(shares))
    for forecast in forecasts:
        low, high = forecast.interval
        assert 0 <= low <= forecast.share <= high <= 1 + 1e-9


def test_intervals_of_graded_rewards_always_have_a_width() -> None:
    split = torch.tensor([[0.0, 0.5, 1.0, 1.0]] * 8)  # every prompt has the same 1 / 6 of equal pairs
    alive = torch.tensor([[0.0, 0.5, 1.0, 2.0]] * 8)
    dead = torch.tensor([[float(p)] * 4 for p in range(8)])
    for rewards_P_G in (split, alive, dead):
        low, high = forecast_dead(rewards_P_G, 2).interval
        assert high - low > 0.1


def test_enough() -> None:
    rng = np.random.default_rng(0)
    assert not enough(torch.zeros(500, 8), 8)  # nobody is alive: go on to the maximum
    assert not enough(torch.full((4, 8), NAN), 8)
    assert not enough(sampled(np.full(4, 0.1), 8, rng), 8)
    assert enough(sampled(np.full(16, 0.5), 8, rng), 8)
    assert not enough(sampled(rng.beta(0.3, 0.9, 16), 8, rng), 8)
    assert enough(sampled(rng.beta(0.3, 0.9, 200), 8, rng), 8)


# The report


def test_the_report_of_a_healthy_sample_by_hand() -> None:
    report = judged(sample_of(*HEALTHY))
    assert (report.verdict, report.findings) == ("go", ())
    assert (report.prompts, report.answers, report.group_size) == (16, 64, 4)
    assert report.reward_mean == 0.625
    assert report.reward_std == pytest.approx(math.sqrt(0.625 * 0.375))
    assert report.within_group_std == pytest.approx((0.5 + math.sqrt(3) / 4) / 2)
    assert report.pass_at == {1: 0.625, 4: 1.0}
    assert (report.dead_share, report.truncated, report.unique, report.missing, report.failures) == (0, 0, 1, 0, 0)
    assert (report.length_mean, report.length_max) == (2.0, 2)
    assert [forecast.group_size for forecast in report.forecasts] == [2, 4, 8, 16]
    assert report.sentence == (
        "16 prompts x 4 answers: mean reward 0.62, 0 % of the groups teach nothing, 0 % of the answers cut, "
        "2 tokens on average"
    )


def test_a_report_is_json() -> None:
    for rewards in (HEALTHY, [(None, None)] * 3, [(0.0, 0.0)] * 3, [(0.0, 0.5, 1.0)] * 3):
        report = judged(sample_of(*rewards))
        values = json.loads(json.dumps(report.to_json(), allow_nan=False))
        assert values["sentence"] == report.sentence
        assert [finding["kind"] for finding in values["findings"]] == kinds(report)
    assert judged(sample_of(*HEALTHY)).to_json()["pass_at"] == {"1": 0.625, "4": 1.0}


def test_pass_at_is_for_right_or_wrong_only() -> None:
    assert judged(sample_of((0.0, 0.5, 1.0))).pass_at is None
    assert judged(sample_of((0.0, None, 1.0), (None, None, None))).pass_at == {1: 0.5, 3: 1.0}
    assert judged(sample_of((0.0, 0.0))).pass_at == {1: 0.0, 2: 0.0}
    assert judged(sample_of((1.0, 1.0))).pass_at == {1: 1.0, 2: 1.0}
    assert judged(sample_of((0.2, 0.2)), best_reward=1.2).pass_at == {1: 0.0, 2: 0.0}


# Findings


def test_a_constant_low_reward_stops_and_says_how_to_get_a_signal() -> None:
    report = judged(sample_of(*[(0.0,) * 8] * 16))
    assert report.verdict == "stop" and kinds(report) == ["constant reward"]
    finding = report.findings[0]
    assert finding.severity == "error" and "short of the full one" in finding.cause
    assert "all 128 rewarded answers to 16 prompts score 0" in finding.evidence
    assert overrides(finding) == ["rollout.group_size=16", "rollout.group_size=32", "lora.continue_from=FOLDER"]
    now, twice = (forecast.share for forecast in report.forecasts if forecast.group_size in (8, 16))
    assert f"{100 * twice:.0f} % dead instead of {100 * now:.0f} %" in finding.sentence


def test_right_answers_in_another_form_are_the_first_advice() -> None:
    report = judged(sample_of(*[(0.0,) * 8] * 16), lenient=(0.08, "rewards.0.args.mode=lenient"))
    fix = report.findings[0].fixes[0]
    assert fix.text.startswith("read leniently, 8 % of the answers are right")
    assert fix.overrides == ("rewards.0.args.mode=lenient",)


def test_a_constant_full_reward_stops_and_asks_for_harder_rows() -> None:
    finding = the("constant reward", judged(sample_of(*[(1.0,) * 4] * 16)))
    assert "nothing left to learn" in finding.cause
    assert [fix.text.split(",")[0] for fix in finding.fixes] == ["take harder problems"]
    partial = the("constant reward", judged(sample_of(*[(0.2,) * 4] * 16), best_reward=1.2))
    assert "short of the full one" in partial.cause


def test_one_live_group_is_no_constant_reward() -> None:
    report = judged(sample_of(*[(0.0,) * 8] * 15, (1.0,) + (0.0,) * 7))
    assert report.verdict == "caution" and kinds(report) == ["dead groups"]


def test_no_spread() -> None:
    sample = sample_of(*[(0.0,) * 4] * 8, *[(1.0,) * 4] * 8)
    report = judged(sample)
    assert report.verdict == "stop" and kinds(report) == ["no spread"]
    assert "0 of 16 groups have any spread, rewards 0 to 1" in report.findings[0].evidence
    assert "rollout.temperature=1.2" in overrides(report.findings[0])
    low = the("no spread", judged(sample_of(*[(0.0,) * 4] * 15, (1.0,) * 4)))
    assert any("partial credit" in fix.text for fix in low.fixes)
    high = the("no spread", judged(sample_of(*[(1.0,) * 4] * 15, (0.0,) * 4)))
    assert high.fixes[0].text.startswith("take harder problems")


@pytest.mark.parametrize(("many", "first"), [(0.0, "sample larger groups"), (1.0, "take harder problems")])
def test_dead_groups(many: float, first: str) -> None:
    rare = 1 - many
    report = judged(sample_of(*[(many,) * 8] * 12, *[(rare, *(many,) * 7)] * 4))
    assert report.verdict == "caution" and kinds(report) == ["dead groups"]
    finding = report.findings[0]
    assert "12 of 16 groups sampled" in finding.evidence and finding.fixes[0].text.startswith(first)
    assert overrides(finding)[:2] == ["rollout.group_size=16", "rollout.group_size=32"]
    assert kinds(judged(sample_of(*[(many,) * 8] * 4, *[(rare, *(many,) * 7)] * 12))) == []


def test_dead_groups_that_only_earn_the_form_are_hard() -> None:
    # .2 for the form nearly always, 1 for the answer hardly ever; the lowest reward is 0.
    report = judged(sample_of(*[(0.2,) * 8] * 14, (0.2,) * 7 + (0.0,), (0.2,) * 7 + (1.2,)))
    finding = the("dead groups", report)
    assert "equally low" in finding.cause and "lora.continue_from=FOLDER" in overrides(finding)


def test_larger_groups_come_first_only_where_they_help() -> None:
    hopeless, hard = sample_of(*[(0.0,) * 8] * 16), sample_of(*[(0.0,) * 8] * 12, *[(1.0,) + (0.0,) * 7] * 4)
    texts = [judged(sample).findings[0].fixes[0].text for sample in (hopeless, hard)]
    assert texts[0].startswith("start with easier") and texts[1].startswith("sample larger groups")


def test_dead_groups_at_both_ends() -> None:
    report = judged(sample_of(*[(0.0,) * 4] * 6, *[(1.0,) * 4] * 6, *[(0.0, 1.0, 0.0, 0.0)] * 2))
    assert report.findings[0].fixes[-1].text.startswith("take problems of middling difficulty")


def cut_sample(count: int, *, text: str = "and so on", ids: Sequence[int] = (5, 6, 8)) -> GateSample:
    """16 groups of 4 with `count` truncated answers each."""
    rollouts = [answer(f"{text} {g}", ids=ids if g < count else (5, END), cut=g < count) for g in range(4)]
    even = [(1.0, 0.0, 1.0, 0.0), (0.0, 1.0, 0.0, 1.0)] * 8  # cut or not, the answers score the same
    return sample_of(*even, rollouts=rollouts)


def test_truncated() -> None:
    report = judged(cut_sample(2))
    assert report.verdict == "caution" and kinds(report) == ["truncated"]
    assert report.findings[0].evidence == "50 % of the answers were cut at 64 tokens"
    assert overrides(report.findings[0]) == ["rollout.max_new_tokens=128"]
    assert kinds(judged(cut_sample(1))) == []


def test_cut_answers_are_no_worry_where_the_rewards_teach_to_end() -> None:
    def judged_with(rewards: Sequence[float], groups: int = 8) -> GateReport:
        rollouts = [answer("a b"), answer("c", cut=True), answer("d", cut=True), answer("e", cut=True)]
        return judged(sample_of(*[rewards] * groups, rollouts=rollouts))

    taught = judged_with([1.0, 0.2, 0.0, 0.1])
    assert (taught.verdict, [finding.severity for finding in taught.findings]) == ("go", ["info"])
    assert taught.findings[0].evidence.endswith("; those that ended score 0.900 more than the cut ones of their group")
    for sample in (judged_with([0.0, 1.0, 0.0, 0.0]), judged_with([1.0, 0.2, 0.0, 0.1], groups=7)):
        assert (sample.verdict, the("truncated", sample).severity) == ("caution", "warning")


def test_thinking_is_named_where_it_is_on() -> None:
    def advised(sample: GateSample, **changes: Any) -> bool:
        return "data.thinking=false" in overrides(the("truncated", judged(sample, **changes)))

    thinks = cut_sample(3, text="<think>hm")
    assert advised(cut_sample(3), thinking=True)
    assert not advised(thinks, thinking=False)
    assert advised(thinks) and not advised(cut_sample(3))
    assert not advised(thinks, asked_forms={"tags": ("<think>",)})  # the reward asked for it, not the template


def test_hopeless_and_truncated_wants_room_first() -> None:
    rollouts = [answer(f"<think> {g}", ids=(5, 6), cut=True) for g in range(4)]
    report = judged(sample_of(*[(0.0,) * 4] * 8, rollouts=rollouts))
    assert kinds(report) == ["constant reward", "truncated"]
    assert overrides(report.findings[0])[:2] == ["rollout.max_new_tokens=128", "data.thinking=false"]


def test_a_wrong_end_token() -> None:
    # The model writes <|im_end|>, which the run does not know as an end, and goes on to the limit.
    sick = cut_sample(4, ids=(5, IM_END, 6, 6))
    report = judged(sick)
    assert kinds(report) == ["end token"]  # a higher limit would not help
    finding = report.findings[0]
    assert "<|im_end|>" in finding.cause and "eos_token" in finding.fixes[0].text
    assert finding.evidence.startswith("100 % of the answers")
    assert kinds(judged(replace(sick, end_ids=frozenset({END, IM_END})))) == ["truncated"]
    assert kinds(judged(cut_sample(4, ids=(5, 6, 6, IM_END)))) == ["truncated"]  # cut right there, not gone on
    ended = [answer(f"text {g}", ids=(5, IM_END, END)) for g in range(4)]
    assert kinds(judged(sample_of(*HEALTHY, rollouts=ended))) == []


def test_one_answer() -> None:
    same = [answer("4"), answer("4"), answer("4"), answer("4")]
    sample = sample_of(*HEALTHY, rollouts=same)
    assert overrides(the("one answer", judged(sample, temperature=0.2))) == ["rollout.temperature=1.0"]
    narrow = the("one answer", judged(sample, top_k=1, top_p=0.5))
    assert overrides(narrow) == ["rollout.top_p=1.0", "rollout.top_k=0"]
    assert overrides(the("one answer", judged(sample))) == ["rollout.temperature=1.2"]
    assert "1.0 different texts among 4 answers" in narrow.evidence
    two = sample_of(*HEALTHY, rollouts=[*same[:3], answer("5")])
    assert kinds(judged(two, temperature=0.2)) == []
    assert kinds(judged(sample_of(*[(1.0,) * 4] * 8, rollouts=same))) == ["constant reward"]  # all right, so all alike


def test_missing_rewards() -> None:
    error = "rewards.py: ZeroDivisionError: division by zero"
    report = judged(sample_of(*[(None,) * 4] * 3, errors=(error,) * 4))
    assert report.verdict == "stop" and kinds(report) == ["missing reward"]
    assert (report.missing, report.failures, report.reward_mean, report.forecasts) == (1.0, 12, None, ())
    assert report.findings[0].severity == "error" and error in report.findings[0].evidence
    some = judged(sample_of(*[(None, 0.0, 1.0, 0.0)] * 16))
    assert some.verdict == "caution" and some.findings[0].evidence == "25 % of 64 answers have no reward, 0 failures"
    few = judged(sample_of(*HEALTHY, (None, 0.0, 1.0, 0.0)))
    assert few.verdict == "go" and few.findings[0].severity == "info"
    # A function that fails on whole groups is left out there, and the totals do not show it.
    hidden = judged(sample_of(*HEALTHY, errors=(error,) * 4))
    assert hidden.missing == 0 and hidden.verdict == "caution" and kinds(hidden) == ["missing reward"]


FORMS = {"tags": ("<think>", "<answer>")}


def test_a_form_that_no_prompt_mentions() -> None:
    report = judged(sample_of(*HEALTHY), asked_forms=FORMS)
    assert report.verdict == "caution" and kinds(report) == ["unmentioned form"]
    finding = report.findings[0]
    assert "the reward tags asks for <think> and <answer>" in finding.cause
    (override,) = overrides(finding)
    reasoning = "your reasoning between <think> and </think>"
    expected = f"Write {reasoning} and then only the final answer between <answer> and </answer>."
    for given_by in (override, shlex.split(override)[0]):  # by a program, and through a shell
        raw: dict[str, Any] = {}
        apply_override(raw, given_by)
        assert raw == {"data": {"system_prompt": expected}}


def test_forms_that_are_mentioned_written_or_opened() -> None:
    asked = sample_of(*HEALTHY, prompt_text="Use <think> and <answer>.")
    written = [answer(f"<think>a</think><answer>{g}</answer>") for g in range(4)]
    opened = sample_of(*HEALTHY, prompt_text="<|im_start|>assistant\n<think>\n")
    assert kinds(judged(asked, asked_forms=FORMS)) == []
    assert kinds(judged(sample_of(*HEALTHY, rollouts=written), asked_forms=FORMS)) == []
    assert "asks for <answer>, which" in the("unmentioned form", judged(opened, asked_forms=FORMS)).cause


@pytest.mark.parametrize("present", ["You are brief.", 'Say "yes".', "It's so: no.", "a\nb", "Mind # and: all"])
def test_the_system_prompt_that_is_there_is_kept(present: str) -> None:
    report = judged(sample_of(*HEALTHY), asked_forms={"number": ("####",)}, system_prompt=present)
    (fix,) = the("unmentioned form", report).fixes
    assert '"####" before the final answer' in fix.sentence
    for override in fix.overrides:
        for given_by in (override, shlex.split(override)[0]):
            raw: dict[str, Any] = {}
            apply_override(raw, given_by)
            assert raw["data"]["system_prompt"] == f'{present} Write "####" before the final answer.'
    assert bool(fix.overrides) == present.startswith(("You", "Say"))


def test_errors_come_first_and_then_what_costs_most() -> None:
    rollouts = [answer("a", ids=(5, 6), cut=True)] * 3 + [answer("a")]
    report = judged(sample_of(*[(0.0,) * 4] * 8, rollouts=rollouts), asked_forms={"number": ("####",)})
    assert kinds(report) == ["constant reward", "unmentioned form", "truncated", "one answer"]


# Golds of other problems


def sums(count: int, right: float, seed: int = 0) -> list[Group]:
    """Additions with four answers each, right with probability `right`."""
    rng = random.Random(seed)
    groups = []
    for p in range(count):
        gold = 100 + p
        texts = [str(gold if rng.random() < right else rng.randrange(90)) for _ in range(4)]
        problem = Problem(f"train-{p}", "q", "What is it?", (5,), {"answer": str(gold)})
        groups.append(Group(problem, tuple(answer(text) for text in texts)))
    return groups


def judged_by_number(groups: Sequence[Group]) -> GateReport:
    columns = frozenset({"answer"})
    with Rubric([RewardSpec("number")], base_dir=Path()) as rubric:
        sample, crossed = rubric.score(groups), rubric.score(crossed_groups(groups, columns))
    gate_settings = GateSettings(group_size=4, max_new_tokens=64, gold_columns=columns)
    return judge(GateSample(tuple(sample), frozenset({END}), SPECIAL), gate_settings, crossed=crossed)


def test_a_shuffled_gold_column() -> None:
    healthy = sums(24, right=0.5)
    assert judged_by_number(healthy).verdict == "go"
    shuffled = crossed_groups(healthy, frozenset({"answer"}))
    report = judged_by_number(shuffled)
    finding = the("wrong answers", report)
    assert report.verdict == "stop"  # no answer fits another's gold at all
    assert "over 24 problems" in finding.evidence and "data.answer_column=COLUMN" in overrides(finding)


def test_a_half_shuffled_gold_is_told_by_its_interval() -> None:
    def coin(p: int, rate: float, crossed_rate: float) -> tuple[ScoredGroup, ScoredGroup]:
        own, other = ([float(g < 8 * share) for g in range(8)] for share in (rate, crossed_rate))
        return scored(p, own, answer=p), scored(p, other, answer=p + 1)

    gate_settings = GateSettings(group_size=8, max_new_tokens=64, gold_columns=frozenset({"answer"}))
    for rates_P, fires in [
        ([(0.5, 0.5)] * 16, True),
        ([(0.25, 0.5)] * 16, True),
        ([(0.5, 0.25)] * 16, False),
        ([(0.625, 0.25), (0.25, 0.5)] * 8, True),
        ([(0.5, 0.5)] * 7, False),  # too few to tell
    ]:
        own, crossed = zip(*(coin(p, *pair) for p, pair in enumerate(rates_P)), strict=True)
        report = judge(GateSample(own), gate_settings, crossed=crossed)
        assert ("wrong answers" in kinds(report)) == fires
        assert "wrong answers" not in kinds(judge(GateSample(own), gate_settings))
        no_gold = replace(gate_settings, gold_columns=frozenset())
        assert "wrong answers" not in kinds(judge(GateSample(own), no_gold, crossed=crossed))


def test_one_gold_for_all_is_not_judged() -> None:
    groups = [Group(Problem(f"p-{p}", "q", "q", (5,), {"answer": "7"}), (answer("7"), answer("8"))) for p in range(20)]
    assert judged_by_number(groups).findings == ()


@settings(deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(["a", "b", "c", ["d", 1]]), min_size=2, max_size=12))
def test_crossing_gives_each_gold_to_another_problem(golds: list[Any]) -> None:
    groups = [
        Group(Problem(f"p-{p}", "q", "q", (5,), {"answer": gold, "row": p, "level": p}), (answer("a"),))
        for p, gold in enumerate(golds)
    ]
    crossed = crossed_groups(groups, frozenset({"answer", "row", "absent"}))
    assert [group.problem.id for group in crossed] == [group.problem.id for group in groups]
    assert [group.rollouts for group in crossed] == [group.rollouts for group in groups]
    taken = [group.problem.columns["row"] for group in crossed]
    assert sorted(taken) == list(range(len(golds)))
    assert all(p != other for p, other in enumerate(taken))
    assert [group.problem.columns["answer"] for group in crossed] == [golds[other] for other in taken]
    assert [group.problem.columns["level"] for group in crossed] == list(range(len(golds)))
    by_gold = crossed_groups(groups, frozenset({"answer"}))
    same = sum(group.problem.columns["answer"] == gold for group, gold in zip(by_gold, golds, strict=True))
    most = max(golds.count(gold) for gold in golds)
    assert same == max(0, 2 * most - len(golds))  # the best that can be done


def test_one_problem_has_no_other() -> None:
    assert crossed_groups(sums(1, 0.5), frozenset({"answer"})) == []
