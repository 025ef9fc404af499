"""Start, continue and re-evaluate runs: a run folder, its lock and log, the parts, and the trainer in it."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lowmem_grpo.assembly import (
    Preflight,
    assemble,
    environment,
    preflight,
    reward_files,
    run_info,
    sha256_of,
    with_memory,
)
from lowmem_grpo.catalog import ModelInfo
from lowmem_grpo.catalog.disk import gigabytes
from lowmem_grpo.config import LoadedConfig, dump_config, load_config, resume_overrides
from lowmem_grpo.errors import ConfigError, GateStopped, RunDirError, UserError
from lowmem_grpo.files import json_bytes
from lowmem_grpo.gate import GateReport
from lowmem_grpo.gatekeeper import ask_gate
from lowmem_grpo.held_out import HeldOut
from lowmem_grpo.rundir import RUNS_ROOT, RunDir, StatusWriter, run_name, tee_output
from lowmem_grpo.sinks import Fanout, make_sinks
from lowmem_grpo.sinks.console import ConsoleSink
from lowmem_grpo.trainer import Trainer
from lowmem_grpo.types import Event

__all__ = ["baseline", "evaluate_run", "resume_run", "start_run"]

Functions = Mapping[str, Callable[..., Any]]


def start_run(
    loaded: LoadedConfig,
    run_dir: Path | None = None,
    *,
    functions: Functions | None = None,
    force: bool = False,
) -> tuple[RunDir, dict[str, Any]]:
    """Train from the start into `run_dir` (None: `runs/<name>-<date>`); returns the folder and the report.

    `functions` are reward functions of this process by name; `force` trains even where the gate sees nothing to learn.
    Raises UserError for a wrong input and GateStopped when the gate says no, and then leaves no run folder behind;
    StopRequested after a requested stop; RunFailed when the run cannot go on.
    """
    with _checked(loaded, functions) as checked:
        folder = RunDir.create(
            run_dir or RUNS_ROOT / run_name(loaded.name, RUNS_ROOT),
            config_text=dump_config(checked.config),
            environment=environment(checked),
            inputs={name: path.read_bytes() for name, path in reward_files(checked.config).items()},
        )
        with folder.lock():
            try:
                return folder, _train(folder, checked, resume=False, force=force)
            except (UserError, GateStopped):
                # What only the tokenizer or the model could tell, before the first step: the folder is free again.
                if not any(folder.read("metrics")):
                    shutil.rmtree(folder.path)
                raise


def resume_run(
    path: Path | str, overrides: Sequence[str] = (), *, functions: Functions | None = None
) -> tuple[RunDir, dict[str, Any]]:
    """Go on from the newest checkpoint of a run, or from its start when it has none.

    `overrides` may lengthen the run and change what does not touch the mathematics. Raises as `start_run`, and
    RunDirError when the run is in use or its data or reward files have changed since it began.
    """
    folder = RunDir.open(path)
    with folder.lock(), _checked(_stored_config(folder, overrides), functions) as checked:
        _check_unchanged(folder, checked)
        return folder, _train(folder, checked, resume=True)


def evaluate_run(path: Path | str, *, functions: Functions | None = None) -> dict[str, Any]:
    """Start against tuned on the test split, as in report.json; a finished run's own report is returned as it is.

    Raises RunDirError when the run has no test rows or no adapter yet.
    """
    folder = RunDir.open(path)
    report = folder.read_report()  # a run that went on after its report has none until it is finished again
    if report is not None and "tuned" in report:
        return report
    if not folder.adapter_dir.exists():
        raise RunDirError(f"{folder.path} has no adapter yet: let the run reach its first checkpoint.")
    with folder.lock(), _checked(_stored_config(folder), functions) as checked:
        _check_unchanged(folder, checked)
        parts = assemble(checked)
        if not parts.data.test:
            raise RunDirError(f"{folder.path} has no test rows: set data.test_size or data.test_source in a new run.")
        return HeldOut(checked, parts, folder, Fanout({}, print)).start_and_tuned("test")


def baseline(loaded: LoadedConfig, *, functions: Functions | None = None) -> GateReport:
    """The gate alone: what the base answers to training prompts, and whether that can be learnt from.

    Writes nothing. Raises UserError for a wrong input, RunFailed when a reward fails on everything.
    """
    if loaded.config.gate.prompts == 0:
        raise ConfigError("`gate.prompts` is 0, so the gate has nothing to look at: set it to 16 or more")
    with _checked(loaded, functions) as checked:
        print(_model_line(checked.model))
        parts = assemble(checked)
        for line in (*parts.data.report.describe(), parts.stream.describe()):
            print(line)
        sinks = Fanout({"console": ConsoleSink()}, print)
        sinks.start(run_info(checked, name=f"baseline of {loaded.name}", run_dir="", steps=0))
        try:
            for warning in (*checked.warnings, *parts.data.report.warnings):
                sinks.event(Event("warning", "warning", warning))
            return ask_gate(checked, parts, sinks)
        finally:
            sinks.close()


def _train(folder: RunDir, checked: Preflight, *, resume: bool, force: bool = False) -> dict[str, Any]:
    """Load the model and train; everything printed also goes to train.log."""
    folder.clear_requests()
    with tee_output(folder.log_path), StatusWriter(folder, steps=checked.config.run.steps or 0) as status:
        sinks = Fanout(make_sinks(checked.config.run.sinks, folder), print)
        print(_model_line(checked.model))
        parts = assemble(checked, goes_on=resume)
        # What was chosen is part of the run: it goes on like that, on whatever card.
        folder.replace_file(folder.config_path, dump_config(with_memory(checked.config, parts.memory)))
        trainer = Trainer(checked, parts, folder, sinks, status)
        warnings, notes = [*checked.warnings, *parts.data.report.warnings], []
        if resume:
            folder.report_path.unlink(missing_ok=True)  # it would not be that of the longer run
            notes = trainer.restore()
            warnings += _environment_changes(folder, checked)
        told = {row["message"] for row in folder.read("events")}
        notes += [Event("warning", "warning", warning) for warning in warnings if warning not in told]
        for line in (*parts.data.report.describe(), parts.stream.describe()):
            print(line)
        folder.replace_file(folder.inputs_dir / "template.json", json_bytes(parts.template, indent=2))
        return trainer.run(notes, force=force)


@contextlib.contextmanager
def _checked(loaded: LoadedConfig, functions: Functions | None) -> Iterator[Preflight]:
    checked = preflight(loaded, functions=functions)
    try:
        yield checked
    finally:
        checked.close()


def _stored_config(folder: RunDir, overrides: Sequence[str] = ()) -> LoadedConfig:
    stored = load_config(folder.config_path)
    return LoadedConfig(resume_overrides(stored.config, overrides), folder.path.name, folder.path)


def _model_line(model: ModelInfo) -> str:
    if model.cached:
        return f"model: {model.name}, already on this disk"
    room = f"{gigabytes(model.free_bytes)} free"
    return f"model: {model.name}, {gigabytes(model.download_bytes)} to fetch, {room} on the disk of the cache"


def _environment_changes(folder: RunDir, checked: Preflight) -> list[str]:
    """What differs from where the run began and can change the last bits of a result, one sentence each."""
    began, now = json.loads(folder.environment_path.read_bytes()), environment(checked)
    return [
        f"{what} was {began[what]} when the run began and is {now[what]} now: it goes on, but not bit for bit."
        for what in ("packages", "device", "threads", "compute_dtype")
        if began[what] != now[what]
    ]


def _check_unchanged(folder: RunDir, checked: Preflight) -> None:
    """Raise RunDirError when the data or a reward file is not what the run began with."""
    began = json.loads(folder.environment_path.read_bytes())
    if began["data_sha256"] != checked.raw.sha256:
        raise RunDirError(
            f"The data of {checked.config.data.source} changed since the run began, so it cannot go on exactly; "
            "put the old file back, or start a new run."
        )
    for name, path in reward_files(checked.config).items():
        if began["reward_sha256"].get(name) != sha256_of(path):
            raise RunDirError(
                f"{path} changed since the run began, so it cannot go on exactly; "
                f"put {folder.inputs_dir / name} back in its place, or start a new run."
            )
