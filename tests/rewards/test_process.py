"""Reward files in the worker process: what they may do to it, and what stays whole."""

from __future__ import annotations

import datetime
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from lowmem_grpo.errors import ConfigError, DataError, PluginError, RewardFailed
from lowmem_grpo.rewards import RewardSpec, Rubric
from lowmem_grpo.rewards.wire import from_line, to_line
from tests.rewards.helpers import group

SOURCE = """
import asyncio, datetime, os, re, signal, subprocess, sys, time

def pid(completions):
    return [float(os.getpid())] * len(completions)

def misbehave(completions, **kwargs):
    scores = []
    for text in completions:
        if text == "raise":
            raise ValueError("no ünits in " + text)
        if text == "exit":
            os._exit(3)
        if text == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if text == "sleep":
            time.sleep(60)
        if text == "memory":
            bytearray(1 << 50)
        if text == "short":
            return [1.0]
        if text == "eat":
            scores.append(float(len(sys.stdin.read())))
        elif text == "print":
            print("hällo \\u2603", flush=True); os.write(1, b'{"values": [9]}\\n'); scores.append(1.0)
        elif text == "flood":
            print("x" * 3_000_000); scores.append(2.0)
        elif text == "child":
            subprocess.Popen(["sleep", "60"]); scores.append(3.0)
        else:
            scores.append(float(len(text)))
    return scores

async def waits(prompts, completions, answer):
    await asyncio.sleep(0.01)
    return [float(c[0]["content"] == a) for c, a in zip(completions, answer)]

def kinds(completions, day, raw):
    return [float(d == datetime.date(2024, 2, 29) and r == b"\\x00") for d, r in zip(day, raw)]

def environment(completions, limit=2):
    return [float(os.environ["CUDA_VISIBLE_DEVICES"] == "") + limit + 10 * ("torch" in sys.modules)]

def memory_limit(completions):
    import resource
    return [float(resource.getrlimit(resource.RLIMIT_DATA)[0])]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rewards")
    (path / "mine.py").write_text(SOURCE, encoding="utf-8")
    return path


class Watched:
    """A rubric over functions of mine.py, with the problems and prints it reported."""

    def __init__(self, folder: Path, *names: str, **options: Any) -> None:
        self.problems: list[tuple[str, str]] = []
        self.output: list[str] = []
        self.rubric = Rubric(
            [RewardSpec(f"mine.py:{name}", **options) for name in names],
            base_dir=folder,
            on_problem=lambda label, trace: self.problems.append((label, trace)),
            on_output=self.output.append,
        )

    def scores(self, *texts: str, **columns: Any) -> tuple[float | None, ...]:
        (scored,) = self.rubric.score([group(*texts, **columns)])
        (values,) = scored.scores.values()
        self.errors = scored.errors
        return values


@pytest.fixture(scope="module")
def watched(folder: Path) -> Iterator[Watched]:
    made = Watched(folder, "misbehave", timeout_s=0.5)
    assert made.scores("ok") == (2.0,)
    yield made
    made.rubric.close()


def test_prints_and_floods_do_not_disturb_the_replies(watched: Watched) -> None:
    assert watched.scores("print", "four", "flood") == (1.0, 4.0, 2.0)
    deadline = time.monotonic() + 5
    while "x" * 3_000_000 not in watched.output and time.monotonic() < deadline:
        time.sleep(0.01)
    assert watched.output[-3:] == ["hällo ☃", '{"values": [9]}', "x" * 3_000_000]


def test_unicode_and_lone_surrogates_cross(watched: Watched) -> None:
    assert watched.scores("ünï ☃", "\ud83d", "\u2028\n") == (5.0, 1.0, 2.0)


def test_an_exception_on_one_answer(watched: Watched) -> None:
    assert watched.scores("one", "raise", "three") == (3.0, None, 5.0)
    assert watched.errors == (None, "misbehave: ValueError: no ünits in raise", None)
    label, trace = watched.problems[-1]
    assert label == "misbehave"
    assert 'raise ValueError("no ünits in " + text)' in trace and "worker.py" not in trace


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("exit", "the reward process ended with exit code 3"),
        ("segfault", "the reward process was killed by SIGSEGV"),
        ("memory", "MemoryError"),
    ],
)
def test_a_crash_costs_only_the_guilty_answer(watched: Watched, text: str, error: str) -> None:
    assert watched.scores("one", text, "three") == (3.0, None, 5.0)
    assert watched.errors == (None, f"misbehave: {error}", None)
    assert watched.scores("next") == (4.0,)


def test_a_time_out_costs_only_the_guilty_answer_and_says_where(watched: Watched) -> None:
    assert watched.scores("one", "sleep") == (3.0, None)
    assert watched.errors == (None, "misbehave: TimeoutError: no scores within 0.5 s")
    trace = watched.problems[-1][1]
    assert "in misbehave" in trace
    assert "2 answers in one call; each is tried alone now, a larger timeout_s allows slower calls" in trace


def test_three_time_outs_at_the_start_give_the_rest_up(watched: Watched) -> None:
    assert watched.scores("sleep", "sleep", "sleep", "one") == (None,) * 4
    assert watched.errors[3] == "misbehave: not tried: the first 3 answers ran out of time"
    assert watched.scores("one") == (3.0,)


def test_stdin_belongs_to_the_requests(watched: Watched) -> None:
    assert watched.scores("eat", "one") == (0.0, 3.0)


def test_a_wrong_count_stops(watched: Watched) -> None:
    with pytest.raises(RewardFailed, match=r"^reward 'misbehave' returned 1 scores for 2 answers$"):
        watched.scores("short", "b")
    time.sleep(0.6)  # past its time limit: the refused call must not take the worker down later
    assert watched.scores("one") == (3.0,)


def test_columns_keep_their_kinds_and_others_are_refused(folder: Path) -> None:
    made = Watched(folder, "kinds")
    with made.rubric:
        assert made.scores("a", "b", day=datetime.date(2024, 2, 29), raw=b"\0") == (1.0, 1.0)
        with pytest.raises(
            DataError, match=r"a value of type object .* cannot be handed to a reward function in a file"
        ):
            made.scores("a", day=object(), raw=b"")
    line = to_line([datetime.timedelta(1, 2, 3), datetime.datetime(2024, 1, 2, 3), {1.5}])
    assert from_line(line) == [datetime.timedelta(1, 2, 3), datetime.datetime(2024, 1, 2, 3), [1.5]]


def test_async_functions_arguments_and_environment(folder: Path) -> None:
    made = Watched(folder, "waits")
    with made.rubric:
        assert made.rubric.needed_columns() == {"waits": {"answer"}}
        assert made.scores("7", "8", prompt=[{"role": "user", "content": "q"}], answer="7") == (1.0, 0.0)
    made = Watched(folder, "environment", args={"limit": 5})
    with made.rubric:
        assert made.scores("x") == (6.0,)  # no GPU: 1, the argument: 5, torch is not imported: 0
    made = Watched(folder, "memory_limit")
    with made.rubric:
        assert made.scores("x") == (float(psutil.virtual_memory().total // 2),)


def test_a_runaway_pattern_is_killed_and_the_next_answer_scored() -> None:
    spec = RewardSpec("regex", args={"pattern": "(a+)+$", "how": "fullmatch"}, timeout_s=0.5)
    with Rubric([spec], base_dir=Path("/"), on_problem=lambda *_: None, on_output=lambda _: None) as rubric:
        (scored,) = rubric.score([group("aaa", "a" * 40 + "b", "b")])
    assert scored.scores["regex"] == (1.0, None, 0.0)


@pytest.mark.parametrize(
    ("spec", "kind", "words"),
    [
        (RewardSpec("mine.py:wait"), PluginError, "there is no function 'wait' in mine.py, it has environment, kinds"),
        (RewardSpec("min.py:waits"), PluginError, "did you mean 'mine.py'"),
        (RewardSpec("broken.py:f"), PluginError, "broken.py fails at line 2: NameError: name 'nowhere' is not defined"),
        (RewardSpec("deadly.py:f"), PluginError, "took the worker down while it was loaded: the reward process ended"),
        (
            RewardSpec("mine.py:environment", args={"limt": 1}),
            ConfigError,
            "has no argument 'limt', did you mean 'limit'",
        ),
    ],
)
def test_what_cannot_be_loaded_is_refused_at_start(
    folder: Path, spec: RewardSpec, kind: type[Exception], words: str
) -> None:
    (folder / "broken.py").write_text("\nnowhere\n")
    (folder / "deadly.py").write_text("import os\nos._exit(1)\n")
    with pytest.raises(kind) as caught:
        Rubric([spec], base_dir=folder, on_output=lambda _: None)
    assert words in str(caught.value)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for_end(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


def test_ctrl_c_does_not_reach_the_worker_and_close_ends_it(folder: Path) -> None:
    made = Watched(folder, "pid")
    with made.rubric:
        pid = int(made.scores("x")[0] or 0)
        assert os.getsid(pid) == pid != os.getsid(0)
        os.kill(pid, signal.SIGINT)
        assert made.scores("x") == (float(pid),)
    assert not alive(pid)


def test_the_worker_ends_when_the_trainer_is_killed(folder: Path) -> None:
    script = f"""
        import sys, time
        from pathlib import Path
        sys.path.append({str(Path(__file__).parents[2])!r})
        from lowmem_grpo.rewards import RewardSpec, Rubric
        from tests.rewards.helpers import group
        rubric = Rubric([RewardSpec("mine.py:pid")], base_dir=Path({str(folder)!r}))
        print(int(rubric.score([group("x")])[0].totals[0]), flush=True)
        time.sleep(60)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdout is not None
        pid = int(trainer.stdout.readline())
        assert alive(pid)
        trainer.kill()
    assert wait_for_end(pid)


def test_an_interrupt_in_a_call_leaves_no_reply_behind(folder: Path) -> None:
    made = Watched(folder, "misbehave")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        with made.rubric:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(KeyboardInterrupt):
                made.scores("sleep")
            assert made.scores("one") == (3.0,)
    finally:
        signal.signal(signal.SIGALRM, previous)
