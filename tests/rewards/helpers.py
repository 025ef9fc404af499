"""Groups made by hand, for the tests of the rubric."""

from __future__ import annotations

from typing import Any

from lowmem_grpo.types import Group, Problem, Prompt, Rollout


def rollout(text: str, length: int = 1) -> Rollout:
    return Rollout(tuple(range(length)), (True,) * length, (-0.5,) * length, "end", text)


def group(*texts: str, prompt: Prompt = "q", prompt_text: str = "q", **columns: Any) -> Group:
    return Group(Problem("p", prompt, prompt_text, (5,), columns), tuple(rollout(text) for text in texts))
