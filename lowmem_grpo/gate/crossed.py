"""The same answers with another problem's gold: what they earn by an answer that is not theirs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from lowmem_grpo.types import Group

__all__ = ["crossed_groups", "gold_of"]


def crossed_groups(groups: Sequence[Group], columns: frozenset[str]) -> list[Group]:
    """The groups with `columns` taken from another problem, one whose values differ wherever that is possible.

    Scored a second time they show what the answers earn by a gold that is not theirs. No problem keeps its own and
    none is used twice. Fewer than two groups have no other problem and give [].
    """
    if len(groups) < 2:
        return []
    golds = [gold_of(group, columns) for group in groups]
    order = sorted(range(len(groups)), key=lambda p: golds[p])
    # In sorted order the equal ones lie side by side, so a shift by the longest such row leaves each of them.
    shift = Counter(golds).most_common(1)[0][1] % len(groups) or 1
    return [
        _with_columns(groups[p], groups[order[(at + shift) % len(order)]], columns)
        for p, at in sorted((p, at) for at, p in enumerate(order))
    ]


def _with_columns(group: Group, other: Group, columns: frozenset[str]) -> Group:
    own, others = group.problem.columns, other.problem.columns
    taken = {name: others.get(name) for name in columns if name in own or name in others}
    return replace(group, problem=replace(group.problem, columns={**own, **taken}))


def gold_of(group: Group, columns: frozenset[str]) -> str:
    values = {name: group.problem.columns.get(name) for name in sorted(columns)}
    return json.dumps(values, sort_keys=True, default=str)
