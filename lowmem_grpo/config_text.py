"""Config text: YAML to plain values and back, and `key=value` overrides on plain values.

Knows nothing of which keys exist; that is `lowmem_grpo.config`.
"""

from __future__ import annotations

import json
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml

from lowmem_grpo.errors import ConfigError

__all__ = ["apply_override", "dump_yaml", "parse_yaml", "read_mapping", "show"]


def read_mapping(path: Path | Traversable) -> dict[str, Any]:
    """The YAML mapping in a file.

    Raises:
        ConfigError: the file is unreadable, empty, not YAML, or not a mapping of names.
    """
    try:
        text = path.read_text(encoding="utf-8-sig" if isinstance(path, Path) else "utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as a text file: {error}") from None
    raw = parse_yaml(text, str(path))
    if raw is None:
        raise ConfigError(f"{path} is empty: a config has at least model, data, rewards and run")
    if not isinstance(raw, dict):
        kind = "a list" if isinstance(raw, list) else f"only {show(raw)}"
        raise ConfigError(f"{path} holds {kind}: a config is sections of keys, such as model:, data: and rewards:")
    for key in raw:
        if not isinstance(key, str):
            raise ConfigError(
                f"{path} has the key {show(key)}, which is not a name: the first sections are model, data"
            )
    return raw


def parse_yaml(text: str, where: str) -> Any:
    """The plain value of YAML text; `where` names the text in errors. No Python objects are ever built.

    Raises:
        ConfigError: a syntax error, a tag, or a key given twice, with its line.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = f"{where}, line {mark.line + 1}" if mark else where
        raise ConfigError(f"{line}: not readable as YAML, {problem or error}") from None


def dump_yaml(value: Any) -> str:
    """YAML text in the order of the mappings; text of several lines in block form."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Sets one `dotted.key=value` in `raw`; the value is YAML, a number in the key counts list entries from 0.

    >>> raw = {"rewards": [{"name": "number"}]}
    >>> apply_override(raw, "rewards.0.weight=0.5"); apply_override(raw, "rollout.stop=[END]"); raw
    {'rewards': [{'name': 'number', 'weight': 0.5}], 'rollout': {'stop': ['END']}}

    Raises:
        ConfigError: not of the form key=value, or a key below a plain value or beyond a list.
    """
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(f"`{override}` is not an override: write key=value, as in rollout.group_size=8")
    value = parse_yaml(text, f"the value of `{key}`")
    *path, last = key.split(".")
    node: Any = raw
    for depth, part in enumerate(path):
        index = _index(node, part, path[:depth])
        if isinstance(node, dict) and node.get(index) is None:
            node[index] = {}
        node = node[index]
        if not isinstance(node, dict | list):
            raise ConfigError(f"`{key}` cannot be set: `{'.'.join(path[: depth + 1])}` is {show(node)}, without keys")
    node[_index(node, last, path)] = value


def show(value: Any) -> str:
    """A value as it would stand in YAML, shortened.

    >>> show({"a": None}), show("x")
    ('{"a": null}', '"x"')
    """
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _index(node: dict[str, Any] | list[Any], part: str, path: list[str]) -> Any:
    if isinstance(node, dict):
        return part
    if not part.isdecimal() or int(part) >= len(node):
        where = ".".join(path)
        count = f"counts its entries from 0 to {len(node) - 1}" if node else "is empty"
        raise ConfigError(f"`{where}.{part}` cannot be set: the list `{where}` {count}")
    return int(part)


class _Loader(yaml.SafeLoader):
    """Safe loading that refuses a key given twice, of which YAML would quietly keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.value in seen:
                problem = f"the key `{key.value}` is given twice"
                raise yaml.constructor.ConstructorError(problem=problem, problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    pass


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    if set(text) & set("\x85\u2028\u2029"):  # Unicode's line breaks come back as spaces unless escaped
        style = '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
