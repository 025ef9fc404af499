#!/usr/bin/env python3
"""Draw the live view of a run as it stood at its end, and its final card, as an SVG picture.

scripts/draw_run.py runs/quickstart-2026-01-31 docs/quickstart.svg
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from lowmem_grpo.rundir import RunDir
from lowmem_grpo.sinks.console import RunView
from lowmem_grpo.sinks.follow import follow
from lowmem_grpo.sinks.render import render_card
from lowmem_grpo.types import Event, RunInfo, ScoredGroup, StepReport


class _Picture:
    """A sink that draws what the live view showed last."""

    def __init__(self, width: int) -> None:
        self.console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)

    def start(self, info: RunInfo) -> None:
        self.view = RunView(info)

    def progress(self, phase: str, done: int, total: int, detail: str = "") -> None:
        """Phases inside a step are not in the files."""

    def sample(self, step: int, group: ScoredGroup, advantages_G: Sequence[float]) -> None:
        self.view.sample = (step, group, tuple(advantages_G))

    def step(self, report: StepReport) -> None:
        self.view.take_step(report)
        if report.sample is not None:
            self.sample(report.step, report.sample, report.sample_advantages_G)

    def event(self, event: Event) -> None:
        """Events scroll by above the view."""

    def report(self, report: Mapping[str, Any]) -> None:
        self.console.print(self.view.render())
        self.console.print(render_card(report))

    def close(self) -> None:
        """Nothing is open."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path, help="a finished run")
    parser.add_argument("svg", type=Path)
    parser.add_argument("--width", type=int, default=104, help="characters a line")
    args = parser.parse_args()
    picture = _Picture(args.width)
    follow(RunDir.open(args.run_dir), picture, until_finished=False)
    args.svg.parent.mkdir(parents=True, exist_ok=True)
    picture.console.save_svg(str(args.svg), title=f"lowmem-grpo: {picture.view.info.name}")


if __name__ == "__main__":
    main()
