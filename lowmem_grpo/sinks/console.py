"""The live view of a run in a terminal or a notebook, and plain lines where there is neither.

On a terminal one block is redrawn in place: progress, measures, the last sampled group, the last events. Whatever
else is printed meanwhile appears above it. train.log does not get the redrawn block but the plain lines.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import IO, Any, cast

from rich.console import Console, Group, RenderableType
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lowmem_grpo.sinks.render import (
    LOSS_LEGEND,
    LOSS_NOTE,
    clean_text,
    duration,
    measures,
    plain_card,
    plain_sample,
    plain_step,
    render_card,
    render_sample,
    sparkline,
)
from lowmem_grpo.tee import Tee
from lowmem_grpo.types import Event, RunInfo, ScoredGroup, StepReport

__all__ = ["ConsoleSink", "RunView"]

_COLOURS = {"info": "cyan", "warning": "yellow", "error": "bold red"}


class RunView:
    """What is known of a run so far, and the block that shows it. Holds no terminal."""

    def __init__(self, info: RunInfo) -> None:
        self.info = info
        self.last_step = info.first_step - 1
        self.metrics: Mapping[str, float] = {}
        self.rewards: list[float] = []
        self.step_times: deque[float] = deque(maxlen=10)
        self.phase = ("", 0, 0, "")
        self.sample: tuple[int, ScoredGroup, Sequence[float]] | None = None
        self.events: deque[Event] = deque(maxlen=3)
        self._spent_s = 0.0
        self._step_began = time.monotonic()

    def take_step(self, report: StepReport) -> None:
        """Note a finished step; its time is `time/step_s`, or that since the step before."""
        now = time.monotonic()
        self.step_times.append(report.metrics.get("time/step_s", now - self._step_began))
        self._spent_s += self.step_times[-1]
        self._step_began = now
        self.last_step, self.metrics, self.phase = report.step, report.metrics, ("", 0, 0, "")
        self.rewards.append(report.metrics.get("reward/mean", float("nan")))

    @property
    def left_s(self) -> float | None:
        """Seconds to the last step at the mean pace of the last ten, None before the first."""
        if not self.step_times:
            return None
        return sum(self.step_times) / len(self.step_times) * (self.info.steps - self.last_step)

    def render(self) -> RenderableType:
        """The whole block."""
        parts: list[RenderableType] = [self._status(), *(_event_line(event) for event in self.events)]
        if self.sample is not None:  # last: what does not fit into a low terminal is cut at the bottom
            parts.append(render_sample(*self.sample))
        return Group(*parts)

    def _status(self) -> Panel:
        info = self.info
        body = Table.grid(expand=True)
        body.add_row(Text(f"{info.model} on {info.device}: {_shape(info)}", style="dim", overflow="ellipsis"))
        body.add_row(self._bars())
        if self.metrics:
            body.add_row(Text(""))
            body.add_row(self._measures())
            if "optim/loss" in self.metrics:
                body.add_row(Text(LOSS_LEGEND, style="dim", overflow="ellipsis", no_wrap=True))
        return Panel(
            body, title=Text(f"lowmem-grpo: {info.name}", style="bold"), title_align="left", border_style="blue"
        )

    def _bars(self) -> Table:
        left = "" if self.left_s is None else f", {duration(self.left_s)} left"
        bars = Table.grid(padding=(0, 1), expand=True)
        bars.add_column(no_wrap=True)
        bars.add_column(ratio=1)
        bars.add_column(no_wrap=True, justify="right")
        done, steps = self.last_step, self.info.steps
        if steps:
            bars.add_row(
                f"step {done}/{steps}",
                _bar(done, steps),
                f"{duration(self._spent_s + time.monotonic() - self._step_began)}{left}",
            )
        phase, part, total, detail = self.phase
        if phase:
            amount = f"{part}/{total}" if total else f"{part}" if part else ""
            bars.add_row(phase, _bar(part, total), Text(f"{amount} {detail}".strip()))
        return bars

    def _measures(self) -> Table:
        shown = measures(self.metrics, max_new_tokens=self.info.max_new_tokens)
        whole = Table.grid(expand=True)
        if "reward" in shown:
            first = next((reward for reward in self.rewards if reward == reward), float("nan"))
            trend = Text.assemble(("reward ", "dim"), (shown.pop("reward"), "bold"))
            trend.append(f" {sparkline(self.rewards, 40)} ", style="green")
            trend.append(f"from {first:.3f}", style="dim")
            whole.add_row(trend)
        columns = Table.grid(padding=(0, 1, 0, 0), expand=True)
        for _ in range(4):
            columns.add_column(ratio=1)
        cells = [Text.assemble((f"{label} ", "dim"), value) for label, value in shown.items()]
        for start in range(0, len(cells), 4):
            columns.add_row(*cells[start : start + 4])
        whole.add_row(columns)
        return whole


def _bar(done: int, total: int) -> ProgressBar:
    return ProgressBar(total=total or None, completed=done, pulse=not total)


def _shape(info: RunInfo) -> str:
    return f"{info.prompts_per_step} prompts x {info.group_size} answers x up to {info.max_new_tokens} tokens a step"


def _event_line(event: Event) -> Text:
    return Text.assemble((f"{event.severity} ", _COLOURS[event.severity]), _event_text(event))


def _event_text(event: Event) -> str:
    where = f"step {event.step}: " if event.step else ""
    return f"{where}{clean_text(event.message)}"


class ConsoleSink:
    """Shows a run on `stream` (sys.stdout). A sample is shown as soon as the first exists, then every few steps."""

    def __init__(self, stream: IO[str] | None = None, *, sample_every: int = 5) -> None:
        self._given = stream
        self._sample_every = sample_every
        self._live: Live | None = None
        self._tees: list[Tee] = []
        self._sampled_at: int | None = None
        self._shown_phase = ""
        self._loss_explained = False

    # ----- set-up

    def start(self, info: RunInfo) -> None:
        self.view = RunView(info)
        stream = self._given or sys.stdout
        self._plain = stream
        terminal = stream.terminal if isinstance(stream, Tee) else stream
        _never_fail_on_encoding(terminal)
        # Only a given stream is passed on: rich finds out about notebooks only when it picks the stream itself.
        self._console = Console(file=terminal if self._given or isinstance(stream, Tee) else None)
        if _can_redraw(self._console):
            self._start_live()
        self._lines([f"lowmem-grpo: {info.name}", f"{info.model} on {info.device}: {_shape(info)}"])

    def _start_live(self) -> None:
        self._tees = [tee for tee in (sys.stdout, sys.stderr) if isinstance(tee, Tee)]
        self._live = Live(
            get_renderable=self.view.render,
            console=self._console,
            refresh_per_second=4,
            redirect_stdout=not self._tees,
            redirect_stderr=not self._tees,
        )
        self._live.start()
        for tee in self._tees:
            tee.forward = cast(IO[str], FileProxy(self._console, tee.terminal))

    # ----- the protocol

    def progress(self, phase: str, done: int, total: int, detail: str = "") -> None:
        self.view.phase = (phase, done, total, clean_text(detail))
        if phase != self._shown_phase and self.view.last_step < self.view.info.first_step:
            # In a log the phases are told during the first step only: later ones would be noise.
            self._lines([phase if phase == "gate" else f"step {self.view.last_step + 1}: {phase}"])
        self._shown_phase = phase

    def sample(self, step: int, group: ScoredGroup, advantages_G: Sequence[float]) -> None:
        if self._sampled_at is not None and step < self._sampled_at + self._sample_every:
            return
        self._sampled_at = step
        self.view.sample = (step, group, tuple(advantages_G))
        self._lines(plain_sample(*self.view.sample))

    def step(self, report: StepReport) -> None:
        self.view.take_step(report)
        info = self.view.info
        self._lines([plain_step(report.step, info.steps, report.metrics, self.view.left_s, info.max_new_tokens)])
        if "optim/loss" in report.metrics and not self._loss_explained:
            self._loss_explained = True
            self._lines([LOSS_NOTE])
        if report.sample is not None:
            self.sample(report.step, report.sample, report.sample_advantages_G)

    def event(self, event: Event) -> None:
        if self._live is not None and event.severity != "info":
            self._console.print(_event_line(event))  # above the block, where it stays
        else:
            self.view.events.append(event)
        self._lines([f"{event.severity}: {_event_text(event)}"])

    def report(self, report: Mapping[str, Any]) -> None:
        live = self._live is not None
        self._stop_live()
        if live or self._console.is_jupyter:
            self._console.print(render_card(report))
            self._lines(plain_card(report), log_only=True)
        else:
            self._lines(plain_card(report))

    def close(self) -> None:
        self._stop_live()

    def _stop_live(self) -> None:
        if self._live is None:
            return
        for tee in self._tees:
            if tee.forward is not None:
                tee.forward.flush()
            tee.forward = None
        self._live.stop()
        self._live = None

    def _lines(self, lines: Sequence[str], *, log_only: bool = False) -> None:
        """Plain lines: to the stream, or to the log alone while the live block shows the same."""
        if self._live is not None or log_only:
            if isinstance(self._plain, Tee):
                for line in lines:
                    self._plain.log_line(line)
            return
        self._plain.write("".join(f"{line}\n" for line in lines))
        self._plain.flush()


def _can_redraw(console: Console) -> bool:
    if console.is_jupyter:
        return importlib.util.find_spec("ipywidgets") is not None  # rich redraws in a notebook through it
    return console.is_terminal and not console.is_dumb_terminal


def _never_fail_on_encoding(stream: IO[str]) -> None:
    """An answer may hold any character; a terminal that has no UTF-8 shows `?` for those that it lacks."""
    if "utf" not in (getattr(stream, "encoding", None) or "utf-8").lower() and hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")
