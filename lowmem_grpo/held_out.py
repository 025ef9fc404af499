"""The held-out problems of a run: greedy answers of start and tuned, kept in `evaluations/` of the run folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from lowmem_grpo import checkpoint
from lowmem_grpo.assembly import Parts, Preflight
from lowmem_grpo.evaluate import Evaluation, compare, evaluate
from lowmem_grpo.files import json_bytes
from lowmem_grpo.rundir import RunDir
from lowmem_grpo.sinks import Sink
from lowmem_grpo.types import Problem

__all__ = ["HeldOut", "Split"]

Split = Literal["dev", "test"]


class HeldOut:
    """Evaluates the live policy on dev and test. The caller holds the lock of `run_dir`."""

    def __init__(self, checked: Preflight, parts: Parts, run_dir: RunDir, sinks: Sink) -> None:
        self._checked, self._parts = checked, parts
        self._run_dir, self._sinks = run_dir, sinks

    def problems(self, split: Split) -> Sequence[Problem]:
        """The problems of a split, possibly none."""
        return self._parts.data.dev if split == "dev" else self._parts.data.test

    def evaluate(self, split: Split) -> Evaluation:
        """What the policy answers right now, scored."""
        rollout = self._checked.config.rollout
        return evaluate(
            self._parts.eval_engine,
            self.problems(split),
            self._checked.eval_rubric,
            max_new_tokens=rollout.max_new_tokens,
            stop=rollout.stop,
            on_progress=lambda done, total, _tokens: self._sinks.progress("evaluate", done, total, split),
        )

    def start(self, split: Split) -> Evaluation:
        """What the run began from, evaluated once and read from the run folder afterwards."""
        path = self._run_dir.evaluations_dir / f"start-{split}.json"
        if path.exists():
            return Evaluation.from_json(json.loads(path.read_bytes()))
        with self._parts.policy.reference():
            evaluation = self.evaluate(split)
        self._run_dir.replace_file(path, json_bytes(evaluation.to_json()))
        return evaluation

    def start_and_tuned(self, split: Split) -> dict[str, Any]:
        """Start against the adapter in `adapter/`, which is loaded into the policy; the JSON of `compare`."""
        weights, _ = checkpoint.read_adapter(self._run_dir.adapter_dir)
        self._parts.policy.load_adapter_state(weights)
        start, tuned = self.start(split), self.evaluate(split)
        self._run_dir.replace_file(self._run_dir.evaluations_dir / f"tuned-{split}.json", json_bytes(tuned.to_json()))
        return compare(start, tuned, correct_at=self._checked.config.eval.correct_at, split=split)
