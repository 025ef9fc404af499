"""From a config to the live parts of a run, in two stages: what can be known before a model loads, then the model."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedTokenizerBase

from lowmem_grpo.advantages import check_estimator_options
from lowmem_grpo.answers import reward_specs
from lowmem_grpo.catalog import (
    ModelInfo,
    ResolvedModel,
    compute_dtype,
    detect_card,
    embedded_source,
    inspect_model,
    resolve_model,
)
from lowmem_grpo.catalog.progress import download_bar
from lowmem_grpo.catalog.shapes import model_shape
from lowmem_grpo.config import Config, LoadedConfig
from lowmem_grpo.data import (
    DataSpec,
    PreparedData,
    ProblemStream,
    RawData,
    check_columns,
    prepare,
    read_rows,
    template_record,
)
from lowmem_grpo.errors import ConfigError
from lowmem_grpo.losses import check_loss_options
from lowmem_grpo.memory.cap import AllocatorSetup, configure_allocator
from lowmem_grpo.model import LoraSpec, ModelSpec, Policy, check_adapter_folder, load_base, load_policy, load_tokenizer
from lowmem_grpo.planning.budget import CONTEXT_BYTES, KV_ITEM
from lowmem_grpo.planning.choosing import Choice, choose
from lowmem_grpo.planning.planner import check_fits, configured_budget
from lowmem_grpo.planning.workload import Workload, check_context, fixed_settings, workload_of
from lowmem_grpo.plugins import is_file_spec, split_file_spec
from lowmem_grpo.quiet import quiet_loading
from lowmem_grpo.rewards import REWARDS, AnswerChecker, RewardSpec, Rubric
from lowmem_grpo.rollout import RolloutEngine, SlotEngine, SlotShape
from lowmem_grpo.tasks import TASKS
from lowmem_grpo.types import Card, MemorySettings, RunInfo, SamplingParams

__all__ = [
    "Parts",
    "Preflight",
    "assemble",
    "environment",
    "evaluation_specs",
    "preflight",
    "reward_files",
    "run_info",
    "sha256_of",
    "with_absolute_paths",
    "with_memory",
]


EVAL_KV_BYTES = 256 << 20
"""What an evaluation may use for keys and values beside those of training, where there is room."""


@dataclass(frozen=True, slots=True)
class Preflight:
    """Everything about a run that needs no model: checked config, loaded rewards, read rows, known card and model.

    `allocator` is how the memory of the card is handed out, `warnings` are sentences for the user. `close` ends the
    worker processes of the rewards.
    """

    config: Config
    base_dir: Path
    card: Card
    dtype: str
    model: ModelInfo
    rubric: Rubric
    eval_rubric: Rubric
    raw: RawData
    data_spec: DataSpec
    advantage_options: Mapping[str, Any]
    loss_options: Mapping[str, Any]
    allocator: AllocatorSetup
    warnings: tuple[str, ...]

    def close(self) -> None:
        """End the reward processes."""
        self.rubric.close()
        self.eval_rubric.close()


@dataclass(frozen=True, slots=True)
class Parts:
    """The live parts: the policy, its samplers, and the data as problems. `steps` is the length of the run.

    `workload` is what the run asks of the card, `choice` how it is made to fit.
    """

    workload: Workload
    choice: Choice
    policy: Policy
    engine: RolloutEngine
    eval_engine: RolloutEngine
    data: PreparedData
    stream: ProblemStream
    steps: int
    template: Mapping[str, Any]

    @property
    def memory(self) -> MemorySettings:
        """How the run fits into memory."""
        return self.choice.settings


def preflight(
    loaded: LoadedConfig,
    *,
    functions: Mapping[str, Callable[..., Any]] | None = None,
) -> Preflight:
    """Check everything that can be checked before a model is fetched or loaded.

    `functions` are reward functions of this process (a notebook), by name. Raises a UserError with one sentence for
    whatever is wrong first.
    """
    config, base_dir = with_absolute_paths(loaded.config, loaded.base_dir), loaded.base_dir
    card = detect_card(config.device)
    dtype, dtype_warning = compute_dtype(card, config.model.compute_dtype)
    _check_attention(config, card, dtype)
    advantage_options = check_estimator_options(config.algorithm.advantage, config.algorithm.advantage_args)
    loss_options = check_loss_options(config.algorithm.loss, _loss_options(config))
    if config.lora.continue_from is not None:
        check_adapter_folder(Path(config.lora.continue_from))
    model = inspect_model(config.model.name, revision=config.model.revision)
    if model.revision is not None:  # the newest one, found just now: a resume has to load the same weights
        config = Config(**{**config.model_dump(), "model": {**config.model.model_dump(), "revision": model.revision}})
    workload = workload_of(config, model_shape(model.config, config.model.name), card, dtype)
    check_context(workload)
    _check_room(config, workload)
    data_spec = _data_spec(config)
    metric = evaluation_specs(config, functions or {})
    with contextlib.ExitStack() as opened:
        rubric = opened.enter_context(Rubric(reward_specs(config), base_dir=base_dir, functions=functions))
        eval_rubric = opened.enter_context(Rubric(metric, base_dir=base_dir, functions=functions))
        raw = read_rows(data_spec, base_dir=base_dir)
        check_columns(raw, data_spec, rubric.needed_columns())
        evaluated = {f"{label} of eval.metric": names for label, names in eval_rubric.needed_columns().items()}
        check_columns(raw, data_spec, evaluated)
        opened.pop_all()  # from here on `Preflight.close` ends them
    warnings = (*((dtype_warning,) if dtype_warning else ()), *rubric.warnings)
    return Preflight(
        config,
        base_dir,
        card,
        dtype,
        model,
        rubric,
        eval_rubric,
        raw,
        data_spec,
        advantage_options,
        loss_options,
        configure_allocator(card),
        warnings,
    )


def assemble(checked: Preflight, *, goes_on: bool = False) -> Parts:
    """Fetch the model where needed, load it, render and split the data. Raises a UserError with one sentence.

    A run that `goes_on` where less memory is free than where it began takes leaner settings than its own.
    """
    config, card = checked.config, checked.card
    with download_bar() as progress:
        resolved = resolve_model(config.model.name, revision=config.model.revision, progress=progress)
    tokenizer = load_tokenizer(resolved.path)
    needs_gold = checked.rubric.needs_gold or checked.eval_rubric.needs_gold
    data = prepare(checked.raw, checked.data_spec, tokenizer, needs_gold=needs_gold, unusable=_gold_check(checked))
    stream = ProblemStream(data.train, config.rollout.prompts_per_step, config.run.seed)
    workload, choice = _fitted(checked, resolved, data, goes_on)
    spec = _model_spec(config, resolved, checked.dtype, choice.settings)
    continue_from = config.lora.continue_from
    lora = LoraSpec(
        rank=config.lora.rank,
        alpha=config.lora.alpha,
        target_modules=config.lora.target_modules,
        continue_from=None if continue_from is None else Path(continue_from),
        seed=config.run.seed,
    )
    policy = load_policy(spec, lora, card, tokenizer, attention=config.model.attention)
    steps = config.run.steps or stream.steps_per_epoch * (config.run.epochs or 1)
    sampler = partial(
        SlotEngine,
        policy,
        seed=config.run.seed,
        prefill_tokens=choice.settings.prefill_tokens,
        kv_int8=workload.kv_int8,
    )
    return Parts(
        workload=workload,
        choice=choice,
        policy=policy,
        engine=sampler(max_concurrent=choice.settings.max_concurrent),
        eval_engine=sampler(max_concurrent=_eval_rows(policy, checked, choice, data)),
        data=data,
        stream=stream,
        steps=steps,
        template=dict(template_record(checked.data_spec, tokenizer)),
    )


def _fitted(checked: Preflight, resolved: ResolvedModel, data: PreparedData, goes_on: bool) -> tuple[Workload, Choice]:
    """What the run asks of the card, now that its longest prompt is known, and the settings under which it fits.

    Raises ConfigError when none do.
    """
    config, card = checked.config, checked.card
    longest = max((len(problem.prompt_ids) for problem in data.train), default=1)
    shape = model_shape(resolved.config, config.model.name)
    workload = workload_of(config, shape, card, checked.dtype, longest)
    budget = _budget(checked)
    fixed = fixed_settings(config)
    choice = choose(workload, budget, fixed)
    if goes_on and not choice.fits:
        fixed = {}
        choice = choose(workload, budget)
    check_fits(workload, choice, budget, fixed)
    return workload, choice


def _budget(checked: Preflight) -> int:
    """Bytes that the run may use: what the config says, or what is free, and less where the process is capped."""
    budget, cap_bytes = configured_budget(checked.config, checked.card), checked.allocator.cap_bytes
    return budget if cap_bytes is None else min(budget, cap_bytes + CONTEXT_BYTES)


def with_memory(config: Config, settings: MemorySettings) -> Config:
    """The config with the settings that were chosen written out, so that a run that goes on keeps them."""
    chosen = asdict(settings)
    rows = chosen.pop("max_concurrent")
    values = config.model_dump()
    return Config(
        **{**values, "memory": {**values["memory"], **chosen}, "rollout": {**values["rollout"], "max_concurrent": rows}}
    )


def _eval_rows(policy: Policy, checked: Preflight, choice: Choice, data: PreparedData) -> int:
    """How many held-out problems, each with a prompt of its own, are answered at once: as many as have room where
    training has its keys and values, and in EVAL_KV_BYTES besides where the plan leaves so much."""
    longest = max((len(problem.prompt_ids) for problem in (*data.dev, *data.test)), default=1)
    row = SlotShape(
        *policy.kv_shape,
        prompt_slots=1,
        prompt_tokens=longest,
        slots=1,
        answer_tokens=checked.config.rollout.max_new_tokens,
    )
    estimate, budget = choice.estimate, _budget(checked)
    training = sum(item.bytes for item in estimate.items if item.name == KV_ITEM)
    spare = budget - estimate.phase_bytes("rollout")
    return max(1, (training + max(0, min(spare, EVAL_KV_BYTES))) // row.bytes(policy.dtype))


def load_trained(config: Config, adapter: Path) -> tuple[PeftModel, PreTrainedTokenizerBase]:
    """The base of `config` with the adapter in the folder `adapter`, as an ordinary peft model, and the tokenizer."""
    card = detect_card(config.device)
    dtype, _ = compute_dtype(card, config.model.compute_dtype)
    with download_bar() as progress:
        resolved = resolve_model(config.model.name, revision=config.model.revision, progress=progress)
    with quiet_loading():
        spec = _model_spec(config, resolved, dtype, MemorySettings(max_concurrent=1))
        model = PeftModel.from_pretrained(load_base(spec, card), adapter)
    return model.eval(), load_tokenizer(resolved.path)


def sampling_params(config: Config) -> SamplingParams:
    """How training answers are drawn."""
    rollout = config.rollout
    return SamplingParams(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        stop=tuple(rollout.stop),
    )


def run_info(checked: Preflight, *, name: str, run_dir: str, steps: int, first_step: int = 1) -> RunInfo:
    """What the sinks are told first."""
    rollout = checked.config.rollout
    return RunInfo(
        name=name,
        run_dir=run_dir,
        model=checked.config.model.name,
        device=checked.card.name,
        steps=steps,
        prompts_per_step=rollout.prompts_per_step,
        group_size=rollout.group_size,
        max_new_tokens=rollout.max_new_tokens,
        first_step=first_step,
    )


def evaluation_specs(config: Config, functions: Mapping[str, Any]) -> list[RewardSpec]:
    """What an evaluation scores: the metric itself as "score", and for a metric that compares with a gold answer also
    "correct" (read leniently) and "format" (written as asked, right or wrong).

    The metric is `eval.metric`, or the first reward of the config with its own arguments.
    """
    named = [r for r in config.rewards if config.eval.metric in (None, r.name, r.label)]
    first = named[0] if named else None
    name = first.name if first is not None else str(config.eval.metric)
    args = {**(first.args if first is not None else {}), **config.eval.metric_args}
    timeout_s = first.timeout_s if first is not None else config.rewards[0].timeout_s
    readings = {"score": args}
    if name not in functions and name in REWARDS and isinstance(REWARDS[name](**args), AnswerChecker):
        readings |= {"correct": {**args, "mode": "lenient"}, "format": {**args, "mode": "format"}}
    return [RewardSpec(name, 1.0, options, label, timeout_s) for label, options in readings.items()]


def with_absolute_paths(config: Config, base_dir: Path) -> Config:
    """The config with every relative path that names something under `base_dir` made absolute.

    A built-in name stays what it is, also where a file of that name lies beside the config.
    """

    def absolute(name: str | None) -> str | None:
        if name is None or name in TASKS:
            return name
        file, _, function = name.rpartition(":")
        if (path := base_dir / Path(file).expanduser()).is_file():
            return f"{path.resolve()}:{function}"
        path = base_dir / Path(name).expanduser()
        return str(path.resolve()) if path.exists() else name

    changed = config.model_dump()
    if embedded_source(config.model.name) is None:
        changed["model"]["name"] = absolute(config.model.name)
    changed["data"]["source"] = absolute(config.data.source)
    changed["data"]["test_source"] = absolute(config.data.test_source)
    changed["lora"]["continue_from"] = absolute(config.lora.continue_from)
    for section, key in (*((reward, "name") for reward in changed["rewards"]), (changed["eval"], "metric")):
        section[key] = absolute(section[key]) if is_file_spec(section[key] or "") else section[key]
    return Config(**changed)


def reward_files(config: Config) -> dict[str, Path]:
    """The user's reward files: name under `inputs/` -> path; two files of one name get numbered names."""
    files: dict[str, Path] = {}
    names = (*(reward.name for reward in config.rewards), config.eval.metric or "")
    for spec in (name for name in names if is_file_spec(name)):
        path, _ = split_file_spec(spec, kind="reward", base_dir=Path())
        if path not in files.values():
            name = path.name if path.name not in files else f"{len(files)}-{path.name}"
            files[name] = path
    return files


