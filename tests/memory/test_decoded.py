"""Decoded weights: the same numbers as the 4-bit layer's own forward, held beside the packed ones."""

from __future__ import annotations

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from torch import nn

from lowmem_grpo.memory.decoded import hold_decoded_weights, linear_4bit_layers

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def quantised(dtype: torch.dtype, *, bias: bool = False, seed: int = 0) -> Linear4bit:
    """A 4-bit layer of 96 x 64, quantised when it is moved to the device."""
    torch.manual_seed(seed)
    layer = Linear4bit(64, 96, bias=bias, compute_dtype=dtype, quant_type="nf4", compress_statistics=True)
    layer.support_avx512bf16_for_cpu = False
    if bias:
        layer.bias.data = layer.bias.data.to(dtype)
    return layer.to("cpu").requires_grad_(False)


def model_of(dtype: torch.dtype, **options: bool) -> nn.Sequential:
    return nn.Sequential(quantised(dtype, seed=1, **options), nn.Linear(96, 64), quantised(dtype, seed=2, **options))


def test_the_layers_are_found_in_order_and_others_are_not() -> None:
    model = model_of(torch.float32)
    assert [a is b for a, b in zip(linear_4bit_layers(model), (model[0], model[2]), strict=True)] == [True, True]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_forward_and_input_gradient_equal_those_of_the_layer(dtype: torch.dtype, bias: bool, rows: int) -> None:
    layer, decoded = quantised(dtype, bias=bias), quantised(dtype, bias=bias)
    hold_decoded_weights(nn.Sequential(decoded), dtype)
    assert torch.equal(decoded.decoded_weight, dequantize_4bit(layer.weight.data, layer.weight.quant_state).to(dtype))
    x = torch.linspace(-1, 1, rows * 64).reshape(rows, 64).to(dtype)
    results = []
    for module in (layer, decoded):
        leaf = x.clone().requires_grad_()
        out = module(leaf)
        out.float().square().sum().backward()
        results.append((out.detach(), leaf.grad))
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    for own, other in zip(*results, strict=True):
        assert own.dtype == other.dtype == dtype
        torch.testing.assert_close(other, own, rtol=tolerance, atol=tolerance)
    assert results[0][1].abs().max() > 0.1


def test_the_bytes_are_those_of_the_decoded_values() -> None:
    model = model_of(torch.float32)
    assert hold_decoded_weights(model, torch.float32) == 2 * 96 * 64 * 4
    assert hold_decoded_weights(model_of(torch.bfloat16), torch.bfloat16) == 2 * 96 * 64 * 2
    assert hold_decoded_weights(nn.Sequential(nn.Linear(4, 4)), torch.float32) == 0


def test_the_packed_weight_and_the_state_stay_as_they_were() -> None:
    model = model_of(torch.float32, bias=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hold_decoded_weights(model, torch.float32)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert model[0].weight.dtype == torch.uint8
    assert not any("decoded" in name for name, _ in (*model.named_parameters(), *model.named_buffers()))


def test_a_bias_of_another_dtype_is_added_in_the_dtype_of_the_input() -> None:
    layer = quantised(torch.float32, bias=True)
    hold_decoded_weights(nn.Sequential(layer), torch.float32)
    with torch.no_grad():
        layer.bias.data = torch.full((96,), 0.5, dtype=torch.bfloat16)
        out = layer(torch.zeros(1, 64))
    assert out.dtype == torch.float32
    assert torch.equal(out, torch.full((1, 96), 0.5))
