"""Losses: values and gradients worked out by hand, and what holds for any split of an update."""

from __future__ import annotations

import dataclasses
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lowmem_grpo.errors import ConfigError
from lowmem_grpo.losses import (
    AGGREGATIONS,
    LOSSES,
    SAMPLER_CORRECTIONS,
    SamplerCorrection,
    check_loss_options,
    loss_options,
    sampler_correction,
    token_weights,
)
from lowmem_grpo.types import LossInputs, LossOutput

CALM = settings(deadline=None, derandomize=True, max_examples=25)
RATIOS = [0.5, 0.9, 1.0, 1.25, 1.4, 5.0]
HIGHER = {"clip_low": 0.2, "clip_high": 0.28}


def row(
    logprobs: list[float],
    old: list[float],
    advantage: float = 1.0,
    ref: list[float] | None = None,
    mask: list[bool] | None = None,
    weights: list[float] | None = None,
) -> LossInputs:
    """One answer of B = 1, every token of weight 1 unless said."""
    as_row = lambda values: torch.tensor([values], dtype=torch.float64)  # noqa: E731
    size = len(logprobs)
    mask_BT = torch.tensor([mask or [True] * size])
    return LossInputs(
        logprobs_BT=as_row(logprobs).requires_grad_(),
        old_logprobs_BT=as_row(old),
        ref_logprobs_BT=None if ref is None else as_row(ref),
        advantages_BT=torch.full((1, size), advantage, dtype=torch.float64),
        mask_BT=mask_BT,
        weights_BT=mask_BT.double() if weights is None else as_row(weights),
    )


def ratio_row(advantage: float, ratio: float) -> LossInputs:
    return row([float(np.log(ratio)) - 1.0], [-1.0], advantage)


def gradient(output: LossOutput, inputs: LossInputs) -> list[float]:
    (grad_BT,) = torch.autograd.grad(output.loss, inputs.logprobs_BT)
    return grad_BT[0].tolist()


PLUS = [-0.5, -0.9, -1.0, -1.25, -1.28, -1.28]
MINUS = [0.8, 0.9, 1.0, 1.25, 1.4]


@pytest.mark.parametrize(
    ("advantage", "options", "losses", "gradients"),
    [
        (1.0, HIGHER, PLUS, [-1, -1, -1, -1, 0, 0]),
        (-1.0, HIGHER, [*MINUS, 5.0], [0, 1, 1, 1, 1, 1]),
        (1.0, {**HIGHER, "two_sided_delta": 4}, PLUS, [-1, -1, -1, -1, 0, 0]),
        (-1.0, {**HIGHER, "two_sided_delta": 4}, [*MINUS, 4.0], [0, 1, 1, 1, 1, 0]),
        (1.0, {}, [-0.5, -0.9, -1.0, -1.2, -1.2, -1.2], [-1, -1, -1, 0, 0, 0]),
    ],
)
def test_clip_per_ratio(
    advantage: float, options: dict[str, float], losses: list[float], gradients: list[float]
) -> None:
    for ratio, loss, d_ratio in zip(RATIOS, losses, gradients, strict=True):
        inputs = ratio_row(advantage, ratio)
        output = LOSSES["clip"](inputs, **options)
        assert output.loss.item() == pytest.approx(loss)
        # d ratio / d logp is the ratio itself
        assert gradient(output, inputs)[0] == pytest.approx(d_ratio * ratio)


def test_clip_counts_only_where_the_clip_bites() -> None:
    logprobs = np.log(RATIOS).tolist()
    plus = LOSSES["clip"](row(logprobs, [0.0] * 6, 1.0), **HIGHER).sums
    minus = LOSSES["clip"](row(logprobs, [0.0] * 6, -1.0), **HIGHER).sums
    assert plus == {"policy/clip_low": 0.0, "policy/clip_high": 2.0}  # 1.4 and 5
    assert minus == {"policy/clip_low": 1.0, "policy/clip_high": 0.0}  # .5
    masked = row(logprobs, [0.0] * 6, 1.0, mask=[True] * 5 + [False])
    assert LOSSES["clip"](masked, **HIGHER).sums["policy/clip_high"] == 1.0


