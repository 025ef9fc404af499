"""Log-probs of chosen tokens without the logits of all of them.

Saves: the whole logits, N x V numbers (4.64 GiB in fp32 for 8 x 1024 tokens and a vocabulary of 151 936), of which
plain autograd holds several copies. Here `chunk_tokens` rows of logits exist at a time, forward and backward.
Costs: with a frozen head nothing, the 2 matrix products of plain autograd: the gradient of a log-prob is known up to
one factor per token, so the forward already multiplies it with the head (1 product where nothing needs a gradient).
For a trained head the logits are computed again in the backward: 4 products instead of 3.
Bytes above inputs and outputs, frozen head: forward chunk x V x 8 (fp32 logits, their exponentials, then the gradient
and its 16-bit copy), backward none. Trained head: the same forward; backward chunk x V x 4 with an fp32 head (the
gradient replaces the logits in place), x 6 with a 16-bit one, x 8 with a softcap, and its fp32 gradient, V x H x 4.
Kept for the backward, frozen head: N x H numbers in the head's dtype in place of the hidden states, and one fp32 number
per token; trained head: the inputs and two fp32 numbers per token.
A hidden state that predicts K tokens (answers that part there) costs one row of logits, not K: with a frozen head. Its
backward then holds up to chunk x H x 8 more, and kept are K numbers per hidden state (12 bytes with the tokens
themselves and a softcap 16), K the most that one of them predicts. A trained head computes every token on its own.

With raw logits y, x = y / temperature (capped: x = cap tanh(y / cap) / temperature), t the target and L = logsumexp of
x over all words but t:

    logp       = logsigmoid(x_t - L)                 which is -softplus(L - x_t)
    dlogp/dx_t = 1 - p_t = -expm1(logp)
    dlogp/dx_j = -(1 - p_t) exp(x_j - L)             for j other than t
    dx/dy      = (1 - tanh(y / cap)^2) / temperature

With several targets t of one hidden state, m the likeliest of them and g_t what comes from above:

    sum over t of g_t dlogp_t/dx = (sum of g_t) dlogp_m/dx + sum over t of g_t (e_t - e_m)

    and logp_t = x_t - (x_m - logp_m), exact enough since no other target is likelier than 1/2.

The textbook forms x_t - logsumexp(x) and 1 - exp(logp) round to 0 once p_t is within rounding of 1, and the token loses
its gradient; these keep it. The factor 1 - p_t stays outside the product with the head: 16 bits could not hold it.
A chunked head that never holds the logits is the idea of Cut Cross-Entropy (arXiv 2411.09009), the gradient made in
the forward that of Liger Kernel (arXiv 2410.10989), the softcap that of Gemma 2 (arXiv 2408.00118).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["chunked_logprobs"]


def chunked_logprobs(
    hidden_N_H: Tensor,
    weight_V_H: Tensor,
    targets_M: Tensor,
    *,
    index_M: Tensor | None = None,
    temperature: float = 1.0,
    chunk_tokens: int = 256,
    bias_V: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Natural log-prob of each target token and the entropy of its distribution, both (M,), in nats.

    `index_M` says which hidden state predicts each target, each hidden state at least one; without it every hidden
    state predicts one, M = N. The logits are `hidden @ weight.T + bias` multiplied in the dtype of the weight, bent to
    `softcap * tanh(logits / softcap)` where there is a softcap, then divided by `temperature`, with all that follows
    the product in fp32 (float64 stays float64). The log-probs carry gradients to `hidden_N_H`, and to the weight and
    the bias where those require them, once; the entropies are detached. Raises ValueError when temperature,
    chunk_tokens or softcap is not positive.
    """
    if temperature <= 0 or chunk_tokens < 1 or (softcap is not None and softcap <= 0):
        raise ValueError(
            "temperature, chunk_tokens and softcap must be positive, "
            f"got temperature={temperature}, chunk_tokens={chunk_tokens} and softcap={softcap}"
        )
    form = _Form(temperature, softcap, chunk_tokens)
    trains_head = weight_V_H.requires_grad or (bias_V is not None and bias_V.requires_grad)
    if torch.is_grad_enabled() and trains_head:
        rows_M_H = hidden_N_H if index_M is None else hidden_N_H[index_M]
        return _TrainedHead.apply(rows_M_H, weight_V_H, bias_V, targets_M, form)
    if index_M is None:
        logprobs_N_1, entropy_N = _frozen_logprobs(hidden_N_H, weight_V_H, bias_V, targets_M[:, None], form)
        return logprobs_N_1.squeeze(1), entropy_N
    targets_N_K, column_M = _targets_of_rows(targets_M, index_M, len(hidden_N_H))
    logprobs_N_K, entropy_N = _frozen_logprobs(hidden_N_H, weight_V_H, bias_V, targets_N_K, form)
    return logprobs_N_K[index_M, column_M], entropy_N[index_M]


