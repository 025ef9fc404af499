"""Learning rates by hand, AdamW by hand and in 8 bits, and a state that continues bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from bitsandbytes.functional import create_dynamic_map
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from lowmem_grpo.memory.live import LiveBytes
from lowmem_grpo.optim import (
    SMALLEST_QUANTISED,
    build_optimizer,
    dynamic_codes,
    load_optimizer_state,
    lr_at,
    optimizer_state,
)

NAMES = ["adamw", "adamw_8bit"]
MOMENTS = ("exp_avg", "exp_avg_sq")


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


def large_parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    """One of 17 blocks and a part of one, and a small one."""
    big = torch.linspace(-1, 1, 4500, dtype=dtype).reshape(45, 100)
    return {"big": nn.Parameter(big), "small": nn.Parameter(torch.ones(5, dtype=dtype))}


def step(optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter], index: int) -> None:
    for offset, parameter in enumerate(named.values()):
        parameter.grad = torch.sin(torch.arange(parameter.numel()) + index + offset).reshape(parameter.shape)
    optimizer.step()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_by_hand(name: str, weight_decay: float) -> None:
    named = {"w": nn.Parameter(torch.tensor([2.0], dtype=torch.float64))}
    optimizer = build_optimizer(name, named, lr=0.01, weight_decay=weight_decay)
    weight, first, second = 2.0, 0.0, 0.0
    for index, gradient in enumerate([0.5, -1.0, 0.25], start=1):
        named["w"].grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer.step()
        weight -= 0.01 * weight_decay * weight
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        weight -= 0.01 * (first / (1 - 0.9**index)) / (math.sqrt(second / (1 - 0.999**index)) + 1e-8)
        assert named["w"].item() == pytest.approx(weight, rel=1e-12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("make", [parameters, large_parameters])
def test_three_steps_equal_two_a_state_and_one_bit_for_bit(
    name: str, make: Callable[[], dict[str, nn.Parameter]]
) -> None:
    straight = make()
    optimizer = build_optimizer(name, straight, lr=0.1, weight_decay=0.01)
    for index in range(3):
        step(optimizer, straight, index)
    final = optimizer_state(optimizer, straight)

    before = make()
    optimizer = build_optimizer(name, before, lr=0.1, weight_decay=0.01)
    for index in range(2):
        step(optimizer, before, index)
    state = optimizer_state(optimizer, before)

    after = {key: nn.Parameter(p.detach().clone()) for key, p in before.items()}
    optimizer = build_optimizer(name, after, lr=0.1, weight_decay=0.01)
    load_optimizer_state(optimizer, after, state)
    assert_same(optimizer_state(optimizer, after), state)
    step(optimizer, after, 2)
    assert all(torch.equal(after[key], straight[key]) for key in straight)
    assert not any(torch.equal(after[key], before[key]) for key in before)
    assert_same(optimizer_state(optimizer, after), final)


def assert_same(state: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Same entries, dtypes and bits."""
    assert state.keys() == expected.keys()
    for key, value in expected.items():
        assert state[key].dtype == value.dtype, key
        assert torch.equal(state[key], value), key


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


@pytest.mark.parametrize("name", NAMES)
def test_a_loaded_state_is_not_shared_with_what_it_came_from(name: str) -> None:
    named = large_parameters()
    optimizer = build_optimizer(name, named, lr=0.1, weight_decay=0.0)
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


# 8 bits.


@pytest.mark.parametrize("signed", [True, False])
def test_the_codes_are_those_of_bitsandbytes(signed: bool) -> None:
    codes = torch.tensor(dynamic_codes(signed=signed), dtype=torch.float64)
    assert codes.unique().numel() == 256  # sorted, none twice
    torch.testing.assert_close(codes, create_dynamic_map(signed=signed).double(), rtol=1e-6, atol=0)


def test_the_widest_gaps_are_those_that_the_module_states() -> None:
    # The decade from .1 to 1 in 64 and 128 intervals; the last gap is half of one, up to the code 1.
    for signed, gap in ((True, 0.9 / 64), (False, 0.9 / 128)):
        codes = torch.tensor(dynamic_codes(signed=signed), dtype=torch.float64)
        assert codes.diff().max().item() == pytest.approx(gap)
        assert gap / 2 <= (0.0071 if signed else 0.0036)


def test_a_first_step_in_8_bits_by_hand() -> None:
    named = large_parameters()
    start = named["big"].detach().clone()
    optimizer = build_optimizer("adamw_8bit", named, lr=0.01, weight_decay=0.1)
    gradient = torch.zeros(45, 100)
    gradient.view(-1)[256:512] = 0.5
    gradient.view(-1)[511] = -2.0
    gradient.view(-1)[4499] = 3.0
    named["big"].grad = gradient
    optimizer.step()
    # The first step of Adam is the sign of the gradient; the moments are not rounded before they are used.
    torch.testing.assert_close(named["big"].detach(), start * (1 - 0.001) - 0.01 * gradient.sign())
    state = optimizer.state[named["big"]]
    first, second = (state[name].view(-1) for name in MOMENTS)
    assert first.dtype == second.dtype == torch.uint8
    # Blocks: zeros, then the one with values up to 2, then zeros, and the last 148 values.
    first_absmax, second_absmax = state["exp_avg_absmax"], state["exp_avg_sq_absmax"]
    assert first_absmax.shape == second_absmax.shape == (18,)
    torch.testing.assert_close(first_absmax[[0, 1, 2, 17]], torch.tensor([0.0, 0.2, 0.0, 0.3]))
    torch.testing.assert_close(second_absmax[[0, 1, 2, 17]], torch.tensor([0.0, 0.004, 0.0, 0.009]))
    signed, unsigned = (torch.tensor(dynamic_codes(signed=s)) for s in (True, False))
    # .05 is a quarter of -.2, 2.5e-4 a sixteenth of .004.
    assert abs(signed[first[300].item()] - 0.25) <= 0.9 / 64 / 2
    assert abs(unsigned[second[300].item()] - 1 / 16) <= 0.09 / 64 / 2
    assert unsigned[second[511].item()] == 1
    assert signed[first[4499].item()] == unsigned[second[4499].item()] == 1
    assert state["step"] == 1


