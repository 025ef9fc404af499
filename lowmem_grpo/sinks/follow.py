"""Replay the files of a run into a sink, while it runs (`lowmem-grpo watch`) or afterwards."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from lowmem_grpo.rundir import RunDir, Status
from lowmem_grpo.sinks import Sink
from lowmem_grpo.types import Event, Group, Problem, Rollout, RunInfo, ScoredGroup, StepReport

__all__ = ["follow", "group_of_rows", "read_info"]


class _Tail:
    """The rows that were added to a jsonl file since the last look, through truncation and rotation.

    The file stays open between looks, so rows written just before a rotation are still read from the old file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None

    def rows(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        while True:
            if self._file is None:
                if not self._path.exists():
                    return found
                self._file = open(self._path, "rb")  # noqa: SIM115
            found += self._whole_lines()
            if not self._moved():
                return found
            self.close()

    def _whole_lines(self) -> list[dict[str, Any]]:
        assert self._file is not None
        position = self._file.tell()
        size = self._file.seek(0, 2)
        self._file.seek(position if position <= size else size)  # cut back by a resume: wait for what follows
        found = []
        while (line := self._file.readline()).endswith(b"\n"):
            found.append(json.loads(line))
        self._file.seek(-len(line), 1)  # a line that is being written is read next time
        return found

    def _moved(self) -> bool:
        assert self._file is not None
        if not self._path.exists():
            return True
        return not os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_info(run_dir: RunDir) -> RunInfo:
    """What config.yaml and status.json say of a run, for `Sink.start`."""
    import yaml

    config = yaml.safe_load(run_dir.config_path.read_text(encoding="utf-8"))
    rollout = config.get("rollout") or {}
    steps = run_dir.status().steps or (config.get("run") or {}).get("steps") or 0
    return RunInfo(
        name=run_dir.path.name,
        run_dir=str(run_dir.path),
        model=str((config.get("model") or {}).get("name", "unknown model")),
        device=_device(run_dir, str(config.get("device", "auto"))),
        steps=int(steps),
        prompts_per_step=int(rollout.get("prompts_per_step") or 0),
        group_size=int(rollout.get("group_size") or 0),
        max_new_tokens=int(rollout.get("max_new_tokens") or 0),
    )


def _device(run_dir: RunDir, configured: str) -> str:
    """The device the run is on as environment.json has it, else what was asked for."""
    try:
        return str(json.loads(run_dir.environment_path.read_bytes())["device"])
    except (OSError, ValueError, KeyError, TypeError):
        return configured


def group_of_rows(rows: list[dict[str, Any]], prompts: Mapping[str, Any]) -> tuple[ScoredGroup, tuple[float, ...]]:
    """A group from its lines. The files hold no token ids, so those are empty."""
    problem_id = rows[0]["problem_id"]
    prompt = prompts.get(problem_id, "")
    problem = Problem(problem_id, prompt, prompt if isinstance(prompt, str) else "", (), {})
    rollouts = tuple(Rollout((), (), (), row["stop_reason"], row["completion"]) for row in rows)
    scores = {name: tuple(row["rewards"].get(name) for row in rows) for name in rows[0]["rewards"]}
    totals, errors = tuple(row["reward"] for row in rows), tuple(row.get("error") for row in rows)
    return ScoredGroup(Group(problem, rollouts), scores, totals, errors), tuple(row["advantage"] or 0.0 for row in rows)


class _Replay:
    """Hands new rows of a run's files to a sink."""

    def __init__(self, run_dir: RunDir, sink: Sink) -> None:
        self._sink = sink
        self._tails = {n: _Tail(run_dir.stream_path(n)) for n in ("problems", "completions", "metrics", "events")}
        self._prompts: dict[str, Any] = {}
        self._groups: dict[int, list[dict[str, Any]]] = {}

    def pump(self, steps: int) -> None:
        """Read what is new. Metrics are read before completions: a metrics line is written after its answers."""
        metrics, events = self._tails["metrics"].rows(), self._tails["events"].rows()
        for row in self._tails["problems"].rows():
            self._prompts[row["problem_id"]] = row["prompt"]
        for row in self._tails["completions"].rows():
            first = self._groups.setdefault(row["step"], [row])
            same = (row["problem_id"], row.get("group")) == (first[0]["problem_id"], first[0].get("group"))
            if same and first[-1] is not row:
                first.append(row)
        for row in metrics:
            self._step(row, steps)
        for row in events:
            event = Event(row["kind"], row["severity"], row["message"], row["step"], row.get("data") or {})
            self._sink.event(event)

    def _step(self, row: dict[str, Any], steps: int) -> None:
        step = int(row["step"])
        values = {name: value for name, value in row.items() if name != "step" and value is not None}
        lines = self._groups.get(step)
        group, advantages_G = group_of_rows(lines, self._prompts) if lines else (None, ())
        for old in [s for s in self._groups if s <= step]:
            del self._groups[old]
        self._sink.step(StepReport(step, steps, values, group, advantages_G))

    def close(self) -> None:
        for tail in self._tails.values():
            tail.close()


def follow(
    run_dir: RunDir,
    sink: Sink,
    *,
    until_finished: bool = True,
    poll_s: float = 1.0,
    sleep: Callable[[float], None] = time.sleep,
) -> Status:
    """Show a run through `sink`: what its files hold, then (`until_finished`) what is added until its process ends.

    Returns the last status. A run that stopped, failed or died ends with an event that says so; one with a report
    ends with that. `sleep` is called with `poll_s` (seconds) between looks.
    """
    sink.start(read_info(run_dir))
    replay = _Replay(run_dir, sink)
    try:
        while True:
            status = run_dir.status()  # before the files: what a finished run wrote last is then read too
            replay.pump(status.steps)
            if not (until_finished and status.active):
                break
            sleep(poll_s)
        if status.state in ("stopped", "failed", "died"):
            message = f"{status.state}: {status.message}"
            sink.event(Event("status", "info" if status.state == "stopped" else "error", message, status.step))
        report = run_dir.read_report()
        if report is not None:
            sink.report(report)
    finally:
        replay.close()
        sink.close()
    return status
