"""Draw one token per row: temperature, filters, and noise that is keyed instead of streamed.

The noise of a token depends only on (seed, step, group, answer, position). Any schedule, wave or batch size
therefore draws from the same random numbers, and a resumed run needs no generator state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lowmem_grpo.types import SamplingParams

__all__ = ["keyed_uniform", "sample_tokens"]

_MASK = (1 << 64) - 1


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


def sample_tokens(
    logits_B_V: torch.Tensor, uniforms_B: Sequence[float], sampling: SamplingParams
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row by inverting the cumulative distribution at `uniforms_B`.

    Returns token ids (B,) and their log-probs (B,) under the full softmax at the temperature, in fp32 or wider; the
    filters top_k, top_p and min_p only restrict what can be drawn. At temperature 0 the token is the argmax and the
    log-prob is that of temperature 1.
    """
    if sampling.temperature == 0:
        logprobs_B_V = torch.log_softmax(logits_B_V, dim=-1)
        tokens_B = logprobs_B_V.argmax(dim=-1)
        return tokens_B, logprobs_B_V.gather(1, tokens_B[:, None])[:, 0]
    logprobs_B_V = torch.log_softmax(logits_B_V / sampling.temperature, dim=-1)
    # fp64: in fp32 the sum over 150 000 entries is off by more than the probability of a rare token.
    probs_B_V = _filtered(logprobs_B_V.double().exp(), sampling)
    cumulative_B_V = probs_B_V.cumsum(dim=-1)
    total_B = cumulative_B_V[:, -1]
    thresholds_B = torch.tensor(uniforms_B, dtype=torch.float64, device=logits_B_V.device) * total_B
    # The product may round up to the total, above which there is no entry.
    thresholds_B = thresholds_B.minimum(total_B.nextafter(torch.zeros_like(total_B)))
    # right=True takes the first entry strictly above the threshold, which is never one of probability 0.
    tokens_B = torch.searchsorted(cumulative_B_V, thresholds_B[:, None], right=True)[:, 0]
    return tokens_B, logprobs_B_V.gather(1, tokens_B[:, None])[:, 0]


def _filtered(probs_B_V: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Probabilities with the excluded tokens at 0, not normalised again; the likeliest token always stays."""
    if sampling.top_k and sampling.top_k < probs_B_V.shape[-1]:
        smallest_kept_B = probs_B_V.topk(sampling.top_k, dim=-1).values[:, -1:]
        probs_B_V = probs_B_V.where(probs_B_V >= smallest_kept_B, 0.0)
    if sampling.min_p > 0:
        floor_B = sampling.min_p * probs_B_V.max(dim=-1, keepdim=True).values
        probs_B_V = probs_B_V.where(probs_B_V >= floor_B, 0.0)
    if sampling.top_p < 1:
        sorted_B_V, order_B_V = probs_B_V.sort(dim=-1, descending=True, stable=True)
        before_B_V = sorted_B_V.cumsum(dim=-1) - sorted_B_V
        total_B = sorted_B_V.sum(dim=-1, keepdim=True)
        kept_B_V = sorted_B_V.where(before_B_V < sampling.top_p * total_B, 0.0)
        probs_B_V = torch.zeros_like(probs_B_V).scatter(1, order_B_V, kept_B_V)
    return probs_B_V
