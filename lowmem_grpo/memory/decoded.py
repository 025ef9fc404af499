"""Keep the decoded weights of 4-bit linear layers, so that they are not decoded again at every call.

What it saves: time. bitsandbytes decodes the whole weight of a layer at every call on a CPU (and on a GPU above a
few rows); a decode step of a small model on a CPU spends more than half its time there.
What it costs: N x K values in the compute dtype per layer, beside the packed 4-bit buffer
(about 0.516 bytes per value).
The values are the same: `dequantize_4bit` is what the layer itself calls.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["hold_decoded_weights", "linear_4bit_layers"]


def linear_4bit_layers(model: nn.Module) -> list[Any]:
    """The bitsandbytes 4-bit linear layers of `model`, in the order of its modules."""
    from bitsandbytes.nn import Linear4bit

    return [module for module in model.modules() if isinstance(module, Linear4bit)]


def hold_decoded_weights(model: nn.Module, dtype: torch.dtype) -> int:
    """Decode every 4-bit linear layer once and let its forward multiply with that copy; returns the bytes held.

    The packed weight stays in place, so saving and merging see the layer unchanged. Each layer gets the attribute
    `decoded_weight`, (out, in) in `dtype`, outside the state dict.
    """
    from bitsandbytes.functional import dequantize_4bit

    held = 0
    for layer in linear_4bit_layers(model):
        weight = dequantize_4bit(layer.weight.data, layer.weight.quant_state).to(dtype)
        layer.decoded_weight = weight
        layer.forward = types.MethodType(_decoded_forward, layer)
        held += weight.numel() * weight.element_size()
    return held


def _decoded_forward(layer: Any, x: torch.Tensor) -> torch.Tensor:
    bias = layer.bias if layer.bias is None else layer.bias.to(x.dtype)
    return F.linear(x, layer.decoded_weight, bias)
