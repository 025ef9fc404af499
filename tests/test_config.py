from __future__ import annotations

import doctest
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

import lowmem_grpo.config
import lowmem_grpo.config_errors
import lowmem_grpo.config_text
from lowmem_grpo.config import (
    AdvantageName,
    AggregationName,
    Config,
    LossName,
    SinkName,
    describe_fields,
    dump_config,
    load_config,
    recipe_names,
    resume_overrides,
)
from lowmem_grpo.errors import ConfigError

LEAST: dict[str, Any] = {
    "model": {"name": "m"},
    "data": {"source": "d.jsonl"},
    "rewards": ["number"],
    "rollout": {"stop": []},
    "run": {"steps": 10},
}


def load(*overrides: str) -> Config:
    return load_config(LEAST, overrides).config


def sentence(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    return str(caught.value)


def write(folder: Path, text: str) -> Path:
    path = folder / "my.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_docstring_examples() -> None:
    for module in (lowmem_grpo.config, lowmem_grpo.config_errors, lowmem_grpo.config_text):
        result = doctest.testmod(module)
        assert result.attempted > 0
        assert result.failed == 0


# --- what loads -------------------------------------------------------------------------------------------------------


def test_defaults_of_the_least_config() -> None:
    config = load()
    assert (config.device, config.model.quantization, config.lora.rank, config.lora.alpha) == ("auto", "nf4", 16, 32.0)
    assert (config.rollout.prompts_per_step, config.rollout.group_size, config.rollout.max_new_tokens) == (4, 8, 256)
    assert (config.algorithm.advantage, config.algorithm.loss, config.algorithm.aggregation) == (
        "dr_grpo",
        "clip",
        "dapo",
    )
    assert (config.optim.lr, config.run.steps, config.run.epochs, config.run.sinks) == (
        1e-4,
        10,
        None,
        ("jsonl", "console", "picture"),
    )
    assert config.rewards[0].model_dump() == {
        "name": "number",
        "weight": 1.0,
        "args": {},
        "label": None,
        "timeout_s": 30.0,
    }


def test_a_file_gives_its_name_and_the_folder_for_relative_paths(tmp_path: Path) -> None:
    loaded = load_config(write(tmp_path, yaml.safe_dump(LEAST)))
    assert (loaded.name, loaded.base_dir, loaded.config) == ("my", tmp_path, load())


def test_a_section_with_every_line_commented_out_counts_as_not_given(tmp_path: Path) -> None:
    path = write(tmp_path, yaml.safe_dump(LEAST) + "lora:\n  # rank: 4\n")
    assert load_config(path).config.lora.rank == 16
    assert load_config(path, ["lora.alpha=8"]).config.lora.rank == 16


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("rollout.group_size=16", lambda c: c.rollout.group_size == 16),
        ("optim.lr=2e-4", lambda c: c.optim.lr == 0.0002),
        ("optim.lr=5", lambda c: c.optim.lr == 5.0),
        ("algorithm.kl_coef=0.04", lambda c: c.algorithm.kl_coef == 0.04),
        ("algorithm.clip_high=.28", lambda c: c.algorithm.clip_high == 0.28),
        ("rewards.0.weight=0.5", lambda c: c.rewards[0].weight == 0.5),
        ("rewards=[tags, {name: rewards.py:brief, weight: -1}]", lambda c: c.rewards[1].weight == -1.0),
        ("data.columns.solution=answer", lambda c: c.data.columns == {"solution": "answer"}),
        ("data.args={low: 1, high: 20}", lambda c: c.data.args == {"low": 1, "high": 20}),
        ("data.thinking=off", lambda c: c.data.thinking is False),
        ("data.system_prompt=a=b", lambda c: c.data.system_prompt == "a=b"),
        ("model.quantization=none", lambda c: c.model.quantization == "none"),
        ("lora.target_modules=[q_proj, v_proj]", lambda c: c.lora.target_modules == ("q_proj", "v_proj")),
        ("rollout.stop=['</answer>']", lambda c: c.rollout.stop == ("</answer>",)),
        ("device=cuda:1", lambda c: c.device == "cuda:1"),
        (" run.seed = 7", lambda c: c.run.seed == 7),
    ],
)
def test_an_override_sets_one_key(override: str, value: Any) -> None:
    config = load(override)
    assert value(config)
    assert config != load()


