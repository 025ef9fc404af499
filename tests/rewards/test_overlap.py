"""Scoring beside sampling: the overlap, the order, what fails, what is left early, and the rules over a whole step."""

from __future__ import annotations

import _thread
import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from lowmem_grpo.errors import DataError, RewardFailed
from lowmem_grpo.rewards import RewardSpec, Rubric
from lowmem_grpo.types import Group, ScoredGroup
from tests.rewards.helpers import group

LIMIT_S = 20
"""After this long a wait has failed; nothing that works takes nearly so long."""

SOURCE = """
import os, time
from pathlib import Path

def lengths(completions):
    return [float(len(text)) for text in completions]

def naps(completions, started=None):
    for text in completions:
        if text == "sleep":
            if started is not None:
                Path(started + ".new").write_text(str(os.getpid()))
                os.rename(started + ".new", started)
            time.sleep(60)
    return [float(len(text)) for text in completions]
"""

Function = Callable[..., Any]


def in_memory(problems: list[tuple[str, str]] | None = None, **functions: Function) -> Rubric:
    seen = [] if problems is None else problems
    return Rubric(
        [RewardSpec(name) for name in functions],
        base_dir=Path("/"),
        functions=functions,
        on_problem=lambda *pair: seen.append(pair),
    )


def one_step(rubric: Rubric, *groups: Group) -> list[ScoredGroup]:
    with rubric.scoring(len(groups)) as scoring:
        for index, each in enumerate(groups):
            scoring.add(index, each)
        return scoring.result()


def length(completions: list[str]) -> list[float]:
    return [float(len(text)) for text in completions]


def fails_on_bad(completions: list[str]) -> list[float]:
    return [1 / len(text.removeprefix("bad")) for text in completions]


# Beside the sampler, in order


def test_a_group_is_scored_while_the_sampler_goes_on() -> None:
    begun, sampled_more = threading.Event(), threading.Event()

    def f(completions: list[str]) -> list[float]:
        begun.set()
        assert sampled_more.wait(LIMIT_S)
        return length(completions)

    with in_memory(f=f) as rubric, rubric.scoring(2) as scoring:
        scoring.add(0, group("a", "bb"))
        assert begun.wait(LIMIT_S)  # group 0 is being scored before there is a group 1
        scoring.add(1, group("ccc"))
        sampled_more.set()  # and its scores are not there before this
        assert [scored.totals for scored in scoring.result()] == [(1.0, 2.0), (3.0,)]


def test_calls_come_in_the_order_of_add_and_results_in_that_of_index() -> None:
    calls: list[tuple[str, list[str]]] = []
    threads = set()

    def recorded(name: str) -> Function:
        def f(completions: list[str]) -> list[float]:
            calls.append((name, completions))
            threads.add(threading.current_thread())
            return length(completions)

        return f

    groups = [group("a", "aa"), group("bbb"), group("cccc")]
    with in_memory(f=recorded("f"), g=recorded("g")) as rubric, rubric.scoring(3) as scoring:
        for index in (2, 0, 1):
            scoring.add(index, groups[index])
        scored = scoring.result()
    texts = (["cccc"], ["a", "aa"], ["bbb"])
    assert calls == [(name, each) for each in texts for name in ("f", "g")]
    assert len(threads) == 1 and threading.main_thread() not in threads
    assert [each.group for each in scored] == groups
    assert [each.totals for each in scored] == [(2.0, 4.0), (6.0,), (8.0,)]


def test_one_rubric_scores_steps_and_single_calls_in_turn_in_one_event_loop() -> None:
    loops = []

    async def f(completions: list[str]) -> list[float]:
        await asyncio.sleep(0)
        loops.append(asyncio.get_running_loop())
        return length(completions)

    with in_memory(f=f) as rubric:
        totals = [each.totals for each in [*one_step(rubric, group("a")), *rubric.score([group("bb")])]]
        totals += [each.totals for each in one_step(rubric, group("ccc"), group("dddd"))]
    assert totals == [(1.0,), (2.0,), (3.0,), (4.0,)]
    assert len(set(loops)) == 1


