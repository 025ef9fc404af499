"""The command line: one real run through all commands, and every mistake as a sentence with its exit status."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lowmem_grpo import lifecycle
from lowmem_grpo.cli import main
from lowmem_grpo.config import describe_fields
from lowmem_grpo.rundir import RunDir, Status
from tests.runs import during_step, model_folder

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = [
    *("init", "plan", "baseline", "train", "resume", "stop", "watch", "samples", "eval", "score", "runs", "models")
]
REWARD = """\
def code_points(completions, **columns):
    return [sum(map(ord, text)) / 1000 for text in completions]
"""


@dataclasses.dataclass(frozen=True)
class Said:
    """What a command gave back and printed."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def call(*words: object, out: io.StringIO | None = None) -> Said:
    out, err = out or io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([str(word) for word in words])
    return Said(status, out.getvalue(), err.getvalue())


def config(**sections: Any) -> dict[str, Any]:
    return {
        "device": "cpu",
        "model": {"name": str(model_folder(ends=False)), "quantization": "none"},
        "lora": {"rank": 2, "alpha": 4},
        "data": {
            "source": "task.jsonl",
            "prompt_column": "question",
            "answer_column": "output",
            "max_prompt_tokens": 64,
            "test_size": 2,
        },
        "rewards": ["mine.py:code_points"],
        "rollout": {"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 4},
        "run": {"steps": 2, "checkpoint_every": 1},
    } | sections


def write_task(folder: Path, **sections: Any) -> Path:
    """Config, rows and reward of a user's own task, all in one folder."""
    rows = [{"question": f"What is {n} + 2?", "output": str(n + 2)} for n in range(12)]
    (folder / "task.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "mine.py").write_text(REWARD)
    (folder / "task.yaml").write_text(yaml.safe_dump(config(**sections)))
    return folder / "task.yaml"


def write_lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Said]:
    """A folder with a task and the run `first` of two steps in runs/, and what `train` said."""
    folder = tmp_path_factory.mktemp("task")
    said = call("train", write_task(folder), "--run-dir", folder / "runs" / "first")
    return folder, said


@pytest.fixture
def at_task(trained: tuple[Path, Said], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of `trained` as the current one."""
    monkeypatch.chdir(trained[0])
    return trained[0]


# ----- the gate


def test_baseline_says_whether_it_can_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = write_task(tmp_path)
    monkeypatch.chdir(tmp_path)
    said = call("baseline", task, "gate.prompts=4")
    assert said.status == 0
    assert "== Can it learn? ==" in said.out and "sampled: 4 training prompts x 2 answers of the start" in said.out
    assert said.out.splitlines()[-1].startswith("Go")
    as_json = call("baseline", task, "gate.prompts=4", "--json")
    assert (as_json.status, as_json.json["prompts"], as_json.json["answers"]) == (0, 4, 8)
    assert as_json.json["verdict"] in ("go", "caution")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.py", "task.jsonl", "task.yaml"]
    shown = call("baseline", task, "gate.prompts=4", out=Terminal())
    assert "Can it learn?" in shown.out and shown.status == 0


def test_a_gate_without_prompts_is_refused(tmp_path: Path) -> None:
    said = call("baseline", write_task(tmp_path), "gate.prompts=0")
    assert (said.status, said.out) == (2, "")
    assert said.err == "error: `gate.prompts` is 0, so the gate has nothing to look at: set it to 16 or more\n"


def test_the_gate_ends_with_status_5_and_force_goes_on(tmp_path: Path) -> None:
    task = write_task(tmp_path)
    (tmp_path / "mine.py").write_text("def code_points(completions, **columns):\n    return [0.5] * len(completions)\n")
    run_dir = tmp_path / "run"
    said = call("train", task, "--run-dir", run_dir)
    assert said.status == 5 and "--force trains all the same" in said.err and "score 0.5" in said.err
    assert not run_dir.exists()
    as_json = call("train", task, "--run-dir", run_dir, "--json")
    assert (as_json.status, as_json.json["exit_code"]) == (5, 5)
    asked = call("baseline", task)
    assert asked.status == 5 and asked.out.splitlines()[-1] == "No: as it is, nothing can be learnt."
    forced = call("train", task, "run.steps=1", "--run-dir", run_dir, "--force")
    assert forced.status == 0 and (run_dir / "report.json").exists()


# ----- a run from end to end


def test_train_shows_the_run_and_ends_with_start_against_tuned(trained: tuple[Path, Said]) -> None:
    folder, said = trained
    assert (said.status, said.err) == (0, "")
    lines = said.out.splitlines()
    assert [line.split(" | ")[0] for line in lines if line.startswith("step 1/")] == ["step 1/2"]
    assert any(line.startswith("== Start against tuned on 2 unseen problems") for line in lines)
    assert lines[-1] == f"Run folder: {folder / 'runs' / 'first'}"
    run = RunDir.open(folder / "runs" / "first")
    assert (run.status().state, run.status().step, run.adapter_dir.is_dir()) == ("finished", 2, True)
    assert "step 2/2" in run.log_path.read_text()


def test_runs_lists_it(at_task: Path) -> None:
    header, row = call("runs").out.splitlines()
    assert header.split() == ["run", "state", "step", "reward", "model", "changed"]
    assert row.split()[:3] == ["first", "finished", "2/2"]
    said = call("runs", "--root", at_task / "runs", "--json")
    assert [(run["name"], run["state"], run["step"], run["steps"]) for run in said.json] == [
        ("first", "finished", 2, 2)
    ]
    assert said.json == call("runs", "--json").json


def test_samples_are_the_groups_of_the_newest_step(at_task: Path) -> None:
    rows = [row for row in RunDir.open("runs/first").read("completions") if row["step"] == 2]
    groups = call("samples", "first", "--json").json
    assert [(group["step"], group["problem_id"]) for group in groups] == [
        (2, problem) for problem in dict.fromkeys(row["problem_id"] for row in rows)
    ]
    answers = [answer for group in groups for answer in group["answers"]]
    kept = ("completion", "stop_reason", "rewards", "reward", "advantage", "tokens")
    assert answers == [{name: row[name] for name in kept} for row in rows]
    assert all(group["prompt"] == group["columns"]["question"] for group in groups)
    assert all(sum(answer["advantage"] for answer in group["answers"]) == pytest.approx(0) for group in groups)


def test_samples_by_step_and_problem(at_task: Path) -> None:
    rows = list(RunDir.open("runs/first").read("completions"))
    first = rows[0]["problem_id"]
    assert [g["problem_id"] for g in call("samples", "first", "--step", 1, "--count", 1, "--json").json] == [first]
    said = call("samples", "runs/first", "--step", 1, "--problem", first)
    assert said.out.splitlines()[0] == f"  2 answers to {first}, step 1"
    assert said.out.count("  reward ") == 2
    said = call("samples", "first", "--count", 1)
    assert said.out.splitlines()[-1] == "1 of 2 groups of step 2; --count 2 shows all."
    # The newest step with that problem, which is step 1: two steps of two out of ten problems share none.
    assert {g["step"] for g in call("samples", "first", "--problem", first, "--json").json} == {1}


def test_samples_on_a_terminal_are_a_panel(at_task: Path) -> None:
    said = call("samples", "first", "--count", 1, out=Terminal())
    assert "╭" in said.out and "advantage" in said.out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--step", 9], "has no answers of step 9: it has those of 1 to 2"),
        (["--problem", "trian-0"], "has no answers to 'trian-0': did you mean train-"),
        (["--problem", "zzz", "--step", 1], "has no answers to 'zzz' in step 1: there are 2 others, such as train-"),
    ],
)
def test_samples_that_are_not_there(at_task: Path, words: list[Any], sentence: str) -> None:
    said = call("samples", "first", *words)
    assert said.status == 2 and sentence in said.err


def test_eval_of_a_finished_run_is_its_report(at_task: Path) -> None:
    report = RunDir.open("runs/first").read_report()
    said = call("eval", "first", "--json")
    assert (said.status, said.json) == (0, report)
    assert {"start", "tuned", "difference", "n", "split"} <= said.json.keys()
    assert call("eval", "first").out.startswith("== Start against tuned on 2 unseen problems (test split) ==\n")


def test_watch_shows_a_finished_run(at_task: Path) -> None:
    said = call("watch", "first")
    assert said.status == 0
    assert [line[:8] for line in said.out.splitlines() if line.startswith("step ")] == ["step 1/2", "step 2/2"]
    things = [json.loads(line) for line in call("watch", "first", "--json").out.splitlines()]
    assert [next(iter(thing)) for thing in things if "event" not in thing] == [
        "info",
        "step",
        "step",
        "report",
        "status",
    ]
    steps = [thing["step"] for thing in things if "step" in thing]
    rows = list(RunDir.open("runs/first").read("metrics"))
    assert [(s["step"], s["reward/mean"]) for s in steps] == [(row["step"], row["reward/mean"]) for row in rows]
    assert things[-1]["status"]["state"] == "finished"


def test_scoring_the_answers_of_a_run_gives_the_rewards_of_the_run(at_task: Path) -> None:
    rows = list(RunDir.open("runs/first").read("completions"))
    said = call("score", "task.yaml", "--completions", "runs/first/completions.jsonl", "--json")
    assert said.status == 0
    for name in ("problem_id", "rewards", "reward", "advantage"):
        assert [row[name] for row in said.json["rows"]] == [row[name] for row in rows]
    # `number` needs a gold: it comes from the problems.jsonl of the run.
    said = call("score", "task.yaml", "rewards=[number]", "--completions", "runs/first/completions.jsonl", "--json")
    assert (said.status, said.json["functions"]["number"]["failures"]) == (0, 0)


def test_stop_of_a_finished_run_says_so(at_task: Path) -> None:
    said = call("stop", "first")
    assert (said.status, said.out) == (
        0,
        "There is nothing to stop: first is finished at step 2 of 2, and no process works on it.\n",
    )
    assert call("stop", "first", "--json").json == {
        "run_dir": str(at_task / "runs" / "first"),
        "was_running": False,
        "state": "finished",
        "step": 2,
        "steps": 2,
    }
    assert not RunDir.open("runs/first").requested("stop")


def test_stop_resume_and_interrupt(tmp_path: Path) -> None:
    task, run_dir = write_task(tmp_path), tmp_path / "run"
    with during_step(1, functools.partial(call, "stop", run_dir, "--no-wait")):
        said = call("train", task, "run.steps=3", "--run-dir", run_dir, "--json")
    sentence = f"Stopped after step 1 of 3; continue with `lowmem-grpo resume {run_dir}`."
    assert (said.status, said.json) == (3, {"error": sentence, "exit_code": 3})
    assert said.err.splitlines()[-1] == sentence  # no "error:", it was asked for
    assert "step 1/3" in said.err

    with during_step(2, lambda: _raise(KeyboardInterrupt())):
        said = call("resume", run_dir)
    assert said.status == 3
    assert said.err.splitlines()[-1] == (
        f"Interrupted: what came after step 1 is lost; go on from there with `lowmem-grpo resume {run_dir}`."
    )

    said = call("resume", run_dir, "run.steps=2", "--json")
    assert (said.status, said.json["run_dir"], said.json["steps"]) == (0, str(run_dir), 2)
    assert said.json["start"].keys() == said.json["tuned"].keys()
    assert [row["step"] for row in RunDir.open(run_dir).read("metrics")] == [1, 2]


def _raise(error: BaseException) -> None:
    raise error


# ----- mistakes


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["rollout.group_sise=4"], "unknown key `rollout.group_sise`: did you mean `rollout.group_size`?"),
        (["rollout.num_generations=4"], "unknown key `rollout.num_generations`: here it is `rollout.group_size`"),
        (["algorithm.loss=clop"], '`algorithm.loss` must be one of clip, gspo, not "clop" (nearest: clip)'),
        (["rollout.group_size=1"], "at least 2 are needed"),
        (["lora.dropout=0.3"], "only 0 is possible"),
        (["steps"], "`steps` is not an override: write key=value, as in rollout.group_size=8"),
        (["data.source=tusk.jsonl"], "did you mean task.jsonl?"),
        (
            ["data.prompt_column=qestion"],
            "columns found: question, output; name yours, for example data.prompt_column=question",
        ),
        (["data.answer_column=otput"], "did you mean data.answer_column=output?"),
        (["rewards=[number]", "data.answer_column=null"], "for example data.answer_column=output"),
        (["rewards=[numbr]"], "unknown reward 'numbr': did you mean 'number'?"),
        (["rewards=[mine.py:code_point]"], "did you mean 'code_points'?"),
        (["rewards=[mime.py:code_points]"], "did you mean 'mine.py'?"),
        (["model.name=smollm2-135m-instrct"], "smollm2-135m-instruct"),
        (["device=gpu"], '`device` cannot be "gpu": choose auto, cpu, cuda or a certain GPU such as cuda:0'),
        (["algorithm.advantage_args={dof: 1}", "algorithm.advantage=grpo"], "did you mean 'ddof'?"),
    ],
)
def test_a_wrong_input_is_refused_before_a_model_loads(
    words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "assemble", lambda _: pytest.fail("a model was loaded"))
    task = write_task(tmp_path)
    said = call("train", task, *words, "--run-dir", tmp_path / "run", "--json")
    assert said.status == 2
    assert said.json.keys() == {"error", "exit_code"} and said.json["exit_code"] == 2
    assert sentence in said.json["error"]
    assert said.err == f"error: {said.json['error']}\n"
    assert "\n" not in said.json["error"]
    assert not (tmp_path / "run").exists()


def test_a_missing_recipe_and_a_taken_run_folder(at_task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "assemble", lambda _: pytest.fail("a model was loaded"))
    said = call("train", "quickstrat")
    assert (said.status, said.err) == (
        2,
        "error: there is no config file or recipe `quickstrat`: did you mean `quickstart`?\n",
    )
    said = call("train", "tsk.yaml")
    assert (said.status, said.err) == (
        2,
        "error: there is no config file or recipe `tsk.yaml`: did you mean `task.yaml`?\n",
    )
    said = call("train", "task.yaml", "--run-dir", "runs/first")
    assert said.status == 2 and "already holds a run: continue it with `lowmem-grpo resume" in said.err


def test_resume_refuses_what_would_make_it_another_run(at_task: Path) -> None:
    said = call("resume", "first", "optim.lr=1")
    assert said.status == 2 and said.err.startswith("error: `optim.lr` cannot change in a run that goes on")


@pytest.mark.parametrize("command", ["resume", "stop", "watch", "samples", "eval"])
def test_a_missing_run_names_the_nearest(command: str, at_task: Path) -> None:
    assert call(command, "frist").err == "error: there is no run 'frist': did you mean first?\n"
    assert call(command, "runs/frist").err == "error: there is no run 'runs/frist': did you mean runs/first?\n"
    said = call(command, "zzz", "--json")
    assert (said.status, said.json["exit_code"]) == (2, 2)
    assert said.json["error"] == "there is no run 'zzz': the newest is first, and `lowmem-grpo runs` lists all"
    said = call(command, "runs")
    assert (said.status, said.err) == (
        2,
        "error: runs is not a run folder (it has no config.yaml): see `lowmem-grpo runs`.\n",
    )


def test_without_any_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert call("watch", "x").err == "error: there is no run 'x': there are no runs in runs/\n"
    assert call("runs").out == "There are no runs in runs/ yet; `lowmem-grpo train quickstart` makes one.\n"
    assert call("runs", "--json").json == []
    assert call("runs", "--root", "nowhere").err == "error: there is no folder nowhere\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["trian", "quickstart"], "No such command 'trian'. Did you mean 'train'?; see `lowmem-grpo --help`"),
        (["train"], "Missing argument 'CONFIG'; see `lowmem-grpo train --help`"),
        (["train", "quickstart", "--jsn"], "there is no option --jsn: did you mean --json?"),
        (
            ["train", "quickstart", "--num-generations", "8"],
            "there is no option --num-generations: settings are written as key=value; "
            "unknown key `num_generations`: here it is `rollout.group_size`",
        ),
        (
            ["train", "quickstart", "--optim.lr=1"],
            "there is no option --optim.lr: a setting has no dashes, write optim.lr=...",
        ),
        (["watch", "x", "--foo"], "there is no option --foo: see `lowmem-grpo watch --help`"),
        (["score", "quickstart"], "Missing option '--completions'; see `lowmem-grpo score --help`"),
    ],
)
def test_a_wrong_command_line(words: list[str], sentence: str) -> None:
    said = call(*words)
    assert (said.status, said.out, said.err) == (2, "", f"error: {sentence}\n")


def test_a_reward_that_always_fails_ends_the_run_with_its_traceback(tmp_path: Path) -> None:
    task = write_task(tmp_path)
    (tmp_path / "mine.py").write_text("def code_points(completions, **columns):\n    return 1 / 0\n")
    said = call("train", task, "data.test_size=0", "--run-dir", tmp_path / "run", "--json")
    assert (said.status, said.json["exit_code"]) == (4, 4)
    assert said.json["error"].splitlines()[0] == "reward 'code_points' failed on every one of 24 answers:"
    assert said.json["error"].splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert RunDir.open(tmp_path / "run").status().state == "failed"


def test_an_unexpected_error_shows_its_traceback(at_task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "evaluate_run", lambda _: 1 // 0)
    said = call("eval", "first", "--json")
    assert said.status == 4
    assert said.err.startswith("Traceback (most recent call last):\n")
    assert said.json == {
        "error": "unexpected ZeroDivisionError: integer division or modulo by zero",
        "exit_code": 4,
    }


def test_an_interrupt_before_the_run_has_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "start_run", lambda *_, **__: _raise(KeyboardInterrupt()))
    said = call("train", write_task(tmp_path), "--run-dir", tmp_path / "run")
    assert (said.status, said.err) == (3, "Interrupted before the run began, so nothing is lost: start it again.\n")


def test_an_interrupt_ends_the_watching_only(at_task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowmem_grpo.sinks.follow.follow", lambda *_: _raise(KeyboardInterrupt()))
    said = call("watch", "first")
    assert (said.status, said.err) == (0, "No longer watching; end the run with `lowmem-grpo stop first`.\n")


def test_nobody_reading_is_no_error(at_task: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    err = io.StringIO()
    with open(writing, "w") as pipe, contextlib.redirect_stdout(pipe), contextlib.redirect_stderr(err):
        assert main(["samples", "first"]) == 0
    assert err.getvalue() == ""


# ----- stop and wait


@pytest.fixture
def live_run(tmp_path: Path) -> Iterator[RunDir]:
    """A run that this process seems to work on, at step 3 of 9."""
    run = RunDir.create(tmp_path / "run", config_text="model: {name: m}\n", environment={}, inputs={})
    run.write_status(dataclasses.replace(run.status(), state="running", step=3, steps=9))
    yield run


def test_stop_waits_for_the_end(live_run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    running: Status = live_run.status()
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        assert live_run.requested("stop")
        if len(naps) == 2:
            live_run.write_status(dataclasses.replace(running, state="stopped", step=4))

    monkeypatch.setattr(time, "sleep", nap)
    said = call("stop", live_run.path)
    assert (said.status, len(naps)) == (0, 2)
    assert said.err == f"Asked process {os.getpid()} to stop; it has to finish step 4 of 9 first.\n"
    assert said.out == f"run is stopped at step 4 of 9. Go on with: lowmem-grpo resume {live_run.path}\n"


def test_stop_has_a_limit(live_run: RunDir) -> None:
    said = call("stop", live_run.path, "--limit", 0)
    assert said.status == 4
    assert f"{live_run.path} still runs after 0 s; it will stop after its step" in said.err
    assert live_run.requested("stop")


def test_stop_without_waiting(live_run: RunDir) -> None:
    said = call("stop", live_run.path, "--no-wait", "--json")
    assert (said.status, said.json["was_running"], said.json["state"], said.json["step"]) == (0, True, "running", 3)
    assert live_run.requested("stop")


# ----- rewards without a model


def test_score_in_json(tmp_path: Path) -> None:
    task = write_task(tmp_path, model={"name": "never/loaded"}, rewards=[{"name": "number", "weight": 2.0}])
    answers = write_lines(
        tmp_path / "answers.jsonl",
        {"problem_id": "a", "completion": "7", "output": "7"},
        {"problem_id": "b", "completion": "3", "output": "3"},
        {"problem_id": "a", "completion": "8", "output": "7"},
        {"problem_id": "b", "completion": "4", "output": "3"},
        {"problem_id": "a", "completion": "7", "output": "7"},
        {"problem_id": "a", "completion": "9", "output": "7"},
        {"problem_id": "c", "completion": "1", "output": "???"},
    )
    said = call("score", task, "--completions", answers, "--json")
    assert said.status == 0 and said.json.keys() == {"rows", "groups", "functions"}
    assert said.json["rows"] == [
        {"problem_id": "a", "rewards": {"number": 1.0}, "reward": 2.0, "advantage": 1.0, "error": None},
        {"problem_id": "b", "rewards": {"number": 1.0}, "reward": 2.0, "advantage": 1.0, "error": None},
        {"problem_id": "a", "rewards": {"number": 0.0}, "reward": 0.0, "advantage": -1.0, "error": None},
        {"problem_id": "b", "rewards": {"number": 0.0}, "reward": 0.0, "advantage": -1.0, "error": None},
        {"problem_id": "a", "rewards": {"number": 1.0}, "reward": 2.0, "advantage": 1.0, "error": None},
        {"problem_id": "a", "rewards": {"number": 0.0}, "reward": 0.0, "advantage": -1.0, "error": None},
        {"problem_id": "c", "rewards": {"number": None}, "reward": None, "advantage": None, "error": None},
    ]
    assert [group["problem_id"] for group in said.json["groups"]] == ["a", "b", "c"]
    number = said.json["functions"]["number"]
    assert number.keys() == {"mean", "std", "seconds", "failures"}
    assert (number["mean"], number["std"], number["failures"]) == (0.5, 0.5, 0)


def test_score_with_another_estimator_and_groups_by_prompt(tmp_path: Path) -> None:
    task = write_task(tmp_path, rewards=["number"])
    answers = write_lines(
        tmp_path / "answers.jsonl",
        *({"question": "1+1", "completion": c, "output": 2} for c in ("2", "3", "4")),
        {"question": "1+2", "completion": "3", "output": 3},
    )
    # Leave-one-out: 1 - (0 + 0) / 2, and twice 0 - (1 + 0) / 2.
    said = call("score", task, "algorithm.advantage=rloo", "--completions", answers, "--json")
    assert [row["advantage"] for row in said.json["rows"]] == [1.0, -0.5, -0.5, None]
    assert [group["answers"] for group in said.json["groups"]] == [3, 1]


def test_score_as_text(tmp_path: Path) -> None:
    task = write_task(tmp_path, rewards=["number"])
    rows = [{"problem_id": "[b]a[/b]", "completion": f"{n}\n", "output": 1} for n in range(45)]
    lines = call("score", task, "--completions", write_lines(tmp_path / "a.jsonl", *rows)).out.splitlines()
    assert lines[0].split() == ["problem", "number", "reward", "advantage", "answer,", "or", "what", "failed"]
    assert lines[1].split() == ["[b]a[/b]", "0.000", "0.000", "-0.022", "0"]
    assert lines[2].split() == ["[b]a[/b]", "1.000", "1.000", "0.978", "1"]
    assert lines[41] == "... and 5 more; --json gives them all."
    assert "45 answers in 1 groups; 0 scored the same throughout, teaching nothing" in lines


@pytest.mark.parametrize(
    ("row", "answer_column", "sentence"),
    [
        ({"problem_id": "a", "output": "2"}, "output", "line 1 has no completion; it has problem_id, output, answer"),
        (
            {"problem_id": "a", "completion": "2", "solution": "2"},
            "output",
            "the reward 'number' wants the column 'answer', which answers.jsonl has not; columns found: problem_id, "
            "completion, solution; map one of them, for example data.answer_column=solution",
        ),
        # A data set may call its gold as the answer to score is called here; that answer would always be right.
        ({"problem_id": "a", "completion": "2"}, "completion", "wants the column 'answer'"),
        ("text", "output", "answers.jsonl line 1 holds 'text' where a row"),
    ],
)
def test_answers_that_cannot_be_scored(row: Any, answer_column: str, sentence: str, tmp_path: Path) -> None:
    task = write_task(tmp_path, rewards=["number"])
    answers = write_lines(tmp_path / "answers.jsonl", row)
    said = call("score", task, f"data.answer_column={answer_column}", "--completions", answers)
    assert said.status == 2 and sentence in said.err


def test_score_of_a_missing_file(tmp_path: Path) -> None:
    task = write_task(tmp_path)
    said = call("score", task, "--completions", tmp_path / "task.jsonk")
    assert (said.status, said.err) == (
        2,
        f"error: there is no file {tmp_path / 'task.jsonk'}; did you mean task.jsonl?\n",
    )


# ----- init, help, and what is light


def test_init_writes_a_config_that_train_takes(tmp_path: Path) -> None:
    write_task(tmp_path)
    said = call("init", tmp_path / "task.jsonl", "--out", tmp_path / "new.yaml")
    new = tmp_path / "new.yaml"
    assert (said.status, said.out) == (0, f"Wrote {new}. Look it over, then: lowmem-grpo train {new}\n")
    said = call("init", tmp_path / "task.jsonl", "--out", tmp_path / "newer.yaml", "--json")
    assert said.json == {"config": str(tmp_path / "newer.yaml"), "rewards": ["number"]}
    said = call("init", tmp_path / "task.jsonl", "--out", new)
    assert said.status == 2 and "exists and is not overwritten" in said.err
    said = call("init", tmp_path / "tusk.jsonl")
    assert said.status == 2 and said.err.endswith("did you mean task.jsonl?\n")


def test_init_of_a_task_that_no_built_in_reward_fits(tmp_path: Path) -> None:
    rows = write_lines(tmp_path / "style.jsonl", *({"prompt": f"Say {n} kindly"} for n in range(12)))
    lines = call("init", rows).out.splitlines()
    assert lines[1] == f"What a good answer is stands in {tmp_path / 'rewards.py'}: change my_reward there first."
    answers = write_lines(tmp_path / "a.jsonl", *({"prompt": "x", "completion": c} for c in ("Yes.", "no")))
    said = call("score", tmp_path / "style.yaml", "--completions", answers, "--json")
    assert [row["reward"] for row in said.json["rows"]] == [1.0, 0.5]


def test_help_lists_the_commands() -> None:
    said = call("--help")
    listed = said.out.partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in listed] == COMMANDS
    assert "..." not in "".join(listed)  # each says what it does in one line
    assert call() == said
    assert all(call(command, "--help").status == 0 for command in COMMANDS)
    assert "`lowmem-grpo train --keys`" in call("train", "--help").out
    assert call("--version").out.startswith("lowmem-grpo ")


def test_keys_are_all_listed() -> None:
    said = call("train", "--keys")
    assert said.status == 0
    assert [line.split()[0] for line in said.out.splitlines()][1:] == [doc.key for doc in describe_fields()]


def test_what_only_reads_imports_nothing_heavy(at_task: Path) -> None:
    code = """
import sys
from lowmem_grpo.cli import main
for words in (["--help"], ["runs"], ["samples", "first"], ["watch", "first"], ["eval", "nowhere"], ["train", "nowhere"],
              ["stop", "first"], ["train", "--keys"]):
    main(words)
print([name for name in ("torch", "transformers", "datasets", "peft", "gradio") if name in sys.modules])
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