def test_a_later_override_wins_and_the_given_mapping_stays_as_it_was() -> None:
    before = yaml.safe_dump(LEAST)
    assert load("run.seed=1", "rewards.0.weight=2", "run.seed=3").run.seed == 3
    assert yaml.safe_dump(LEAST) == before


def test_either_steps_or_epochs() -> None:
    assert load("run.steps=null", "run.epochs=2").run.epochs == 2
    assert sentence("run.epochs=2") == (
        "`run.steps` is 10 and `run.epochs` is 2, and only one can end the run: leave one out, or set it to null"
    )
    assert "no length" in sentence("run.steps=null")


def test_a_config_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load().rollout.group_size = 3  # type: ignore[misc]


# --- wrong keys -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("rollout.group_sise=8", "unknown key `rollout.group_sise`: did you mean `rollout.group_size`?"),
        ("group_size=8", "unknown key `group_size`: did you mean `rollout.group_size`?"),
        ("grup_size=8", "unknown key `grup_size`: did you mean `rollout.group_size`?"),
        ("optim.temperature=1", "unknown key `optim.temperature`: did you mean `rollout.temperature`?"),
        ("rolout.group_size=8", "unknown key `rolout`: did you mean `rollout`?"),
        ("sampling.top_p=.9", "unknown key `sampling`: did you mean `rollout.top_p`?"),
        ("training.learning_rate=1", "unknown key `training`: here it is `optim.lr`"),
        ("rewards.0.wieght=2", "unknown key `rewards.0.wieght`: did you mean `rewards.0.weight`?"),
        ("model.nmae=x", "unknown key `model.nmae`: did you mean `model.name`?"),
    ],
)
def test_an_unknown_key_names_the_nearest_one(override: str, hint: str) -> None:
    assert sentence(override) == hint


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("num_generations", "rollout.group_size"),
        ("beta", "algorithm.kl_coef"),
        ("max_completion_length", "rollout.max_new_tokens"),
        ("max_prompt_length", "data.max_prompt_tokens"),
        ("learning_rate", "optim.lr"),
        ("num_iterations", "algorithm.updates_per_rollout"),
        ("epsilon", "algorithm.clip_low"),
        ("epsilon_high", "algorithm.clip_high"),
        ("loss_type", "algorithm.aggregation"),
        ("max_steps", "run.steps"),
        ("num_train_epochs", "run.epochs"),
        ("per_device_train_batch_size", "rollout.prompts_per_step"),
        ("model_name_or_path", "model.name"),
        ("dataset_name", "data.source"),
        ("lora_r", "lora.rank"),
        ("reward_funcs", "rewards"),
        ("seed", "run.seed"),
    ],
)
def test_the_names_of_trl_are_understood_in_the_hint(theirs: str, ours: str) -> None:
    assert f"`{theirs}`" in sentence(f"{theirs}=1")
    assert f"`{ours}`" in sentence(f"{theirs}=1")
    assert f"`{ours}`" in sentence(f"rollout.{theirs}=1")


def test_every_name_in_a_hint_is_a_key() -> None:
    keys = {field.key.replace(".N.", ".0.") for field in describe_fields()}
    assert set(lowmem_grpo.config_errors._OTHER_NAMES.values()) <= keys


def test_a_key_like_nothing_lists_the_sections() -> None:
    assert sentence("zzz=1") == (
        "unknown key `zzz`: the keys here are device, model, lora, data, rewards, rollout, algorithm, memory, optim, "
        "gate, eval, run"
    )


