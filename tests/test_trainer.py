"""The loop: how long it is, what it says and keeps, and how it ends; what a stop may not change is in test_resume."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lowmem_grpo import faults, lifecycle
from lowmem_grpo.checkpoint import load, read_adapter, write_adapter
from lowmem_grpo.errors import (
    DataError,
    NonFiniteFailed,
    RewardFailed,
    RunDirError,
    RunFailed,
    StopRequested,
    UserError,
)
from lowmem_grpo.evaluation import Evaluation
from lowmem_grpo.held_out import HeldOut
from lowmem_grpo.lifecycle import evaluate_run, resume_run, start_run
from lowmem_grpo.rollout import SlotEngine
from lowmem_grpo.rundir import RunDir
from lowmem_grpo.types import Group, Problem, SamplingParams
from tests.runs import (
    FUNCTIONS,
    IN_MEMORY,
    assert_same,
    during_step,
    model_folder,
    outcome,
    tiny_run,
    watching_trainers,
)
from tests.tiny import save_tiny


def train(run_dir: Path, *overrides: str, **sections: Any) -> tuple[RunDir, dict[str, Any]]:
    return start_run(tiny_run(*overrides, **{**IN_MEMORY, **sections}), run_dir, functions=FUNCTIONS)


def rows_file(path: Path, count: int, **columns: Any) -> list[str]:
    """Write a data set of short prompts; the overrides that use it."""
    rows = [{"prompt": f"q{i}", "answer": str(i), **columns} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [f"data.source={path}", "data.args={}"]


def events(run_dir: RunDir, *kinds: str) -> list[tuple[int, str]]:
    return [(row["step"], row["message"]) for row in run_dir.read("events") if row["kind"] in kinds]


# --------------------------------------------------------------------------------------------- one update


def test_an_update_moves_every_part_of_the_adapter_and_reports_it(tmp_path: Path) -> None:
    with watching_trainers() as trainers:
        # Answers of one length, so that their advantages cancel in the loss.
        endless = f"model.name={model_folder(ends=False)}"
        run_dir, _ = train(tmp_path / "run", "run.steps=1", "data.dev_size=2", endless)
    policy, (row,) = trainers[0].policy, list(run_dir.read("metrics"))
    moved = {name: tensor for name, tensor in policy.adapter_state().items() if "lora_B" in name}
    assert len(moved) == 2 * 7 and all(tensor.abs().max() > 1e-3 for tensor in moved.values())
    assert row["groups/zero_variance"] < 1
    assert abs(row["optim/loss"]) < 1e-6 < row["optim/grad_norm"]
    assert row["policy/sampler_gap"] <= 1e-4
    assert set(row) == {
        "step",
        *("reward/mean", "reward/within_group_std", "reward/letters", "reward/missing", "reward/failures"),
        *("groups/zero_variance", "groups/skew"),
        *("completion/length_mean", "completion/length_max", "completion/truncated", "completion/unique"),
        *("policy/entropy", "policy/sampler_gap", "policy/clip_low", "policy/clip_high"),
        *("optim/loss", "optim/grad_norm", "optim/lr", "optim/skipped"),
        *("time/rollout_s", "time/reward_s", "time/update_s", "time/step_s", "speed/rollout_tokens_per_s"),
        *("memory/rollout_peak_bytes", "memory/update_peak_bytes", "memory/planned_bytes"),
        *("eval/score", "eval/correct", "eval/format"),
    }
    assert row["time/step_s"] == pytest.approx(row["time/rollout_s"] + row["time/reward_s"] + row["time/update_s"])


def test_rewards_and_advantages_of_a_step_are_those_of_its_answers(tmp_path: Path) -> None:
    run_dir, _ = train(tmp_path / "run", "run.steps=2")
    answers, metrics = list(run_dir.read("completions")), list(run_dir.read("metrics"))
    for step in (1, 2):
        groups = [[r for r in answers if (r["step"], r["group"]) == (step, number)] for number in (0, 1)]
        assert [len(group) for group in groups] == [4, 4]
        for group in groups:
            rewards = [len(re.findall("[0-9A-Za-z]", row["completion"])) for row in group]
            assert [row["reward"] for row in group] == rewards
            assert [row["advantage"] for row in group] == pytest.approx([r - sum(rewards) / 4 for r in rewards])
        assert metrics[step - 1]["reward/mean"] == pytest.approx(sum(r["reward"] for g in groups for r in g) / 8)


def test_equal_prompts_in_one_update_are_two_groups(tmp_path: Path) -> None:
    data = tmp_path / "twins.jsonl"
    data.write_text('{"prompt": "same", "answer": "1"}\n{"prompt": "same", "answer": "1"}\n')
    run_dir, _ = train(tmp_path / "run", f"data.source={data}", "data.args={}", "run.steps=1")
    answers = list(run_dir.read("completions"))
    assert Counter((row["group"], row["problem_id"]) for row in answers) in (
        {(0, "train-1"): 4, (1, "train-2"): 4},
        {(0, "train-2"): 4, (1, "train-1"): 4},
    )
    texts = [[row["completion"] for row in answers if row["group"] == number] for number in (0, 1)]
    assert texts[0] != texts[1]


def test_a_run_from_a_trained_adapter_starts_at_kl_zero(tmp_path: Path) -> None:
    first, _ = train(tmp_path / "first", "run.steps=3")
    run_dir, report = train(
        tmp_path / "second",
        *(f"lora.continue_from={first.adapter_dir}", "algorithm.kl_coef=0.1", "run.steps=2", "data.test_size=4"),
    )
    assert [row["policy/kl"] > 0 for row in run_dir.read("metrics")] == [False, True]
    assert next(run_dir.read("metrics"))["policy/kl"] == 0.0
    # The start is what the run began from: the first run's adapter, not the bare model.
    _, bare = train(tmp_path / "bare", "run.steps=1", "data.test_size=4")
    starts = [
        json.loads((r.evaluations_dir / "start-test.json").read_text()) for r in (run_dir, RunDir(tmp_path / "bare"))
    ]
    assert starts[0]["problem_ids"] == starts[1]["problem_ids"]
    assert starts[0]["completions"] != starts[1]["completions"]
    assert report["n"] == bare["n"] == 4


# --------------------------------------------------------------------------------------------- how long a run is


def test_two_epochs_of_sixteen_problems_are_eight_steps_and_the_schedule_ends_there(tmp_path: Path) -> None:
    overrides = [*rows_file(tmp_path / "data.jsonl", 16), "run.steps=null", "run.epochs=2", "optim.schedule=linear"]
    run_dir, report = train(tmp_path / "run", *overrides, "rollout.prompts_per_step=4", "rollout.group_size=2")
    metrics = list(run_dir.read("metrics"))
    assert [row["optim/lr"] for row in metrics] == pytest.approx([1e-2 * (8 - i) / 8 for i in range(8)])
    assert (report["steps"], run_dir.status().steps) == (8, 8)
    for epoch in (range(1, 5), range(5, 9)):
        seen = Counter(row["problem_id"] for row in run_dir.read("completions") if row["step"] in epoch)
        assert seen == {f"train-{i}": 2 for i in range(1, 17)}


def test_warm_up_counts_steps_however_often_each_is_used(tmp_path: Path) -> None:
    overrides = ["run.steps=3", "optim.warmup_steps=2", "algorithm.updates_per_rollout=2"]
    run_dir, _ = train(tmp_path / "run", *overrides)
    # Four of six updates rise by a quarter each; the metrics have the second update of each step.
    assert [row["optim/lr"] for row in run_dir.read("metrics")] == pytest.approx([0.5e-2, 1e-2, 1e-2])


def test_five_problems_three_a_step_are_two_steps_an_epoch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [*rows_file(tmp_path / "data.jsonl", 5), "run.steps=null", "run.epochs=1"]
    run_dir, _ = train(tmp_path / "run", *overrides, "rollout.prompts_per_step=3", "rollout.group_size=2")
    seen = [(row["step"], row["problem_id"]) for row in run_dir.read("completions")]
    assert Counter(step for step, _ in seen) == {1: 3 * 2, 2: 2 * 2}
    assert Counter(problem for _, problem in seen) == {f"train-{i}": 2 for i in range(1, 6)}
    line = "5 training problems, 3 a step: 2 steps an epoch, the last of them with 2\n"
    assert line in capsys.readouterr().out
    assert line in run_dir.log_path.read_text()


def test_fewer_problems_than_a_step_needs_are_refused(tmp_path: Path) -> None:
    overrides = rows_file(tmp_path / "data.jsonl", 2)
    with pytest.raises(DataError, match=r"^2 training problems are fewer than rollout\.prompts_per_step=3"):
        train(tmp_path / "run", *overrides, "rollout.prompts_per_step=3")


# --------------------------------------------------------------------------------------------- what it says


def test_groups_without_spread_teach_nothing_and_are_said_once(tmp_path: Path) -> None:
    with watching_trainers() as trainers:
        run_dir, report = train(tmp_path / "run", "run.steps=3", rewards=["number"])
    metrics = list(run_dir.read("metrics"))
    for row in metrics:
        assert (row["groups/zero_variance"], row["optim/loss"], row["optim/grad_norm"]) == (1.0, 0.0, 0.0)
    assert [step for step, _ in events(run_dir, "dead groups")] == [1]
    assert [finding["kind"] for finding in report["findings"]] == ["dead groups"]
    assert all(not t.any() for name, t in trainers[0].policy.adapter_state().items() if "lora_B" in name)
    assert trainers[0].updater.optimizer.state == {}


def test_answers_that_are_all_cut_give_one_finding_and_no_nan(tmp_path: Path) -> None:
    endless = f"model.name={model_folder(ends=False)}"
    run_dir, report = train(tmp_path / "run", "run.steps=3", endless, rewards=["number"])
    metrics = list(run_dir.read("metrics"))
    assert [row["completion/truncated"] for row in metrics] == [1.0, 1.0, 1.0]
    assert [(row["optim/loss"], row["optim/grad_norm"]) for row in metrics] == [(0.0, 0.0)] * 3
    assert all(math.isfinite(value) for row in metrics for value in row.values())
    assert events(run_dir, "truncated") == [
        (1, "Every answer was cut at 6 tokens before it ended; raise rollout.max_new_tokens.")
    ]
    assert [finding["kind"] for finding in report["findings"]] == ["truncated", "dead groups"]


def test_cut_answers_with_spread_are_still_learnt_from(tmp_path: Path) -> None:
    run_dir, _ = train(tmp_path / "run", "run.steps=1", f"model.name={model_folder(ends=False)}")
    (row,) = run_dir.read("metrics")
    assert row["completion/truncated"] == 1.0
    assert 0 < row["optim/grad_norm"] < math.inf


def test_warnings_reach_the_console_and_are_told_once(tmp_path: Path) -> None:
    overrides = [*rows_file(tmp_path / "data.jsonl", 4, completions="x"), "run.sinks=[jsonl,console]"]
    run_dir, _ = train(tmp_path / "run", *overrides, "run.steps=1", "data.test_size=1")
    resume_run(run_dir.path, ["run.steps=2"], functions=FUNCTIONS)
    log = run_dir.log_path.read_text()
    assert "output failed" not in log
    assert log.count("reward 'letters' is a function of this process") == 1
    assert re.search(r"^step 1/1 ", log, re.M) and re.search(r"^step 2/2 ", log, re.M)
    told = [message for _, message in events(run_dir, "warning")]
    assert len(told) == len(set(told)) == 2
    assert "the column completions is not passed to rewards" in told[1]


def test_a_run_without_test_rows_ends_on_the_console_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir, _ = train(tmp_path / "run", "run.steps=1", "run.sinks=[jsonl,console]")
    printed = capsys.readouterr().out
    assert "output failed" not in printed
    assert f"adapter: {run_dir.adapter_dir}\n" in printed


# --------------------------------------------------------------------------------------------- requests


def test_requests_are_heeded_before_the_next_step(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")

    def ask() -> None:
        run_dir.request("checkpoint")
        run_dir.request("eval")

    with during_step(2, ask):
        train(run_dir.path, "run.steps=4", "run.checkpoint_every=4", "data.dev_size=3")
    assert sorted(p.name for p in run_dir.checkpoints_dir.iterdir()) == ["step-000002", "step-000004"]
    assert not (run_dir.requested("checkpoint") or run_dir.requested("eval"))
    assert events(run_dir, "checkpoint", "evaluation") == [
        (0, "dev score 0.000 before training"),
        (2, "checkpoint of step 2"),
        (2, "dev score 0.000 after step 2"),
        (4, "checkpoint of step 4"),
    ]


# --------------------------------------------------------------------------------------------- evaluation


class Calls:
    """What the engine was asked for: (split, adapter on) of evaluations, the step of rollouts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[Any] = []
        generate = SlotEngine.generate

        def noting(
            engine: SlotEngine, problems: Sequence[Problem], size: int, sampling: SamplingParams, **more: Any
        ) -> list[Group]:
            splits = {problem.id.partition("-")[0] for problem in problems}
            layer = next(m for m in engine.policy.model.modules() if hasattr(m, "lora_A"))
            tuned = not layer.disable_adapters
            self.made.append(more["step"] if sampling.temperature else (*splits, "tuned" if tuned else "start"))
            return generate(engine, problems, size, sampling, **more)

        monkeypatch.setattr(SlotEngine, "generate", noting)


