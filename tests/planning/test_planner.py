"""The plan of a whole config: what it says is true, what it advises helps, and mistakes are one sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lowmem_grpo.catalog import CARDS, KNOWN, card_named
from lowmem_grpo.config import Config, load_config
from lowmem_grpo.errors import ConfigError, DataError, ModelError
from lowmem_grpo.planning import planner
from lowmem_grpo.planning.choosing import choose
from lowmem_grpo.planning.planner import Plan, check_fits, configured_budget, make_plan, models_for
from lowmem_grpo.planning.simulate import Phase, Simulation
from lowmem_grpo.planning.timing import estimate_time
from lowmem_grpo.planning.workload import fixed_settings
from lowmem_grpo.types import Card, MemorySettings

GIB = 2**30
CPU = Card("cpu", "cpu", (0, 0), 8 * GIB)
TINY: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "vocab_size": 10,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
CONTRACT = {
    *("fits", "budget_bytes", "peak_bytes", "phases", "items", "suggestions", "chosen", "time"),
    *("download_bytes", "disk_bytes", "host_ram_bytes"),
}


def config(model: object, *overrides: str) -> Config:
    """One group of 8 answers of 1024 tokens, nothing about memory."""
    sections = {
        "model": {"name": str(model)},
        "data": {"source": "addition", "max_prompt_tokens": 256},
        "rewards": ["number"],
        "rollout": {"prompts_per_step": 1, "group_size": 8, "max_new_tokens": 1024},
        "run": {"steps": 100},
    }
    return load_config(sections, overrides).config


def plan(model: object, card: str, *overrides: str) -> Plan:
    return make_plan(config(model, *overrides), card_named(card))


def folder(path: Path, **changed: Any) -> Path:
    """A model folder that holds a config.json alone; None leaves a key out."""
    path.mkdir()
    content = {name: value for name, value in {**TINY, **changed}.items() if value is not None}
    (path / "config.json").write_text(json.dumps(content))
    return path


def tiny_plan(path: Path, card: Card, *overrides: str, **changed: Any) -> Plan:
    short = ("data.max_prompt_tokens=8", "rollout.max_new_tokens=10")
    return make_plan(config(folder(path, **changed), *short, *overrides), card)


# ----- the recipes

RECIPES = [
    ("fit-1.5b", "rtx3060-12gb", 2.5, 8, 1.2),
    ("fit-8b", "rtx4060-8gb", 6.7, 8, 1.2),
    ("fit-8b-20k", "t4-16gb", 13.5, 3, 1.5),
    ("fit-14b", "rtx3060-12gb", 10.5, 4, 1.3),
    ("fit-32b", "rtx3090-24gb", 21.5, 8, 1.3),
]
"""Recipe, a card it is for, GiB, rows at once, and how many times as long as with all rows at once a step may take."""


@pytest.mark.parametrize(("name", "card", "gib", "rows", "slower"), RECIPES)
def test_a_recipe_fits_its_card_with_every_setting_written_out(
    name: str, card: str, gib: float, rows: int, slower: float
) -> None:
    recipe = load_config(name).config
    made = make_plan(recipe, card_named(card))
    assert made.fits and made.budget_bytes == int(gib * GIB) and made.peak_bytes <= gib * GIB
    settings = made.choice.settings
    assert MemorySettings(**fixed_settings(recipe)) == settings and settings.max_concurrent == rows
    plain = MemorySettings(8, micro_batch_tokens=settings.micro_batch_tokens)
    with_room = estimate_time(made.workload, plain, None)
    assert made.time is not None and with_room is not None
    assert made.time.step_s <= slower * with_room.step_s


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("fit-1.5b", "memory.head_chunk_tokens=256"),
        ("fit-8b", "memory.offload_embeddings=false"),
        ("fit-8b-20k", "memory.offload_embeddings=false"),
        ("fit-8b-20k", "memory.offload_activations=false"),
        ("fit-8b-20k", "rollout.max_concurrent=4"),
        ("fit-14b", "memory.offload_embeddings=false"),
        ("fit-14b", "memory.offload_activations=false"),
        ("fit-14b", "rollout.max_concurrent=8"),
        ("fit-32b", "memory.offload_embeddings=false"),
    ],
)
def test_a_recipe_has_no_technique_that_it_does_not_need(name: str, without: str) -> None:
    card = next(card for recipe, card, *_ in RECIPES if recipe == name)
    assert not make_plan(load_config(name, [without]).config, card_named(card)).fits


def test_the_smallest_recipe_is_simulated_within_its_budget() -> None:
    made = make_plan(load_config("fit-1.5b").config, card_named("rtx3060-12gb"), simulate=True)
    assert made.simulation is not None and made.fits and made.peak_bytes <= 2.5 * GIB
    planned = made.choice.estimate
    for phase, simulated in made.phases.items():
        assert simulated == pytest.approx(planned.phase_bytes(phase), rel=0.05)


# ----- what does not fit


def test_the_smallest_card_and_the_largest_model_are_true() -> None:
    refusal = plan("qwen2.5-14b-instruct", "8gb").refusal
    assert refusal is not None and refusal.overrides == ()
    assert refusal.smallest_card is not None and refusal.freed_card == refusal.smallest_card
    memory_gib = CARDS[refusal.smallest_card].memory_gib
    smaller = [slug for slug, spec in CARDS.items() if spec.memory_gib < memory_gib][-1]
    assert plan("qwen2.5-14b-instruct", refusal.smallest_card).fits and not plan("qwen2.5-14b-instruct", smaller).fits
    assert refusal.largest_model is not None and plan(refusal.largest_model, "8gb").fits
    least = next(known.shape.parameters for known in KNOWN.values() if known.repo == refusal.largest_model)
    larger = [known.shape for known in KNOWN.values() if known.shape.parameters > least]
    assert larger
    assert not any(choose(replace(refusal.workload, shape=shape), refusal.budget_bytes).fits for shape in larger)
    assert refusal.advice == (
        f"the smallest card that would do is {refusal.smallest_card}, "
        f"the largest known model that fits here is {refusal.largest_model}"
    )


def test_no_card_and_no_model_do_where_none_does() -> None:
    long = ("data.max_prompt_tokens=16000", "rollout.max_new_tokens=16000", "memory.budget_gib=0.5")
    refusal = plan("qwen2.5-72b-instruct", "6gb", "model.quantization=none", *long).refusal
    assert refusal is not None and (refusal.smallest_card, refusal.largest_model) == (None, None)
    assert refusal.advice == "no card in the table would do, no known model fits here like this"


def test_the_setting_of_the_config_that_stands_in_the_way_is_named() -> None:
    in_the_way = ("memory.activation_checkpointing=false", "memory.micro_batch_tokens=4096")
    refusal = plan("qwen2.5-7b-instruct", "12gb", *in_the_way, "memory.mlp_tile_tokens=0").refusal
    assert refusal is not None and refusal.overrides == ("memory.activation_checkpointing=true",)
    assert plan("qwen2.5-7b-instruct", "12gb", *in_the_way, "memory.mlp_tile_tokens=0", *refusal.overrides).fits
    assert refusal.freed_card is not None and refusal.smallest_card is not None
    assert CARDS[refusal.freed_card].memory_gib <= 12 < CARDS[refusal.smallest_card].memory_gib
    assert f"({refusal.freed_card} where the memory settings are left to the plan)" in refusal.advice
    assert plan("qwen2.5-7b-instruct", refusal.smallest_card, *in_the_way, "memory.mlp_tile_tokens=0").fits


def test_several_settings_that_stand_in_the_way_are_named_together() -> None:
    in_the_way = (
        "memory.activation_checkpointing=false",
        "memory.micro_batch_tokens=8000",
        "memory.head_chunk_tokens=8000",
    )
    refusal = plan("qwen2.5-7b-instruct", "8gb", *in_the_way).refusal
    assert refusal is not None and len(refusal.overrides) > 1
    assert {override.partition("=")[0] for override in refusal.overrides} <= {
        key.partition("=")[0] for key in in_the_way
    }
    assert plan("qwen2.5-7b-instruct", "8gb", *in_the_way, *refusal.overrides).fits


def test_a_budget_below_what_the_card_has_is_named() -> None:
    refusal = plan("qwen2.5-1.5b-instruct", "12gb", "memory.budget_gib=1.5").refusal
    assert refusal is not None
    assert "has 1.50 GiB on a 12 GB card (memory.budget_gib)" in refusal.sentence
    assert [key.partition("=")[0] for key in refusal.overrides] == ["memory.budget_gib"]
    assert plan("qwen2.5-1.5b-instruct", "12gb", *refusal.overrides).fits


def test_a_run_on_a_cpu_is_refused_with_the_card_for_it() -> None:
    refusal = make_plan(config("qwen2.5-7b-instruct"), CPU).refusal
    assert refusal is not None and refusal.workload.decoded and refusal.smallest_card is not None
    assert plan("qwen2.5-7b-instruct", refusal.smallest_card).fits


def test_check_fits_raises_what_the_plan_says() -> None:
    made = plan("qwen2.5-14b-instruct", "8gb")
    assert made.refusal is not None
    with pytest.raises(ConfigError) as caught:
        check_fits(made.workload, made.choice, made.budget_bytes, {})
    assert str(caught.value) == (
        f"{made.refusal.sentence}: {made.refusal.advice}; `lowmem-grpo plan` ranks all that would make it fit."
    )
    assert made.verdict == f"It does not fit: {made.refusal.sentence}."
    fitting = plan("qwen2.5-1.5b-instruct", "8gb")
    check_fits(fitting.workload, fitting.choice, fitting.budget_bytes, {})


# ----- the figures


@pytest.mark.parametrize("card", ["12gb", "6gb"])
def test_json_has_every_key_of_the_contract(card: str) -> None:
    made = plan("qwen2.5-7b-instruct", card).to_json()
    assert set(json.loads(json.dumps(made))) >= CONTRACT
    assert made["fits"] == (made["peak_bytes"] <= made["budget_bytes"]) == (card == "12gb")
    assert made["peak_bytes"] == max(made["phases"].values()) and list(made["phases"]) == ["load", "rollout", "update"]
    resident = sum(item["bytes"] for item in made["items"] if item["phase"] in ("all", "steps"))
    update = sum(item["bytes"] for item in made["items"] if item["phase"] == "update")
    assert made["phases"]["update"] == resident + update
    assert made["time"]["run_h"] == pytest.approx(100 * made["time"]["step_s"] / 3600)
    assert made["time"]["step_s"] == made["time"]["rollout_s"] + made["time"]["update_s"]
    assert made["time"]["steps_by_morning"] == int(8 * 3600 / made["time"]["step_s"])
    assert (made["simulated"], made["smallest_card"] is None) == (None, card == "12gb")
    assert {"max_concurrent", "micro_batch_tokens", "reasons"} <= set(made["chosen"])


def test_a_card_of_unknown_speed_has_no_times(tmp_path: Path) -> None:
    made = tiny_plan(tmp_path / "model", CPU)
    assert (made.time, made.steps_by_morning) == (None, None)
    assert {value for name, value in made.to_json()["time"].items() if name != "assumptions"} == {None}


def test_epochs_have_no_run_time() -> None:
    time = plan("qwen2.5-1.5b-instruct", "12gb", "run.steps=null", "run.epochs=1").to_json()["time"]
    assert time["step_s"] > 0 and (time["run_h"], time["kwh"]) == (None, None)


def test_the_budget_is_what_is_configured_but_never_more_than_a_card_has() -> None:
    card = card_named("12gb")
    of_the_card = int(card.memory_bytes * 0.98)
    assert configured_budget(config("x"), card) == of_the_card
    assert configured_budget(config("x", "memory.budget_gib=2.5"), card) == 2.5 * GIB
    assert configured_budget(config("x", "memory.budget_gib=24"), card) == of_the_card
    assert configured_budget(config("x", "memory.budget_gib=24"), CPU) == 24 * GIB


def test_download_and_disk_by_hand(tmp_path: Path) -> None:
    # An adapter of rank 16: q, k, v, o have 8 + 8 each, gate, up, down 8 + 16; two layers.
    values = 16 * 2 * (4 * 16 + 3 * 24)
    made = tiny_plan(tmp_path / "a", CPU, "run.keep_checkpoints=3")
    checkpoints = 4 * values * (4 + 4 + 8)  # adapter, best adapter, two moments of 4 bytes; a fourth while it is saved
    answers = 100 * 8 * (300 + 6 * 10)
    assert made.download_bytes == 0
    assert made.disk_bytes == checkpoints + 4 * values + answers
    capped = tiny_plan(tmp_path / "b", CPU, "run.steps=null", "run.epochs=1", "run.completions_cap_mb=1")
    assert capped.disk_bytes == 3 * values * 16 + 4 * values + 5 * 2**20
    known = plan("qwen2.5-1.5b-instruct", "12gb")
    assert known.download_bytes == 2 * 1_543_714_304
    assert known.disk_bytes > known.download_bytes


def test_host_memory_by_hand(tmp_path: Path) -> None:
    process, gpu = int(2.5 * GIB), card_named("12gb")
    on_cpu = tiny_plan(tmp_path / "a", CPU)
    assert on_cpu.host_ram_bytes == on_cpu.peak_bytes
    offloads = ("memory.activation_checkpointing=true", "memory.offload_activations=true")
    settings = (*offloads, "memory.offload_embeddings=true", "memory.micro_batch_tokens=1")
    there = tiny_plan(tmp_path / "b", gpu, *settings)
    inputs = 1 * 8 * (8 + 9) * 2  # of one layer but the last, H 8, a prompt of 8 with an answer of 10, in 16 bits
    assert there.host_ram_bytes == process + inputs + 10 * 8 * 2
    tied = tiny_plan(tmp_path / "c", gpu, *settings, tie_word_embeddings=True)
    assert tied.host_ram_bytes == process + inputs
    kept = (*settings[2:], "memory.offload_activations=false", "memory.offload_embeddings=false")
    assert tiny_plan(tmp_path / "d", gpu, *kept).host_ram_bytes == process


def test_where_there_is_a_simulation_it_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = plan("qwen2.5-1.5b-instruct", "12gb")
    above = planned.budget_bytes + GIB
    phases = {name: Phase(size, size, ()) for name, size in (("load", GIB), ("rollout", above), ("update", 2 * GIB))}
    simulation = Simulation(phases, GIB, GIB)
    monkeypatch.setattr(planner, "_simulation", lambda workload, settings: simulation)
    made = make_plan(config("qwen2.5-1.5b-instruct"), card_named("12gb"), simulate=True)
    refusal = made.refusal
    assert planned.fits and not made.fits and refusal is not None
    assert (made.peak_bytes, made.peak_phase) == (above + GIB, "rollout")
    assert made.phases == {"load": 2 * GIB, "rollout": above + GIB, "update": 3 * GIB}
    as_json = made.to_json()
    assert (as_json["peak_bytes"], as_json["phases"]) == (made.peak_bytes, made.phases)
    assert as_json["planned"]["peak_bytes"] == planned.peak_bytes and as_json["simulated"]["peak_bytes"] == above + GIB
    # Every search leaves free what the simulation needs above the arithmetic.
    extra = made.peak_bytes - planned.peak_bytes
    assert refusal.overrides
    leaner = plan("qwen2.5-1.5b-instruct", "12gb", *refusal.overrides)
    assert leaner.peak_bytes + extra <= made.budget_bytes
    lower = Simulation({name: Phase(GIB, GIB, ()) for name in phases}, GIB, GIB)
    monkeypatch.setattr(planner, "_simulation", lambda workload, settings: lower)
    assert make_plan(config("qwen2.5-1.5b-instruct"), card_named("12gb"), simulate=True).fits


# ----- mistakes


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"hidden_size": None}, "has no hidden_size"),
        ({"hidden_size": -5}, "says hidden_size is -5; it takes an integer of at least 1"),
        ({"model_type": "mamba"}, "mamba"),
    ],
)
def test_a_config_json_without_its_sizes_is_refused(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError) as caught:
        tiny_plan(tmp_path / "model", CPU, **changed)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_unknown_models_and_too_long_answers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no model called 'qwen2\.5-7b-instrukt'.*did you mean qwen2\.5-7b-instruct"):
        plan("qwen2.5-7b-instrukt", "12gb")
    path = folder(tmp_path / "model")
    with pytest.raises(DataError, match=r"max_prompt_tokens=256 and .*=1024 together exceed .* 64 tokens"):
        make_plan(config(path), CPU)


# ----- the list of models


def test_known_models_are_listed_by_size_with_what_fits() -> None:
    rows = models_for(card_named("12gb"))
    sizes = [row["parameters"] for row in rows]
    assert len(rows) == len(KNOWN) and sizes == sorted(sizes)
    budget = int(card_named("12gb").memory_bytes * 0.98)
    assert all(row["fits"] == (row["peak_bytes"] <= budget) for row in rows)
    assert {row["name"]: row["fits"] for row in rows}.items() >= {
        ("qwen2.5-7b-instruct", True),
        ("qwen2.5-32b-instruct", False),
    }
    small = next(row for row in rows if row["name"] == "qwen2.5-1.5b-instruct")
    ordinary = ("rollout.max_new_tokens=512",)
    assert small["step_s"] == plan("qwen2.5-1.5b-instruct", "12gb", *ordinary).to_json()["time"]["step_s"]


def test_without_a_card_nothing_is_said_about_fitting() -> None:
    rows = models_for(None)
    assert {row[name] for row in rows for name in ("card", "fits", "peak_bytes", "step_s")} == {None}
    assert rows[0]["repo"] == "HuggingFaceTB/SmolLM2-135M-Instruct" and rows[0]["licence"] == "apache-2.0"