def test_the_first_of_several_mistakes_and_how_many_more() -> None:
    assert sentence("rollout.top_k=-1", "rollout.group_sise=8", "optim.lr=-1") == (
        "unknown key `rollout.group_sise`: did you mean `rollout.group_size`? (and 2 more to mend)"
    )


@pytest.mark.parametrize(
    ("section", "needed"),
    [("model", "model.name"), ("data", "data.source"), ("rewards", "rewards"), ("run", "run.steps")],
)
def test_a_missing_section_names_the_key_it_needs(section: str, needed: str) -> None:
    with pytest.raises(ConfigError, match=f"`{needed}`"):
        Config(**{name: value for name, value in LEAST.items() if name != section})


# --- wrong values -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rollout.prompts_per_step=0", "`rollout.prompts_per_step` must be a whole number of at least 1, not 0"),
        ("rollout.prompts_per_step=2.5", "`rollout.prompts_per_step` must be a whole number of at least 1, not 2.5"),
        ("rollout.prompts_per_step=true", "`rollout.prompts_per_step` must be a whole number of at least 1, not true"),
        ("optim.lr=fast", '`optim.lr` must be a number of at least 0, not "fast"'),
        ("optim.lr=true", "`optim.lr` must be a number of at least 0, not true"),
        ("optim.lr=.nan", "`optim.lr` must be a number of at least 0, not NaN"),
        ("optim.lr=.inf", "`optim.lr` must be a number of at least 0, not Infinity"),
        ("rollout.top_p=1.5", "`rollout.top_p` must be a number above 0 and of at most 1, not 1.5"),
        ("algorithm.kl_coef=-0.1", "`algorithm.kl_coef` must be a number of at least 0, not -0.1"),
        ("algorithm.clip_high=-1", "`algorithm.clip_high` must be a number of at least 0 or null, not -1"),
        ("model.quantization=nf5", '`model.quantization` must be one of nf4, none, not "nf5" (nearest: nf4)'),
        ("algorithm.loss=gpso", '`algorithm.loss` must be one of clip, gspo, not "gpso" (nearest: gspo)'),
        ("model.revision=1234567", "`model.revision` must be text or null, not 1234567"),
        ("model.name=", "`model.name` must be text, not null"),
        ("memory.activation_checkpointing=1", "`memory.activation_checkpointing` must be true or false or null, not 1"),
        ("data.args=5", "`data.args` must be a mapping of names to values, not 5"),
        ("data.columns.solution=5", "`data.columns.solution` must be text, not 5"),
        ("rollout.stop=END", '`rollout.stop` must be a list, each entry text, not "END"'),
        ("rollout.stop=[a, 5]", "`rollout.stop.1` must be text, not 5"),
        ("run.sinks=[consol]", '`run.sinks.0` must be one of jsonl, console, picture, not "consol" (nearest: console)'),
        ("rewards=[5]", "`rewards.0` must be a section of keys such as name, weight, not 5"),
        ("rewards=number", '`rewards` cannot be "number": write a list of one reward or more, as in [number]'),
        ("rewards=[]", "`rewards` cannot be []: write a list of one reward or more, as in [number]"),
        ("device=gpu", '`device` cannot be "gpu": choose auto, cpu, cuda or a certain GPU such as cuda:0'),
        ("rollout=4", "`rollout` is a section: set one of its keys, as in rollout.prompts_per_step=..."),
        ("rollout.group_size", "`rollout.group_size` is not an override: write key=value, as in rollout.group_size=8"),
        ("=8", "`=8` is not an override: write key=value, as in rollout.group_size=8"),
        ("model.name.x=1", '`model.name.x` cannot be set: `model.name` is "m", without keys'),
        ("rewards.1.weight=1", "`rewards.1` cannot be set: the list `rewards` counts its entries from 0 to 0"),
        ("rewards.first=tags", "`rewards.first` cannot be set: the list `rewards` counts its entries from 0 to 0"),
        ("rollout.stop.0=a", "`rollout.stop.0` cannot be set: the list `rollout.stop` is empty"),
    ],
)
def test_a_wrong_value_is_one_sentence(override: str, said: str) -> None:
    assert sentence(override) == said


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("rollout.group_size=1", "`rollout.group_size` cannot be 1: an answer is measured against the others"),
        ("rollout.temperature=0", "`rollout.temperature` cannot be 0: the answers of a group would all be the same"),
        ("lora.dropout=0.3", "`lora.dropout` cannot be 0.3: sampler and update would be two different policies"),
        ("lora.target_modules=[]", "`lora.target_modules` cannot be []: no layer would be trained"),
        ("eval.every=5", "`eval.every` is 5 but there are no dev problems"),
        ("eval.metric_args={a: 1}", "`eval.metric_args` is given without `eval.metric`"),
        ("rewards=[number, number]", "two rewards are called 'number': give one its own name with `rewards.1.label`"),
        ("rewards=[a.py:mean]", "`reward/mean` is a metric already"),
        ("rewards.0.weight=0", "every reward has weight 0"),
        ("optim.warmup_steps=11", "`optim.warmup_steps` is 11, longer than the run of 10 steps"),
        ("rollout.stop=[a", "the value of `rollout.stop`, line 1: not readable as YAML"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(override: str, reason: str) -> None:
    assert sentence(override).startswith(reason)
    assert "\n" not in sentence(override)


def test_two_sided_delta_needs_the_loss_it_belongs_to() -> None:
    assert load("algorithm.two_sided_delta=4").algorithm.two_sided_delta == 4.0
    assert "belongs to the loss `clip`" in sentence("algorithm.two_sided_delta=4", "algorithm.loss=gspo")


def test_rewards_of_one_name_are_told_apart_by_label() -> None:
    config = load("rewards=[a.py:score, {name: b.py:score, label: other}]")
    assert [reward.shown_as for reward in config.rewards] == ["score", "other"]


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("# only a comment\n", "is empty"),
        ("- model\n- data\n", "holds a list"),
        ("hello", 'holds only "hello"'),
        ("1: 2\n", "has the key 1, which is not a name"),
        ("model:\n  name: a\n  name: b\n", "line 3: not readable as YAML, the key `name` is given twice"),
        ("model:\n  name: a: b\n", "line 2: not readable as YAML, mapping values are not allowed here"),
        ("model: !!python/object/apply:os.getcwd []\n", "line 1: not readable as YAML, could not determine"),
    ],
)
def test_a_file_that_is_no_config_is_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value).startswith(str(path))
    assert said in str(caught.value)


