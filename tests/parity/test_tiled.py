"""The MLP in tiles against the MLP at once: values, gradients, how often it is computed, and what is alive."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import PeftModel
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

from lowmem_grpo.memory.live import LiveBytes
from lowmem_grpo.memory.lora import LeanLora
from lowmem_grpo.memory.tiled import tile_mlps
from lowmem_grpo.model import LoraSpec, Policy, attach_adapter
from lowmem_grpo.types import PackedMicroBatch
from tests.helpers import (
    CPU,
    adapted_layers,
    assert_gradients_close,
    gradients_of,
    group_of,
    pack,
    random_groups,
    shake_adapter,
    tiny_policy,
    updater_of,
)
from tests.tiny import FAMILIES, tiny_config, tiny_model, tiny_tokenizer

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
RANK = 4
LORA = LoraSpec(rank=RANK, alpha=8)
NORM_BEHIND = ("gemma2", "gemma3_text")
"""Families whose layers have a norm behind the MLP."""


def mlps_of(model: PeftModel) -> list[Any]:
    return [layer.mlp for layer in model.get_base_model().get_decoder().layers]


def lean_model(
    family: str = "llama", dtype: torch.dtype = torch.float32, spec: LoraSpec = LORA, hidden: int = 32, width: int = 64
) -> PeftModel:
    """A tiny model, its MLPs `width` wide, with live adapters whose masters are in fp32 or float64."""
    config = tiny_config(family)
    config.hidden_size, config.intermediate_size, config.head_dim = hidden, width, 8
    torch.manual_seed(0)
    return lean(AutoModelForCausalLM.from_config(config).to(dtype), dtype, spec)


def lean(base: Any, dtype: torch.dtype, spec: LoraSpec = LORA) -> PeftModel:
    model = attach_adapter(base.requires_grad_(False), spec)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            values = 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data = values.to(torch.promote_types(dtype, torch.float32))
    LeanLora(model, dtype)
    return model


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def masters(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def values_and_gradients(mlp: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """y, and what a backward with a fixed random gradient leaves in x and in every master."""
    leaf, trained = x.detach().requires_grad_(), masters(mlp)
    mlp.zero_grad()
    y = mlp(leaf)
    y.backward(random_tensor(*y.shape, dtype=y.dtype, seed=2))
    assert leaf.grad is not None
    return {"y": y.detach(), "x": leaf.grad, **{name: master.grad for name, master in trained.items()}}  # type: ignore[dict-item]


def logprobs_of(policy: Policy, micro: PackedMicroBatch) -> Tensor:
    return policy.logprobs(micro, temperature=0.7, head_chunk_tokens=5)[0]


@contextmanager
def counted_products(mlp: nn.Module) -> Iterator[Counter[str]]:
    """How often each linear layer of the MLP starts to compute inside the block."""
    counts: Counter[str] = Counter()

    def counting(name: str) -> Callable[..., None]:
        return lambda *_: counts.update([name])

    hooks = [child.register_forward_pre_hook(counting(name)) for name, child in mlp.named_children() if "proj" in name]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()


# Values and gradients


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("checkpointing", [True, False])
def test_an_update_equals_the_twin(family: str, dtype: torch.dtype, checkpointing: bool) -> None:
    policy, groups = tiny_policy(family, dtype, checkpointing=checkpointing), random_groups()
    updater, (micro,), several = updater_of(policy, kl_coef=0.3), pack(groups), pack(groups, micro_batch_tokens=10)
    expected = gradients_of(updater, [micro])
    loss = updater.update([micro], 0)["optim/loss"]
    assert len(expected) == 2 * adapted_layers(family)
    tokens, tolerance = len(micro.input_ids_N), TOLERANCE[dtype]
    for tile_tokens in (1, 3, tokens, tokens + 1):
        assert tile_mlps(policy.model, tile_tokens) == 2
        assert_gradients_close(gradients_of(updater, [micro]), expected, tolerance)
    tile_mlps(policy.model, 3)
    assert len(several) > 1
    assert_gradients_close(gradients_of(updater, several), expected, tolerance)
    assert updater.update([micro], 0)["optim/loss"] == pytest.approx(loss, rel=tolerance)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_of_policy_and_reference_equal_the_twin(family: str) -> None:
    policy, (micro,) = tiny_policy(family, torch.float64), pack(random_groups())
    tokens = len(micro.input_ids_N)
    found: dict[int, list[Tensor]] = {}
    for tile_tokens in (0, 1, 3, tokens, tokens + 1):
        tile_mlps(policy.model, tile_tokens)
        with torch.no_grad(), policy.reference():
            reference_BT = logprobs_of(policy, micro)
        with torch.no_grad():
            found[tile_tokens] = [reference_BT, logprobs_of(policy, micro)]
        policy.update_mode()
        found[tile_tokens].append(logprobs_of(policy, micro).detach())
        policy.sampling_mode()
    plain = found.pop(0)
    assert (plain[0] - plain[1]).abs().max() > 1e-3  # the adapter counts
    for values in found.values():
        torch.testing.assert_close(values, plain, rtol=0, atol=1e-11)


@functools.cache
def mlp64(family: str) -> tuple[PeftModel, Any]:
    model = lean_model(family, torch.float64)
    return model, mlps_of(model)[0]


@settings(max_examples=30)
@given(
    family=st.sampled_from(["llama", "phi3"]),
    shape=st.lists(st.integers(1, 5), max_size=3),
    tile_tokens=st.integers(1, 30),
    contiguous=st.booleans(),
)
def test_any_leading_axes_and_any_tile(family: str, shape: list[int], tile_tokens: int, contiguous: bool) -> None:
    model, mlp = mlp64(family)
    x = random_tensor(*shape, 32, dtype=torch.float64)
    if not contiguous:
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    tile_mlps(model, 0)
    plain = values_and_gradients(mlp, x)
    tile_mlps(model, tile_tokens)
    assert_gradients_close(values_and_gradients(mlp, x), plain, 1e-12)
    with torch.no_grad():
        assert_gradients_close({"y": mlp(x)}, {"y": plain["y"]}, 1e-12)


@pytest.mark.parametrize("grad", [True, False])
def test_no_tokens(grad: bool) -> None:
    model = lean_model()
    tile_mlps(model, 3)
    x = torch.zeros(1, 0, 32, requires_grad=grad)
    with torch.set_grad_enabled(grad):
        y = mlps_of(model)[0](x)
    assert (y.shape, y.requires_grad) == ((1, 0, 32), grad)
    if grad:
        y.sum().backward()
        assert x.grad is not None and x.grad.shape == (1, 0, 32)


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize(
    "targets",
    [
        ("q_proj", "v_proj"),  # nothing to train in the MLP, but its input needs a gradient
        ("gate_proj",),  # the input of the first MLP needs no gradient
        ("up_proj", "down_proj"),
    ],
)
def test_adapters_on_some_layers(targets: tuple[str, ...], checkpointing: bool) -> None:
    spec = LoraSpec(rank=RANK, alpha=8, target_modules=targets)
    model = attach_adapter(tiny_model(dtype=torch.float64), spec)
    policy = Policy(model, tiny_tokenizer(), CPU, base_name="tiny", activation_checkpointing=checkpointing)
    shake_adapter(policy)
    updater, micro_batches = updater_of(policy), pack(random_groups())
    expected = gradients_of(updater, micro_batches)
    assert len(expected) == 2 * 2 * len(targets)
    tile_mlps(model, 4)
    assert_gradients_close(gradients_of(updater, micro_batches), expected, 1e-10)


def test_an_mlp_in_which_nothing_needs_a_gradient() -> None:
    model = lean_model(spec=LoraSpec(rank=RANK, alpha=8, target_modules=("q_proj",)))
    tile_mlps(model, 3)
    assert not mlps_of(model)[0](random_tensor(1, 7, 32)).requires_grad


# 16 bits


def test_gradients_in_16_bits_add_up_in_fp32_over_the_tiles() -> None:
    """One tile per token gives the bits that one plain backward per token gives, each added to an fp32 `.grad`."""
    dtype, tokens = torch.bfloat16, 40
    model = lean_model(dtype=dtype)
    mlp = mlps_of(model)[0]
    x, grad_y = random_tensor(tokens, 32, dtype=dtype), random_tensor(tokens, 32, dtype=dtype, seed=2)
    for token in range(tokens):
        mlp(x[token, None]).backward(grad_y[token, None])
    expected = {name: master.grad.clone() for name, master in masters(mlp).items()}  # type: ignore[union-attr]
    rounded = {name: value.to(dtype).float() for name, value in expected.items()}
    tile_mlps(model, 1)
    actual = values_and_gradients(mlp, x)
    for name, value in expected.items():
        assert actual[name].dtype == torch.float32
        assert torch.equal(actual[name], value)
        assert not torch.equal(rounded[name], value)


def test_16_bits_stay_close_to_the_twin() -> None:
    """Within four eps (2^-7 each) of the norm: both round every product, in another order."""
    policy, micro_batches = tiny_policy(dtype=torch.bfloat16), pack(random_groups())
    updater = updater_of(policy)
    expected = gradients_of(updater, micro_batches)
    tile_mlps(policy.model, 3)
    actual = gradients_of(updater, micro_batches)
    assert {gradient.dtype for gradient in actual.values()} == {torch.float32}
    assert_gradients_close(actual, expected, 4 * torch.finfo(torch.bfloat16).eps)


# How often the MLP is computed


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("checkpointing", [True, False])
def test_how_often_each_product_is_computed(family: str, checkpointing: bool) -> None:
    policy, (micro,) = tiny_policy(family, checkpointing=checkpointing), pack(random_groups())
    assert len(micro.input_ids_N) == 23
    tile_mlps(policy.model, 5)  # 5 tiles
    policy.update_mode()
    again = 2 if checkpointing and family in NORM_BEHIND else 1
    for mlp in mlps_of(policy.model):
        with counted_products(mlp) as forward:
            logprobs_BT = logprobs_of(policy, micro)
        with counted_products(mlp) as backward:
            logprobs_BT.sum().backward()
        assert set(forward) == ({"gate_up_proj"} if family == "phi3" else {"gate_proj", "up_proj"}) | {"down_proj"}
        assert set(forward.values()) == {5}
        assert backward == {name: 5 * again for name in forward}


@pytest.mark.parametrize(("tokens", "products"), [(1, 1), (5, 1), (6, 2), (10, 2), (11, 3)])
def test_few_tokens_are_one_tile_in_inference(tokens: int, products: int) -> None:
    model = lean_model()
    tile_mlps(model, 5)
    (mlp, _), x = mlps_of(model), random_tensor(1, tokens, 32)
    with torch.no_grad(), counted_products(mlp) as counts:
        mlp(x)
    assert counts == {"gate_proj": products, "up_proj": products, "down_proj": products}


# What is alive


def test_only_the_input_waits_for_the_backward() -> None:
    model = lean_model(width=4096)
    (mlp, _) = mlps_of(model)
    x = random_tensor(1, 20, 32).requires_grad_()
    tile_mlps(model, 3)
    with LiveBytes() as live:
        y = mlp(x)
    assert live.live_bytes == y.numel() * 4
    saved: set[int] = set()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.add(t.untyped_storage().data_ptr()), lambda t: t):
        mlp(x)
    held = {master.untyped_storage().data_ptr() for master in masters(mlp).values()}
    assert saved - held == {x.untyped_storage().data_ptr()}


WIDTH = 8192
"""256 hidden widths: nearly all that is alive is as wide as the MLP."""


def peaks_of_an_update(family: str, checkpointing: bool, tiles: tuple[int, ...]) -> tuple[int, list[int]]:
    """Tokens of a micro-batch, and the peak of its forward and backward for each size of a tile."""
    config = tiny_config(family)
    config.intermediate_size = WIDTH
    model = attach_adapter(AutoModelForCausalLM.from_config(config).eval(), LORA)
    policy = Policy(model, tiny_tokenizer(), CPU, base_name="wide", activation_checkpointing=checkpointing)
    (micro,) = pack([group_of(range(5, 69), [range(70, 102), range(102, 136)], (1.0, 0.0))], micro_batch_tokens=256)
    policy.update_mode()
    logprobs_of(policy, micro).sum().backward()  # from here on every master has a gradient
    peaks = []
    for tile_tokens in tiles:
        tile_mlps(model, tile_tokens)
        with LiveBytes() as live:
            logprobs_of(policy, micro).sum().backward()
        peaks.append(live.peak_bytes)
    return len(micro.input_ids_N), peaks


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_the_peak_of_a_checkpointed_update_falls_with_the_tile(family: str) -> None:
    tokens, (plain, half, quarter) = peaks_of_an_update(family, True, (0, 64, 32))
    assert tokens == 128
    value = 4 * WIDTH  # bytes per token of one intermediate
    for peak, alive in ((plain, tokens), (half, 64), (quarter, 32)):
        assert peak == pytest.approx(6 * alive * value, rel=0.1)
    assert plain - half == pytest.approx(6 * 64 * value, rel=0.01)
    assert half - quarter == pytest.approx(6 * 32 * value, rel=0.01)


def test_without_checkpointing_no_layer_keeps_its_intermediate() -> None:
    tokens, (plain, tiled) = peaks_of_an_update("llama", False, (0, 32))
    value = 4 * WIDTH
    assert plain == pytest.approx((4 + 6) * tokens * value, rel=0.1)  # the first layer's 4 wait while the second works
    assert tiled == pytest.approx(6 * 32 * value, rel=0.1)


@pytest.mark.parametrize(("family", "intermediates"), [("llama", 3), ("phi3", 4)])
def test_the_peak_of_inference_falls_with_the_tile(family: str, intermediates: int) -> None:
    model = lean_model(family, width=WIDTH)
    mlp, x = mlps_of(model)[0], random_tensor(1, 64, 32)
    for tile_tokens, alive in ((0, 64), (16, 16)):
        tile_mlps(model, tile_tokens)
        with torch.no_grad(), LiveBytes() as live:
            mlp(x)
        assert live.peak_bytes == pytest.approx(intermediates * alive * WIDTH * 4, rel=0.1)


def test_a_4_bit_weight_in_flight_is_the_floor_of_the_backward() -> None:
    """H = 64, I = 4096, t = 8, fp32: 5 t I e + I H e = 640 KiB + 1 MiB, more than 6 t I e = 768 KiB."""
    torch.manual_seed(0)
    config = tiny_config()
    config.hidden_size, config.intermediate_size, config.head_dim = 64, 4096, 8
    base = AutoModelForCausalLM.from_config(config).requires_grad_(False)
    for layer in base.model.layers:
        for name, linear in list(layer.mlp.named_children())[:3]:
            packed = Linear4bit(linear.in_features, linear.out_features, False, torch.float32, quant_type="nf4")
            packed.support_avx512bf16_for_cpu = False
            packed.weight.data = linear.weight.data
            setattr(layer.mlp, name, packed.to("cpu"))
    base.is_loaded_in_4bit = True  # what peft chooses the class of its layer by
    model = lean(base, torch.float32)
    mlp, x = mlps_of(model)[0], random_tensor(1, 64, 64)
    plain = values_and_gradients(mlp, x)
    tile_mlps(model, 8)
    assert_gradients_close(values_and_gradients(mlp, x), plain, 1e-5)
    y = mlp(x.requires_grad_())
    with LiveBytes() as live:
        y.backward(torch.ones_like(y))
    assert live.peak_bytes == pytest.approx((640 << 10) + (1 << 20), rel=0.05)


# The simulator's tensors


def fake_parameters(model: nn.Module, mode: FakeTensorMode) -> None:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                fake = nn.Parameter(mode.from_tensor(parameter.data), requires_grad=parameter.requires_grad)
                module._parameters[name] = fake
        for name, buffer in module._buffers.items():
            module._buffers[name] = mode.from_tensor(buffer)


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma2"])
def test_fake_tensors_show_the_same_fall(family: str) -> None:
    falls = {}
    for kind, mode in (("real", contextlib.nullcontext()), ("fake", FakeTensorMode())):
        model = attach_adapter(tiny_model(family).requires_grad_(False), LORA)
        if isinstance(mode, FakeTensorMode):
            fake_parameters(model, mode)
        peaks = []
        with mode:
            LeanLora(model, torch.float32)
            model.get_base_model().activation_checkpointing_enable()
            model.train()
            embeds_BTH = torch.randn(1, 20, 32)
            for tile_tokens in (0, 0, 3):  # the first makes the gradients
                tile_mlps(model, tile_tokens)
                with LiveBytes() as live:
                    model(inputs_embeds=embeds_BTH, use_cache=False).logits.sum().backward()
                peaks.append(live.peak_bytes)
        assert all(master.grad.shape == master.shape for master in masters(model).values())  # type: ignore[union-attr]
        falls[kind] = peaks[1] - peaks[2]
    assert falls["fake"] == falls["real"] > 0


# Switching, and what autograd allows


def test_the_size_can_change_and_the_plain_forward_comes_back() -> None:
    model = lean_model()
    mlps, x = mlps_of(model), random_tensor(1, 12, 32)
    plain = [mlp.forward for mlp in mlps]
    for tile_tokens, products in ((5, 3), (0, 1), (0, 1), (3, 4), (6, 2), (0, 1)):
        assert tile_mlps(model, tile_tokens) == 2
        with torch.no_grad(), counted_products(mlps[1]) as counts:
            mlps[1](x)
        assert set(counts.values()) == {products}
    assert [mlp.forward for mlp in mlps] == plain


def test_a_forward_of_somebody_else_is_kept() -> None:
    model = lean_model()
    mlp = mlps_of(model)[0]
    original, seen = mlp.forward, []
    mlp.forward = other = lambda x: seen.append(len(x)) or original(x)
    tile_mlps(model, 5)
    with torch.no_grad():
        mlp(random_tensor(1, 12, 32))
    assert seen == [5, 5, 2]
    tile_mlps(model, 0)
    assert mlp.forward is other


def test_a_negative_size_is_refused() -> None:
    model = lean_model()
    with pytest.raises(ValueError, match=r"^tile_tokens must be 0 \(all tokens at once\) or more, got -1$"):
        tile_mlps(model, -1)


def test_a_step_between_the_two_passes_is_noticed() -> None:
    model = lean_model()
    tile_mlps(model, 3)
    mlp = mlps_of(model)[0]
    y = mlp(random_tensor(1, 7, 32))
    with torch.no_grad():
        mlp.gate_proj.lora_A["default"].weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_the_result_may_be_changed_in_place() -> None:
    model = lean_model(dtype=torch.float64)
    mlp, x = mlps_of(model)[0], random_tensor(1, 7, 32, dtype=torch.float64)
    expected = values_and_gradients(mlp, x)
    for tile_tokens in (3, 7):
        tile_mlps(model, tile_tokens)
        leaf = x.clone().requires_grad_()
        mlp(leaf).mul_(2.0).backward(random_tensor(1, 7, 32, dtype=torch.float64, seed=2))
        assert leaf.grad is not None
        assert_gradients_close({"x": leaf.grad / 2}, {"x": expected["x"]}, 1e-12)


def test_a_hook_on_a_master_sees_each_tile_then_the_sum_and_the_gradient_function_raises() -> None:
    model = lean_model()
    tile_mlps(model, 3)
    mlp, x = mlps_of(model)[0], random_tensor(1, 7, 32)
    master = mlp.down_proj.lora_B["default"].weight
    seen: list[Tensor] = []
    hook = master.register_post_accumulate_grad_hook(lambda m: seen.append(m.grad.clone()))
    mlp(x).sum().backward()
    assert len(seen) == 3 + 1
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])
    assert torch.equal(seen[2], seen[3]) and torch.equal(seen[3], master.grad)
    hook.remove()
    with pytest.raises(RuntimeError, match="appears to not have been used"):
        torch.autograd.grad(mlp(x).sum(), master)
