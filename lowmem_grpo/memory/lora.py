"""LoRA on frozen linear layers with one autograd node that keeps the input and computes the rest again.

For x (N, I), a frozen base weight W (O, I), and an adapter A (R, I), B (O, R) of scaling s, the layer and its gradients
for an incoming g (N, O) are

    y  = x W^T + bias + s (x A^T) B^T
    dA = s (g B)^T x        dB = s g^T (x A^T)        dx = g W + s (g B) A

Saves: what autograd keeps of a layer. peft's forward keeps x A^T and, where A is fp32 and x is not, a cast of x for
each layer: three times 4 N x I bytes for q, k and v, which share one x of 2 N x I. Here x itself is kept, once for all
layers that share it (A, B and W are held anyway). The products with B and A are added to x W^T and g W in place, and
nothing is cast: peft makes four to six (N, O) tensors on its way to y, this makes y.
Costs: x A^T once more in the backward, N x R x I multiplications. A 4-bit weight is decoded again in the backward, as
bitsandbytes does itself.
Bytes, with e bytes per value of the compute dtype: kept per layer N x I x e, shared as above. For a while, above
inputs, outputs and gradients: forward N x R x e; backward 2 x N x R x e, with masters of another dtype
R x max(I, O) x e more (gradients on their way to them), with a 4-bit weight O x I x e more. For good:
R x (I + O) x e per adapter and layer if its masters are of another dtype, else nothing.

The masters stay what the optimizer, the checkpoints and peft see. In 16 bits the products use a copy of them, refreshed
in place after each optimizer step, and the gradients arrive at the masters in the dtype of the masters.
"""

from __future__ import annotations

import types
from typing import Any, NamedTuple

import torch
from bitsandbytes import matmul_4bit
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from peft.tuners.lora import Linear as PeftLinear
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.bnb import Linear4bit as PeftLinear4bit
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lowmem_grpo.errors import ModelError

__all__ = ["LeanLora"]


