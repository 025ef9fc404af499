"""The config: what a run is made of, read from YAML, a built-in recipe or a mapping.

The models below are the only list of settings; each field's docstring feeds the command line's help and the UI's
hints. Nothing here is read by the stages: the trainer hands them plain values.

>>> loaded = load_config("quickstart", ["rollout.group_size=4"])
>>> loaded.name, loaded.config.rollout.group_size
('quickstart', 4)

Every mistake is a `ConfigError` of one sentence: the key, the value seen, the nearest right choice.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from lowmem_grpo.config_errors import allowed_values, first_sentence, section_of
from lowmem_grpo.config_text import apply_override, dump_yaml, read_mapping, show
from lowmem_grpo.errors import ConfigError, nearest

__all__ = [
    "RESUME_KEYS",
    "AlgorithmConfig",
    "Config",
    "DataConfig",
    "EvalConfig",
    "FieldDoc",
    "GateConfig",
    "LoadedConfig",
    "LoraConfig",
    "MemoryConfig",
    "ModelConfig",
    "OptimConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "describe_fields",
    "dump_config",
    "load_config",
    "recipe_names",
    "recipe_text",
    "resume_overrides",
]

AdvantageName = Literal["dr_grpo", "grpo", "rloo", "median", "trimmed"]
LossName = Literal["clip", "gspo"]
AggregationName = Literal["dapo", "grpo", "dr_grpo"]
SinkName = Literal["jsonl", "console", "picture"]


def _number(value: Any) -> Any:
    """YAML 1.1 reads `1e-4` as text (it wants a dot), so text that is a number counts as one."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


# Strict, so that `true` is not the number 1 and `8.0` rows are not quietly 8.
Count = Annotated[int, Field(strict=True, ge=0)]
Positive = Annotated[int, Field(strict=True, ge=1)]
Float = Annotated[float, BeforeValidator(_number), Field(strict=True, allow_inf_nan=False)]
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(min_length=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())


class ModelConfig(_Section):
    """The base model and how its frozen weights are held."""

    name: Text
    """A built-in model (`smollm2-135m-instruct`), a hub id (`Qwen/Qwen2.5-0.5B-Instruct`) or a folder."""
    revision: Text | None = None
    """Branch, tag or commit of a hub model; null takes the newest and writes it into the run's config."""
    quantization: Literal["nf4", "none"] = "nf4"
    """How the frozen base is stored: `nf4` (4 bits with double quantisation) or `none` (compute dtype)."""
    weights: Literal["auto", "4bit", "dequantized"] = "auto"
    """Decode 4-bit weights on every call (`4bit`, least memory) or once (`dequantized`, faster; same values)."""
    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of products; `auto` is bfloat16, float16 on older cards, float32 on a CPU."""
    attention: Literal["auto", "sdpa", "flash_attention_2"] = "auto"
    """Attention kernel; `auto` takes flash-attn where a GPU has it, else torch's own (`sdpa`)."""


