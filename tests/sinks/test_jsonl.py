from __future__ import annotations

import dataclasses
from pathlib import Path

from lowmem_grpo.rundir import RunDir
from lowmem_grpo.sinks.jsonl import JsonlSink, completion_rows, problem_row, write_groups
from lowmem_grpo.types import Event
from tests.sinks.examples import ADVANTAGES, INFO, QUESTION, REPORT, group, report


def test_metrics_and_events(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "r", config_text="", environment={}, inputs={})
    sink = JsonlSink(run_dir)
    sink.start(INFO)
    sink.progress("rollout", 1, 2)
    sink.sample(1, group(), ADVANTAGES)
    sink.step(report(1))
    sink.step(report(2, policy__kl=float("nan")))
    sink.event(Event("skipped", "warning", "step skipped", step=2, data={"norm": float("inf")}))
    sink.report(REPORT)
    sink.close()
    first, second = run_dir.read("metrics")
    assert first == {"step": 1, "reward/mean": 0.125, "optim/loss": -3e-9, "time/step_s": 10.0}
    assert (second["step"], second["policy/kl"]) == (2, None)
    (event,) = run_dir.read("events")
    assert event.pop("time") > 1.7e9
    assert event == {
        "step": 2,
        "kind": "skipped",
        "severity": "warning",
        "message": "step skipped",
        "data": {"norm": None},
    }
    assert not run_dir.stream_path("completions").exists()


def test_rows_of_a_group() -> None:
    scored = dataclasses.replace(group(totals=(1.0, 0.0, 0.0, None)), errors=(None, None, None, "ValueError: x"))
    rows = completion_rows(3, 1, scored, ADVANTAGES)
    assert rows[0] == {
        "step": 3,
        "problem_id": "train-12",
        "group": 1,
        "completion": "45",
        "stop_reason": "end",
        "rewards": {"number": 1.0},
        "reward": 1.0,
        "advantage": 0.75,
        "tokens": 2,
    }
    assert (rows[3]["reward"], rows[3]["error"], rows[3]["stop_reason"]) == (None, "ValueError: x", "length")
    assert len(rows) == 4 and "error" not in rows[1]


def test_a_problem_keeps_its_prompt_and_what_json_can_hold() -> None:
    assert problem_row(group().group.problem) == {
        "problem_id": "train-12",
        "prompt": QUESTION,
        "columns": {"answer": "45"},
    }


def test_the_same_problem_twice_is_two_groups_and_one_problem(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "r", config_text="", environment={}, inputs={})
    write_groups(run_dir, 1, [group(), group()], [ADVANTAGES, ADVANTAGES])
    assert [(row["group"], row["completion"]) for row in run_dir.read("completions")] == [
        (number, text) for number in (0, 1) for text in ("45", "46", "", "35")
    ]
    assert len(list(run_dir.read("problems"))) == 1
