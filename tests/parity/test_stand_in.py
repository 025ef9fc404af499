"""The simulator's 4-bit layer against bitsandbytes' own on real tensors: bytes held, values, gradients, live bytes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from bitsandbytes.functional import QuantState
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.bnb import Linear4bit as PeftLinear4bit
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lowmem_grpo.memory.decoded import hold_decoded_weights
from lowmem_grpo.memory.live import LiveBytes
from lowmem_grpo.memory.lora import LeanLora
from lowmem_grpo.planning.imagined import StandIn4bit, imagined_card
from tests.helpers import CPU

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(64, 96), (96, 64), (64, 64), (32, 5), (576, 192)]
"""(in, out): with whole blocks of 64 values and without, with one scale of scales and with seven."""
RANK = 4


def real_layer(inputs: int, outputs: int, dtype: torch.dtype, bias: bool) -> Linear4bit:
    """A random layer quantised by bitsandbytes, as `model.load_base` makes it."""
    torch.manual_seed(0)
    layer = Linear4bit(inputs, outputs, bias=bias, compute_dtype=dtype, quant_type="nf4", compress_statistics=True)
    layer.weight.data = layer.weight.data.to(dtype)
    if bias:
        layer.bias.data = layer.bias.data.to(dtype)
    layer.to("cpu").requires_grad_(False)
    layer.support_avx512bf16_for_cpu, layer.compute_type_is_set = False, True
    return layer


def stand_in(inputs: int, outputs: int, dtype: torch.dtype, bias: bool) -> StandIn4bit:
    linear = nn.Linear(inputs, outputs, bias=bias, dtype=dtype).requires_grad_(False)
    return StandIn4bit(linear, dtype)


def state_tensors(state: QuantState) -> dict[str, Tensor]:
    """Every tensor of the state, the scales of the scales included."""
    tensors = {name: value for name, value in vars(state).items() if isinstance(value, Tensor)}
    nested = {} if state.state2 is None else state_tensors(state.state2)
    return tensors | {f"state2.{name}": value for name, value in nested.items()}


def held_tensors(layer: Linear4bit) -> dict[str, Tensor]:
    """All that a layer holds, by name."""
    return dict(layer.named_parameters()) | state_tensors(layer.weight.quant_state)


def copied(layer: Linear4bit) -> StandIn4bit:
    """The stand-in with the bytes of a real layer in its own tensors."""
    twin = stand_in(layer.in_features, layer.out_features, layer.compute_dtype, layer.bias is not None)
    held = held_tensors(twin)
    for name, tensor in held_tensors(layer).items():
        held[name].data.copy_(tensor.data)
    return twin


@pytest.mark.parametrize(("inputs", "outputs"), [*SHAPES, (21, 3), (64, 1040)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_it_holds_the_same_tensors(inputs: int, outputs: int, dtype: torch.dtype, bias: bool) -> None:
    real, twin = real_layer(inputs, outputs, dtype, bias), stand_in(inputs, outputs, dtype, bias)
    sizes = [
        {name: (tensor.dtype, tensor.shape, tensor.untyped_storage().nbytes()) for name, tensor in held.items()}
        for held in (held_tensors(real), held_tensors(twin))
    ]
    assert sizes[0] == sizes[1]
    assert {"weight", "absmax", "code", "offset", "state2.absmax", "state2.code"} <= sizes[0].keys()
    plain = [
        {name: value for name, value in vars(state).items() if not isinstance(value, Tensor | QuantState)}
        for state in (real.weight.quant_state, twin.weight.quant_state)
    ]
    assert plain[0] == plain[1]  # block size, kind, dtype, shape


def test_the_bytes_of_a_layer_by_hand() -> None:
    held = held_tensors(stand_in(576, 1536, torch.bfloat16, False))
    # 884 736 weights: half a byte each; 13 824 scales of a byte; 54 of four; the two codes and the offset in fp32.
    assert {name: tensor.untyped_storage().nbytes() for name, tensor in held.items()} == {
        "weight": 442368,
        "absmax": 13824,
        "state2.absmax": 216,
        "code": 64,
        "state2.code": 1024,
        "offset": 4,
    }


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("leading", [(1,), (7,), (2, 3)])
def test_values_and_input_gradient_are_the_same(
    inputs: int, outputs: int, dtype: torch.dtype, bias: bool, leading: tuple[int, ...]
) -> None:
    real = real_layer(inputs, outputs, dtype, bias)
    results = []
    for layer in (real, copied(real)):
        x = torch.linspace(-1, 1, inputs * torch.Size(leading).numel()).view(*leading, inputs).to(dtype)
        x.requires_grad_()
        y = layer(x)
        y.backward(torch.cos(torch.arange(y.numel())).view(y.shape).to(dtype))
        assert x.grad is not None
        results.append((y.detach(), x.grad))
    for own, other in zip(*results, strict=True):
        assert own.dtype == dtype
        assert own.abs().max() > 0.05
        assert torch.equal(own, other)


# ---- the lean adapter on top, as a policy runs it


def adapted(layer: nn.Module, dtype: torch.dtype, decoded: bool) -> PeftModel:
    """An adapter with live weights in fp32 on the layer, computed by the lean function."""
    block = nn.Sequential(layer)
    if decoded:
        hold_decoded_weights(block, dtype)
    block.is_loaded_in_4bit = True  # type: ignore[assignment]  # what peft asks
    model = get_peft_model(block, LoraConfig(r=RANK, lora_alpha=8, target_modules=["0"]))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.sin(torch.arange(parameter.numel())).view(parameter.shape)
    assert type(model.base_model.model[0]) is PeftLinear4bit
    LeanLora(model, dtype)
    return model


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bias", "decoded"), [(False, False), (True, False), (False, True)])
def test_the_lean_adapter_on_it_computes_the_same(
    inputs: int, outputs: int, dtype: torch.dtype, bias: bool, decoded: bool
) -> None:
    real = real_layer(inputs, outputs, dtype, bias)
    results = []
    for layer in (real, copied(real)):
        model = adapted(layer, dtype, decoded)
        x = torch.linspace(-1, 1, 6 * inputs).view(2, 3, inputs).to(dtype).requires_grad_()
        y = model(x)
        masters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        grad_y = torch.cos(torch.arange(y.numel())).view(y.shape).to(dtype)
        results.append((y.detach(), *torch.autograd.grad(y, [x, *masters], grad_y)))
    assert len(results[0]) == 4
    for own, other in zip(*results, strict=True):
        assert own.abs().max() > 0
        assert torch.equal(own, other)


@dataclass(frozen=True)
class Live:
    """Bytes alive after a forward and after its backward, and the most during each."""

    forward: int
    forward_peak: int
    backward: int
    backward_peak: int


def live_bytes(model: nn.Module, x: Tensor, *, train: bool) -> Live:
    """Of the layer alone: its input and what it holds were there before."""
    with torch.set_grad_enabled(train), LiveBytes() as forward:
        y = model(x)
    if not train:
        return Live(forward.live_bytes, forward.peak_bytes, 0, 0)
    grad_y = torch.ones_like(y)
    with LiveBytes() as backward:
        y.backward(grad_y)
    return Live(forward.live_bytes, forward.peak_bytes, backward.live_bytes, backward.peak_bytes)


KINDS = list(itertools.product(DTYPES, [(False, False), (True, False), (False, True)], [True, False], [(5,), (2, 3)]))


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES[:3])
@pytest.mark.parametrize(("dtype", "bias_decoded", "train", "leading"), KINDS)
def test_live_bytes_are_the_same_on_real_and_on_fake_tensors(
    inputs: int,
    outputs: int,
    dtype: torch.dtype,
    bias_decoded: tuple[bool, bool],
    train: bool,
    leading: tuple[int, ...],
) -> None:
    bias, decoded = bias_decoded
    real = real_layer(inputs, outputs, dtype, bias)
    measured = []
    for layer in (real, copied(real)):
        x = torch.ones(*leading, inputs, dtype=dtype, requires_grad=train)
        measured.append(live_bytes(adapted(layer, dtype, decoded), x, train=train))
    with imagined_card(CPU):
        x = torch.ones(*leading, inputs, dtype=dtype, requires_grad=train)
        model = adapted(stand_in(inputs, outputs, dtype, bias), dtype, decoded)
        assert isinstance(model(x), FakeTensor)
        measured.append(live_bytes(model, x, train=train))
    assert measured[0] == measured[1] == measured[2]
    assert measured[0].forward == torch.Size(leading).numel() * outputs * dtype.itemsize
    if train and not decoded:  # the whole weight is decoded in the backward
        assert measured[0].backward_peak > inputs * outputs * dtype.itemsize
