"""The names a program may rely on. A change here is a change of the public interface: say so in CHANGELOG.md."""

from __future__ import annotations

import lowmem_grpo


def test_public_names() -> None:
    assert lowmem_grpo.__all__ == ["Config", "Run", "baseline", "evaluate", "load", "score", "train"]
    assert all(hasattr(lowmem_grpo, name) for name in lowmem_grpo.__all__)
