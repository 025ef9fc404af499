"""The chunked head against its naive twin: values, gradients, confident tokens, bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lowmem_grpo.memory.head import chunked_logprobs
from lowmem_grpo.memory.live import LiveBytes


def naive_logprobs(
    hidden_N_H: Tensor,
    weight_V_H: Tensor,
    targets_N: Tensor,
    *,
    temperature: float = 1.0,
    bias_V: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The obvious form: all logits at once, log_softmax, autograd."""
    logits_N_V = torch.nn.functional.linear(hidden_N_H.to(weight_V_H.dtype), weight_V_H, bias_V)
    wide = torch.promote_types(weight_V_H.dtype, torch.float32)
    logprobs_N_V = torch.log_softmax(logits_N_V.to(wide) / temperature, dim=-1)
    entropy_N = -(logprobs_N_V.exp() * logprobs_N_V).sum(-1).detach()
    return logprobs_N_V.gather(1, targets_N[:, None]).squeeze(1), entropy_N


def random_head(
    dtype: torch.dtype, n: int = 37, v: int = 211, h: int = 16
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight, bias, targets and an incoming gradient, the first three as leaves."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    hidden, weight, bias = (x.to(dtype).requires_grad_() for x in (draw(n, h), 0.5 * draw(v, h), draw(v)))
    grad_N = draw(n).to(torch.promote_types(dtype, torch.float32))
    return hidden, weight, bias, torch.randint(v, (n,), generator=generator), grad_N


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk_tokens", [1, 5, 37, 100])
def test_values_and_gradients_equal_the_twin(
    dtype: torch.dtype, atol: float, temperature: float, chunk_tokens: int
) -> None:
    hidden, weight, bias, targets_N, grad_N = random_head(dtype)
    leaves = (hidden, weight, bias)
    naive = naive_logprobs(hidden, weight, targets_N, temperature=temperature, bias_V=bias)
    chunked = chunked_logprobs(
        hidden, weight, targets_N, temperature=temperature, chunk_tokens=chunk_tokens, bias_V=bias
    )
    torch.testing.assert_close(chunked, naive, rtol=1e-6, atol=atol)
    expected = torch.autograd.grad(naive[0], leaves, grad_N)
    torch.testing.assert_close(torch.autograd.grad(chunked[0], leaves, grad_N), expected, rtol=1e-5, atol=atol)
    assert min(g.abs().max().item() for g in expected) > 0.1
    assert (chunked[0].dtype, chunked[1].requires_grad) == (dtype, False)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.bfloat16, 0.03), (torch.float16, 0.004)])
def test_sixteen_bits_stay_close_to_the_twin(dtype: torch.dtype, atol: float) -> None:
    hidden, weight, _, targets_N, grad_N = random_head(dtype)
    naive = naive_logprobs(hidden, weight, targets_N)
    chunked = chunked_logprobs(hidden, weight, targets_N, chunk_tokens=8)
    assert chunked[0].dtype == chunked[1].dtype == torch.float32
    torch.testing.assert_close(chunked, naive, rtol=0, atol=1e-5)  # the same logits, so the same reductions
    # Gradients against the exact ones of the same inputs: no further away than the twin's own rounding.
    exact_leaves = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    exact = torch.autograd.grad(naive_logprobs(*exact_leaves, targets_N)[0], exact_leaves, grad_N.double())
    grads = torch.autograd.grad(chunked[0], (hidden, weight), grad_N)
    for grad, target in zip(grads, exact, strict=True):
        assert grad.dtype == dtype
        assert (grad.double() - target).abs().max() < atol * target.abs().max()


def test_hidden_in_fp32_meets_a_bf16_head() -> None:
    hidden, weight, _, targets_N, grad_N = random_head(torch.bfloat16)
    wide_hidden = hidden.detach().float().requires_grad_()
    chunked = chunked_logprobs(wide_hidden, weight.detach(), targets_N, chunk_tokens=8)
    torch.testing.assert_close(chunked, naive_logprobs(hidden, weight, targets_N), rtol=0, atol=1e-5)
    assert torch.autograd.grad(chunked[0], wide_hidden, grad_N)[0].dtype == torch.float32


