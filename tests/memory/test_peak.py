"""The peak probe on a CPU, against an allocation of known size."""

from __future__ import annotations

import torch

from lowmem_grpo.memory.peak import PeakProbe

MIB = 1 << 20


def allocate_and_free(mib: int) -> None:
    block = torch.ones(mib * MIB // 4)
    del block


def test_reset_lowers_the_mark_and_an_allocation_raises_it() -> None:
    probe = PeakProbe(torch.device("cpu"))
    allocate_and_free(200)
    with_block = probe.peak_bytes()
    probe.reset()
    without = probe.peak_bytes()
    assert with_block - without > 150 * MIB
    allocate_and_free(200)
    assert probe.peak_bytes() - without > 150 * MIB


def test_the_mark_holds_until_the_next_reset() -> None:
    probe = PeakProbe(torch.device("cpu"))
    probe.reset()
    before = probe.peak_bytes()
    allocate_and_free(100)
    allocate_and_free(1)
    assert probe.peak_bytes() - before > 80 * MIB
    assert probe.peak_bytes() == probe.peak_bytes()
