"""How a download tells what it is doing, and the bar for a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

__all__ = ["Progress", "download_bar", "no_progress"]

Progress = Callable[[str, int, int], None]
"""`progress(what, done_bytes, total_bytes)`, called as often as there is news, `done == total` at the end of `what`."""


def no_progress(_what: str, _done_bytes: int, _total_bytes: int) -> None:
    """The progress function that shows nothing."""


@contextlib.contextmanager
def download_bar() -> Iterator[Progress]:
    """A rich bar with size, speed and time left on stderr; nothing is drawn until there is something to fetch.

    >>> with download_bar() as progress:
    ...     progress("nothing to do", 0, 0)
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bars = Bars(*columns, TimeRemainingColumn(), console=Console(stderr=True))
    tasks: dict[str, TaskID] = {}

    def show(what: str, done_bytes: int, total_bytes: int) -> None:
        if not total_bytes:
            return
        if what not in tasks:
            bars.start()
            tasks[what] = bars.add_task(what, total=total_bytes)
        bars.update(tasks[what], completed=done_bytes, total=total_bytes)

    try:
        yield show
    finally:
        if tasks:
            bars.stop()
