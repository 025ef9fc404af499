"""Turns a failed validation of the config into one sentence for a person.

Works from the fields' own annotations, so a new field needs nothing here.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from lowmem_grpo.config_text import show
from lowmem_grpo.errors import ConfigError, nearest

__all__ = ["allowed_values", "first_sentence", "section_of"]

# What other trainers call our settings, for hints only: none of these is accepted.
_OTHER_NAMES = {
    "adam_weight_decay": "optim.weight_decay",
    "attn_implementation": "model.attention",
    "base_model": "model.name",
    "batch_size": "rollout.prompts_per_step",
    "beta": "algorithm.kl_coef",
    "bf16": "model.compute_dtype",
    "dataset": "data.source",
    "dataset_name": "data.source",
    "dataset_path": "data.source",
    "dataset_split": "data.split",
    "dataset_train_split": "data.split",
    "delta": "algorithm.two_sided_delta",
    "dtype": "model.compute_dtype",
    "epsilon": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "eval_dataset": "data.test_source",
    "eval_steps": "eval.every",
    "fp16": "model.compute_dtype",
    "generation_batch_size": "rollout.prompts_per_step",
    "gradient_accumulation_steps": "rollout.prompts_per_step",
    "gradient_checkpointing": "memory.activation_checkpointing",
    "importance_sampling_level": "algorithm.loss",
    "kl_coeff": "algorithm.kl_coef",
    "learning_rate": "optim.lr",
    "load_in_4bit": "model.quantization",
    "loss_type": "algorithm.aggregation",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "lora_r": "lora.rank",
    "lora_rank": "lora.rank",
    "lora_target_modules": "lora.target_modules",
    "lr_scheduler_type": "optim.schedule",
    "max_completion_length": "rollout.max_new_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_steps": "run.steps",
    "model_name": "model.name",
    "model_name_or_path": "model.name",
    "model_revision": "model.revision",
    "num_epochs": "run.epochs",
    "num_generations": "rollout.group_size",
    "num_iterations": "algorithm.updates_per_rollout",
    "num_train_epochs": "run.epochs",
    "optimizer": "optim.name",
    "per_device_train_batch_size": "rollout.prompts_per_step",
    "r": "lora.rank",
    "report_to": "run.sinks",
    "reward_funcs": "rewards",
    "reward_weights": "rewards.0.weight",
    "save_steps": "run.checkpoint_every",
    "save_total_limit": "run.keep_checkpoints",
    "scale_rewards": "algorithm.advantage",
    "stop_strings": "rollout.stop",
    "torch_dtype": "model.compute_dtype",
    "train_batch_size": "rollout.prompts_per_step",
    "warmup_ratio": "optim.warmup_steps",
}

_KINDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false", type(None): "null"}


def first_sentence(error: ValidationError, model: type[BaseModel]) -> str:
    """The first mistake as a sentence, and how many more there are.

    Unknown keys come first: a misspelt required key is also a missing one, and the spelling is what helps.
    """
    by_key: dict[str, str] = {}
    rank = {"extra_forbidden": 0, "missing": 2}
    for details in sorted(error.errors(include_url=False), key=lambda d: rank.get(d["type"], 1)):
        key, sentence = _sentence(details, model)
        by_key.setdefault(key, sentence)  # a union reports once per member
    # A list whose entries are wrong is reported as too short as well.
    first, *others = (s for key, s in by_key.items() if not any(k.startswith(f"{key}.") for k in by_key))
    return first + (f" (and {len(others)} more to mend)" if others else "")


def section_of(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    """The model of a section such as `rollout`; None for a plain setting or an unknown name."""
    field = model.model_fields.get(name)
    kind = field.annotation if field else None
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def allowed_values(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """What a setting takes, in words.

    >>> allowed_values(int, [Ge(1)])
    'a whole number of at least 1'
    >>> allowed_values(Literal["nf4", "none"])
    'one of nf4, none'
    """
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return allowed_values(args[0], [*args[1:], *metadata])
    if origin in (Union, types.UnionType):
        return " or ".join(allowed_values(arg, metadata) for arg in args)
    if origin is Literal:
        return args[0] if len(args) == 1 else f"one of {', '.join(args)}"
    if origin is tuple:
        return f"a list, each entry {allowed_values(args[0])}"
    if origin is dict:
        return "a mapping of names to values"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"a section of keys such as {', '.join(list(annotation.model_fields)[:2])}"
    return _KINDS.get(annotation, "any value") + (_limits(metadata) if annotation in (int, float) else "")


def _limits(metadata: Sequence[Any]) -> str:
    words = {Ge: "of at least", Gt: "above", Le: "of at most", Lt: "below"}
    found = [f"{words[kind]} {bound}" for kind in words for bound in _bounds(metadata, kind)]
    return f" {' and '.join(found)}" if found else ""


def _bounds(metadata: Sequence[Any], kind: type) -> list[Any]:
    flat = [item for entry in metadata for item in (entry.metadata if isinstance(entry, FieldInfo) else [entry])]
    return [getattr(item, kind.__name__.lower()) for item in flat if type(item) is kind]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where in the config a mistake is: its dotted key, the model that owns it, and what the key takes."""

    key: str
    owner: type[BaseModel]
    annotation: Any
    metadata: Sequence[Any]
    field: FieldInfo | None