def test_none_counts_inside_its_group_only() -> None:
    """Left out where it is None throughout, a total of None where it is None for one answer; as in one call."""

    def some(completions: list[str]) -> list[float | None]:
        return [None if text == "-" else 10.0 for text in completions]

    groups = [group("-", "-"), group("-", "aa"), group("a", "aa")]
    with in_memory(length=length, some=some) as rubric:
        scored = one_step(rubric, *groups)
        assert [each.totals for each in scored] == [(1.0, 1.0), (None, 12.0), (11.0, 12.0)]
        assert scored == rubric.score(groups)


def test_an_empty_step() -> None:
    with in_memory(length=length) as rubric:
        assert one_step(rubric) == []
        assert rubric.state() == {"succeeded": [], "failed_steps": {"length": 0}}


@pytest.mark.parametrize("indices", [(0, 0), (-1,), (2,)])
def test_a_group_has_one_place(indices: tuple[int, ...]) -> None:
    refusal = pytest.raises(ValueError, match=rf"^group {indices[-1]} was added twice or is not one of 2$")
    with in_memory(length=length) as rubric, rubric.scoring(2) as scoring, refusal:
        for index in indices:
            scoring.add(index, group("a"))


def test_a_missing_group_and_another_step_inside_are_refused() -> None:
    with in_memory(length=length) as rubric, rubric.scoring(2) as scoring:
        scoring.add(1, group("a"))
        with pytest.raises(ValueError, match=r"^only 1 of 2 groups were added$"):
            scoring.result()
        with pytest.raises(RuntimeError, match=r"^a step is being scored"):
            rubric.score([group("b")])


# What fails in the thread


def test_a_wrong_number_of_scores_is_raised_by_result() -> None:
    with in_memory(f=lambda completions: [1.0]) as rubric, rubric.scoring(2) as scoring:
        scoring.add(0, group("a"))
        scoring.add(1, group("b", "c"))
        with pytest.raises(RewardFailed) as caught:
            scoring.result()
    assert str(caught.value) == "reward 'f' returned 1 scores for 2 answers"


def test_a_wrong_number_of_scores_is_raised_by_a_later_add_and_again_by_result() -> None:
    calls: list[list[str]] = []

    def f(completions: list[str]) -> list[float]:
        calls.append(completions)
        return []

    with in_memory(f=f) as rubric, rubric.scoring(100_000) as scoring:
        with pytest.raises(RewardFailed, match=r"^reward 'f' returned 0 scores for 1 answers$"):
            for index in range(100_000):
                scoring.add(index, group("a"))
                time.sleep(0.001)
        with pytest.raises(RewardFailed, match=r"^reward 'f' returned 0 scores for 1 answers$"):
            scoring.result()
    assert calls == [["a"]]  # the groups behind it are not scored


def test_an_error_that_nobody_thought_of_reaches_the_main_thread() -> None:
    def on_problem(label: str, trace: str) -> None:
        raise OSError("no place to write to")

    rubric = Rubric([RewardSpec("f")], base_dir=Path("/"), functions={"f": fails_on_bad}, on_problem=on_problem)
    with rubric, pytest.raises(OSError, match=r"^no place to write to$"):
        one_step(rubric, group("a"), group("bad", "a"))


# Left early


def test_an_interrupted_step_is_left_at_once_and_the_next_one_waits_for_its_call() -> None:
    begun, release = threading.Event(), threading.Event()
    calls: list[str] = []
    at_once: list[int] = []
    inside = 0

    def f(completions: list[str]) -> list[float]:
        nonlocal inside
        inside += 1
        at_once.append(inside)
        calls.extend(completions)
        if completions == ["a"]:
            begun.set()
            assert release.wait(LIMIT_S)
        inside -= 1
        return length(completions)

    with in_memory(f=f) as rubric:
        rubric.score([group("before", "after")])
        with pytest.raises(KeyboardInterrupt), rubric.scoring(3) as scoring:
            scoring.add(0, group("a"))
            scoring.add(1, group("b"))
            assert begun.wait(LIMIT_S)
            raise KeyboardInterrupt
        assert inside == 1  # left although the call is still running
        assert rubric.statistics()["f"]["mean"] == 5.5
        releaser = threading.Timer(0.2, release.set)
        releaser.start()
        assert [each.totals for each in one_step(rubric, group("ccc"))] == [(3.0,)]
        releaser.join()
    assert calls == ["before", "after", "a", "ccc"]
    assert at_once == [1, 1, 1]


