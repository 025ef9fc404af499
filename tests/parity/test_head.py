"""The chunked head against its naive twin: values, gradients, confident tokens, bytes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
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
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The obvious form: all logits at once, log_softmax, autograd."""
    logits_N_V = torch.nn.functional.linear(hidden_N_H.to(weight_V_H.dtype), weight_V_H, bias_V)
    logits_N_V = logits_N_V.to(torch.promote_types(weight_V_H.dtype, torch.float32))
    if softcap is not None:
        logits_N_V = softcap * torch.tanh(logits_N_V / softcap)
    logprobs_N_V = torch.log_softmax(logits_N_V / temperature, dim=-1)
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
@pytest.mark.parametrize("softcap", [None, 2.5])  # of logits up to 10
@pytest.mark.parametrize("chunk_tokens", [1, 5, 37, 100])
def test_values_and_gradients_equal_the_twin(
    dtype: torch.dtype, atol: float, temperature: float, softcap: float | None, chunk_tokens: int
) -> None:
    hidden, weight, bias, targets_N, grad_N = random_head(dtype)
    leaves, options = (hidden, weight, bias), {"temperature": temperature, "softcap": softcap}
    naive = naive_logprobs(hidden, weight, targets_N, bias_V=bias, **options)
    expected = torch.autograd.grad(naive[0], leaves, grad_N)
    assert min(g.abs().max().item() for g in expected) > 0.1
    trained = chunked_logprobs(hidden, weight, targets_N, chunk_tokens=chunk_tokens, bias_V=bias, **options)
    frozen = chunked_logprobs(
        hidden, weight.detach(), targets_N, chunk_tokens=chunk_tokens, bias_V=bias.detach(), **options
    )
    for chunked, wanted in ((trained, leaves), (frozen, leaves[:1])):
        torch.testing.assert_close(chunked, naive, rtol=1e-6, atol=atol)
        grads = torch.autograd.grad(chunked[0], wanted, grad_N)
        torch.testing.assert_close(grads, expected[: len(wanted)], rtol=1e-5, atol=atol)
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
    frozen = chunked_logprobs(hidden, weight.detach(), targets_N, chunk_tokens=8)
    torch.testing.assert_close(torch.autograd.grad(frozen[0], hidden, grad_N)[0], grads[0], rtol=0, atol=atol)


@pytest.mark.parametrize(("hidden_dtype", "head_dtype"), [(torch.float32, torch.bfloat16), (torch.bfloat16, None)])
@pytest.mark.parametrize("trained", [False, True])
def test_hidden_states_and_head_of_two_dtypes(
    hidden_dtype: torch.dtype, head_dtype: torch.dtype | None, trained: bool
) -> None:
    """The gradient has the dtype of the hidden states and is as exact as the narrower of the two allows."""
    hidden, weight, _, targets_N, grad_N = random_head(torch.bfloat16)
    hidden = hidden.detach().to(hidden_dtype).requires_grad_()
    weight = weight.detach().to(head_dtype or torch.float32).requires_grad_(trained)
    chunked = chunked_logprobs(hidden, weight, targets_N, chunk_tokens=8)
    torch.testing.assert_close(chunked, naive_logprobs(hidden, weight, targets_N), rtol=0, atol=1e-5)
    (grad,) = torch.autograd.grad(chunked[0], hidden, grad_N)
    exact_leaf = hidden.detach().double().requires_grad_()
    exact_N, _ = naive_logprobs(exact_leaf, weight.detach().double(), targets_N)
    (exact,) = torch.autograd.grad(exact_N, exact_leaf, grad_N.double())
    assert grad.dtype == hidden_dtype
    atol = 2.0**-8 if head_dtype is None else 0.03  # one rounding of the result, or 16-bit logits too
    assert (grad.double() - exact).abs().max() < atol * exact.abs().max()