def test_a_block_of_zeros_stays_zeros_and_finite() -> None:
    named = large_parameters()  # lora_A has no gradient before lora_B has moved
    start = named["big"].detach().clone()
    optimizer = build_optimizer("adamw_8bit", named, lr=0.1, weight_decay=0.0)
    for _ in range(3):
        named["big"].grad = torch.zeros(45, 100)
        optimizer.step()
    assert torch.equal(named["big"], start)


@pytest.mark.parametrize("size", [SMALLEST_QUANTISED - 1, SMALLEST_QUANTISED])
def test_from_4096_values_on_the_moments_are_8_bit(size: int) -> None:
    small = size < 4096
    named, twin = ({"w": nn.Parameter(torch.linspace(-1, 1, size))} for _ in range(2))
    optimizer = build_optimizer("adamw_8bit", named, lr=0.1, weight_decay=0.01)
    plain = build_optimizer("adamw", twin, lr=0.1, weight_decay=0.01)
    for index in range(4):
        step(optimizer, named, index)
        step(plain, twin, index)
    assert torch.equal(named["w"], twin["w"]) == small
    state = optimizer_state(optimizer, named)
    assert {state[f"w|{name}"].dtype for name in MOMENTS} == {torch.float32 if small else torch.uint8}
    assert sum(value.nbytes for key, value in state.items() if key != "w|step") == (8 * size if small else 8320)


def test_the_bytes_of_the_state_are_those_that_the_module_states() -> None:
    named = {"w": nn.Parameter(torch.ones(64, 256)), "v": nn.Parameter(torch.ones(32, 256))}
    for parameter in named.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer = build_optimizer("adamw_8bit", named, lr=0.1, weight_decay=0.0)
    with LiveBytes() as live:
        optimizer.step()
        held = live.live_bytes
        assert held == (64 + 32) * 256 * 2 + (64 + 32) * 8
        live.peak_bytes = 0
        optimizer.step()
    assert live.live_bytes == held
    assert live.peak_bytes == held + 64 * 256 * 9 + 64 * 4


def test_parameters_without_a_gradient_are_left_alone() -> None:
    named = large_parameters()
    start = {name: p.detach().clone() for name, p in named.items()}
    optimizer = build_optimizer("adamw_8bit", named, lr=0.1, weight_decay=0.5)
    optimizer.step()
    assert optimizer_state(optimizer, named) == {}
    named["small"].grad = torch.ones(5)
    optimizer.step()
    assert torch.equal(named["big"], start["big"])
    assert not torch.equal(named["small"], start["small"])
    assert {key.split("|")[0] for key in optimizer_state(optimizer, named)} == {"small"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_masters_of_another_dtype_keep_it(dtype: torch.dtype) -> None:
    named = large_parameters(dtype)
    optimizer = build_optimizer("adamw_8bit", named, lr=0.1, weight_decay=0.0)
    for index in range(2):
        for parameter in named.values():
            parameter.grad = torch.full_like(parameter, (-1.0) ** index)
        optimizer.step()
    # m = .09 - .1 and v = .000999 + .001, corrected by .19 and .001999: the second step goes back by .1 / 19.
    expected = large_parameters(dtype)["big"] - 0.1 + 0.1 / 19
    torch.testing.assert_close(named["big"].detach(), expected.detach(), rtol=0, atol=2e-4 + torch.finfo(dtype).eps)


def test_a_scaler_unscales_and_skips() -> None:
    named, plain = large_parameters(), large_parameters()
    optimizer = build_optimizer("adamw_8bit", named, lr=0.1, weight_decay=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(sum((p * p).sum() for p in named.values())).backward()  # type: ignore[union-attr]
    scaler.unscale_(optimizer)
    assert torch.equal(named["big"].grad, 2 * named["big"])  # type: ignore[arg-type]
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(named["big"], plain["big"])
    moved, state = named["big"].detach().clone(), optimizer_state(optimizer, named)
    named["big"].grad = torch.full_like(named["big"], torch.inf)
    scaler.step(optimizer)
    assert torch.equal(named["big"], moved)
    assert_same(optimizer_state(optimizer, named), state)


def test_it_steps_fake_tensors_with_the_bytes_of_real_ones() -> None:
    with FakeTensorMode(), LiveBytes() as live:
        named = large_parameters()
        optimizer = build_optimizer("adamw_8bit", named, lr=0.1, weight_decay=0.01)
        for _ in range(2):
            for parameter in named.values():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        del parameter
    # Weights, tables, 8-bit moments with 18 scales each, and the moments of the small one.
    assert live.live_bytes == 4 * 4505 + 2048 + 2 * 4500 + 2 * 18 * 4 + 8 * 5