def _frozen_logprobs(
    hidden_N_H: Tensor, weight_V_H: Tensor, bias_V: Tensor | None, targets_N_K: Tensor, form: _Form
) -> tuple[Tensor, Tensor]:
    if torch.is_grad_enabled() and hidden_N_H.requires_grad:
        return _FrozenHead.apply(hidden_N_H, weight_V_H, bias_V, targets_N_K, form)
    scores = _forward(hidden_N_H, weight_V_H, bias_V, targets_N_K, form)
    return scores.logprobs_N_K, scores.entropy_N


def _targets_of_rows(targets_M: Tensor, index_M: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The targets of each row side by side (rows, K), the last of a row repeated, and the column of each target."""
    counts_N = torch.bincount(index_M, minlength=rows)
    starts_N = counts_N.cumsum(0) - counts_N
    order_M = index_M.argsort(stable=True)
    column_M = torch.empty_like(index_M)
    column_M[order_M] = torch.arange(len(index_M), device=index_M.device) - starts_N[index_M[order_M]]
    width = int(counts_N.max()) if rows else 1
    columns_N_K = torch.arange(width, device=index_M.device).minimum(counts_N[:, None] - 1)
    return targets_M[order_M][starts_N[:, None] + columns_N_K], column_M


@dataclass(frozen=True)
class _Form:
    """How the product with the head becomes logits, and how many rows of them exist at a time."""

    temperature: float
    softcap: float | None
    chunk_tokens: int

    def chunks(self, count: int) -> Iterator[slice]:
        return (slice(start, start + self.chunk_tokens) for start in range(0, count, self.chunk_tokens))

    def bend_(self, logits_C_V: Tensor) -> Tensor:
        """The softcap and the temperature, in place."""
        if self.softcap is not None:
            logits_C_V.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits_C_V if self.temperature == 1.0 else logits_C_V.div_(self.temperature)

    def slope(self, bent_C_V: Tensor, lowered_by: Tensor | float) -> Tensor | None:
        """The factor 1 - tanh^2 of the softcap at bent logits that were lowered by so much; None without a softcap."""
        if self.softcap is None:
            return None
        return bent_C_V.add(lowered_by).mul_(self.temperature / self.softcap).square_().neg_().add_(1.0)


class _FrozenHead(torch.autograd.Function):
    """Gradient for the hidden states only, its product with the head made in the forward."""

    @staticmethod
    def forward(
        ctx: Any, hidden_N_H: Tensor, weight_V_H: Tensor, bias_V: Tensor | None, targets_N_K: Tensor, form: _Form
    ) -> tuple[Tensor, Tensor]:
        # In the head's dtype, in which the product comes out: a narrower one would round it a second time.
        product_N_H = torch.empty_like(hidden_N_H, dtype=weight_V_H.dtype)
        scores = _forward(hidden_N_H, weight_V_H, bias_V, targets_N_K, form, product_N_H)
        # Where every hidden state has one target, that is its likeliest, and nothing more need be kept.
        several = (weight_V_H, targets_N_K, scores.likeliest_N_1, scores.slope_N_K) if targets_N_K.shape[1] > 1 else ()
        ctx.save_for_backward(product_N_H, scores.logprobs_N_K, *several)
        ctx.form, ctx.hidden_dtype = form, hidden_N_H.dtype
        ctx.mark_non_differentiable(scores.entropy_N)
        return scores.logprobs_N_K, scores.entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs_N_K: Tensor, grad_entropy_N: Tensor) -> tuple[Tensor | None, ...]:
        product_N_H, logprobs_N_K, *several = ctx.saved_tensors
        logprobs_N_1 = logprobs_N_K
        if several:
            weight_V_H, targets_N_K, likeliest_N_1, slope_N_K = several
            logprobs_N_1 = logprobs_N_K.gather(1, likeliest_N_1)
        scale_N = _scale(grad_logprobs_N_K.sum(1), logprobs_N_1.squeeze(1), ctx.form.temperature)
        grad_hidden_N_H = torch.empty_like(product_N_H, dtype=ctx.hidden_dtype)
        # Mixed dtypes multiply in the wider one, and only the result is rounded.
        torch.mul(product_N_H, scale_N[:, None], out=grad_hidden_N_H)
        if several:
            share_N_K = _shares(grad_logprobs_N_K / ctx.form.temperature, targets_N_K, likeliest_N_1, slope_N_K)
            forks_R = share_N_K.any(dim=1).nonzero().squeeze(1)
            for chunk in ctx.form.chunks(len(forks_R)):
                rows_C = forks_R[chunk]
                grad_C_H = product_N_H[rows_C] * scale_N[rows_C, None]
                for targets_C, share_C in zip(targets_N_K[rows_C].T, share_N_K[rows_C].T, strict=True):
                    grad_C_H.addcmul_(weight_V_H[targets_C], share_C[:, None])
                grad_hidden_N_H[rows_C] = grad_C_H.to(ctx.hidden_dtype)
        return grad_hidden_N_H, None, None, None, None


def _shares(grad_N_K: Tensor, targets_N_K: Tensor, likeliest_N_1: Tensor, slope_N_K: Tensor | None) -> Tensor:
    """How often the head's row of each target counts beside the product: what the others get the likeliest gives."""
    is_likeliest_N_K = targets_N_K == targets_N_K.gather(1, likeliest_N_1)
    share_N_K = grad_N_K.masked_fill(is_likeliest_N_K, 0.0)
    share_N_K.scatter_(1, likeliest_N_1, -share_N_K.sum(1, keepdim=True))
    return share_N_K if slope_N_K is None else share_N_K * slope_N_K


class _TrainedHead(torch.autograd.Function):
    """Gradients for the weight or the bias too: their sums over tokens need the factors that come from above."""

    @staticmethod
    def forward(
        ctx: Any, hidden_N_H: Tensor, weight_V_H: Tensor, bias_V: Tensor | None, targets_N: Tensor, form: _Form
    ) -> tuple[Tensor, Tensor]:
        scores = _forward(hidden_N_H, weight_V_H, bias_V, targets_N[:, None], form)
        logprobs_N = scores.logprobs_N_K.squeeze(1)
        ctx.save_for_backward(hidden_N_H, weight_V_H, bias_V, targets_N, logprobs_N, scores.lse_others_N)
        ctx.form = form
        ctx.mark_non_differentiable(scores.entropy_N)
        return logprobs_N, scores.entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs_N: Tensor, grad_entropy_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_N_H, weight_V_H, bias_V, targets_N, logprobs_N, lse_others_N = ctx.saved_tensors
        wide = logprobs_N.dtype
        scale_N = _scale(grad_logprobs_N, logprobs_N, ctx.form.temperature)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden_N_H = torch.empty_like(hidden_N_H) if needs_hidden else None
        grad_weight_V_H = torch.zeros_like(weight_V_H, dtype=wide) if needs_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=wide) if needs_bias else None
        for rows in ctx.form.chunks(len(hidden_N_H)):
            grad_C_V = _logits(hidden_N_H[rows], weight_V_H, bias_V, ctx.form)
            _unit_gradient_(grad_C_V, targets_N[rows], lse_others_N[rows], ctx.form.slope(grad_C_V, 0.0))
            if grad_hidden_N_H is not None:
                torch.mul(_product(grad_C_V, weight_V_H), scale_N[rows, None], out=grad_hidden_N_H[rows])
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
        )