def test_the_start_is_evaluated_once_and_the_test_split_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch)
    overrides = ["run.steps=3", "data.dev_size=3", "data.test_size=2", "eval.every=2"]
    run_dir, report = train(tmp_path / "run", *overrides)
    dev, test = ("dev", "tuned"), ("test", "tuned")
    assert calls.made == [("dev", "start"), 1, 2, dev, 3, dev, ("test", "start"), test]
    assert (report["n"], report["split"]) == (2, "test")
    calls.made.clear()
    resume_run(run_dir.path, ["run.steps=4"], functions=FUNCTIONS)
    assert calls.made == [4, dev, test]
    assert [("eval/score" in row) for row in run_dir.read("metrics")] == [False, True, True, True]


def test_a_cached_start_is_taken_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir, report = train(tmp_path / "run", "run.steps=1", "data.test_size=2")
    path = run_dir.evaluations_dir / "start-test.json"
    stored = json.loads(path.read_text())
    assert report["start"]["score"] == sum(stored["readings"]["score"]) / 2
    path.write_text(json.dumps({**stored, "readings": {"score": [1.0, 0.5]}}))
    _, again = resume_run(run_dir.path, functions=FUNCTIONS)
    assert again["start"]["score"] == 0.75
    assert evaluate_run(run_dir.path, functions=FUNCTIONS) == again