def test_a_step_left_without_its_result_scores_no_more_and_tells_what_failed() -> None:
    problems: list[tuple[str, str]] = []
    second, left = threading.Event(), threading.Event()
    calls: list[str] = []

    def f(completions: list[str]) -> list[float]:
        calls.extend(completions)
        if completions == ["x"]:
            raise ValueError("bad x")
        second.set()
        assert left.wait(LIMIT_S)
        return [1.0]

    with in_memory(problems, f=f) as rubric:
        with rubric.scoring(9) as scoring:
            for index in range(9):
                scoring.add(index, group("x" if index == 0 else "y"))
            assert second.wait(LIMIT_S)
            assert problems == []  # held back: it may become the reason of an end
        left.set()
        assert rubric.score([]) == []  # waits for the call that was left behind
        assert rubric.state() == {"succeeded": [], "failed_steps": {"f": 0}}
    assert calls == ["x", "y"]
    ((label, trace),) = problems
    assert label == "f" and trace.endswith("ValueError: bad x")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rewards")
    (path / "mine.py").write_text(SOURCE, encoding="utf-8")
    return path


def from_file(folder: Path, name: str, problems: list[tuple[str, str]] | None = None, **options: Any) -> Rubric:
    seen = [] if problems is None else problems
    spec = RewardSpec(f"mine.py:{name}", **options)
    return Rubric([spec], base_dir=folder, on_problem=lambda *pair: seen.append(pair), on_output=lambda _: None)


def interrupt_main_when(file: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    _thread.interrupt_main()


def test_an_interrupt_while_the_child_process_is_in_a_call_ends_that_call(folder: Path, tmp_path: Path) -> None:
    problems: list[tuple[str, str]] = []
    started = tmp_path / "pid"
    with from_file(folder, "naps", problems, args={"started": str(started)}) as rubric:
        watcher = threading.Thread(target=interrupt_main_when, args=(started,))
        with pytest.raises(KeyboardInterrupt), rubric.scoring(2) as scoring:
            scoring.add(0, group("sleep"))
            scoring.add(1, group("pending"))
            watcher.start()
            scoring.result()
        watcher.join()
        pid = int(started.read_text())
        assert not psutil.pid_exists(pid)  # the sleeper is gone, so it cannot answer the next call
        assert rubric.score([group("one")])[0].totals == (3.0,)
        assert [each.totals for each in one_step(rubric, group("four"), group("six---"))] == [(4.0,), (6.0,)]
    assert problems == []  # the killed child is nobody's failure


# Over a whole step


def without_seconds(rubric: Rubric) -> dict[str, dict[str, Any]]:
    return {
        label: {name: value for name, value in row.items() if name != "seconds"}
        for label, row in rubric.statistics().items()
    }


def test_statistics_are_those_of_the_whole_step() -> None:
    """f: 1/2, None, 1/1, 1/4, so mean 7/12; deviations -1/12, 5/12, -4/12: variance (1 + 25 + 16) / 144 / 3."""
    groups = [group("aa", "bad"), group("a", "aaaa")]
    expected = {"f": {"mean": pytest.approx(7 / 12), "std": pytest.approx((42 / 432) ** 0.5), "failures": 1}}
    with in_memory(f=fails_on_bad) as rubric:
        one_step(rubric, *groups)
        assert without_seconds(rubric) == expected
        rubric.score(groups)
        assert without_seconds(rubric) == expected
        one_step(rubric, group("a"))
        assert without_seconds(rubric) == {"f": {"mean": 1.0, "std": 0.0, "failures": 0}}


def test_the_seconds_of_a_step_are_those_of_all_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(100))
    monkeypatch.setattr("lowmem_grpo.rewards.rubric.time", SimpleNamespace(monotonic=lambda: next(ticks)))
    with in_memory(f=length) as rubric:
        scored = rubric.score([group("a")])
        assert rubric.statistics()["f"]["seconds"] == 1
        assert one_step(rubric, *(each.group for each in scored * 3)) == scored * 3
        assert rubric.statistics()["f"]["seconds"] == 3


