"""Rows out of files, folders, the hub, tasks and memory; no tokenizer and no model needed."""

from __future__ import annotations

import csv
import hashlib
import inspect
import io
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from lowmem_grpo.data.columns import check_mapping
from lowmem_grpo.data.hub import read_folder, read_hub
from lowmem_grpo.data.spec import DataSpec, RawData, Source, Table
from lowmem_grpo.data.values import json_value
from lowmem_grpo.errors import ConfigError, DataError, UserError, nearest
from lowmem_grpo.plugins import load_object
from lowmem_grpo.tasks import TASKS

__all__ = ["read_rows", "sample_rows"]

_FUNCTION = re.compile(r"\.py:\w+$")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_UTF16 = (b"\xff\xfe", b"\xfe\xff")

Numbered = Iterable[tuple[int, Any]]


def read_rows(spec: DataSpec, *, base_dir: Path) -> RawData:
    """Read the rows of `spec.source`, and of `spec.test_source` when it has one; relative paths start at `base_dir`.

    Raises DataError, in one sentence, on a missing, empty or unreadable file, a bad line (with its number), a value
    that is not JSON, a missing prompt or mapped column; ConfigError on wrong `args`; PluginError on a function that is
    not found.
    """
    sources = [(spec.source, spec.split)]
    if spec.test_source is not None:
        sources.append((spec.test_source, spec.test_split))
    if spec.args and not any(_takes_args(source, base_dir) for source, _ in sources):
        raise ConfigError(f"data.args is for tasks, functions and hub ids, not for {_label(spec.source)}; leave it out")
    tables = [_read_source(source, split, spec.args, base_dir) for source, split in sources]
    for table in tables:
        check_mapping(table, spec)
    return RawData(tables[0], tables[1] if len(tables) == 2 else None, _sha256(tables))


def sample_rows(path: Path, n: int) -> list[dict[str, Any]]:
    """The first `n` rows of a data file, for a look at its columns. Raises DataError as `read_rows` does."""
    return list(read_table(path).rows[:n])


def _read_source(source: Source, split: str, args: Mapping[str, Any], base_dir: Path) -> Table:
    if not isinstance(source, str):
        return _table(_label(source), "row", enumerate(source, 1))
    if _is_generator(source):
        return _table(source, "row", enumerate(_generated(source, args, base_dir), 1))
    path = base_dir / Path(source).expanduser()
    if path.is_dir():
        return _table(source, "row", enumerate(read_folder(path, split), 1))
    if path.is_file() or _means_file(source, path):
        return read_table(path)
    task = nearest(source, TASKS)
    if task and "/" not in source:
        raise DataError(f"there is no file and no task named {source!r}; did you mean data.source={task}?")
    return _table(source, "row", enumerate(read_hub(source, split, args), 1))


def _label(source: Source) -> str:
    return source if isinstance(source, str) else "the given rows"


def _is_generator(source: str) -> bool:
    return source in TASKS or _FUNCTION.search(source) is not None


def _means_file(source: str, path: Path) -> bool:
    """True for a source that is not there but can only have been meant as a file or folder."""
    named_like_file = path.suffix.lower() in _READERS or _HUB_ID.fullmatch(source) is None
    return named_like_file or ("/" in source and path.parent.is_dir())


def _takes_args(source: Source, base_dir: Path) -> bool:
    if not isinstance(source, str) or _is_generator(source):
        return isinstance(source, str)
    path = base_dir / Path(source).expanduser()
    return not path.exists() and not _means_file(source, path)


def _table(label: str, unit: Literal["line", "row"], numbered: Numbered) -> Table:
    rows: list[dict[str, Any]] = []
    lines: list[int] = []
    for line, row in numbered:
        if not isinstance(row, Mapping):
            hint = "; name the file .json if it is one list" if unit == "line" and isinstance(row, list) else ""
            raise DataError(f"{label} {unit} {line} holds {row!r:.40} where a row (a JSON object) is expected{hint}")
        rows.append({str(column): _placed(value, f"{label} {unit} {line}", column) for column, value in row.items()})
        lines.append(line)
    if not rows:
        raise DataError(f"{label} has no rows")
    columns = tuple(dict.fromkeys(column for row in rows for column in row))
    return Table(label, unit, tuple(rows), tuple(lines), columns)


def _placed(value: Any, place: str, column: object) -> Any:
    try:
        return json_value(value)
    except DataError as error:
        raise DataError(f"{place}, column {column!r}, holds {error}") from None