class LeanLora:
    """Gives every LoRA linear layer of `model` the lean forward, and owns the copies the layers multiply with.

    The base layers may be `nn.Linear` or bitsandbytes' `Linear4bit`, with the attribute `decoded_weight` (see
    `memory.decoded`) or without. Make it when the model is complete: adapters attached, weights on their device,
    decoded weights held. Inputs must be in `compute_dtype`. Parameters, state dict and peft's functions stay as they
    were.

    Raises ModelError, before anything is changed, for a layer that computes more than a plain adapter on a frozen
    linear layer: dropout, DoRA and other variants, lora bias, fan_in_fan_out, merged or several active adapters, a
    trained base.
    """

    def __init__(self, model: nn.Module, compute_dtype: torch.dtype) -> None:
        layers = [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]
        for name, layer in layers:
            _check_layer(name, layer)
        self._compute_dtype = compute_dtype
        self._copies: list[tuple[Tensor, nn.Parameter]] = []
        for _, layer in layers:
            adapters = {name: self._adapter(layer, name) for name in layer.lora_A}
            layer.lean = (_base_of(layer.base_layer), adapters)
            layer.forward = types.MethodType(_lean_forward, layer)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring the copies up to date with the masters, in place; call it after every change of the masters.

        Does nothing for masters that are in the compute dtype: there the copy is the parameter itself.
        """
        for copy, master in self._copies:
            copy.copy_(master)

    @property
    def copies(self) -> list[Tensor]:
        """The copies in the compute dtype, none where the masters are in it."""
        return [copy for copy, _ in self._copies]

    def _adapter(self, layer: Any, name: str) -> _Adapter:
        master_a, master_b = layer.lora_A[name].weight, layer.lora_B[name].weight
        return _Adapter(master_a, master_b, self._copy_of(master_a), self._copy_of(master_b))

    def _copy_of(self, master: nn.Parameter) -> Tensor:
        if master.dtype == self._compute_dtype:
            return master
        copy = torch.empty_like(master, dtype=self._compute_dtype, requires_grad=False)
        self._copies.append((copy, master))
        return copy


class _Adapter(NamedTuple):
    """The parameters that receive the gradients, and the tensors that are multiplied with."""

    master_a_R_I: nn.Parameter
    master_b_O_R: nn.Parameter
    a_R_I: Tensor
    b_O_R: Tensor


class _Base(NamedTuple):
    """A frozen linear layer taken apart, since a module looks up its own parameters slowly.

    `weight` is dense (O, I) where `quant_state` is None, else packed in bitsandbytes' 4-bit form.
    """

    module: nn.Module
    weight: Tensor
    bias: Tensor | None
    quant_state: Any | None


class _LeanLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        master_a_R_I: Tensor,
        master_b_O_R: Tensor,
        adapter: _Adapter,
        base: _Base,
        scaling: float,
    ) -> Tensor:
        trains_adapter = any(ctx.needs_input_grad[1:3])
        # The weight is frozen, so it needs no saving; A and B do, or a step between the two passes would go unnoticed.
        ctx.save_for_backward(x if trains_adapter else None, adapter.a_R_I, adapter.b_O_R)
        ctx.x_shape, ctx.base, ctx.scaling = x.shape, base, scaling
        ctx.master_dtypes = master_a_R_I.dtype, master_b_O_R.dtype
        return _adapted_product(x, base, adapter, scaling)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N_O: Tensor) -> tuple[Tensor | None, ...]:
        x, a_R_I, b_O_R = ctx.saved_tensors
        needs_x, needs_a, needs_b = ctx.needs_input_grad[:3]
        grad_x = grad_a_R_I = grad_b_O_R = None
        if needs_x or needs_a:
            low_grad_N_R = grad_N_O @ b_O_R
        if needs_x:
            grad_x_N_I = grad_N_O @ _dense_weight(ctx.base, grad_N_O.dtype)
            grad_x = grad_x_N_I.addmm_(low_grad_N_R, a_R_I, alpha=ctx.scaling).view(ctx.x_shape)
        # Scaled in the dtype of the master: 16 bits would round once more.
        if needs_a:
            grad_a_R_I = (low_grad_N_R.T @ _rows(x)).to(ctx.master_dtypes[0]).mul_(ctx.scaling)
        if needs_b:
            grad_b_O_R = (grad_N_O.T @ F.linear(_rows(x), a_R_I)).to(ctx.master_dtypes[1]).mul_(ctx.scaling)
        return grad_x, grad_a_R_I, grad_b_O_R, None, None, None


def _lean_forward(layer: Any, x: Tensor) -> Tensor:
    base, adapters = layer.lean
    if layer._disable_adapters:
        return base.module(x)
    (name,) = layer._active_adapter
    adapter, scaling = adapters[name], layer.scaling[name]
    if torch.is_grad_enabled():
        y_N_O = _LeanLinear.apply(x, adapter.master_a_R_I, adapter.master_b_O_R, adapter, base, scaling)
    else:
        y_N_O = _adapted_product(x, base, adapter, scaling)
    # Out here, since autograd forbids in-place changes of a view that was made inside a function of one's own.
    return y_N_O if x.dim() == 2 else y_N_O.view(*x.shape[:-1], y_N_O.shape[1])


def _adapted_product(x: Tensor, base: _Base, adapter: _Adapter, scaling: float) -> Tensor:
    x_N_I = _rows(x)
    low_N_R = F.linear(x_N_I, adapter.a_R_I)
    return _base_product(x_N_I, base).addmm_(low_N_R, adapter.b_O_R.t(), alpha=scaling)


def _rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _base_product(x_N_I: Tensor, base: _Base) -> Tensor:
    """x W^T + bias in memory of its own."""
    _, weight, bias, quant_state = base
    dtype = x_N_I.dtype
    if bias is not None and bias.dtype != dtype:
        bias = bias.to(dtype)
    if quant_state is not None:
        return matmul_4bit(x_N_I, weight.t(), quant_state=quant_state, bias=bias)
    return F.linear(x_N_I, weight if weight.dtype == dtype else weight.to(dtype), bias)


def _dense_weight(base: _Base, dtype: torch.dtype) -> Tensor:
    """The weight (O, I) in `dtype`: decoded if it is packed, cast if it is held in another dtype."""
    if base.quant_state is None:
        return base.weight.to(dtype)
    return dequantize_4bit(base.weight.data, base.quant_state).to(dtype)


def _base_of(module: Any) -> _Base:
    decoded = getattr(module, "decoded_weight", None)
    if decoded is not None:
        return _Base(module, decoded, module.bias, None)
    return _Base(module, module.weight, module.bias, getattr(module.weight, "quant_state", None))


def _check_layer(name: str, layer: Any) -> None:
    """Raise ModelError unless the lean forward computes what the layer's own forward does."""
    base = layer.base_layer
    if type(layer) not in (PeftLinear, PeftLinear4bit) or not (type(base) is nn.Linear or isinstance(base, Linear4bit)):
        kinds = f"of the kind {type(layer).__name__} on {type(base).__name__}"
        raise ModelError(f"The adapter on {name} is {kinds}; only linear layers, 4-bit or not, are supported.")
    if isinstance(base, Linear4bit) and base.weight.quant_state is None:
        raise ModelError(f"The 4-bit layer {name} is not quantised yet; move the model to its device first.")
    if any(parameter.requires_grad for parameter in base.parameters()):
        raise ModelError(f"The base layer under the adapter on {name} is trainable; freeze its weight and bias.")
    if layer.fan_in_fan_out:
        raise ModelError(f"The adapter on {name} has fan_in_fan_out, a transposed weight; only (out, in) is supported.")
    if layer.merged_adapters:
        raise ModelError(
            f"{name} has merged its adapter {layer.merged_adapters[0]!r} into the weight; unmerge it first."
        )
    if len(layer.active_adapters) != 1:
        raise ModelError(f"{name} has the active adapters {layer.active_adapters}; activate exactly one.")
    for adapter in layer.lora_A:
        _check_adapter(f"The adapter {adapter!r} on {name}", layer, adapter)


def _check_adapter(subject: str, layer: Any, adapter: str) -> None:
    dropout = getattr(layer.lora_dropout[adapter], "p", 0.0)
    if dropout > 0:
        raise ModelError(f"{subject} has dropout {dropout}; set lora_dropout to 0.")
    if adapter in layer.lora_variant:
        kind = type(layer.lora_variant[adapter]).__name__
        raise ModelError(f"{subject} is a {kind}; only plain LoRA is supported, so leave out use_dora and its like.")
    if layer.lora_bias[adapter]:
        raise ModelError(f"{subject} has a bias of its own; set lora_bias to false.")
