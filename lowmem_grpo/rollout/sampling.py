"""Draw one token per row: temperature, filters, and noise that is keyed instead of streamed.

The noise of a token depends only on (seed, step, group, answer, position). Any schedule, wave or batch size
therefore draws from the same random numbers, and a resumed run needs no generator state.

Saves: a draw keeps one copy of the logits in their own dtype. Probabilities add up in fp64 (in fp32 the sum over
150 000 words is off by more than the probability of a rare one), but only the sums of blocks of words do, and the
words of the one block per row that the draw falls into.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lowmem_grpo.types import SamplingParams

__all__ = ["keyed_uniform", "nonfinite_rows", "sample_tokens"]

BLOCK_WORDS = 256
"""Words whose probabilities are summed at once before the draw looks at single ones."""

_MASK = (1 << 64) - 1
_FP64_ROWS = 8  # sum(dtype=float64) copies what it sums


def keyed_uniform(seed: int, step: int, group: int, answer: int, position: int) -> float:
    """A number in (0, 1), the same for the same key on every machine.

    Each word of the key passes through the SplitMix64 finaliser (Steele, Lea and Flood, OOPSLA 2014); the top 52
    bits become the fraction, which keeps it below 1.

    >>> keyed_uniform(0, 1, 2, 3, 4) == keyed_uniform(0, 1, 2, 3, 4) != keyed_uniform(0, 1, 2, 4, 3)
    True
    """
    state = 0
    for word in (seed, step, group, answer, position):
        state = (state + word + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return ((state >> 12) + 0.5) * 2.0**-52


def nonfinite_rows(logits_B_V: torch.Tensor) -> list[int]:
    """The rows, ascending, that hold a NaN or an infinite logit.

    NaN passes through both extremes, so those of each row tell, and no mask of all logits is made.

    >>> nonfinite_rows(torch.tensor([[0.0, 1.0], [0.0, float("nan")], [-float("inf"), 0.0]]))
    [1, 2]
    """
    finite_B = logits_B_V.amin(dim=-1).isfinite() & logits_B_V.amax(dim=-1).isfinite()
    return finite_B.logical_not().nonzero()[:, 0].tolist()


def sample_tokens(
    logits_B_V: torch.Tensor, uniforms_B: Sequence[float], sampling: SamplingParams
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row by inverting the cumulative distribution at `uniforms_B`.

    Returns token ids (B,) and their log-probs (B,) under the full softmax at the temperature, in fp32 or wider; the
    filters top_k, top_p and min_p only restrict what can be drawn. At temperature 0 the token is the argmax and the
    log-prob is that of temperature 1. A logit of -inf is a probability of 0, and such a token is never drawn; rows
    with NaN or inf have no distribution and are the caller's to find, see `nonfinite_rows`.
    """
    logits_B_V = logits_B_V.to(torch.promote_types(logits_B_V.dtype, torch.float32))
    if sampling.temperature == 0:
        # The fused kernel beats logsumexp in time and needs as many bytes.
        tokens_B_1 = logits_B_V.argmax(dim=-1, keepdim=True)
        return tokens_B_1[:, 0], torch.log_softmax(logits_B_V, dim=-1).gather(1, tokens_B_1)[:, 0]
    top_B_1 = logits_B_V.amax(dim=-1, keepdim=True)
    weights_B_V = logits_B_V - top_B_1
    if sampling.temperature != 1:
        weights_B_V.div_(sampling.temperature)
    edges_B_K = _block_edges(weights_B_V.exp_())
    total_B = edges_B_K[:, -1]
    if sampling.top_k or sampling.min_p > 0 or sampling.top_p < 1:
        weights_B_V = _filtered(weights_B_V.double(), sampling)
        edges_B_K = _block_edges(weights_B_V)
    tokens_B_1 = _invert(weights_B_V, edges_B_K, uniforms_B)
    log_weights_B = (logits_B_V.gather(1, tokens_B_1) - top_B_1)[:, 0].double() / sampling.temperature
    return tokens_B_1[:, 0], (log_weights_B - total_B.log()).to(logits_B_V.dtype)


