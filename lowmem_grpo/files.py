"""Files and folders that survive a kill at any moment: atomic replacement, whole lines, one sentence per full disk."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from lowmem_grpo.errors import RunDirError, RunFailed
from lowmem_grpo.faults import fault_point

__all__ = [
    "append_or_undo",
    "aside_of",
    "atomic_write",
    "cut_torn_line",
    "json_bytes",
    "read_lines",
    "recover_folder",
    "replace_folder",
    "sync_folder",
    "writing",
]


@contextlib.contextmanager
def writing(what: Path | str) -> Iterator[None]:
    """Turn an error of the disk inside the block into one `RunFailed` sentence that names `what`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RunFailed(
                f"The disk is full: {what} could not be written; the last checkpoint is intact, "
                "so free some space and continue with `lowmem-grpo resume`."
            ) from error
        raise RunFailed(f"{what} could not be written: {error.strerror or error}.") from error


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable (a rename is lost in a power cut until its folder is synced)."""
    if os.name == "nt":  # Windows cannot open a folder, and needs no sync of one
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def atomic_write(path: Path | str, data: bytes | str, *, sync: bool = True) -> None:
    """Replace the file `path` with `data` so that a reader sees the old or the new content, never a part.

    The folder must exist. `sync=False` skips both fsyncs: safe against a kill, not against a power cut.
    Raises OSError. Fault points: `write NAME`, `rename NAME`, `renamed NAME`.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name.lstrip('.')}.tmp")
    fault_point(f"write {path.name}")
    with open(temporary, "wb") as file:
        file.write(data.encode() if isinstance(data, str) else data)
        file.flush()
        if sync:
            os.fsync(file.fileno())
    fault_point(f"rename {path.name}")
    os.replace(temporary, path)
    if sync:
        sync_folder(path.parent)
    fault_point(f"renamed {path.name}")


def aside_of(target: Path) -> Path:
    """Where `replace_folder` keeps the old folder for a moment."""
    return target.with_name(f".replaced-{target.name}")


def replace_folder(new: Path, target: Path) -> None:
    """Put the complete folder `new` in the place of `target`, which may exist.

    A folder cannot be replaced by one rename, so the old one is moved aside, the new one moved in, the old one
    deleted. Between the two renames `target` is absent and `.replaced-NAME` is whole: `recover_folder` undoes that.
    """
    aside = aside_of(target)
    if target.exists():
        fault_point(f"move aside {target.name}")
        os.rename(target, aside)
        sync_folder(target.parent)
    fault_point(f"move in {target.name}")
    os.rename(new, target)
    sync_folder(target.parent)
    fault_point(f"moved in {target.name}")
    shutil.rmtree(aside, ignore_errors=True)
    fault_point(f"replaced {target.name}")


def recover_folder(target: Path) -> None:
    """Undo or finish a `replace_folder` that was interrupted. Only the writer of the run may call this."""
    aside = aside_of(target)
    if not aside.exists():
        return
    if target.exists():
        shutil.rmtree(aside, ignore_errors=True)
    else:
        os.rename(aside, target)
        sync_folder(target.parent)


def _plain(value: Any) -> Any:
    """`value` with JSON types only; NaN and infinity, which JSON does not have, become null."""
    if isinstance(value, bool | str | int) or value is None:
        return value
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):  # a numpy or torch scalar
        return _plain(value.item())
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def json_bytes(value: Any, *, indent: int | None = None) -> bytes:
    """`value` as JSON in UTF-8, without NaN or infinity (they become null).

    >>> json_bytes({"reward/mean": float("nan"), "step": 3})
    b'{"reward/mean": null, "step": 3}'
    """
    text = json.dumps(_plain(value), ensure_ascii=False, allow_nan=False, indent=indent)
    # Half an emoji (a lone surrogate) has no UTF-8; backslashreplace writes it as \\ud83d, which is its JSON escape.
    return text.encode("utf-8", "backslashreplace")


def read_lines(file: IO[bytes], path: Path) -> Iterator[dict[str, Any]]:
    """The rows of an open jsonl file, less a torn last line. A line that is not JSON is a RunDirError naming `path`."""
    for number, line in enumerate(file, start=1):
        if not line.endswith(b"\n"):
            return  # torn: the process died in this write, or is in it now
        try:
            yield json.loads(line)
        except ValueError as error:
            raise RunDirError(f"Line {number} of {path} is not JSON: {line[:60]!r}.") from error


def cut_torn_line(path: Path) -> None:
    """Cut the file after its last newline."""
    if not path.exists():
        return
    with open(path, "r+b") as file:
        end = file.seek(0, os.SEEK_END)
        position = end
        while position > 0:
            start = max(0, position - 65536)
            file.seek(start)
            newline = file.read(position - start).rfind(b"\n")
            if newline >= 0:
                position = start + newline + 1
                break
            position = start
        if position != end:
            file.truncate(position)


def append_or_undo(path: Path, data: bytes) -> None:
    """Append all of `data` to the file, or, when the disk refuses (OSError), nothing."""
    with open(path, "ab", buffering=0) as file:
        before = file.seek(0, os.SEEK_END)
        try:
            written = file.write(data)
            while written < len(data):  # a disk that is nearly full takes a part, then raises
                written += file.write(data[written:])
        except OSError:
            with contextlib.suppress(OSError):  # the next append cuts what is left
                file.truncate(before)
            raise
