"""The optimizer of the adapter, its learning rate as a function of the step, and its state as plain tensors.

"adamw" holds the two moments of AdamW in fp32. "adamw_8bit" holds them in 8 bits:

Saves: 5.97 of the 8 bytes per trained value (rank 16 on all linear layers of Llama-3.1-8B: 239 MiB of 320).
Costs: the moments are decoded and encoded in every step, and rounded by at most .7 % (the first) and .35 % (the second)
of the largest value of their block. In tiny LoRA trainings of 50 steps the weights ended about 2 % of the way they had
gone from where AdamW brings them (tests/parity/test_adamw_8bit.py).
Bytes: per trained value 2 + 8 / 256; parameters of less than 4096 values keep 8; 2 KiB for the two code tables. For a
while, in a step, 8 + 1 + 4 / 256 per value of the largest parameter: its moments in fp32 and one of them encoded anew.

Blocks of 256 neighbouring values share one scale, the largest of them; a value is the nearest of 256 dynamic codes
times the scale (arXiv 2110.02861): signed for the first moment, unsigned for the second. The codes are dense in the
decade below the scale and reach seven decades down. bitsandbytes' own 8-bit optimizers have no kernel for a CPU, so
only its encoder and decoder are used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import bitsandbytes  # noqa: F401  registers torch.ops.bitsandbytes
import torch
from torch import Tensor, nn

__all__ = ["AdamW8bit", "build_optimizer", "dynamic_codes", "load_optimizer_state", "lr_at", "optimizer_state"]

BLOCK_VALUES = 256
"""Values that share one scale."""

SMALLEST_QUANTISED = 4096
"""Parameters of fewer values keep plain moments, as in bitsandbytes: there is little to save."""


def build_optimizer(
    name: str, parameters: Mapping[str, nn.Parameter], *, lr: float, weight_decay: float
) -> torch.optim.Optimizer:
    """The optimizer called `name` over the fp32 masters: AdamW of arXiv 1711.05101, betas .9 and .999.

    "adamw" keeps its moments in fp32, "adamw_8bit" in 8 bits (see the module).
    """
    if name == "adamw_8bit":
        return AdamW8bit(list(parameters.values()), lr=lr, weight_decay=weight_decay)
    assert name == "adamw", name
    # foreach=False: one temporary per parameter instead of copies of all of them.
    return torch.optim.AdamW(list(parameters.values()), lr=lr, weight_decay=weight_decay, foreach=False)


def dynamic_codes(*, signed: bool) -> list[float]:
    """The 256 values in [-1, 1], or in [0, 1], that an 8-bit number stands for, in order (arXiv 2110.02861).

    Besides 0 and 1 they are the middles of equal intervals of the decades from 1e-7 to 1, with twice as many in each
    decade as in the one below: the bits that the exponent does not need go to the fraction.

    >>> codes = dynamic_codes(signed=False)
    >>> len(codes), codes[0], codes[-1], round(codes[-2], 4)
    (256, 0.0, 1.0, 0.9965)
    """
    codes = [0.0, 1.0]
    for decade in range(7):
        intervals = 2**decade if signed else 2 ** (decade + 1)
        middles = [10.0 ** (decade - 6) * (0.1 + 0.9 * (i + 0.5) / intervals) for i in range(intervals)]
        codes += middles
        if signed:
            codes += [-middle for middle in middles]
    return sorted(codes)


class AdamW8bit(torch.optim.Optimizer):
    """AdamW with both moments in 8 bits, one parameter at a time.

    State of a parameter: `step` (an int), `exp_avg` and `exp_avg_sq` (uint8, of its shape), `exp_avg_absmax` and
    `exp_avg_sq_absmax` (fp32, one per block). A parameter of less than `SMALLEST_QUANTISED` values has plain moments
    and moves as it does with torch's AdamW. Parameters without a gradient are left alone.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})
        device = parameters[0].device
        self._codes = {
            "exp_avg": torch.tensor(dynamic_codes(signed=True), device=device),
            "exp_avg_sq": torch.tensor(dynamic_codes(signed=False), device=device),
        }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step from the gradients that are there; takes no closure."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_parameter(parameter, parameter.grad, group)

    def _step_parameter(self, parameter: nn.Parameter, gradient: Tensor, settings: Mapping[str, Any]) -> None:
        state, (beta1, beta2) = self.state[parameter], settings["betas"]
        step = state["step"] = int(state.get("step", 0)) + 1
        first, second = (self._moment(parameter, name) for name in self._codes)
        gradient = gradient.to(first.dtype)
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if parameter.numel() < SMALLEST_QUANTISED:
            state |= {"exp_avg": first, "exp_avg_sq": second}
            denominator = second.sqrt()
        else:
            self._encode(state, "exp_avg", first)
            self._encode(state, "exp_avg_sq", second)
            denominator = second.sqrt_()  # the step itself is made from the moments before they were rounded
        denominator.div_(math.sqrt(1 - beta2**step)).add_(settings["eps"])
        parameter.mul_(1 - settings["lr"] * settings["weight_decay"])
        parameter.addcdiv_(first, denominator, value=-settings["lr"] / (1 - beta1**step))

    def _moment(self, parameter: nn.Parameter, name: str) -> Tensor:
        """The moment as it was left: itself if it is plain, else decoded; zeros before the first step."""
        state, small = self.state[parameter], parameter.numel() < SMALLEST_QUANTISED
        if name not in state:
            return torch.zeros_like(parameter, dtype=parameter.dtype if small else torch.float32)
        if small:
            return cast(Tensor, state[name])
        return torch.ops.bitsandbytes.dequantize_blockwise(
            state[name], state[f"{name}_absmax"], self._codes[name], BLOCK_VALUES, torch.float32
        )

    def _encode(self, state: dict[str, Any], name: str, moment: Tensor) -> None:
        encoded = torch.ops.bitsandbytes.quantize_blockwise(moment, self._codes[name], BLOCK_VALUES)
        state[name], state[f"{name}_absmax"] = encoded


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
        # The step counter is on the CPU and the moments are beside the parameter.
        device = "cpu" if entry == "step" else parameter.device
        optimizer.state[parameter][entry] = value.to(device, copy=True)
