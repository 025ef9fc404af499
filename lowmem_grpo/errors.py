"""Every error this package raises on purpose.

    LowmemGrpoError                 carries `exit_code`, the status the command line ends with
    ├── UserError (ValueError)      2: something the user gave is wrong, and the sentence says how to mend it
    │   ├── ConfigError                a key, a value or a combination of values
    │   ├── DataError                  a file, a column, a row, a template
    │   ├── ModelError                 a model id, a folder, a download, an unsupported architecture
    │   ├── PluginError                a reward or another plug-in that cannot be found or loaded
    │   └── RunDirError                a run folder that is missing, taken, or already full
    ├── StopRequested               3: the run was asked to stop, finished its step and saved
    ├── RunFailed                   4: the run cannot go on
    │   ├── RewardFailed               a reward function that fails on everything
    │   ├── OutOfMemoryFailed          the memory does not suffice even for one answer at a time
    │   ├── NonFiniteFailed            too many optimizer steps in a row with non-finite gradients
    │   └── SelfCheckFailed            the first live step did not do what a step has to do
    └── GateStopped                 5: the base's answers leave nothing to learn from

A message is one sentence: what was wrong, the value seen, the nearest right choice.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "ConfigError",
    "DataError",
    "GateStopped",
    "LowmemGrpoError",
    "ModelError",
    "NonFiniteFailed",
    "OutOfMemoryFailed",
    "PluginError",
    "RewardFailed",
    "RunDirError",
    "RunFailed",
    "SelfCheckFailed",
    "StopRequested",
    "UserError",
    "nearest",
]


class LowmemGrpoError(Exception):
    """The root of the tree; `exit_code` is what the command line exits with."""

    exit_code = 4


class UserError(LowmemGrpoError, ValueError):
    """The user can mend this; raised before a model loads wherever it can be known before."""

    exit_code = 2


class ConfigError(UserError):
    """A key, a value or a combination of values in the config is wrong."""


class DataError(UserError):
    """A data file, a column, a row or a chat template is wrong."""


class ModelError(UserError):
    """A model cannot be found, fetched, read, or is of a kind that is not supported."""


class PluginError(UserError):
    """A named plug-in (a reward function, a data source) cannot be found or loaded."""


class RunDirError(UserError):
    """A run folder is missing, in use by another process, or already holds a run."""


class StopRequested(LowmemGrpoError):
    """The run was asked to stop; everything up to the last finished step is saved."""

    exit_code = 3


class RunFailed(LowmemGrpoError):
    """The run cannot go on; what was saved stays on disk and can be resumed."""

    exit_code = 4


class RewardFailed(RunFailed):
    """A reward function failed on every answer; the message carries its traceback."""


class OutOfMemoryFailed(RunFailed):
    """The memory does not suffice even for one answer at a time; the message says what to lower."""


class NonFiniteFailed(RunFailed):
    """Too many optimizer steps in a row had non-finite gradients."""


class SelfCheckFailed(RunFailed):
    """The first live step showed that the run does not train what it should; the message says the likely cause."""


class GateStopped(LowmemGrpoError):
    """The gate found, before the first step, that nothing can be learnt; the message says why and what to change."""

    exit_code = 5


def nearest(word: str, choices: Iterable[str]) -> str:
    """The choice closest in spelling to `word`, or "" when nothing is close.

    >>> nearest("group_sise", ["group_size", "top_k"])
    'group_size'
    """
    matches = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return matches[0] if matches else ""
