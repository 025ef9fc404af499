"""The lean adapter against peft's own: values, gradients, what waits for the backward, and what it leaves alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from lowmem_grpo.errors import ModelError
from lowmem_grpo.memory.decoded import hold_decoded_weights
from lowmem_grpo.memory.live import LiveBytes
from lowmem_grpo.memory.lora import LeanLora
from lowmem_grpo.model import REFERENCE_ADAPTER, LoraSpec, Policy, attach_adapter
from tests.helpers import CPU, assert_gradients_close
from tests.tiny import FAMILIES, tiny_model, tiny_tokenizer

IN, OUT, RANK, ALPHA = 64, 96, 4, 12
KINDS = ("plain", "decoded", "packed")


class Block(nn.Module):
    """Layers side by side on one input, as q, k and v are."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([layer(x) for layer in self.layers], dim=-1)


def base_layer(kind: str, dtype: torch.dtype, bias: bool) -> nn.Module:
    """A random base layer of 96 x 64, plain or quantised to NF4."""
    if kind == "plain":
        return nn.Linear(IN, OUT, bias=bias, dtype=dtype)
    layer = Linear4bit(IN, OUT, bias=bias, compute_dtype=dtype, quant_type="nf4", compress_statistics=True)
    layer.support_avx512bf16_for_cpu = False
    if bias:
        layer.bias.data = layer.bias.data.to(dtype)
    return layer.to("cpu")


def config_of(**options: Any) -> LoraConfig:
    return LoraConfig(**(dict(r=RANK, lora_alpha=ALPHA, target_modules=["0", "1", "2"]) | options))


def adapted(
    kind: str = "plain",
    dtype: torch.dtype = torch.float32,
    *,
    bias: bool = False,
    count: int = 1,
    adapters: tuple[str, ...] = ("default",),
) -> PeftModel:
    """A block of `count` layers with live adapters, the masters in fp32 or float64; the first adapter is active."""
    torch.manual_seed(0)
    block = Block(*(base_layer(kind, dtype, bias) for _ in range(count)))
    if kind == "decoded":
        hold_decoded_weights(block, dtype)
    block.is_loaded_in_4bit = kind != "plain"  # what peft chooses the class of its layer by
    model = get_peft_model(block, config_of(), adapter_name=adapters[0])
    for name in adapters[1:]:
        model.add_adapter(name, config_of())
    return shaken(model, 0.3, torch.promote_types(dtype, torch.float32))


