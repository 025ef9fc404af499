"""What counts as out of memory, which limits are remembered, and whole runs that run out of it."""

from __future__ import annotations

import gc
import json
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lowmem_grpo import update
from lowmem_grpo.checkpoint import latest, load
from lowmem_grpo.errors import OutOfMemoryFailed
from lowmem_grpo.lifecycle import resume_run, start_run
from lowmem_grpo.memory.oom import Limits, is_out_of_memory, release_memory
from lowmem_grpo.rollout import decoding
from lowmem_grpo.rundir import RunDir
from tests.runs import FUNCTIONS, IN_MEMORY, tiny_run, watching_trainers
from tests.shortage import Shortage

# What it is.


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("CUDA error: out of memory"), True),  # cudaMalloc of a library, cudaHostAlloc of pinned memory
        (RuntimeError("CUDA driver error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("CUDA driver error: device not ready"), False),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), False),
        (ValueError("out of memory"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_what_counts_as_out_of_memory(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_a_cpu_that_cannot_allocate_is_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_what_only_a_cycle_holds_is_freed() -> None:
    gc.disable()
    try:
        cycle: dict[str, Any] = {"tensor": torch.zeros(8)}
        cycle["self"] = cycle
        tensor = weakref.ref(cycle["tensor"])
        del cycle
        assert tensor() is not None
        release_memory(torch.device("cpu"))
        assert tensor() is None
    finally:
        gc.enable()


# Limits.


def limits_of(**values: int | None) -> tuple[Limits, SimpleNamespace]:
    stage = SimpleNamespace(**values)
    return Limits({f"memory.{name}": (stage, name) for name in values}), stage


def test_only_what_was_lowered_is_remembered() -> None:
    limits, stage = limits_of(rows=8, tokens=2048, all_rows=None)
    assert limits.lowered() == {}
    stage.rows, stage.all_rows = 2, 16
    assert limits.lowered() == {"memory.rows": [8, 2], "memory.all_rows": [None, 16]}


def test_limits_go_through_json_to_another_process() -> None:
    limits, stage = limits_of(rows=8, tokens=2048, all_rows=None)
    stage.tokens, stage.all_rows = 512, 16
    stored = json.loads(json.dumps(limits.lowered()))
    again, stage = limits_of(rows=8, tokens=2048, all_rows=None)
    assert again.restore(stored) == {"memory.tokens": 512, "memory.all_rows": 16}
    assert (stage.rows, stage.tokens, stage.all_rows) == (8, 512, 16)
    assert again.lowered() == stored, "the next checkpoint has them too"


@pytest.mark.parametrize("configured", [4096, 1024, 256])
def test_a_limit_is_void_where_another_value_is_configured(configured: int) -> None:
    limits, stage = limits_of(tokens=configured, rows=8)
    assert limits.restore({"memory.tokens": [2048, 512], "memory.rows": [8, 4], "memory.gone": [2, 1]}) == {
        "memory.rows": 4
    }
    assert (stage.tokens, stage.rows) == (configured, 4)


# Runs.


MEMORY = {"memory": {"micro_batch_tokens": 1000, "head_chunk_tokens": 64, "prefill_tokens": 512}}


def config_of(*overrides: str) -> Any:
    """Two problems with four answers each in a step, all at once."""
    # Without the trial before the first step, which would run out instead (`tests/test_fitting.py`).
    return tiny_run("rollout.max_concurrent=8", "run.self_checks=false", *overrides, **IN_MEMORY, **MEMORY)


def train(path: Path, *overrides: str) -> RunDir:
    start_run(config_of(*overrides), path, functions=FUNCTIONS)
    return RunDir.open(path)


def in_need(patch: pytest.MonkeyPatch, place: str, shortage: Shortage) -> None:
    """Let the shortage strike at a call of the sampler's allocation, or at a micro-batch of the update."""
    owner, name = {"rollout": (decoding, "KVSlots"), "update": (update, "sampler_correction")}[place]
    patch.setattr(owner, name, shortage.given(getattr(owner, name)))


def events(run_dir: RunDir, kind: str = "out of memory") -> list[tuple[int, str]]:
    return [(row["step"], row["message"]) for row in run_dir.read("events") if row["kind"] == kind]


def completions(run_dir: RunDir, *steps: int) -> list[tuple[int, str, str]]:
    rows = run_dir.read("completions")
    return [(row["step"], row["problem_id"], row["completion"]) for row in rows if row["step"] in steps]


def limits_in(run_dir: RunDir) -> tuple[int, dict[str, Any]]:
    newest = latest(run_dir)
    assert newest is not None
    state = load(newest)
    return state.step, dict(state.progress["limits"])


@pytest.fixture
def short_run(tmp_path: Path) -> RunDir:
    """Six steps: the memory runs out in the rollout of the second and in the update of the third."""
    with pytest.MonkeyPatch.context() as patch:
        in_need(patch, "rollout", Shortage([2]))
        in_need(patch, "update", Shortage([3]))
        return train(tmp_path / "short")


def test_a_run_that_runs_out_of_memory_loses_nothing_and_says_so(short_run: RunDir, tmp_path: Path) -> None:
    straight = train(tmp_path / "straight")
    assert events(straight) == []
    (rollout, update_event) = [row for row in short_run.read("events") if row["kind"] == "out of memory"]
    assert (rollout["step"], rollout["severity"], rollout["data"]) == (2, "warning", {"max_concurrent": 4})
    assert rollout["message"] == (
        "The memory ran out with 8 answers decoding at once; the 8 unfinished ones keep their tokens and go on, 4 at a "
        "time."
    )
    tokens = update_event["data"]["micro_batch_tokens"]
    assert (update_event["step"], update_event["severity"]) == (3, "warning")
    assert re.fullmatch(
        r"The memory ran out in an update of \d+ tokens at once; its gradient is computed again with "
        rf"memory.micro_batch_tokens={tokens}\.",
        update_event["message"],
    )
    # The adapter of the first two steps is the same to the last bit, and so the answers of the first three are.
    assert completions(short_run, 1, 2, 3) == completions(straight, 1, 2, 3)
    assert len(completions(short_run, *range(1, 7))) == 6 * 8
    pairs = list(zip(short_run.read("metrics"), straight.read("metrics"), strict=True))
    assert [short["step"] for short, _ in pairs] == [1, 2, 3, 4, 5, 6]
    for short, other in pairs[:3]:
        assert short["optim/grad_norm"] == pytest.approx(other["optim/grad_norm"], rel=1e-5)
        assert short["reward/mean"] == other["reward/mean"]
    report = short_run.read_report()
    assert report is not None
    assert [row["step"] for row in report["findings"] if row["kind"] == "out of memory"] == [2, 3]


def test_limits_are_in_the_checkpoint_and_hold_after_it(short_run: RunDir) -> None:
    step, limits = limits_in(short_run)
    tokens = limits["memory.micro_batch_tokens"][1]
    assert (step, limits) == (6, {"rollout.max_concurrent": [8, 4], "memory.micro_batch_tokens": [1000, tokens]})
    assert 0 < tokens < 1000
    with watching_trainers() as trainers:
        resume_run(short_run.path, ["run.steps=8"], functions=FUNCTIONS)
    [trainer] = trainers
    assert (trainer.parts.engine.max_concurrent, trainer.updater.micro_batch_tokens) == (4, tokens)
    assert len(events(short_run)) == 2, "it did not run out again"
    assert [message for _, message in events(short_run, "resume")] == [
        "goes on after step 6",
        "goes on with rollout.max_concurrent=4, lowered when the memory ran out",
        f"goes on with memory.micro_batch_tokens={tokens}, lowered when the memory ran out",
    ]
    assert limits_in(short_run) == (8, limits)


@pytest.mark.parametrize("tokens", [30, 5000])
def test_a_limit_ends_where_the_setting_is_changed(short_run: RunDir, tokens: int) -> None:
    with watching_trainers() as trainers:
        resume_run(short_run.path, ["run.steps=7", f"memory.micro_batch_tokens={tokens}"], functions=FUNCTIONS)
    [trainer] = trainers
    assert (trainer.parts.engine.max_concurrent, trainer.updater.micro_batch_tokens) == (4, tokens)
    assert limits_in(short_run) == (7, {"rollout.max_concurrent": [8, 4]})


@pytest.mark.parametrize(
    ("place", "sentence"),
    [("rollout", "The memory does not suffice to sample"), ("update", "The memory does not suffice for the update")],
)
def test_a_run_that_always_fails_ends_with_everything_before_it_saved(
    tmp_path: Path, place: str, sentence: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        in_need(patch, place, Shortage(range(4, 10**9)))
        with pytest.raises(OutOfMemoryFailed, match=f"^{sentence}") as caught:
            train(tmp_path / "run", "run.checkpoint_every=100")
    assert caught.value.exit_code == 4
    run_dir = RunDir.open(tmp_path / "run")
    assert (run_dir.status().state, run_dir.status().step) == ("failed", 3)
    assert [row["step"] for row in run_dir.read("metrics")] == [1, 2, 3]
    step, limits = limits_in(run_dir)
    assert step == 3 and limits, "three steps are not lost for want of a checkpoint"
    resume_run(run_dir.path, functions=FUNCTIONS)
    straight = train(tmp_path / "straight")
    assert [row["step"] for row in run_dir.read("metrics")] == [1, 2, 3, 4, 5, 6]
    assert completions(run_dir, 1, 2, 3, 4) == completions(straight, 1, 2, 3, 4)
    assert run_dir.status().state == "finished"


def test_an_update_that_is_half_done_is_not_saved(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # Two uses a step: the fourth is the second of step 2, and the adapter has moved.
        in_need(patch, "update", Shortage(range(4, 10**9)))
        with pytest.raises(OutOfMemoryFailed):
            train(tmp_path / "run", "run.checkpoint_every=100", "algorithm.updates_per_rollout=2")
    assert latest(RunDir.open(tmp_path / "run")) is None


def test_an_evaluation_runs_out_of_memory_too(tmp_path: Path) -> None:
    dev = ("data.dev_size=4", "eval.every=3", "run.steps=3")
    with pytest.MonkeyPatch.context() as patch:
        in_need(patch, "rollout", Shortage([5]))  # after the start, and three steps
        run_dir = train(tmp_path / "short", *dev)
    straight = train(tmp_path / "straight", *dev)
    assert events(run_dir) == [
        (
            3,
            "The memory ran out with 4 answers decoding at once; the 4 unfinished ones keep their tokens and go on, "
            "2 at a time.",
        )
    ]
    assert [row.get("eval/score") for row in run_dir.read("metrics")] == [
        row.get("eval/score") for row in straight.read("metrics")
    ]
    step, limits = limits_in(run_dir)
    assert (step, list(limits), limits["eval.max_concurrent"][1]) == (3, ["eval.max_concurrent"], 2)


@pytest.mark.parametrize("place", ["rollout", "update"])
def test_the_resumed_run_is_the_one_that_was_not_stopped(tmp_path: Path, place: str) -> None:
    def run(path: Path, *pieces: Callable[[], object]) -> RunDir:
        with pytest.MonkeyPatch.context() as patch:
            in_need(patch, place, Shortage([2]))
            for piece in pieces:
                piece()
        return RunDir.open(path)

    whole = run(tmp_path / "whole", lambda: train(tmp_path / "whole"))
    halves = run(
        tmp_path / "halves",
        lambda: train(tmp_path / "halves", "run.steps=3"),
        lambda: resume_run(tmp_path / "halves", ["run.steps=6"], functions=FUNCTIONS),
    )
    assert completions(halves, *range(1, 7)) == completions(whole, *range(1, 7))
    files = [(run_dir.adapter_dir / "adapter_model.safetensors").read_bytes() for run_dir in (halves, whole)]
    assert files[0] == files[1]