def _sentence(details: Mapping[str, Any], model: type[BaseModel]) -> tuple[str, str]:
    """The dotted key a mistake belongs to, and the sentence."""
    place, seen = _locate(details["loc"], model), details["input"]
    key = place.key
    if details["type"] == "extra_forbidden":
        return key, f"unknown key `{key}`: {_key_hint(place, seen, model)}"
    if details["type"] == "missing":
        return key, "`{}` is missing: {}".format(*_first_required(place))
    reason = details.get("ctx", {}).get("error")
    if isinstance(reason, ConfigError):
        return str(reason), str(reason)
    if reason is not None:
        return key, f"`{key}` cannot be {show(seen)}: {reason}"
    choices = list(_literals(place.annotation))
    close = nearest(str(seen), choices) if choices else ""
    hint = f" (nearest: {close})" if close else ""
    return key, f"`{key}` must be {allowed_values(place.annotation, place.metadata)}, not {show(seen)}{hint}"


def _locate(loc: tuple[int | str, ...], model: type[BaseModel]) -> _Place:
    """Follows an error's location down to a setting; what pydantic appends below it (union members) is dropped."""
    owner, field = model, None
    annotation: Any = model
    metadata: Sequence[Any] = ()
    for depth, part in enumerate(loc):
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            owner, field = annotation, annotation.model_fields.get(str(part))
            annotation, metadata = (field.annotation, field.metadata) if field else (None, ())
        elif get_origin(annotation) in (tuple, dict):
            value_type = get_args(annotation)[0 if get_origin(annotation) is tuple else 1]
            annotation, metadata = value_type, ()
        else:
            loc = loc[:depth]
            break
    return _Place(".".join(map(str, loc)), owner, annotation, metadata, field)


def _first_required(place: _Place) -> tuple[str, str]:
    """The key that is missing and its help; a whole section that is missing is told by the first key it needs."""
    key, field, kind = place.key, place.field, place.annotation
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        name, field = next((name, field) for name, field in kind.model_fields.items() if field.is_required())
        key = f"{key}.{name}"
    return key, ((field.description if field else None) or "").rstrip(".")


def _literals(annotation: Any) -> Iterator[str]:
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    else:
        for arg in get_args(annotation):
            yield from _literals(arg)


def _key_hint(place: _Place, seen: Any, model: type[BaseModel]) -> str:
    prefix, _, word = place.key.rpartition(".")
    prefix += "." if prefix else ""
    if isinstance(seen, Mapping) and seen and place.owner is model and not nearest(word, model.model_fields):
        word = str(next(iter(seen)))  # a section of another name: what is in it tells what was meant
    by_name: dict[str, str] = {}
    for key in _leaf_keys(model, ""):
        by_name.setdefault(key.rpartition(".")[2], key)
    if word in _OTHER_NAMES:
        return f"here it is `{_OTHER_NAMES[word]}`"
    if word in by_name:
        return f"did you mean `{by_name[word]}`?"
    if close := nearest(word, place.owner.model_fields):
        return f"did you mean `{prefix}{close}`?"
    if not isinstance(seen, Mapping) and (close := nearest(word, by_name)):
        return f"did you mean `{by_name[close]}`?"
    return f"the keys here are {', '.join(place.owner.model_fields)}"


def _leaf_keys(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name in model.model_fields:
        section = section_of(model, name)
        if section:
            yield from _leaf_keys(section, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"
