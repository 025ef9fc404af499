"""From a config to the parts: paths, evaluation readings, what is recorded, and what is refused."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lowmem_grpo import assembly
from lowmem_grpo.assembly import (
    assemble,
    environment,
    evaluation_specs,
    preflight,
    reward_files,
    sampling_params,
    with_absolute_paths,
)
from lowmem_grpo.config import Config, load_config
from lowmem_grpo.errors import DataError
from lowmem_grpo.rewards import RewardSpec
from lowmem_grpo.types import SamplingParams
from tests.runs import FUNCTIONS, IN_MEMORY, model_folder, raw_config, reward_file, tiny_run
from tests.tiny import save_tiny

SCORE = "def score(completions, **columns):\n    return [0.0 for _ in completions]\n"


def config_of(**sections: Any) -> Config:
    return load_config(raw_config(**sections)).config


# --------------------------------------------------------------------------------------------- paths


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a config's files in it, somewhere else than the working directory, and a home."""
    folder = tmp_path / "project"
    for name in ("model", "adapter", "mine"):
        (folder / name).mkdir(parents=True)
    for name in ("rows.jsonl", "rows.py", "mine/score.py", "mine/plain"):
        (folder / name).write_text("")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "test.jsonl").write_text("")
    (tmp_path / "home" / "score.py").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "home")
    return folder


def test_relative_paths_start_at_the_config_and_become_absolute(project: Path) -> None:
    config = config_of(
        model={"name": "./model"},
        data={"source": "rows.jsonl", "test_source": "~/test.jsonl"},
        lora={"continue_from": "adapter"},
        rewards=["mine/score.py:score", {"name": "~/score.py:score", "label": "home"}, "mine/plain:f", "number"],
    )
    found = with_absolute_paths(config, project)
    assert found.model.name == f"{project}/model"
    assert found.data.source == f"{project}/rows.jsonl"
    assert found.data.test_source == f"{project.parent}/home/test.jsonl"
    assert found.lora.continue_from == f"{project}/adapter"
    names = [f"{project}/mine/score.py:score", f"{project.parent}/home/score.py:score", f"{project}/mine/plain:f"]
    assert [reward.name for reward in found.rewards] == [*names, "number"]
    assert with_absolute_paths(found, Path("/elsewhere")) == found


def test_a_function_as_data_source_keeps_its_name(project: Path) -> None:
    config = config_of(data={"source": "rows.py:make"})
    assert with_absolute_paths(config, project).data.source == f"{project}/rows.py:make"


def test_names_that_are_no_paths_stay(project: Path) -> None:
    for name in ("addition", "smollm2-135m-instruct", "number"):
        (project / name).mkdir()  # a built-in name means the built-in, whatever lies beside the config
    config = config_of(
        model={"name": "smollm2-135m-instruct"},
        data={"source": "addition", "test_source": "me/hub"},
        rewards=["number"],
    )
    assert with_absolute_paths(config, project) == config
    missing = config_of(model={"name": "me/model"}, data={"source": "gone.jsonl"}, rewards=["gone.py:score"])
    assert with_absolute_paths(missing, project) == missing


def test_a_model_beside_the_config_is_found(tmp_path: Path) -> None:
    save_tiny(tmp_path / "tiny")
    (tmp_path / "run.yaml").write_text(
        "model: {name: ./tiny}\ndata: {source: addition}\nrewards: [number]\nrun: {steps: 1}\n"
    )
    checked = preflight(load_config(tmp_path / "run.yaml", ["data.max_prompt_tokens=64"]))
    checked.close()
    assert (checked.model.origin, checked.model.family) == ("local", "llama")
    assert checked.config.model.name == str(tmp_path / "tiny")


def test_reward_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for folder in ("a", "b", "c"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "score.py").write_text(SCORE)
    specs = [f"{tmp_path}/a/score.py:score", f"{tmp_path}/b/score.py:score", f"{tmp_path}/a/score.py:other", "number"]
    rewards = [{"name": name, "label": f"r{i}"} for i, name in enumerate([*specs, f"{tmp_path}/c/score.py:score"])]
    assert reward_files(config_of(rewards=rewards)) == {
        "score.py": tmp_path / "a/score.py",
        "1-score.py": tmp_path / "b/score.py",
        "2-score.py": tmp_path / "c/score.py",
    }


