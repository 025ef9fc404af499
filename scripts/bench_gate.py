#!/usr/bin/env python
"""The gate's forecast of dead groups next to what later groups show, on the recipe `quickstart` and on made tasks.

The made tasks keep the prompts and score an answer by a checksum of its text: "rare" is right for about one answer in
twenty, "common" for about nineteen in twenty, "constant" never differs. For each task the gate samples and judges as
`lowmem-grpo baseline` does; then the base, untrained, answers the problems that come after those of the gate, with
other noise, and the share of dead groups among them is what the forecast should have said. The answers are the same
for all tasks, only their rewards differ. The share at half the group size takes the first half of each group.

    python scripts/bench_gate.py --groups 200 --json
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lowmem_grpo.advantages import is_dead_P
from lowmem_grpo.assembly import Parts, Preflight, assemble, preflight, sampling_params
from lowmem_grpo.batching import rewards_tensor
from lowmem_grpo.config import load_config
from lowmem_grpo.gate import GateReport
from lowmem_grpo.gatekeeper import ask_gate
from lowmem_grpo.sinks import Fanout
from lowmem_grpo.types import Group, Problem

MADE_REWARDS = """\
import zlib

def checksums(completions):
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [zlib.crc32(text.encode()) % 20 for text in texts]

def rare(completions, **columns):
    return [float(checksum == 0) for checksum in checksums(completions)]

def common(completions, **columns):
    return [float(checksum > 0) for checksum in checksums(completions)]

def constant(completions, **columns):
    return [0.5] * len(completions)
"""
LATER_STEP = -1_000_000
"""Noise that neither the gate nor a run uses."""


def main() -> None:
    """Parse the arguments, run the bench, print a table or JSON."""
    args = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "made.py"
        path.write_text(MADE_REWARDS, encoding="utf-8")
        tasks = {"quickstart": []} | {name: [f"rewards=[{path}:{name}]"] for name in ("rare", "common", "constant")}
        rows = _measured(tasks, args)
    if args.json:
        print(json.dumps({"settings": vars(args), "tasks": rows}))
        return
    print(f"{'task':<12}{'verdict':<10}{'G':>4}{'forecast':>10}{'interval':>16}{'seen':>8}{'off by':>8}{'gate s':>8}")
    for row in rows:
        for size, values in row["dead_groups"].items():
            low, high = values["interval"]
            print(
                f"{row['task']:<12}{row['verdict']:<10}{size:>4}{values['forecast']:>10.3f}"
                f"{f'[{low:.3f}, {high:.3f}]':>16}{values['seen']:>8.3f}"
                f"{values['forecast'] - values['seen']:>+8.3f}{row['seconds']:>8.1f}"
            )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("overrides", nargs="*", help="key=value of the config")
    parser.add_argument("--groups", type=int, default=200, help="later groups to compare with")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _measured(tasks: dict[str, list[str]], args: argparse.Namespace) -> list[dict[str, Any]]:
    parts: Parts | None = None
    later: list[Group] = []
    rows = []
    for task, overrides in tasks.items():
        checked = preflight(load_config("quickstart", ["eval.metric=number", *overrides, *args.overrides]))
        try:
            if parts is None:
                parts = assemble(checked)
                later = _later_groups(checked, parts, args.groups)
            began = time.perf_counter()
            report = ask_gate(checked, parts, Fanout({}, print))
            rows.append(_compared(task, report, checked, later, time.perf_counter() - began))
        finally:
            checked.close()
    return rows


def _later_groups(checked: Preflight, parts: Parts, count: int) -> list[Group]:
    """The base's answers to `count` problems that follow those the gate may look at."""
    steps = math.ceil((checked.config.gate.prompts + count) / checked.config.rollout.prompts_per_step)
    problems: Sequence[Problem] = [problem for step in range(steps) for problem in parts.stream.at(step)]
    return parts.eval_engine.generate(
        problems[checked.config.gate.prompts :][:count],
        checked.config.rollout.group_size,
        sampling_params(checked.config),
        step=LATER_STEP,
    )


def _compared(
    task: str, report: GateReport, checked: Preflight, later: Sequence[Group], seconds: float
) -> dict[str, Any]:
    own = checked.config.rollout.group_size
    rewards_P_G, _ = rewards_tensor(checked.rubric.score(later))
    dead_groups = {
        forecast.group_size: {
            "forecast": forecast.share,
            "interval": list(forecast.interval),
            "seen": is_dead_P(rewards_P_G[:, : forecast.group_size]).double().mean().item(),
        }
        for forecast in report.forecasts
        if forecast.group_size in (own, own // 2)
    }
    return {
        "task": task,
        "verdict": report.verdict,
        "prompts": report.prompts,
        "reward_mean": report.reward_mean,
        "seconds": seconds,
        "dead_groups": dead_groups,
        "findings": [finding.kind for finding in report.findings],
    }


if __name__ == "__main__":
    main()
