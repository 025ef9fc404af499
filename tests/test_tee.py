from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from lowmem_grpo.tee import Tee, tee_output


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _teed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[_Terminal, Path]:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    return terminal, tmp_path / "train.log"


def test_both_streams_go_to_terminal_and_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, log = _teed(tmp_path, monkeypatch)
    with tee_output(log):
        print("one")
        sys.stderr.write("two\nthr")
        sys.stderr.write("ee")
        assert sys.stdout.isatty()
    assert terminal.getvalue() == "one\ntwo\nthree"
    assert log.read_text() == "one\ntwo\nthree\n"
    assert sys.stdout is terminal and sys.stderr is terminal


def test_the_log_has_no_control_codes_and_one_line_per_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, log = _teed(tmp_path, monkeypatch)
    with tee_output(log):
        print("\x1b[1;31mred\x1b[0m \x1b]8;;http://x\x1b\\link\x1b]8;;\x07 \x07a\tb")
        for i in range(3):
            sys.stdout.write(f"\rbar {i}")
        print("\r\nnext")
    assert "\x1b[1;31mred" in terminal.getvalue()
    assert log.read_text() == "red link a\tb\nbar 2\nnext\n"


def test_a_traceback_is_in_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, log = _teed(tmp_path, monkeypatch)
    with pytest.raises(KeyError), tee_output(log):
        raise KeyError("lost")
    assert log.read_text().rstrip().endswith("KeyError: 'lost'")


def test_the_log_is_appended_to_and_a_handler_that_kept_the_stream_still_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal, log = _teed(tmp_path, monkeypatch)
    log.write_text("before\n")
    with tee_output(log):
        kept = sys.stderr
    kept.write("after\n")
    assert terminal.getvalue() == "after\n"
    assert log.read_text() == "before\n"


def test_forward_shows_elsewhere_and_log_line_shows_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, log = _teed(tmp_path, monkeypatch)
    other = io.StringIO()
    with tee_output(log):
        tee = sys.stdout
        assert isinstance(tee, Tee)
        tee.forward = other
        print("above the block")
        tee.log_line("plain")
        tee.forward = None
        print("again")
    assert (other.getvalue(), terminal.getvalue()) == ("above the block\n", "again\n")
    assert log.read_text() == "above the block\nplain\nagain\n"


def test_a_full_disk_ends_the_log_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, _ = _teed(tmp_path, monkeypatch)
    with tee_output(Path("/dev/full")):
        print("one")
        print("two")
    assert terminal.getvalue() == "one\ntrain.log is no longer written: No space left on device\ntwo\n"