def test_ratios_of_three_tokens() -> None:
    # rho 1.105171, 1, .818731, nothing clipped: loss = -A * sum, gradient = -A * rho
    inputs = row([-1.0, -0.5, -2.0], [-1.1, -0.5, -1.8], advantage=2.0)
    output = LOSSES["clip"](inputs)
    assert output.loss.item() == pytest.approx(-2 * (1.105171 + 1 + 0.818731), abs=1e-5)
    assert gradient(output, inputs) == pytest.approx([-2.210342, -2.0, -1.637462], abs=1e-5)


def test_gspo_uses_one_ratio_for_the_answer() -> None:
    # mean log rho = (.1 + 0 - .2) / 3 = -.033333, s = .967216; with weights 1/3 d loss / d logp_t = -A s / 3
    inputs = row([-1.0, -0.5, -2.0], [-1.1, -0.5, -1.8], advantage=2.0, weights=[1 / 3] * 3)
    output = LOSSES["gspo"](inputs, clip_low=0.1, clip_high=0.1)
    assert output.loss.item() == pytest.approx(-2 * 0.967216, abs=1e-5)
    assert gradient(output, inputs) == pytest.approx([-2 * 0.967216 / 3] * 3, abs=1e-5)


def test_gspo_clips_the_answer_by_default() -> None:
    # s = .967216 < 1 - 3e-4: a bad answer is clipped as a whole, a good one is not
    tokens = ([-1.0, -0.5, -2.0], [-1.1, -0.5, -1.8])
    bad, good = row(*tokens, advantage=-1.0), row(*tokens, advantage=1.0)
    clipped, free = LOSSES["gspo"](bad), LOSSES["gspo"](good)
    assert clipped.loss.item() == pytest.approx(3 * (1 - 3e-4))
    assert gradient(clipped, bad) == [0.0, 0.0, 0.0]
    assert clipped.sums == {"policy/clip_low": 3.0, "policy/clip_high": 0.0}
    assert free.loss.item() == pytest.approx(-3 * 0.967216, abs=1e-5)
    up = LOSSES["gspo"](row([-1.0, -1.0], [-1.0, -1.002], advantage=1.0))
    assert up.loss.item() == pytest.approx(-2 * (1 + 4e-4))
    assert up.sums == {"policy/clip_low": 0.0, "policy/clip_high": 2.0}


def test_gspo_averages_over_the_mask_only() -> None:
    inputs = row([-1.0, -9.0, -2.0], [-1.1, 0.0, -1.9], mask=[True, False, True])
    assert LOSSES["gspo"](inputs).loss.item() == pytest.approx(-2.0)  # log rho +.1 and -.1


@pytest.mark.parametrize("name", list(LOSSES))
def test_k3_values_and_gradients(name: str) -> None:
    logprobs, ref = [-1.0, -0.5, -2.0], [-1.2, -0.4, -2.5]
    inputs = row(logprobs, logprobs, advantage=0.0, ref=ref)
    output = LOSSES[name](inputs, kl_coef=0.5)
    k3, dk3 = [0.018731, 0.005171, 0.106531], [0.181269, -0.105171, 0.393469]
    assert output.loss.item() == pytest.approx(0.5 * sum(k3), abs=1e-6)
    assert output.sums["policy/kl"] == pytest.approx(sum(k3), abs=1e-6)
    assert gradient(output, inputs) == pytest.approx([0.5 * d for d in dk3], abs=1e-6)


@pytest.mark.parametrize("name", list(LOSSES))
def test_kl_joins_the_surrogate(name: str) -> None:
    # old = logp: surrogate gradient -A, KL gradient .1 * (1 - e^-.2)
    inputs = row([-1.0], [-1.0], advantage=2.0, ref=[-1.2])
    assert gradient(LOSSES[name](inputs, kl_coef=0.1), inputs) == pytest.approx([-2.0 + 0.0181269])