def scripted(monkeypatch: pytest.MonkeyPatch, dev_scores: Sequence[float]) -> list[dict[str, torch.Tensor]]:
    """Let the dev evaluations (the start first) give `dev_scores`; the adapters that were evaluated on test."""
    scores, tested = iter(dev_scores), []

    def evaluate(held_out: HeldOut, split: str) -> Evaluation:
        if split == "test":
            tested.append(held_out._parts.policy.adapter_state())
        score = next(scores) if split == "dev" else 0.5
        return Evaluation(("a",), ("",), ("end",), (1,), {"score": (score,)}, 0)

    monkeypatch.setattr(HeldOut, "evaluate", evaluate)
    return tested


def same_tensors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("dev_scores", "best"),
    [
        pytest.param([0.1, 0.2, 0.9, 0.5], 2, id="the best is in the middle"),
        pytest.param([0.1, 0.7, 0.3, 0.7], 3, id="of equals the last"),
        pytest.param([0.9, 0.3, 0.2, 0.1], 0, id="falling: the start is the best"),
    ],
)
def test_the_adapter_is_the_best_by_dev_score(
    dev_scores: list[float], best: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tested = scripted(monkeypatch, dev_scores)
    run_dir, report = train(
        tmp_path / "run",
        *("run.steps=3", "run.checkpoint_every=1", "run.keep_checkpoints=3", "eval.every=1"),
        *("data.dev_size=2", "data.test_size=2"),
    )
    adapters = {step: read_adapter(run_dir.checkpoints_dir / f"step-00000{step}" / "adapter")[0] for step in (1, 2, 3)}
    chosen, _ = read_adapter(run_dir.adapter_dir)
    untrained = all(not tensor.any() for name, tensor in chosen.items() if "lora_B" in name)
    assert ([0] if untrained else [step for step in adapters if same_tensors(adapters[step], chosen)]) == [best]
    assert (report["best_step"], report["dev_score"]) == (best, dev_scores[best])
    assert [row["eval/score"] for row in run_dir.read("metrics")] == dev_scores[1:]
    # The first test evaluation is the start, with the adapter off; both have the chosen adapter loaded.
    assert len(tested) == 2 and same_tensors(tested[1], chosen)


def test_no_new_best_ends_the_run_early_and_patience_0_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, [0.5, 0.6, 0.6, 0.4, 0.9, 0.1])
    patience = ("run.steps=5", "run.checkpoint_every=5", "eval.every=1", "eval.patience=2", "data.dev_size=2")
    run_dir, report = train(tmp_path / "run", *patience)
    assert (report["steps"], report["stopped_early"], report["best_step"], report["dev_score"]) == (3, True, 2, 0.6)
    assert events(run_dir, "early stop") == [
        (3, "no better dev score than 0.600 of step 2 in 2 evaluations: the run ends here")
    ]
    assert [path.name for path in run_dir.checkpoints_dir.iterdir()] == ["step-000003"]
    assert run_dir.status().state == "finished"

    _, again = resume_run(run_dir.path, functions=FUNCTIONS)
    assert (again["steps"], again["stopped_early"]) == (3, True)
    _, longer = resume_run(run_dir.path, ["eval.patience=0"], functions=FUNCTIONS)
    assert (longer["steps"], longer["stopped_early"], longer["best_step"], longer["dev_score"]) == (5, False, 4, 0.9)


