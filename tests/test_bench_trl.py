"""The peer benchmark's own part: ratios, tables, settings for TRL, kept results. Neither TRL nor a model is run."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lowmem_grpo.config import load_config
from lowmem_grpo.data import ProblemStream
from lowmem_grpo.rewards import RewardSpec, Rubric
from lowmem_grpo.types import Problem

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "bench_trl.py"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_trl", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_trl"] = module  # dataclasses and doctests look a class's module up by its name
    spec.loader.exec_module(module)
    return module


bench = _load()


def run_of(engine: str, seconds: float, peak_gib: float, rows: int | None = None) -> dict[str, Any]:
    return {
        "engine": engine,
        "settings": {"device": "cpu", "rows": rows},
        "seconds": [seconds],
        "median_s": seconds,
        "tokens_per_s": 300 / seconds,
        "loaded_bytes": 2**30,
        "peak_above_loaded_bytes": int(peak_gib * 2**30),
    }


OURS = run_of("ours", 2.0, 0.5)
FAST, LEAN = run_of("trl", 3.0, 2.0, rows=32), run_of("trl", 5.0, 1.0, rows=8)


def problem(number: int, answer: str = "4") -> Problem:
    return Problem(f"train-{number}", "1+3", "1+3", (5, number), {"answer": answer})


def test_each_ratio_is_against_the_trl_run_that_is_best_at_it() -> None:
    result = bench.compared(OURS, [FAST, LEAN])
    assert result["ratio"] == {"speed": 1.5, "peak_memory": 0.5}
    assert result["trl"] is FAST
    assert result["trl_runs"] == [FAST, LEAN]


def test_the_table_names_the_runs_that_the_ratios_are_against() -> None:
    lines = bench._table(bench.compared(OURS, [LEAN, FAST])).splitlines()
    assert [line.split() for line in lines[1:4]] == [
        ["ours", "2.00", "150.0", "1.00", "0.50"],
        ["TRL,", "8", "rows", "5.00", "60.0", "1.00", "1.00"],
        ["TRL,", "32", "rows", "3.00", "100.0", "1.00", "2.00"],
    ]
    assert "1.50 times as fast" in lines[4] and "TRL, 32 rows" in lines[4]
    assert "0.50 of that" in lines[5] and "TRL, 8 rows" in lines[5]
    assert lines[6] == bench.CPU_NOTE


def test_on_a_gpu_nothing_is_said_about_cpus() -> None:
    on_gpu = {**OURS, "settings": {"device": "cuda:0"}}
    assert bench.CPU_NOTE not in bench._table(bench.compared(on_gpu, [FAST]))


def test_useful_tokens_per_second_are_all_tokens_over_all_seconds() -> None:
    # the mean of the two rates would be (10 / 1 + 40 / 4) / 2 = 10, of the medians 25 / 2.5 = 10; the sums give 60 / 8
    timing = bench.timing([1.0, 4.0, 3.0], [10, 40, 10], [0.0, 0.0, 0.5])
    assert (timing["tokens_per_s"], timing["median_s"], timing["mean_s"]) == (7.5, 3.0, 8 / 3)


def test_a_table_of_what_was_learnt_ends_with_the_means() -> None:
    learn = {"seeds": [0, 4], "start": 0.1, "ours": [0.5, 0.7], "trl": [0.4, 0.6], "difference": 0.1, "n": 200}
    lines = bench._learn_table(learn).splitlines()
    assert [line.split() for line in lines[1:4]] == [
        ["0", "0.100", "0.500", "0.400"],
        ["4", "0.100", "0.700", "0.600"],
        ["mean", "0.100", "0.600", "0.500"],
    ]
    assert "+0.100" in lines[4] and "200 test problems" in lines[4]


def test_rows_have_to_divide_the_answers_of_a_step() -> None:
    assert bench._rows_of_runs([8, 8, 4], 8) == [8, 4]
    with pytest.raises(SystemExit, match="--trl-rows 3 does not divide the 8 answers"):
        bench._rows_of_runs([3], 8)


# ------------------------------------------------------------------------------------------------ TRL's settings


def arguments_of(overrides: Sequence[str] = (), rows: int = 8, dtype: str = "float32") -> dict[str, Any]:
    config = load_config("quickstart", list(overrides)).config
    return bench.trl_arguments(SimpleNamespace(config=config, loss_options={"clip_high": 0.28}, dtype=dtype), rows)


def test_a_step_of_trl_is_the_batch_of_the_recipe() -> None:
    # 4 prompts with 8 answers each are 32 rows
    for rows, passes in ((32, 1), (8, 4), (1, 32)):
        arguments = arguments_of(rows=rows)
        assert arguments["per_device_train_batch_size"] == rows
        assert arguments["gradient_accumulation_steps"] == passes


def test_trl_gets_the_settings_of_the_recipe() -> None:
    arguments = arguments_of(["run.steps=7", "run.seed=3", "optim.max_grad_norm=0.5", "rollout.temperature=0.9"])
    wanted = {
        "max_steps": 7,
        "seed": 3,
        "num_generations": 8,
        "max_completion_length": 16,
        "temperature": 0.9,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": None,
        "learning_rate": 2e-4,
        "max_grad_norm": 0.5,
        "loss_type": "dapo",
        "scale_rewards": "none",
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "delta": None,
        "gradient_checkpointing": False,
        "bf16": False,
        "fp16": False,
    }
    assert {name: arguments[name] for name in wanted} == wanted


def test_trl_multiplies_in_the_dtype_of_ours() -> None:
    assert arguments_of(dtype="bfloat16")["bf16"] is True
    assert arguments_of(dtype="float16")["fp16"] is True


def test_the_quickstart_is_comparable() -> None:
    config = load_config("quickstart", [*bench.SAME_FOR_BOTH, *bench.FIRST_STEPS]).config
    bench.refuse_unlike(config)  # raises nothing
    assert (config.model.quantization, config.algorithm.skip_dead_groups, config.data.test_size) == ("none", False, 0)


@pytest.mark.parametrize(
    "override",
    [
        "algorithm.advantage=median",
        "algorithm.loss=gspo",
        "algorithm.kl_coef=0.1",
        "algorithm.updates_per_rollout=2",
        "optim.schedule=cosine",
        "optim.warmup_steps=3",
        "rollout.stop=[x]",
        "lora.continue_from=somewhere",
    ],
)
def test_a_setting_without_an_equal_in_trl_ends_the_bench(override: str) -> None:
    with pytest.raises(SystemExit, match=override.split("=")[0].replace(".", r"\.")):
        bench.refuse_unlike(load_config("quickstart", [override]).config)


# ------------------------------------------------------------------------------------------------ data and rewards


def test_the_problems_of_all_steps_are_those_of_our_stream() -> None:
    stream = ProblemStream([problem(i) for i in range(8)], 4, seed=1)
    config = load_config("quickstart", ["run.steps=3"]).config
    listed = bench._problems(stream, config)
    assert listed == [*stream.at(0), *stream.at(1), *stream.at(2)]
    assert bench._digest(listed) != bench._digest(listed[::-1])


def test_a_short_last_step_of_an_epoch_ends_the_bench() -> None:
    stream = ProblemStream([problem(i) for i in range(6)], 4, seed=1)
    with pytest.raises(SystemExit, match="Step 2 ends an epoch with 2 problems"):
        bench._problems(stream, load_config("quickstart", ["run.steps=2"]).config)


def test_the_reward_function_gives_trl_the_totals_of_our_rubric() -> None:
    # right 1, wrong 0; then minus half of the length penalty: 1 token 0, 3 of at most 4 with a cache of 2 -0.5
    specs = [RewardSpec("number"), RewardSpec("length", 0.5, {"max_tokens": 4, "cache": 2})]
    recorder = SimpleNamespace(tokens=[], rewards=[])
    problems = [problem(0), problem(1, answer="5")]
    with Rubric(specs, base_dir=Path()) as rubric:
        totals = bench._total_rewards(
            rubric,
            2,
            problems,
            recorder,
            completions=["4", "5", "4", "5"],
            completion_ids=[[7], [7, 8, 2], [7], [7, 8, 2]],
            index=[0, 0, 1, 1],
            trainer_state=None,
        )
    assert totals == [1.0, -0.25, 0.0, 0.75]
    assert (recorder.tokens, recorder.rewards) == ([8], [0.375])


def test_equal_prompts_stay_two_groups_and_a_mixed_group_ends_the_bench() -> None:
    first, second = problem(0), problem(0)
    groups = bench.groups_of([first, first, second, second], list("abcd"), [[1], [2], [3], [4]], 2)
    assert [group.problem is p for group, p in zip(groups, (first, second), strict=True)] == [True, True]
    assert [[r.text for r in group.rollouts] for group in groups] == [["a", "b"], ["c", "d"]]
    assert groups[1].rollouts[1].completion_ids == (4,)
    with pytest.raises(SystemExit, match="mixed the answer to train-0"):
        bench.groups_of([first, second], list("ab"), [[1], [2]], 2)


# ------------------------------------------------------------------------------------------------ the parent


def test_finished_runs_are_kept_and_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, settings = tmp_path / "out.json", {"recipe": "quickstart"}
    calls: list[str] = []

    def in_worker(name: str, kind: str, *_: Any) -> dict[str, Any]:
        calls.append(f"{kind} {name}")
        return {"adapter": "there"} if kind == "ours" else {"score": 0.5}

    monkeypatch.setattr(bench, "_in_worker", in_worker)
    run = bench._measured(bench.Results(out, settings), "ours, seed 0", "ours", {"score": True}, None)
    assert run == {"adapter": "there", "test": {"score": 0.5}}
    assert json.loads(out.read_text("utf-8")) == {"settings": settings, "runs": {"ours, seed 0": run}}
    again = bench._measured(bench.Results(out, settings), "ours, seed 0", "ours", {"score": True}, None)
    assert again == run
    assert calls == ["ours ours, seed 0", "score ours, seed 0, test"]


def test_a_file_of_other_settings_is_not_written_over(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    bench.Results(out, {"steps": 10}).keep("ours", {})
    with pytest.raises(SystemExit, match=r"holds runs of other settings \(\{'steps': 10\}\)"):
        bench.Results(out, {"steps": 20})


def test_a_worker_that_fails_ends_the_bench_with_its_last_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "worker.py"
    script.write_text("import os, sys\nprint(os.environ['OMP_NUM_THREADS'])\nsys.exit('no such thing')\n", "utf-8")
    monkeypatch.setattr(bench, "__file__", str(script))
    with pytest.raises(SystemExit, match="ours failed with status 1:\n3\nno such thing"):
        bench._in_worker("ours", "ours", {}, tmp_path / "folder", 3)
    assert "ours: no such thing" in capsys.readouterr().err


def test_a_missing_trl_is_answered_with_its_install_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_trl.py"])
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stop:
        bench.main()
    assert stop.value.code == 2
    assert "pip install 'lowmem-grpo[bench]'" in capsys.readouterr().err
