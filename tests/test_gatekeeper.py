"""The gate and the first-step checks in whole runs: when they ask, what they write, how they end a run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lowmem_grpo import lifecycle, trainer
from lowmem_grpo.assembly import Parts, Preflight, assemble
from lowmem_grpo.errors import GateStopped, SelfCheckFailed
from lowmem_grpo.gatekeeper import ROUND_PROMPTS
from lowmem_grpo.lifecycle import baseline, resume_run, start_run
from lowmem_grpo.model import Policy
from lowmem_grpo.rollout import SlotEngine
from lowmem_grpo.rundir import RunDir
from tests.runs import FUNCTIONS, IN_MEMORY, assert_same, outcome, tiny_run

REWARDS: dict[str, Any] = {
    **FUNCTIONS,
    "constant": lambda completions, **_: [1.0] * len(completions),
    "by_prompt": lambda prompts, completions, answer, **_: [float(int(gold) % 2) for gold in answer],
    "common": lambda completions, **_: [float(len(text) > 0) for text in completions],
    "graded": lambda completions, **_: [float(index) for index in range(len(completions))],
}


def run(run_dir: Path, *overrides: str, reward: str = "letters", force: bool = False) -> tuple[RunDir, dict[str, Any]]:
    loaded = tiny_run("gate.prompts=32", "run.steps=2", *overrides, **{**IN_MEMORY, "rewards": [reward]})
    return start_run(loaded, run_dir, functions=REWARDS, force=force)


@contextlib.contextmanager
def counting_steps() -> Iterator[list[int]]:
    """The `step` of every call of the sampler inside the block."""
    steps: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        generate = SlotEngine.generate

        def counted(engine: SlotEngine, *args: Any, step: int, **options: Any) -> Any:
            steps.append(step)
            return generate(engine, *args, step=step, **options)

        patch.setattr(SlotEngine, "generate", counted)
        yield steps


# --------------------------------------------------------------------------------------------- the gate


def test_a_run_asks_the_gate_first_and_keeps_what_it_said(tmp_path: Path) -> None:
    with counting_steps() as steps:
        run_dir, report = run(tmp_path / "run")
    assert steps[0] == -1 and steps[-2:] == [1, 2]
    said = json.loads(run_dir.gate_path.read_bytes())
    assert said["verdict"] in ("go", "caution") and said["forced"] is False
    assert (said["prompts"] % ROUND_PROMPTS, said["group_size"]) == (0, 4)
    first = next(row for row in run_dir.read("events") if row["kind"] not in ("warning", "plan", "rehearsal"))
    assert (first["kind"], first["step"], first["message"]) == ("gate", 0, said["sentence"])
    seen = [row["groups/zero_variance"] for row in run_dir.read("metrics")]
    assert report["gate"] == {
        "verdict": said["verdict"],
        "dead_groups_forecast": next(f["share"] for f in said["forecasts"] if f["group_size"] == 4),
        "dead_groups_seen": pytest.approx(sum(seen) / len(seen)),
    }


def test_the_gate_does_not_change_what_a_run_learns(tmp_path: Path) -> None:
    asked, _ = run(tmp_path / "asked", "gate.prompts=16")
    unasked, _ = run(tmp_path / "unasked", "gate.prompts=0")
    assert not unasked.gate_path.exists()
    assert outcome(asked.path).adapter == outcome(unasked.path).adapter
    assert outcome(asked.path).metrics == outcome(unasked.path).metrics


@pytest.mark.parametrize(("reward", "kind"), [("constant", "constant reward"), ("by_prompt", "no spread")])
def test_a_reward_that_never_varies_stops_before_the_first_step(tmp_path: Path, reward: str, kind: str) -> None:
    with counting_steps() as steps, pytest.raises(GateStopped, match=r"--force") as stopped:
        run(tmp_path / "run", reward=reward)
    assert steps == [-1, -2]  # it has asked all it may before it says no
    assert stopped.value.exit_code == 5
    assert not (tmp_path / "run").exists()
    report = baseline(tiny_run("gate.prompts=16", rewards=[reward]), functions=REWARDS)
    assert (report.verdict, report.findings[0].kind) == ("stop", kind)
    assert str(stopped.value).startswith(report.findings[0].cause[:1].upper() + report.findings[0].cause[1:])


def test_force_goes_on(tmp_path: Path) -> None:
    run_dir, report = run(tmp_path / "run", reward="constant", force=True)
    said = json.loads(run_dir.gate_path.read_bytes())
    assert (said["verdict"], said["forced"]) == ("stop", True)
    assert report["gate"]["dead_groups_seen"] == 1.0
    assert "constant reward" in [row["kind"] for row in report["findings"]]


def test_the_gate_samples_no_more_than_it_needs(tmp_path: Path) -> None:
    graded = baseline(tiny_run("gate.prompts=48", rewards=["graded"]), functions=REWARDS)
    assert (graded.prompts, graded.dead_share) == (ROUND_PROMPTS, 0.0)  # all alive: nothing to wait for
    half = baseline(tiny_run("gate.prompts=40", rewards=["letters"]), functions=REWARDS)
    low, high = next(forecast.interval for forecast in half.forecasts if forecast.group_size == 4)
    # It ends a round early only when it is sure enough; here one round was not enough.
    assert half.prompts > ROUND_PROMPTS and half.answers == 4 * half.prompts
    assert half.prompts == 40 or high - low <= 0.2
    everything = tiny_run("gate.prompts=1000", rewards=["constant"])  # 55 problems are all there are
    assert baseline(everything, functions=REWARDS).prompts == 55


def test_right_answers_that_the_strict_form_hides_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model says it in a sentence; the reward `number` wants the number alone."""
    rollout = SlotEngine._rollout

    def said(engine: SlotEngine, row: Any) -> Any:
        return dataclasses.replace(rollout(engine, row), text=f"The answer is {row.answer}.")

    monkeypatch.setattr(SlotEngine, "_rollout", said)
    report = baseline(tiny_run("gate.prompts=16", "data.args={low: 0, high: 5}", rewards=["number"]))
    assert report.verdict == "stop"
    fix = report.findings[0].fixes[0]
    assert fix.overrides == ("rewards.0.args.mode=lenient",)
    mended = baseline(tiny_run("gate.prompts=16", "data.args={low: 0, high: 5}", *fix.overrides, rewards=["number"]))
    assert mended.verdict != "stop"


