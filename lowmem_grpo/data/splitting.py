"""Train, dev and test out of one set of rows, so that no two of them ask the same."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lowmem_grpo.data.rendering import RenderedPrompt
from lowmem_grpo.data.stream import seeded_key
from lowmem_grpo.errors import DataError
from lowmem_grpo.types import Prompt

__all__ = ["Kept", "hold_out", "test_part"]


@dataclass(frozen=True, slots=True)
class Kept:
    """A usable row; `key` is the same for rows that ask the same, so that they stay on one side of a split."""

    line: int
    key: str
    prompt: Prompt
    rendered: RenderedPrompt
    columns: dict[str, Any]


def test_part(rows: list[Kept], size: int, seed: int, warnings: list[str]) -> list[Kept]:
    """`size` rows of the test source, by line; all of them for size 0. Raises DataError when there are fewer."""
    if size > len(rows):
        raise DataError(f"data.test_size={size} is more than the {len(rows)} usable rows of data.test_source")
    return _taken(_by_prompt(rows, seed), size, "test", warnings) if size else rows


def hold_out(
    rows: list[Kept], dev_size: int, test_size: int, seed: int, warnings: list[str]
) -> tuple[list[Kept], list[Kept], list[Kept]]:
    """Test from the front of one seeded order of the prompts, dev from its back, train what is left, by line.

    Raises DataError with the numbers when there are too few rows; appends to `warnings` when repeats do not fit.
    """
    if dev_size + test_size >= len(rows):
        raise DataError(
            f"{len(rows)} usable rows are too few for data.dev_size={dev_size} and data.test_size={test_size} with "
            "something left to train on; lower these or add rows"
        )
    groups = _by_prompt(rows, seed)
    test = _taken(groups, test_size, "test", warnings)
    held = {row.key for row in test}
    dev = _taken([group for group in reversed(groups) if group[0].key not in held], dev_size, "dev", warnings)
    held.update(row.key for row in dev)
    train = [row for row in rows if row.key not in held]
    assert train, "fewer rows are held out than there are"
    return train, dev, test


def _by_prompt(rows: list[Kept], seed: int) -> list[list[Kept]]:
    groups: dict[str, list[Kept]] = {}
    for row in rows:
        groups.setdefault(row.key, []).append(row)
    return sorted(groups.values(), key=lambda group: seeded_key(seed, group[0].key))


def _taken(groups: Iterable[list[Kept]], size: int, name: str, warnings: list[str]) -> list[Kept]:
    """Whole groups in their order as long as they fit into `size` rows; rows by line."""
    taken: list[Kept] = []
    for group in groups:
        if len(taken) + len(group) <= size:
            taken += group
    if len(taken) < size:
        short = f"data.{name}_size={size} gives {len(taken)} rows, because rows with the same prompt stay together"
        if not taken:
            raise DataError(f"{short}; raise it to the number of repeats, or leave repeats out")
        warnings.append(short)
    return sorted(taken, key=lambda row: row.line)
