"""The row-by-row twin by hand, and the updater's gradients against it, on a stock peft model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor

from lowmem_grpo.batching import rewards_tensor
from lowmem_grpo.losses import token_weights
from lowmem_grpo.model import LoraSpec, Policy, attach_adapter
from lowmem_grpo.types import ScoredGroup
from tests.helpers import (
    advantages_of,
    assert_gradients_close,
    gradients_of,
    group_of,
    pack,
    random_groups,
    tiny_policy,
    updater_of,
)
from tests.parity.rows import RowMicroBatch, row_logprobs, row_micro_batches, row_update
from tests.tiny import FAMILIES, tiny_model

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
ANSWERS = [
    group_of((5, 6), [(7, 8, 2), (9,), (10, 2)], (1.0, 0.0, None)),
    group_of((11,), [(12, 2), (2,), (13, 14, 15, 2)], (0.0, 0.0, 1.0)),
]


@pytest.fixture(autouse=True)
def exact_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' eager attention rounds its softmax to float32, whatever the model computes in."""
    rounded = torch.nn.functional.softmax

    def exact(scores: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        return rounded(scores, dim=dim, dtype=scores.dtype if scores.dtype == torch.float64 else dtype)

    monkeypatch.setattr(torch.nn.functional, "softmax", exact)


def stock_twin(policy: Policy, family: str, dtype: torch.dtype, *, tied: bool = True) -> PeftModel:
    """A peft model of its own with the policy's adapter weights; attention is eager only where scores are capped."""
    base = tiny_model(family, dtype=dtype, tied=tied)
    base.set_attn_implementation("eager" if family == "gemma2" else "sdpa")
    model = attach_adapter(base, LoraSpec(rank=4, alpha=8))
    mine = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in policy.trainable_parameters().items():
            mine[name].copy_(parameter)
    return model


def arguments(groups: Sequence[ScoredGroup], *, skip_dead: bool = True) -> tuple[Any, ...]:
    """What `row_update` needs to know about the groups, as `helpers.pack` says it to `pack_groups`."""
    advantages_P_G, (rewards_P_G, _) = advantages_of(groups), rewards_tensor(groups)
    live_P = (advantages_P_G != 0).any(dim=1) if skip_dead else torch.ones(len(groups), dtype=torch.bool)
    weigh: Callable[[Tensor], Tensor] = partial(token_weights, "dapo", max_new_tokens=8)
    return groups, advantages_P_G, ~rewards_P_G.isnan(), live_P, weigh


def row_gradients(
    model: PeftModel, groups: Sequence[ScoredGroup], micro_batch_tokens: int
) -> tuple[float, dict[str, Tensor]]:
    loss = row_update(
        model,
        *arguments(groups),
        micro_batch_tokens=micro_batch_tokens,
        pad_id=2,
        temperature=0.7,
        head_chunk_tokens=5,
    )
    return loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def cut(groups: Sequence[ScoredGroup], budget: int, **changes: Any) -> list[RowMicroBatch]:
    device = torch.device("cpu")
    return row_micro_batches(*arguments(groups, **changes), micro_batch_tokens=budget, pad_id=99, device=device)


def test_rows_by_hand() -> None:
    [micro] = cut(ANSWERS, 100)
    # By falling length; the answer without a reward is left out.
    assert micro.rows == ((0, 0), (1, 2), (0, 1), (1, 0), (1, 1))
    assert micro.input_ids_BT.tolist() == [
        [5, 6, 7, 8, 2],
        [11, 13, 14, 15, 2],
        [5, 6, 9, 99, 99],
        [11, 12, 2, 99, 99],
        [11, 2, 99, 99, 99],
    ]
    assert micro.attention_mask_BT.sum(1).tolist() == [5, 5, 3, 3, 2]
    assert micro.position_ids_BT[2].tolist() == [0, 1, 2, 2, 2]
    assert micro.mask_BT.int().tolist() == [
        [0, 0, 1, 1, 1],
        [0, 1, 1, 1, 1],
        [0, 0, 1, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 1, 0, 0, 0],
    ]
    # dapo: one over the 11 tokens of answers with a reward.
    assert micro.weights_BT[micro.mask_BT].tolist() == pytest.approx([1 / 11] * 11)
    assert (micro.weights_BT[~micro.mask_BT] == 0).all()
    assert micro.advantages_BT[2, 2].item() == pytest.approx(-0.5 / (0.5**0.5 + 1e-4))


@pytest.mark.parametrize(("budget", "rows"), [(25, [5]), (24, [4, 1]), (10, [2, 3]), (9, [1, 1, 3]), (1, [1] * 5)])
def test_rows_times_the_longest_stays_in_the_budget(budget: int, rows: list[int]) -> None:
    micro_batches = cut(ANSWERS, budget)
    assert [len(micro.rows) for micro in micro_batches] == rows
    assert sorted(row for micro in micro_batches for row in micro.rows) == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]