def shaken(model: PeftModel, std: float, dtype: torch.dtype) -> PeftModel:
    """The model with random values in every A and B, of every adapter, and masters of the given dtype."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = (std * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)).to(dtype)
    return model


def lora_layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def masters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def random_input(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def values_and_gradients(run: Callable[[Tensor], Tensor], x: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """y, and the gradients of x and of every master for a fixed random gradient of y."""
    leaf, trained = x.detach().clone(memory_format=torch.preserve_format).requires_grad_(), masters(model)
    y = run(leaf)
    grad_y = torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(y.dtype)
    grads = torch.autograd.grad(y, [leaf, *trained.values()], grad_y)
    return {"y": y.detach(), "x": grads[0], **dict(zip(trained, grads[1:], strict=True))}


@contextmanager
def saved_storages() -> Iterator[dict[int, int]]:
    """Address -> bytes of every storage that autograd saves inside the block."""
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield saved


def held_storages(model: nn.Module, lean: LeanLora | None = None) -> set[int]:
    """Addresses of what exists anyway: parameters, decoded weights, the copies of A and B."""
    decoded = [
        layer.base_layer.decoded_weight for layer in lora_layers(model) if hasattr(layer.base_layer, "decoded_weight")
    ]
    copies = [] if lean is None else [copy for copy, _ in lean._copies]
    return {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *decoded, *copies)}


# Values and gradients


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_a_whole_model_equals_the_twin(family: str, dtype: torch.dtype, tolerance: float) -> None:
    model = shaken(attach_adapter(tiny_model(family, dtype=dtype), LoraSpec(rank=4, alpha=8)), 0.1, dtype)
    ids_BT = torch.randint(5, 260, (2, 7), generator=torch.Generator().manual_seed(0))
    embeds_BTH = model.get_input_embeddings()(ids_BT).detach()
    run = lambda embeds: model(inputs_embeds=embeds).logits  # noqa: E731
    stock = values_and_gradients(run, embeds_BTH, model)
    assert len(stock) == 2 + 2 * len(lora_layers(model)) >= 18  # A and B of each layer, at least 4 in each of 2 blocks
    LeanLora(model, dtype)
    assert_gradients_close(values_and_gradients(run, embeds_BTH, model), stock, tolerance)
    with torch.no_grad():
        assert_gradients_close({"y": run(embeds_BTH)}, {"y": stock["y"]}, tolerance)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance"),
    [
        ("plain", torch.float64, 1e-12),
        ("decoded", torch.float64, 1e-12),
        *((kind, torch.float32, 1e-5) for kind in KINDS),
    ],
)
def test_each_kind_of_layer_equals_the_twin(kind: str, dtype: torch.dtype, tolerance: float, bias: bool) -> None:
    model = adapted(kind, dtype, bias=bias)
    x = random_input(2, 5, IN, dtype=dtype)
    stock = values_and_gradients(model, x, model)
    LeanLora(model, dtype)
    lean = values_and_gradients(model, x, model)
    assert_gradients_close(lean, stock, tolerance)
    assert [lean[name].dtype for name in lean] == [dtype] * len(stock)
    with torch.no_grad():
        assert_gradients_close({"y": model(x)}, {"y": stock["y"]}, tolerance)
    assert all(parameter.grad is None for parameter in lora_layers(model)[0].base_layer.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_sixteen_bits_stay_close_to_fp32(kind: str, dtype: torch.dtype) -> None:
    """Within one eps of the norm (2^-7 and 2^-10; half of it is one rounding), weights and inputs being the same."""
    tolerance = torch.finfo(dtype).eps
    model, exact = adapted(kind, dtype, bias=True), adapted("plain", torch.float32, bias=True)
    for layer, twin in zip(lora_layers(model), lora_layers(exact), strict=True):
        eye = torch.eye(IN, dtype=dtype)
        with torch.no_grad():
            twin.base_layer.bias.copy_(layer.base_layer.bias)
            layer.base_layer.bias.zero_()
            twin.base_layer.weight.copy_(layer.base_layer(eye).T)
            layer.base_layer.bias.copy_(twin.base_layer.bias)
    x = random_input(3, 20, IN, dtype=dtype)
    expected = values_and_gradients(exact, x.float(), exact)
    LeanLora(model, dtype)
    actual = values_and_gradients(model, x, model)
    assert (actual["y"].dtype, actual["x"].dtype) == (dtype, dtype)
    assert {actual[name].dtype for name in masters(model)} == {torch.float32}
    actual = dict(zip(expected, (value.float() for value in actual.values()), strict=True))
    assert_gradients_close(actual, expected, tolerance)
    with torch.no_grad():
        assert_gradients_close({"y": model(x).float()}, {"y": expected["y"]}, tolerance)


def test_a_weight_and_a_bias_of_another_dtype_are_cast_to_that_of_the_input() -> None:
    model = adapted("plain", torch.bfloat16, bias=True)
    LeanLora(model, torch.float32)
    x = random_input(3, IN)
    lean = values_and_gradients(model, x, model)
    base = lora_layers(model)[0].base_layer
    base.weight.data, base.bias.data = base.weight.data.float(), base.bias.data.float()
    assert_gradients_close(lean, values_and_gradients(model, x, model), 1e-6)
    assert lean["y"].dtype == torch.float32


@pytest.mark.parametrize("shape", [(IN,), (1, IN), (5, IN), (2, 3, IN), (2, 1, 3, IN)])
def test_any_leading_axes(shape: tuple[int, ...]) -> None:
    model = adapted("plain", torch.float64, bias=True)
    x = random_input(*shape, dtype=torch.float64)
    stock = values_and_gradients(model, x, model)
    LeanLora(model, torch.float64)
    assert_gradients_close(values_and_gradients(model, x, model), stock, 1e-12)
    with torch.no_grad():
        assert model(x).shape == (*shape[:-1], OUT)


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows(kind: str) -> None:
    model = adapted(kind)
    LeanLora(model, torch.float32)
    x = torch.zeros(2, 0, IN, requires_grad=True)
    y = model(x)
    y.sum().backward()
    assert (y.shape, x.grad.shape) == ((2, 0, OUT), (2, 0, IN))
    assert all(master.grad.abs().max() == 0 for master in masters(model).values())


def test_an_input_that_is_not_contiguous() -> None:
    model = adapted("plain", torch.float64)
    x = random_input(IN, 3, 5, dtype=torch.float64).permute(2, 1, 0)
    assert not x.is_contiguous()
    stock = values_and_gradients(model, x, model)
    LeanLora(model, torch.float64)
    assert_gradients_close(values_and_gradients(model, x, model), stock, 1e-12)


def test_by_hand() -> None:
    """x = [1, 2], W = [[3, 4]], bias 5, A = [[1, -1]], B = [[2]], scaling 12 / 4 = 3: 11 + 5 + 3 * (-1 * 2) = 10."""
    torch.manual_seed(0)
    model = get_peft_model(Block(nn.Linear(2, 1)), config_of(r=1, lora_alpha=3))
    (layer,) = lora_layers(model)
    values = (
        (layer.base_layer.weight, [[3.0, 4.0]]),
        (layer.base_layer.bias, [5.0]),
        (layer.lora_A["default"].weight, [[1.0, -1.0]]),
        (layer.lora_B["default"].weight, [[2.0]]),
    )
    with torch.no_grad():
        for parameter, value in values:
            parameter.copy_(torch.tensor(value))
    LeanLora(model, torch.float32)
    x = torch.tensor([[1.0, 2.0]], requires_grad=True)
    y = model(x)
    y.backward(torch.tensor([[10.0]]))
    assert y.item() == 10.0
    # u = 3 * 10 * 2 = 60: dA = 60 x, dB = 3 * 10 * (x A^T = -1), dx = 10 W + 60 A
    assert layer.lora_A["default"].weight.grad.tolist() == [[60.0, 120.0]]
    assert layer.lora_B["default"].weight.grad.tolist() == [[-30.0]]
    assert x.grad.tolist() == [[90.0, -20.0]]


@pytest.mark.parametrize("bias", [False, True])
def test_gradcheck(bias: bool) -> None:
    model = adapted("plain", torch.float64, bias=bias)
    LeanLora(model, torch.float64)
    a_R_I, b_O_R = masters(model).values()
    x = random_input(2, 2, IN, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, a, b: model(x), (x, a_R_I, b_O_R)
    )  # they are the layer's own, moved in place


def test_second_derivative_is_refused() -> None:
    model = adapted()
    LeanLora(model, torch.float32)
    x = random_input(3, IN).requires_grad_()
    (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_only_the_gradients_that_are_asked_for() -> None:
    model = adapted()
    LeanLora(model, torch.float32)
    a_R_I, b_O_R = masters(model).values()
    x = random_input(3, IN)
    expected = values_and_gradients(model, x, model)
    a_R_I.requires_grad_(False)
    (grad,) = torch.autograd.grad(model(x).sum(), b_O_R)
    torch.testing.assert_close(grad, 3 * (x @ a_R_I.T).sum(0).expand(OUT, RANK))
    a_R_I.requires_grad_(True)
    b_O_R.requires_grad_(False)
    model(x).backward(torch.randn((3, OUT), generator=torch.Generator().manual_seed(2), dtype=torch.float64).float())
    assert_gradients_close({"a": a_R_I.grad}, {"a": list(expected.values())[2]}, 1e-6)
    assert (x.grad, b_O_R.grad) == (None, None)


def test_the_result_may_be_changed_in_place() -> None:
    model = adapted()
    LeanLora(model, torch.float32)
    (layer,) = lora_layers(model)
    x = random_input(2, 3, IN)
    doubled = values_and_gradients(lambda x: layer(x) * 2.0, x, model)
    assert_gradients_close(values_and_gradients(lambda x: layer(x).mul_(2.0), x, model), doubled, 1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_under_activation_checkpointing(kind: str) -> None:
    model = adapted(kind)
    LeanLora(model, torch.float32)
    x = random_input(2, 3, IN)
    run = lambda x: model(torch.tanh(x))  # noqa: E731
    expected = values_and_gradients(run, x, model)
    again = values_and_gradients(lambda x: checkpoint(run, x, use_reentrant=False), x, model)
    assert_gradients_close(again, expected, 1e-7)


def test_a_checkpointed_model_equals_the_twin() -> None:
    dtype = torch.float64
    model = shaken(attach_adapter(tiny_model("qwen2", dtype=dtype), LoraSpec(rank=4, alpha=8)), 0.1, dtype)
    embeds_BTH = model.get_input_embeddings()(torch.arange(10, 22).view(2, 6)).detach()
    run = lambda embeds: model(inputs_embeds=embeds, use_cache=False).logits  # noqa: E731
    stock = values_and_gradients(run, embeds_BTH, model)
    LeanLora(model, dtype)
    model.get_base_model().activation_checkpointing_enable()
    model.train()  # checkpointing acts in train mode only; nothing here has dropout
    calls: list[int] = []
    lora_layers(model)[0].register_forward_hook(lambda *_: calls.append(1))
    assert_gradients_close(values_and_gradients(run, embeds_BTH, model), stock, 1e-12)
    assert len(calls) == 2  # once more in the backward


# Bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 3])
def test_only_the_input_is_saved_and_a_shared_one_once(kind: str, dtype: torch.dtype, count: int) -> None:
    model = adapted(kind, dtype, count=count)
    x = random_input(2, 5, IN, dtype=dtype).requires_grad_()
    with saved_storages() as stock:
        model(x)
    lean = LeanLora(model, dtype)
    with saved_storages() as saved:
        model(x)
    for address in held_storages(model, lean):
        saved.pop(address, None)
        stock.pop(address, None)
    assert saved == {x.data_ptr(): 2 * 5 * IN * dtype.itemsize}
    assert len(stock) > count  # what it is good for: peft also saves the products with A


def test_a_view_of_the_input_is_saved_as_it_is() -> None:
    model = adapted()
    lean = LeanLora(model, torch.float32)
    x = random_input(IN, 5, 2).requires_grad_()
    with saved_storages() as saved:
        model(x.permute(2, 1, 0))
    assert set(saved) - held_storages(model, lean) == {x.data_ptr()}


def test_a_frozen_adapter_saves_no_input() -> None:
    model = adapted(dtype=torch.bfloat16)
    expected_grad = values_and_gradients(model, random_input(3, IN, dtype=torch.bfloat16), model)["x"]
    model.requires_grad_(False)
    lean = LeanLora(model, torch.bfloat16)
    x = random_input(3, IN, dtype=torch.bfloat16).requires_grad_()
    with saved_storages() as saved:
        y = model(x)
    assert set(saved) <= held_storages(model, lean)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(y.dtype))
    assert_gradients_close({"x": x.grad}, {"x": expected_grad}, 1e-2)


def forward_and_backward_peak(model: PeftModel, x: Tensor) -> tuple[int, int]:
    """Peak bytes of the layer's forward, y included, and of its backward, the gradients included."""
    with LiveBytes() as forward:
        y = lora_layers(model)[0](x)
    grad_y = torch.ones_like(y)
    with LiveBytes() as backward:
        y.backward(grad_y)
    return forward.peak_bytes, backward.peak_bytes


