from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from lowmem_grpo.sinks import Sink
from lowmem_grpo.sinks.console import ConsoleSink, RunView
from lowmem_grpo.sinks.render import LOSS_LEGEND, LOSS_NOTE
from lowmem_grpo.tee import tee_output
from lowmem_grpo.types import Event
from tests.sinks.examples import ADVANTAGES, INFO, REPORT, group, report

GROUP_LINES = [
    "  prompt: What is 17 + 28?",
    "  reward 1.00  advantage +0.75  end: 45",
    "  reward 0.00  advantage -0.25  end: 46",
    "  reward 0.00  advantage -0.25  end: (empty)",
    "  reward 0.00  advantage -0.25  cut off: 35",
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "60")
    return Terminal()


def shown(view: RunView) -> str:
    console = Console(file=io.StringIO(), record=True, width=100)
    console.print(view.render())
    return console.export_text()


def play(sink: Sink) -> None:
    sink.start(INFO)
    sink.progress("rollout", 3, 8, "rows")
    sink.sample(1, group(), ADVANTAGES)
    sink.step(report(1, sample=True))
    sink.event(Event("checkpoint", "info", "saved step 1", step=1))
    sink.progress("rollout", 3, 8, "rows")
    sink.step(report(2, sample=True))
    sink.report(REPORT)
    sink.close()


def test_a_log_gets_plain_lines() -> None:
    stream = io.StringIO()
    play(ConsoleSink(stream))
    lines = stream.getvalue().splitlines()
    assert lines[:12] == [
        "lowmem-grpo: quickstart-2026-01-31",
        "tiny on cpu: 2 prompts x 4 answers x up to 24 tokens a step",
        "step 1: rollout",
        "  4 answers to train-12, step 1",
        *GROUP_LINES,
        "step 1/4 | reward 0.125 | loss -3.0e-09 | step time 10 s | left 30 s",
        LOSS_NOTE,
        "info: step 1: saved step 1",
    ]
    assert lines[12] == "step 2/4 | reward 0.250 | loss -3.0e-09 | step time 10 s | left 20 s"
    assert lines[13].startswith("== Start against tuned") and stream.getvalue().count(LOSS_NOTE) == 1
    assert "\x1b" not in stream.getvalue()


def test_samples_come_every_few_steps() -> None:
    stream = io.StringIO()
    sink = ConsoleSink(stream, sample_every=3)
    sink.start(INFO)
    for step in range(1, 9):
        sink.step(report(step, sample=True))
    found = [line for line in stream.getvalue().splitlines() if "answers to" in line]
    assert found == [f"  4 answers to train-12, step {step}" for step in (1, 4, 7)]


def test_the_view_before_and_after_steps() -> None:
    view = RunView(INFO)
    before = shown(view)
    assert "step 0/4" in before and "reward" not in before and "left" not in before
    view.take_step(report(1))
    view.take_step(report(2, reward__within_group_std=0.25, groups__zero_variance=0.5))
    view.phase = ("update", 1, 0, "micro-batches")
    after = shown(view)
    assert "step 2/4" in after and "20 s left" in after and "update" in after and "1 micro-batches" in after
    assert "reward 0.250 ▁█ from 0.125" in after and "spread 0.250" in after and "dead groups 50 %" in after
    assert LOSS_LEGEND in after


def test_time_left_is_the_mean_of_the_last_ten_steps() -> None:
    view = RunView(INFO)
    assert view.left_s is None
    view.take_step(report(1, time__step_s=1000.0))
    assert view.left_s == 3000.0
    for _ in range(9):
        view.take_step(report(2, time__step_s=10.0))
    assert view.left_s == (1000.0 + 9 * 10.0) / 10 * 2
    view.take_step(report(2, time__step_s=10.0))
    assert view.left_s == 20.0


def test_a_terminal_gets_a_block_and_the_card(terminal: Terminal) -> None:
    play(ConsoleSink(terminal))
    text = terminal.getvalue()
    assert (
        "\x1b[?25l" in text and text.rstrip().endswith("╯\x1b[0m") and "\x1b[?25h" in text
    )  # cursor hidden, then shown
    assert "4 answers to train-12, step 1" in text and "Proven:" in text
    assert "step 1/4 |" not in text


def test_with_a_log_prints_go_above_the_block_and_the_log_stays_plain(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    log = tmp_path / "train.log"
    with tee_output(log):
        sink = ConsoleSink()
        sink.start(INFO)
        print("a library says something")
        sink.step(report(1, sample=True))
        sink.event(Event("finding", "warning", "odd \x1b[2J", step=1))
        sink.report(REPORT)
        print("after")
        sink.close()
    lines = log.read_text().splitlines()
    assert lines[2] == "a library says something"
    assert lines[3] == "step 1/4 | reward 0.125 | loss -3.0e-09 | step time 10 s | left 30 s"
    assert lines[6:11] == GROUP_LINES
    assert lines[11] == "warning: step 1: odd \\x1b[2J"
    # The card is on the terminal as a panel and in the log as lines.
    assert "\x1b" not in log.read_text() and "after" in lines
    assert "score: start 0.410" in log.read_text() and "╭" not in log.read_text()
    assert "a library says something" in terminal.getvalue() and "odd \\x1b[2J" in terminal.getvalue()


@pytest.mark.parametrize("kind", ["dumb", "unknown"])
def test_a_terminal_that_cannot_redraw_gets_lines(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("TERM", kind)
    play(ConsoleSink(terminal))
    assert "step 1/4 | reward 0.125" in terminal.getvalue() and "\x1b" not in terminal.getvalue()


def test_a_stream_without_utf_8_shows_question_marks() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    sink = ConsoleSink(stream)
    sink.start(INFO)
    sink.sample(1, group(("é", "46", "", "35")), ADVANTAGES)
    assert b"advantage +0.75  end: ?\n" in raw.getvalue()