def test_a_file_that_is_not_text_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_bytes(b"\xff\xfe\x00bad")
    with pytest.raises(ConfigError, match="cannot be read as a text file"):
        load_config(path)


def test_a_missing_file_or_recipe_names_the_nearest(tmp_path: Path) -> None:
    path = write(tmp_path, "")
    with pytest.raises(ConfigError, match=r"`quikstart`: did you mean `quickstart`\?"):
        load_config("quikstart")
    with pytest.raises(ConfigError, match=f"did you mean `{path}`"):
        load_config(tmp_path / "mi.yaml")
    with pytest.raises(ConfigError, match="is a folder"):
        load_config(str(tmp_path))
    with pytest.raises(ConfigError, match=r"the recipes are fit-1\.5b, .*, own-task, quickstart"):
        load_config("/nowhere/zzz.yaml")


def test_merge_keys_may_be_overridden(tmp_path: Path) -> None:
    text = "model: &m {name: a}\ndata: {source: d}\nrewards: [text]\nrun: {epochs: 1, <<: {seed: 1}, seed: 2}\n"
    assert load_config(write(tmp_path, text)).config.run.seed == 2


# --- dump, describe, resume -------------------------------------------------------------------------------------------


def test_a_dump_loads_back_equal_and_keeps_the_order() -> None:
    config = load(
        "optim.lr=1e-5", "rollout.stop=['a: b', \"\\n\"]", "data.system_prompt='yes'", "data.args={x: [1, {y: 2}]}"
    )
    assert load_config(yaml.safe_load(dump_config(config))).config == config
    assert list(yaml.safe_load(dump_config(config))) == list(Config.model_fields)


