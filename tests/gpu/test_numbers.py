"""The GPU computes what the CPU computes: shared key heads in the flash kernel, and a 4-bit policy.

Each test also runs on the CPU, in the same 16 bits, so that it is known to test something.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import TorchDispatchMode

from lowmem_grpo.attention import HeadMath, kernels_of, masked_attention
from lowmem_grpo.model import DTYPES, Policy
from lowmem_grpo.types import Card, PackedMicroBatch
from tests.gpu.script import gpu_check
from tests.helpers import assert_gradients_close, gradients_of, pack, random_groups, shake_adapter, updater_of

on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])

HEADS, KEY_HEADS, WIDTH = 8, 2, 64


def card_of(device: str) -> Card:
    return Card("test", device, torch.cuda.get_device_capability() if device == "cuda" else (0, 0), 8 << 30)


def half_of(card: Card) -> str:
    """The 16-bit dtype of a run on this card; a CPU has bfloat16."""
    return "bfloat16" if card.device == "cpu" or card.capability >= (8, 0) else "float16"


# Attention.


class Operations(TorchDispatchMode):
    """Writes down which operations run, with the shapes of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: dict[str, list[tuple[int, ...]]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        self.shapes[str(func).split(".")[1]] = [tuple(tensor.shape) for tensor in tensors]
        return func(*args, **(kwargs or {}))


def inputs_of(queries: int, keys: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value and the gradient of the output, rounded to `dtype`, in float64 on the CPU."""
    generator = torch.Generator().manual_seed(queries)
    shapes = [(1, HEADS, queries, WIDTH), *[(1, KEY_HEADS, keys, WIDTH)] * 2, (1, HEADS, queries, WIDTH)]
    query, key, value, gradient = (torch.randn(shape, generator=generator).to(dtype).double() for shape in shapes)
    return query, key, value, gradient


def textbook_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Every query head over the keys of its group, the last query seeing the last key."""
    key, value = (states.repeat_interleave(HEADS // KEY_HEADS, dim=1) for states in (key, value))
    scores = query @ key.transpose(2, 3) * WIDTH**-0.5
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(scores.shape[-1] - scores.shape[-2])
    return torch.softmax(scores.masked_fill(~seen, -torch.inf), -1) @ value


def with_gradients(attend: Callable[..., Tensor], inputs: tuple[Tensor, ...], gradient: Tensor) -> list[Tensor]:
    """The output and the gradients of the inputs, in float64 on the CPU."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    output = attend(*leaves)
    output.backward(gradient)
    return [tensor.detach().double().cpu() for tensor in (output, *(leaf.grad for leaf in leaves))]


@on_devices
@pytest.mark.parametrize("in_half", [True, False])
@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (7, 100), (130, 300)])
def test_attention_from_the_bottom_right_with_shared_key_heads(
    device: str, in_half: bool, queries: int, keys: int
) -> None:
    card = card_of(device)
    dtype = DTYPES[half_of(card)] if in_half else torch.float32
    kernels = kernels_of(card, dtype, "sdpa")
    bias = causal_lower_right(queries, keys)

    def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return masked_attention(query, key, value, bias, HeadMath(WIDTH**-0.5), kernels=kernels)

    *inputs, gradient = inputs_of(queries, keys, dtype)
    expected = with_gradients(textbook_attention, tuple(inputs), gradient)
    there = tuple(tensor.to(device, dtype) for tensor in inputs)
    with Operations() as operations:
        actual = with_gradients(ours, there, gradient.to(device, dtype))
    tolerance = 0.02 if in_half else 1e-3
    for name, got, wanted in zip(("output", "query", "key", "value"), actual, expected, strict=True):
        assert (got - wanted).norm() <= tolerance * wanted.norm(), name
    if kernels.shared_heads and device == "cuda" and queries < keys:  # else plain causal, where torch may choose cuDNN
        query_shape, key_shape, *_ = operations.shapes["_scaled_dot_product_flash_attention"]
        assert (query_shape[1], key_shape[1]) == (HEADS, KEY_HEADS)


# A 4-bit policy.


def nf4_policy(device: str, dtype: str) -> Policy:
    """A tiny 4-bit policy of known weights: the same values, rounded to 16 bits, on every device and in every dtype."""
    case, card = gpu_check.TINY_CASES["tiny-nf4"], card_of(device)
    generator = torch.Generator().manual_seed(0)

    def draw(shape: torch.Size, wanted: torch.dtype) -> Tensor:
        # float16 holds what is left of these numbers in bfloat16 too, but for the smallest.
        return (0.05 * torch.randn(shape, generator=generator)).bfloat16().to(device, wanted)

    base = gpu_check.empty_base(case.shape, dtype)
    gpu_check.random_base(base, torch.device(device), quantized=True, draw=draw)
    policy = gpu_check.policy_of(base, replace(gpu_check.workload_of(case, card), dtype=dtype), case.settings)
    shake_adapter(policy)
    return policy


def on_device(micro: PackedMicroBatch, device: torch.device) -> PackedMicroBatch:
    values = {field.name: getattr(micro, field.name) for field in fields(micro)}
    return replace(micro, **{name: v.to(device) if isinstance(v, Tensor) else v for name, v in values.items()})


def logprobs_and_gradients(device: str, dtype: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs of the answers of three groups, and the adapter's gradients of their loss, on the CPU."""
    policy = nf4_policy(device, dtype)
    micro_batches = [on_device(micro, policy.device) for micro in pack(random_groups(), skip_dead=False)]
    with torch.no_grad():
        logprobs = [policy.logprobs(m, temperature=1.0, head_chunk_tokens=8)[0][m.mask_BT] for m in micro_batches]
    gradients = gradients_of(updater_of(policy), micro_batches)
    return torch.cat(logprobs).float().cpu(), {name: gradient.cpu() for name, gradient in gradients.items()}


@on_devices
def test_a_4bit_policy_in_16_bits_is_that_of_the_cpu_in_32(device: str) -> None:
    logprobs, gradients = logprobs_and_gradients(device, half_of(card_of(device)))
    expected, expected_gradients = logprobs_and_gradients("cpu", "float32")
    assert (logprobs - expected).abs().mean() <= 0.02
    assert (logprobs - expected).abs().max() <= 0.1
    assert_gradients_close(gradients, expected_gradients, 0.1)


@pytest.mark.gpu
def test_a_4bit_policy_in_32_bits_is_that_of_the_cpu() -> None:
    logprobs, gradients = logprobs_and_gradients("cuda", "float32")
    expected, expected_gradients = logprobs_and_gradients("cpu", "float32")
    assert (logprobs - expected).abs().max() <= 1e-3
    assert_gradients_close(gradients, expected_gradients, 1e-2)
