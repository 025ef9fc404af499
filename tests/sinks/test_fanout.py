from __future__ import annotations

from pathlib import Path

import pytest

from lowmem_grpo.errors import PluginError, RunFailed
from lowmem_grpo.rundir import RunDir
from lowmem_grpo.sinks import SINKS, Fanout, make_sinks
from lowmem_grpo.sinks.console import ConsoleSink
from lowmem_grpo.sinks.jsonl import JsonlSink
from lowmem_grpo.types import Event
from tests.sinks.examples import ADVANTAGES, INFO, REPORT, group, report


class Recorder:
    """Notes each call by name, and raises `error` in those named in `failing`."""

    def __init__(self, *failing: str, error: Exception | None = None) -> None:
        self.calls: list[str] = []
        self._failing = failing
        self._error = error or ValueError("no network")

    def __getattr__(self, name: str):  # type: ignore[no-untyped-def]
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*args: object) -> None:
            self.calls.append(name)
            if name in self._failing:
                raise self._error

        return call


EVERYTHING = ["start", "progress", "sample", "step", "event", "report", "close"]


def play(fanout: Fanout) -> None:
    fanout.start(INFO)
    fanout.progress("rollout", 1, 2, "tokens")
    fanout.sample(1, group(), ADVANTAGES)
    fanout.step(report(1))
    fanout.event(Event("checkpoint", "info", "saved"))
    fanout.report(REPORT)
    fanout.close()


def test_every_sink_hears_everything() -> None:
    a, b = Recorder(), Recorder()
    play(Fanout({"a": a, "b": b}, pytest.fail))
    assert a.calls == b.calls == EVERYTHING


@pytest.mark.parametrize("method", EVERYTHING[1:])
def test_a_sink_that_fails_is_dropped_and_named_once(method: str) -> None:
    bad, good = Recorder(method), Recorder()
    said: list[str] = []
    fanout = Fanout({"bad": bad, "good": good}, said.append)
    play(fanout)
    assert said == ["The bad output failed and is off from here on: ValueError: no network"]
    assert bad.calls == EVERYTHING[: EVERYTHING.index(method) + 1]
    assert good.calls == EVERYTHING
    assert fanout.alive == ("good",)


def test_the_problem_may_come_back_as_an_event() -> None:
    bad, good = Recorder("step"), Recorder()
    fanout = Fanout({"bad": bad, "good": good}, lambda text: fanout.event(Event("sink", "warning", text)))
    fanout.start(INFO)
    fanout.step(report(1))
    assert good.calls == ["start", "step", "event"]


def test_jsonl_may_not_fail() -> None:
    fanout = Fanout({"jsonl": Recorder("step", error=RunFailed("The disk is full."))}, pytest.fail)
    fanout.start(INFO)
    with pytest.raises(RunFailed, match="The disk is full"):
        fanout.step(report(1))


def test_setting_up_may_fail_and_closes_what_was_started() -> None:
    first, second, third = Recorder(), Recorder("start"), Recorder()
    with pytest.raises(ValueError, match="no network"):
        Fanout({"first": first, "second": second, "third": third}, pytest.fail).start(INFO)
    assert (first.calls, second.calls, third.calls) == (["start", "close"], ["start"], [])


def test_ctrl_c_is_not_a_failure_of_the_sink() -> None:
    sink = Recorder("step", error=KeyboardInterrupt())  # type: ignore[arg-type]
    fanout = Fanout({"a": sink}, pytest.fail)
    with pytest.raises(KeyboardInterrupt):
        fanout.step(report(1))
    assert fanout.alive == ("a",)


def test_make_sinks(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "r", config_text="", environment={}, inputs={})
    sinks = make_sinks(["jsonl", "console"], run_dir)
    assert [type(sink) for sink in sinks.values()] == [JsonlSink, ConsoleSink]
    assert sorted(SINKS) == ["console", "jsonl", "picture"]
    with pytest.raises(
        PluginError,
        match=r"^There is no sink 'consol': choose console or jsonl or picture \(did you mean console\?\)\.$",
    ):
        make_sinks(["consol"], run_dir)
    with pytest.raises(PluginError, match=r"^There is no sink 'zzz': choose console or jsonl or picture\.$"):
        make_sinks(["zzz"], run_dir)