def environment(checked: Preflight) -> dict[str, Any]:
    """Versions, machine and determinism flags, for environment.json."""
    packages = ("lowmem-grpo", "torch", "transformers", "peft", "bitsandbytes", "datasets", "accelerate")
    card = checked.card
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in packages},
        "device": card.name,
        "card": {"device": card.device, "capability": list(card.capability), "memory_bytes": card.memory_bytes},
        "cuda": torch.version.cuda,
        "compute_dtype": checked.dtype,
        "threads": torch.get_num_threads(),
        "allocator": checked.allocator.to_json(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "git_revision": _git_revision(),
        "command": sys.argv,
        "data_sha256": checked.raw.sha256,
        "reward_sha256": {name: sha256_of(path) for name, path in reward_files(checked.config).items()},
    }


def _data_spec(config: Config) -> DataSpec:
    data = config.data
    return DataSpec(
        source=data.source,
        split=data.split,
        test_split=data.test_split,
        prompt_column=data.prompt_column,
        answer_column=data.answer_column,
        columns=data.columns,
        system_prompt=data.system_prompt,
        thinking=data.thinking,
        chat_template_kwargs=data.chat_template_kwargs,
        max_prompt_tokens=data.max_prompt_tokens,
        dev_size=data.dev_size,
        test_source=data.test_source,
        test_size=data.test_size,
        format=data.format,
        args=data.args,
        seed=0,  # not the run's seed: runs that differ in it are compared on the same problems
    )