@pytest.mark.parametrize("kind", ["plain", "decoded"])
def test_peak_bytes_follow_the_formula(kind: str) -> None:
    rows, size = 50, 4
    model = adapted(kind)
    LeanLora(model, torch.float32)
    forward, backward = forward_and_backward_peak(model, random_input(rows, IN).requires_grad_())
    assert forward == size * (rows * OUT + rows * RANK)
    assert backward == size * (rows * IN + RANK * (IN + OUT) + 2 * rows * RANK)


def test_peak_bytes_with_masters_of_another_dtype() -> None:
    rows, size = 50, 2
    model = adapted("plain", torch.bfloat16)
    LeanLora(model, torch.bfloat16)
    x = random_input(rows, IN, dtype=torch.bfloat16).requires_grad_()
    forward, backward = forward_and_backward_peak(model, x)
    assert forward == size * (rows * OUT + rows * RANK)
    gradients = size * rows * IN + 4 * RANK * (IN + OUT)
    assert gradients < backward <= gradients + size * (2 * rows * RANK + RANK * OUT)


def test_peak_bytes_with_a_weight_to_decode() -> None:
    rows, size = 50, 4
    model = adapted("packed")
    LeanLora(model, torch.float32)
    # The forward decodes inside bitsandbytes' operator, where nothing is counted.
    _, backward = forward_and_backward_peak(model, random_input(rows, IN).requires_grad_())
    assert backward == size * (rows * IN + OUT * IN + rows * RANK)


