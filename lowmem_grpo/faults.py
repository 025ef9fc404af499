"""Named places where a process may be killed, so that tests can kill it there.

Code that must survive a sudden end calls `fault_point("what happens next")` before, between and after its writes and
renames. Nothing listens in a real run; a test sets `on_fault_point` to record the names, to raise, or to end the
process.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["fault_point"]

on_fault_point: Callable[[str], None] | None = None


def fault_point(name: str) -> None:
    """Tell the listener, when there is one, that the point called `name` was reached."""
    if on_fault_point is not None:
        on_fault_point(name)