@dataclass(frozen=True)
class _Scores:
    """What the forward finds: of each hidden state the log-probs of its targets, the entropy, which column holds the
    likeliest target and the logsumexp of all words but that; with a softcap its slope at each target."""

    logprobs_N_K: Tensor
    entropy_N: Tensor
    lse_others_N: Tensor
    likeliest_N_1: Tensor
    slope_N_K: Tensor | None


def _forward(
    hidden_N_H: Tensor,
    weight_V_H: Tensor,
    bias_V: Tensor | None,
    targets_N_K: Tensor,
    form: _Form,
    product_N_H: Tensor | None = None,
) -> _Scores:
    """Chunk by chunk. `product_N_H`, when given, is filled with the gradient of the log-prob of each likeliest target
    divided by 1 - p_t, times temperature.
    """
    logprobs_N_K = hidden_N_H.new_empty(targets_N_K.shape, dtype=_wide(weight_V_H.dtype))
    entropy_N = logprobs_N_K.new_empty(len(hidden_N_H))
    lse_others_N, likeliest_N_1 = torch.empty_like(entropy_N), targets_N_K.new_empty(len(hidden_N_H), 1)
    slope_N_K = None if form.softcap is None else torch.empty_like(logprobs_N_K)
    for rows in form.chunks(len(hidden_N_H)):
        logits_C_V, targets_C_K = _logits(hidden_N_H[rows], weight_V_H, bias_V, form), targets_N_K[rows]
        values_C_K = logits_C_V.gather(1, targets_C_K)
        slope_C_K = form.slope(values_C_K, 0.0)
        if slope_N_K is not None and slope_C_K is not None:
            slope_N_K[rows] = slope_C_K
        likeliest_N_1[rows] = likeliest_C_1 = values_C_K.argmax(1, keepdim=True)
        likeliest_value_C_1, targets_C = values_C_K.gather(1, likeliest_C_1), targets_C_K.gather(1, likeliest_C_1)[:, 0]
        logp_C, entropy_N[rows], lse_others_N[rows], top_C_1 = _reduce_logits_(logits_C_V, targets_C)
        # No other target is likelier than 1/2, so the textbook form is exact enough for those.
        textbook_C_K = values_C_K - (likeliest_value_C_1 - logp_C[:, None])
        logprobs_N_K[rows] = torch.where(targets_C_K == targets_C[:, None], logp_C[:, None], textbook_C_K)
        if product_N_H is not None:
            lse_C = lse_others_N[rows] - top_C_1.squeeze(1)
            _unit_gradient_(logits_C_V, targets_C, lse_C, form.slope(logits_C_V, top_C_1))
            product_N_H[rows] = _product(logits_C_V, weight_V_H)
        del logits_C_V  # or this chunk is still alive while the next one is computed
    return _Scores(logprobs_N_K, entropy_N, lse_others_N, likeliest_N_1, slope_N_K)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _scale(grad_logprobs_N: Tensor, logprobs_N: Tensor, temperature: float) -> Tensor:
    """All of a token's gradient that is one number: what comes from above, 1 - p_t and the temperature."""
    return grad_logprobs_N * -torch.expm1(logprobs_N) / temperature


