"""Built-in tasks: functions that make rows, for runs that need no file.

A task takes keyword arguments (`data.args` in the config) and returns rows as a JSONL file would hold them. A new one
is a function here and an entry in `TASKS`; your own needs neither: `data.source: my_rows.py:make`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from lowmem_grpo.errors import ConfigError

__all__ = ["TASKS", "addition"]

_MOST_ROWS = 1_000_000


def addition(low: int = 0, high: int = 49, seed: int = 0) -> list[dict[str, Any]]:
    """Questions about a + b with both operands from `low` to `high` inclusive, in a fixed order.

    Every unordered pair {a, b} occurs exactly once (n (n + 1) / 2 rows for n operands) and `seed` decides which of the
    two is written first. Splits made from these rows are therefore disjoint as unordered pairs: nobody learns 3 + 4
    and is tested on 4 + 3. Raises ConfigError when a bound is not a whole number or the range is empty or too large.

    >>> addition(low=2, high=2)
    [{'prompt': 'What is 2 + 2? Reply with only the number.', 'answer': '4'}]
    """
    for name, value in (("low", low), ("high", high), ("seed", seed)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"data.args.{name} has to be a whole number, not {value!r}")
    if low > high:
        raise ConfigError(f"data.args.low is {low} and above data.args.high, {high}: no operand is left")
    operands = high - low + 1
    if operands * (operands + 1) // 2 > _MOST_ROWS:
        raise ConfigError(f"operands {low} to {high} make more than {_MOST_ROWS:,} rows; narrow data.args.low and high")
    rng = random.Random(seed)
    pairs = [(a, b) if rng.random() < 0.5 else (b, a) for a in range(low, high + 1) for b in range(a, high + 1)]
    return [{"prompt": f"What is {a} + {b}? Reply with only the number.", "answer": str(a + b)} for a, b in pairs]


TASKS: dict[str, Callable[..., list[dict[str, Any]]]] = {"addition": addition}
"""Task name, as `data.source` gives it -> the function that makes its rows."""