@pytest.mark.parametrize("name", list(LOSSES))
def test_kl_of_the_reference_itself_is_exactly_zero(name: str) -> None:
    inputs = row([-1.3, -0.2], [-1.3, -0.2], advantage=0.0, ref=[-1.3, -0.2])
    output = LOSSES[name](inputs, kl_coef=1.0)
    assert (output.loss.item(), output.sums["policy/kl"], gradient(output, inputs)) == (0.0, 0.0, [0.0, 0.0])


@pytest.mark.parametrize("name", list(LOSSES))
def test_reference_comes_with_kl_and_only_then(name: str) -> None:
    for ref, kl_coef in (([-1.0], 0.0), (None, 0.1)):
        with pytest.raises(AssertionError, match="kl_coef > 0"):
            LOSSES[name](row([-1.0], [-1.0], ref=ref), kl_coef=kl_coef)


@pytest.mark.parametrize("name", list(LOSSES))
@pytest.mark.parametrize("log_ratio", [200.0, 5000.0, float("inf")])
def test_masked_token_is_not_there(name: str, log_ratio: float) -> None:
    inputs = row([-1.0, log_ratio - 1.0], [-1.0, -1.0], 3.0, ref=[-1.2, -log_ratio], mask=[True, False])
    output = LOSSES[name](inputs, kl_coef=0.1)
    assert output.loss.item() == pytest.approx(-3.0 + 0.1 * 0.0187308)
    assert gradient(output, inputs) == [pytest.approx(-3.0 + 0.0181269), 0.0]


@pytest.mark.parametrize("name", list(LOSSES))
def test_whatever_lies_off_the_mask_has_no_say(name: str) -> None:
    nan = float("nan")
    inputs = row([-1.0, nan], [-1.0, nan], 3.0, mask=[True, False], weights=[1.0, 7.0])
    advantages_BT = torch.tensor([[3.0, nan]], dtype=torch.float64)
    output = LOSSES[name](dataclasses.replace(inputs, advantages_BT=advantages_BT))
    assert output.loss.item() == -3.0
    assert gradient(output, inputs)[0] == -3.0


@pytest.mark.parametrize("name", list(LOSSES))
def test_everything_masked_is_zero(name: str) -> None:
    inputs = row([-1.0, -2.0], [-1.0, -1.0], mask=[False, False])
    output = LOSSES[name](inputs)
    assert (output.loss.item(), gradient(output, inputs)) == (0.0, [0.0, 0.0])


@pytest.mark.parametrize("name", list(LOSSES))
def test_huge_log_ratio_stays_finite(name: str) -> None:
    # clamped at e^20 before exp; a clamped ratio has no gradient
    inputs = row([400.0], [0.0], advantage=-1.0)
    output = LOSSES[name](inputs)
    assert output.loss.item() == pytest.approx(485165195.4097903)
    assert gradient(output, inputs) == [0.0]


@pytest.mark.parametrize("ref", [-400.0, 400.0])
def test_huge_kl_stays_finite(ref: float) -> None:
    inputs = row([0.0], [0.0], advantage=0.0, ref=[ref])
    output = LOSSES["clip"](inputs, kl_coef=1.0)
    assert output.loss.item() == pytest.approx(20 - 1 if ref < 0 else 485165195.4097903 - 21)
    assert gradient(output, inputs) == [0.0]


def test_first_pass_has_zero_loss_and_a_gradient() -> None:
    # rewards [1, 0, 0, 0] give advantages .75, -.25 x 3: the loss cancels, the gradient is -A / 4 each
    logprobs_BT = torch.tensor([[-1.0], [-2.0], [-0.5], [-3.0]], dtype=torch.float64, requires_grad=True)
    advantages_BT = torch.tensor([[0.75], [-0.25], [-0.25], [-0.25]], dtype=torch.float64)
    mask_BT = torch.ones(4, 1, dtype=torch.bool)
    inputs = LossInputs(logprobs_BT, logprobs_BT.detach(), None, advantages_BT, mask_BT, mask_BT / 4)
    output = LOSSES["clip"](inputs)
    assert output.loss.item() == 0.0
    (grad_BT,) = torch.autograd.grad(output.loss, logprobs_BT)
    assert grad_BT.flatten().tolist() == [-0.1875, 0.0625, 0.0625, 0.0625]


