from __future__ import annotations

import errno
import math
import os
from pathlib import Path

import numpy as np
import pytest

from lowmem_grpo import faults
from lowmem_grpo.errors import RunFailed
from lowmem_grpo.files import (
    append_or_undo,
    atomic_write,
    cut_torn_line,
    json_bytes,
    recover_folder,
    replace_folder,
    writing,
)


def test_atomic_write_replaces_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    atomic_write(tmp_path / "a.json", "old")
    atomic_write(tmp_path / "a.json", b"new")
    assert (tmp_path / "a.json").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["a.json"]


@pytest.mark.parametrize(
    ("point", "content"), [("write a.json", "old"), ("rename a.json", "old"), ("renamed a.json", "new")]
)
def test_atomic_write_interrupted_at_each_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, content: str
) -> None:
    atomic_write(tmp_path / "a.json", "old")

    def stop(name: str) -> None:
        if name == point:
            raise KeyboardInterrupt

    monkeypatch.setattr(faults, "on_fault_point", stop)
    with pytest.raises(KeyboardInterrupt):
        atomic_write(tmp_path / "a.json", "new")
    assert (tmp_path / "a.json").read_text() == content


def test_json_has_no_nan_and_takes_numpy_and_half_an_emoji() -> None:
    row = {
        "a": math.nan,
        "b": [math.inf, 1.5, True],
        "c": np.float32(0.25),
        "d": {1: (np.int64(3), None)},
        "e": Path("x"),
    }
    assert json_bytes(row) == b'{"a": null, "b": [null, 1.5, true], "c": 0.25, "d": {"1": [3, null]}, "e": "x"}'
    assert json_bytes("é\ud83d\u2028") == b'"\xc3\xa9\\ud83d\xe2\x80\xa8"'
    with pytest.raises(TypeError, match="complex cannot be written as JSON"):
        json_bytes({"z": 1j})


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        (b"", b""),
        (b"{}\n", b"{}\n"),
        (b"{}\n{", b"{}\n"),
        (b"{tor", b""),
        (b"a\n" + b"x" * 200_000, b"a\n"),
        (b"a\n" + b"x" * 65_535, b"a\n"),
    ],
)
def test_cut_torn_line(tmp_path: Path, content: bytes, kept: bytes) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(content)
    cut_torn_line(path)
    assert path.read_bytes() == kept


def test_append_that_fails_half_way_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b"one\n")
    import builtins

    real_open = builtins.open

    class NearlyFull:
        """A file on a disk with room for two more bytes."""

        def __init__(self, *args: object, **kwargs: object) -> None:
            self._file = real_open(*args, **kwargs)  # type: ignore[call-overload]
            self.written = 0

        def __enter__(self) -> NearlyFull:
            return self

        def __exit__(self, *_: object) -> None:
            self._file.close()

        def seek(self, *args: int) -> int:
            return self._file.seek(*args)

        def truncate(self, size: int) -> int:
            return self._file.truncate(size)

        def write(self, data: bytes) -> int:
            if self.written:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.written = self._file.write(data[:2])
            return self.written

    monkeypatch.setattr(builtins, "open", NearlyFull)
    with pytest.raises(OSError, match="No space left"):
        append_or_undo(path, b"two\n")
    monkeypatch.undo()
    assert path.read_bytes() == b"one\n"


def test_errors_of_the_disk_become_one_sentence() -> None:
    with (
        pytest.raises(RunFailed, match=r"^The disk is full: run/metrics.jsonl could not be written.*resume`\.$"),
        writing("run/metrics.jsonl"),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(RunFailed, match=r"^x could not be written: Read-only file system\.$"), writing("x"):
        raise OSError(errno.EROFS, "Read-only file system")
    with pytest.raises(RunFailed, match="disk is full"), writing("x"), open("/dev/full", "wb", buffering=0) as full:
        full.write(b"1")


def _folder(path: Path, content: str) -> Path:
    path.mkdir()
    (path / "f").write_text(content)
    return path


def test_replace_folder(tmp_path: Path) -> None:
    replace_folder(_folder(tmp_path / "new", "1"), tmp_path / "t")
    replace_folder(_folder(tmp_path / "new", "2"), tmp_path / "t")
    assert (tmp_path / "t" / "f").read_text() == "2"
    assert os.listdir(tmp_path) == ["t"]


def test_recover_folder(tmp_path: Path) -> None:
    recover_folder(tmp_path / "t")
    assert os.listdir(tmp_path) == []
    _folder(tmp_path / ".replaced-t", "old")
    recover_folder(tmp_path / "t")
    assert (tmp_path / "t" / "f").read_text() == "old"
    _folder(tmp_path / ".replaced-t", "older")
    recover_folder(tmp_path / "t")
    assert (tmp_path / "t" / "f").read_text() == "old"
    assert os.listdir(tmp_path) == ["t"]
