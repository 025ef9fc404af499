"""How the allocator of a run is set up, on every kind of machine, without a card."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lowmem_grpo.memory.cap import (
    TorchCudaAllocator,
    cap_bytes,
    configure_allocator,
    is_wsl_or_windows,
    uses_expandable_segments,
)
from lowmem_grpo.types import Card

GIB = 1 << 30
CARD = Card("RTX 4060", "cuda:1", (8, 9), 7 * GIB)
EXPANDABLE = "expandable_segments:True"


class Recorder:
    """Stands for torch: notes what is set, and says that 7 of 8 GiB are free."""

    def __init__(self) -> None:
        self.settings: list[str] = []
        self.fractions: list[tuple[float, str]] = []

    def set_settings(self, settings: str) -> None:
        self.settings.append(settings)

    def memory(self, device: str) -> tuple[int, int]:
        assert device == CARD.device
        return 7 * GIB, 8 * GIB

    def set_fraction(self, fraction: float, device: str) -> None:
        self.fractions.append((fraction, device))


def test_linux_gets_expandable_segments_and_no_cap() -> None:
    torch_calls = Recorder()
    setup = configure_allocator(CARD, windows=False, environ={}, allocator=torch_calls)
    assert torch_calls.settings == [EXPANDABLE]
    assert torch_calls.fractions == []
    assert setup.to_json() == {"expandable_segments": True, "cap_bytes": None, "user_settings": {}}


def test_windows_keeps_fixed_segments_and_is_capped_below_the_free_memory() -> None:
    torch_calls = Recorder()
    setup = configure_allocator(CARD, windows=True, environ={}, allocator=torch_calls)
    assert torch_calls.settings == []
    assert torch_calls.fractions == [(6.5 / 8, "cuda:1")]  # 7 GiB free, less 512 MiB
    assert (setup.expandable_segments, setup.cap_bytes) == (False, 13 * GIB // 2)


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize(
    ("settings", "expandable"),
    [
        (EXPANDABLE, True),
        ("expandable_segments:False", False),
        ("max_split_size_mb:64", False),
        ("max_split_size_mb:64, expandable_segments: True", True),
    ],
)
@pytest.mark.parametrize("windows", [False, True])
def test_the_users_settings_stay_and_are_reported(name: str, settings: str, expandable: bool, windows: bool) -> None:
    torch_calls = Recorder()
    setup = configure_allocator(CARD, windows=windows, environ={name: settings}, allocator=torch_calls)
    assert torch_calls.settings == []
    assert setup.expandable_segments is expandable
    assert setup.user_settings == {name: settings}
    assert len(torch_calls.fractions) == windows  # the cap is ours all the same
    assert json.loads(json.dumps(setup.to_json()))["user_settings"] == {name: settings}


def test_a_fraction_of_the_users_own_is_not_replaced() -> None:
    torch_calls = Recorder()
    environ = {"PYTORCH_ALLOC_CONF": "", "PYTORCH_CUDA_ALLOC_CONF": "per_process_memory_fraction:0.5"}
    setup = configure_allocator(CARD, windows=True, environ=environ, allocator=torch_calls)
    assert torch_calls.fractions == []
    assert setup.cap_bytes is None


def test_of_two_variables_the_first_that_torch_reads_counts() -> None:
    environ = {"PYTORCH_ALLOC_CONF": "expandable_segments:False", "PYTORCH_CUDA_ALLOC_CONF": EXPANDABLE}
    assert not uses_expandable_segments(windows=False, environ=environ)
    assert uses_expandable_segments(windows=False, environ=environ | {"PYTORCH_ALLOC_CONF": ""})


def test_a_cpu_is_left_alone() -> None:
    torch_calls = Recorder()
    card = Card("cpu", "cpu", (0, 0), 8 * GIB)
    setup = configure_allocator(card, windows=True, environ={}, allocator=torch_calls)
    assert (torch_calls.settings, torch_calls.fractions) == ([], [])
    assert setup.to_json() == {"expandable_segments": False, "cap_bytes": None, "user_settings": {}}


def test_the_margin_is_five_percent_of_a_large_card_and_the_cap_never_negative() -> None:
    assert cap_bytes(23 * GIB, 24 * GIB) == 23 * GIB - round(1.2 * GIB)
    assert cap_bytes(100 << 20, 8 * GIB) == 0


@pytest.mark.parametrize(
    ("platform", "version", "expected"),
    [
        ("linux", "Linux version 6.6.87.2-microsoft-standard-WSL2 (root@439a258ad544)", True),
        ("linux", "Linux version 4.4.0-19041-Microsoft (Microsoft@Microsoft.com)", True),
        ("linux", "Linux version 6.8.0-60-generic (buildd@lcy02) #63-Ubuntu SMP", False),
        ("linux", None, False),
        ("win32", None, True),
        ("darwin", None, False),
    ],
)
def test_wsl_is_known_by_its_kernel(platform: str, version: str | None, expected: bool, tmp_path: Path) -> None:
    version_file = tmp_path / "version"
    if version is not None:
        version_file.write_text(version)
    assert is_wsl_or_windows(platform, version_file) is expected


def test_torch_has_the_calls_and_is_given_an_index_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch.cuda.set_per_process_memory_fraction refuses "cuda", so only an index or None may reach it.
    given: list[object] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", given.append)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1, 2) if device == "cuda" else None)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: given.append(device))
    calls = TorchCudaAllocator()
    calls.set_settings(EXPANDABLE)
    assert calls.memory("cuda") == (1, 2)
    calls.set_fraction(0.5, "cuda")
    calls.set_fraction(0.5, "cuda:1")
    assert given == [EXPANDABLE, None, 1]