def random_update(seed: int, lengths: list[int], aggregation: str) -> LossInputs:
    """Answers of the given lengths, right-padded, with weights of the aggregation."""
    generator = torch.Generator().manual_seed(seed)
    rows, width = len(lengths), max(lengths)
    lengths_R = torch.tensor(lengths)
    mask_BT = torch.arange(width) < lengths_R[:, None]
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    logprobs_BT = -draw(rows, width).abs()
    weights_R = token_weights(aggregation, lengths_R, max_new_tokens=12)
    return LossInputs(
        logprobs_BT=logprobs_BT.requires_grad_(),
        old_logprobs_BT=logprobs_BT.detach() + 0.3 * draw(rows, width),
        ref_logprobs_BT=logprobs_BT.detach() + 0.3 * draw(rows, width),
        advantages_BT=draw(rows, 1).expand(rows, width),
        mask_BT=mask_BT,
        weights_BT=weights_R[:, None] * mask_BT,
    )


LENGTHS = st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(any)


@pytest.mark.parametrize("aggregation", list(AGGREGATIONS))
@CALM
@given(seed=st.integers(0, 1000), lengths=LENGTHS)
def test_first_pass_gradient_is_the_same_for_every_loss(aggregation: str, seed: int, lengths: list[int]) -> None:
    update = random_update(seed, lengths, aggregation)
    inputs = dataclasses.replace(update, old_logprobs_BT=update.logprobs_BT.detach(), ref_logprobs_BT=None)
    expected_BT = -inputs.advantages_BT * inputs.weights_BT
    for name in LOSSES:
        (grad_BT,) = torch.autograd.grad(LOSSES[name](inputs).loss, inputs.logprobs_BT)
        torch.testing.assert_close(grad_BT, expected_BT, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", list(LOSSES))
@pytest.mark.parametrize("aggregation", list(AGGREGATIONS))
@CALM
@given(seed=st.integers(0, 1000), lengths=LENGTHS, size=st.integers(1, 4))
def test_any_split_adds_up_to_the_same(name: str, aggregation: str, seed: int, lengths: list[int], size: int) -> None:
    update = random_update(seed, lengths, aggregation)
    whole = LOSSES[name](update, kl_coef=0.1)
    parts = []
    for start in range(0, len(lengths), size):
        cut = slice(start, start + size)
        part = {f.name: getattr(update, f.name)[cut] for f in dataclasses.fields(LossInputs)}
        parts.append(LOSSES[name](LossInputs(**part), kl_coef=0.1))
    total: Tensor = torch.stack([part.loss for part in parts]).sum()
    torch.testing.assert_close(total, whole.loss, rtol=0, atol=1e-12)
    for metric, value in whole.sums.items():
        assert sum(part.sums[metric] for part in parts) == pytest.approx(value, abs=1e-9)
    (split_BT,) = torch.autograd.grad(total, update.logprobs_BT, retain_graph=True)
    (whole_BT,) = torch.autograd.grad(whole.loss, update.logprobs_BT)
    torch.testing.assert_close(split_BT, whole_BT, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("name", "expected"), [("grpo", 0.0), ("dapo", 0.6), ("dr_grpo", 0.3)])
def test_aggregation_of_a_short_and_a_long_answer(name: str, expected: float) -> None:
    lengths_R, token_loss_R = torch.tensor([2, 8]), torch.tensor([-1.0, 1.0], dtype=torch.float64)
    weights_R = token_weights(name, lengths_R, max_new_tokens=10)
    assert (weights_R * lengths_R * token_loss_R).sum().item() == pytest.approx(expected)


@pytest.mark.parametrize("sizes", [[4], [1, 3], [3, 1], [1, 1, 1, 1], [2, 2]])
def test_token_mean_is_the_same_for_any_split(sizes: list[int]) -> None:
    # an answer of one token with loss 2 and one of three with loss 4: (2 + 12) / 4 = 3.5, not (2 + 4) / 2
    weights_R = token_weights("dapo", torch.tensor([1, 3]), max_new_tokens=8)
    weights_N = weights_R.repeat_interleave(torch.tensor([1, 3]))
    loss_N = torch.tensor([2.0, 4.0, 4.0, 4.0], dtype=torch.float64)
    parts = zip(weights_N.split(sizes), loss_N.split(sizes), strict=True)
    assert sum((w * loss).sum().item() for w, loss in parts) == pytest.approx(3.5)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("grpo", [0.25, 0.0, 0.0625]), ("dapo", [0.1, 0.0, 0.1]), ("dr_grpo", [0.05, 0.0, 0.05])],
)
def test_masked_out_answer_is_in_neither_count(name: str, expected: list[float]) -> None:
    assert token_weights(name, torch.tensor([2, 0, 8]), max_new_tokens=10).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("name", list(AGGREGATIONS))
