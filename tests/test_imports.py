"""The import graph: who may see whom, what is light to import, and that everything imported is declared."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions
from importlib.util import resolve_name
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "lowmem_grpo"

LAYERS = {
    "base": {"errors", "types"},
    "support": {"faults", "files", "intervals", "options", "plugins", "quiet", "tasks", "tee"},
    "stages": {
        *(
            "advantages",
            "attention",
            "batching",
            "catalog",
            "checkpoint",
            "data",
            "evaluation",
            "gate",
            "losses",
            "memory",
            "metrics",
        ),
        *("model", "optim", "rewards", "rollout", "rundir", "selfcheck", "sinks", "update"),
    },
    "config": {"config", "config_errors", "config_text", "recipes"},
    "starter": {"starter"},
    "planning": {"planning"},
    "trainer": {"answers", "assembly", "gatekeeper", "held_out", "lifecycle", "trainer"},
    "tools": {"doctor", "exporting"},
    "front": {"__init__", "api", "cli", "ui"},
}
"""Layer -> the modules and packages right under lowmem_grpo that form it."""

MAY_IMPORT = {
    "base": {"base"},
    "support": {"base", "support"},
    "stages": {"base", "support", "stages"},
    "config": {"base", "config"},
    "starter": {"base", "support", "stages", "config"},
    "planning": {"base", "support", "stages", "config", "planning"},
    "trainer": {"base", "support", "stages", "config", "planning", "trainer"},
    "tools": {"base", "support", "stages", "config", "planning", "trainer", "tools"},
    "front": set(LAYERS),
}
"""Layer -> the layers it may import. Stages do not see the config; nothing sees the trainer but what is above it."""

LIGHT = ("", ".catalog", ".cli", ".config", ".data", ".plugins", ".rewards", ".rundir", ".sinks", ".starter")
HEAVY = ("bitsandbytes", "datasets", "gradio", "peft", "torch", "transformers")

MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): ast.parse(path.read_text("utf-8"))
    for path in sorted(PACKAGE.rglob("*.py"))
}
"""Module name -> syntax tree."""

PACKAGES = {module.rpartition(".")[0] for module in MODULES}


def imported(module: str, tree: ast.AST) -> Iterator[str]:
    """Every module that `module` imports, in functions and for type checking too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module if module in PACKAGES else module.rpartition(".")[0]
            source = resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                yield inner if inner in MODULES else source


def top(module: str) -> str:
    """`lowmem_grpo.memory.head` -> `memory`."""
    return [*module.split("."), "__init__"][1]


def layer_of(module: str) -> str:
    return next((layer for layer, members in LAYERS.items() if top(module) in members), "")


def own_imports(module: str) -> set[str]:
    return {name for name in imported(module, MODULES[module]) if name.split(".")[0] == "lowmem_grpo"} - {module}


def test_every_module_has_a_layer() -> None:
    assert [module for module in MODULES if not layer_of(module)] == []


def test_imports_point_one_way() -> None:
    wrong = [
        f"{module} ({layer_of(module)}) imports {name} ({layer_of(name)})"
        for module in MODULES
        for name in sorted(own_imports(module))
        if layer_of(name) not in MAY_IMPORT[layer_of(module)]
    ]
    assert wrong == []


def test_no_module_imports_itself_in_a_circle() -> None:
    # A package's __init__ re-exports its members, so members are compared with members only.
    graph = {module: own_imports(module) - PACKAGES for module in MODULES if module not in PACKAGES}
    order = list(TopologicalSorter(graph).static_order())
    assert set(order) == set(graph)


def test_importing_the_package_and_its_command_line_is_light() -> None:
    code = f"""
import importlib, sys
for name in {LIGHT!r}:
    importlib.import_module("lowmem_grpo" + name)
    print(name, [heavy for heavy in {HEAVY!r} if heavy in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.stderr == ""
    assert result.stdout.splitlines() == [f"{name} []" for name in LIGHT]


def test_every_package_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    declared = {re.split(r"[<>=]", line)[0].lower().replace("_", "-") for line in [*project["dependencies"], *extras]}
    installed = packages_distributions()
    used = {name.split(".")[0] for module, tree in MODULES.items() for name in imported(module, tree)}
    third_party = used - sys.stdlib_module_names - {"lowmem_grpo"}
    names = {name: {d.lower().replace("_", "-") for d in installed.get(name, [name])} for name in third_party}
    assert {name for name, dists in names.items() if not dists & declared} == set()


def test_every_requirement_has_a_tested_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["bench"], *extras["dev"]]
    pins = [line for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines() if line and line[0] != "#"]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
    plain = [[re.split(r"[<>=]", line)[0].lower().replace("_", "-") for line in lines] for lines in (pins, wanted)]
    assert sorted(plain[0]) == sorted(plain[1])