def test_dead_groups_are_not_forwarded_but_count_in_the_weights() -> None:
    groups = [ANSWERS[1], group_of((16,), [(17, 2), (2,), (2,)], (1.0, 1.0, 1.0))]
    [live], [whole] = cut(groups, 100), cut(groups, 100, skip_dead=False)
    assert (len(live.rows), len(whole.rows)) == (3, 6)
    assert live.weights_BT.max() == whole.weights_BT.max() == pytest.approx(1 / 11)


def test_log_probs_are_those_of_each_row_alone() -> None:
    model = stock_twin(tiny_policy(dtype=torch.float64), "llama", torch.float64)
    for micro in cut(ANSWERS, 12):
        logprobs_BT = row_logprobs(model, micro, 0.7, 3)
        assert (logprobs_BT[~micro.mask_BT] == 0).all()
        for b, (p, g) in enumerate(micro.rows):
            prompt, answer = ANSWERS[p].group.problem.prompt_ids, ANSWERS[p].group.rollouts[g].completion_ids
            logits_T_V = model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
            expected_T = torch.log_softmax(logits_T_V / 0.7, -1)[torch.arange(len(answer)), list(answer)]
            torch.testing.assert_close(logprobs_BT[b, micro.mask_BT[b]], expected_T, rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_updater_and_the_twin_have_one_gradient(family: str, dtype: torch.dtype) -> None:
    policy, groups = tiny_policy(family, dtype), random_groups()
    model = stock_twin(policy, family, dtype)
    loss, expected = row_gradients(model, groups, micro_batch_tokens=40)
    # Not one lean layer, not one shared attention on the other side.
    assert model.get_base_model().config._attn_implementation in ("eager", "sdpa")
    assert not any(hasattr(module, "lean") for module in model.modules())
    updater = updater_of(policy)
    for budget in (10, 64):
        assert_gradients_close(
            gradients_of(updater, pack(groups, micro_batch_tokens=budget)), expected, TOLERANCE[dtype]
        )
    assert updater.update(pack(groups), 0)["optim/loss"] == pytest.approx(loss, abs=TOLERANCE[dtype])


@pytest.mark.parametrize("checkpointing", [True, False])
def test_one_gradient_with_an_untied_head_with_and_without_checkpointing(checkpointing: bool) -> None:
    policy = tiny_policy("gemma3_text", torch.float64, tied=False, checkpointing=checkpointing)
    model, groups = stock_twin(policy, "gemma3_text", torch.float64, tied=False), random_groups()
    model.train()
    _, expected = row_gradients(model, groups, micro_batch_tokens=40)
    assert_gradients_close(gradients_of(updater_of(policy), pack(groups)), expected, 1e-10)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_gradient_where_answers_begin_alike(family: str) -> None:
    answers = [(8, 9, 10, 2), (8, 9, 2), (8, 9, 10, 2), (12, 2), (8, 9), (8, 14, 15, 16, 17), (2,), (8, 14, 2)]
    groups = [group_of((5, 6, 7, 8, 9), answers, (1.0, 0.0, 0.5, 2.0, -1.0, 0.25, 0.0, 1.5))]
    policy = tiny_policy(family, torch.float64)
    loss, expected = row_gradients(stock_twin(policy, family, torch.float64), groups, micro_batch_tokens=40)
    updater = updater_of(policy)
    for budget, tokens in ((100, 5 + 7), (9, 5 + 4 + 5 + 4)):
        micro_batches = pack(groups, micro_batch_tokens=budget)
        assert sum(len(micro.input_ids_N) for micro in micro_batches) == tokens
        assert_gradients_close(gradients_of(updater, micro_batches), expected, 1e-10)
    assert updater.update(pack(groups), 0)["optim/loss"] == pytest.approx(loss, abs=1e-10)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_one_gradient_where_the_policy_did_not_sample_every_token(family: str) -> None:
    group = group_of((5, 6, 7), [(8, 9, 10, 11, 2), (12, 2), (13, 14, 15)], (1.0, 0.0, 0.5))
    first, second, third = group.group.rollouts
    # A tool's output in the middle of one answer, and at the beginning of another.
    first = replace(first, sampled_T=(True, False, False, True, True))
    third = replace(third, sampled_T=(False, True, True))
    groups = [replace(group, group=replace(group.group, rollouts=(first, second, third)))]
    policy = tiny_policy(family, torch.float64)
    loss, expected = row_gradients(stock_twin(policy, family, torch.float64), groups, micro_batch_tokens=100)
    updater = updater_of(policy)
    for budget in (6, 100):
        assert_gradients_close(gradients_of(updater, pack(groups, micro_batch_tokens=budget)), expected, 1e-10)
    assert updater.update(pack(groups), 0)["optim/loss"] == pytest.approx(loss, abs=1e-10)