def test_all_answers_masked_out_weigh_nothing(name: str) -> None:
    assert token_weights(name, torch.tensor([0, 0]), max_new_tokens=10).tolist() == [0.0, 0.0]
    assert token_weights(name, torch.tensor([], dtype=torch.long), max_new_tokens=10).tolist() == []


@pytest.mark.parametrize(
    ("name", "expected"), [("grpo", [1 / 6, 1 / 24]), ("dapo", [1 / 15] * 2), ("dr_grpo", [1 / 30] * 2)]
)
def test_counts_of_other_processes_come_in_through_reduce(name: str, expected: list[float]) -> None:
    # the other process holds one answer of five tokens: 3 answers and 15 tokens in all
    seen = []

    def add_other_process(counts: Tensor) -> Tensor:
        seen.append(counts.tolist())
        return counts + torch.tensor([1.0, 5.0], dtype=torch.float64)

    weights_R = token_weights(name, torch.tensor([2, 8]), max_new_tokens=10, reduce=add_other_process)
    assert weights_R.tolist() == pytest.approx(expected)
    assert seen == [[2.0, 10.0]]


def test_options_come_from_the_signature() -> None:
    assert loss_options("clip") == {"clip_low": 0.2, "clip_high": 0.2, "two_sided_delta": None}
    assert loss_options("gspo") == {"clip_low": 3e-4, "clip_high": 4e-4}


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("clip", {"clip_hi": 0.3}, "loss 'clip' has no option 'clip_hi', did you mean 'clip_high'?; "
         "it takes clip_low, clip_high, two_sided_delta"),
        ("gspo", {"two_sided_delta": 4}, "loss 'gspo' has no option 'two_sided_delta'; it takes clip_low, clip_high"),
        ("clip", {"clip_low": 1.5}, "option clip_low of loss 'clip' is 1.5 but should be less than or equal to 1"),
        ("clip", {"two_sided_delta": 1}, "option two_sided_delta of loss 'clip' is 1 but should be greater than 1"),
    ],
)  # fmt: skip
def test_wrong_option_is_one_sentence(name: str, options: dict[str, float], sentence: str) -> None:
    for call in (lambda: check_loss_options(name, options), lambda: LOSSES[name](row([-1.0], [-1.0]), **options)):
        with pytest.raises(ConfigError) as caught:
            call()
        assert str(caught.value) == sentence


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no loss 'clipp', did you mean 'clip'\?; the choices are clip, gspo"):
        loss_options("clipp")
    with pytest.raises(ConfigError, match=r"no aggregation 'dapoo', did you mean 'dapo'\?"):
        token_weights("dapoo", torch.tensor([1]), max_new_tokens=1)


# The sampler correction.

