"""Tests marked `gpu` are collected everywhere and skipped where torch sees no GPU: there is nothing to run them on."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch sees none here")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)
