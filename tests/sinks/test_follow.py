from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lowmem_grpo.rundir import RunDir, Status, StatusWriter
from lowmem_grpo.sinks.follow import follow, read_info
from lowmem_grpo.sinks.jsonl import JsonlSink, write_groups
from lowmem_grpo.types import Event, RunInfo, ScoredGroup, StepReport
from tests.sinks.examples import ADVANTAGES, QUESTION, REPORT, group, report

CONFIG = """\
device: auto
model: {name: tiny}
rollout: {prompts_per_step: 2, group_size: 4, max_new_tokens: 24}
run: {steps: 4}
"""


class Recorder:
    def __init__(self) -> None:
        self.info: RunInfo | None = None
        self.steps: list[StepReport] = []
        self.events: list[Event] = []
        self.reports: list[object] = []
        self.closed = 0

    def start(self, info: RunInfo) -> None:
        self.info = info

    def progress(self, phase: str, done: int, total: int, detail: str = "") -> None:
        raise AssertionError("the files do not hold it")

    def sample(self, step: int, group: ScoredGroup, advantages_G: object) -> None:
        raise AssertionError("it comes with its step")

    def step(self, report: StepReport) -> None:
        self.steps.append(report)

    def event(self, event: Event) -> None:
        self.events.append(event)

    def report(self, report: object) -> None:
        self.reports.append(report)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run", config_text=CONFIG, environment={"device": "cpu"}, inputs={})


def train(run_dir: RunDir, step: int) -> None:
    """What a trainer writes in one step."""
    write_groups(run_dir, step, [group(), group(("0", "0", "0", "0"))], [ADVANTAGES, (0.0,) * 4])
    JsonlSink(run_dir).step(report(step))


def never(seconds: float) -> None:
    raise AssertionError("nothing to wait for")


def test_info_of_a_run(run_dir: RunDir) -> None:
    assert read_info(run_dir) == RunInfo("run", str(run_dir.path), "tiny", "cpu", 4, 2, 4, 24)
    run_dir.environment_path.write_text("{}")
    run_dir.write_status(Status("running", 1, 9, os.getpid(), 0.0, 0.0, None, ""))
    assert (read_info(run_dir).device, read_info(run_dir).steps) == ("auto", 9)
    run_dir.config_path.write_text("{}")
    assert (read_info(run_dir).model, read_info(run_dir).group_size) == ("unknown model", 0)


def test_a_finished_run_is_replayed(run_dir: RunDir) -> None:
    with StatusWriter(run_dir, steps=4):
        train(run_dir, 1)
        JsonlSink(run_dir).event(Event("checkpoint", "info", "saved", step=1, data={"n": 1}))
        run_dir.append("metrics", {"step": 2, "reward/mean": None})
        run_dir.write_report(REPORT)
    sink = Recorder()
    assert follow(run_dir, sink, sleep=never).state == "finished"
    first, second = sink.steps
    assert (first.step, first.steps, first.metrics) == (1, 4, dict(report(1).metrics))
    assert first.sample is not None and first.sample_advantages_G == ADVANTAGES
    assert [r.text for r in first.sample.group.rollouts] == ["45", "46", "", "35"]
    assert first.sample.group.problem.prompt == QUESTION
    assert (first.sample.scores, first.sample.totals) == ({"number": (1.0, 0.0, 0.0, 0.0)}, (1.0, 0.0, 0.0, 0.0))
    assert (second.sample, second.metrics) == (None, {})
    assert sink.events == [Event("checkpoint", "info", "saved", step=1, data={"n": 1})]
    assert sink.reports == [REPORT] and sink.closed == 1


def follow_while(run_dir: RunDir, acts: list[Callable[[], object]]) -> Recorder:
    """Follow a run in which one of `acts` happens between two looks; the last one ends it."""
    sink, todo = Recorder(), list(acts)
    run_dir.write_status(Status("running", 0, 4, os.getpid(), run_dir.status().pid_started, 1e12, None, ""))
    follow(run_dir, sink, poll_s=0.0, sleep=lambda _: todo.pop(0)())
    assert todo == []
    return sink


def end(run_dir: RunDir, state: str = "finished", message: str = "") -> None:
    run_dir.write_status(Status(state, 2, 4, os.getpid(), 0.0, 0.0, None, message))  # type: ignore[arg-type]


def test_a_running_run_is_followed_to_its_end(run_dir: RunDir) -> None:
    def write(data: bytes) -> None:
        with open(run_dir.stream_path("metrics"), "ab") as file:
            file.write(data)

    sink = follow_while(
        run_dir,
        [
            lambda: train(run_dir, 1),
            lambda: None,
            lambda: write(b'{"step": 2, "rewa'),
            lambda: write(b'rd/mean": 0.5}\n'),
            lambda: (train(run_dir, 3), end(run_dir, "stopped", "stopped on request")),
        ],
    )
    assert [(r.step, r.metrics["reward/mean"], r.sample is None) for r in sink.steps] == [
        (1, 0.125, False),
        (2, 0.5, True),
        (3, 0.375, False),
    ]
    assert sink.events == [Event("status", "info", "stopped: stopped on request", 2)]


def test_a_rotation_between_two_looks_loses_nothing(run_dir: RunDir) -> None:
    def rotate_in_the_middle() -> None:
        train(run_dir, 2)
        run_dir.rotate_completions(1)
        train(run_dir, 3)
        end(run_dir)

    sink = follow_while(run_dir, [lambda: train(run_dir, 1), rotate_in_the_middle])
    assert [(r.step, r.sample is not None) for r in sink.steps] == [(1, True), (2, True), (3, True)]


def test_a_run_that_goes_back_is_followed_on(run_dir: RunDir) -> None:
    saved: list[dict[str, int]] = []
    sink = follow_while(
        run_dir,
        [
            lambda: (train(run_dir, 1), saved.append(run_dir.offsets()), train(run_dir, 2)),
            lambda: run_dir.truncate_to(saved[0]),
            lambda: (train(run_dir, 2), end(run_dir)),
        ],
    )
    assert [r.step for r in sink.steps] == [1, 2, 2]


def test_a_run_that_failed_or_died_ends_with_an_error(run_dir: RunDir) -> None:
    end(run_dir, "failed", "The disk is full.")
    sink = Recorder()
    assert follow(run_dir, sink, sleep=never).state == "failed"
    assert sink.events == [Event("status", "error", "failed: The disk is full.", 2)]
    run_dir.write_status(Status("running", 1, 4, 2**22 + 1, 0.0, 0.0, None, ""))
    sink = Recorder()
    assert follow(run_dir, sink, sleep=never).state == "died"
    assert sink.events[0].severity == "error" and sink.events[0].message.startswith("died: process")


def test_one_look_at_a_running_run(run_dir: RunDir) -> None:
    train(run_dir, 1)
    sink = Recorder()
    assert follow(run_dir, sink, until_finished=False, sleep=never).state == "starting"
    assert len(sink.steps) == 1 and sink.events == [] and sink.closed == 1
