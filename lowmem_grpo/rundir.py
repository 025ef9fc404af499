"""The run folder: the only channel between the trainer, the command line and the screens.

    config.yaml          the full resolved config          environment.json   versions, device, flags
    inputs/              reward files as they were         status.json        where the run stands (replaced whole)
    metrics.jsonl        one line a step                   completions.jsonl  one line an answer, rotated at a cap
    problems.jsonl       each problem once                 events.jsonl       findings, checkpoints, skipped steps
    train.log            what the process printed          control/           a file `stop`, `checkpoint` or `eval`
    checkpoints/         see `lowmem_grpo.checkpoint`      evaluations/       cached answers and scores, JSON
    adapter/             the best adapter so far           report.json        start against tuned, and report.png
    gate.json            what the gate said before step 1

One process writes (it holds `RunDir.lock`), any number read. A line that was being written when the process died
has no newline at its end: readers leave it out and the next writer cuts it off.

Rotation. `completions.jsonl` is always the part being written; generation 3 means that parts 000001 to 000003 were
closed before it. A checkpoint stores the generation with the byte offset. Going back to a checkpoint of generation 2
therefore deletes what came later and renames part 000003, which was the open file then, back to `completions.jsonl`
before it is cut.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal

from lowmem_grpo.errors import LowmemGrpoError, RunDirError, RunFailed, StopRequested
from lowmem_grpo.faults import fault_point
from lowmem_grpo.files import (
    append_or_undo,
    aside_of,
    atomic_write,
    cut_torn_line,
    json_bytes,
    read_lines,
    recover_folder,
    sync_folder,
    writing,
)
from lowmem_grpo.tee import tee_output

__all__ = [
    "REQUESTS",
    "RUNS_ROOT",
    "STREAMS",
    "RunDir",
    "RunSummary",
    "State",
    "Status",
    "StatusWriter",
    "atomic_write",
    "list_runs",
    "resolve_run",
    "run_name",
    "tee_output",
]

RUNS_ROOT = Path("runs")
"""Where runs go unless told otherwise."""

STREAMS = ("metrics", "completions", "events", "problems")
"""The jsonl files of a run, by the name that `append` and `read` take."""

REQUESTS = ("stop", "checkpoint", "eval")
"""What can be asked of a running trainer through `control/`."""

State = Literal["starting", "running", "stopped", "finished", "failed", "died"]

_CREATING = ".creating"
_HEARTBEAT_FRESH_S = 30.0


# --------------------------------------------------------------------------------------------- status


@dataclass(frozen=True, slots=True)
class Status:
    """Where a run stands, as in status.json. Times are seconds since the epoch, `eta_s` seconds or None.

    `died` is never written: `RunDir.status` says it when the process is gone without having said anything else.
    """

    state: State
    step: int
    steps: int
    pid: int
    pid_started: float
    heartbeat: float
    eta_s: float | None
    message: str

    @property
    def active(self) -> bool:
        """True while a process works on the run."""
        return self.state in ("starting", "running")


def _pid_started(pid: int) -> float | None:
    """When process `pid` was started, or None when there is no such live process."""
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return None
    except psutil.AccessDenied:
        return 0.0


def _own_status(state: State, step: int, steps: int, message: str) -> Status:
    pid = os.getpid()
    return Status(state, step, steps, pid, _pid_started(pid) or 0.0, time.time(), None, message)


def _alive(status: Status) -> bool:
    started = _pid_started(status.pid)
    if started is None:
        return False
    # A stepped system clock shifts the start times that the system reports, hence the look at the heartbeat too.
    same_process = abs(started - status.pid_started) < 2.0
    return same_process or time.time() - status.heartbeat < _HEARTBEAT_FRESH_S


class StatusWriter:
    """Writes status.json, and keeps its heartbeat fresh from a daemon thread while the `with` block runs.

    Leaving the block writes the last state: `finished`, or `stopped` after `StopRequested` or Ctrl-C, or `failed`
    with the error's first line. Not to be shared between processes.

    >>> with StatusWriter(run_dir, steps=40) as status:  # doctest: +SKIP
    ...     status.update(state="running", step=1, eta_s=300.0)
    """

    def __init__(self, run_dir: RunDir, *, steps: int, step: int = 0, interval_s: float = 3.0) -> None:
        self._run_dir = run_dir
        self._interval_s = interval_s
        self._guard = threading.Lock()
        self._over = threading.Event()
        self._problem: RunFailed | None = None
        self._status = _own_status("starting", step, steps, "")
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def update(self, **changes: Any) -> None:
        """Set any of `state`, `step`, `steps`, `eta_s`, `message`. Raises RunFailed when the disk is full."""
        if self._problem is not None:
            raise self._problem
        self._write(**changes)

    def _write(self, **changes: Any) -> None:
        with self._guard:
            self._status = dataclasses.replace(self._status, heartbeat=time.time(), **changes)
            self._run_dir.write_status(self._status)

    def _beat(self) -> None:
        while not self._over.wait(self._interval_s):
            try:
                self._write()
            except RunFailed as problem:  # raised again in the main thread, by the next update
                self._problem = problem
                return

    def __enter__(self) -> StatusWriter:
        self._write()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._over.set()
        self._thread.join()
        state, message = _last_state(error)
        try:
            self._write(state=state, message=message, eta_s=None)
        except RunFailed as problem:
            if error is None:
                raise
            error.add_note(str(problem))


def _last_state(error: BaseException | None) -> tuple[State, str]:
    if error is None:
        return "finished", ""
    if isinstance(error, StopRequested | KeyboardInterrupt):
        return "stopped", "stopped on request; continue with `lowmem-grpo resume`"
    text = str(error) if isinstance(error, LowmemGrpoError) else f"{type(error).__name__}: {error}"
    return "failed", text.splitlines()[0] if text else type(error).__name__


# --------------------------------------------------------------------------------------------- the folder


class RunDir:
    """One run folder. Get one with `RunDir.create` (a new run) or `RunDir.open` (an existing one).

    Paths are properties; nothing else in the package spells a file name of the run folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._problem_ids: set[str] | None = None

    def __repr__(self) -> str:
        return f"RunDir({str(self.path)!r})"

    @classmethod
    def create(
        cls,
        path: Path | str,
        *,
        config_text: str,
        environment: Mapping[str, Any],
        inputs: Mapping[str, bytes],
    ) -> RunDir:
        """Make a run folder at `path`: absent, empty, or left half-made by an interrupted creation.

        `inputs` maps relative names under `inputs/` to their bytes. Raises RunDirError when the folder already holds
        a run or other files, or cannot be made, or an input name would leave the folder.
        """
        run_dir = cls(Path(path).expanduser().absolute())
        try:
            run_dir.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunDirError(f"The run folder {path} cannot be made: {error.strerror}.") from error
        run_dir._refuse_taken()
        with run_dir.lock(), writing(run_dir.path):
            run_dir._refuse_taken()  # again, now that nobody else can be at it
            run_dir._fill(config_text, environment, inputs)
        return run_dir

    def _refuse_taken(self) -> None:
        if (self.path / _CREATING).exists():
            return
        if self.config_path.exists():
            raise RunDirError(
                f"{self.path} already holds a run: continue it with `lowmem-grpo resume {self.path}`, "
                "or choose another --run-dir."
            )
        foreign = sorted(entry.name for entry in self.path.iterdir() if not entry.name.startswith(".lock"))
        if foreign:
            raise RunDirError(f"{self.path} is not empty (it has {foreign[0]}): choose a new or empty folder.")

    def _fill(self, config_text: str, environment: Mapping[str, Any], inputs: Mapping[str, bytes]) -> None:
        (self.path / _CREATING).touch()
        for folder in (self.inputs_dir, self.control_dir, self.checkpoints_dir, self.evaluations_dir):
            folder.mkdir(exist_ok=True)
        for name, data in inputs.items():
            target = self.inputs_dir / _relative_name(name)
            target.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(target, data)
        atomic_write(self.environment_path, json_bytes(environment, indent=2))
        self.write_status(_own_status("starting", 0, 0, ""))
        atomic_write(self.config_path, config_text)
        fault_point("finish creation")
        (self.path / _CREATING).unlink()
        sync_folder(self.path)

    @classmethod
    def open(cls, path: Path | str) -> RunDir:
        """The run folder at `path`. Raises RunDirError when it is missing, no run folder, or was never finished."""
        run_dir = cls(Path(path).expanduser().absolute())
        if not run_dir.path.is_dir():
            raise RunDirError(f"There is no run folder {path}: see `lowmem-grpo runs` for those that exist.")
        if (run_dir.path / _CREATING).exists():
            raise RunDirError(
                f"The creation of the run folder {path} was interrupted: start it again with `lowmem-grpo train "
                f"CONFIG --run-dir {path}`."
            )
        if not run_dir.config_path.is_file():
            raise RunDirError(f"{path} is not a run folder (it has no config.yaml): see `lowmem-grpo runs`.")
        if aside_of(run_dir.adapter_dir).exists():
            # In use: its writer is just moving the new one in. Read-only: it stays as it is.
            with contextlib.suppress(RunDirError, RunFailed), run_dir.lock():
                pass
        return run_dir

    # ----- paths

    @property
    def config_path(self) -> Path:
        return self.path / "config.yaml"

    @property
    def inputs_dir(self) -> Path:
        return self.path / "inputs"

    @property
    def environment_path(self) -> Path:
        return self.path / "environment.json"

    @property
    def status_path(self) -> Path:
        return self.path / "status.json"

    @property
    def log_path(self) -> Path:
        return self.path / "train.log"

    @property
    def control_dir(self) -> Path:
        return self.path / "control"

    @property
    def checkpoints_dir(self) -> Path:
        return self.path / "checkpoints"

    @property
    def adapter_dir(self) -> Path:
        return self.path / "adapter"

    @property
    def evaluations_dir(self) -> Path:
        return self.path / "evaluations"

    @property
    def report_path(self) -> Path:
        return self.path / "report.json"

    @property
    def picture_path(self) -> Path:
        return self.path / "report.png"

    @property
    def gate_path(self) -> Path:
        return self.path / "gate.json"

    def stream_path(self, name: str) -> Path:
        """The jsonl file of one of `STREAMS`."""
        if name not in STREAMS:
            raise ValueError(f"no stream {name!r}; there are {', '.join(STREAMS)}")
        return self.path / f"{name}.jsonl"

    # ----- one writer

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Be the one writer of this run while the block runs; the system frees the lock even after kill -9.

        Raises RunDirError with the number of the process that holds it.
        """
        from filelock import FileLock, Timeout

        lock = FileLock(self.path / ".lock")
        with writing(self.path):
            try:
                lock.acquire(blocking=False)
            except Timeout:
                raise RunDirError(
                    f"{self.path} is in use by {self._lock_holder()}: wait for it, or `lowmem-grpo stop {self.path}`."
                ) from None
        try:
            with writing(self.path):
                atomic_write(self.path / ".lock-pid", str(os.getpid()), sync=False)
                recover_folder(self.adapter_dir)
            yield
        finally:
            lock.release()

    def _lock_holder(self) -> str:
        try:
            return f"process {int((self.path / '.lock-pid').read_text())}"
        except (OSError, ValueError):  # it took the lock a moment ago
            return "another process"

    # ----- jsonl streams

    def append(self, name: str, row: Mapping[str, Any]) -> None:
        """Add one line to a stream of `STREAMS`. A problem (by its `problem_id`) is written only the first time.

        NaN and infinity are written as null. Raises RunFailed, with no part of the line left behind, when the disk
        is full.
        """
        self.extend(name, [row])

    def extend(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add one line per row in one write; see `append`."""
        if name == "problems":
            rows = self._new_problems(rows)
        data = b"".join(json_bytes(row) + b"\n" for row in rows)
        path = self.stream_path(name)
        if not data:
            return
        try:
            with writing(path):
                cut_torn_line(path)
                append_or_undo(path, data)
        except RunFailed:
            self._problem_ids = None  # what it says was written may not be
            raise

    def _new_problems(self, rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        if self._problem_ids is None:
            self._problem_ids = {row["problem_id"] for row in self.read("problems")}
        fresh = []
        for row in rows:
            if row["problem_id"] not in self._problem_ids:
                self._problem_ids.add(row["problem_id"])
                fresh.append(row)
        return fresh

    def read(self, name: str) -> Iterator[dict[str, Any]]:
        """The rows of a stream, oldest first; completions start with the parts that were rotated away and are kept.

        A torn last line is left out. Raises RunDirError at a line that is not JSON.
        """
        path = self.stream_path(name)
        # Opened before the parts are listed: if it is rotated in between, it is that file, and not missed.
        current = open(path, "rb") if path.exists() else io.BytesIO()  # noqa: SIM115
        with current:
            if name == "completions":
                for part in self.completion_parts():
                    with open(part, "rb") as file:
                        if not _same_file(file, current):
                            yield from read_lines(file, part)
            yield from read_lines(current, path)

    def completion_parts(self) -> list[Path]:
        """The closed parts of completions.jsonl that are kept, oldest first."""
        return sorted(self.path.glob("completions-[0-9][0-9][0-9][0-9][0-9][0-9].jsonl"))

    def completions_generation(self) -> int:
        """How often completions.jsonl was rotated so far."""
        parts = self.completion_parts()
        return int(parts[-1].stem.removeprefix("completions-")) if parts else 0

    def _part(self, generation: int) -> Path:
        return self.path / f"completions-{generation:06d}.jsonl"

    def rotate_completions(self, cap_bytes: int, keep: int = 4) -> bool:
        """Close completions.jsonl as the next numbered part when it has `cap_bytes` or more; True when it was.

        To be called right before a checkpoint only. The newest `keep` parts stay, older ones are deleted.
        """
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        path = self.stream_path("completions")
        if not path.exists() or path.stat().st_size < cap_bytes:
            return False
        generation = self.completions_generation() + 1
        with writing(path):
            fault_point("rotate completions")
            os.rename(path, self._part(generation))
            fault_point("rotated completions")
            for part in self.completion_parts()[:-keep]:
                part.unlink()
        return True

    def offsets(self) -> dict[str, int]:
        """Bytes of every stream, made durable, for a checkpoint; `truncate_to` goes back to them."""
        sizes: dict[str, int] = {}
        for name in STREAMS:
            path = self.stream_path(name)
            sizes[name] = 0
            if path.exists():
                with writing(path), open(path, "r+b") as file:
                    os.fsync(file.fileno())
                    sizes[name] = file.seek(0, os.SEEK_END)
        sizes["completions_generation"] = self.completions_generation()
        return sizes

    def truncate_to(self, offsets: Mapping[str, int]) -> list[str]:
        """Cut every stream back to `offsets` (of `offsets()`; `{}` empties them). Returns warnings, one a sentence.

        Safe to repeat after a kill at any point. A file that is shorter than its offset (edited, or lost in a power
        cut) keeps its whole lines and gives a warning.
        """
        self._problem_ids = None
        warnings = []
        with writing(self.path):
            if not self._return_to_generation(int(offsets.get("completions_generation", 0))):
                warnings.append("The completions of the checkpoint were already rotated away; older ones are kept.")
            for name in STREAMS:
                path, offset = self.stream_path(name), int(offsets.get(name, 0))
                size = path.stat().st_size if path.exists() else 0
                if size > offset:
                    os.truncate(path, offset)
                elif size < offset:
                    warnings.append(f"{path.name} has {size} bytes, the checkpoint counted {offset}: rows are lost.")
                cut_torn_line(path)
                fault_point(f"truncated {name}")
        return warnings

    def _return_to_generation(self, wanted: int) -> bool:
        """Undo rotations after generation `wanted`. False when the file that was open then is gone.

        The order makes it repeatable: later parts go first, newest to oldest, and the rename comes last.
        """
        generation, current = self.completions_generation(), self.stream_path("completions")
        found = generation <= wanted or self._part(wanted + 1).exists()
        if not found:
            current.write_bytes(b"")
        if wanted > 0:  # that part may have been deleted since; an empty one keeps the numbering going
            self._part(wanted).touch()
        if generation <= wanted:
            return True
        fault_point("drop parts")
        for part in reversed(self.completion_parts()):
            if part > self._part(wanted + (1 if found else 0)):
                part.unlink()
                fault_point(f"dropped {part.name}")
        if found:
            os.replace(self._part(wanted + 1), current)
            fault_point("reopened completions")
        return found

    # ----- status and requests

    def write_status(self, status: Status) -> None:
        """Replace status.json. Raises RunFailed when the disk is full."""
        with writing(self.status_path):
            atomic_write(self.status_path, json_bytes(dataclasses.asdict(status)), sync=False)

    def status(self) -> Status:
        """What status.json says, with the state `died` when its process is gone without having ended the run."""
        try:
            row = json.loads(self.status_path.read_bytes())
            status = Status(**{field.name: row[field.name] for field in dataclasses.fields(Status)})
        except (OSError, ValueError, TypeError, KeyError) as error:
            message = f"status.json cannot be read ({type(error).__name__}); `lowmem-grpo resume` writes it anew"
            return Status("died", 0, 0, 0, 0.0, 0.0, None, message)
        if status.active and not _alive(status):
            message = f"process {status.pid} ended without a word; `lowmem-grpo resume` continues from its checkpoint"
            return dataclasses.replace(status, state="died", eta_s=None, message=message)
        return status

    def request(self, name: str) -> None:
        """Ask the trainer for `stop`, `checkpoint` or `eval` at its next safe point."""
        self.control_dir.mkdir(exist_ok=True)
        self._control(name).touch()

    def requested(self, name: str) -> bool:
        """True when `name` was asked for and not cleared since."""
        return self._control(name).exists()

    def clear_requests(self, *names: str) -> None:
        """Forget the requests `names`, or all of them when none is named."""
        for name in names or REQUESTS:
            self._control(name).unlink(missing_ok=True)

    def _control(self, name: str) -> Path:
        if name not in REQUESTS:
            raise ValueError(f"no request {name!r}; there are {', '.join(REQUESTS)}")
        return self.control_dir / name

    # ----- report

    def replace_file(self, path: Path, data: bytes | str) -> None:
        """Replace one file of the run, whole or not at all. Raises RunFailed when the disk is full."""
        with writing(path):
            atomic_write(path, data)

    def write_report(self, report: Mapping[str, Any]) -> None:
        """Replace report.json. Raises RunFailed when the disk is full."""
        self.replace_file(self.report_path, json_bytes(report, indent=2))

    def read_report(self) -> dict[str, Any] | None:
        """The report, or None while there is none."""
        return json.loads(self.report_path.read_bytes()) if self.report_path.exists() else None


def _same_file(a: IO[bytes], b: IO[bytes]) -> bool:
    return isinstance(b, io.BufferedReader) and os.path.sameopenfile(a.fileno(), b.fileno())


def _relative_name(name: str) -> Path:
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\\" in name or ":" in name:
        raise RunDirError(f"{name!r} cannot be the name of an input: it must be relative and stay in the run folder.")
    return Path(*pure.parts)


# --------------------------------------------------------------------------------------------- many runs


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One line of `lowmem-grpo runs`. `reward` is the last `reward/mean`, `changed` seconds since the epoch."""

    path: str
    name: str
    state: State
    step: int
    steps: int
    model: str
    reward: float | None
    changed: float
    message: str


def run_name(recipe: str, root: Path | str) -> str:
    """A free folder name under `root` for a run of `recipe` (a recipe or a path of a config): `quickstart-2026-01-31`.

    A name that is taken gets `-2`, `-3` and so on.
    """
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(recipe).stem).strip("-") or "run"
    name = base = f"{stem}-{date.today().isoformat()}"
    number = 1
    while (Path(root) / name).exists():
        number += 1
        name = f"{base}-{number}"
    return name


def resolve_run(root: Path | str, name: str) -> Path:
    """The folder of run `name` directly under `root`. Raises RunDirError when the name would lead elsewhere."""
    base = Path(root).resolve()
    path = base / name
    plain = re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name) is not None
    if not plain or path.resolve() != path:
        raise RunDirError(f"{name!r} is not the name of a run in {root}: use a plain folder name.")
    return path


def list_runs(root: Path | str) -> list[RunSummary]:
    """The finished creations among the folders under `root`, the one changed last first."""
    base = Path(root)
    if not base.is_dir():
        return []
    folders = [p for p in base.iterdir() if (p / "config.yaml").is_file() and not (p / _CREATING).exists()]
    return sorted((_summary(RunDir(p)) for p in folders), key=lambda run: (-run.changed, run.name))


def _summary(run_dir: RunDir) -> RunSummary:
    import yaml

    status, message, model = run_dir.status(), "", ""
    try:
        model = str(yaml.safe_load(run_dir.config_path.read_text(encoding="utf-8"))["model"]["name"])
    except (yaml.YAMLError, KeyError, TypeError, UnicodeDecodeError):
        message = "config.yaml cannot be read"
    metrics = run_dir.stream_path("metrics")
    files = [f for f in (metrics, run_dir.status_path, run_dir.config_path) if f.exists()]
    changed = max(f.stat().st_mtime for f in files)
    reward = _last_reward(metrics)
    return RunSummary(
        str(run_dir.path), run_dir.path.name, status.state, status.step, status.steps, model, reward, changed,
        message or status.message,
    )  # fmt: skip


def _last_reward(path: Path) -> float | None:
    """The newest `reward/mean` in the last 64 KiB of a metrics file."""
    if not path.exists():
        return None
    with open(path, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
        lines = file.read().split(b"\n")[:-1]
    for line in reversed(lines):
        try:
            reward = json.loads(line).get("reward/mean")
        except (ValueError, AttributeError):  # the first line of the window is a part of one
            continue
        if reward is not None:
            return float(reward)
    return None
