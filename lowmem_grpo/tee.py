"""train.log: a copy of everything the process prints, as plain text."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import IO

__all__ = ["Tee", "tee_output"]

# Colours and cursor moves (CSI), titles and links (OSC), other escapes, and control characters except tab, \n and \r.
_CODES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\-_]|[\x00-\x08\x0b\x0c\x0e-\x1f]"
)


class Tee(io.TextIOBase):
    """A text stream that hands everything on to `terminal` and writes it, without control codes, to a log.

    `isatty`, `fileno` and `encoding` are the terminal's, so colours and progress bars behave as without it.
    `log_line` writes to the log only. `forward` may be set to show the text by another way (a live display prints it
    above itself); the log is not touched by that. Of text that a carriage return overwrites, the log keeps the last.
    """

    def __init__(self, terminal: IO[str], log: IO[str], guard: threading.RLock) -> None:
        super().__init__()
        self.terminal = terminal
        self.forward: IO[str] | None = None
        self._log = log
        self._guard = guard
        self._pending = ""

    def write(self, text: str) -> int:
        (self.forward or self.terminal).write(text)
        with self._guard:
            self._pending += text
            *lines, self._pending = self._pending.split("\n")
            for line in lines:
                self.log_line(line)
            # A bar that only ever rewrites its line must not pile up here.
            if "\r" in self._pending[:-1]:
                self._pending = self._pending[self._pending[:-1].rfind("\r") + 1 :]
        return len(text)

    def log_line(self, line: str) -> None:
        """Write one line to the log and not to the terminal."""
        shown = _CODES.sub("", line).rstrip("\r").rpartition("\r")[2]
        with self._guard:
            if self._log.closed:
                return
            try:
                self._log.write(shown + "\n")
                self._log.flush()
            except OSError as error:  # printing must not end a run; what has to be written says so itself
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        with contextlib.suppress(OSError):
            self._log.close()
        self.terminal.write(f"train.log is no longer written: {error.strerror}\n")

    def finish(self) -> None:
        """Write what has no newline yet to the log."""
        with self._guard:
            if self._pending.strip():
                self.log_line(self._pending)
            self._pending = ""

    def flush(self) -> None:
        (self.forward or self.terminal).flush()

    def isatty(self) -> bool:
        return self.terminal.isatty()

    def fileno(self) -> int:
        return self.terminal.fileno()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self.terminal, "encoding", None) or "utf-8"


@contextlib.contextmanager
def tee_output(log_path: Path) -> Iterator[None]:
    """Copy what this process prints to `log_path` (appended) while the block runs, tracebacks included.

    This works on `sys.stdout` and `sys.stderr`, not on file descriptors: a pipe in their place would lose the last
    words of a process that crashes, and make libraries believe that there is no terminal. What C code and child
    processes print goes to the terminal alone.
    """
    with open(log_path, "a", encoding="utf-8", errors="backslashreplace") as log:
        guard = threading.RLock()
        before = sys.stdout, sys.stderr
        out, err = (Tee(stream, log, guard) for stream in before)
        sys.stdout, sys.stderr = out, err
        try:
            yield
        except BaseException:
            err.log_line(traceback.format_exc().rstrip())
            raise
        finally:
            out.finish()
            err.finish()
            sys.stdout, sys.stderr = before
