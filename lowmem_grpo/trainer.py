"""The trainer: `Trainer.train_step` is one update from problems to report, `Trainer.run` the loop around it.

A step is one rollout batch, used `algorithm.updates_per_rollout` times. Everything random is keyed by (seed, step), so
a checkpoint needs the adapter, the optimizer and a few counters, and a resumed run repeats what would have happened.
"""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import torch

from lowmem_grpo import checkpoint
from lowmem_grpo.advantages import ESTIMATORS, is_dead_P
from lowmem_grpo.assembly import Parts, Preflight, run_info, sampling_params
from lowmem_grpo.batching import largest_micro_batch, pack_groups, rewards_tensor
from lowmem_grpo.checkpoint import TrainState
from lowmem_grpo.config import Config
from lowmem_grpo.errors import GateStopped, OutOfMemoryFailed, SelfCheckFailed, StopRequested
from lowmem_grpo.evaluation import Evaluation
from lowmem_grpo.files import json_bytes
from lowmem_grpo.gatekeeper import ask_gate
from lowmem_grpo.held_out import HeldOut
from lowmem_grpo.losses import SamplerCorrection, token_weights
from lowmem_grpo.memory.oom import Limits, Recovery
from lowmem_grpo.memory.peak import PeakProbe
from lowmem_grpo.metrics import rollout_metrics, telling_group
from lowmem_grpo.optim import build_optimizer, load_optimizer_state, lr_at, optimizer_state
from lowmem_grpo.planning.timing import estimate_time
from lowmem_grpo.rewards import Rubric
from lowmem_grpo.rollout.longest import longest_problems
from lowmem_grpo.rundir import RunDir, StatusWriter
from lowmem_grpo.selfcheck import FirstStepCheck, has_a_gradient
from lowmem_grpo.sinks import Sink
from lowmem_grpo.sinks.jsonl import write_groups
from lowmem_grpo.types import Event, Finding, PackedMicroBatch, StepReport
from lowmem_grpo.update import Updater, UpdateSettings

__all__ = ["StopFlag", "Trainer"]


