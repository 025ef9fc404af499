from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lowmem_grpo import faults, rundir
from lowmem_grpo.errors import RunDirError, RunFailed, StopRequested
from lowmem_grpo.rundir import RunDir, Status, StatusWriter, list_runs, resolve_run, run_name


def make(path: Path, **changes: object) -> RunDir:
    arguments = {
        "config_text": "model:\n  name: tiny\n",
        "environment": {"torch": "2"},
        "inputs": {"reward.py": b"x=1\n"},
    }
    return RunDir.create(path, **{**arguments, **changes})  # type: ignore[arg-type]


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return make(tmp_path / "run")


def forked(work: Callable[[], object]) -> int:
    """The wait status of a child that runs `work` and exits 0, or 70 when it raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12, when other tests left threads behind
        pid = os.fork()
    if pid == 0:
        code = 70
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1]


def killed_at(number: int, work: Callable[[], object]) -> bool:
    """Run `work` in a child that is killed at its fault point `number` (from 1); False when it has fewer."""

    def child() -> None:
        reached = 0

        def kill(_: str) -> None:
            nonlocal reached
            reached += 1
            if reached == number:
                os.kill(os.getpid(), signal.SIGKILL)

        faults.on_fault_point = kill
        work()

    status = forked(child)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


# --------------------------------------------------------------------------------------------- creating and opening


def test_create_writes_what_it_was_given(run_dir: RunDir) -> None:
    assert run_dir.config_path.read_text() == "model:\n  name: tiny\n"
    assert json.loads(run_dir.environment_path.read_text()) == {"torch": "2"}
    assert (run_dir.inputs_dir / "reward.py").read_bytes() == b"x=1\n"
    visible = sorted(name for name in os.listdir(run_dir.path) if not name.startswith("."))
    assert visible == [
        "checkpoints",
        "config.yaml",
        "control",
        "environment.json",
        "evaluations",
        "inputs",
        "status.json",
    ]
    assert RunDir.open(run_dir.path).path == run_dir.path


def test_create_takes_an_empty_folder_and_makes_parents(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    assert make(tmp_path / "a").config_path.exists()
    assert make(tmp_path / "b" / "c").config_path.exists()


def test_create_refuses_what_is_taken(tmp_path: Path, run_dir: RunDir) -> None:
    with pytest.raises(RunDirError, match=r"already holds a run: continue it with `lowmem-grpo resume .*run`"):
        make(run_dir.path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(RunDirError, match=r"not empty \(it has thesis.tex\)"):
        make(tmp_path / "mine")
    (tmp_path / "file").touch()
    with pytest.raises(RunDirError, match="cannot be made: File exists"):
        make(tmp_path / "file")


@pytest.mark.parametrize("name", ["../out.py", "/etc/x", "a/../../x", "", "c:x", "a\\b"])
def test_an_input_stays_in_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunDirError, match="cannot be the name of an input"):
        make(tmp_path / "r", inputs={name: b""})


def test_open_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match=r"There is no run folder .*nowhere"):
        RunDir.open(tmp_path / "nowhere")
    with pytest.raises(RunDirError, match="is not a run folder"):
        RunDir.open(tmp_path)


def test_killed_at_every_point_of_a_creation(tmp_path: Path) -> None:
    number, killed = 0, True
    while killed:
        number += 1
        path = tmp_path / f"run{number}"
        killed = killed_at(number, partial(make, path))
        if (path / ".creating").exists() or not (path / "config.yaml").exists():
            with pytest.raises(RunDirError, match=r"creation .* was interrupted|is not a run folder"):
                RunDir.open(path)
            make(path)  # starting again needs no tidying
        assert RunDir.open(path).config_path.read_text() == "model:\n  name: tiny\n"
    assert number == 17  # five small files (two of them the lock's and the status) with three points, and the end


# --------------------------------------------------------------------------------------------- the lock


def test_a_second_writer_is_refused_with_the_pid_of_the_first(run_dir: RunDir) -> None:
    held = f"in use by process {os.getpid()}: wait for it, or `lowmem-grpo stop"
    with run_dir.lock():
        with pytest.raises(RunDirError, match=held), RunDir.open(run_dir.path).lock():
            pass
        (run_dir.path / ".lock-pid").unlink()
        with pytest.raises(RunDirError, match="in use by another process"), RunDir.open(run_dir.path).lock():
            pass
    with run_dir.lock():
        pass


def test_kill_9_frees_the_lock(run_dir: RunDir) -> None:
    def hold_and_die() -> None:
        with run_dir.lock():
            os.kill(os.getpid(), signal.SIGKILL)

    assert os.WTERMSIG(forked(hold_and_die)) == signal.SIGKILL
    with run_dir.lock():
        pass


# --------------------------------------------------------------------------------------------- streams


def test_rows_come_back_and_nan_is_null(run_dir: RunDir) -> None:
    run_dir.append("metrics", {"step": 1, "reward/mean": float("nan")})
    run_dir.extend("metrics", [{"step": 2, "a": "é\n"}, {"step": 3}])
    assert list(run_dir.read("metrics")) == [{"step": 1, "reward/mean": None}, {"step": 2, "a": "é\n"}, {"step": 3}]
    assert run_dir.stream_path("metrics").read_bytes().count(b"\n") == 3
    assert list(run_dir.read("events")) == []
    with pytest.raises(ValueError, match="no stream 'metric'"):
        run_dir.append("metric", {})


def test_a_torn_last_line_is_left_out_and_cut_off_by_the_next_row(run_dir: RunDir) -> None:
    run_dir.append("events", {"n": 1})
    with open(run_dir.stream_path("events"), "ab") as file:
        file.write(b'{"n": 2, "mess')
    assert list(run_dir.read("events")) == [{"n": 1}]
    run_dir.append("events", {"n": 3})
    assert list(run_dir.read("events")) == [{"n": 1}, {"n": 3}]


def test_a_broken_line_in_the_middle_is_named(run_dir: RunDir) -> None:
    run_dir.stream_path("events").write_text('{"n": 1}\nnot json\n{"n": 3}\n')
    with pytest.raises(RunDirError, match=r"^Line 2 of .*events.jsonl is not JSON: b'not json"):
        list(run_dir.read("events"))


def test_a_problem_is_written_once(run_dir: RunDir) -> None:
    a, b = {"problem_id": "a", "prompt": "1"}, {"problem_id": "b", "prompt": "2"}
    run_dir.extend("problems", [a, a])
    run_dir.append("problems", a)
    again = RunDir.open(run_dir.path)
    again.extend("problems", [b, a])
    assert list(run_dir.read("problems")) == [a, b]
    again.truncate_to({})
    again.append("problems", a)
    assert list(run_dir.read("problems")) == [a]


def test_a_full_disk_while_appending(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir.stream_path("events").symlink_to("/dev/full")
    with pytest.raises(RunFailed, match=r"^The disk is full: .*events.jsonl could not be written"):
        run_dir.append("events", {"n": 1})

    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(rundir, "append_or_undo", full)
    with pytest.raises(RunFailed, match="The disk is full"):
        run_dir.append("problems", {"problem_id": "a"})
    monkeypatch.undo()
    run_dir.append("problems", {"problem_id": "a"})  # it was not written, so it is not taken for known
    assert list(run_dir.read("problems")) == [{"problem_id": "a"}]


# --------------------------------------------------------------------------------------------- offsets and rotation


def steps_in(run_dir: RunDir, name: str = "completions") -> list[int]:
    return [row["n"] for row in run_dir.read(name)]


def test_offsets_and_truncation(run_dir: RunDir) -> None:
    run_dir.append("metrics", {"n": 1})
    run_dir.append("completions", {"n": 1})
    offsets = run_dir.offsets()
    assert offsets == {"metrics": 9, "completions": 9, "events": 0, "problems": 0, "completions_generation": 0}
    for name in rundir.STREAMS:
        run_dir.append(name, {"n": 2, "problem_id": "p"})
    assert run_dir.truncate_to(offsets) == []
    assert run_dir.offsets() == offsets
    assert steps_in(run_dir, "metrics") == [1] and steps_in(run_dir, "events") == []


def test_truncation_of_a_file_that_is_too_short_warns(run_dir: RunDir) -> None:
    run_dir.append("metrics", {"n": 1})
    run_dir.append("metrics", {"n": 2})
    offsets = run_dir.offsets()
    os.truncate(run_dir.stream_path("metrics"), 12)
    assert run_dir.truncate_to(offsets) == ["metrics.jsonl has 12 bytes, the checkpoint counted 18: rows are lost."]
    assert steps_in(run_dir, "metrics") == [1]


def test_rotation_keeps_parts_and_reads_them_in_order(run_dir: RunDir) -> None:
    assert not run_dir.rotate_completions(1)
    for n in range(1, 8):
        run_dir.append("completions", {"n": n})
        assert run_dir.rotate_completions(9, keep=3)
        assert run_dir.completions_generation() == n
    run_dir.append("completions", {"n": 8})
    assert not run_dir.rotate_completions(10, keep=3)
    assert [p.name for p in run_dir.completion_parts()] == [f"completions-00000{n}.jsonl" for n in (5, 6, 7)]
    assert steps_in(run_dir) == [5, 6, 7, 8]
    with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
        run_dir.rotate_completions(1, keep=0)


def test_going_back_before_a_rotation(run_dir: RunDir) -> None:
    run_dir.append("completions", {"n": 1})
    offsets = run_dir.offsets()
    for n in (2, 3, 4):
        run_dir.append("completions", {"n": n})
        run_dir.rotate_completions(1)
    assert run_dir.completions_generation() == 3
    assert run_dir.truncate_to(offsets) == []
    assert steps_in(run_dir) == [1] and run_dir.offsets() == offsets
    assert run_dir.completion_parts() == []


def test_going_back_to_what_was_rotated_away_for_good(run_dir: RunDir) -> None:
    saved = []
    for n in range(1, 6):
        run_dir.append("completions", {"n": n})
        saved.append(run_dir.offsets())
        run_dir.rotate_completions(1, keep=2)
    assert steps_in(run_dir) == [4, 5]
    warned = run_dir.truncate_to(saved[2])  # generation 2, whose open file became part 3, which is gone
    assert warned[0] == "The completions of the checkpoint were already rotated away; older ones are kept."
    assert steps_in(run_dir) == [] and run_dir.completions_generation() == 2
    run_dir.append("completions", {"n": 4})
    assert run_dir.rotate_completions(1, keep=2)
    assert run_dir.completions_generation() == 3
    assert steps_in(run_dir) == [4]


def test_parts_deleted_by_hand_take_nothing_else_with_them(run_dir: RunDir) -> None:
    for n in (1, 2):
        run_dir.append("completions", {"n": n})
        run_dir.rotate_completions(1)
    run_dir.append("completions", {"n": 3})
    offsets = run_dir.offsets()
    run_dir.append("completions", {"n": 4})
    for part in run_dir.completion_parts():
        part.unlink()
    assert run_dir.truncate_to(offsets) == []
    assert steps_in(run_dir) == [3] and run_dir.offsets() == offsets


def test_a_reader_misses_nothing_when_the_file_is_rotated_under_it(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir.append("completions", {"n": 1})
    listed = RunDir.completion_parts

    def rotate_first(self: RunDir) -> list[Path]:
        monkeypatch.undo()
        run_dir.rotate_completions(1)
        return listed(self)

    monkeypatch.setattr(RunDir, "completion_parts", rotate_first)
    assert steps_in(run_dir) == [1]


@pytest.mark.parametrize("back_to", range(5))
def test_killed_at_every_point_of_a_truncation(tmp_path: Path, back_to: int) -> None:
    """Going back is repeatable: killed anywhere and done again, it ends as if never killed."""

    def history(path: Path) -> tuple[RunDir, list[dict[str, int]]]:
        run_dir, saved = make(path), []
        for n in range(5):
            run_dir.append("completions", {"n": n})
            run_dir.append("metrics", {"n": n})
            saved.append(run_dir.offsets())
            run_dir.append("completions", {"n": 10 + n})
            run_dir.rotate_completions(1, keep=3)
        return run_dir, saved

    straight, saved = history(tmp_path / "straight")
    straight.truncate_to(saved[back_to])
    expected = steps_in(straight), steps_in(straight, "metrics"), straight.offsets()
    if back_to >= 2:
        assert expected[0][-1] == back_to and expected[1] == list(range(back_to + 1))
    number, killed = 0, True
    while killed:
        number += 1
        run_dir, saved = history(tmp_path / f"run{number}")
        killed = killed_at(number, partial(run_dir.truncate_to, saved[back_to]))
        run_dir.truncate_to(saved[back_to])
        assert (steps_in(run_dir), steps_in(run_dir, "metrics"), run_dir.offsets()) == expected
    assert number > 4


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("rows"), st.integers(1, 4)),
        st.tuples(st.just("torn"), st.integers(1, 8)),
        st.tuples(st.just("checkpoint"), st.integers(1, 60)),
        st.tuples(st.just("resume"), st.integers(0, 2)),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=OPERATIONS)
def test_any_history_of_rows_checkpoints_kills_and_resumes(
    tmp_path_factory: pytest.TempPathFactory, operations: list[tuple[str, int]]
) -> None:
    """Against a plain list: what is read is exactly what was written since, up to the checkpoint gone back to."""
    run_dir = make(tmp_path_factory.mktemp("history") / "run")
    rows: list[int] = []
    saved: list[tuple[dict[str, int], list[int]]] = [({}, [])]
    counter = 0
    for what, amount in operations:
        if what == "rows":
            for _ in range(amount):
                counter += 1
                rows.append(counter)
                run_dir.append("completions", {"n": counter})
                run_dir.append("metrics", {"n": counter})
        elif what == "torn":
            with open(run_dir.stream_path("completions"), "ab") as file:
                file.write(b'{"n": 12345'[:amount])
        elif what == "checkpoint":
            run_dir.append("completions", {"n": 0})  # the writer's next row cuts a torn line off
            run_dir.append("metrics", {"n": 0})
            rows.append(0)
            run_dir.rotate_completions(amount, keep=1000)
            saved.append((run_dir.offsets(), list(rows)))
        else:
            saved = saved[: max(1, len(saved) - amount)]
            offsets, rows = saved[-1][0], list(saved[-1][1])
            run_dir = RunDir.open(run_dir.path)
            assert run_dir.truncate_to(offsets) == []
        assert steps_in(run_dir) == rows
        assert steps_in(run_dir, "metrics") == rows


# --------------------------------------------------------------------------------------------- status and requests


def test_status_of_a_run_from_start_to_end(run_dir: RunDir) -> None:
    assert run_dir.status().state == "starting" and run_dir.status().active
    with StatusWriter(run_dir, steps=40) as writer:
        assert (run_dir.status().state, run_dir.status().steps) == ("starting", 40)
        writer.update(state="running", step=3, eta_s=12.5, message="rollout")
        status = run_dir.status()
        assert (status.state, status.step, status.eta_s, status.message) == ("running", 3, 12.5, "rollout")
        assert status.pid == os.getpid() and status.active
    status = run_dir.status()
    assert (status.state, status.step, status.eta_s, status.active) == ("finished", 3, None, False)


@pytest.mark.parametrize(
    ("error", "state", "message"),
    [
        (StopRequested("asked"), "stopped", "stopped on request; continue with `lowmem-grpo resume`"),
        (KeyboardInterrupt(), "stopped", "stopped on request; continue with `lowmem-grpo resume`"),
        (RunFailed("The disk is full.\nmore"), "failed", "The disk is full."),
        (ZeroDivisionError("by zero"), "failed", "ZeroDivisionError: by zero"),
        (RunFailed(), "failed", "RunFailed"),
    ],
)
def test_status_after_an_error(run_dir: RunDir, error: BaseException, state: str, message: str) -> None:
    with pytest.raises(type(error)), StatusWriter(run_dir, steps=2):
        raise error
    assert (run_dir.status().state, run_dir.status().message) == (state, message)


def test_the_heartbeat_goes_on_while_nothing_is_updated(run_dir: RunDir) -> None:
    beats = threading.Event()
    first = time.time()
    seen: list[float] = []
    write = run_dir.write_status

    def watch(status: Status) -> None:
        write(status)
        seen.append(status.heartbeat)
        if len(seen) >= 4:
            beats.set()

    run_dir.write_status = watch  # type: ignore[method-assign]
    with StatusWriter(run_dir, steps=1, interval_s=0.001):
        assert beats.wait(30)
    assert first <= seen[0] < seen[1] < seen[3]


def test_a_heartbeat_that_cannot_be_written_is_raised_by_the_next_update(run_dir: RunDir) -> None:
    failed = threading.Event()
    write = run_dir.write_status

    def full(status: Status) -> None:
        if threading.current_thread().name == "heartbeat":
            failed.set()
            raise RunFailed("The disk is full.")
        write(status)

    run_dir.write_status = full  # type: ignore[method-assign]
    with pytest.raises(RunFailed, match="The disk is full"), StatusWriter(run_dir, steps=1, interval_s=0.001) as writer:
        assert failed.wait(30)
        writer._thread.join()
        writer.update(step=1)


def test_a_last_status_that_cannot_be_written_does_not_hide_the_error(run_dir: RunDir) -> None:
    def full(status: Status) -> None:
        if status.state == "failed":
            raise RunFailed("The disk is full.")

    run_dir.write_status = full  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError) as caught, StatusWriter(run_dir, steps=1):
        raise ZeroDivisionError
    assert caught.value.__notes__ == ["The disk is full."]


def test_a_killed_process_is_said_to_have_died(run_dir: RunDir) -> None:
    def die() -> None:
        StatusWriter(run_dir, steps=9).update(state="running", step=4, eta_s=3.0)
        os.kill(os.getpid(), signal.SIGKILL)

    forked(die)
    status = run_dir.status()
    assert (status.state, status.step, status.steps, status.eta_s) == ("died", 4, 9, None)
    assert status.message.startswith(f"process {status.pid} ended without a word")


def test_a_zombie_and_a_reused_pid_are_dead_and_a_stepped_clock_is_not(run_dir: RunDir) -> None:
    running = Status("running", 1, 2, os.getpid(), 1.0, time.time(), None, "")
    run_dir.write_status(running)  # another start time, but a fresh heartbeat: the clock was set
    assert run_dir.status().state == "running"
    run_dir.write_status(dataclasses.replace(running, heartbeat=time.time() - 60))
    assert run_dir.status().state == "died"
    child = subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.DEVNULL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    run_dir.write_status(dataclasses.replace(running, pid=child.pid))
    assert run_dir.status().state == "died"
    child.wait()


@pytest.mark.parametrize("content", ["", "{}", "[]", "nonsense"])
def test_a_status_that_cannot_be_read(run_dir: RunDir, content: str) -> None:
    run_dir.status_path.write_text(content)
    assert run_dir.status().state == "died"
    assert run_dir.status().message.startswith("status.json cannot be read")


def test_requests(run_dir: RunDir) -> None:
    assert not run_dir.requested("stop")
    run_dir.request("stop")
    run_dir.request("eval")
    assert run_dir.requested("stop") and sorted(os.listdir(run_dir.control_dir)) == ["eval", "stop"]
    run_dir.clear_requests("stop")
    assert not run_dir.requested("stop") and run_dir.requested("eval")
    run_dir.clear_requests()
    assert not run_dir.requested("eval")
    with pytest.raises(ValueError, match="no request 'pause'"):
        run_dir.request("pause")


def test_report(run_dir: RunDir) -> None:
    assert run_dir.read_report() is None
    run_dir.write_report({"n": 200, "x": float("nan")})
    assert run_dir.read_report() == {"n": 200, "x": None}


# --------------------------------------------------------------------------------------------- many runs


def test_run_names(tmp_path: Path) -> None:
    today = date.today().isoformat()
    assert run_name("quickstart", tmp_path) == f"quickstart-{today}"
    (tmp_path / f"quickstart-{today}").mkdir()
    (tmp_path / f"quickstart-{today}-2").mkdir()
    assert run_name("quickstart", tmp_path) == f"quickstart-{today}-3"
    assert run_name("/etc/../my task!.yaml", tmp_path) == f"my-task-{today}"
    assert run_name("...", tmp_path) == f"run-{today}"


@pytest.mark.parametrize("name", ["../../etc", "/etc", "a/b", "..", ".", "", ".hidden", "a\\b", "link"])
def test_a_run_is_looked_for_under_its_root_only(tmp_path: Path, name: str) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link").symlink_to("/etc")
    with pytest.raises(RunDirError, match="is not the name of a run in"):
        resolve_run(tmp_path / "root", name)
    assert resolve_run(tmp_path / "root", "my-run.v2") == (tmp_path / "root" / "my-run.v2").resolve()


def test_list_runs(tmp_path: Path) -> None:
    assert list_runs(tmp_path / "nowhere") == []
    old, new = make(tmp_path / "old"), make(tmp_path / "new")
    with StatusWriter(old, steps=4) as writer:
        writer.update(state="running", step=4)
    old.extend("metrics", [{"step": n, "reward/mean": n / 8} for n in range(1, 5)] + [{"step": 5, "reward/mean": None}])
    (tmp_path / "other").mkdir()
    (tmp_path / "file").touch()
    broken = make(tmp_path / "broken", config_text="{")
    for age, run in enumerate((new, old, broken)):
        for file in run.path.iterdir():
            os.utime(file, (1000.0 - age, 1000.0 - age))
    runs = list_runs(tmp_path)
    assert [run.name for run in runs] == ["new", "old", "broken"]
    assert (runs[0].state, runs[0].reward, runs[0].model) == ("starting", None, "tiny")
    assert (runs[1].state, runs[1].step, runs[1].steps, runs[1].reward, runs[1].changed) == (
        "finished",
        4,
        4,
        0.5,
        999.0,
    )
    assert (runs[2].model, runs[2].message) == ("", "config.yaml cannot be read")


def test_the_last_reward_is_found_behind_long_lines(run_dir: RunDir) -> None:
    run_dir.append("metrics", {"step": 1, "long": "x" * 70_000})
    run_dir.append("metrics", {"step": 2, "reward/mean": 0.25})
    assert list_runs(run_dir.path.parent)[0].reward == 0.25
