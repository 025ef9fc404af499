"""Keyed noise and the draw of a token, on distributions small enough to work out by hand."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import lowmem_grpo.rollout.sampling
from lowmem_grpo.memory.live import LiveBytes
from lowmem_grpo.rollout import keyed_uniform, sample_tokens
from lowmem_grpo.rollout.sampling import BLOCK_WORDS, nonfinite_rows
from lowmem_grpo.types import SamplingParams

WORD = 1 << 64
BELOW_ONE = 1 - 2.0**-53
"""The largest float64 below 1, which is the largest number `keyed_uniform` can return."""


def splitmix(value: int) -> int:
    """The SplitMix64 finaliser, written with remainders instead of masks."""
    value = (value ^ value // 2**30) * 0xBF58476D1CE4E5B9 % WORD
    value = (value ^ value // 2**27) * 0x94D049BB133111EB % WORD
    return value ^ value // 2**31


def unsplitmix(value: int) -> int:
    """The inverse of `splitmix`: xor-shifts are undone by repeating them, odd factors have an inverse modulo 2^64."""
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        unshifted = value
        for _ in range(3):
            unshifted = value ^ unshifted >> shift
        value = unshifted * pow(factor, -1, WORD) % WORD
    return value


def uniform_twin(*key: int) -> float:
    state = 0
    for word in key:
        state = splitmix((state + word + 0x9E3779B97F4A7C15) % WORD)
    return (2 * (state // 2**12) + 1) / 2**53


def shares(probabilities: list[float], sampling: SamplingParams, steps: int = 2000) -> list[float]:
    """How often each token is drawn when the uniforms run evenly through (0, 1)."""
    logits_B_V = torch.tensor(probabilities, dtype=torch.float64).log().expand(steps, -1)
    tokens_B, logprobs_B = sample_tokens(logits_B_V, [(i + 0.5) / steps for i in range(steps)], sampling)
    expected = torch.tensor(probabilities, dtype=torch.float64).log()
    torch.testing.assert_close(logprobs_B, expected[tokens_B], rtol=0, atol=1e-12)
    return (torch.bincount(tokens_B, minlength=len(probabilities)) / steps).tolist()


def plain_draw(logits_B_V: torch.Tensor, uniforms_B: list[float], temperature: float) -> tuple[list[int], torch.Tensor]:
    """Tokens and log-probs by one running sum in fp64 over the whole of each row."""
    weights_B_V = ((logits_B_V - logits_B_V.amax(1, keepdim=True)) / temperature).exp().double()
    running_B_V = weights_B_V.cumsum(1)
    tokens = [
        next(v for v, passed in enumerate(running.tolist()) if passed > uniform * running[-1].item())
        for running, uniform in zip(running_B_V, uniforms_B, strict=True)
    ]
    rows_B = torch.arange(len(tokens))
    return tokens, (weights_B_V[rows_B, tokens] / running_B_V[:, -1]).log()


def uniforms_of(count: int, key: int = 0) -> list[float]:
    return [keyed_uniform(key, 0, 0, 0, i) for i in range(count)]


PLAIN = SamplingParams(max_new_tokens=1)
SIZES = (1, 2, BLOCK_WORDS - 1, BLOCK_WORDS, BLOCK_WORDS + 1, 2 * BLOCK_WORDS, 1000)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ((0, 0, 0, 0, 0), 0.47141042966848035),
        ((0, 1, 2, 3, 4), 0.8799769490956181),
        ((1234, 56, 7, 8, 910), 0.337056234194825),
    ],
)
def test_keyed_uniform_is_pinned(key: tuple[int, int, int, int, int], value: float) -> None:
    assert keyed_uniform(*key) == value == uniform_twin(*key)


@given(st.tuples(*[st.integers(0, 2**40)] * 5))
def test_keyed_uniform_equals_the_twin(key: tuple[int, int, int, int, int]) -> None:
    assert keyed_uniform(*key) == uniform_twin(*key)


@pytest.mark.parametrize(("state", "value"), [(0, 2.0**-53), (WORD - 1, BELOW_ONE)])
def test_the_extremes_stay_inside_the_open_interval(state: int, value: float) -> None:
    before = 0
    for word in (11, 22, 33, 44):
        before = splitmix((before + word + 0x9E3779B97F4A7C15) % WORD)
    last_word = (unsplitmix(state) - before - 0x9E3779B97F4A7C15) % WORD
    assert keyed_uniform(11, 22, 33, 44, last_word) == value
    assert 0 < value < 1


def test_every_word_of_the_key_matters_and_so_does_its_place() -> None:
    base = (3, 5, 7, 11, 13)
    keys = [base] + [tuple(w + (i == j) for j, w in enumerate(base)) for i in range(5)] + [base[::-1]]
    assert len({keyed_uniform(*key) for key in keys}) == 7


@pytest.mark.parametrize("axis", range(5))
def test_neighbouring_keys_are_uniform_and_uncorrelated(axis: int) -> None:
    values = [keyed_uniform(*(i if a == axis else 1 for a in range(5))) for i in range(4000)]
    counts = [0] * 20
    for value in values:
        counts[int(20 * value)] += 1
    assert stats.chisquare(counts).pvalue > 0.001
    assert abs(stats.pearsonr(values[1:], values[:-1]).statistic) < 4 / math.sqrt(4000)


@pytest.mark.parametrize(
    ("uniform", "token"),
    [(2.0**-53, 0), (0.0999999, 0), (0.1000001, 1), (0.2999999, 1), (0.3000001, 2), (0.5999999, 2), (BELOW_ONE, 3)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_token_inverts_the_cumulative_distribution(uniform: float, token: int, dtype: torch.dtype) -> None:
    probabilities = [0.1, 0.2, 0.3, 0.4]
    logits_B_V = torch.tensor([probabilities], dtype=dtype).log() + 5
    tokens_B, logprobs_B = sample_tokens(logits_B_V, [uniform], PLAIN)
    assert tokens_B.tolist() == [token]
    assert logprobs_B.dtype == dtype
    assert logprobs_B.item() == pytest.approx(math.log(probabilities[token]), abs=2e-6)


def test_a_uniform_on_a_boundary_takes_the_token_above_it() -> None:
    tokens_B, _ = sample_tokens(torch.zeros(3, 4), [0.25, 0.5, 0.75], PLAIN)
    assert tokens_B.tolist() == [1, 2, 3]


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits_V = torch.tensor([-math.inf, 0.0, -math.inf, 0.0, -math.inf])
    tokens_B, logprobs_B = sample_tokens(logits_V.expand(4, -1), [2.0**-53, 0.4999, 0.5, BELOW_ONE], PLAIN)
    assert tokens_B.tolist() == [1, 1, 3, 3]
    torch.testing.assert_close(logprobs_B, torch.full((4,), -math.log(2)))


def test_rows_are_drawn_apart() -> None:
    logits_B_V = torch.tensor([[0.9, 0.1], [0.1, 0.9]]).log()
    tokens_B, logprobs_B = sample_tokens(logits_B_V, [0.5, 0.5], PLAIN)
    assert tokens_B.tolist() == [0, 1]
    torch.testing.assert_close(logprobs_B, torch.tensor([0.9, 0.9]).log())


def test_a_rare_token_of_a_large_vocabulary_keeps_its_share() -> None:
    # One token of 1e-9 among 100 000: a running sum in fp32 could not see it.
    probs_V = torch.full((100_000,), (1 - 1e-9) / 99_999, dtype=torch.float64)
    probs_V[50_000] = 1e-9
    below = probs_V[:50_000].sum().item()
    uniforms = [below - 1e-10, below + 4e-10, below + 1.1e-9]
    tokens_B, _ = sample_tokens(probs_V.log().expand(3, -1), uniforms, PLAIN)
    assert tokens_B.tolist() == [49_999, 50_000, 50_001]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-6), (torch.float64, 1e-13)])
def test_a_draw_by_blocks_equals_one_running_sum(
    size: int, temperature: float, dtype: torch.dtype, atol: float
) -> None:
    logits_B_V = torch.randn(200, size, generator=torch.Generator().manual_seed(size), dtype=dtype)
    uniforms = uniforms_of(200, size)
    tokens_B, logprobs_B = sample_tokens(logits_B_V, uniforms, SamplingParams(1, temperature=temperature))
    expected, logprobs_expected_B = plain_draw(logits_B_V, uniforms, temperature)
    assert tokens_B.tolist() == expected
    assert logprobs_B.dtype == dtype
    torch.testing.assert_close(logprobs_B.double(), logprobs_expected_B, rtol=0, atol=atol)


def test_logits_of_sixteen_bits_give_log_probs_of_fp32() -> None:
    logits_B_V = torch.tensor([[2.0, 1.0, 0.0, -1.0]], dtype=torch.bfloat16)
    for temperature in (0.0, 1.0):
        tokens_B, logprobs_B = sample_tokens(logits_B_V, [0.1], SamplingParams(1, temperature=temperature))
        assert (tokens_B.item(), logprobs_B.dtype) == (0, torch.float32)
        assert logprobs_B.item() == pytest.approx(-0.440190, abs=1e-6)


@pytest.mark.parametrize("block", [1, 2, 3, 4, 5, 9, 10])
def test_tokens_at_the_borders_of_blocks(block: int) -> None:
    # weights 0 1 2 | 0 0 4 | 0 0 0 | 1 add up to 8; the bars are the borders of blocks of 3
    weights_V = torch.tensor([0, 1, 2, 0, 0, 4, 0, 0, 0, 1], dtype=torch.float64)
    cases = {2.0**-53: 1, 0.1249: 1, 0.125: 2, 0.3749: 2, 0.375: 5, 0.8749: 5, 0.875: 9, BELOW_ONE: 9}
    with mock.patch.object(lowmem_grpo.rollout.sampling, "BLOCK_WORDS", block):
        tokens_B, logprobs_B = sample_tokens(weights_V.log().expand(len(cases), -1), list(cases), PLAIN)
    assert tokens_B.tolist() == list(cases.values())
    torch.testing.assert_close(logprobs_B, (weights_V[tokens_B] / 8).log(), rtol=0, atol=1e-14)


@pytest.mark.parametrize("size", [size for size in SIZES if size > 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_uniforms_take_the_first_and_the_last_token_that_can_be_drawn(size: int, dtype: torch.dtype) -> None:
    logits_V = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=dtype)
    support = [3, *range(100, min(size, BLOCK_WORDS) - 2), *range(BLOCK_WORDS + 7, size - 5)]
    logits_V[[v for v in range(size) if v not in support]] = -math.inf
    tokens_B, _ = sample_tokens(logits_V.expand(4, -1), [0.0, 2.0**-53, BELOW_ONE, 1.0], PLAIN)
    assert tokens_B.tolist() == [support[0], support[0], support[-1], support[-1]]


@pytest.mark.parametrize("size", SIZES)
def test_no_rounding_leads_past_the_last_word(size: int) -> None:
    logits_B_V = torch.randn(300, size, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
    tokens_B, _ = sample_tokens(logits_B_V, [BELOW_ONE] * 300, PLAIN)
    assert tokens_B.tolist() == [size - 1] * 300


@given(
    weights=st.lists(st.sampled_from([0.0, 1e-30, 0.1, 1 / 3, 0.7, 1.0]), min_size=1, max_size=20).filter(any),
    block=st.integers(1, 21),
    word=st.integers(0, 20),
    ulps=st.integers(-2, 2),
)
def test_a_uniform_within_rounding_of_a_border(weights: list[float], block: int, word: int, ulps: int) -> None:
    """Never a token of probability 0, and one whose share of (0, 1) has the uniform within rounding."""
    total = math.fsum(weights)
    uniform = math.fsum(weights[:word]) / total + ulps * 2.0**-53
    uniform = min(max(uniform, 2.0**-53), BELOW_ONE)
    logits_B_V = torch.tensor([weights], dtype=torch.float64).log()
    with mock.patch.object(lowmem_grpo.rollout.sampling, "BLOCK_WORDS", block):
        token = sample_tokens(logits_B_V, [uniform], PLAIN)[0].item()
    assert weights[token] > 0
    assert math.fsum(weights[:token]) / total - 1e-14 < uniform < math.fsum(weights[: token + 1]) / total + 1e-14


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("sampling", [PLAIN, SamplingParams(1, temperature=0.7, top_k=40, top_p=0.9, min_p=0.02)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_alone_and_among_others_gives_the_same_bits(
    size: int, sampling: SamplingParams, dtype: torch.dtype
) -> None:
    logits_B_V = torch.randn(19, size, generator=torch.Generator().manual_seed(1), dtype=dtype)
    uniforms = uniforms_of(19)
    tokens_B, logprobs_B = sample_tokens(logits_B_V, uniforms, sampling)
    for rows in (1, 2, 7):
        parts = [
            sample_tokens(logits_B_V[i : i + rows].clone(), uniforms[i : i + rows], sampling)
            for i in range(0, 19, rows)
        ]
        assert torch.equal(torch.cat([tokens for tokens, _ in parts]), tokens_B)
        assert torch.equal(torch.cat([logprobs for _, logprobs in parts]), logprobs_B)


def test_frequencies_over_several_blocks() -> None:
    """20 000 keyed draws from 600 words, of every probability between 2^-4 and 0."""
    logits_V = torch.linspace(0, -12, 600)
    logits_V[[255, 256, 599]] = -math.inf
    tokens_B, _ = sample_tokens(logits_V.expand(20_000, -1), uniforms_of(20_000), PLAIN)
    counts_V = torch.bincount(tokens_B, minlength=600).double()
    expected_V = torch.softmax(logits_V.double(), 0) * 20_000
    assert counts_V[expected_V == 0].sum() == 0
    # classes of at least 5 expected draws, as the test wants them
    often_V = expected_V >= 5
    observed = [*counts_V[often_V].tolist(), counts_V[~often_V].sum().item()]
    expected = [*expected_V[often_V].tolist(), expected_V[~often_V].sum().item()]
    assert stats.chisquare(observed, expected).pvalue > 0.001


def test_a_draw_needs_one_copy_of_the_logits() -> None:
    logits_B_V = torch.randn(16, 20_000)
    with LiveBytes() as live:
        sample_tokens(logits_B_V, uniforms_of(16), SamplingParams(1, temperature=0.7))
    assert logits_B_V.nbytes <= live.peak_bytes < 1.25 * logits_B_V.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("word", [0, 500, 999])
def test_rows_with_a_logit_that_is_not_finite_are_named(dtype: torch.dtype, wrong: float, word: int) -> None:
    logits_B_V = torch.randn(6, 1000).to(dtype)
    assert nonfinite_rows(logits_B_V) == []
    logits_B_V[[1, 4], word] = wrong
    logits_B_V[4, 3] = -math.inf
    assert nonfinite_rows(logits_B_V) == [1, 4]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.4, 0.3, 0.2, 0.1]),
        ({"top_k": 1}, [1, 0, 0, 0]),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_k": 4}, [0.4, 0.3, 0.2, 0.1]),
        ({"top_k": 50}, [0.4, 0.3, 0.2, 0.1]),
        ({"top_p": 0.01}, [1, 0, 0, 0]),  # the likeliest stays even where it alone is above top_p
        ({"top_p": 0.39}, [1, 0, 0, 0]),
        ({"top_p": 0.41}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.69}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.71}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"min_p": 0.6}, [4 / 7, 3 / 7, 0, 0]),  # floor .24
        ({"min_p": 0.2}, [0.4, 0.3, 0.2, 0.1]),  # floor .08
        ({"min_p": 1.0}, [1, 0, 0, 0]),
        ({"top_k": 3, "top_p": 0.5}, [4 / 7, 3 / 7, 0, 0]),  # of .9: .4, then .7 >= .45
        ({"top_k": 2, "top_p": 0.5}, [1, 0, 0, 0]),  # of .7: .4 >= .35
    ],
)
def test_filters_restrict_the_draw_and_not_the_log_prob(options: dict[str, float], expected: list[float]) -> None:
    sampling = SamplingParams(max_new_tokens=1, **options)  # type: ignore[arg-type]
    assert shares([0.4, 0.3, 0.2, 0.1], sampling) == pytest.approx(expected, abs=1e-3)


def test_filters_work_on_any_order_of_the_vocabulary() -> None:
    assert shares([0.1, 0.4, 0.2, 0.3], SamplingParams(1, top_p=0.69)) == pytest.approx([0, 4 / 7, 0, 3 / 7], abs=1e-3)


def test_top_k_keeps_ties() -> None:
    assert shares([0.25, 0.25, 0.4, 0.1], SamplingParams(1, top_k=2)) == pytest.approx(
        [0.25 / 0.9, 0.25 / 0.9, 0.4 / 0.9, 0], abs=1e-3
    )


@pytest.mark.parametrize(
    ("logits", "temperature", "token", "logprob"),
    [
        ([2.0, 1.0, 0.0, -1.0], 0.6, 0, -0.208060),
        ([2.0, 1.0, 0.0, -1.0], 1.0, 0, -0.440190),
        ([2.0, 0.0, 0.0], 0.5, 0, -0.0360),
        ([2.0, 0.0, 0.0], 0.5, 2, -4.0360),
    ],
)
def test_log_probs_are_those_of_the_temperature(
    logits: list[float], temperature: float, token: int, logprob: float
) -> None:
    uniform = 1e-6 if token == 0 else 1 - 1e-6
    tokens_B, logprobs_B = sample_tokens(torch.tensor([logits]), [uniform], SamplingParams(1, temperature=temperature))
    assert tokens_B.tolist() == [token]
    assert logprobs_B.item() == pytest.approx(logprob, abs=5e-5 if len(logits) == 3 else 2e-6)


def test_temperature_zero_takes_the_likeliest_whatever_the_noise() -> None:
    logits_B_V = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 0.0, 3.0, 3.0]])
    for uniform in (2.0**-53, 0.5, BELOW_ONE):
        tokens_B, logprobs_B = sample_tokens(logits_B_V, [uniform] * 2, SamplingParams(1, temperature=0.0, top_k=1))
        assert tokens_B.tolist() == [0, 2]  # the first of equals
        # -log(2 + 2 e^-3) for the second row
        assert logprobs_B.tolist() == pytest.approx([-0.440190, -math.log(2 + 2 * math.exp(-3))], abs=1e-6)


@given(
    logits=st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=12),
    uniform=st.floats(2.0**-53, BELOW_ONE),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([0.2, 0.8, 1.0]),
    min_p=st.sampled_from([0.0, 0.3]),
)
def test_a_drawn_token_is_one_that_all_filters_allow(
    logits: list[float], uniform: float, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    sampling = SamplingParams(1, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    tokens_B, logprobs_B = sample_tokens(torch.tensor([logits], dtype=torch.float64), [uniform], sampling)
    token = tokens_B.item()
    weights = [math.exp((value - max(logits)) / temperature) for value in logits]
    better = [w for w in weights if w > weights[token] * (1 + 1e-12)]
    if top_k:
        assert len(better) < top_k
    assert weights[token] >= min_p * max(weights) * (1 - 1e-12)
    assert sum(better) < top_p * sum(weights) * (1 + 1e-12)
    assert logprobs_B.item() == pytest.approx(math.log(weights[token] / sum(weights)), abs=1e-9)
