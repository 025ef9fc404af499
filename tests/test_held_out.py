"""What is measured on dev and test, what is kept of it in the run folder, and that the test split is used once."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lowmem_grpo import lifecycle
from lowmem_grpo.assembly import Parts, Preflight, sampling_params
from lowmem_grpo.checkpoint import write_adapter
from lowmem_grpo.errors import RewardFailed
from lowmem_grpo.evaluation import SAMPLES_STEP
from lowmem_grpo.held_out import HeldOut
from lowmem_grpo.model import Policy
from lowmem_grpo.rollout import SlotEngine
from lowmem_grpo.rundir import RunDir
from lowmem_grpo.sinks import Fanout
from lowmem_grpo.types import Group, Problem, SamplingParams, ScoredGroup
from tests.helpers import problems_of, shake_adapter, tiny_policy
from tests.runs import FUNCTIONS, IN_MEMORY, tiny_run

DEV, TEST = problems_of((40, 41)), problems_of((50, 51, 52), (60,), (61, 62))


class Metric:
    """1 for an answer that begins with an even token; fails on everything while `broken`."""

    broken = False

    def score(self, groups: Sequence[Group]) -> list[ScoredGroup]:
        return [self._scored(group) for group in groups]

    def _scored(self, group: Group) -> ScoredGroup:
        none = (None,) * len(group.rollouts)
        values = tuple(float(rollout.completion_ids[0] % 2 == 0) for rollout in group.rollouts)
        return ScoredGroup(group, {"score": none if self.broken else values}, none, none)


@dataclass
class Bench:
    """The held-out problems of a run with a policy whose adapter is in `adapter/`, and what the engine was asked."""

    held_out: HeldOut
    policy: Policy
    run_dir: RunDir
    metric: Metric
    asked: list[tuple[Any, ...]]

    def keep_adapter(self, seed: int) -> None:
        """Put another adapter into `adapter/`."""
        shake_adapter(self.policy, seed=seed)
        write_adapter(self.run_dir.adapter_dir, self.policy.adapter_state(), self.policy.adapter_config())

    def kept(self, name: str) -> dict[str, Any]:
        return json.loads((self.run_dir.evaluations_dir / name).read_bytes())


@contextlib.contextmanager
def bench_at(path: Path, samples: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    config = tiny_run(f"eval.samples={samples}", "rollout.temperature=0.8", "rollout.max_new_tokens=3").config
    policy, metric = tiny_policy(), Metric()
    asked: list[tuple[Any, ...]] = []
    generate = SlotEngine.generate

    def noting(
        engine: SlotEngine, problems: Sequence[Problem], size: int, sampling: SamplingParams, **more: Any
    ) -> list[Group]:
        asked.append((len(problems), size, sampling.temperature, more["step"]))
        return generate(engine, problems, size, sampling, **more)

    monkeypatch.setattr(SlotEngine, "generate", noting)
    checked = cast(Preflight, SimpleNamespace(config=config, eval_rubric=metric))
    data = SimpleNamespace(dev=DEV, test=TEST)
    parts = cast(Parts, SimpleNamespace(policy=policy, eval_engine=SlotEngine(policy, seed=3), data=data))
    run_dir = RunDir.create(path, config_text="", environment={}, inputs={})
    with run_dir.lock():
        bench = Bench(HeldOut(checked, parts, run_dir, Fanout({}, print)), policy, run_dir, metric, asked)
        bench.keep_adapter(1)
        yield bench


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    with bench_at(tmp_path / "run", 4, monkeypatch) as bench:
        yield bench


GREEDY, SAMPLED = (3, 1, 0.0, 0), (3, 4, 0.8, SAMPLES_STEP)
"""(problems, answers to each, temperature, step) of the two passes over the test split."""


def test_only_the_test_split_is_sampled(bench: Bench) -> None:
    dev, test = bench.held_out.evaluate("dev"), bench.held_out.evaluate("test")
    assert bench.asked == [(1, 1, 0.0, 0), GREEDY, SAMPLED]
    assert dev.sampled_P_G == ()
    assert [len(scores_G) for scores_G in test.sampled_P_G] == [4, 4, 4]
    assert set().union(*test.sampled_P_G) <= {0.0, 1.0}


def test_samples_are_drawn_as_training_draws(bench: Bench) -> None:
    sampling = sampling_params(bench.held_out._checked.config)
    groups = SlotEngine(bench.policy, seed=3).generate(TEST, 4, sampling, step=SAMPLES_STEP)
    expected = tuple(group.scores["score"] for group in bench.metric.score(groups))
    assert bench.held_out.evaluate("test").sampled_P_G == expected


def test_without_samples_only_greedy_answers_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with bench_at(tmp_path / "run", 0, monkeypatch) as bench:
        report = bench.held_out.start_and_tuned("test")
        assert bench.asked == [GREEDY, GREEDY]
    assert "pass_at_k" not in report["start"] and "pass_at_k" not in report["tuned"]


def test_the_report_comes_from_what_is_kept(bench: Bench) -> None:
    report = bench.held_out.start_and_tuned("test")
    assert bench.asked == [GREEDY, SAMPLED] * 2
    start, tuned = bench.kept("start-test.json"), bench.kept("tuned-test.json")
    for side, kept in ((report["start"], start), (report["tuned"], tuned)):
        assert side["score"] == sum(kept["readings"]["score"]) / 3
        assert side["pass_at_k"]["1"] == pytest.approx(sum(map(sum, kept["sampled_P_G"])) / 12)
        assert list(side["pass_at_k"]) == ["1", "2", "4"]
    assert start["completions"] != tuned["completions"]
    assert (report["n"], report["split"]) == (3, "test")


def test_an_adapter_is_tested_once(bench: Bench) -> None:
    first = bench.held_out.start_and_tuned("test")
    completions = bench.kept("tuned-test.json")["completions"]
    bench.asked.clear()
    # After a crash, with a metric that would now say something else.
    bench.metric.broken = True
    assert bench.held_out.start_and_tuned("test") == first
    assert bench.asked == []
    # Another adapter is another question; the start stays what it was.
    bench.metric.broken = False
    bench.keep_adapter(2)
    second = bench.held_out.start_and_tuned("test")
    assert bench.asked == [GREEDY, SAMPLED]
    assert second["start"] == first["start"]
    assert bench.kept("tuned-test.json")["completions"] != completions


def test_a_tuned_file_that_does_not_name_its_adapter_is_measured_again(bench: Bench) -> None:
    bench.held_out.start_and_tuned("test")
    path = bench.run_dir.evaluations_dir / "tuned-test.json"
    path.write_text(json.dumps({k: v for k, v in bench.kept("tuned-test.json").items() if k != "adapter_sha256"}))
    bench.asked.clear()
    bench.held_out.start_and_tuned("test")
    assert bench.asked == [GREEDY, SAMPLED]
    assert len(bench.kept("tuned-test.json")["adapter_sha256"]) == 64


def test_the_policy_has_the_kept_adapter_afterwards(bench: Bench) -> None:
    before = bench.policy.adapter_state()
    shake_adapter(bench.policy, seed=5)
    bench.held_out.start_and_tuned("test")
    assert all((tensor == bench.policy.adapter_state()[name]).all() for name, tensor in before.items())


def test_a_metric_that_fails_on_everything_is_no_score_of_0(bench: Bench) -> None:
    bench.metric.broken = True
    with pytest.raises(RewardFailed, match=r"failed on every one of 3 test answers of start, .* resume .*run` goes on"):
        bench.held_out.start_and_tuned("test")
    assert list(bench.run_dir.evaluations_dir.iterdir()) == []  # so the next attempt asks again
    bench.metric.broken = False
    bench.held_out.start("test")
    bench.metric.broken = True
    with pytest.raises(RewardFailed, match="every one of 3 test answers of tuned"):
        bench.held_out.start_and_tuned("test")
    assert [path.name for path in bench.run_dir.evaluations_dir.iterdir()] == ["start-test.json"]
    # While training, a dev evaluation that says nothing ends nothing: it says so.
    assert bench.held_out.evaluate("dev").is_unscored


def test_a_run_reports_pass_at_k_and_is_the_same_when_it_goes_on(tmp_path: Path) -> None:
    config = tiny_run("run.steps=1", "gate.prompts=0", "data.test_size=3", "eval.samples=3", **IN_MEMORY)
    run_dir, report = lifecycle.start_run(config, tmp_path / "run", functions=FUNCTIONS)
    assert list(report["start"]["pass_at_k"]) == list(report["tuned"]["pass_at_k"]) == ["1", "2", "3"]
    assert {"kind", "changed", "examples", "proven"} <= report.keys()
    stored = run_dir.read_report()
    assert stored is not None and stored["tuned"] == report["tuned"]
    run_dir.report_path.unlink()  # as after a crash before it was written
    again = lifecycle.evaluate_run(run_dir.path, functions=FUNCTIONS)
    assert again == {name: report[name] for name in again}