def _model_spec(config: Config, resolved: ResolvedModel, dtype: str, memory: MemorySettings) -> ModelSpec:
    return ModelSpec(
        path=resolved.path,
        base_name=str(resolved.path) if resolved.origin != "hub" else resolved.name,
        base_revision=resolved.revision,
        quantization=config.model.quantization,
        prequantized=resolved.quantized,
        weights=config.model.weights,
        compute_dtype=dtype,
        activation_checkpointing=memory.activation_checkpointing,
        offload_activations=memory.offload_activations,
        offload_embeddings=memory.offload_embeddings,
        mlp_tile_tokens=memory.mlp_tile_tokens,
    )


def _loss_options(config: Config) -> dict[str, Any]:
    algorithm = config.algorithm
    options = {
        "clip_low": algorithm.clip_low,
        "clip_high": algorithm.clip_high,
        "two_sided_delta": algorithm.two_sided_delta,
    }
    return {name: value for name, value in options.items() if value is not None}


def _check_room(config: Config, workload: Workload) -> None:
    """Refuse, before anything is fetched, what would not fit even with the shortest prompt."""
    shortest, budget = replace(workload, prompt_tokens=1), configured_budget(config, workload.card)
    check_fits(shortest, choose(shortest, budget), budget, {})


def _check_attention(config: Config, card: Card, dtype: str) -> None:
    if config.model.attention != "flash_attention_2":
        return
    if card.device == "cpu" or dtype == "float32":
        raise ConfigError(
            f"model.attention is flash_attention_2, which needs a GPU and 16 bits, not {dtype} on {card.name}: "
            "set model.attention=auto."
        )
    if importlib.util.find_spec("flash_attn") is None:
        raise ConfigError(
            "model.attention is flash_attention_2 and flash-attn is not installed: "
            "`pip install 'lowmem-grpo[flash]'`, or set model.attention=sdpa."
        )


def _gold_check(checked: Preflight) -> Callable[[Mapping[str, Any]], str | None]:
    def unusable(columns: Mapping[str, Any]) -> str | None:
        gold = columns.get("answer")
        if checked.rubric.parseable_gold(gold) and checked.eval_rubric.parseable_gold(gold):
            return None
        return "a reward cannot read its answer"

    return unusable


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_revision() -> str | None:
    """The commit of the package's own checkout, or None when it is installed without one."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