# Probabilities under the trainer and the sampler, whose ratios are 1, .25, .5, 2, 4, 5 and 8.
TRAINER = [0.3, 0.1, 0.2, 0.5, 0.8, 0.5, 0.8]
SAMPLER = [0.3, 0.4, 0.4, 0.25, 0.2, 0.1, 0.1]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("none", [1, 1, 1, 1, 1, 1, 1]),
        ("truncate", [1, 0.25, 0.5, 2, 2, 2, 2]),
        ("mask", [1, 0, 0.5, 2, 4, 5, 0]),
    ],
)
def test_the_correction_by_hand(kind: SamplerCorrection, expected: list[float]) -> None:
    # A hair inside the bounds, which a logarithm and back does not keep.
    trainer = torch.tensor([TRAINER], dtype=torch.float64).log()
    sampler = torch.tensor([SAMPLER], dtype=torch.float64).log()
    trainer += torch.tensor([[0, 0, 1e-9, 0, 0, -1e-9, 0]])
    weight_BT = sampler_correction(trainer, sampler, torch.ones(1, 7, dtype=torch.bool), kind)
    assert weight_BT[0].tolist() == pytest.approx(expected, rel=1e-8, abs=0)


def test_there_is_a_correction_for_every_name() -> None:
    assert tuple(SAMPLER_CORRECTIONS) == get_args(SamplerCorrection)
    with pytest.raises(ConfigError, match="there is no sampler correction 'trunc', did you mean 'truncate'"):
        sampler_correction(*[torch.zeros(1, 1)] * 2, torch.ones(1, 1, dtype=torch.bool), "trunc")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", get_args(SamplerCorrection))
def test_the_correction_carries_no_gradient_and_ignores_what_is_off_the_mask(kind: SamplerCorrection) -> None:
    logprobs = torch.tensor([[-1.0, torch.nan, -torch.inf]], dtype=torch.float64, requires_grad=True)
    sampler = torch.tensor([[-1.5, 0.0, -torch.inf]], dtype=torch.float64)
    weight_BT = sampler_correction(logprobs, sampler, torch.tensor([[True, False, False]]), kind)
    assert not weight_BT.requires_grad
    assert weight_BT.dtype == torch.float64
    first = 1.0 if kind == "none" else float(np.exp(0.5))
    assert weight_BT[0].tolist() == pytest.approx([first, 1, 1])


def test_a_ratio_beyond_all_bounds_is_a_number() -> None:
    far = torch.tensor([[0.0, -1000.0]])
    near = torch.tensor([[-1000.0, 0.0]])
    mask_BT = torch.ones(1, 2, dtype=torch.bool)
    assert sampler_correction(far, near, mask_BT, "truncate")[0].tolist() == pytest.approx([2, np.exp(-20)])
    assert sampler_correction(far, near, mask_BT, "mask").tolist() == [[0, 0]]


@CALM
@given(st.lists(st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)), min_size=2, max_size=6))
def test_a_sampler_that_is_the_policy_needs_no_correction_and_truncation_only_lowers(
    pairs: list[tuple[float, float]],
) -> None:
    probabilities = torch.tensor(pairs, dtype=torch.float64).T[:, None]
    trainer, sampler = probabilities.log()
    mask_BT = torch.ones_like(trainer, dtype=torch.bool)
    for kind in get_args(SamplerCorrection):
        assert (sampler_correction(trainer, trainer, mask_BT, kind) == 1).all()
        weight_BT = sampler_correction(trainer, sampler, mask_BT, kind)
        assert ((weight_BT >= 0) & (weight_BT <= (2 if kind == "truncate" else 5))).all()
    truncated = sampler_correction(trainer, sampler, mask_BT, "truncate")
    assert (truncated <= (trainer - sampler).exp() * (1 + 1e-12)).all()


def test_a_corrected_weight_scales_the_gradient_of_its_token() -> None:
    inputs = row([-1.0, -2.0], [-1.0, -2.0], advantage=0.5, weights=[0.25, 0.75])
    sampler = torch.tensor([[-1.0 - np.log(1.6), -2.0 + np.log(8.0)]])
    weight_BT = sampler_correction(inputs.logprobs_BT, sampler, inputs.mask_BT, "mask")
    corrected = dataclasses.replace(inputs, weights_BT=inputs.weights_BT * weight_BT)
    output = LOSSES["clip"](corrected)
    assert output.loss.item() == pytest.approx(-0.5 * 0.25 * 1.6)
    assert gradient(output, corrected) == pytest.approx([-0.5 * 0.25 * 1.6, 0])