class StopFlag:
    """Set by Ctrl-C or SIGTERM while `watching`; a second Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        self.requested = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Take over the two signals; does nothing outside the main thread, where Python allows no handlers."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        with contextlib.suppress(RuntimeError):  # the signal came in the middle of a print, which cannot be nested
            print("Stopping after this step (once more: at once, losing the step).", flush=True)


@dataclass(slots=True)
class Progress:
    """What a checkpoint carries besides tensors.

    `seconds` is the time spent so far, `best_score` the best dev score, of the adapter after `best_step`, and `stale`
    the number of dev scores since then that were no new best. `limits` are the settings that were lowered when the
    memory ran out, name -> [configured, now]; `peaks` the measured peak of each phase in bytes, of the trial of the
    longest prompt and answers as of the steps.
    """

    step: int = 0
    seconds: float = 0.0
    peak_bytes: int = 0
    skipped_in_a_row: int = 0
    best_step: int | None = None
    best_score: float | None = None
    stale: int = 0
    self_checked: bool = False
    loss_scale: dict[str, Any] | None = None
    said: tuple[str, ...] = ()
    rewards: dict[str, Any] | None = None
    limits: dict[str, list[int | None]] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """JSON values; `Progress(**values)` reads them back."""
        return {name: getattr(self, name) for name in self.__slots__}


class Trainer:
    """Holds the live parts of one run. The caller holds the lock of `run_dir`."""

    def __init__(self, checked: Preflight, parts: Parts, run_dir: RunDir, sinks: Sink, status: StatusWriter) -> None:
        config = checked.config
        self.config, self.checked, self.parts = config, checked, parts
        self.run_dir, self.sinks, self.status = run_dir, sinks, status
        self.policy, self.engine = parts.policy, parts.engine
        self.held_out = HeldOut(checked, parts, run_dir, sinks)
        self.sampling = sampling_params(config)
        self.updater = self._build_updater()
        self.limits = self._watch_memory()
        self.progress = Progress()
        self._step = 0  # the step in work, or the last one
        self._saved_step = 0
        self.stop = StopFlag()
        self._probe = PeakProbe(self.policy.device)
        self._step_seconds: deque[float] = deque(maxlen=10)
        self._clock = time.monotonic()

    # ------------------------------------------------------------------------------------------ one update

    def train_step(self, step: int) -> StepReport:
        """One update: sample, score, compare inside each group, push the policy. `step` counts from 1."""
        self._step = step
        problems = self.parts.stream.at(step - 1)
        with self.checked.rubric.scoring(len(problems)) as scoring:
            with self._measured("rollout") as rollout:  # a group is scored while the others are still being written
                self.engine.generate(
                    problems,
                    self.config.rollout.group_size,
                    self.sampling,
                    step=step,
                    on_progress=self._show_rollout,
                    on_group=scoring.add,
                )
            with self._measured("reward") as waiting:
                scored = scoring.result()
        rewards_P_G, lengths_P_G = rewards_tensor(scored)
        dead_P = is_dead_P(rewards_P_G)
        advantages_P_G = ESTIMATORS[self.config.algorithm.advantage](
            rewards_P_G, lengths_P_G, **self.checked.advantage_options
        )
        sample = telling_group(scored, advantages_P_G, dead_P)
        self.sinks.sample(step, *sample)
        with self._measured("update") as update:
            pack = partial(
                pack_groups,
                scored,
                advantages_P_G,
                ~rewards_P_G.isnan(),
                self._in_update(dead_P),
                self._token_weights,
                device=self.policy.device,
            )
            micro_batches = pack(micro_batch_tokens=self.updater.micro_batch_tokens)
            check = self._first_step_check(micro_batches)
            update_metrics = self.updater.update(
                micro_batches,
                (step - 1) * self.config.algorithm.updates_per_rollout,
                self._show_update,
                repack=lambda tokens: pack(micro_batch_tokens=tokens),
            )
            if check is not None:
                self._heed_check(step, check, update_metrics)
        write_groups(self.run_dir, step, scored, advantages_P_G.tolist())
        metrics = {
            **rollout_metrics(scored, rewards_P_G, lengths_P_G, dead_P),
            **update_metrics,
            "reward/failures": _failures(self.checked.rubric),
            "time/rollout_s": rollout.seconds,
            "time/reward_s": waiting.seconds,
            "time/update_s": update.seconds,
            "time/step_s": rollout.seconds + waiting.seconds + update.seconds,
            "speed/rollout_tokens_per_s": lengths_P_G.sum().item() / max(rollout.seconds, 1e-9),
            "memory/rollout_peak_bytes": rollout.peak_bytes,
            "memory/update_peak_bytes": update.peak_bytes,
            "memory/planned_bytes": max(map(self.planned_bytes, ("rollout", "update"))),
        }
        self._findings(step, metrics)
        return StepReport(step, self.parts.steps, metrics, *sample)

    # ------------------------------------------------------------------------------------------ the loop

    def run(self, notes: Sequence[Event] = (), *, force: bool = False) -> dict[str, Any]:
        """Tell the sinks `notes`, ask the gate, train to the last step, evaluate, and return the report.

        Raises GateStopped when the gate says no before the first step, unless `force`; StopRequested after a requested
        stop, with everything saved.
        """
        path = self.run_dir.path
        first_step = self.progress.step + 1
        self.sinks.start(
            run_info(self.checked, name=path.name, run_dir=str(path), steps=self.parts.steps, first_step=first_step)
        )
        try:
            for note in notes:
                self.sinks.event(note)
            with self.stop.watching():
                self.status.update(state="running", step=self.progress.step, steps=self.parts.steps)
                self._tell_plan()
                if self.config.run.self_checks:
                    self._rehearse()
                if self.progress.step == 0:
                    self._ask_gate(force)
                    self._start_dev_evaluation()
                self._loop()
                report = self._final_report()
            self.sinks.report(report)
            return report
        finally:
            self.sinks.close()

    def _loop(self) -> None:
        for step in range(self.progress.step + 1, self.parts.steps + 1):
            if self._gave_up():
                break
            self._heed_requests()
            report = self._survivable_step(step)
            self.progress.step = step
            report = self._with_dev_score(report)
            self.sinks.step(report)
            self._step_seconds.append(report.metrics["time/step_s"])
            if step == 1:
                self._correct_plan(report.metrics["time/step_s"])
            self.status.update(step=step, eta_s=self._eta_s(step))
            if step % self.config.run.checkpoint_every == 0 or step == self.parts.steps or self._gave_up():
                self.save()

    def _survivable_step(self, step: int) -> StepReport:
        """`train_step`; where the memory does not suffice for it, what came before is saved."""
        try:
            return self.train_step(step)
        except OutOfMemoryFailed:
            if not self.updater.is_half_done:
                self.save()
            raise

    def _heed_requests(self) -> None:
        """At the safe point before a step: stop, save or evaluate when asked to."""
        if self.stop.requested or self.run_dir.requested("stop"):
            self.save()
            self.run_dir.clear_requests("stop")
            raise StopRequested(
                f"Stopped after step {self.progress.step} of {self.parts.steps}; "
                f"continue with `lowmem-grpo resume {self.run_dir.path}`."
            )
        if self.run_dir.requested("checkpoint"):
            self.save()
            self.run_dir.clear_requests("checkpoint")
        if self.run_dir.requested("eval"):
            self.run_dir.clear_requests("eval")
            if self.parts.data.dev:
                evaluation = self.held_out.evaluate("dev")
                score = "none, the metric failed" if evaluation.is_unscored else f"{evaluation.mean('score'):.3f}"
                self._event("evaluation", "info", f"dev score {score} after step {self.progress.step}")

    def _with_dev_score(self, report: StepReport) -> StepReport:
        """Evaluate on dev when it is due, keep the adapter if none was better, and add the score to the metrics."""
        every, step = self._dev_every, report.step
        due = step == self.parts.steps or (every > 0 and step % every == 0)
        if not (due and self.parts.data.dev):
            return report
        evaluation = self.held_out.evaluate("dev")
        if evaluation.is_unscored:
            self._event("unscored", "warning", f"the metric failed on every dev answer after step {step}: no dev score")
            return report
        score = evaluation.mean("score")
        self._note_dev_score(step, score)
        readings = {"eval/score": score, **_optional(evaluation, "correct", "format")}
        return StepReport(step, report.steps, {**report.metrics, **readings}, report.sample, report.sample_advantages_G)

    @property
    def _dev_every(self) -> int:
        """Steps between dev scores; ten in the run unless the config says otherwise."""
        every = self.config.eval.every
        return max(1, self.parts.steps // 10) if every is None else every

    def _note_dev_score(self, step: int, score: float) -> None:
        """Keep the adapter unless an earlier one was better; count how long there has been no new best."""
        progress = self.progress
        new_best = progress.best_score is None or score > progress.best_score
        progress.stale = 0 if new_best else progress.stale + 1
        if self._gave_up():
            self._event(
                "early stop",
                "info",
                f"no better dev score than {progress.best_score:.3f} of step {progress.best_step} in "
                f"{progress.stale} evaluations: the run ends here",
            )
        if new_best or score == progress.best_score:
            progress.best_score, progress.best_step = score, step
            self._write_adapter()

    def _gave_up(self) -> bool:
        """Whether the run ends early: too many dev scores in a row were no new best."""
        return 0 < self.config.eval.patience <= self.progress.stale

    # ------------------------------------------------------------------------------------------ state

    def save(self) -> None:
        """Write a checkpoint of the last finished step, unless there is one."""
        if self.progress.step == self._saved_step:
            return
        self.progress.seconds += self._lap()
        self.progress.skipped_in_a_row = self.updater.skipped_in_a_row
        self.progress.loss_scale = self.updater.scaler.state_dict()
        self.progress.rewards = self.checked.rubric.state()
        self.progress.limits = self.limits.lowered()
        if self.progress.best_step is None:
            self._write_adapter()
        # The event first, so that the offsets in the checkpoint include its line.
        self._event("checkpoint", "info", f"checkpoint of step {self.progress.step}")
        self.run_dir.rotate_completions(self.config.run.completions_cap_mb << 20)
        state = TrainState(
            step=self.progress.step,
            adapter=self.policy.adapter_state(),
            optimizer=optimizer_state(self.updater.optimizer, self.updater.parameters),
            progress=self.progress.to_json(),
            offsets=self.run_dir.offsets(),
            adapter_config=self.policy.adapter_config(),
            best=None if self._last_is_best else checkpoint.read_adapter(self.run_dir.adapter_dir)[0],
        )
        checkpoint.save(self.run_dir, state, keep=self.config.run.keep_checkpoints)
        self._saved_step = state.step

    def restore(self) -> list[Event]:
        """Go back to the newest whole checkpoint, or to the very start when there is none.

        Returns what `run` should tell about it, once the sinks have been started.
        """
        damaged: list[str] = []
        checkpoint.clear_leftovers(self.run_dir.checkpoints_dir)
        newest = checkpoint.latest(self.run_dir, on_damaged=damaged.append)
        if newest is None:
            lost = self.run_dir.truncate_to({})
        else:
            lost = self._restore_from(checkpoint.load(newest))
        step = self.progress.step
        return [
            *(Event("damaged checkpoint", "warning", sentence, step) for sentence in damaged),
            *(Event("lost lines", "warning", sentence, step) for sentence in lost),
            Event("resume", "info", f"goes on after step {step}", step),
            *self._restore_limits(),
        ]

    def _restore_limits(self) -> list[Event]:
        """Lower what ran out of memory before the stop, so that it does not do so again."""
        return [
            Event("resume", "info", f"goes on with {name}={value}, lowered when the memory ran out", self.progress.step)
            for name, value in self.limits.restore(self.progress.limits).items()
        ]

    def _restore_from(self, state: TrainState) -> list[str]:
        """Take over the state; returns the warnings of going back in the jsonl files."""
        self.policy.load_adapter_state(dict(state.adapter))
        load_optimizer_state(self.updater.optimizer, self.updater.parameters, state.optimizer)
        values = dict(state.progress)
        self.progress = Progress(**{**values, "said": tuple(values["said"])})
        self._saved_step = self._step = self.progress.step
        self.updater.skipped_in_a_row = self.progress.skipped_in_a_row
        if self.progress.loss_scale:
            self.updater.scaler.load_state_dict(self.progress.loss_scale)
        if self.progress.rewards:
            self.checked.rubric.restore(self.progress.rewards)
        # What lies there may be of a step after the checkpoint.
        checkpoint.write_adapter(
            self.run_dir.adapter_dir, state.adapter if state.best is None else state.best, state.adapter_config
        )
        return self.run_dir.truncate_to(state.offsets)

    @property
    def _last_is_best(self) -> bool:
        return self.progress.best_step in (None, self.progress.step)

    def _write_adapter(self) -> None:
        checkpoint.write_adapter(self.run_dir.adapter_dir, self.policy.adapter_state(), self.policy.adapter_config())

    # ------------------------------------------------------------------------------------------ gate and self-checks

    def _rehearse(self) -> None:
        """Try the longest prompt with the longest answers, so that memory runs out now or not at all.

        Nothing is learnt from it. What does not fit is made smaller, as in a step; raises OutOfMemoryFailed when
        nothing can be.
        """
        config, tokens = self.config.rollout, self.parts.workload.prompt_tokens
        problems = longest_problems(config.prompts_per_step, tokens)
        repack = partial(
            largest_micro_batch, problems, config.group_size, config.max_new_tokens, device=self.policy.device
        )
        with self._measured("rollout"):
            self.engine.rehearse(problems, config.group_size, self.sampling)
        with self._measured("update"):
            self.updater.rehearse(lambda size: [repack(micro_batch_tokens=size)])
        sizes = " and ".join(
            f"{self.progress.peaks[phase] / 2**30:.2f} GiB in the {phase} "
            f"(planned {self.planned_bytes(phase) / 2**30:.2f})"
            for phase in ("rollout", "update")
        )
        lengths = f"a prompt of {tokens} tokens with answers of {config.max_new_tokens}"
        self._event("rehearsal", "info", f"the longest case, {lengths}, took {sizes}")

    def _tell_plan(self) -> None:
        """How the run is made to fit, and why like that."""
        choice, workload = self.parts.choice, self.parts.workload
        estimate = choice.estimate
        reasons = "".join(f"; {reason}" for reason in choice.reasons)
        self._event(
            "plan",
            "info",
            f"planned peak {estimate.peak_bytes / 2**30:.2f} GiB, in the {estimate.peak_phase}, of "
            f"{workload.card.memory_bytes / 2**30:.2f} free{reasons}",
        )

    def _correct_plan(self, seconds: float) -> None:
        """After the first step: what it took, what was planned, and what the run will take at this pace."""
        planned = estimate_time(self.parts.workload, self.parts.memory, None)
        where = "" if planned is None else f" ({planned.step_s:.0f} s were planned, for answers of full length)"
        minutes = (self.parts.steps - self.progress.step) * seconds / 60
        self._event("pace", "info", f"the first step took {seconds:.1f} s{where}: {minutes:.0f} min for the others")

    def planned_bytes(self, phase: str) -> int:
        """The planned peak of a phase, of what is measured: on a GPU without the CUDA context."""
        return self.parts.choice.estimate.phase_bytes(phase) - self.parts.choice.estimate.context_bytes

    def _ask_gate(self, force: bool) -> None:
        """Ask once in the life of a run whether the base's answers leave anything to learn, and tell what was found.

        Raises GateStopped when they do not, unless the run was forced.
        """
        if self.config.gate.prompts == 0:
            return
        path = self.run_dir.gate_path
        if not path.exists():
            report = ask_gate(self.checked, self.parts, self.sinks).to_json()
            self.run_dir.replace_file(path, json_bytes({**report, "forced": force}, indent=2))
        report = json.loads(path.read_bytes())
        findings = [Finding.from_json(row) for row in report["findings"]]
        self.sinks.event(Event("gate", "info", report["sentence"], data={"verdict": report["verdict"]}))
        for finding in findings:
            self.sinks.event(finding.to_event(step=0))
        if report["verdict"] == "stop" and not report["forced"]:
            raise GateStopped(
                f"{findings[0].sentence} Nothing was trained; `lowmem-grpo baseline` shows the figures, and --force "
                "trains all the same."
            )

    def _gate_summary(self) -> dict[str, Any]:
        """What the gate said, and what its forecast was worth over the steps of the run."""
        if not self.run_dir.gate_path.exists():
            return {}
        said = json.loads(self.run_dir.gate_path.read_bytes())
        shares = {forecast["group_size"]: forecast["share"] for forecast in said["forecasts"]}
        seen = [row["groups/zero_variance"] for row in self.run_dir.read("metrics")]
        return {
            "gate": {
                "verdict": said["verdict"],
                "dead_groups_forecast": shares.get(self.config.rollout.group_size),
                "dead_groups_seen": sum(seen) / len(seen) if seen else None,
            }
        }

    def _first_step_check(self, micro_batches: Sequence[PackedMicroBatch]) -> FirstStepCheck | None:
        """Before the first update that teaches something: what will tell whether it did. None at all others."""
        if self.progress.self_checked or not self.config.run.self_checks or not has_a_gradient(micro_batches):
            return None
        return FirstStepCheck(
            self.policy,
            micro_batches,
            temperature=self.config.rollout.temperature,
            head_chunk_tokens=self.updater.head_chunk_tokens,
            exact_sampler=not self.parts.workload.kv_int8,
        )

    def _heed_check(self, step: int, check: FirstStepCheck, metrics: Mapping[str, float]) -> None:
        """Raise SelfCheckFailed when the update showed that the run does not train what it should."""
        findings = check.findings(metrics)
        for finding in findings:
            self.sinks.event(finding.to_event(step))
        if findings:
            raise SelfCheckFailed(findings[0].sentence)
        self.progress.self_checked = check.conclusive

    # ------------------------------------------------------------------------------------------ evaluation

    def _start_dev_evaluation(self) -> None:
        if self.parts.data.dev:
            score = self.held_out.start("dev").mean("score")
            self._note_dev_score(0, score)
            self._event("evaluation", "info", f"dev score {score:.3f} before training")

    def _final_report(self) -> dict[str, Any]:
        comparison = self.held_out.start_and_tuned("test") if self.parts.data.test else {}
        self.progress.seconds += self._lap()
        report = {
            **comparison,
            **self._gate_summary(),
            "steps": self.progress.step,
            "stopped_early": self.progress.step < self.parts.steps,
            "best_step": self.progress.best_step,
            "dev_score": self.progress.best_score,
            "seconds": self.progress.seconds,
            "peak_memory_bytes": max(self.progress.peak_bytes, self._probe.peak_bytes()),
            "memory": {
                "settings": asdict(self.parts.memory),
                "planned_bytes": {phase: self.planned_bytes(phase) for phase in ("rollout", "update")},
                "measured_bytes": {phase: self.progress.peaks.get(phase, 0) for phase in ("rollout", "update")},
            },
            "adapter": str(self.run_dir.adapter_dir),
            "model": self.config.model.name,
            "seed": self.config.run.seed,
            "findings": [row for row in self.run_dir.read("events") if row.get("severity") != "info"],
        }
        self.run_dir.write_report(report)
        return report

    # ------------------------------------------------------------------------------------------ small parts

    def _build_updater(self) -> Updater:
        config, parameters = self.config, self.policy.trainable_parameters()
        updates = self.parts.steps * config.algorithm.updates_per_rollout
        settings = UpdateSettings(
            loss=config.algorithm.loss,
            loss_options=self.checked.loss_options,
            kl_coef=config.algorithm.kl_coef,
            temperature=config.rollout.temperature,
            head_chunk_tokens=self.parts.memory.head_chunk_tokens,
            max_grad_norm=config.optim.max_grad_norm,
            updates_per_rollout=config.algorithm.updates_per_rollout,
            lr_of=lambda update: lr_at(
                update,
                updates,
                lr=config.optim.lr,
                schedule=config.optim.schedule,
                warmup=config.optim.warmup_steps * config.algorithm.updates_per_rollout,
            ),
            micro_batch_tokens=self.parts.memory.micro_batch_tokens,
            sampler_correction=_sampler_correction(config),
        )
        optimizer = build_optimizer(
            config.optim.name, parameters, lr=config.optim.lr, weight_decay=config.optim.weight_decay
        )
        return Updater(self.policy, settings, optimizer)

    def _watch_memory(self) -> Limits:
        """Hear of every recovery from an out-of-memory, and know what was lowered then."""
        stages: tuple[Any, ...] = self.engine, self.parts.eval_engine, self.updater
        for stage in stages:
            stage.on_out_of_memory = self._tell_recovery
        return Limits(
            {
                "rollout.max_concurrent": (self.engine, "max_concurrent"),
                "memory.prefill_tokens": (self.engine, "prefill_tokens"),
                "eval.max_concurrent": (self.parts.eval_engine, "max_concurrent"),
                "eval.prefill_tokens": (self.parts.eval_engine, "prefill_tokens"),
                "memory.micro_batch_tokens": (self.updater, "micro_batch_tokens"),
                "memory.head_chunk_tokens": (self.updater, "head_chunk_tokens"),
            }
        )

    def _tell_recovery(self, recovery: Recovery) -> None:
        self.sinks.event(Event("out of memory", "warning", recovery.sentence, self._step, dict(recovery.lowered)))

    def _in_update(self, dead_P: torch.Tensor) -> torch.Tensor:
        """Which groups (P,) are forwarded at all: with a KL penalty even one without spread has a gradient."""
        algorithm = self.config.algorithm
        return torch.ones_like(dead_P) if algorithm.kl_coef > 0 or not algorithm.skip_dead_groups else ~dead_P

    def _token_weights(self, lengths_R: torch.Tensor) -> torch.Tensor:
        return token_weights(self.config.algorithm.aggregation, lengths_R, max_new_tokens=self.sampling.max_new_tokens)

    def _findings(self, step: int, metrics: Mapping[str, float]) -> None:
        """Say once what a user should know about this step."""
        if metrics["completion/truncated"] == 1.0:
            self._say_once(
                step,
                "truncated",
                f"Every answer was cut at {self.sampling.max_new_tokens} tokens before it ended; "
                "raise rollout.max_new_tokens.",
            )
        if metrics["groups/zero_variance"] == 1.0:
            self._say_once(
                step,
                "dead groups",
                "All groups of this step scored the same inside the group, so nothing was learnt from it; "
                "if this goes on, give partial credit, take easier rows or raise rollout.group_size.",
            )
        if metrics["optim/skipped"] > 0:
            self._event("skipped step", "warning", f"step {step} had a non-finite gradient and was left out")

    def _say_once(self, step: int, kind: str, message: str) -> None:
        if kind not in self.progress.said:
            self.progress.said = (*self.progress.said, kind)
            self.sinks.event(Event(kind, "warning", message, step))

    def _event(self, kind: str, severity: Any, message: str) -> None:
        self.sinks.event(Event(kind, severity, message, self.progress.step))

    def _show_rollout(self, done: int, total: int, tokens: int) -> None:
        self.sinks.progress("rollout", done, total, f"{tokens} tokens")

    def _show_update(self, done: int, total: int) -> None:
        self.sinks.progress("update", done, total)

    @contextlib.contextmanager
    def _measured(self, phase: str) -> Iterator[_Measured]:
        self._probe.reset()
        measured, start = _Measured(), time.monotonic()
        yield measured
        measured.seconds = time.monotonic() - start
        measured.peak_bytes = self._probe.peak_bytes()
        self.progress.peak_bytes = max(self.progress.peak_bytes, measured.peak_bytes)
        self.progress.peaks[phase] = max(self.progress.peaks.get(phase, 0), measured.peak_bytes)

    def _eta_s(self, step: int) -> float:
        return (self.parts.steps - step) * sum(self._step_seconds) / len(self._step_seconds)

    def _lap(self) -> float:
        """Seconds since the last call."""
        now = time.monotonic()
        elapsed, self._clock = now - self._clock, now
        return elapsed


@dataclass(slots=True)
class _Measured:
    seconds: float = 0.0
    peak_bytes: int = 0


def _sampler_correction(config: Config) -> SamplerCorrection:
    """What `auto` is: 8-bit keys and values sample from another policy, anything else does not."""
    kind = config.algorithm.sampler_correction
    if kind == "auto":
        return "truncate" if config.rollout.kv_dtype == "int8" else "none"
    return kind


def _failures(rubric: Rubric) -> float:
    """Scores that a reward function failed to give in the last scoring call."""
    return float(sum(function["failures"] or 0 for function in rubric.statistics().values()))


def _optional(evaluation: Evaluation, *readings: str) -> dict[str, float]:
    return {f"eval/{name}": evaluation.mean(name) for name in readings if name in evaluation.readings}
