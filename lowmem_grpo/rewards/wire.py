"""Values as lines of JSON between the trainer and the reward worker; nothing is pickled.

Besides what JSON has, the types a data set can hold go through: bytes, dates, times, Decimal. Arrays and scalars of
numpy or torch become lists and numbers, tuples and sets become lists.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import json
from typing import Any

from lowmem_grpo.errors import DataError

__all__ = ["from_line", "to_line"]

_TAG = "__lowmem_grpo__"


def to_line(value: Any) -> bytes:
    """One line, ASCII, with its line break. Raises DataError for a value of a type that cannot cross."""
    return json.dumps(value, default=_encode).encode("ascii") + b"\n"


def from_line(line: bytes) -> Any:
    """The value of a line of `to_line`.

    >>> from_line(to_line({"day": datetime.date(2024, 2, 29), "raw": b"x"}))
    {'day': datetime.date(2024, 2, 29), 'raw': b'x'}
    """
    return json.loads(line, object_hook=_decode)


def _encode(value: Any) -> Any:
    if isinstance(value, bytes):
        return {_TAG: "bytes", "v": base64.b64encode(value).decode("ascii")}
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return {_TAG: type(value).__name__, "v": value.isoformat()}
    if isinstance(value, datetime.timedelta):
        return {_TAG: "timedelta", "v": [value.days, value.seconds, value.microseconds]}
    if isinstance(value, decimal.Decimal):
        return {_TAG: "Decimal", "v": str(value)}
    if isinstance(value, set | frozenset):
        return list(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise DataError(
        f"a value of type {type(value).__name__} ({value!r:.60}) cannot be handed to a reward function in a file: "
        "store it as text, numbers, lists or dicts, or leave its column out of data.columns"
    )


def _decode(pairs: dict[str, Any]) -> Any:
    kind, value = pairs.get(_TAG), pairs.get("v")
    if kind is None or value is None:
        return pairs
    if kind == "bytes":
        return base64.b64decode(value)
    if kind == "timedelta":
        return datetime.timedelta(*value)
    if kind == "Decimal":
        return decimal.Decimal(value)
    return getattr(datetime, kind).fromisoformat(value)
