"""The MLP of every layer, some tokens at a time: its wide intermediate exists for one tile only.

An MLP y = down(act(gate(x)) * up(x)) works on each token alone, so it may be cut along the tokens anywhere. In the
backward one tile after the other is computed again and differentiated.

Saves: all that is as wide as the MLP, but for one tile. With N tokens, I the width of the MLP and e bytes per value of
the compute dtype, the plain backward of an MLP holds up to 6 N I e at a time: gate, activated gate, up, and the
gradients of the product and of its two factors (the product itself is gone by then). Here N is t, the tokens of a tile.
Without activation checkpointing, the 4 N I e that every layer keeps for the backward are saved too.
Costs: under activation checkpointing no product more. A layer is computed again up to the input of its MLP, the tiles
compute the rest again. A norm behind the MLP (gemma) needs its output again, so there the MLP is computed three times
instead of twice; without checkpointing twice instead of once. A 4-bit weight is decoded once per tile and pass instead
of once per pass.
Bytes: kept for the backward N x H x e, the input, which a lean adapter keeps anyway; for good nothing. For a while, of
the width I: forward 3 t I e (4 where one product makes gate and up: phi3), backward 6 t I e; or with a 4-bit weight,
where that is more, forward 2 t I e + I H e and backward 5 t I e + I H e, while the gradient of the product is made. Of
the width H: N x H x e for the output, as much for the gradient of the input, and up to 5 x t x H x e.

How the recomputation is cut short: torch's checkpoint (non-reentrant) stops as soon as the last tensor that the forward
saved is saved again. So one node saves the input and hands it on, and a second one, which saves nothing, computes the
output of what it is handed; its backward passes the gradient of the output on, and the first node's backward takes it
for that. Cutting the MLP along the tokens is known from ALST (arXiv 2506.13996).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

__all__ = ["tile_mlps"]


def tile_mlps(model: PeftModel, tile_tokens: int) -> int:
    """Let the MLP of every decoder layer work on `tile_tokens` tokens at a time; returns the number of MLPs.

    Call it again to change the size, 0 restores the plain forward; not between a forward and its backward. Values and
    gradients stay what they were, up to rounding. The gradients of adapters inside the MLP are added to `.grad` of
    their masters tile by tile, in the dtype of the masters, while `backward()` runs: a hook on a master runs after each
    tile and once more at the end, and `torch.autograd.grad` does not find them and raises. Raises ValueError for a
    negative size.

    >>> tile_mlps(policy.model, 256)  # a model of 28 layers
    28
    """
    if tile_tokens < 0:
        raise ValueError(f"tile_tokens must be 0 (all tokens at once) or more, got {tile_tokens}")
    mlps = [layer.mlp for layer in model.get_base_model().get_decoder().layers]
    for mlp in mlps:
        plain = mlp.forward.plain if isinstance(mlp.forward, _TiledForward) else mlp.forward
        mlp.forward = _TiledForward(mlp, plain, tile_tokens) if tile_tokens else plain
    return len(mlps)


@dataclass(frozen=True)
class _TiledForward:
    """Stands in for the forward of one MLP; `plain` is what it was."""

    mlp: nn.Module
    plain: Callable[[Tensor], Tensor]
    tile_tokens: int

    def __call__(self, x: Tensor) -> Tensor:
        x_N_H = x.reshape(-1, x.shape[-1])
        # Not looked up where there is no graph: a decode step would wait for it in every layer.
        masters = self._masters() if torch.is_grad_enabled() else []
        if masters or (torch.is_grad_enabled() and x.requires_grad):
            # The masters are handed over so that there is a node even where x needs no gradient.
            y_N_H = _Output.apply(_KeptInput.apply(x_N_H, self, *masters), self)
        else:
            y_N_H = self.output(x_N_H)
        return y_N_H.view(x.shape)

    def _masters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.mlp.parameters() if parameter.requires_grad]

    def output(self, x_N_H: Tensor) -> Tensor:
        """The output without a graph."""
        if len(x_N_H) <= self.tile_tokens:
            return self.plain(x_N_H)
        y_N_H = x_N_H.new_empty(x_N_H.shape)
        for x_T_H, y_T_H in zip(x_N_H.split(self.tile_tokens), y_N_H.split(self.tile_tokens), strict=True):
            y_T_H.copy_(self.plain(x_T_H))
        return y_N_H

    def differentiate(self, x_T_H: Tensor, grad_y_T_H: Tensor, *, needs_x: bool) -> Tensor | None:
        """The gradient of one tile of the input, if needed; those of the masters are added to their `.grad`."""
        leaf_T_H = x_T_H.detach().requires_grad_(needs_x)
        with torch.enable_grad():
            y_T_H = self.plain(leaf_T_H)
        torch.autograd.backward(y_T_H, grad_y_T_H)
        return leaf_T_H.grad


class _KeptInput(torch.autograd.Function):
    """Hands the input on; what comes back is taken for the gradient of the MLP's output."""

    @staticmethod
    def forward(ctx: Any, x_N_H: Tensor, tiled: _TiledForward, *masters: Tensor) -> Tensor:
        # The masters are kept for autograd's check that no step changes them between the two passes.
        ctx.save_for_backward(x_N_H, *masters)
        ctx.tiled = tiled
        return x_N_H.view_as(x_N_H)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_N_H: Tensor) -> tuple[Tensor | None, ...]:
        x_N_H, *masters = ctx.saved_tensors
        tiled, needs_x = ctx.tiled, ctx.needs_input_grad[0]
        grad_x_N_H = x_N_H.new_empty(x_N_H.shape) if needs_x else None
        for start in range(0, len(x_N_H), tiled.tile_tokens):
            tile = slice(start, start + tiled.tile_tokens)
            grad_x_T_H = tiled.differentiate(x_N_H[tile], grad_y_N_H[tile], needs_x=needs_x)
            if grad_x_N_H is not None:
                grad_x_N_H[tile] = grad_x_T_H
            del grad_x_T_H
        return grad_x_N_H, None, *(None for _ in masters)


class _Output(torch.autograd.Function):
    """Computes the output of what `_KeptInput` hands on, and passes the gradient of the output back to it."""

    @staticmethod
    def forward(ctx: Any, x_N_H: Tensor, tiled: _TiledForward) -> Tensor:
        return tiled.output(x_N_H)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_N_H: Tensor) -> tuple[Tensor, None]:
        return grad_y_N_H, None