def test_frozen_head_gets_no_gradient() -> None:
    hidden, weight, _, targets_N, grad_N = random_head(torch.float32)
    frozen = weight.detach()
    with LiveBytes() as live:
        chunked_logprobs(hidden, frozen, targets_N, chunk_tokens=1)[0].backward(grad_N)
    assert frozen.grad is None
    assert live.peak_bytes < 4 * weight.numel()  # not even a buffer for it
    expected = torch.autograd.grad(naive_logprobs(hidden, weight, targets_N)[0], hidden, grad_N)[0]
    torch.testing.assert_close(hidden.grad, expected, rtol=1e-5, atol=1e-5)


class Products(TorchDispatchMode):
    """Counts the matrix products that run inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("trained", "in_forward", "in_backward"), [(False, 2, 0), (True, 1, 3)])
def test_matrix_products_of_a_chunk(trained: bool, in_forward: int, in_backward: int) -> None:
    hidden, weight, _, targets_N, _ = random_head(torch.float32)
    weight.requires_grad_(trained)
    with Products() as forward:
        logprobs_N, _ = chunked_logprobs(hidden, weight, targets_N)
    with Products() as backward:
        logprobs_N.sum().backward()
    assert (forward.count, backward.count) == (in_forward, in_backward)


@pytest.mark.parametrize("trained", [False, True])
def test_without_gradients_there_is_one_product_and_nothing_is_kept(trained: bool) -> None:
    hidden, weight, _, targets_N, _ = random_head(torch.float32)
    weight.requires_grad_(trained)
    expected = chunked_logprobs(hidden, weight, targets_N)
    with torch.no_grad(), Products() as products, LiveBytes() as live:
        chunked = chunked_logprobs(hidden, weight, targets_N)
    assert (products.count, live.live_bytes) == (1, 2 * 4 * len(targets_N))
    assert not chunked[0].requires_grad
    with Products() as products:
        detached = chunked_logprobs(hidden.detach(), weight.detach(), targets_N)
    assert (products.count, detached[0].requires_grad) == (1, False)
    for values in (chunked, detached):
        torch.testing.assert_close(values, expected, rtol=0, atol=0)


@pytest.mark.parametrize("trained", [False, True])
def test_a_second_backward_finds_what_was_kept_unchanged(trained: bool) -> None:
    hidden, weight, _, targets_N, grad_N = random_head(torch.float32)
    logprobs_N, _ = chunked_logprobs(hidden, weight.requires_grad_(trained), targets_N, chunk_tokens=8)
    first, second, doubled = (
        torch.autograd.grad(logprobs_N, hidden, grad, retain_graph=True)[0] for grad in (grad_N, grad_N, 2 * grad_N)
    )
    assert torch.equal(first, second)
    assert torch.equal(2 * first, doubled)


def test_trained_bias_alone_on_a_frozen_weight() -> None:
    hidden, weight, bias, targets_N, grad_N = random_head(torch.float64)
    leaves = (hidden, bias)
    chunked_N, _ = chunked_logprobs(hidden, weight.detach(), targets_N, bias_V=bias, softcap=3.0, chunk_tokens=8)
    naive_N, _ = naive_logprobs(hidden, weight, targets_N, bias_V=bias, softcap=3.0)
    grads, expected = (torch.autograd.grad(values_N, leaves, grad_N) for values_N in (chunked_N, naive_N))
    torch.testing.assert_close(grads, expected, rtol=0, atol=1e-10)


def test_trained_head_on_frozen_hidden_states() -> None:
    hidden, weight, _, targets_N, grad_N = random_head(torch.float64)
    chunked_logprobs(hidden.detach(), weight, targets_N)[0].backward(grad_N)
    expected = torch.autograd.grad(naive_logprobs(hidden, weight, targets_N)[0], weight, grad_N)[0]
    torch.testing.assert_close(weight.grad, expected, rtol=0, atol=1e-10)
    assert hidden.grad is None


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("trained", [False, True])
def test_gradcheck(softcap: float | None, trained: bool) -> None:
    hidden, weight, bias, targets_N, _ = random_head(torch.float64, n=5, v=7, h=3)

    def logprobs(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        options = {"temperature": 0.7, "chunk_tokens": 2, "softcap": softcap}
        return chunked_logprobs(hidden, weight, targets_N, bias_V=bias, **options)[0]

    head = (weight.requires_grad_(trained), bias.requires_grad_(trained))
    assert torch.autograd.gradcheck(logprobs, (hidden, *head))


@pytest.mark.parametrize("trained", [False, True])
def test_second_derivative_is_refused(trained: bool) -> None:
    hidden, weight, _, targets_N, _ = random_head(torch.float64, n=3)
    logprobs_N, _ = chunked_logprobs(hidden, weight.requires_grad_(trained), targets_N)
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


def test_softcap_comes_before_the_temperature() -> None:
    # cap 2 on [2, 0]: 2 tanh(1) = 1.523188 against 0; halved by T 2 it is .761594, and logp = -log(1 + e^-.761594)
    hidden_N_H = torch.ones(1, 1, requires_grad=True)
    weight_V_H = torch.tensor([[2.0], [0.0]])
    logprobs_N, _ = chunked_logprobs(hidden_N_H, weight_V_H, torch.tensor([0]), temperature=2.0, softcap=2.0)
    logprobs_N.sum().backward()
    assert logprobs_N.item() == pytest.approx(-0.383166, abs=1e-6)
    # (1 - p) / T * (1 - tanh(1)^2) * (2 - 0) = .318300 / 2 * .419974 * 2; the other word's weight is 0
    assert hidden_N_H.grad.item() == pytest.approx(0.133678, abs=1e-6)


def test_entropy_is_that_of_the_tempered_distribution() -> None:
    # logits [2, 0, 0] at T .5 are [4, 0, 0]: p0 = e^4 / (e^4 + 2) = .964663, the others .017668 each
    weight_V_H = torch.tensor([[2.0], [0.0], [0.0]])
    for target in range(3):  # whichever word was sampled
        _, entropy_N = chunked_logprobs(torch.ones(1, 1), weight_V_H, torch.tensor([target]), temperature=0.5)
        assert entropy_N.item() == pytest.approx(0.177323, abs=1e-6)
    _, uniform_N = chunked_logprobs(torch.zeros(1, 1), weight_V_H, torch.tensor([1]))
    assert uniform_N.item() == pytest.approx(1.098612, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("trained", [False, True])
def test_confident_token_keeps_its_gradient(dtype: torch.dtype, trained: bool) -> None:
    """Logits [40, 0]: logp = -log1p(e^-40) = -4.248354e-18, and d logp / d hidden = (1 - p) * (40 - 0)."""
    hidden_N_H = torch.ones(1, 1, dtype=dtype, requires_grad=True)
    weight_V_H = torch.tensor([[40.0], [0.0]], dtype=dtype, requires_grad=trained)
    logprobs_N, entropy_N = chunked_logprobs(hidden_N_H, weight_V_H, torch.tensor([0]))
    assert logprobs_N.item() == pytest.approx(-4.248354e-18, rel=1e-5)
    assert entropy_N.item() == pytest.approx(41 * 4.248354e-18, rel=1e-4)
    (logprobs_N * 1e15).sum().backward()  # fp16 cannot hold 1e-16 in the result itself
    assert hidden_N_H.grad.item() == pytest.approx(40 * 4.248354e-3, rel=1e-2)
    if trained:
        assert weight_V_H.grad.flatten().tolist() == pytest.approx([4.248354e-3, -4.248354e-3], rel=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("trained", [False, True])
def test_confident_token_under_a_softcap_keeps_its_gradient(dtype: torch.dtype, trained: bool) -> None:
    """Logits [40, 0] under a cap of 30 are [30 tanh(4/3), 0] = [26.101850, 0]; the slope there is 1 - tanh(4/3)^2."""
    hidden_N_H = torch.ones(1, 1, dtype=dtype, requires_grad=True)
    weight_V_H = torch.tensor([[40.0], [0.0]], dtype=dtype, requires_grad=trained)
    logprobs_N, _ = chunked_logprobs(hidden_N_H, weight_V_H, torch.tensor([0]), softcap=30.0)
    rest, slope = math.exp(-30 * math.tanh(4 / 3)), 1 - math.tanh(4 / 3) ** 2
    assert logprobs_N.item() == pytest.approx(-rest, rel=1e-5)
    (logprobs_N * 1e9).sum().backward()
    assert hidden_N_H.grad.item() == pytest.approx(40e9 * rest * slope, rel=1e-2)
    if trained:
        assert weight_V_H.grad.flatten().tolist() == pytest.approx([1e9 * rest * slope, -1e9 * rest], rel=1e-2)


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


# Several targets of one hidden state.


def several_targets(rows: int, v: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(targets, index) of 1 to 6 targets a row, some of them equal, in mixed order; every row is named."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(1, 7, (rows,), generator=generator)
    index_M = torch.arange(rows).repeat_interleave(counts)
    index_M = index_M[torch.randperm(len(index_M), generator=generator)]
    targets_M = torch.randint(v, (len(index_M),), generator=generator)
    targets_M[index_M == 3] = targets_M[index_M == 3][0]  # all of one row alike
    return targets_M, index_M


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 2e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("softcap", [None, 2.5])
@pytest.mark.parametrize("chunk_tokens", [1, 5, 100])
@pytest.mark.parametrize("words", [2, 7, 211])  # of 2 and 7 words nearly all are targets
def test_several_targets_of_a_hidden_state_equal_the_twin(
    dtype: torch.dtype, atol: float, temperature: float, softcap: float | None, chunk_tokens: int, words: int
) -> None:
    hidden, weight, bias, _, _ = random_head(dtype, v=words)
    targets_M, index_M = several_targets(len(hidden), words)
    grad_M = torch.randn(len(targets_M), generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    leaves, options = (hidden, weight, bias), {"temperature": temperature, "softcap": softcap}
    naive = naive_logprobs(hidden[index_M], weight, targets_M, bias_V=bias, **options)
    expected = torch.autograd.grad(naive[0], leaves, grad_M)
    options |= {"chunk_tokens": chunk_tokens, "index_M": index_M}
    trained = chunked_logprobs(hidden, weight, targets_M, bias_V=bias, **options)
    frozen = chunked_logprobs(hidden, weight.detach(), targets_M, bias_V=bias.detach(), **options)
    for chunked, wanted in ((trained, leaves), (frozen, leaves[:1])):
        torch.testing.assert_close(chunked, naive, rtol=1e-6, atol=atol)
        grads = torch.autograd.grad(chunked[0], wanted, grad_M)
        torch.testing.assert_close(grads, expected[: len(wanted)], rtol=1e-5, atol=10 * atol)
        assert (chunked[0].dtype, chunked[1].requires_grad) == (dtype, False)
    with torch.no_grad():
        without = chunked_logprobs(hidden, weight.detach(), targets_M, bias_V=bias.detach(), **options)
    torch.testing.assert_close(without, tuple(frozen), rtol=0, atol=0)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.bfloat16, 0.03), (torch.float16, 0.004)])
def test_several_targets_in_sixteen_bits_stay_close(dtype: torch.dtype, atol: float) -> None:
    hidden, weight, _, _, _ = random_head(dtype)
    targets_M, index_M = several_targets(len(hidden), len(weight))
    grad_M = torch.randn(len(targets_M), generator=torch.Generator().manual_seed(1))
    logprobs_M, _ = chunked_logprobs(hidden, weight.detach(), targets_M, index_M=index_M, chunk_tokens=8)
    (grad,) = torch.autograd.grad(logprobs_M, hidden, grad_M)
    exact_leaf = hidden.detach().double().requires_grad_()
    exact_M, _ = naive_logprobs(exact_leaf[index_M], weight.detach().double(), targets_M)
    (exact,) = torch.autograd.grad(exact_M, exact_leaf, grad_M.double())
    assert grad.dtype == dtype
    assert (grad.double() - exact).abs().max() < atol * exact.abs().max()


def test_two_targets_by_hand() -> None:
    """Logits [log 2, log 1, log 1], targets 0 and 1 with gradients 3 and 1: p = 1/2, 1/4, 1/4.

    d/dlogits = 3 ([1 0 0] - p) + 1 ([0 1 0] - p) = [1, 0, -1]; the head's rows are the logits, so the sum is log 2.
    """
    hidden_N_H = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
    weight_V_H = torch.tensor([[2.0], [1.0], [1.0]], dtype=torch.float64).log()
    logprobs_M, entropy_M = chunked_logprobs(hidden_N_H, weight_V_H, torch.tensor([1, 0]), index_M=torch.tensor([0, 0]))
    assert logprobs_M.exp().tolist() == pytest.approx([1 / 4, 1 / 2])
    assert entropy_M.tolist() == pytest.approx([1.5 * math.log(2)] * 2)
    logprobs_M.backward(torch.tensor([1.0, 3.0], dtype=torch.float64))
    assert hidden_N_H.grad.item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_confident_token_keeps_its_gradient_beside_another_target(dtype: torch.dtype) -> None:
    """Logits [40, 0, 1] with targets 0 and 2: 1 - p_0 = e^-40 (1 + e), which no difference of 1 and p_0 can hold."""
    weight_V_H = torch.tensor([[40.0], [0.0], [1.0]], dtype=dtype)
    options = {"index_M": torch.tensor([0, 0])}
    hidden_N_H = torch.ones(1, 1, dtype=dtype, requires_grad=True)
    logprobs_M, _ = chunked_logprobs(hidden_N_H, weight_V_H, torch.tensor([0, 2]), **options)
    rest = math.exp(-40) * (1 + math.e)
    assert logprobs_M.tolist() == pytest.approx([-rest, -39.0], rel=1e-5)
    # Only the confident one has a gradient: e^-40 ((40 - 0) + e (40 - 1)), times 1e15 for what fp16 can hold.
    (logprobs_M[0] * 1e15).backward()
    assert hidden_N_H.grad.item() == pytest.approx(1e15 * math.exp(-40) * (40 + 39 * math.e), rel=1e-2)


def test_several_targets_cost_no_second_row_of_logits() -> None:
    rows, words, wide = 64, 2000, 16
    hidden_N_H, weight_V_H = torch.zeros(rows, wide, requires_grad=True), torch.zeros(words, wide)
    index_M = torch.arange(rows).repeat(4)
    targets_M = torch.arange(4 * rows)
    with LiveBytes() as forward, Products() as products:
        logprobs_M, _ = chunked_logprobs(hidden_N_H, weight_V_H, targets_M, index_M=index_M, chunk_tokens=32)
    small = 64 * 4 * rows + 16 * rows * wide
    assert products.count == 2 * rows // 32
    assert 0 <= forward.peak_bytes - 8 * 32 * words < small
    with LiveBytes() as backward:
        logprobs_M.sum().backward()
    assert backward.peak_bytes < small + 2 * 4 * 32 * wide


def test_each_hidden_state_once_and_in_order_is_the_call_without_an_index() -> None:
    hidden, weight, _, targets_N, grad_N = random_head(torch.float32)
    plain = chunked_logprobs(hidden, weight.detach(), targets_N, chunk_tokens=8)
    indexed = chunked_logprobs(hidden, weight.detach(), targets_N, index_M=torch.arange(len(hidden)), chunk_tokens=8)
    assert torch.equal(plain[0], indexed[0]) and torch.equal(plain[1], indexed[1])
    grads = [torch.autograd.grad(logprobs_N, hidden, grad_N)[0] for logprobs_N, _ in (plain, indexed)]
    assert torch.equal(*grads)


@pytest.mark.parametrize("trained", [False, True])
def test_no_hidden_state_and_no_target(trained: bool) -> None:
    hidden, weight, _, _, _ = random_head(torch.float32)
    nothing = torch.zeros(0, dtype=torch.long)
    logprobs_M, entropy_M = chunked_logprobs(hidden[:0], weight.requires_grad_(trained), nothing, index_M=nothing)
    assert logprobs_M.shape == entropy_M.shape == (0,)
    logprobs_M.sum().backward()
    assert hidden.grad.abs().max() == 0


def test_no_tokens() -> None:
    hidden, weight, _, _, _ = random_head(torch.float32)
    logprobs_N, entropy_N = chunked_logprobs(hidden[:0], weight, torch.zeros(0, dtype=torch.long))
    assert logprobs_N.shape == entropy_N.shape == (0,)
    logprobs_N.sum().backward()
    assert hidden.grad.abs().max() == weight.grad.abs().max() == 0


@pytest.mark.parametrize("wrong", [{"temperature": 0.0}, {"chunk_tokens": 0}, {"softcap": 0.0}, {"softcap": -30.0}])
def test_refuses_what_cannot_divide(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        chunked_logprobs(torch.ones(1, 1), torch.ones(2, 1), torch.tensor([0]), **wrong)


N, V, H = 512, 2000, 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_peak_bytes_of_a_frozen_head_follow_the_chunk(dtype: torch.dtype, softcap: float | None) -> None:
    """chunk x V x 8 in the forward, no logits at all in the backward, plus (N,) numbers and (N, H) products."""
    hidden_N_H = torch.zeros(N, H, dtype=dtype, requires_grad=True)
    weight_V_H, targets_N = torch.zeros(V, H, dtype=dtype), torch.zeros(N, dtype=torch.long)
    small = 64 * N + 16 * N * H
    for chunk_tokens in (512, 128, 32):
        with LiveBytes() as forward:
            logprobs_N, entropy_N = chunked_logprobs(
                hidden_N_H, weight_V_H, targets_N, chunk_tokens=chunk_tokens, softcap=softcap
            )
        assert 0 <= forward.peak_bytes - 8 * chunk_tokens * V < small
        # the caller's log-probs and entropies, and as many bytes as the hidden states have
        assert forward.live_bytes == 2 * 4 * N + hidden_N_H.nbytes
        with LiveBytes() as backward:
            logprobs_N.backward(torch.ones(N))
        assert backward.peak_bytes < small
        del logprobs_N, entropy_N


@pytest.mark.parametrize(
    ("dtype", "softcap", "backward_factor"),
    [(torch.float32, None, 4), (torch.bfloat16, None, 6), (torch.float32, 30.0, 8), (torch.bfloat16, 30.0, 8)],
)
def test_peak_bytes_of_a_trained_head_follow_the_chunk(
    dtype: torch.dtype, softcap: float | None, backward_factor: int
) -> None:
    """chunk x V x 8 in the forward, x 4 to x 8 in the backward, plus (N,) numbers, (N, H) and (V, H) gradients."""
    hidden_N_H = torch.zeros(N, H, dtype=dtype, requires_grad=True)
    weight_V_H, targets_N = torch.zeros(V, H, dtype=dtype, requires_grad=True), torch.zeros(N, dtype=torch.long)
    small = 64 * N + 16 * N * H
    for chunk_tokens in (512, 128):
        with LiveBytes() as forward:
            logprobs_N, entropy_N = chunked_logprobs(
                hidden_N_H, weight_V_H, targets_N, chunk_tokens=chunk_tokens, softcap=softcap
            )
        assert 0 <= forward.peak_bytes - 8 * chunk_tokens * V < small
        # the caller's log-probs and entropies, one fp32 per token is kept: no logits wait for the backward
        assert forward.live_bytes == 3 * 4 * N
        with LiveBytes() as backward:
            logprobs_N.backward(torch.ones(N))
        assert 0 <= backward.peak_bytes - backward_factor * chunk_tokens * V - 4 * V * H < small
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
