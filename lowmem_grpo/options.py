"""Options of registered functions (estimators, losses): read from the signature, checked before use.

A registered function names its options as keyword-only parameters with a default and an annotation such as
`Annotated[float, Field(ge=0)]`. Nothing else describes them, so the config, the help and the call cannot disagree.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

import pydantic

from lowmem_grpo.errors import ConfigError, nearest

__all__ = ["checked", "choose", "option_defaults", "validate_options"]


def choose(kind: str, registry: Mapping[str, Any], name: str) -> Any:
    """The entry `name` of a registry; a ConfigError with the nearest choice when there is none."""
    if name in registry:
        return registry[name]
    raise ConfigError(f"there is no {kind} {name!r}{_hint(name, registry)}; the choices are {', '.join(registry)}")


def option_defaults(function: Callable[..., Any], inputs: frozenset[str]) -> dict[str, Any]:
    """Option name -> default of a registered function; `inputs` are keyword parameters that carry data instead."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in inputs}


def validate_options(
    kind: str, function: Callable[..., Any], inputs: frozenset[str], given: Mapping[str, Any]
) -> dict[str, Any]:
    """The given options, converted to their types; raises ConfigError on an unknown name or a value out of range.

    Numbers written as text pass (`1e-4` without a dot is text in YAML).
    """
    try:
        checked_values = _model(function, inputs)(**given)
    except pydantic.ValidationError as error:
        raise ConfigError(_sentence(kind, function, inputs, error)) from None
    return {name: getattr(checked_values, name) for name in given}


def checked(kind: str, inputs: frozenset[str]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: every call first validates its options, so a misspelt one is a sentence and not a TypeError."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        options = option_defaults(function, inputs)
        data_names = inspect.signature(function).parameters.keys() - options.keys()

        @functools.wraps(function)
        def call(*tensors: Any, **keywords: Any) -> Any:
            data = {name: value for name, value in keywords.items() if name in data_names}
            given = {name: value for name, value in keywords.items() if name not in data_names}
            return function(*tensors, **data, **validate_options(kind, function, inputs, given))

        return call

    return decorate


@functools.cache
def _model(function: Callable[..., Any], inputs: frozenset[str]) -> type[pydantic.BaseModel]:
    hints = typing.get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {
        name: (hints[name], default) for name, default in option_defaults(function, inputs).items()
    }
    config = pydantic.ConfigDict(extra="forbid", allow_inf_nan=False)
    return pydantic.create_model(function.__name__, __config__=config, **fields)


def _sentence(kind: str, function: Callable[..., Any], inputs: frozenset[str], error: pydantic.ValidationError) -> str:
    first = error.errors()[0]
    option, owner = str(first["loc"][0]), f"{kind} {function.__name__!r}"
    if first["type"] == "extra_forbidden":
        options = option_defaults(function, inputs)
        return f"{owner} has no option {option!r}{_hint(option, options)}; it takes {', '.join(options) or 'none'}"
    expected = first["msg"].removeprefix("Input should be ")
    choices = typing.get_args(typing.get_type_hints(function)[option]) if first["type"] == "literal_error" else ()
    return f"option {option} of {owner} is {first['input']!r} but should be {expected}{_hint(first['input'], choices)}"


def _hint(word: Any, choices: typing.Iterable[Any]) -> str:
    match = nearest(str(word), [str(choice) for choice in choices])
    return f", did you mean {match!r}?" if match else ""
