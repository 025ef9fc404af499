"""The names a program may rely on. A change here is a change of the public interface: say so in CHANGELOG.md."""

from __future__ import annotations

import pkgutil

import lowmem_grpo


def test_public_names() -> None:
    assert lowmem_grpo.__all__ == ["Config", "Run", "baseline", "evaluate", "load", "plan", "score", "train"]
    assert all(hasattr(lowmem_grpo, name) for name in lowmem_grpo.__all__)


def test_no_module_hides_a_public_name() -> None:
    """Importing lowmem_grpo.train, if there were one, would put a module where the function is expected."""
    modules = {module.name for module in pkgutil.iter_modules(lowmem_grpo.__path__)}
    assert modules & set(lowmem_grpo.__all__) == set()
