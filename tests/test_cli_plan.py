"""`lowmem-grpo plan` and `models`, and the function `plan`: what is printed, the exit status, and that it is light."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import lowmem_grpo
from lowmem_grpo import catalog
from lowmem_grpo.catalog import KNOWN
from lowmem_grpo.errors import ConfigError
from lowmem_grpo.types import Card
from tests.test_cli import ROOT, Said, call
from tests.tiny import tiny_config

SEVEN_B = ("quickstart", "model.name=qwen2.5-7b-instruct", "rollout.max_new_tokens=1024")
FREED = ("memory.micro_batch_tokens=null", "memory.activation_checkpointing=null")
CPU = Card("cpu", "cpu", (0, 0), 8 << 30)


def tiny_run(folder: Path, **changed: Any) -> Path:
    """A config for a model of which there is a config.json alone; None leaves a key of that out."""
    content = {name: value for name, value in {**tiny_config().to_dict(), **changed}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(content))
    config = {
        "device": "cpu",
        "model": {"name": str(folder)},
        "data": {"source": "addition", "max_prompt_tokens": 8},
        "rewards": ["number"],
        "rollout": {"prompts_per_step": 1, "group_size": 2, "max_new_tokens": 8},
        "run": {"steps": 2},
    }
    path = folder / "task.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def lines_of(said: Said) -> list[str]:
    assert (said.status, said.err) == (0, "")
    return said.out.splitlines()


def test_a_run_that_fits() -> None:
    lines = lines_of(call("plan", *SEVEN_B, *FREED, "--card", "12gb"))
    as_json = call("plan", *SEVEN_B, *FREED, "--card", "12gb", "--json").json
    assert lines[0] == as_json["verdict"] and lines[0].startswith("It fits: qwen2.5-7b-instruct needs ")
    assert as_json["fits"] and as_json["card"] == "a 12 GB card"
    assert lines[1] == "Planned with 8 answers of up to 1024 tokens to each of 4 prompts of up to 512."
    assert lines[3].split() == ["GiB", "load", "rollout", "update"]
    peak = next(line for line in lines if line.startswith("planned peak"))
    phases = [f"{as_json['phases'][phase] / 2**30:.2f}" for phase in ("load", "rollout", "update")]
    assert peak.split()[2:] == phases
    rows = as_json["chosen"]["max_concurrent"]
    assert f"rollout.max_concurrent {rows} the plan" in [" ".join(line.split()) for line in lines]
    assert all(f"  {reason}" in lines for reason in as_json["chosen"]["reasons"])
    time = next(line for line in lines if line.startswith("Time: "))
    assert f"{as_json['time']['step_s']:.1f} s a step" in time
    assert f"{as_json['time']['steps_by_morning']} steps in 8 hours" in time
    run = next(line for line in lines if line.startswith("The run of 60 steps: "))
    assert run.endswith(f" and {as_json['time']['kwh']:.2f} kWh.")
    assert any(line.startswith("  Assumed: every answer has the full 1024 tokens") for line in lines)
    assert any("Download: 15.23 GB; disk, with the run: " in line for line in lines)
    same = lines.index("Changes that leave the training as it is, the best first:")
    other = lines.index("Changes that change the training, the best first:")
    assert "memory." in lines[same + 2] and same < other
    assert any("rollout.max_new_tokens=" in line for line in lines[other:])


def test_a_run_that_does_not_fit_is_an_answer_too() -> None:
    lines = lines_of(call("plan", *SEVEN_B, *FREED, "--card", "6gb"))
    as_json = call("plan", *SEVEN_B, *FREED, "--card", "6gb", "--json").json
    assert lines[0].startswith("It does not fit: qwen2.5-7b-instruct with prompts of 512 and answers of 1024 tokens")
    assert not as_json["fits"] and as_json["peak_bytes"] > as_json["budget_bytes"]
    assert lines[1] == (
        f"The smallest card that would do is {as_json['smallest_card']}, "
        f"the largest known model that fits here is {as_json['largest_model']}."
    )
    assert {as_json["smallest_card"]} <= set(catalog.CARDS)
    assert {as_json["largest_model"]} <= {known.repo for known in KNOWN.values()}


def test_the_settings_of_the_config_are_told_apart() -> None:
    lines = [" ".join(line.split()) for line in lines_of(call("plan", *SEVEN_B, "--card", "12gb"))]
    assert "memory.micro_batch_tokens 160 the config" in lines
    assert "memory.activation_checkpointing false the config" in lines


def test_a_plan_for_a_cpu_says_how_to_ask_for_a_card(tmp_path: Path) -> None:
    lines = lines_of(call("plan", tiny_run(tmp_path)))
    assert any(line.startswith("Time: the speed of ") for line in lines)
    assert lines[-1] == "This is the plan for a CPU; --card rtx3060-12gb, or --card 12gb, plans for a card."


def test_simulated_peaks_stand_beside_the_planned_ones(tmp_path: Path) -> None:
    task = tiny_run(tmp_path)
    said = call("plan", task, "--card", "12gb", "--simulate", "--json")
    assert (said.status, said.err) == (0, "")
    simulated = said.json["simulated"]
    reserved = {
        name: phase["reserved_bytes"] + simulated["context_bytes"] for name, phase in simulated["phases"].items()
    }
    assert said.json["phases"] == reserved
    assert said.json["peak_bytes"] == simulated["peak_bytes"] == max(reserved.values())
    lines = lines_of(call("plan", task, "--card", "12gb", "--simulate"))
    start = next(index for index, line in enumerate(lines) if line.startswith("planned peak"))
    assert [line.split("  ")[0] for line in lines[start + 1 : start + 3]] == [
        "simulated, allocated",
        "simulated, reserved",
    ]
    shown = [f"{reserved[phase] / 2**30:.2f}" for phase in ("load", "rollout", "update")]
    assert lines[start + 2].split()[2:] == shown
    largest = lines.index(f"The largest at the simulated peak, in the {simulated['peak_phase']}:")
    first = simulated["phases"][simulated["peak_phase"]]["largest"][0]
    assert lines[largest + 2].split(maxsplit=1) == [f"{first['bytes'] / 2**20:.1f}", first["where"]]


def test_the_function_returns_what_the_command_prints() -> None:
    made = lowmem_grpo.plan("fit-8b", "run.steps=50", card="rtx4060-8gb")
    assert (
        json.loads(json.dumps(made)) == call("plan", "fit-8b", "run.steps=50", "--card", "rtx4060-8gb", "--json").json
    )
    assert made["fits"] and made["time"]["run_h"] == pytest.approx(50 * made["time"]["step_s"] / 3600)


def test_the_function_plans_for_this_machine(tmp_path: Path) -> None:
    config = yaml.safe_load(tiny_run(tmp_path).read_text())
    made = lowmem_grpo.plan(config)
    assert made["fits"] and made["time"]["step_s"] is None
    with pytest.raises(ConfigError, match="There is no card called 'rtx9999'"):
        lowmem_grpo.plan(config, card="rtx9999")


@pytest.mark.parametrize("words", [("plan", "fit-32b", "--card", "12gb"), ("models", "--card", "rtx3090-24gb")])
def test_a_plan_for_a_named_card_needs_no_torch(words: tuple[str, ...]) -> None:
    code = f"""