class LoraConfig(_Section):
    """The trained adapter."""

    rank: Positive = 16
    """Rank of the adapter matrices."""
    alpha: Annotated[Float, Field(gt=0)] = 32.0
    """Scale of the adapter: its output is multiplied by alpha / rank."""
    target_modules: Literal["all-linear"] | tuple[Text, ...] = "all-linear"
    """Which linear layers get an adapter: `all-linear`, or a list of names such as [q_proj, v_proj]."""
    continue_from: Text | None = None
    """Folder of a trained adapter to go on from; KL is then measured against it."""
    dropout: Float = 0.0
    """Always 0: the sampler and the update have to be the same policy."""

    @field_validator("dropout")
    @classmethod
    def _no_dropout(cls, value: float) -> float:
        if value != 0:
            raise ValueError("sampler and update would be two different policies, so only 0 is possible")
        return value

    @field_validator("target_modules")
    @classmethod
    def _some_modules(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not value:
            raise ValueError("no layer would be trained, name some or write all-linear")
        return value


class DataConfig(_Section):
    """Where the problems come from and how a row becomes a prompt."""

    source: Text
    """A JSONL, JSON, CSV or Parquet file, a hub data set, a built-in source, or `file.py:function`."""
    args: dict[str, Any] = {}
    """Arguments of a built-in source or a function, such as {low: 0, high: 49}."""
    split: Text = "train"
    """Split of a hub data set."""
    prompt_column: Text = "prompt"
    """Column that holds the prompt: text, or a list of chat messages."""
    answer_column: Text | None = "answer"
    """Column that holds the right answer, for rewards that compare with one; null if there is none."""
    columns: dict[str, Text] = {}
    """Other columns by the name a reward function asks for: {solution: answer} passes `answer` as `solution`."""
    system_prompt: str | None = None
    """A system message put before each prompt."""
    format: Literal["auto", "chat", "text"] = "auto"
    """Render prompts with the chat template (`chat`), as they are (`text`), or by what the model has (`auto`)."""
    thinking: Flag | None = None
    """Thinking switch of templates that have one; null leaves the template's own default."""
    chat_template_kwargs: dict[str, Any] = {}
    """Further arguments for the chat template."""
    max_prompt_tokens: Positive = 512
    """Longer prompts are left out and counted, never cut."""
    dev_size: Count = 0
    """Problems held out to choose the best adapter; 0 keeps the last one."""
    test_source: Text | None = None
    """A file or data set to test on; null takes the test problems from `source`."""
    test_split: Text = "test"
    """Split of a hub data set that is the `test_source`."""
    test_size: Count = 0
    """Problems for start against tuned, looked at once at the end; 0 is no test, or all of `test_source`."""


class RewardConfig(_Section):
    """One reward function; a plain name in the list stands for {name: ...}."""

    name: Text
    """A built-in reward (`number`, `text`, `tags`, `regex`, `length`) or `file.py:function`."""
    weight: Float = 1.0
    """Its factor in the total reward of an answer."""
    args: dict[str, Any] = {}
    """Options of the reward function."""
    label: Text | None = None
    """Name in metrics and samples; null takes the name of the function."""
    timeout_s: Annotated[Float, Field(gt=0)] = 30.0
    """Seconds one call may take before it is stopped and counted as failed."""

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return _as_reward(value)

    @property
    def shown_as(self) -> str:
        """The label, or the function's name: `rewards.py:brevity` is shown as `brevity`."""
        return self.label or self.name.rpartition(":")[2]


class RolloutConfig(_Section):
    """How answers are sampled."""

    prompts_per_step: Positive = 4
    """Problems answered in one step."""
    group_size: Annotated[int, Field(strict=True)] = 8
    """Answers sampled for each problem, at least 2."""
    max_new_tokens: Positive = 256
    """An answer is cut at this many tokens."""
    temperature: Float = 1.0
    """Divides the logits, in the sampler and in the update alike; above 0."""
    top_p: Annotated[Float, Field(gt=0, le=1)] = 1.0
    """Draw from the likeliest tokens that together have this probability; 1 is off."""
    top_k: Count = 0
    """Draw from this many likeliest tokens; 0 is off."""
    min_p: Annotated[Float, Field(ge=0, lt=1)] = 0.0
    """Draw from tokens at least this likely relative to the likeliest; 0 is off."""
    stop: tuple[Text, ...] = ()
    """Strings that end an answer once its text contains one."""
    max_concurrent: Positive | None = None
    """Answers decoded at once, each in a slot that is filled again when it ends; null is as many as fit."""
    kv_dtype: Literal["auto", "int8"] = "auto"
    """Keys and values of the sampler: in the compute dtype (`auto`), or in 8 bits, which samples a bit differently."""

    @field_validator("group_size")
    @classmethod
    def _a_group(cls, value: int) -> int:
        if value < 2:
            raise ValueError("an answer is measured against the others of its group, so at least 2 are needed")
        return value

    @field_validator("temperature")
    @classmethod
    def _sampled(cls, value: float) -> float:
        if value <= 0:
            raise ValueError("the answers of a group would all be the same and teach nothing, so it must be above 0")
        return value


class AlgorithmConfig(_Section):
    """How rewards become a gradient."""

    advantage: AdvantageName = "dr_grpo"
    """How an answer is measured against its group; `dr_grpo` is reward minus mean."""
    advantage_args: dict[str, Any] = {}
    """Options of the advantage estimator."""
    loss: LossName = "clip"
    """How the probability ratio is clipped: per token (`clip`) or per answer (`gspo`)."""
    aggregation: AggregationName = "dapo"
    """How tokens are averaged: over all tokens (`dapo`), per answer first (`grpo`), by max length (`dr_grpo`)."""
    clip_low: Annotated[Float, Field(ge=0, le=1)] | None = None
    """The ratio counts down to 1 - clip_low; null is the loss's own default."""
    clip_high: Annotated[Float, Field(ge=0)] | None = None
    """The ratio counts up to 1 + clip_high; null is the loss's own default."""
    two_sided_delta: Annotated[Float, Field(gt=1)] | None = None
    """Caps the ratio of answers below the baseline, as in 4; null is off."""
    kl_coef: Annotated[Float, Field(ge=0)] = 0.0
    """Weight of the KL penalty towards the start of the run; 0 saves the reference pass."""
    updates_per_rollout: Positive = 1
    """Optimizer steps on each batch of answers."""
    sampler_correction: Literal["auto", "none", "truncate", "mask"] = "auto"
    """How a sampler that differs from the policy is corrected; `auto` is `truncate` with int8 keys, else `none`."""
    skip_dead_groups: Flag = True
    """Leave groups whose answers all scored the same out of the update: the gradient is the same, the work less."""


class MemoryConfig(_Section):
    """What is traded for memory; none of it changes the gradient. What is null is chosen from the plan."""

    budget_gib: Annotated[Float, Field(gt=0)] | Literal["auto"] = "auto"
    """Memory that the run may use, in GiB; `auto` is what is free on the card when it starts."""
    prefill_tokens: Positive | None = None
    """Prompt tokens forwarded at once before answers are sampled; a longer prompt goes alone."""
    micro_batch_tokens: Positive | None = None
    """Tokens of one forward and backward pass of the update; a group that exceeds it is split."""
    activation_checkpointing: Flag | None = None
    """Recompute a layer's activations in the backward pass rather than keep them."""
    offload_activations: Flag | None = None
    """Keep what the layers need for the recomputation in host memory."""
    offload_embeddings: Flag | None = None
    """Keep the input embedding in host memory, where the head has weights of its own."""
    head_chunk_tokens: Positive | None = None
    """Tokens whose logits over the whole vocabulary exist at once."""
    mlp_tile_tokens: Count | None = None
    """Tokens that go through an MLP at once; 0 is all of them."""


class OptimConfig(_Section):
    """The optimizer of the adapter weights."""

    name: Literal["adamw", "adamw_8bit"] = "adamw"
    """Optimizer; `adamw_8bit` keeps its two moments in 8 bits."""
    lr: Annotated[Float, Field(ge=0)] = 1e-4
    """Learning rate; 1e-5 to 2e-4 is usual for LoRA."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate goes from `lr` to 0 by the last step, or stays."""
    warmup_steps: Count = 0
    """Steps over which the learning rate rises to `lr`."""
    max_grad_norm: Annotated[Float, Field(gt=0)] = 1.0
    """Longer gradients are scaled down to this norm."""
    weight_decay: Annotated[Float, Field(ge=0)] = 0.0
    """Decay of the adapter weights."""


class GateConfig(_Section):
    """The check before the first step: can this model learn anything from these rewards?"""

    prompts: Count = 64
    """Training prompts to sample at most; fewer where those say enough already, 0 is no gate."""


class EvalConfig(_Section):
    """How held-out problems are scored (greedy answers)."""

    metric: Text | None = None
    """Reward that scores the held-out problems; null is the first of `rewards`."""
    metric_args: dict[str, Any] = {}
    """Options of `metric`."""
    correct_at: Float = 1.0
    """A score of at least this counts as correct."""
    every: Count | None = None
    """Score the dev problems every so many steps; null is ten times in the run, 0 only at start and end."""
    patience: Count = 0
    """End the run early after so many dev scores in a row that were not a new best; 0 never does."""
    samples: Count = 0
    """Answers sampled to each test problem, besides the greedy one, for pass@k of start and tuned; 0 leaves it out."""

    @model_validator(mode="after")
    def _args_have_a_metric(self) -> Self:
        if self.metric_args and self.metric is None:
            raise ConfigError("`eval.metric_args` is given without `eval.metric`: name the reward they are for")
        return self


class RunConfig(_Section):
    """Length, seed and what is kept."""

    steps: Positive | None = None
    """Steps to train, each one batch of answers; give this or `epochs`."""
    epochs: Positive | None = None
    """Times to go through the training problems; give this or `steps`."""
    seed: Count = 0
    """Seed of everything random."""
    checkpoint_every: Positive = 20
    """Steps between checkpoints; the last step always has one."""
    keep_checkpoints: Positive = 2
    """Newest checkpoints kept on disk."""
    completions_cap_mb: Positive = 512
    """Size at which completions.jsonl drops its oldest part."""
    self_checks: Flag = True
    """Try the longest prompt and answers first; prove at the first live step that all parts do what they should."""
    sinks: tuple[SinkName, ...] = ("jsonl", "console", "picture")
    """Where metrics go: the files of the run folder, the terminal, and at the end a picture, report.png."""

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.steps is not None and self.epochs is not None:
            raise ConfigError(
                f"`run.steps` is {self.steps} and `run.epochs` is {self.epochs}, and only one can end the run: "
                "leave one out, or set it to null"
            )
        if self.steps is None and self.epochs is None:
            raise ConfigError("the run has no length: set `run.steps` (as in run.steps=100) or `run.epochs`")
        return self


class Config(_Section):
    """Everything a run is made of, validated and frozen."""

    device: str = "auto"
    """`auto` (a GPU if there is one), `cpu`, `cuda` or `cuda:1`."""
    model: ModelConfig
    lora: LoraConfig = LoraConfig()
    data: DataConfig
    rewards: tuple[RewardConfig, ...]
    """Reward functions; the weighted sum of their scores is an answer's reward."""
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    memory: MemoryConfig = MemoryConfig()
    optim: OptimConfig = OptimConfig()
    gate: GateConfig = GateConfig()
    eval: EvalConfig = EvalConfig()
    run: RunConfig

    def __init__(self, **sections: Any) -> None:
        """Validates; a section that is None counts as not given (a YAML section with every line commented out).

        Raises:
            ConfigError: one sentence about the first mistake, and how many more there are.
        """
        try:
            given = {name: section for name, section in sections.items() if section is not None}
            super().__init__(**{"run": {}, **given})  # an empty `run` says what it lacks
        except ValidationError as error:
            raise ConfigError(first_sentence(error, Config)) from None

    @field_validator("device")
    @classmethod
    def _known_device(cls, value: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
            raise ValueError("choose auto, cpu, cuda or a certain GPU such as cuda:0")
        return value

    @field_validator("rewards", mode="before")
    @classmethod
    def _some_rewards(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple) or not value:
            raise ValueError("write a list of one reward or more, as in [number]")
        return value

    @field_validator("rewards")
    @classmethod
    def _tell_rewards_apart(cls, rewards: tuple[RewardConfig, ...]) -> tuple[RewardConfig, ...]:
        shown = [reward.shown_as for reward in rewards]
        for i, name in enumerate(shown):
            if name in shown[:i]:
                raise ConfigError(f"two rewards are called {name!r}: give one its own name with `rewards.{i}.label`")
            if name in ("mean", "within_group_std"):
                raise ConfigError(f"`reward/{name}` is a metric already: set `rewards.{i}.label` to another name")
        if all(reward.weight == 0 for reward in rewards):
            raise ConfigError("every reward has weight 0, so nothing can be learnt: give one another `weight`")
        return rewards

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for key, value in (("every", self.eval.every), ("patience", self.eval.patience)):
            if value and not self.data.dev_size:
                raise ConfigError(
                    f"`eval.{key}` is {value} but there are no dev problems: set `data.dev_size`, as in 64"
                )
        if self.algorithm.two_sided_delta is not None and self.algorithm.loss != "clip":
            raise ConfigError(
                f"`algorithm.two_sided_delta` belongs to the loss `clip`, and `algorithm.loss` is "
                f"{self.algorithm.loss!r}: drop one of the two"
            )
        if self.run.steps is not None and self.optim.warmup_steps > self.run.steps:
            raise ConfigError(
                f"`optim.warmup_steps` is {self.optim.warmup_steps}, longer than the run of {self.run.steps} steps"
            )
        return self


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A validated config, the name its run folder gets, and the folder its relative paths start from."""

    config: Config
    name: str
    base_dir: Path


class FieldDoc(NamedTuple):
    """One setting, for help texts; `default` is written as in YAML, "" when the key has to be given."""

    key: str
    type: str
    default: str
    help: str


RESUME_KEYS = (
    "device",
    "rollout.max_concurrent",
    "memory",
    "eval.every",
    "eval.patience",
    "run.steps",
    "run.epochs",
    "run.checkpoint_every",
    "run.keep_checkpoints",
    "run.completions_cap_mb",
    "run.sinks",
)
"""What may change when a run goes on: its length, what is kept and shown, and how it fits into memory."""


def load_config(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> LoadedConfig:
    """Reads a YAML file, a built-in recipe or a mapping, applies `key=value` overrides, validates.

    Text that names a recipe is the recipe, whatever files there are; other text is a path.

    Raises:
        ConfigError: the file or recipe is missing, is not YAML, or has a wrong key or value.
    """
    if isinstance(source, Mapping):
        raw, name, base_dir = copy.deepcopy(dict(source)), "run", Path.cwd()
    elif str(source) in recipe_names():
        raw, name, base_dir = read_mapping(_recipe_dir() / f"{source}.yaml"), str(source), Path.cwd()
    else:
        path = _config_file(source)
        raw, name, base_dir = read_mapping(path), path.stem, path.resolve().parent
    return LoadedConfig(_with_overrides(raw, overrides), name, base_dir)


def resume_overrides(config: Config, overrides: Sequence[str]) -> Config:
    """The config of a run that goes on with changes; only `RESUME_KEYS` may change.

    Raises:
        ConfigError: a key that would make it another run, or one that is wrong in itself.
    """
    changed = _with_overrides(config.model_dump(mode="json"), overrides)
    for override in overrides:
        key = override.partition("=")[0].strip()
        if not any(key == allowed or key.startswith(allowed + ".") for allowed in RESUME_KEYS):
            raise ConfigError(
                f"`{key}` cannot change in a run that goes on, since the steps before and after would not belong "
                f"together: start a new run, or change one of {', '.join(RESUME_KEYS)}"
            )
    return changed


def dump_config(config: Config) -> str:
    """The config as YAML, sections and keys in their usual order; loading it gives an equal config."""
    return dump_yaml(config.model_dump(mode="json"))


def describe_fields() -> list[FieldDoc]:
    """Every setting with its dotted key (`rewards.N.name` for the entries of the list), in order."""
    return list(_describe(Config, ""))


def recipe_names() -> list[str]:
    """The built-in recipes, sorted."""
    names = (entry.name for entry in _recipe_dir().iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def recipe_text(name: str) -> str:
    """A built-in recipe as it is written, comments and all."""
    return (_recipe_dir() / f"{name}.yaml").read_text(encoding="utf-8")


def _recipe_dir() -> Traversable:
    return resources.files("lowmem_grpo.recipes")


def _config_file(source: str | Path) -> Path:
    path = Path(source).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        raise ConfigError(f"{path} is a folder: give the YAML file in it, as in {path / 'config.yaml'}")
    folder = path.parent if path.parent.is_dir() else Path()
    files = sorted(str(path.parent / p.name) for p in folder.iterdir() if p.suffix in (".yaml", ".yml"))
    close = nearest(str(source), [*recipe_names(), *files])
    hint = f"did you mean `{close}`?" if close else f"the recipes are {', '.join(recipe_names())}"
    raise ConfigError(f"there is no config file or recipe `{source}`: {hint}")


def _as_reward(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


def _with_overrides(raw: dict[str, Any], overrides: Sequence[str]) -> Config:
    if isinstance(raw.get("rewards"), list):
        raw["rewards"] = [_as_reward(entry) for entry in raw["rewards"]]
    for override in overrides:
        key = override.partition("=")[0].strip()
        if section := section_of(Config, key):
            example = next(iter(section.model_fields))
            raise ConfigError(f"`{key}` is a section: set one of its keys, as in {key}.{example}=...")
        apply_override(raw, override)
    return Config(**raw)


def _describe(model: type[BaseModel], prefix: str) -> Iterator[FieldDoc]:
    for name, field in model.model_fields.items():
        key = prefix + name
        if section := section_of(model, name):
            yield from _describe(section, f"{key}.")
            continue
        default = "" if field.is_required() else show(field.default)
        yield FieldDoc(key, allowed_values(field.annotation, field.metadata), default, field.description or "")
        if name == "rewards":
            yield from _describe(RewardConfig, f"{key}.N.")