def test_the_dev_problems_are_scored_ten_times_unless_the_config_says_otherwise(tmp_path: Path) -> None:
    run_dir, _ = train(tmp_path / "run", "run.steps=21", "data.dev_size=2", "rollout.max_new_tokens=2")
    assert [row["step"] for row in run_dir.read("metrics") if "eval/score" in row] == [*range(2, 21, 2), 21]
    ends, _ = train(tmp_path / "ends", "run.steps=4", "data.dev_size=2", "eval.every=0")
    assert [row["step"] for row in ends.read("metrics") if "eval/score" in row] == [4]


def test_a_checkpoint_holds_the_best_adapter_of_an_earlier_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, [0.1, 0.9, 0.5, 0.7, 0.8])
    run_dir, _ = train(
        tmp_path / "run",
        "run.steps=3",
        "run.checkpoint_every=1",
        "run.keep_checkpoints=3",
        "eval.every=1",
        "data.dev_size=2",
    )
    first, second = (load(run_dir.checkpoints_dir / f"step-00000{step}") for step in (1, 2))
    assert first.best is None and second.best is not None and same_tensors(dict(second.best), dict(first.adapter))
    # A run that was killed after a later best had been written, and goes back to the checkpoint of step 2.
    write_adapter(run_dir.adapter_dir, second.adapter, second.adapter_config)
    shutil.rmtree(run_dir.checkpoints_dir / "step-000003")
    _, report = resume_run(run_dir.path, functions=FUNCTIONS)
    assert report["best_step"] == 1 and same_tensors(read_adapter(run_dir.adapter_dir)[0], dict(first.adapter))
    (run_dir.checkpoints_dir / "step-000002" / "best" / "adapter_model.safetensors").unlink()
    with pytest.raises(RunDirError, match=r"damaged \(best/adapter_model.safetensors is missing\)"):
        load(run_dir.checkpoints_dir / "step-000002")


