"""Loading a model without what libraries say to each other, so that what the user sees is ours."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator

__all__ = ["quiet_loading"]


@contextlib.contextmanager
def quiet_loading() -> Iterator[None]:
    """No bars for weights, and none of the warnings that a user can do nothing about; all come back afterwards."""
    from transformers.utils import logging

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else a warning when the reward process is started
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            # peft asks transformers for it under the old name.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            yield
    finally:
        if bars:
            logging.enable_progress_bar()