def test_a_group_that_fails_among_others_does_not_end_the_run() -> None:
    problems: list[tuple[str, str]] = []
    with in_memory(problems, f=fails_on_bad) as rubric:
        for _ in range(4):
            scored = one_step(rubric, group("bad", "bad"), group("a", "aa"))
            assert [each.totals for each in scored] == [(None, None), (1.0, 0.5)]
            assert scored[0].errors == ("f: ZeroDivisionError: division by zero",) * 2
            assert rubric.statistics()["f"]["failures"] == 2
        assert rubric.state() == {"succeeded": ["f"], "failed_steps": {"f": 0}}
    assert len(problems) == 1


def test_a_step_that_fails_throughout_ends_the_run_with_one_traceback() -> None:
    problems: list[tuple[str, str]] = []
    with in_memory(problems, f=fails_on_bad) as rubric, pytest.raises(RewardFailed) as caught:
        one_step(rubric, group("bad", "bad"), group("bad"))
    assert str(caught.value).startswith("reward 'f' failed on every one of 3 answers:\nTraceback")
    assert str(caught.value).endswith("ZeroDivisionError: division by zero")
    assert problems == []


def test_three_steps_that_fail_throughout_end_a_run_that_once_worked() -> None:
    with in_memory(f=fails_on_bad) as rubric:
        one_step(rubric, group("bad"), group("a"))
        for failed in (1, 2):
            one_step(rubric, group("bad"), group("bad"), group("bad"), group("bad"))
            assert rubric.state() == {"succeeded": ["f"], "failed_steps": {"f": failed}}
        with pytest.raises(RewardFailed, match=r"^reward 'f' failed on every one of 2 answers, 3 times in a row:\n"):
            one_step(rubric, group("bad"), group("bad"))


@pytest.fixture(scope="module")
def napping(folder: Path) -> Iterator[Rubric]:
    with from_file(folder, "naps", timeout_s=0.5) as rubric:
        rubric.score([group("one")])
        yield rubric


def test_three_time_outs_without_a_success_give_the_step_up(napping: Rubric) -> None:
    first, second, third = one_step(napping, group("sleep", "sleep"), group("sleep", "a"), group("bb"))
    out_of_time = "naps: TimeoutError: no scores within 0.5 s"
    not_tried = "naps: not tried: the first 3 answers ran out of time"
    assert (first.errors, second.errors) == ((out_of_time, out_of_time), (out_of_time, not_tried))
    assert (third.errors, third.totals) == ((not_tried,), (None,))
    assert napping.statistics()["naps"]["failures"] == 5
    assert [each.totals for each in one_step(napping, group("a"), group("bb"))] == [(1.0,), (2.0,)]


def test_one_success_in_the_step_keeps_every_answer_tried(napping: Rubric) -> None:
    scored = one_step(napping, group("a"), group("sleep", "sleep", "sleep", "bb"))
    assert [each.totals for each in scored] == [(1.0,), (None, None, None, 2.0)]


def test_functions_of_a_file_score_beside_the_sampler_too(folder: Path) -> None:
    groups = [group("a", "bb"), group("", "dddd"), group("ünï ☃", "f")]
    with from_file(folder, "lengths") as rubric:
        scored = one_step(rubric, *groups)
        assert [each.totals for each in scored] == [(1.0, 2.0), (0.0, 4.0), (5.0, 1.0)]
        assert scored == rubric.score(groups)


def test_a_column_that_cannot_cross_is_raised_in_the_main_thread(folder: Path) -> None:
    (folder / "columns.py").write_text("def f(completions, day):\n    return [1.0] * len(completions)\n")
    with (
        Rubric([RewardSpec("columns.py:f")], base_dir=folder, on_output=lambda _: None) as rubric,
        pytest.raises(DataError, match=r"a value of type object .* cannot be handed to a reward function in a file"),
    ):
        one_step(rubric, group("a", day="1"), group("a", day=object()))