def test_a_picture_is_drawn_at_the_end(tmp_path: Path) -> None:
    run_dir, _ = train(tmp_path / "run", "run.steps=2", "data.test_size=3", "run.sinks=[jsonl, picture]")
    assert run_dir.picture_path.read_bytes().startswith(b"\x89PNG")


def test_without_a_dev_set_the_last_adapter_is_kept(tmp_path: Path) -> None:
    run_dir, report = train(tmp_path / "run", "run.steps=2", "run.checkpoint_every=1")
    last, _ = read_adapter(run_dir.checkpoints_dir / "step-000002" / "adapter")
    first, _ = read_adapter(run_dir.checkpoints_dir / "step-000001" / "adapter")
    chosen, _ = read_adapter(run_dir.adapter_dir)
    assert same_tensors(chosen, last) and not same_tensors(chosen, first)
    assert (report["best_step"], report["dev_score"], "tuned" in report) == (None, None, False)


# --------------------------------------------------------------------------------------------- how it ends


def test_a_reward_that_always_fails_ends_the_run_with_its_traceback(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def broken(completions):\n    return [1 / 0 for _ in completions]\n")
    with pytest.raises(RewardFailed, match=r"^reward 'broken' failed on every one of 8 answers:") as failed:
        train(tmp_path / "run", rewards=[f"{file}:broken"])
    assert failed.value.exit_code == 4
    run_dir = RunDir.open(tmp_path / "run")
    status = run_dir.status()
    assert (status.state, status.step) == ("failed", 0)
    assert status.message == "reward 'broken' failed on every one of 8 answers:"
    log = run_dir.log_path.read_text()
    assert f'File "{file}", line 2, in broken' in log
    assert "ZeroDivisionError: division by zero" in log


def test_rows_that_only_the_tokenizer_refuses_leave_no_run_folder(tmp_path: Path) -> None:
    data = tmp_path / "rendered.jsonl"
    data.write_text('{"prompt": "<|im_start|>user\\nhello", "answer": "1"}\n' * 3)
    with pytest.raises(DataError, match=r"rendered.jsonl line 1"):
        train(tmp_path / "run", f"data.source={data}", "data.args={}", "run.steps=1")
    assert not (tmp_path / "run").exists()


def test_a_reward_that_fails_on_one_answer_costs_that_answer_and_is_counted(tmp_path: Path) -> None:
    def first_fails(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        scores = [float(len(ids) + sum(ids) % 7) for ids in completion_ids]
        calls.append(len(scores))
        if len(scores) > 1 or calls.count(1) == 1:
            raise ValueError("not this one")
        return scores

    calls: list[int] = []
    run_dir, _ = start_run(
        tiny_run("run.steps=1", rewards=["first_fails"]), tmp_path / "run", functions={"first_fails": first_fails}
    )
    answers, (row,) = list(run_dir.read("completions")), list(run_dir.read("metrics"))
    assert calls == [4, 1, 1, 1, 1] * 2  # a call for each group as it ends, then for each of its answers
    assert (row["reward/failures"], row["reward/missing"]) == (1.0, 1 / 8)
    [failed] = [answer for answer in answers if answer["reward"] is None]
    assert (failed["error"], failed["advantage"]) == ("first_fails: ValueError: not this one", 0.0)


def test_steps_without_a_finite_gradient_are_counted_over_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: torch.tensor(math.nan))
    with watching_trainers() as trainers:
        run_dir, _ = train(tmp_path / "run", "run.steps=6")
    assert all(not t.any() for name, t in trainers[0].policy.adapter_state().items() if "lora_B" in name)
    assert [(row["optim/skipped"], row["optim/grad_norm"]) for row in run_dir.read("metrics")] == [(1.0, None)] * 6
    assert [message for _, message in events(run_dir, "skipped step")] == [
        f"step {step} had a non-finite gradient and was left out" for step in range(1, 7)
    ]
    with pytest.raises(NonFiniteFailed, match=r"^10 optimizer steps in a row had non-finite gradients"):
        resume_run(run_dir.path, ["run.steps=20"], functions=FUNCTIONS)
    assert (run_dir.status().state, run_dir.status().step) == ("failed", 9)


def test_a_reward_that_has_worked_before_may_fail_throughout_a_step_after_a_stop(tmp_path: Path) -> None:
    def fails_in_the_third_step(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        if calls >= 4:  # two groups a step, after which each answer is tried alone
            raise ValueError("the service is away")
        return [float(len(ids) + sum(ids) % 7) for ids in completion_ids]

    def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        nonlocal calls
        try:
            return fails_in_the_third_step(completion_ids)
        finally:
            calls += len(completion_ids) > 1

    calls, functions = 0, {"reward": reward}
    run_dir, _ = start_run(tiny_run("run.steps=2", rewards=["reward"]), tmp_path / "run", functions=functions)
    resume_run(run_dir.path, ["run.steps=3"], functions=functions)
    assert [row["reward/failures"] for row in run_dir.read("metrics")] == [0.0, 0.0, 8.0]


@pytest.mark.parametrize("full_from", ["write optimizer.safetensors", "begin adapter", "move in step-000004"])
def test_a_disk_that_is_full_ends_the_run_and_leaves_the_older_checkpoint(
    full_from: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ["run.steps=4", "run.checkpoint_every=2"]
    train(tmp_path / "straight", *overrides)
    run_dir, full = RunDir(tmp_path / "run"), False

    def reached(name: str) -> None:
        nonlocal full
        # From there on nothing can be written, the status included.
        full = full or (name == full_from and (run_dir.checkpoints_dir / "step-000002").exists())
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.raises(RunFailed) as failed:
        patch.setattr(faults, "on_fault_point", reached)
        train(run_dir.path, *overrides)
    assert re.fullmatch(
        r"The disk is full: \S+ could not be written; the last checkpoint is intact, "
        r"so free some space and continue with `lowmem-grpo resume`\.",
        str(failed.value),
    )
    resume_run(run_dir.path, functions=FUNCTIONS)
    assert_same(outcome(run_dir.path), outcome(tmp_path / "straight"))


def test_a_disk_that_is_full_for_a_moment_is_named_in_the_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reached(name: str) -> None:
        if name == "write state.json":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(faults, "on_fault_point", reached)
    with pytest.raises(RunFailed):
        train(tmp_path / "run", "run.steps=1")
    status = RunDir(tmp_path / "run").status()
    assert status.state == "failed"
    assert status.message.startswith("The disk is full: ")
    assert status.message.endswith("continue with `lowmem-grpo resume`.")


def test_a_stopped_run_can_be_evaluated_and_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    overrides = ["run.steps=2", "run.checkpoint_every=1", "data.test_size=2"]
    train(tmp_path / "straight", *overrides)
    run_dir = RunDir(tmp_path / "run")
    with during_step(1, lambda: run_dir.request("stop")), pytest.raises(StopRequested):
        train(run_dir.path, *overrides)
    report = evaluate_run(run_dir.path, functions=FUNCTIONS)
    assert (report["n"], report["split"]) == (2, "test")
    assert run_dir.status().state == "stopped"
    resume_run(run_dir.path, functions=FUNCTIONS)
    assert_same(outcome(run_dir.path), outcome(tmp_path / "straight"))


def test_what_cannot_be_evaluated_yet(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    with during_step(1, lambda: run_dir.request("stop")), pytest.raises(StopRequested):
        train(run_dir.path, "run.steps=2")
    with pytest.raises(RunDirError, match=r"has no test rows: set data\.test_size"):
        evaluate_run(run_dir.path, functions=FUNCTIONS)
    shutil.rmtree(run_dir.adapter_dir)
    with pytest.raises(RunDirError, match="has no adapter yet"):
        evaluate_run(run_dir.path, functions=FUNCTIONS)


# --------------------------------------------------------------------------------------------- wrong inputs


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """A folder with files that are wrong in various ways."""
    files = {
        "good.py": "def score(completions, answer):\n    return [0.0 for _ in completions]\n",
        "syntax.py": "def score(completions:\n",
        "wants.py": "def score(completions, solution):\n    return [0.0 for _ in completions]\n",
        "good.jsonl": '{"prompt": "1+1", "answer": "2"}\n',
        "torn.jsonl": '{"prompt": "1+1", "answer": "2"}\n{"prompt": \n',
        "empty.jsonl": "",
        "other.jsonl": '{"question": "1+1", "answer": "2"}\n',
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "adapter").mkdir()
    gpt2 = save_tiny(tmp_path / "gpt2") / "config.json"
    gpt2.write_text(gpt2.read_text().replace('"llama"', '"gpt2"'))
    return tmp_path


REFUSED = {
    "unknown reward": (["rewards=[numbr]"], "unknown reward 'numbr': did you mean 'number'?"),
    "wrong reward option": (["rewards.0.name=number", "rewards.0.args={tolerence: 1}"], "tolerence"),
    "missing reward file": (["rewards=[{in}/god.py:score]"], "good.py"),
    "missing reward function": (["rewards=[{in}/good.py:scor]"], "did you mean 'score'?"),
    "reward that is no Python": (["rewards=[{in}/syntax.py:score]"], "SyntaxError"),
    "column a reward wants": (["rewards=[{in}/wants.py:score]"], "solution"),
    "unknown metric": (["eval.metric=numbers"], "unknown reward 'numbers': did you mean 'number'?"),
    "missing data file": (["data.source={in}/god.jsonl"], "god.jsonl"),
    "misspelt task": (["data.source=adition"], "did you mean data.source=addition?"),
    "wrong task option": (["data.args={lo: 1}"], "lo"),
    "empty data file": (["data.source={in}/empty.jsonl", "data.args={}"], "has no rows"),
    "torn data file": (["data.source={in}/torn.jsonl", "data.args={}"], "line 2"),
    "missing prompt column": (["data.source={in}/other.jsonl", "data.args={}"], "question"),
    "unknown model": (["model.name=smollm"], "There is no model called 'smollm'"),
    "missing model folder": (["model.name={in}/gpt"], "did you mean {in}/gpt2?"),
    "unsupported family": (
        ["model.name={in}/gpt2"],
        "is of the family 'gpt2'; supported are gemma2, gemma3_text, llama",
    ),
    "folder without an adapter": (["lora.continue_from={in}/adapter"], "has no adapter_config.json"),
    "too small a context": (["data.max_prompt_tokens=510"], "exceed the context of"),
    "unknown advantage option": (["algorithm.advantage_args={skale: true}"], "skale"),
    "flash-attn without a GPU": (
        ["model.attention=flash_attention_2"],
        "model.attention is flash_attention_2, which needs a GPU and 16 bits, not float32",
    ),
    "GPU that is not there": (["device=cuda:3"], "cuda:3"),
}


@pytest.mark.parametrize(("overrides", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_wrong_is_refused_before_a_model_loads_and_nothing_is_written(
    overrides: list[str], words: str, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "assemble", lambda _: pytest.fail("a model was loaded"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    given = [override.replace("{in}", str(inputs)) for override in overrides]
    with pytest.raises(UserError) as refused:
        train(inputs / "run", *given)
    assert refused.value.exit_code == 2
    assert words.replace("{in}", str(inputs)) in str(refused.value)
    assert not (inputs / "run").exists()
