"""The held-out problems of a run: answers of start and tuned, kept in `evaluations/` of the run folder.

    start-dev.json, start-test.json   what the run began from, measured once
    tuned-test.json                   the adapter in `adapter/`, with its sha256

What was measured is read, not measured again: the test split is looked at once for an adapter, also after a crash.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, Literal

from lowmem_grpo import checkpoint
from lowmem_grpo.assembly import Parts, Preflight, sampling_params, sha256_of
from lowmem_grpo.errors import RewardFailed
from lowmem_grpo.evaluation import Evaluation, compare, evaluate, sampled_scores
from lowmem_grpo.files import json_bytes
from lowmem_grpo.rollout import OnProgress
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
        """What the policy answers right now, scored; on test with `eval.samples` sampled answers to each problem too.

        Raises ValueError when the split has no problems.
        """
        rollout = self._checked.config.rollout
        evaluation = evaluate(
            self._parts.eval_engine,
            self.problems(split),
            self._checked.eval_rubric,
            max_new_tokens=rollout.max_new_tokens,
            stop=rollout.stop,
            on_progress=self._progress(split),
        )
        samples = self._checked.config.eval.samples if split == "test" else 0
        return dataclasses.replace(evaluation, sampled_P_G=self._sampled(split, samples)) if samples else evaluation

    def start(self, split: Split) -> Evaluation:
        """What the run began from, evaluated once and read from the run folder afterwards.

        Raises RewardFailed when the metric failed on every answer; nothing is kept then.
        """
        path = self._run_dir.evaluations_dir / f"start-{split}.json"
        if path.exists():
            return Evaluation.from_json(json.loads(path.read_bytes()))
        with self._parts.policy.reference():
            evaluation = self.evaluate(split)
        self._check_scored(evaluation, "start", split)
        self._run_dir.replace_file(path, json_bytes(evaluation.to_json()))
        return evaluation

    def start_and_tuned(self, split: Split) -> dict[str, Any]:
        """Start against the adapter in `adapter/`, which is loaded into the policy; the JSON of `compare`.

        An adapter that was evaluated before is not evaluated again. Raises as `start`.
        """
        weights, _ = checkpoint.read_adapter(self._run_dir.adapter_dir)
        self._parts.policy.load_adapter_state(weights)
        start, tuned = self.start(split), self._tuned(split)
        correct_at = self._checked.config.eval.correct_at
        return compare(start, tuned, problems=self.problems(split), correct_at=correct_at, split=split)

    def _tuned(self, split: Split) -> Evaluation:
        """What the adapter in `adapter/`, which the policy has, answers."""
        path = self._run_dir.evaluations_dir / f"tuned-{split}.json"
        sha256 = sha256_of(self._run_dir.adapter_dir / "adapter_model.safetensors")
        if path.exists() and (kept := json.loads(path.read_bytes())).get("adapter_sha256") == sha256:
            return Evaluation.from_json(kept)
        evaluation = self.evaluate(split)
        self._check_scored(evaluation, "tuned", split)
        self._run_dir.replace_file(path, json_bytes({"adapter_sha256": sha256, **evaluation.to_json()}))
        return evaluation

    def _sampled(self, split: Split, samples: int) -> tuple[tuple[float | None, ...], ...]:
        return sampled_scores(
            self._parts.eval_engine,
            self.problems(split),
            self._checked.eval_rubric,
            samples=samples,
            sampling=sampling_params(self._checked.config),
            on_progress=self._progress(f"{split}, {samples} samples each"),
        )

    def _progress(self, detail: str) -> OnProgress:
        return lambda done, total, _tokens: self._sinks.progress("evaluate", done, total, detail)

    def _check_scored(self, evaluation: Evaluation, side: str, split: Split) -> None:
        if evaluation.is_unscored:
            raise RewardFailed(
                f"The metric failed on every one of {evaluation.failures} {split} answers of {side}, so there is no "
                f"score to compare (train.log has its error): when the metric works again, "
                f"`lowmem-grpo resume {self._run_dir.path}` goes on from here."
            )
