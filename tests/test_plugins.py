"""Plug-ins by name or by file: what loads, and the sentence for each thing that does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowmem_grpo.errors import PluginError
from lowmem_grpo.plugins import is_file_spec, load_object

REGISTRY = {"number": 1, "text": 2, "tags": 3}


def load(spec: str, base_dir: Path) -> object:
    return load_object(spec, registry=REGISTRY, kind="reward", base_dir=base_dir)


def refusal(spec: str, base_dir: Path) -> str:
    with pytest.raises(PluginError) as caught:
        load(spec, base_dir)
    return str(caught.value)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [("number", False), ("tool_call", False), ("a.py:f", True), ("a.py", True), ("x/y:f", True), ("C:\\a.py:f", True)],
)
def test_what_counts_as_a_file(spec: str, expected: bool) -> None:
    assert is_file_spec(spec) is expected


def test_a_builtin_name(tmp_path: Path) -> None:
    assert load("text", tmp_path) == 2


def test_an_unknown_name_lists_choices_and_the_nearest(tmp_path: Path) -> None:
    assert refusal("numbr", tmp_path) == (
        "unknown reward 'numbr': did you mean 'number'? Choices: number, tags, text, or your own as "
        "'path/file.py:function'"
    )


def test_relative_absolute_and_unusual_paths(tmp_path: Path) -> None:
    folder = tmp_path / "my ünits"
    folder.mkdir()
    (folder / "rewards.py").write_text("def f():\n    return 'é'\n", encoding="utf-8")
    assert load("my ünits/rewards.py:f", tmp_path)() == "é"  # type: ignore[operator]
    assert load(f"{folder}/rewards.py:f", Path("/"))() == "é"  # type: ignore[operator]


def test_two_files_of_one_stem_and_an_edited_file(tmp_path: Path) -> None:
    for folder, value in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "r.py").write_text(f"def f():\n    return {value}\n")
    first, second = load("a/r.py:f", tmp_path), load("b/r.py:f", tmp_path)
    assert (first(), second()) == (1, 2)  # type: ignore[operator]
    (tmp_path / "a" / "r.py").write_text("def f():\n    return 3\n")
    assert load("a/r.py:f", tmp_path)() == 3  # type: ignore[operator]


def test_a_file_runs_once_for_two_functions(tmp_path: Path) -> None:
    (tmp_path / "shared.py").write_text(
        "seen = []\ndef put():\n    seen.append(1)\ndef count():\n    return len(seen)\n"
    )
    load("shared.py:put", tmp_path)()  # type: ignore[operator]
    assert load("shared.py:count", tmp_path)() == 1  # type: ignore[operator]


def test_siblings_can_be_imported_and_dataclasses_work(tmp_path: Path) -> None:
    (tmp_path / "plugin_sibling_module.py").write_text("VALUE = 5\n")
    (tmp_path / "main.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nimport plugin_sibling_module\n"
        "@dataclass\nclass Box:\n    x: int\ndef f():\n    return Box(plugin_sibling_module.VALUE).x\n"
    )
    assert load("main.py:f", tmp_path)() == 5  # type: ignore[operator]


def test_missing_file_names_the_path_and_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("")
    message = refusal("reward.py:f", tmp_path)
    assert message == f"reward 'reward.py:f': there is no file {tmp_path / 'reward.py'}; did you mean 'rewards.py'?"
    assert "is a folder" in refusal(f"{tmp_path}:f", tmp_path)


@pytest.mark.parametrize("spec", ["r.py", "r.py:"])
def test_no_function_named(tmp_path: Path, spec: str) -> None:
    assert refusal(spec, tmp_path) == f"reward '{spec}' names no function: write it as 'r.py:function_name'"


def test_missing_function_lists_those_of_the_file_only(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("from os.path import join\nLIMIT = 3\ndef score(): ...\ndef _hidden(): ...\n")
    message = refusal("r.py:scor", tmp_path)
    assert message == ("reward 'r.py:scor': there is no function 'scor' in r.py, it has score; did you mean 'score'?")
    assert refusal("r.py:LIMIT", tmp_path).endswith("'LIMIT' in r.py is a int, not a function")


@pytest.mark.parametrize(
    ("text", "tail"),
    [
        ("x = 1\n\ny = {}['gold']\n", "r.py fails at line 3: KeyError: 'gold'"),
        ("def f(:\n    pass\n", "r.py fails at line 1: SyntaxError: invalid syntax"),
        ("import no_such_package_here\n", "line 1: ModuleNotFoundError: No module named 'no_such_package_here'"),
        ("import sys\nsys.exit(3)\n", "r.py fails at line 2: SystemExit: 3"),
    ],
)
def test_a_file_that_raises_says_where(tmp_path: Path, text: str, tail: str) -> None:
    (tmp_path / "r.py").write_text(text)
    assert refusal("r.py:f", tmp_path).endswith(tail)