# --------------------------------------------------------------------------------------------- what stages are told


def test_a_metric_with_a_gold_answer_is_read_in_three_ways() -> None:
    config = config_of(rewards=[{"name": "number", "timeout_s": 5.0}], eval={"metric_args": {}, "metric": None})
    assert evaluation_specs(config, {}) == [
        RewardSpec("number", 1.0, {}, "score", 5.0),
        RewardSpec("number", 1.0, {"mode": "lenient"}, "correct", 5.0),
        RewardSpec("number", 1.0, {"mode": "format"}, "format", 5.0),
    ]


def test_other_metrics_have_a_score_only() -> None:
    length = {"name": "length", "args": {"max_tokens": 5}, "weight": 0.5}
    assert [spec.label for spec in evaluation_specs(config_of(rewards=[length], eval={}), {})] == ["score"]
    mine = config_of(rewards=[{"name": "number"}], eval={})
    assert evaluation_specs(mine, {"number": len}) == [RewardSpec("number", 1.0, {}, "score", 30.0)]
    file = config_of(rewards=["mine.py:score", "number"], eval={})
    assert evaluation_specs(file, {}) == [RewardSpec("mine.py:score", 1.0, {}, "score", 30.0)]


def test_the_metric_may_be_a_label_or_another_reward() -> None:
    rewards = [
        {"name": "mine.py:score", "label": "style", "timeout_s": 7.0},
        {"name": "length", "label": "brevity", "args": {"max_tokens": 5}},
    ]
    labelled = config_of(rewards=rewards, eval={"metric": "brevity", "metric_args": {"max_tokens": 9}})
    assert evaluation_specs(labelled, {}) == [RewardSpec("length", 1.0, {"max_tokens": 9}, "score", 30.0)]
    other = evaluation_specs(config_of(rewards=rewards, eval={"metric": "text"}), {})
    assert [(spec.name, spec.label, spec.timeout_s) for spec in other] == [
        ("text", "score", 7.0),
        ("text", "correct", 7.0),
        ("text", "format", 7.0),
    ]


def test_sampling_params_are_the_rollout_section() -> None:
    rollout = {"max_new_tokens": 9, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "stop": ["\n"]}
    assert sampling_params(config_of(rollout=rollout)) == SamplingParams(9, 0.7, 0.9, 5, 0.1, ("\n",))


def test_every_data_setting_reaches_the_data_stage() -> None:
    data = {
        "source": "me/hub",
        "args": {"name": "main"},
        "split": "s",
        "prompt_column": "q",
        "answer_column": "a",
        "columns": {"x": "y"},
        "system_prompt": "be brief",
        "format": "chat",
        "thinking": False,
        "chat_template_kwargs": {"k": 1},
        "max_prompt_tokens": 7,
        "dev_size": 3,
        "test_source": "me/test",
        "test_split": "t",
        "test_size": 4,
    }
    spec = assembly._data_spec(config_of(data=data, run={"steps": 1, "seed": 5}))
    assert {name: value for name, value in dataclasses.asdict(spec).items() if name != "seed"} == data
    assert spec.seed == 0


# --------------------------------------------------------------------------------------------- what is recorded


def test_environment_is_json_and_names_what_a_result_depends_on() -> None:
    checked = preflight(tiny_run())
    found = environment(checked)
    checked.close()
    assert json.loads(json.dumps(found)) == found
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["packages"]["torch"] == torch.__version__
    assert set(found["packages"]) >= {"lowmem-grpo", "transformers", "peft", "bitsandbytes", "datasets", "accelerate"}
    assert (found["compute_dtype"], found["threads"]) == ("float32", torch.get_num_threads())
    assert found["card"]["device"] == "cpu" and found["card"]["memory_bytes"] > 0
    assert found["deterministic_algorithms"] is False
    assert found["command"] == sys.argv
    assert found["data_sha256"] == checked.raw.sha256
    assert found["reward_sha256"] == {"rewards.py": hashlib.sha256(reward_file().read_bytes()).hexdigest()}


