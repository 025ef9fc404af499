"""Log-probs of chosen tokens without the logits of all of them.

Saves: the whole logits, N x V numbers (4.64 GiB in fp32 for 8 x 1024 tokens and a vocabulary of 151 936), of which
plain autograd holds several copies. Here `chunk_tokens` rows of logits exist at a time, forward and backward.
Costs: the logits are computed again in the backward: 3 matrix products instead of 2 (with a trained head 4 and 3).
Bytes above inputs and outputs: forward chunk x V x 8 (fp32 logits, their exponentials); backward chunk x V x 4 with an
fp32 head (the gradient replaces the logits in place) and x 6 with a 16-bit one (its 16-bit copy), for a trained head
also its fp32 gradient, V x H x 4. Kept for the backward: the inputs and two fp32 numbers per token.

With x = logits / temperature, t the target and L = logsumexp of x over all words but t:

    logp       = logsigmoid(x_t - L)                 which is -softplus(L - x_t)
    dlogp/dx_t = 1 - p_t = -expm1(logp)
    dlogp/dx_j = -(1 - p_t) exp(x_j - L)             for j other than t

The textbook forms x_t - logsumexp(x) and 1 - exp(logp) round to 0 once p_t is within rounding of 1, and the token loses
its gradient; these keep it. The factor 1 - p_t stays outside the product with the head: 16 bits could not hold it.
A chunked head that never holds the logits is the idea of Cut Cross-Entropy (arXiv 2411.09009).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["chunked_logprobs"]


def chunked_logprobs(
    hidden_N_H: Tensor,
    weight_V_H: Tensor,
    targets_N: Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 256,
    bias_V: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Natural log-prob of each target token and the entropy of its distribution, both (N,), in nats.

    The logits are `hidden @ weight.T + bias` multiplied in the dtype of the weight, then divided by `temperature`, with
    all reductions in fp32 (float64 stays float64). The log-probs carry gradients to `hidden_N_H`, and to the weight and
    the bias where those require them, once; the entropies are detached. Raises ValueError when temperature or
    chunk_tokens is not positive.
    """
    if temperature <= 0 or chunk_tokens < 1:
        raise ValueError(f"temperature and chunk_tokens must be positive, got {temperature} and {chunk_tokens}")
    return _ChunkedLogprobs.apply(hidden_N_H, weight_V_H, bias_V, targets_N, temperature, chunk_tokens)


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_N_H: Tensor,
        weight_V_H: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        temperature: float,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        logprobs_N = hidden_N_H.new_empty(len(hidden_N_H), dtype=_wide(weight_V_H.dtype))
        entropy_N, lse_others_N = torch.empty_like(logprobs_N), torch.empty_like(logprobs_N)
        for rows in _chunks(len(hidden_N_H), chunk_tokens):
            logits_C_V = _logits(hidden_N_H[rows], weight_V_H, bias_V, temperature)
            logprobs_N[rows], entropy_N[rows], lse_others_N[rows] = _reduce_logits_(logits_C_V, targets_N[rows])
            del logits_C_V  # or this chunk is still alive while the next one is computed
        ctx.save_for_backward(hidden_N_H, weight_V_H, bias_V, targets_N, logprobs_N, lse_others_N)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs_N: Tensor, grad_entropy_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_N_H, weight_V_H, bias_V, targets_N, logprobs_N, lse_others_N = ctx.saved_tensors
        wide = logprobs_N.dtype
        scale_N = grad_logprobs_N * -torch.expm1(logprobs_N) / ctx.temperature
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden_N_H = torch.empty_like(hidden_N_H) if needs_hidden else None
        grad_weight_V_H = torch.zeros_like(weight_V_H, dtype=wide) if needs_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=wide) if needs_bias else None
        for rows in _chunks(len(hidden_N_H), ctx.chunk_tokens):
            grad_C_V = _logits(hidden_N_H[rows], weight_V_H, bias_V, ctx.temperature)
            _unit_gradient_(grad_C_V, targets_N[rows], lse_others_N[rows])
            if grad_hidden_N_H is not None:
                product_C_H = grad_C_V.to(weight_V_H.dtype) @ weight_V_H
                grad_hidden_N_H[rows] = product_C_H.to(wide) * scale_N[rows, None]
            if grad_weight_V_H is not None:
                grad_weight_V_H.addmm_(grad_C_V.T, hidden_N_H[rows].to(wide) * scale_N[rows, None])
            if grad_bias_V is not None:
                grad_bias_V.addmv_(grad_C_V.T, scale_N[rows])
            del grad_C_V
        return (
            grad_hidden_N_H,
            None if grad_weight_V_H is None else grad_weight_V_H.to(weight_V_H.dtype),
            None if grad_bias_V is None else grad_bias_V.to(bias_V.dtype),
            None,
            None,
            None,
        )


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _chunks(count: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, count, size))


def _logits(hidden_C_H: Tensor, weight_V_H: Tensor, bias_V: Tensor | None, temperature: float) -> Tensor:
    """The tempered logits of one chunk in fp32 or float64, in memory of their own that the caller may overwrite."""
    logits_C_V = F.linear(hidden_C_H.to(weight_V_H.dtype), weight_V_H, bias_V).to(_wide(weight_V_H.dtype))
    return logits_C_V if temperature == 1.0 else logits_C_V.div_(temperature)


def _reduce_logits_(logits_C_V: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob of the target, entropy, logsumexp of the other words, each (C,). Overwrites the logits."""
    targets_C_1 = targets_C.unsqueeze(1)
    target_C = logits_C_V.gather(1, targets_C_1).squeeze(1)
    top_C_1 = logits_C_V.scatter_(1, targets_C_1, -torch.inf).amax(1, keepdim=True)
    exp_C_V = logits_C_V.sub_(top_C_1).exp()
    logits_C_V.scatter_(1, targets_C_1, 0.0)  # exp is 0 there, and 0 * -inf would be NaN
    total_C = exp_C_V.sum(1)
    lse_others_C = total_C.log() + top_C_1.squeeze(1)
    entropy_others_C = total_C.log() - exp_C_V.mul_(logits_C_V).sum(1) / total_C
    margin_C = target_C - lse_others_C
    logp_C, log_rest_C = F.logsigmoid(margin_C), F.logsigmoid(-margin_C)
    # Chain rule of entropy: first "the target or not", then which of the others.
    entropy_C = -logp_C.exp() * logp_C + log_rest_C.exp() * (entropy_others_C - log_rest_C)
    return logp_C, entropy_C, lse_others_C


def _unit_gradient_(logits_C_V: Tensor, targets_C: Tensor, lse_others_C: Tensor) -> None:
    """Turn logits into dlogp/dlogits divided by (1 - p_t), in place: 1 at the target, minus softmax over the others."""
    logits_C_V.sub_(lse_others_C.unsqueeze(1)).exp_().neg_()
    logits_C_V.scatter_(1, targets_C.unsqueeze(1), 1.0)