import sys
from lowmem_grpo.cli import main
status = main({list(words)!r})
print(status, [name for name in ("torch", "transformers", "peft", "bitsandbytes") if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stderr == "" and result.stdout.splitlines()[-1] == "0 []"


@pytest.mark.parametrize(
    ("changed", "words", "said"),
    [
        ({}, ("model.name=qwen2.5-7b-instrukt",), "did you mean qwen2.5-7b-instruct?"),
        ({}, ("--card", "rtx3061-12gb"), "There is no card called 'rtx3061-12gb' (did you mean rtx3060-12gb?)"),
        ({}, ("rollout.max_new_tokens=100000",), "together exceed the context of"),
        ({}, ("rollout.group_sise=4",), "did you mean `rollout.group_size`?"),
        ({"model_type": "mamba"}, (), "mamba"),
        ({"hidden_size": None}, (), "has no hidden_size"),
        ({"num_attention_heads": -5}, (), "says num_attention_heads is -5"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path: Path, changed: dict[str, Any], words: tuple[str, ...], said: str) -> None:
    failed = call("plan", tiny_run(tmp_path, **changed), "--card", "12gb", *words)
    assert (failed.status, failed.out) == (2, "")
    assert failed.err.startswith("error: ") and failed.err.count("\n") == 1 and said in failed.err
    as_json = call("plan", tmp_path / "task.yaml", "--card", "12gb", *words, "--json")
    assert as_json.status == 2 and as_json.json["exit_code"] == 2 and said in as_json.json["error"]


def test_train_refuses_what_cannot_fit_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOWMEM_GRPO_CACHE", str(tmp_path / "cache"))
    words = ("quickstart", "device=cpu", "memory.budget_gib=0.5")
    said = call("train", *words, "--run-dir", tmp_path / "run")
    assert said.status == 2 and said.err.count("\n") == 1
    assert said.err.startswith("error: smollm2-135m-instruct with answers of 16 tokens needs ")
    assert "has 0.50 GiB on " in said.err and "would make it fit" in said.err
    assert list(tmp_path.iterdir()) == []


# ----- the list of models


def test_models_of_a_card() -> None:
    lines = lines_of(call("models", "--card", "12gb"))
    assert lines[0].split("  ")[0] == "model" and "fits a 12 GB card" in lines[0]
    rows = {line.split()[0]: line for line in lines[1:]}
    assert set(rows) == set(KNOWN)
    found = {row["name"]: row for row in call("models", "--card", "12gb", "--json").json}
    assert " yes " in rows["qwen2.5-7b-instruct"] and " no " in rows["qwen2.5-72b-instruct"]
    for name in ("qwen2.5-7b-instruct", "qwen2.5-72b-instruct"):
        row = found[name]
        assert rows[name].split()[1] == f"{row['parameters'] / 1e9:.2f}" and row["licence"] in rows[name]
        assert f"{row['download_bytes'] / 1e9:.2f} GB" in rows[name]
        last = [f"{row['peak_bytes'] / 2**30:.2f}", "GiB", f"{row['step_s']:.1f}", "s"]
        assert rows[name].split()[-4:] == last


@pytest.mark.parametrize("usable", [True, False])
def test_models_without_a_gpu(monkeypatch: pytest.MonkeyPatch, usable: bool) -> None:
    def detected() -> Card:
        if not usable:
            raise ConfigError("This machine has a GPU that this torch cannot use")
        return CPU

    monkeypatch.setattr(catalog, "detect_card", detected)
    lines = lines_of(call("models"))
    assert lines[0].split() == ["model", "parameters", "licence", "download"]
    assert lines[-1] == "`lowmem-grpo models --card rtx3060-12gb`, or `--card 12gb`, says which of them fit."
    assert {row["fits"] for row in call("models", "--json").json} == {None}


def test_models_on_a_machine_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card("NVIDIA GeForce RTX 3060", "cuda", (8, 6), 12 << 30)
    monkeypatch.setattr(catalog, "detect_card", lambda: card)
    header, first, *_ = lines_of(call("models"))
    assert "fits NVIDIA GeForce RTX 3060" in header and " yes " in first
    assert call("models", "--card", "rtx9999").status == 2
