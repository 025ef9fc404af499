"""The process that runs the user's reward files: `python -m lowmem_grpo.rewards.worker`, started by `process.py`.

It reads one request a line from stdin and writes one reply a line to what was stdout; both are JSON (`wire.py`).

    {"op": "load", "key", "spec", "base_dir", "args"}    -> {"signature": [accepted, required, takes_all]} | {"refused"}
    {"op": "call", "key", "inputs", "count", "timeout_s"} -> {"values", "errors"} | {"line", "traceback"} | {"refused"}

What this separation covers: an endless loop, a runaway pattern, a crash, a memory hunger, prints, a Ctrl-C in the
terminal, the death of the trainer (stdin ends). What it does not: the code runs with the rights of the user, reads and
writes their files, and reaches the network.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from lowmem_grpo.errors import ConfigError, LowmemGrpoError
from lowmem_grpo.plugins import load_object
from lowmem_grpo.rewards.base import AsyncLoop, Scores, Signature, call_function
from lowmem_grpo.rewards.registry import REWARDS
from lowmem_grpo.rewards.wire import from_line, to_line


class Worker:
    """The loaded functions by key, and the answer to each request."""

    def __init__(self) -> None:
        self._functions: dict[str, Callable[..., Any]] = {}
        self._loop = AsyncLoop()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply to one request; errors for the user become {"refused": [class name, sentence]}."""
        try:
            return self._load(request) if request["op"] == "load" else self._call(request)
        except LowmemGrpoError as error:
            return {"refused": [type(error).__name__, str(error)]}

    def _load(self, request: dict[str, Any]) -> dict[str, Any]:
        spec, args = request["spec"], request["args"]
        found = load_object(spec, registry=REWARDS, kind="reward", base_dir=Path(request["base_dir"]))
        if spec in REWARDS:
            function, args = found(**args), {}
        else:
            function = found
        signature = Signature.of(function)
        if unknown := signature.unknown_argument(args):
            raise ConfigError(f"reward '{spec}' {unknown}")
        self._functions[request["key"]] = functools.partial(function, **args) if args else function
        return {"signature": [signature.accepted, signature.required, signature.takes_all]}

    def _call(self, request: dict[str, Any]) -> dict[str, Any]:
        key = request["key"]
        # Ends the process with the place where it hangs, even inside a C function that never lets Python run.
        faulthandler.dump_traceback_later(request["timeout_s"], exit=True)
        try:
            result = call_function(self._functions[key], request["inputs"], request["count"], key, self._loop)
        finally:
            faulthandler.cancel_dump_traceback_later()
        if isinstance(result, Scores):
            return {"values": result.values, "errors": result.errors}
        return {"line": result.line, "traceback": result.traceback}


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Answers requests until there are no more."""
    worker = Worker()
    for line in iter(requests.readline, b""):
        reply = worker.answer(from_line(line))
        sys.stdout.flush()
        replies.write(to_line(reply))
        replies.flush()


def main() -> None:
    """Takes the pipes away from the user's code, sets the limits, serves, and leaves without waiting for threads."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)  # input() in a reward must not eat a request
    os.dup2(2, 1)  # a print, also one of a C library, must not look like a reply
    faulthandler.enable()
    _limit_memory(int(sys.argv[1]))
    serve(requests, replies)
    sys.stdout.flush()
    os._exit(0)


def _limit_memory(limit_bytes: int) -> None:
    """Makes a hungry reward fail by itself, before the system ends the trainer (Linux; elsewhere nothing happens)."""
    if sys.platform != "linux":
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit_bytes = limit_bytes if hard == resource.RLIM_INFINITY else min(limit_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    with contextlib.suppress(OSError):  # a sandbox may mount /proc read-only; the limit above still holds
        Path("/proc/self/oom_score_adj").write_text("1000")


if __name__ == "__main__":
    main()
