"""Learning rates by hand, AdamW by hand, and a state that continues bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lowmem_grpo.optim import build_optimizer, load_optimizer_state, lr_at, optimizer_state


@pytest.mark.parametrize(
    ("schedule", "warmup", "expected"),
    [
        ("constant", 0, [2, 2, 2, 2, 2, 2]),
        ("constant", 2, [1, 2, 2, 2, 2, 2]),
        ("linear", 0, [2, 10 / 6, 8 / 6, 1, 4 / 6, 2 / 6]),
        ("linear", 2, [1, 2, 2, 1.5, 1, 0.5]),
        ("cosine", 0, [2, 1.8660254, 1.5, 1, 0.5, 0.1339746]),
        ("cosine", 2, [1, 2, 2, 1.7071068, 1, 0.2928932]),
        ("constant", 4, [0.5, 1, 1.5, 2, 2, 2]),
        ("linear", 6, [1 / 3, 2 / 3, 1, 4 / 3, 5 / 3, 2]),
        ("cosine", 12, [1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1]),  # never warm
    ],
)
def test_the_learning_rate_of_six_steps(schedule: str, warmup: int, expected: list[float]) -> None:
    rates = [lr_at(update, 6, lr=2.0, schedule=schedule, warmup=warmup) for update in range(6)]
    assert rates == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_the_schedule_ends_right_after_the_last_step(schedule: str, warmup: int) -> None:
    # 16 prompts, 4 per update, 2 epochs: 8 updates.
    assert lr_at(8, 8, lr=1e-4, schedule=schedule, warmup=warmup) == pytest.approx(0, abs=1e-18)
    assert lr_at(7, 8, lr=1e-4, schedule=schedule, warmup=warmup) > 0


def test_the_first_step_of_warm_up_is_not_lost() -> None:
    assert lr_at(0, 100, lr=1e-4, schedule="cosine", warmup=10) == pytest.approx(1e-5)


def test_a_run_of_a_single_update() -> None:
    assert lr_at(0, 1, lr=1e-4, schedule="linear", warmup=0) == 1e-4
    assert lr_at(0, 1, lr=1e-4, schedule="cosine", warmup=1) == 1e-4


def parameters() -> dict[str, nn.Parameter]:
    return {"a": nn.Parameter(torch.tensor([1.0, -2.0, 3.0])), "b": nn.Parameter(torch.tensor([[0.5]]))}


def step(optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter], index: int) -> None:
    for offset, parameter in enumerate(named.values()):
        parameter.grad = torch.sin(torch.arange(parameter.numel()) + index + offset).reshape(parameter.shape)
    optimizer.step()


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_by_hand(weight_decay: float) -> None:
    named = {"w": nn.Parameter(torch.tensor([2.0], dtype=torch.float64))}
    optimizer = build_optimizer("adamw", named, lr=0.01, weight_decay=weight_decay)
    weight, first, second = 2.0, 0.0, 0.0
    for index, gradient in enumerate([0.5, -1.0, 0.25], start=1):
        named["w"].grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer.step()
        weight -= 0.01 * weight_decay * weight
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        weight -= 0.01 * (first / (1 - 0.9**index)) / (math.sqrt(second / (1 - 0.999**index)) + 1e-8)
        assert named["w"].item() == pytest.approx(weight, rel=1e-12)


def test_three_steps_equal_two_a_state_and_one_bit_for_bit() -> None:
    straight = parameters()
    optimizer = build_optimizer("adamw", straight, lr=0.1, weight_decay=0.01)
    for index in range(3):
        step(optimizer, straight, index)

    before = parameters()
    optimizer = build_optimizer("adamw", before, lr=0.1, weight_decay=0.01)
    for index in range(2):
        step(optimizer, before, index)
    state = optimizer_state(optimizer, before)

    after = {name: nn.Parameter(p.detach().clone()) for name, p in before.items()}
    optimizer = build_optimizer("adamw", after, lr=0.1, weight_decay=0.01)
    load_optimizer_state(optimizer, after, state)
    step(optimizer, after, 2)
    assert all(torch.equal(after[name], straight[name]) for name in straight)
    assert not torch.equal(after["a"], before["a"])


def test_without_the_state_the_third_step_would_be_another() -> None:
    kept, forgotten = parameters(), parameters()
    first = build_optimizer("adamw", kept, lr=0.1, weight_decay=0.0)
    for index in range(3):
        step(first, kept, index)
    for index in range(3):
        if index != 1:
            second = build_optimizer("adamw", forgotten, lr=0.1, weight_decay=0.0)
        step(second, forgotten, index)
    assert not torch.equal(kept["a"], forgotten["a"])


def test_the_state_is_plain_tensors_and_a_copy() -> None:
    named = parameters()
    optimizer = build_optimizer("adamw", named, lr=0.1, weight_decay=0.0)
    assert optimizer_state(optimizer, named) == {}
    step(optimizer, named, 0)
    state = optimizer_state(optimizer, named)
    assert state.keys() == {f"{name}|{entry}" for name in "ab" for entry in ("step", "exp_avg", "exp_avg_sq")}
    assert state["a|step"].item() == 1
    # After one step the moments are .1 g and .001 g^2.
    torch.testing.assert_close(state["a|exp_avg"], 0.1 * torch.sin(torch.arange(3.0)))
    torch.testing.assert_close(state["a|exp_avg_sq"], 0.001 * torch.sin(torch.arange(3.0)) ** 2)
    copies = {key: value.clone() for key, value in state.items()}
    step(optimizer, named, 1)
    assert all(torch.equal(state[key], copies[key]) for key in copies)


def test_a_loaded_state_is_not_shared_with_what_it_came_from() -> None:
    named = parameters()
    optimizer = build_optimizer("adamw", named, lr=0.1, weight_decay=0.0)
    step(optimizer, named, 0)
    state = optimizer_state(optimizer, named)
    copies = {key: value.clone() for key, value in state.items()}
    load_optimizer_state(optimizer, named, state)
    step(optimizer, named, 1)
    assert all(torch.equal(state[key], copies[key]) for key in copies)


def test_a_state_of_another_model_is_refused() -> None:
    named = parameters()
    optimizer = build_optimizer("adamw", named, lr=0.1, weight_decay=0.0)
    with pytest.raises(KeyError, match="c"):
        load_optimizer_state(optimizer, named, {"c|step": torch.tensor(1.0)})
