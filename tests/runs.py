"""Tiny complete runs for the tests of the loop: in this process, or in forked ones that can be killed.

`python -m tests.runs` is the process that forks: it imports everything once, starts no thread, and does one job a line.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lowmem_grpo import faults, lifecycle
from lowmem_grpo.assembly import Parts, Preflight
from lowmem_grpo.checkpoint import latest
from lowmem_grpo.config import LoadedConfig, load_config
from lowmem_grpo.errors import LowmemGrpoError
from lowmem_grpo.lifecycle import resume_run, start_run
from lowmem_grpo.rundir import RunDir
from lowmem_grpo.sinks import Fanout
from lowmem_grpo.trainer import Trainer
from lowmem_grpo.types import StepReport
from tests.tiny import save_tiny, tiny_config

ROOT = Path(__file__).resolve().parent.parent
END_IDS = [2, *range(100, 160)]
"""With this many end tokens about a quarter of the random tokens ends an answer."""

REWARD = '''def letters(completions, **columns):
    """Counts what a random model writes often enough for the groups to have spread."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [sum(sign.isascii() and sign.isalnum() for sign in text) for text in texts]
'''
TIMED = ("time/", "memory/", "speed/")
"""Metrics that differ from run to run."""
MEASURED = ("resume", "plan", "rehearsal", "pace")
"""Events that do."""


# --------------------------------------------------------------------------------------------- what a run is made of


@functools.cache
def _session_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="lowmem-grpo-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def model_folder(*, ends: bool = True, layers: int = 2) -> Path:
    """A tiny model on disk, made once; without `ends` hardly any of its answers ends before the limit."""
    folder = save_tiny(_session_folder() / f"model-{ends}-{layers}")
    if layers != 2:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(tiny_config(layers=layers)).save_pretrained(folder)
    if ends:
        path = folder / "generation_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": END_IDS}))
    return folder


@functools.cache
def reward_file() -> Path:
    """The file with the reward `letters`."""
    path = _session_folder() / "rewards.py"
    path.write_text(REWARD)
    return path


def raw_config(**sections: Any) -> dict[str, Any]:
    """The config of a tiny run as a mapping, some sections replaced."""
    return {
        "model": {"name": str(model_folder()), "quantization": "none"},
        "lora": {"rank": 2, "alpha": 4},
        "data": {"source": "addition", "args": {"low": 0, "high": 9}, "max_prompt_tokens": 128},
        "rewards": [f"{reward_file()}:letters"],
        "rollout": {"prompts_per_step": 2, "group_size": 4, "max_new_tokens": 6},
        "optim": {"lr": 1e-2},
        "gate": {"prompts": 0},
        "eval": {"metric": "number"},
        "run": {"steps": 6, "checkpoint_every": 3, "sinks": ["jsonl"]},
    } | sections


def tiny_run(*overrides: str, **sections: Any) -> LoadedConfig:
    """The config of a tiny run, some sections replaced, then `key=value` overrides."""
    return load_config(raw_config(**sections), overrides)


def letters(completions: list[Any], **columns: Any) -> list[int]:
    """The reward of `REWARD` as a function of this process: no child process to wait for."""
    namespace: dict[str, Any] = {}
    exec(REWARD, namespace)
    return namespace["letters"](completions, **columns)


IN_MEMORY: dict[str, Any] = {"rewards": ["letters"]}
"""Sections for a run whose reward is passed as `functions=FUNCTIONS`."""
FUNCTIONS = {"letters": letters}


# --------------------------------------------------------------------------------------------- what a run left


@dataclass(frozen=True)
class Outcome:
    """What has to be the same however often a run was interrupted."""

    adapter: dict[str, bytes]
    checkpoint: dict[str, bytes]
    progress: dict[str, Any]
    metrics: list[dict[str, Any]]
    completions: bytes
    problems: bytes
    events: list[tuple[int, str, str]]
    report: dict[str, Any]


def outcome(path: Path) -> Outcome:
    """Read a finished run."""
    run_dir = RunDir.open(path)
    newest = latest(run_dir)
    assert newest is not None
    progress = json.loads((newest / "state.json").read_bytes())["progress"]
    parts = [*run_dir.completion_parts(), run_dir.stream_path("completions")]
    return Outcome(
        adapter=_files(run_dir.adapter_dir),
        checkpoint={name: data for name, data in _files(newest).items() if name != "state.json"},
        progress={name: value for name, value in progress.items() if name not in ("seconds", "peak_bytes", "peaks")},
        metrics=[_untimed(row) for row in run_dir.read("metrics")],
        completions=b"".join(part.read_bytes() for part in parts if part.exists()),
        problems=run_dir.stream_path("problems").read_bytes(),
        events=[(r["step"], r["kind"], r["message"]) for r in run_dir.read("events") if r["kind"] not in MEASURED],
        report={
            name: value
            for name, value in (run_dir.read_report() or {}).items()
            if name not in ("seconds", "peak_memory_bytes", "memory", "adapter", "findings")
        },
    )


def _files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def _untimed(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.startswith(TIMED)}


def assert_same(interrupted: Outcome, straight: Outcome) -> None:
    """Bit for bit, part after part, so that a failure says which."""
    assert interrupted.metrics == straight.metrics
    assert interrupted.completions == straight.completions
    assert interrupted.problems == straight.problems
    assert interrupted.events == straight.events
    assert interrupted.progress == straight.progress
    assert interrupted.checkpoint == straight.checkpoint
    assert interrupted.adapter == straight.adapter
    assert interrupted.report == straight.report


# --------------------------------------------------------------------------------------------- meddling with a run


@contextmanager
def during_step(step: int, act: Callable[[], object]) -> Iterator[None]:
    """`act` once, in the middle of the given step (it has been trained, and not been reported)."""
    with pytest.MonkeyPatch.context() as patch:
        train_step = Trainer.train_step

        def acting(trainer: Trainer, number: int) -> StepReport:
            report = train_step(trainer, number)
            if number == step:
                act()
            return report

        patch.setattr(Trainer, "train_step", acting)
        yield


@contextmanager
def watching_trainers() -> Iterator[list[Trainer]]:
    """The trainers made inside the block."""
    made: list[Trainer] = []
    with pytest.MonkeyPatch.context() as patch:

        def make(checked: Preflight, parts: Parts, run_dir: RunDir, sinks: Fanout, status: Any) -> Trainer:
            made.append(Trainer(checked, parts, run_dir, sinks, status))
            return made[-1]

        patch.setattr(lifecycle, "Trainer", make)
        yield made


# --------------------------------------------------------------------------------------------- runs that are killed


class Forks:
    """The process that forks, from the outside: `train` does one run in a child of it."""

    def __init__(self) -> None:
        self._log = open(_session_folder() / "forks.log", "w+")  # noqa: SIM115 (closed in `close`)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.runs"],
            cwd=ROOT,
            env={
                **os.environ,
                **{name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")},
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def train(self, run_dir: Path, config: Mapping[str, Any], **job: Any) -> dict[str, Any]:
        """Start the run, or continue it when it exists; see `_work` for the keys of a job.

        The reply has `killed`, `pid`, and of a child that was not killed `names` (its fault points), `calls` (of
        functions while it trained, where it counted them) and `error` (class name and message, or None).
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"run_dir": str(run_dir), "config": config, **job}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        reply = json.loads(line) if line else {"failed": True}
        if reply.get("failed"):
            self._log.seek(0)
            pytest.fail(f"the run failed:\n{self._log.read()[-4000:]}")
        return reply

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._log.close()


def _serve() -> None:
    torch.set_num_threads(1)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a run prints is no reply
    gc.freeze()  # a collection in a child would touch, and so copy, every page of the parent
    for line in sys.stdin:
        replies.write(json.dumps(_in_child(json.loads(line))) + "\n")
        replies.flush()


def _in_child(job: dict[str, Any]) -> dict[str, Any]:
    threads = os.listdir("/proc/self/task") if sys.platform == "linux" else ["main"]
    assert len(threads) == 1, "a fork takes only one thread along"
    receiving, sending = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            os.close(receiving)
            os.write(sending, json.dumps(_work(job)).encode())
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(sending)
    with open(receiving, "rb") as pipe:
        reply = pipe.read()
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return {"killed": True, "pid": pid}
    return {"killed": False, "pid": pid, **json.loads(reply or b'{"failed": true}')}


def _work(job: dict[str, Any]) -> dict[str, Any]:
    """One run, killed at fault point number `kill_at_point` or function call number `kill_at_call` (0: only count).

    Both count from 1, in the main thread only. `cap_bytes` makes completions.jsonl rotate that early.
    """
    names: list[str] = []
    calls = _CallCounter(job.get("kill_at_call"))

    def reached(name: str) -> None:
        if threading.current_thread() is threading.main_thread():
            names.append(name)
            if len(names) == job.get("kill_at_point"):
                os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(faults, "on_fault_point", reached)
        rotate, run = RunDir.rotate_completions, Trainer.run
        cap = job.get("cap_bytes")
        patch.setattr(RunDir, "rotate_completions", lambda folder, default: rotate(folder, cap or default))
        patch.setattr(Trainer, "run", lambda *args, **options: calls.count(lambda: run(*args, **options)))
        error = _train(Path(job["run_dir"]), job["config"])
    return {"names": names, "calls": calls.number, "error": error}


def _train(run_dir: Path, config: dict[str, Any]) -> list[str] | None:
    try:
        if (run_dir / "config.yaml").exists() and not (run_dir / ".creating").exists():
            resume_run(run_dir, functions=FUNCTIONS)
        else:
            start_run(load_config(config), run_dir, functions=FUNCTIONS)
    except LowmemGrpoError as error:
        return [type(error).__name__, str(error)]
    return None


class _CallCounter:
    """Counts calls of Python and C functions in this thread, and ends the process at one of them."""

    def __init__(self, kill_at: int | None) -> None:
        self.number = 0
        self._kill_at = kill_at

    def count(self, work: Callable[[], Any]) -> Any:
        if self._kill_at is not None:
            sys.setprofile(self._on_call)
        try:
            return work()
        finally:
            sys.setprofile(None)

    def _on_call(self, _frame: FrameType, _event: str, _argument: Any) -> None:
        self.number += 1
        if self.number == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    _serve()
