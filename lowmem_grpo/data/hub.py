"""Rows of data sets that `datasets` reads: hub ids and folders. One sentence for each way that can fail."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowmem_grpo.errors import ConfigError, DataError, nearest

__all__ = ["read_folder", "read_hub"]

_ARGS = ("name", "data_dir", "data_files", "revision")


def read_hub(source: str, split: str, args: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a data set on the hub; `args` may hold name (the configuration), data_dir, data_files, revision.

    Raises ConfigError on another argument and DataError on a data set that is missing, gated, out of reach, or has not
    the split or configuration.
    """
    for name in args:
        if name not in _ARGS:
            close = nearest(name, _ARGS)
            hint = f"; did you mean {close}?" if close else ""
            raise ConfigError(f"data.args.{name} is unknown; the hub data set {source} takes {', '.join(_ARGS)}{hint}")
    return _load(source, source, split, args)


def read_folder(path: Path, split: str) -> list[dict[str, Any]]:
    """The rows of a folder of data files, or of one written by `save_to_disk`. Raises DataError."""
    if not ((path / "state.json").is_file() or (path / "dataset_dict.json").is_file()):
        return _load(str(path), f"the folder {path}", split, {})
    import datasets

    saved = datasets.load_from_disk(str(path))
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            raise DataError(f"the folder {path} has no split {split!r}; it has {', '.join(map(str, saved))}")
        saved = saved[split]
    return saved.to_list()


def _load(path: str, label: str, split: str, args: Mapping[str, Any]) -> list[dict[str, Any]]:
    import datasets

    try:
        loaded = datasets.load_dataset(path, split=split, **args)
    except datasets.exceptions.DatasetNotFoundError as error:
        raise DataError(_not_found(label, str(error))) from error
    except ConnectionError as error:
        raise DataError(
            f"{label} is neither a file here nor within reach: the hub does not answer ({_first_line(error)}); "
            "check the connection, or give a local file"
        ) from error
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"cannot load {label}: {_sentence(str(error))}") from error
    return loaded.to_list()


def _not_found(label: str, message: str) -> str:
    if "gated" in message:
        return (
            f"the data set {label} is gated: accept its terms on its hub page with your account, then run "
            "`hf auth login` or set HF_TOKEN"
        )
    if "Revision" in message:
        return f"the data set {label} has no such revision: {message}"
    return f"there is no file, folder, task or hub data set {label!r}, or it is private and needs HF_TOKEN"


def _sentence(message: str) -> str:
    if "Config name is missing" in message:
        choices = message.partition("[")[2].partition("]")[0]
        return f"it has several configurations; choose one with data.args.name=..., out of {choices}"
    if "Unknown split" in message:
        return f"{message.splitlines()[0]} (data.split, and data.test_split for the test source)"
    return message.splitlines()[0] if message else "no reason given"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
