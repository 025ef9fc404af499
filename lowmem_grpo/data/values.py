"""Values of a data set made JSON, because worker processes get them as JSON; and signs of a spoilt string."""

from __future__ import annotations

import base64
import datetime
import decimal
import pathlib
import re
import uuid
from collections.abc import Iterator, Mapping, Set
from typing import Any

from lowmem_grpo.errors import DataError

__all__ = ["has_lost_backslash", "json_value", "strings_in"]

# "\frac" typed into JSON with one backslash is a form feed and "rac", "\beta" a backspace and "eta". Bell and vertical
# tab are what Python does to "\alpha" and "\varphi". Tab, return and newline are ordinary characters, so they only
# count in front of the rest of a LaTeX command.
_LOST_BACKSLASH = re.compile(
    r"[\x07\x08\x0b\x0c]"
    r"|\t(?:heta|imes|ext|extbf|an|au|riangle|frac)(?![a-z])"
    r"|\r(?:ho|ight|angle|floor|ceil)(?![a-z])"
    r"|\n(?:abla|eq|eg)(?![a-z])"
)


def json_value(value: Any) -> Any:
    """`value` as plain JSON: None, bool, int, float, str, list, dict with text keys.

    NaN, NaT and pandas' NA become None; dates ISO text; time spans seconds; a Decimal the int or float equal to it,
    else its text; numpy and torch values numbers and lists; bytes text (base64 where they are not UTF-8). Raises
    DataError on anything else and on text with half a surrogate pair.

    >>> json_value({"when": datetime.date(2024, 5, 1), "score": float("nan")})
    {'when': '2024-05-01', 'score': None}
    """
    if value is None or type(value) in (bool, int):
        return value
    if isinstance(value, float):
        return None if value != value else float(value)
    if isinstance(value, str):
        return _text(str(value))
    if isinstance(value, Mapping):
        return {_text(str(key)): json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if isinstance(value, Set):
        return sorted((json_value(item) for item in value), key=repr)
    return _converted(value)


def strings_in(value: Any) -> Iterator[str]:
    """Every string inside a JSON value (the keys of objects left out).

    >>> list(strings_in([{"role": "user", "content": "hi"}, 3]))
    ['user', 'hi']
    """
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from strings_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from strings_in(item)


def has_lost_backslash(value: Any) -> bool:
    r"""True when a string inside `value` looks like LaTeX whose backslash was eaten by an escape.

    >>> has_lost_backslash("\frac{1}{4}"), has_lost_backslash(r"\frac{1}{4}")
    (True, False)
    """
    return any(_LOST_BACKSLASH.search(text) for text in strings_in(value))


def _text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"half a surrogate pair at character {error.start} of a text, which is no character") from None
    return text


def _converted(value: Any) -> Any:
    """The types that are not JSON themselves. The order matters: a datetime is a date, numpy's float64 is a float."""
    if type(value).__name__ in ("NaTType", "NAType"):
        return None
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, decimal.Decimal):
        return _number(value)
    if isinstance(value, bytes | bytearray):
        return _decoded(bytes(value))
    if isinstance(value, uuid.UUID | pathlib.PurePath):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if hasattr(value, "tolist"):
        # numpy turns a datetime64 into nanoseconds as an int; its text is the ISO date.
        dated = getattr(value.dtype, "kind", None) == "M"
        return json_value((value.astype(str) if dated else value).tolist())
    raise DataError(f"a value of type {type(value).__name__}, which cannot be written as JSON")


def _number(value: decimal.Decimal) -> int | float | str | None:
    if value.is_nan():
        return None
    if value.is_infinite():
        return float(value)
    if value == value.to_integral_value():
        return int(value)
    return float(value) if decimal.Decimal(repr(float(value))) == value else str(value)


def _decoded(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return base64.b64encode(value).decode()