def test_frozen_head_gets_no_gradient() -> None:
    hidden, weight, _, targets_N, grad_N = random_head(torch.float32)
    frozen = weight.detach()
    with LiveBytes() as live:
        chunked_logprobs(hidden, frozen, targets_N, chunk_tokens=1)[0].backward(grad_N)
    assert frozen.grad is None
    assert live.peak_bytes < 4 * weight.numel()  # not even a buffer for it
    expected = torch.autograd.grad(naive_logprobs(hidden, weight, targets_N)[0], hidden, grad_N)[0]
    torch.testing.assert_close(hidden.grad, expected, rtol=1e-5, atol=1e-5)


def test_trained_head_on_frozen_hidden_states() -> None:
    hidden, weight, _, targets_N, grad_N = random_head(torch.float64)
    chunked_logprobs(hidden.detach(), weight, targets_N)[0].backward(grad_N)
    expected = torch.autograd.grad(naive_logprobs(hidden, weight, targets_N)[0], weight, grad_N)[0]
    torch.testing.assert_close(weight.grad, expected, rtol=0, atol=1e-10)
    assert hidden.grad is None


def test_gradcheck() -> None:
    hidden, weight, bias, targets_N, _ = random_head(torch.float64, n=5, v=7, h=3)

    def logprobs(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return chunked_logprobs(hidden, weight, targets_N, temperature=0.7, chunk_tokens=2, bias_V=bias)[0]

    assert torch.autograd.gradcheck(logprobs, (hidden, weight, bias))


def test_second_derivative_is_refused() -> None:
    hidden, weight, _, targets_N, _ = random_head(torch.float64, n=3)
    logprobs_N, _ = chunked_logprobs(hidden, weight, targets_N)
    (grad,) = torch.autograd.grad(logprobs_N.square().sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize(
    ("logits", "temperature", "expected"),
    [([2, 1, 0, -1], 0.6, -0.208060), ([2, 1, 0, -1], 1.0, -0.440190), ([2, 0, 0], 0.5, -0.0360)],
)
def test_temperature_divides_the_logits(logits: list[float], temperature: float, expected: float) -> None:
    # one hidden unit of value 1 makes the head's weights the logits
    weight_V_H = torch.tensor(logits, dtype=torch.float32)[:, None]
    logprobs_N, _ = chunked_logprobs(torch.ones(1, 1), weight_V_H, torch.tensor([0]), temperature=temperature)
    assert logprobs_N.item() == pytest.approx(expected, abs=5e-5 if temperature == 0.5 else 1e-6)


def test_entropy_is_that_of_the_tempered_distribution() -> None:
    # logits [2, 0, 0] at T .5 are [4, 0, 0]: p0 = e^4 / (e^4 + 2) = .964663, the others .017668 each
    weight_V_H = torch.tensor([[2.0], [0.0], [0.0]])
    for target in range(3):  # whichever word was sampled
        _, entropy_N = chunked_logprobs(torch.ones(1, 1), weight_V_H, torch.tensor([target]), temperature=0.5)
        assert entropy_N.item() == pytest.approx(0.177323, abs=1e-6)
    _, uniform_N = chunked_logprobs(torch.zeros(1, 1), weight_V_H, torch.tensor([1]))
    assert uniform_N.item() == pytest.approx(1.098612, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_confident_token_keeps_its_gradient(dtype: torch.dtype) -> None:
    """Logits [40, 0]: logp = -log1p(e^-40) = -4.248354e-18, and d logp / d hidden = (1 - p) * (40 - 0)."""
    hidden_N_H = torch.ones(1, 1, dtype=dtype, requires_grad=True)
    weight_V_H = torch.tensor([[40.0], [0.0]], dtype=dtype, requires_grad=True)
    logprobs_N, entropy_N = chunked_logprobs(hidden_N_H, weight_V_H, torch.tensor([0]))
    assert logprobs_N.item() == pytest.approx(-4.248354e-18, rel=1e-5)
    assert entropy_N.item() == pytest.approx(41 * 4.248354e-18, rel=1e-4)
    (logprobs_N * 1e15).sum().backward()  # fp16 cannot hold 1e-16 in the result itself
    assert hidden_N_H.grad.item() == pytest.approx(40 * 4.248354e-3, rel=1e-2)
    assert weight_V_H.grad.flatten().tolist() == pytest.approx([4.248354e-3, -4.248354e-3], rel=1e-2)


def test_the_textbook_form_loses_that_gradient() -> None:
    """Why the head is written as it is: in fp32 the twin's logp is 0 and so is its gradient."""
    hidden_N_H = torch.ones(1, 1, requires_grad=True)
    logprobs_N, _ = naive_logprobs(hidden_N_H, torch.tensor([[40.0], [0.0]]), torch.tensor([0]))
    logprobs_N.sum().backward()
    assert (logprobs_N.item(), hidden_N_H.grad.item()) == (0.0, 0.0)


def test_logits_too_large_for_exp() -> None:
    # gap 200: e^200 overflows fp32; the unlikely word has logp -200 and gradient (1 - p) (w_t - w_other) = -200
    weight_V_H = torch.tensor([[200.0], [0.0]])
    for target, logp, grad in ((0, 0.0, 0.0), (1, -200.0, -200.0)):
        hidden_N_H = torch.ones(1, 1, requires_grad=True)
        logprobs_N, _ = chunked_logprobs(hidden_N_H, weight_V_H, torch.tensor([target]))
        logprobs_N.sum().backward()
        assert logprobs_N.item() == pytest.approx(logp, abs=1e-6)
        assert hidden_N_H.grad.item() == pytest.approx(grad, abs=1e-6)


def test_under_activation_checkpointing() -> None:
    hidden, weight, _, targets_N, grad_N = random_head(torch.float64)
    run = lambda x: chunked_logprobs(torch.tanh(x), weight, targets_N, chunk_tokens=8)[0]  # noqa: E731
    checkpoint(run, hidden, use_reentrant=False).backward(grad_N)
    expected = torch.autograd.grad(naive_logprobs(torch.tanh(hidden), weight, targets_N)[0], hidden, grad_N)[0]
    torch.testing.assert_close(hidden.grad, expected, rtol=0, atol=1e-10)


def test_no_tokens() -> None:
    hidden, weight, _, _, _ = random_head(torch.float32)
    logprobs_N, entropy_N = chunked_logprobs(hidden[:0], weight, torch.zeros(0, dtype=torch.long))
    assert logprobs_N.shape == entropy_N.shape == (0,)
    logprobs_N.sum().backward()
    assert hidden.grad.abs().max() == weight.grad.abs().max() == 0


@pytest.mark.parametrize("wrong", [{"temperature": 0.0}, {"chunk_tokens": 0}])
def test_refuses_what_cannot_divide(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        chunked_logprobs(torch.ones(1, 1), torch.ones(2, 1), torch.tensor([0]), **wrong)


N, V, H = 512, 2000, 16


@pytest.mark.parametrize(("dtype", "backward_factor"), [(torch.float32, 4), (torch.bfloat16, 6)])
def test_peak_bytes_follow_the_chunk(dtype: torch.dtype, backward_factor: int) -> None:
    """chunk x V x 8 in the forward, x 4 or x 6 in the backward, plus (N,) numbers and (N, H) gradients."""
    hidden_N_H = torch.zeros(N, H, dtype=dtype, requires_grad=True)
    weight_V_H, targets_N = torch.zeros(V, H, dtype=dtype), torch.zeros(N, dtype=torch.long)
    small = 64 * N + 16 * N * H
    for chunk_tokens in (512, 128, 32):
        with LiveBytes() as forward:
            logprobs_N, entropy_N = chunked_logprobs(hidden_N_H, weight_V_H, targets_N, chunk_tokens=chunk_tokens)
        assert 0 <= forward.peak_bytes - 8 * chunk_tokens * V < small
        # log-probs and entropies are the caller's, one fp32 per token is kept: no logits wait for the backward
        assert forward.live_bytes == 3 * 4 * N
        with LiveBytes() as backward:
            logprobs_N.backward(torch.ones(N))
        assert 0 <= backward.peak_bytes - backward_factor * chunk_tokens * V < small
        del logprobs_N, entropy_N


def test_peak_bytes_of_the_twin_are_those_of_whole_logits() -> None:
    hidden_N_H = torch.zeros(N, H, requires_grad=True)
    with LiveBytes() as live:
        naive_logprobs(hidden_N_H, torch.zeros(V, H), torch.zeros(N, dtype=torch.long))[0].sum().backward()
    assert live.peak_bytes > 3 * 4 * N * V


def test_live_bytes_counts_views_once_and_forgets_the_dead() -> None:
    before = torch.ones(10)
    with LiveBytes() as live:
        kept = (before + 1)[:5].view(5, 1)
        assert live.live_bytes == 40  # the whole storage lives on under the view, `before` does not count
        torch.zeros(100)
        assert (live.live_bytes, live.peak_bytes) == (40, 440)
        del kept
    assert (live.live_bytes, live.peak_bytes) == (0, 440)