# --------------------------------------------------------------------------------------------- what is refused


def test_prompt_and_answer_together_fit_into_the_context(tmp_path: Path) -> None:
    fits = preflight(tiny_run("data.max_prompt_tokens=506", **IN_MEMORY), functions=FUNCTIONS)
    fits.close()  # 506 + 6 is the context of the tiny model
    with pytest.raises(DataError) as refused:
        preflight(tiny_run("data.max_prompt_tokens=507", **IN_MEMORY), functions=FUNCTIONS)
    assert str(refused.value) == (
        "data.max_prompt_tokens=507 and rollout.max_new_tokens=6 together exceed the context of "
        f"{model_folder()}, 512 tokens; lower one of them."
    )


@pytest.mark.parametrize(
    ("rows", "overrides", "words"),
    [
        pytest.param([{"prompt": "<|im_start|>user\nhi"}], [], "line 1, column 'prompt' already holds", id="rendered"),
        pytest.param([{"prompt": ""}, {"prompt": None}], [], "has no row that can be used", id="no row"),
        pytest.param([{"prompt": "a"}, {"prompt": "b"}], ["data.test_size=2"], "too few", id="nothing to train on"),
        pytest.param([{"prompt": "a"}], [], "1 training problems are fewer than", id="fewer than a step"),
    ],
)
def test_rows_that_cannot_be_used_are_refused_before_the_weights_load(
    rows: list[dict[str, Any]], overrides: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "load_policy", lambda *_: pytest.fail("the weights were loaded"))
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({**row, "answer": "1"}) + "\n" for row in rows))
    sections = {**IN_MEMORY, "data": {"source": str(data), "max_prompt_tokens": 128}}
    checked = preflight(tiny_run(*overrides, **sections), functions=FUNCTIONS)
    with pytest.raises(DataError, match=words):
        assemble(checked)
    checked.close()


def test_a_metric_that_wants_a_column_is_told_apart_from_a_reward_that_does(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(completions, solution):\n    return [0.0 for _ in completions]\n")
    mine = f"{tmp_path}/mine.py:score"
    with pytest.raises(DataError, match="the reward 'score' wants the column 'solution'"):
        preflight(tiny_run(rewards=[mine], eval={"metric": "number"}))
    with pytest.raises(DataError, match=r"the reward 'score of eval\.metric' wants the column 'solution'"):
        preflight(tiny_run(rewards=["number"], eval={"metric": mine}))


def test_rows_a_reward_cannot_read_are_left_out_and_counted(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    golds = ["1", "???", "3", None]
    data.write_text("".join(json.dumps({"prompt": f"q{i}", "answer": gold}) + "\n" for i, gold in enumerate(golds)))
    checked = preflight(tiny_run(data={"source": str(data), "max_prompt_tokens": 128}, rewards=["number"]))
    parts = assemble(checked)
    checked.close()
    assert [problem.id for problem in parts.data.train] == ["train-1", "train-3"]
    assert [(item.reason, item.lines) for item in parts.data.report.dropped] == [
        ("a reward cannot read its answer", (2,)),
        ("the answer is null", (4,)),
    ]
    assert (parts.steps, parts.stream.steps_per_epoch) == (6, 1)
    assert parts.template["format"] == "chat"


def test_the_newest_revision_of_a_hub_model_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    found = dataclasses.replace(assembly.inspect_model(str(model_folder())), origin="hub", revision="0123abcd")
    monkeypatch.setattr(assembly, "inspect_model", lambda *_, **__: found)
    checked = preflight(tiny_run(**IN_MEMORY), functions=FUNCTIONS)
    checked.close()
    assert tiny_run(**IN_MEMORY).config.model.revision is None
    assert checked.config.model.revision == "0123abcd"
