"""The trainer's side of the reward worker: one child process, restarted when a reward function takes it down."""

from __future__ import annotations

import collections
import contextlib
import os
import queue
import signal
import site
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from lowmem_grpo import errors
from lowmem_grpo.errors import LowmemGrpoError, PluginError
from lowmem_grpo.rewards.base import Failure, Scores, Signature
from lowmem_grpo.rewards.wire import from_line, to_line

__all__ = ["RewardProcess"]

LOAD_TIMEOUT_S = 300.0
"""How long a user's file may take to load: it may import a large library for the first time."""

GRACE_S = 2.0
"""How long after its time limit the worker may still take to say where it hangs, before it is killed."""

TAIL_LINES = 60
"""Lines of the worker's output that are kept, to be shown when it dies."""


@dataclass(slots=True)
class _Child:
    """A running worker, its replies (None: the pipe ended) and the end of what it printed."""

    process: subprocess.Popen[bytes]
    replies: queue.Queue[bytes | None] = field(default_factory=queue.Queue)
    tail: collections.deque[str] = field(default_factory=lambda: collections.deque(maxlen=TAIL_LINES))
    threads: tuple[threading.Thread, ...] = ()

    @property
    def stdin(self) -> BinaryIO:
        assert self.process.stdin is not None
        return self.process.stdin  # type: ignore[return-value]


class RewardProcess:
    """Runs reward functions from files in one child process without a GPU; use as a context manager or `close` it.

    `on_output` gets each line that a function prints. The memory of the child is limited to half of the machine's.
    """

    def __init__(self, on_output: Callable[[str], None]) -> None:
        self._on_output = on_output
        self._loads: dict[str, dict[str, Any]] = {}
        self._child: _Child | None = None

    def load(self, key: str, spec: str, base_dir: Path, args: Mapping[str, Any]) -> Signature:
        """Loads the function `spec` under `key`. Raises PluginError or ConfigError, as the worker says."""
        request = {"op": "load", "key": key, "spec": spec, "base_dir": str(base_dir), "args": dict(args)}
        reply = self._ask(request, LOAD_TIMEOUT_S)
        if isinstance(reply, Failure):
            raise PluginError(
                f"reward '{spec}' took the worker down while it was loaded: {reply.line}\n{reply.traceback}"
            )
        self._loads[key] = request
        accepted, required, takes_all = reply["signature"]
        return Signature(tuple(accepted), tuple(required), takes_all)

    def call(self, key: str, inputs: Mapping[str, Any], count: int, timeout_s: float) -> Scores | Failure:
        """One call for `count` answers; a time-out, a crash or an exception is a Failure.

        Raises RewardFailed (a wrong number of scores) and DataError (a column that cannot cross).
        """
        request = {"op": "call", "key": key, "inputs": inputs, "count": count, "timeout_s": timeout_s}
        reply = self._ask(request, timeout_s)
        if isinstance(reply, Failure):
            return reply
        if "line" in reply:
            return Failure(reply["line"], reply["traceback"])
        return Scores(tuple(reply["values"]), tuple(reply["errors"]))

    def close(self) -> None:
        """Ends the child; harmless when there is none."""
        child, self._child = self._child, None
        if child is None:
            return
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()
        try:
            child.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            pass  # it is in the middle of a call; nobody waits for that any more
        _end(child)

    def _ask(self, request: Mapping[str, Any], timeout_s: float) -> Any:
        """The reply, or a Failure when the child died or ran out of time; a refusal is raised."""
        line = to_line(request)
        child = self._child or self._start()
        child.tail.clear()
        started = time.monotonic()
        try:
            with contextlib.suppress(BrokenPipeError):  # it died in between; the missing reply says so
                child.stdin.write(line)
                child.stdin.flush()
            answer = _next_reply(child, started + timeout_s + GRACE_S)
        except BaseException:  # an interrupt: a reply that comes later must not be taken for the next one
            self._child = None
            _end(child)
            raise
        if answer is None:
            self._child = None
            _end(child)
            return _post_mortem(child, timeout_s if time.monotonic() - started >= timeout_s else None)
        reply = from_line(answer)
        if "refused" in reply:
            name, sentence = reply["refused"]
            refusal: type[LowmemGrpoError] = getattr(errors, name)
            raise refusal(sentence)
        return reply

    def _start(self) -> _Child:
        command = [sys.executable, "-P", "-m", "lowmem_grpo.rewards.worker", str(_memory_limit())]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_environment(),
            start_new_session=True,
        )
        child = _Child(process)
        child.threads = tuple(
            threading.Thread(target=target, args=(child,), daemon=True) for target in (_read_replies, self._read_output)
        )
        for thread in child.threads:
            thread.start()
        self._child = child
        for request in self._loads.values():
            reply = self._ask(request, LOAD_TIMEOUT_S)
            if isinstance(reply, Failure):
                raise errors.RewardFailed(f"reward '{request['spec']}' could not be loaded again: {reply.line}")
        return child

    def _read_output(self, child: _Child) -> None:
        assert child.process.stderr is not None
        for raw in child.process.stderr:
            line = raw.decode("utf-8", "replace").rstrip("\r\n")
            child.tail.append(line)
            self._on_output(line)


def _read_replies(child: _Child) -> None:
    assert child.process.stdout is not None
    for line in child.process.stdout:
        child.replies.put(line)
    child.replies.put(None)


def _next_reply(child: _Child, deadline: float) -> bytes | None:
    """The next reply, or None when the child is gone (a grandchild may hold its pipe open) or the deadline is over."""
    while time.monotonic() < deadline:
        try:
            return child.replies.get(timeout=min(0.5, max(0.01, deadline - time.monotonic())))
        except queue.Empty:
            if child.process.poll() is not None and child.replies.empty():
                return None
    return None


def _post_mortem(child: _Child, timeout_s: float | None) -> Failure:
    printed = "\n".join(child.tail)
    if timeout_s is not None:
        line = f"TimeoutError: no scores within {timeout_s:g} s"
    elif (code := child.process.returncode) < 0:
        line = f"the reward process was killed by {signal.Signals(-code).name}"
    else:
        line = f"the reward process ended with exit code {code}"
    return Failure(line, f"{printed}\n{line}".strip(), timed_out=timeout_s is not None)


def _end(child: _Child) -> None:
    """Kills the child and what it started, and collects its last output."""
    if sys.platform == "win32":
        child.process.kill()
    else:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.process.pid, signal.SIGKILL)
    child.process.wait()
    for thread in child.threads:
        thread.join(GRACE_S)
    with contextlib.suppress(BrokenPipeError):
        child.stdin.close()
    for pipe, thread in zip((child.process.stdout, child.process.stderr), child.threads, strict=True):
        if pipe is not None and not thread.is_alive():
            pipe.close()


def _memory_limit() -> int:
    import psutil

    return int(psutil.virtual_memory().total // 2)


def _environment() -> dict[str, str]:
    """This process's environment, without a GPU, in UTF-8, and with this package importable."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONIOENCODING": "utf-8:backslashreplace"}
    root = str(Path(__file__).resolve().parents[2])
    if root not in site.getsitepackages():  # there it is found anyway, and would come before the standard library
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (env.get("PYTHONPATH"), root)))
    return env