def _block_edges(weights_B_V: torch.Tensor) -> torch.Tensor:
    """What has added up before each block of `BLOCK_WORDS` and, last, in all: (B, blocks + 1) in fp64, from 0."""
    count, rest = divmod(weights_B_V.shape[-1], BLOCK_WORDS)
    whole_B_V, rest_B_V = weights_B_V.split([count * BLOCK_WORDS, rest], dim=-1)
    blocks_B_K_W = whole_B_V.unflatten(-1, (count, BLOCK_WORDS))
    sums_B_K = torch.cat([part.sum(dim=-1, dtype=torch.float64) for part in blocks_B_K_W.split(_FP64_ROWS)])
    rest_B_1 = rest_B_V.sum(dim=-1, keepdim=True, dtype=torch.float64)
    # A rest of no words is a block of weight 0, which is never drawn.
    return torch.cat([torch.zeros_like(rest_B_1), sums_B_K, rest_B_1], dim=-1).cumsum(dim=-1)


def _invert(weights_B_V: torch.Tensor, edges_B_K: torch.Tensor, uniforms_B: Sequence[float]) -> torch.Tensor:
    """The word (B, 1) at which the running sum of each row's weights passes its share `uniforms_B` of their total."""
    shares_B_1 = torch.tensor(uniforms_B, dtype=torch.float64, device=weights_B_V.device)[:, None]
    thresholds_B_1 = _below(shares_B_1 * edges_B_K[:, -1:], edges_B_K[:, -1:])
    # right=True takes the first entry strictly above the threshold: neither block nor word is one of weight 0.
    block_B_1 = torch.searchsorted(edges_B_K, thresholds_B_1, right=True) - 1
    words_B_W = block_B_1 * BLOCK_WORDS + torch.arange(BLOCK_WORDS, device=weights_B_V.device)
    last = weights_B_V.shape[-1] - 1
    inside_B_W = weights_B_V.gather(1, words_B_W.clamp(max=last)).double()
    running_B_W = inside_B_W.masked_fill_(words_B_W > last, 0.0).cumsum(dim=-1)
    thresholds_B_1 = _below(thresholds_B_1 - edges_B_K.gather(1, block_B_1), running_B_W[:, -1:])
    return words_B_W.gather(1, torch.searchsorted(running_B_W, thresholds_B_1, right=True))


def _below(values_B_1: torch.Tensor, totals_B_1: torch.Tensor) -> torch.Tensor:
    """The values, where rounding made one reach its total the number before that: no entry is above the total."""
    return values_B_1.minimum(totals_B_1.nextafter(torch.zeros_like(totals_B_1)))


def _filtered(weights_B_V: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Weights with those of excluded tokens at 0; the likeliest token always stays."""
    if sampling.top_k and sampling.top_k < weights_B_V.shape[-1]:
        smallest_kept_B = weights_B_V.topk(sampling.top_k, dim=-1).values[:, -1:]
        weights_B_V = weights_B_V.where(weights_B_V >= smallest_kept_B, 0.0)
    if sampling.min_p > 0:
        floor_B = sampling.min_p * weights_B_V.max(dim=-1, keepdim=True).values
        weights_B_V = weights_B_V.where(weights_B_V >= floor_B, 0.0)
    if sampling.top_p < 1:
        sorted_B_V, order_B_V = weights_B_V.sort(dim=-1, descending=True, stable=True)
        before_B_V = sorted_B_V.cumsum(dim=-1) - sorted_B_V
        total_B = sorted_B_V.sum(dim=-1, keepdim=True)
        kept_B_V = sorted_B_V.where(before_B_V < sampling.top_p * total_B, 0.0)
        weights_B_V = torch.zeros_like(weights_B_V).scatter(1, order_B_V, kept_B_V)
    return weights_B_V