def test_text_of_several_lines_is_dumped_as_a_block() -> None:
    config = load('data.system_prompt="Think first.\\nThen answer."')
    assert "  system_prompt: |-\n    Think first.\n    Then answer.\n" in dump_config(config)


@settings(max_examples=40, deadline=None)
@example("a\x85b\n c\u2028", 1e-5, 0.0)
@given(st.text(st.characters(exclude_categories=["Cs"])), st.floats(0, 1e300), st.floats(0, 1))
def test_any_text_and_number_survives_a_dump(text: str, lr: float, low: float) -> None:
    raw = {**LEAST, "data": {"source": "d", "system_prompt": text}, "optim": {"lr": lr}, "algorithm": {"clip_low": low}}
    config = load_config(raw).config
    assert load_config(lowmem_grpo.config_text.parse_yaml(dump_config(config), "dump")).config == config


def test_every_field_is_described() -> None:
    fields = {field.key: field for field in describe_fields()}
    assert [key for key, field in fields.items() if not (field.type and field.help.endswith("."))] == []
    assert fields["rollout.group_size"].default == "8"
    assert fields["model.quantization"].type == "one of nf4, none"
    assert fields["model.name"].default == ""
    assert fields["rewards.N.weight"].type == "a number"


def test_what_may_change_in_a_run_that_goes_on() -> None:
    config = load()
    changed = resume_overrides(config, ["run.steps=20", "run.checkpoint_every=5", "memory.micro_batch_tokens=512"])
    assert (changed.run.steps, changed.run.checkpoint_every, changed.memory.micro_batch_tokens) == (20, 5, 512)
    assert resume_overrides(config, []) == config
    assert resume_overrides(config, ["run.sinks.0=console"]).run.sinks == ("console", "console", "picture")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rollout.group_size=4", "`rollout.group_size` cannot change in a run that goes on"),
        ("run.seed=1", "`run.seed` cannot change in a run that goes on"),
        ("rewards.0.weight=2", "`rewards.0.weight` cannot change in a run that goes on"),
        ("run.stepz=20", "unknown key `run.stepz`: did you mean `run.steps`?"),
        ("run.steps=0", "`run.steps` must be a whole number of at least 1 or null, not 0"),
    ],
)
def test_what_may_not_change_in_a_run_that_goes_on(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resume_overrides(load(), [override])
    assert str(caught.value).startswith(said)


# --- recipes and registries -------------------------------------------------------------------------------------------


def test_every_recipe_loads() -> None:
    assert recipe_names() == ["fit-1.5b", "fit-14b", "fit-32b", "fit-8b", "fit-8b-20k", "own-task", "quickstart"]
    for name in recipe_names():
        loaded = load_config(name)
        assert (loaded.name, loaded.base_dir) == (name, Path.cwd())


def test_names_in_the_config_are_those_of_the_registries() -> None:
    from lowmem_grpo.advantages import ESTIMATORS
    from lowmem_grpo.losses import AGGREGATIONS, LOSSES
    from lowmem_grpo.sinks import SINKS

    assert set(get_args(AdvantageName)) == set(ESTIMATORS)
    assert set(get_args(LossName)) == set(LOSSES)
    assert set(get_args(AggregationName)) == set(AGGREGATIONS)
    assert set(get_args(SinkName)) == set(SINKS)