def _sha256(tables: Iterable[Table]) -> str:
    digest = hashlib.sha256()
    for table in tables:
        for row in table.rows:
            digest.update(json.dumps(row, sort_keys=True).encode() + b"\n")
        digest.update(b"\n")
    return digest.hexdigest()


def _generated(source: str, args: Mapping[str, Any], base_dir: Path) -> list[Any]:
    make: Callable[..., Any] = load_object(source, registry=TASKS, kind="data source", base_dir=base_dir)
    parameters = inspect.signature(make).parameters
    try:
        inspect.signature(make).bind(**args)
    except TypeError as error:
        wrong = next((name for name in args if name not in parameters), "")
        hint = f"; did you mean {nearest(wrong, parameters)}?" if nearest(wrong, parameters) else ""
        raise ConfigError(
            f"data.args does not fit {source}: {error}; it takes {', '.join(parameters) or 'none'}{hint}"
        ) from None
    try:
        return list(make(**args))
    except UserError:
        raise
    except Exception as error:  # the user's own code: any failure of it is theirs to see
        raise DataError(f"the data source {source} raised {type(error).__name__}: {error}") from error


def read_table(path: Path) -> Table:
    """The rows of a data file of any kind that is read. Raises DataError with one sentence."""
    if not path.exists():
        raise DataError(_missing(path))
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"{path} ends in {path.suffix or 'nothing'!r}; data files end in {', '.join(_READERS)}")
    unit: Literal["line", "row"] = "line" if reader in (_read_jsonl, _read_csv) else "row"
    try:
        return _table(path.name, unit, reader(path))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None


def _missing(path: Path) -> str:
    if not path.parent.is_dir():
        return f"there is no file {path}: its folder does not exist"
    close = nearest(path.name, sorted(entry.name for entry in path.parent.iterdir()))
    return f"there is no file {path}" + (f"; did you mean {close}?" if close else "")


def _text_of(path: Path) -> str:
    """The text of a file without a byte order mark; line ends as they are. UTF-8, or UTF-16 when marked as such."""
    content = path.read_bytes()
    try:
        return content.decode("utf-16" if content.startswith(_UTF16) else "utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise DataError(f"{path.name} line {line} is not UTF-8 ({error.reason}); save the file as UTF-8") from None


def _read_jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    # Only "\n" ends a line: U+2028 and others that str.splitlines() knows may stand inside a JSON string.
    for number, line in enumerate(_text_of(path).split("\n"), 1):
        if line.strip():
            yield number, _parsed(line, f"{path.name} line {number}")


def _read_json(path: Path) -> Iterator[tuple[int, Any]]:
    text = _text_of(path)
    if not text.lstrip().startswith("["):
        return _read_jsonl(path)
    return enumerate(_parsed(text, path.name), 1)


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        at = f"line {error.lineno} column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        hint = r" (inside JSON a backslash is written \\)" if "escape" in error.msg else ""
        raise DataError(f"{place} is not valid JSON: {error.msg} at {at}{hint}") from None


def _read_csv(path: Path) -> Iterator[tuple[int, Any]]:
    """Rows of a CSV file with a header; an empty cell is a missing value, every other cell stays text."""
    text = _text_of(path)
    header = text.partition("\n")[0]
    delimiter = max(",;\t", key=header.count)  # the first of equals, so a comma without any
    limit = csv.field_size_limit(sys.maxsize)
    try:
        yield from _csv_rows(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True), path.name)
    finally:
        csv.field_size_limit(limit)


def _csv_rows(reader: Any, name: str) -> Iterator[tuple[int, dict[str, str | None]]]:
    columns: list[str] | None = None
    first_line = 1
    try:
        for cells in reader:
            if columns is None:
                columns = [cell.strip() for cell in cells]
                if len(set(columns)) < len(columns):
                    raise DataError(f"{name} line 1 names a column twice: {', '.join(columns)}")
            elif cells:
                if len(cells) != len(columns):
                    raise DataError(
                        f"{name} line {first_line} has {len(cells)} cells under a header of {len(columns)} columns"
                    )
                yield first_line, {column: cell or None for column, cell in zip(columns, cells, strict=True)}
            first_line = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{name} line {first_line} is not valid CSV: {error}") from None


def _read_parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path.name} is not a readable Parquet file: {str(error).splitlines()[0]}") from None
    return enumerate(rows, 1)


_READERS: dict[str, Callable[[Path], Iterator[tuple[int, Any]]]] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
}
