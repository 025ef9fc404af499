"""What every test shares: one thread, hypothesis without a deadline, no hub, Ctrl-C as Python has it."""

from __future__ import annotations

import os
import signal

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from hypothesis import settings
from transformers.utils import logging as transformers_logging

# A shell lets what it starts in the background ignore SIGINT, and the tests of interrupts would wait for nothing.
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)
transformers_logging.disable_progress_bar()
settings.register_profile("tests", deadline=None, derandomize=True)
settings.load_profile("tests")
