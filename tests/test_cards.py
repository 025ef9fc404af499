"""The table of cards, and the card that a plan is made for."""

from __future__ import annotations

import pytest

from lowmem_grpo import catalog
from lowmem_grpo.catalog import CARDS, card_named
from lowmem_grpo.errors import ConfigError
from lowmem_grpo.types import Card

GIB = 2**30

TOTALS_GIB = {
    "rtx3060-12gb": 11.76,
    "rtx4090-24gb": 23.64,
    "rtx5090-32gb": 31.37,
    "t4-16gb": 14.75,
    "l4-24gb": 22.17,
    "a100-80gb": 79.15,
}
"""What torch reports as the memory of such a card, from users' error messages."""


def test_the_figures_agree_with_one_another() -> None:
    for slug, spec in CARDS.items():
        assert slug == f"{spec.model.replace(' ', '')}-{spec.memory_gib}gb"
        assert catalog.known_card(f"NVIDIA {spec.model.upper()}", spec.memory_gib * GIB) is spec
        assert 5 <= spec.tflops <= 1000
        assert 70 <= spec.watts <= 700
        operations_per_byte = spec.tflops * 1e12 / (spec.bandwidth_gb_s * 1e9)
        assert 20 < operations_per_byte < 450, slug
    memory = [spec.memory_gib for spec in CARDS.values()]
    assert memory == sorted(memory)


@pytest.mark.parametrize(
    ("slug", "tflops", "watts"),
    [("rtx3060-12gb", 25.5, 170), ("t4-16gb", 65, 70), ("a100-80gb", 312, 400), ("h100-80gb", 989, 700)],
)
def test_figures_of_data_sheets(slug: str, tflops: float, watts: float) -> None:
    assert (CARDS[slug].tflops, CARDS[slug].watts) == (tflops, watts)


@pytest.mark.parametrize(
    ("slug", "tensor_cores", "boost_mhz"),
    [
        ("rtx3060-12gb", 112, 1777),
        ("rtx3090-24gb", 328, 1695),
        ("rtx4090-24gb", 512, 2520),
        ("rtx5090-32gb", 680, 2407),
    ],
)
def test_arithmetic_of_geforce_cards_sums_in_32_bits(slug: str, tensor_cores: int, boost_mhz: int) -> None:
    # From the RTX 30 on a tensor core of these does 64 multiply-adds a cycle with 32-bit sums, 128 with 16-bit ones.
    assert CARDS[slug].tflops == pytest.approx(tensor_cores * 64 * 2 * boost_mhz * 1e6 / 1e12, rel=0.01)


@pytest.mark.parametrize("slug", TOTALS_GIB)
def test_usable_memory_is_a_little_under_what_torch_reports(slug: str) -> None:
    assert 0.97 * TOTALS_GIB[slug] < CARDS[slug].usable_bytes / GIB < TOTALS_GIB[slug]


def test_usable_memory_by_hand() -> None:
    assert CARDS["rtx3060-12gb"].usable_bytes == int(11.62 * GIB)
    assert CARDS["t4-16gb"].usable_bytes == int((15 * 0.985 - 0.2) * GIB)  # error correction keeps a sixteenth


@pytest.mark.parametrize(
    ("text", "slug"),
    [
        ("rtx3060-12gb", "rtx3060-12gb"),
        ("RTX3060-12GB", "rtx3060-12gb"),
        ("  rtx 3060 12 GB ", "rtx3060-12gb"),
        ("rtx3060_12gib", "rtx3060-12gb"),
        ("rtx3060", "rtx3060-12gb"),
        ("3060", "rtx3060-12gb"),
        ("NVIDIA GeForce RTX 4090", "rtx4090-24gb"),
        ("4060 ti 16gb", "rtx4060ti-16gb"),
        ("NVIDIA GeForce RTX 4060 Laptop GPU", "rtx4060laptop-8gb"),
        ("Tesla T4", "t4-16gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
    ],
)
def test_cards_by_name(text: str, slug: str) -> None:
    spec = CARDS[slug]
    assert card_named(text) == Card(
        slug,
        "cuda",
        spec.capability,
        spec.usable_bytes,
        spec.bandwidth_gb_s * 1e9,
        spec.tflops * 1e12,
        spec.watts,
    )


@pytest.mark.parametrize(
    ("text", "name", "gib", "like"),
    [
        ("12gb", "a 12 GB card", 12, "rtx3060-12gb"),
        ("12", "a 12 GB card", 12, "rtx3060-12gb"),
        ("12 GiB", "a 12 GB card", 12, "rtx3060-12gb"),
        ("12G", "a 12 GB card", 12, "rtx3060-12gb"),
        ("8gb", "an 8 GB card", 8, "rtx3050-8gb"),
        ("16gb", "a 16 GB card", 16, "rtx4060ti-16gb"),  # a T4 has no bfloat16
        ("24gb", "a 24 GB card", 24, "l4-24gb"),
        ("11gb", "an 11 GB card", 11, "rtx3060-12gb"),  # 10 and 12 are as near; the 2080 Ti is older than asked
        ("4", "a 4 GB card", 4, "rtx3060laptop-6gb"),
        ("7.5gb", "a 7.5 GB card", 7.5, "rtx3050-8gb"),
        ("96", "a 96 GB card", 96, "a100-80gb"),
    ],
)
def test_cards_by_size_are_as_slow_as_the_slowest(text: str, name: str, gib: float, like: str) -> None:
    card, spec = card_named(text), CARDS[like]
    assert (card.name, card.device, card.capability) == (name, "cuda", spec.capability)
    assert card.memory_bytes == int((gib * 0.985 - 0.2) * GIB)
    assert (card.bandwidth_bytes_per_s, card.flops_per_s, card.watts) == (
        spec.bandwidth_gb_s * 1e9,
        spec.tflops * 1e12,
        spec.watts,
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("rtx3070-12gb", r"no card called 'rtx3070-12gb' \(did you mean rtx\d+-12gb\?\); write a card as rtx3060-12gb"),
        ("rtx3096", r"no card called 'rtx3096' \(did you mean rtx309"),
        ("banana", r"^There is no card called 'banana'; write a card as rtx3060-12gb, or its memory as 12gb\.$"),
        ("0gb", "no card called '0gb'"),
        ("", "no card called ''"),
        ("gpu", "no card called 'gpu'"),
        ("5000gb", "no card called '5000gb'"),
        ("4060 Ti", r"^There are several cards called '4060 Ti'; write rtx4060ti-8gb or rtx4060ti-16gb\.$"),
        ("a100", r"write a100-40gb or a100-80gb\.$"),
    ],
)
def test_unknown_cards(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        card_named(text)