def test_masters_of_the_compute_dtype_have_no_copy() -> None:
    model = adapted(count=2, adapters=("default", REFERENCE_ADAPTER))
    assert LeanLora(model, torch.float32)._copies == []
    half = adapted(dtype=torch.bfloat16, count=2, adapters=("default", REFERENCE_ADAPTER))
    copies = [copy for copy, _ in LeanLora(half, torch.bfloat16)._copies]
    # 2 layers x 2 adapters, R x (I + O) x 2 bytes each
    assert sum(copy.numel() * copy.element_size() for copy in copies) == 2 * 2 * RANK * (IN + OUT) * 2
    assert len({copy.data_ptr() for copy in copies}) == 8


# Masters and their copies


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_changed_master_is_seen_after_refresh_and_in_the_same_memory(dtype: torch.dtype) -> None:
    model = adapted(dtype=dtype, count=2, adapters=("default", REFERENCE_ADAPTER))
    lean = LeanLora(model, dtype)
    pointers = [copy.data_ptr() for copy, _ in lean._copies]
    x = random_input(3, IN, dtype=dtype)
    with torch.no_grad():
        before = model(x)
        for parameter in masters(model).values():
            parameter.mul_(-1.5)
        assert torch.equal(model(x), before)
        lean.refresh()
        after = model(x)
    assert [copy.data_ptr() for copy, _ in lean._copies] == pointers
    assert all(torch.equal(copy, master.detach().to(dtype)) for copy, master in lean._copies)
    fresh = adapted(dtype=dtype, count=2, adapters=("default", REFERENCE_ADAPTER))
    fresh.load_state_dict(model.state_dict())
    LeanLora(fresh, dtype)
    with torch.no_grad():
        assert torch.equal(fresh(x), after)
    assert (after - before).abs().max() > 0.1


