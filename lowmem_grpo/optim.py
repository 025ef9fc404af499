"""The optimizer of the adapter, its learning rate as a function of the step, and its state as plain tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

__all__ = ["build_optimizer", "load_optimizer_state", "lr_at", "optimizer_state"]


def build_optimizer(
    name: str, parameters: Mapping[str, nn.Parameter], *, lr: float, weight_decay: float
) -> torch.optim.Optimizer:
    """The optimizer called `name` ("adamw": AdamW of arXiv 1711.05101, betas .9 and .999) over the fp32 masters."""
    assert name == "adamw", name
    # foreach=False: one temporary per parameter instead of copies of all of them.
    return torch.optim.AdamW(list(parameters.values()), lr=lr, weight_decay=weight_decay, foreach=False)


def lr_at(update: int, updates: int, *, lr: float, schedule: str, warmup: int) -> float:
    """The learning rate of optimizer step `update` (from 0) of `updates`.

    Linear warm-up over `warmup` steps, then "constant", "linear" or "cosine"; the last two reach 0 right after the
    last step.

    >>> [round(lr_at(u, 4, lr=1.0, schedule="linear", warmup=0), 2) for u in range(4)]
    [1.0, 0.75, 0.5, 0.25]
    """
    if update < warmup:
        return lr * (update + 1) / warmup
    progress = (update - warmup) / max(1, updates - warmup)
    if schedule == "linear":
        return lr * (1 - progress)
    if schedule == "cosine":
        return lr * 0.5 * (1 + math.cos(math.pi * progress))
    return lr


def optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, torch.Tensor]:
    """The state as `<parameter>|<entry>` -> CPU tensor copy; empty before the first step."""
    state = {}
    for name, parameter in parameters.items():
        for entry, value in optimizer.state.get(parameter, {}).items():
            state[f"{name}|{entry}"] = torch.as_tensor(value).detach().to("cpu", copy=True)
    return state


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], state: Mapping[str, torch.Tensor]
) -> None:
    """Put back what `optimizer_state` returned. Raises KeyError for a parameter the model does not have."""
    for key, value in state.items():
        name, entry = key.rsplit("|", 1)
        parameter = parameters[name]
        # AdamW keeps its step counter on the CPU and the moments beside the parameter.
        device = "cpu" if entry == "step" else parameter.device
        optimizer.state[parameter][entry] = value.to(device, copy=True)