def test_a_run_killed_before_its_first_checkpoint_does_not_ask_twice(tmp_path: Path) -> None:
    straight, _ = run(tmp_path / "straight", "run.steps=3")

    class Killed(BaseException):
        pass

    def kill(*_: Any) -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
        patch.setattr(trainer, "write_groups", kill)
        run(tmp_path / "killed", "run.steps=3")
    with counting_steps() as steps:
        resumed, _ = resume_run(tmp_path / "killed", functions=REWARDS)
    assert steps == [1, 2, 3]
    assert_same(outcome(resumed.path), outcome(straight.path))


def test_the_api_gives_the_gates_report_as_json() -> None:
    from lowmem_grpo import baseline as asked

    loaded = tiny_run("gate.prompts=16", **IN_MEMORY)
    said = asked(loaded.config, functions=FUNCTIONS)
    assert said["sentence"].startswith("16 prompts x 4 answers:")
    assert json.loads(json.dumps(said)) == said


# --------------------------------------------------------------------------------------------- sabotage


def sabotaged(monkeypatch: pytest.MonkeyPatch, sabotage: Any) -> None:
    """Every run gets parts on which `sabotage(policy)` was done."""

    def build(checked: Preflight, *, goes_on: bool) -> Parts:
        parts = assemble(checked, goes_on=goes_on)
        sabotage(parts.policy)
        return parts

    monkeypatch.setattr(lifecycle, "assemble", build)


def freeze(policy: Policy) -> None:
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:
            parameter.requires_grad_(False)


def leave_the_adapter_on(policy: Policy) -> None:
    policy.reference = contextlib.nullcontext  # type: ignore[method-assign,assignment]


def shuffle_the_answers(policy: Policy) -> None:
    """The update sees the log-probs of its answers in another order."""
    logprobs = policy.logprobs

    def shuffled(*args: Any, **options: Any) -> Any:
        logprobs_BT, entropy_BT = logprobs(*args, **options)
        return logprobs_BT.roll(1, dims=0), entropy_BT

    policy.logprobs = shuffled  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("sabotage", "overrides", "kind"),
    [
        pytest.param(lambda policy: None, ["optim.lr=0"], "learning rate", id="learning rate 0"),
        pytest.param(freeze, [], "frozen adapter", id="frozen adapter"),
        pytest.param(shuffle_the_answers, [], "sampler gap", id="shuffled answers"),
        pytest.param(leave_the_adapter_on, [], "reference moves", id="reference with the adapter left on"),
    ],
)
def test_a_run_that_trains_nothing_does_not_look_healthy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sabotage: Any, overrides: list[str], kind: str
) -> None:
    sabotaged(monkeypatch, sabotage)
    with pytest.raises(SelfCheckFailed) as failed:
        run(tmp_path / "run", *overrides)
    found = [row for row in RunDir.open(tmp_path / "run").read("events") if row["severity"] == "error"]
    assert [row["kind"] for row in found] == [kind]
    assert str(failed.value) == found[0]["message"]
    assert RunDir.open(tmp_path / "run").status().state == "failed"


def test_the_checks_are_done_once_and_can_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    class Counted(trainer.FirstStepCheck):
        def __init__(self, *args: Any, **options: Any) -> None:
            made.append(1)
            super().__init__(*args, **options)

    monkeypatch.setattr(trainer, "FirstStepCheck", Counted)
    run_dir, _ = run(tmp_path / "run", "gate.prompts=0", "run.checkpoint_every=1")
    assert made == [1]
    resume_run(run_dir.path, ["run.steps=3"], functions=REWARDS)  # the policy is no longer the reference: not asked
    assert made == [1]
    run(tmp_path / "unchecked", "gate.prompts=0", "run.self_checks=false", "optim.lr=0")
    assert made == [1]
