"""AdamW with moments in 8 bits against torch's AdamW: where the weights end, and the bytes of the state."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lowmem_grpo.memory.live import LiveBytes
from lowmem_grpo.model import LoraSpec, attach_adapter
from lowmem_grpo.optim import build_optimizer
from tests.tiny import tiny_model

STEPS = 50

# Rounding moves the first moment by at most .7 % of the largest value of its block, .4 % in the root of the mean
# square, and is remembered for ten steps: .4 % / sqrt(1 - .9^2) = .9 % of the largest value. A usual value of a block
# of 256 is a third of the largest, so a single step is wrong by some 3 %; over many steps a part of it cancels.
BOUND = 0.05


def train(name: str, weights: nn.Parameter, gradient: Callable[[Tensor], Tensor], lr: float) -> Tensor:
    """The weights after `STEPS` steps."""
    optimizer = build_optimizer(name, {"w": weights}, lr=lr, weight_decay=0.01)
    for _ in range(STEPS):
        weights.grad = gradient(weights.detach())
        optimizer.step()
    return weights.detach()


def way(moved: Tensor, twin: Tensor, start: Tensor) -> float:
    """How far the two ends are apart, in lengths of the way that the twin went."""
    return ((moved - twin).norm() / (twin - start).norm()).item()


@pytest.mark.parametrize("noise", [0.0, 1.0, 10.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_on_a_random_quadratic_the_weights_go_the_same_way(noise: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    target, curvature = torch.randn(64, 256, generator=generator), 0.5 + torch.rand(64, 256, generator=generator)

    def end(name: str) -> Tensor:
        noises = torch.Generator().manual_seed(seed + 100)
        return train(
            name,
            nn.Parameter(torch.zeros(64, 256)),
            lambda weights: curvature * (weights - target) + noise * torch.randn(64, 256, generator=noises),
            lr=0.01,
        )

    plain, moved = end("adamw"), end("adamw_8bit")
    assert 0 < way(moved, plain, torch.zeros(64, 256)) < BOUND
    distances = [(weights - target).norm().item() for weights in (torch.zeros(64, 256), plain, moved)]
    assert distances[2] == pytest.approx(distances[1], rel=1e-2)
    assert distances[1] < 0.97 * distances[0]


def lora_training(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float], int]:
    """Start, end, losses and state bytes of a tiny LoRA training; with rank 128 most matrices are encoded."""
    model = attach_adapter(tiny_model("llama"), LoraSpec(rank=128, alpha=128, seed=0))
    named = {key: p for key, p in model.named_parameters() if p.requires_grad}
    start = {key: p.detach().clone() for key, p in named.items()}
    optimizer = build_optimizer(name, named, lr=1e-3, weight_decay=0.0)
    batches = torch.randint(5, 260, (4, 4, 16), generator=torch.Generator().manual_seed(3))
    losses, state_bytes = [], []
    for index in range(STEPS):
        ids = batches[index % 4]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
        with LiveBytes() as live:
            optimizer.step()
        state_bytes.append(live.live_bytes)
        optimizer.zero_grad(set_to_none=True)
    return start, {key: p.detach() for key, p in named.items()}, losses, state_bytes[0]


def test_a_tiny_lora_training_goes_the_same_way_with_a_quarter_of_the_state() -> None:
    start, plain, plain_losses, plain_bytes = lora_training("adamw")
    _, moved, losses, state_bytes = lora_training("adamw_8bit")
    for part in ("lora_A", "lora_B"):
        joined = [
            torch.cat([p.flatten() for key, p in named.items() if part in key]) for named in (moved, plain, start)
        ]
        assert 0 < way(*joined) < BOUND, part
    assert plain_losses[-1] < 0.7 * plain_losses[0]
    assert losses == pytest.approx(plain_losses, rel=5e-3)
    assert plain_bytes == 8 * 131072
    # 2 layers x (7 lora_A + 7 lora_B): the four lora_B of k and v, 16 x 128, are below 4096 values.
    assert state_bytes == 122880 * 2 + 122880 // 256 * 8 + 8192 * 8
