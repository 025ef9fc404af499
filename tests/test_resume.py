"""A run that was stopped or killed, however often, ends exactly like one that was not."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lowmem_grpo.errors import ConfigError, RunDirError, StopRequested
from lowmem_grpo.lifecycle import resume_run, start_run
from lowmem_grpo.rundir import RunDir
from tests.runs import (
    FUNCTIONS,
    IN_MEMORY,
    Forks,
    Outcome,
    assert_same,
    during_step,
    model_folder,
    outcome,
    raw_config,
    tiny_run,
)

DEV = {"data.dev_size": 4, "data.test_size": 3, "eval.every": 2}
VARIED = {
    "algorithm.updates_per_rollout": 2,
    "algorithm.kl_coef": 0.1,
    "optim.schedule": "cosine",
    "optim.warmup_steps": 2,
    "rollout.max_concurrent": 5,
}


def stopped_by_file(run_dir: Path) -> None:
    RunDir.open(run_dir).request("stop")


def stopped_by_sigterm(_: Path) -> None:
    signal.raise_signal(signal.SIGTERM)


def stopped_by_ctrl_c(_: Path) -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("settings", "stop"),
    [
        pytest.param({}, stopped_by_file, id="plain, stop file"),
        pytest.param({**DEV, "eval.metric": "null"}, stopped_by_sigterm, id="dev set, SIGTERM"),
        pytest.param(VARIED, stopped_by_ctrl_c, id="several updates, kl, cosine, Ctrl-C"),
        pytest.param({"model.quantization": "nf4", **DEV}, stopped_by_file, id="nf4, stop file"),
    ],
)
def test_three_steps_and_three_after_a_stop_are_six(
    settings: dict[str, Any], stop: Callable[[Path], None], tmp_path: Path
) -> None:
    loaded = tiny_run(*(f"{key}={value}" for key, value in settings.items()))
    start_run(loaded, tmp_path / "straight")
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with during_step(3, lambda: stop(tmp_path / "halves")), pytest.raises(StopRequested) as stopped:
        start_run(loaded, tmp_path / "halves")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert stopped.value.exit_code == 3
    assert str(stopped.value).startswith("Stopped after step 3 of 6;")
    half = RunDir.open(tmp_path / "halves")
    assert (half.status().state, half.status().step, half.requested("stop")) == ("stopped", 3, False)
    assert [row["step"] for row in half.read("metrics")] == [1, 2, 3]
    resume_run(half.path)
    straight = outcome(tmp_path / "straight")
    assert [row["step"] for row in straight.metrics] == [1, 2, 3, 4, 5, 6]
    assert len(set(straight.metrics[i]["optim/grad_norm"] for i in range(6))) == 6
    assert_same(outcome(half.path), straight)
    assert (half.status().state, half.status().step, half.status().steps) == ("finished", 6, 6)
    assert [row["message"] for row in half.read("events") if row["kind"] == "resume"] == ["goes on after step 3"]


def test_a_stop_between_checkpoints_saves_the_step_it_is_at(tmp_path: Path) -> None:
    loaded = tiny_run(**IN_MEMORY)
    start_run(loaded, tmp_path / "straight", functions=FUNCTIONS)
    with during_step(4, lambda: stopped_by_file(tmp_path / "run")), pytest.raises(StopRequested):
        start_run(loaded, tmp_path / "run", functions=FUNCTIONS)
    run_dir = RunDir.open(tmp_path / "run")
    assert sorted(p.name for p in run_dir.checkpoints_dir.iterdir()) == ["step-000003", "step-000004"]
    resume_run(run_dir.path, functions=FUNCTIONS)
    whole, straight = outcome(run_dir.path), outcome(tmp_path / "straight")
    assert whole.adapter == straight.adapter
    assert [event[:2] for event in whole.events if event[1] == "checkpoint"] == [
        (3, "checkpoint"),
        (4, "checkpoint"),
        (6, "checkpoint"),
    ]


def test_a_second_ctrl_c_loses_the_step_and_nothing_else(tmp_path: Path) -> None:
    loaded = tiny_run("run.checkpoint_every=2", **IN_MEMORY)
    start_run(loaded, tmp_path / "straight", functions=FUNCTIONS)

    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with during_step(4, twice), pytest.raises(KeyboardInterrupt):
        start_run(loaded, tmp_path / "run", functions=FUNCTIONS)
    run_dir = RunDir.open(tmp_path / "run")
    assert (run_dir.status().state, run_dir.status().step) == ("stopped", 3)
    resume_run(run_dir.path, functions=FUNCTIONS)
    assert_same(outcome(run_dir.path), outcome(tmp_path / "straight"))


def test_a_stop_before_the_first_step_and_a_stale_stop_file(tmp_path: Path) -> None:
    loaded = tiny_run("run.steps=2", **IN_MEMORY)
    start_run(loaded, tmp_path / "straight", functions=FUNCTIONS)
    with during_step(1, lambda: stopped_by_file(tmp_path / "run")), pytest.raises(StopRequested):
        start_run(loaded, tmp_path / "run", functions=FUNCTIONS)
    run_dir = RunDir.open(tmp_path / "run")
    run_dir.request("stop")  # left from before: it was not meant for the process that starts now
    resume_run(run_dir.path, functions=FUNCTIONS)
    assert_same_but_for_checkpoints(outcome(run_dir.path), outcome(tmp_path / "straight"))


def assert_same_but_for_checkpoints(one: Outcome, other: Outcome) -> None:
    assert (one.adapter, one.metrics, one.completions) == (other.adapter, other.metrics, other.completions)


def test_a_finished_run_goes_on_when_it_gets_more_steps(tmp_path: Path) -> None:
    start_run(tiny_run("run.steps=3", **IN_MEMORY), tmp_path / "run", functions=FUNCTIONS)
    start_run(tiny_run(**IN_MEMORY), tmp_path / "straight", functions=FUNCTIONS)
    _, report = resume_run(tmp_path / "run", ["run.steps=6"], functions=FUNCTIONS)
    assert report["steps"] == 6
    assert_same(outcome(tmp_path / "run"), outcome(tmp_path / "straight"))
    assert "steps: 6" in (tmp_path / "run" / "config.yaml").read_text()
    _, again = resume_run(tmp_path / "run", functions=FUNCTIONS)
    assert again["steps"] == 6
    assert_same(outcome(tmp_path / "run"), outcome(tmp_path / "straight"))


def test_what_would_make_it_another_run_is_refused(tmp_path: Path) -> None:
    data, reward = tmp_path / "own.jsonl", tmp_path / "own.py"
    data.write_text("".join(json.dumps({"prompt": f"q{i}", "answer": str(i)}) + "\n" for i in range(4)))
    reward.write_text("def score(completions):\n    return [len(text) for text in completions]\n")
    loaded = tiny_run(f"data.source={data}", "data.args={}", "run.steps=1", rewards=[f"{reward}:score"])
    start_run(loaded, tmp_path / "run")
    left = {path: path.read_bytes() for path in sorted((tmp_path / "run").rglob("*.json*"))}
    with pytest.raises(ConfigError, match=r"`rollout\.group_size` cannot change in a run that goes on"):
        resume_run(tmp_path / "run", ["run.steps=2", "rollout.group_size=2"])
    old = reward.read_text()
    reward.write_text(old.replace("len(", "-len("))
    with pytest.raises(RunDirError, match=rf"{reward} changed since the run began.*{tmp_path}/run/inputs/own.py"):
        resume_run(tmp_path / "run", ["run.steps=2"])
    reward.write_text(old)
    data.write_text(data.read_text().replace("q3", "q4"))
    with pytest.raises(RunDirError, match=rf"{data} changed since the run began"):
        resume_run(tmp_path / "run", ["run.steps=2"])
    assert {path: path.read_bytes() for path in left} == left
    data.write_text(data.read_text().replace("q4", "q3"))
    assert resume_run(tmp_path / "run", ["run.steps=2"])[1]["steps"] == 2


def test_a_folder_that_holds_a_run_is_not_started_again(tmp_path: Path) -> None:
    loaded = tiny_run("run.steps=1", **IN_MEMORY)
    start_run(loaded, tmp_path / "run", functions=FUNCTIONS)
    with pytest.raises(RunDirError, match=r"already holds a run: continue it with `lowmem-grpo resume"):
        start_run(loaded, tmp_path / "run", functions=FUNCTIONS)


# --------------------------------------------------------------------------------------------- kill -9

CAP_BYTES = 3500
RANDOM_KILLS = 20


def killed_config(steps: int) -> dict[str, Any]:
    """A run in which every kind of write happens, and little else: its evaluations all give 0, and of equals the last
    is the best, so `adapter/` is replaced each time; completions.jsonl is rotated once, at step 4."""
    return raw_config(
        **IN_MEMORY,
        model={"name": str(model_folder(layers=1)), "quantization": "none"},
        lora={"rank": 2, "alpha": 4, "target_modules": ["q_proj", "v_proj"]},
        data={**raw_config()["data"], "dev_size": 2, "test_size": 2},
        rollout={"prompts_per_step": 2, "group_size": 4, "max_new_tokens": 4},
        memory={"activation_checkpointing": False},
        eval={"metric": "number", "every": 2},
        run={"steps": steps, "checkpoint_every": 2, "keep_checkpoints": 1, "sinks": ["jsonl"]},
    )


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    server = Forks()
    yield server
    server.close()


def _straight(forks: Forks, run_dir: Path, config: dict[str, Any]) -> tuple[Outcome, dict[str, Any]]:
    """What the run leaves when nobody kills it, and what its process replies."""
    reply = forks.train(run_dir, config, cap_bytes=CAP_BYTES, kill_at_call=0)
    assert reply["error"] is None
    assert len(RunDir.open(run_dir).completion_parts()) == 1
    return outcome(run_dir), reply


def test_kill_at_every_fault_point(forks: Forks, tmp_path: Path) -> None:
    config = killed_config(steps=4)
    expected, reply = _straight(forks, tmp_path / "straight", config)
    names = reply["names"]
    # A run that was killed right after its first checkpoint: from there on everything has something to replace.
    snapshot = tmp_path / "snapshot"
    saved = names.index("replaced step-000002") + 1
    assert forks.train(snapshot, config, cap_bytes=CAP_BYTES, kill_at_point=saved)["killed"]
    assert RunDir.open(snapshot).status().state == "died"
    resumed = _finish(forks, shutil.copytree(snapshot, tmp_path / "resumed"), config, expected)
    points = [(snapshot, point) for point in _points(resumed, "begin adapter", "deleted step-000002")]
    covered = {resumed[point - 1] for _, point in points}
    points += [(None, point) for point in _points(names) if names[point - 1] not in covered]
    assert {resumed[p - 1] if origin else names[p - 1] for origin, p in points} >= {
        *("begin adapter", "move aside adapter", "move in adapter", "moved in adapter", "replaced adapter"),
        *("rotate completions", "rotated completions", "begin checkpoint"),
        *(f"{what} {file}.safetensors" for what in ("write", "wrote") for file in ("adapter_model", "optimizer")),
        *(f"{what} {file}.json" for what in ("write", "wrote") for file in ("adapter_config", "state")),
        *("move in step-000004", "moved in step-000004", "replaced step-000004"),
        *("hide step-000002", "delete step-000002", "deleted step-000002"),
        *("truncated metrics", "truncated completions", "truncated events", "truncated problems"),
        *("finish creation", "rename config.yaml", "rename status.json", "rename start-dev.json", "rename report.json"),
    }
    for number, (origin, point) in enumerate(points):
        run_dir = tmp_path / f"run-{number}"
        if origin is not None:
            shutil.copytree(origin, run_dir)
        assert forks.train(run_dir, config, cap_bytes=CAP_BYTES, kill_at_point=point)["killed"]
        _finish(forks, run_dir, config, expected)
        shutil.rmtree(run_dir)


def _points(names: list[str], first: str = "", last: str = "") -> list[int]:
    """Numbers, from 1, of every fault point from `first` to `last`, and of the first of each other name.

    Of the other files the moment before the rename stands for all three that `atomic_write` has.
    """
    window = range(names.index(first), names.index(last) + 1) if first else range(0)
    within = {names[i] for i in window}
    others = {names.index(name) for name in names if name not in within and not name.startswith(("write ", "renamed "))}
    return sorted(i + 1 for i in {*window, *others})


def _finish(forks: Forks, run_dir: Path, config: dict[str, Any], expected: Outcome) -> list[str]:
    """Resume the run to its end, compare it, and return the fault points on the way."""
    reply = forks.train(run_dir, config, cap_bytes=CAP_BYTES)
    assert reply["error"] is None
    assert_same(outcome(run_dir), expected)
    assert not [p for p in run_dir.rglob("*") if p.name.startswith((".tmp-", ".replaced-", ".old-"))]
    return reply["names"]


def test_kill_at_random_moments(forks: Forks, tmp_path: Path) -> None:
    config = killed_config(steps=6)
    expected, reply = _straight(forks, tmp_path / "straight", config)
    draw, kills, number = random.Random(0), 0, 0
    while kills < RANDOM_KILLS:
        run_dir = tmp_path / f"run-{number}"
        number += 1
        # Killed, continued and killed again; a continued run may be over before its second moment comes.
        for _ in range(2):
            moment = draw.randrange(1, reply["calls"])
            kills += forks.train(run_dir, config, cap_bytes=CAP_BYTES, kill_at_call=moment)["killed"]
        _finish(forks, run_dir, config, expected)
        assert [row["step"] for row in RunDir.open(run_dir).read("metrics")] == [1, 2, 3, 4, 5, 6]


def test_a_second_process_is_refused_with_the_number_of_the_first(forks: Forks, tmp_path: Path) -> None:
    start_run(tiny_run("run.steps=1", **IN_MEMORY), tmp_path / "run", functions=FUNCTIONS)
    run_dir = RunDir.open(tmp_path / "run")
    before = run_dir.status_path.read_bytes()
    with run_dir.lock():
        reply = forks.train(run_dir.path, raw_config(**IN_MEMORY))
    assert reply["error"] == [
        "RunDirError",
        f"{run_dir.path} is in use by process {os.getpid()}: wait for it, or `lowmem-grpo stop {run_dir.path}`.",
    ]
    assert run_dir.status_path.read_bytes() == before
    assert forks.train(run_dir.path, raw_config(**IN_MEMORY))["error"] is None