def _product(grad_C_V: Tensor, weight_V_H: Tensor) -> Tensor:
    return grad_C_V.to(weight_V_H.dtype) @ weight_V_H


def _logits(hidden_C_H: Tensor, weight_V_H: Tensor, bias_V: Tensor | None, form: _Form) -> Tensor:
    """The bent logits of one chunk in fp32 or float64, in memory of their own that the caller may overwrite."""
    return form.bend_(F.linear(hidden_C_H.to(weight_V_H.dtype), weight_V_H, bias_V).to(_wide(weight_V_H.dtype)))


def _reduce_logits_(logits_C_V: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-prob of the target, entropy, logsumexp of the other words, each (C,), and their largest logit (C, 1).

    The logits are lowered by the last.
    """
    targets_C_1 = targets_C.unsqueeze(1)
    target_C_1 = logits_C_V.gather(1, targets_C_1)
    top_C_1 = logits_C_V.scatter_(1, targets_C_1, -torch.inf).amax(1, keepdim=True)
    exp_C_V = logits_C_V.sub_(top_C_1).exp()
    logits_C_V.scatter_(1, targets_C_1, target_C_1 - top_C_1)  # exp is 0 there, and 0 * -inf would be NaN
    total_C = exp_C_V.sum(1)
    lse_others_C = total_C.log() + top_C_1.squeeze(1)
    entropy_others_C = total_C.log() - exp_C_V.mul_(logits_C_V).sum(1) / total_C
    margin_C = target_C_1.squeeze(1) - lse_others_C
    logp_C, log_rest_C = F.logsigmoid(margin_C), F.logsigmoid(-margin_C)
    # Chain rule of entropy: first "the target or not", then which of the others.
    entropy_C = -logp_C.exp() * logp_C + log_rest_C.exp() * (entropy_others_C - log_rest_C)
    return logp_C, entropy_C, lse_others_C, top_C_1


def _unit_gradient_(logits_C_V: Tensor, targets_C: Tensor, lse_others_C: Tensor, slope_C_V: Tensor | None) -> None:
    """Turn logits into dlogp/dlogits divided by (1 - p_t), in place: 1 at the target, minus softmax over the others.

    With a slope the gradient is that of the logits before the softcap.
    """
    logits_C_V.sub_(lse_others_C.unsqueeze(1)).exp_().neg_()
    logits_C_V.scatter_(1, targets_C.unsqueeze(1), 1.0)
    if slope_C_V is not None:
        logits_C_V.mul_(slope_C_V)