def test_a_changed_master_is_seen_at_once_in_its_own_dtype() -> None:
    model = adapted()
    lean = LeanLora(model, torch.float32)
    x = random_input(3, IN)
    with torch.no_grad():
        before = model(x)
        for parameter in masters(model).values():
            parameter.mul_(2.0)
        base = lora_layers(model)[0].base_layer(x)
        torch.testing.assert_close(model(x) - base, 4 * (before - base))
        after = model(x)
        lean.refresh()
        assert torch.equal(model(x), after)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_between_forward_and_backward_is_an_error(dtype: torch.dtype) -> None:
    model = adapted(dtype=dtype)
    lean = LeanLora(model, dtype)
    y = model(random_input(3, IN, dtype=dtype))
    with torch.no_grad():
        for parameter in masters(model).values():
            parameter.mul_(2.0)
    lean.refresh()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def ones_in_bf16() -> tuple[PeftModel, Tensor]:
    """A bf16 block whose A and B are 1 everywhere, and an input row [1, 0, 0, ...]."""
    model = adapted(dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in masters(model).values():
            parameter.fill_(1.0)
    LeanLora(model, torch.bfloat16)
    return model, torch.eye(1, IN, dtype=torch.bfloat16)


def test_gradients_add_up_in_fp32() -> None:
    """256 + 1 is 256 in bf16: sums of gradients must not be made there."""
    model, x = ones_in_bf16()
    lora_layers(model)[0].scaling["default"] = 1.0
    for value in (256.0, 1.0):
        model(value * x).sum().backward()
    _, b_O_R = masters(model).values()
    assert b_O_R.grad.dtype == torch.float32
    assert torch.equal(b_O_R.grad, torch.full((OUT, RANK), 257.0))


def test_gradients_are_scaled_in_fp32() -> None:
    """dA = 1.01 x 96 at the input that is 1, dB = 1.01 x 1; bf16 would make 97 and 1.0078 of them."""
    model, x = ones_in_bf16()
    lora_layers(model)[0].scaling["default"] = 1.01
    model(x).sum().backward()
    a_R_I, b_O_R = masters(model).values()
    torch.testing.assert_close(a_R_I.grad[:, 0], torch.full((RANK,), 96.96))
    assert a_R_I.grad[:, 1:].abs().max() == 0
    torch.testing.assert_close(b_O_R.grad, torch.full((OUT, RANK), 1.01))


# Switches


@pytest.mark.parametrize("kind", KINDS)
def test_a_disabled_adapter_leaves_the_base_and_its_gradient(kind: str) -> None:
    model = adapted(kind, bias=True)
    (layer,) = lora_layers(model)
    LeanLora(model, torch.float32)
    x = random_input(2, 3, IN).requires_grad_()
    expected = layer.base_layer(x)
    (expected_grad,) = torch.autograd.grad(expected.square().sum(), x)
    enabled = model(x).detach()
    with model.disable_adapter():
        y = model(x)
        with torch.no_grad():
            assert torch.equal(model(x), expected)
    (grad,) = torch.autograd.grad(y.square().sum(), x)
    assert torch.equal(y, expected)
    assert torch.equal(grad, expected_grad)
    assert torch.equal(model(x), enabled)
    assert (enabled - expected).abs().max() > 0.1


@pytest.mark.parametrize("with_reference", [False, True])
def test_the_reference_of_a_policy_equals_the_twin(with_reference: bool) -> None:
    model = attach_adapter(tiny_model(dtype=torch.float64), LoraSpec(rank=4, alpha=8))
    if with_reference:
        model.add_adapter(REFERENCE_ADAPTER, model.peft_config["default"])
    policy = Policy(shaken(model, 0.1, torch.float64), tiny_tokenizer(), CPU, base_name="tiny")
    ids_BT = torch.arange(10, 22).view(2, 6)

    @torch.no_grad()
    def logits() -> dict[str, Tensor]:
        with policy.reference():
            reference = model(input_ids=ids_BT).logits
        return {"reference": reference, "policy": model(input_ids=ids_BT).logits}

    stock = logits()
    LeanLora(model, torch.float64)
    assert_gradients_close(logits(), stock, 1e-12)
    assert (stock["reference"] - stock["policy"]).abs().max() > 0.1


def test_the_active_adapter_is_the_one_that_trains() -> None:
    model = adapted(adapters=("default", REFERENCE_ADAPTER), dtype=torch.bfloat16)
    LeanLora(model, torch.bfloat16)
    x = random_input(3, IN, dtype=torch.bfloat16)
    default = model(x).detach()
    model.set_adapter(REFERENCE_ADAPTER)
    y = model(x)
    y.sum().backward()
    assert (y - default).abs().max() > 0.1
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == (f".{REFERENCE_ADAPTER}." in name), name


def test_without_gradients_no_function_is_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted()
    LeanLora(model, torch.float32)
    x = random_input(3, IN).requires_grad_()
    expected = model.get_base_model().layers[0](x)
    assert expected.grad_fn.name() == "_LeanLinearBackward"
    entered = lambda *_: pytest.fail("a function was entered")  # noqa: E731
    monkeypatch.setattr("lowmem_grpo.memory.lora._LeanLinear.apply", entered)
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    with torch.inference_mode():
        assert torch.equal(model(x.detach()), expected)


# What it leaves alone


def test_parameters_state_and_peft_functions_stay_as_they_were() -> None:
    model = adapted("decoded", torch.bfloat16, bias=True, count=2, adapters=("default", REFERENCE_ADAPTER))
    parameters, state = dict(model.named_parameters()), {k: v.clone() for k, v in model.state_dict().items()}
    adapter = get_peft_model_state_dict(model)
    buffers = [name for name, _ in model.named_buffers()]
    lean = LeanLora(model, torch.bfloat16)
    after = dict(model.named_parameters())
    assert list(after) == list(parameters)
    assert all(after[name] is parameter for name, parameter in parameters.items())
    assert [name for name, _ in model.named_buffers()] == buffers
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert get_peft_model_state_dict(model).keys() == adapter.keys()
    pointers = [copy.data_ptr() for copy, _ in lean._copies]
    set_peft_model_state_dict(model, {name: value + 1 for name, value in adapter.items()})
    lean.refresh()
    assert all(torch.equal(copy, master.detach().bfloat16()) for copy, master in lean._copies)
    assert [copy.data_ptr() for copy, _ in lean._copies] == pointers
    changed = get_peft_model_state_dict(model)
    assert [changed[name].dtype for name in changed] == [torch.float32] * len(adapter)


def plain_block(**options: Any) -> PeftModel:
    return get_peft_model(Block(nn.Linear(4, 4)), config_of(**options))


def transposed_block() -> PeftModel:
    return get_peft_model(Block(Conv1D(4, 4)), config_of(fan_in_fan_out=True))


def flagged_as_transposed() -> PeftModel:
    model = plain_block()
    lora_layers(model)[0].fan_in_fan_out = True
    return model


def merged_block() -> PeftModel:
    model = plain_block()
    model.merge_adapter()
    return model


def two_active() -> PeftModel:
    model = plain_block()
    model.add_adapter("second", config_of())
    model.base_model.set_adapter(["default", "second"])
    return model


def not_quantised() -> PeftModel:
    return get_peft_model(Block(Linear4bit(64, 64, quant_type="nf4")), config_of())


WHERE = "base_model.model.layers.0"


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: get_peft_model(Block(nn.Conv2d(1, 1, 1)), config_of()),
            f"The adapter on {WHERE} is of the kind Conv2d on Conv2d; only linear layers, 4-bit or not, are supported.",
        ),
        (
            lambda: get_peft_model(Block(nn.Embedding(4, 4)), config_of()),
            f"The adapter on {WHERE} is of the kind Embedding on Embedding; "
            "only linear layers, 4-bit or not, are supported.",
        ),
        (
            transposed_block,
            f"The adapter on {WHERE} is of the kind Linear on Conv1D; only linear layers, 4-bit or not, are supported.",
        ),
        (
            flagged_as_transposed,
            f"The adapter on {WHERE} has fan_in_fan_out, a transposed weight; only (out, in) is supported.",
        ),
        (
            lambda: plain_block(lora_dropout=0.1),
            f"The adapter 'default' on {WHERE} has dropout 0.1; set lora_dropout to 0.",
        ),
        (
            lambda: plain_block(use_dora=True),
            f"The adapter 'default' on {WHERE} is a DoraLinearVariant; "
            "only plain LoRA is supported, so leave out use_dora and its like.",
        ),
        (
            lambda: plain_block(lora_bias=True),
            f"The adapter 'default' on {WHERE} has a bias of its own; set lora_bias to false.",
        ),
        (merged_block, f"{WHERE} has merged its adapter 'default' into the weight; unmerge it first."),
        (two_active, f"{WHERE} has the active adapters ['default', 'second']; activate exactly one."),
        (
            lambda: plain_block(bias="lora_only"),
            f"The base layer under the adapter on {WHERE} is trainable; freeze its weight and bias.",
        ),
        (not_quantised, f"The 4-bit layer {WHERE} is not quantised yet; move the model to its device first."),
    ],
)
def test_what_is_refused(make: Callable[[], PeftModel], sentence: str) -> None:
    model = make()
    with pytest.raises(ModelError) as caught:
        LeanLora(model, torch.float32)
    assert str(caught.value) == sentence
    assert not any("forward" in vars(layer) for layer in lora_layers(model))


def test_one_refused_layer_leaves_the_others_as_they_were() -> None:
    model = adapted(count=2)
    lora_layers(model)[1].lora_dropout["default"] = nn.Dropout(0.5)
    with pytest.raises(ModelError, match=r"layers\.1 has dropout 0\.5"):
        LeanLora(model, torch.float32)
    assert not any("forward" in vars(layer) or hasattr(layer, "lean") for layer in lora_layers(model))


def test_a_dropout_of_zero_is_none() -> None:
    model = adapted()
    (layer,) = lora_layers(model)
    x = random_input(3, IN)
    stock = values_and_gradients(model, x, model)
    layer.lora_dropout["default"] = nn.Dropout(0.0)
    LeanLora(model, torch.float32)
    assert_gradients_close(values_and_gradients(model.train(), x, model), stock, 1e-6)
