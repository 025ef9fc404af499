"""Tiny policies, problems, groups and micro-batches for the tests of the stages between the data and the run folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowmem_grpo.batching import pack_groups, rewards_tensor
from lowmem_grpo.losses import token_weights
from lowmem_grpo.model import LoraSpec, Policy, attach_adapter
from lowmem_grpo.types import Card, Group, PackedMicroBatch, Problem, Rollout, ScoredGroup
from lowmem_grpo.update import Updater, UpdateSettings
from tests.tiny import tiny_model, tiny_tokenizer

CPU = Card("cpu", "cpu", (0, 0), 8 << 30)
END_IDS = [2, *range(100, 140)]
"""With this many end tokens about one random token in six ends an answer."""


def tiny_policy(
    family: str = "llama",
    dtype: torch.dtype = torch.float32,
    *,
    checkpointing: bool = True,
    live: bool = True,
    end_ids: Sequence[int] = (2,),
    tied: bool = True,
    seed: int = 0,
    attention: str = "auto",
) -> Policy:
    """A tiny model with an adapter of rank 4; `live` gives it random B weights, so that the adapter counts."""
    base = tiny_model(family, dtype=dtype, tied=tied, seed=seed)
    base.generation_config.eos_token_id = list(end_ids)
    model = attach_adapter(base, LoraSpec(rank=4, alpha=8, seed=seed))
    policy = Policy(
        model,
        tiny_tokenizer(),
        CPU,
        base_name="tiny",
        activation_checkpointing=checkpointing,
        attention=attention,
    )
    if live:
        shake_adapter(policy)
    return policy


def adapted_layers(family: str) -> int:
    """Linear layers of the two blocks of a tiny model; phi3 has q, k, v in one and gate and up in one."""
    return 2 * (4 if family == "phi3" else 7)


def shake_adapter(policy: Policy, std: float = 0.1, seed: int = 1) -> None:
    """Random values for every lora_B, in the masters and in what is multiplied with."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.trainable_parameters().items():
            if "lora_B" in name:
                parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
    policy.refresh_adapter()


def problems_of(*prompts: Sequence[int]) -> list[Problem]:
    """One problem per prompt, given as token ids."""
    return [Problem(f"p-{i}", f"prompt {i}", f"prompt {i}", tuple(ids), {}) for i, ids in enumerate(prompts)]


def group_of(
    prompt_ids: Sequence[int],
    completions: Sequence[Sequence[int]],
    rewards: Sequence[float | None],
    *,
    texts: Sequence[str] | None = None,
    logprobs: Sequence[Sequence[float]] | None = None,
    reasons: Sequence[str] | None = None,
    scores: dict[str, tuple[float | None, ...]] | None = None,
) -> ScoredGroup:
    """A scored group with the given answers; what is left out is filled in."""
    count = len(completions)
    texts = texts or [f"answer {i}" for i in range(count)]
    logprobs = logprobs or [[-1.0] * len(ids) for ids in completions]
    reasons = reasons or ["end"] * count
    rollouts = tuple(
        Rollout(tuple(ids), (True,) * len(ids), tuple(lp), reason, text)  # type: ignore[arg-type]
        for ids, lp, reason, text in zip(completions, logprobs, reasons, texts, strict=True)
    )
    problem = problems_of(prompt_ids)[0]
    scores = {"reward": tuple(rewards)} if scores is None else scores
    return ScoredGroup(Group(problem, rollouts), scores, tuple(rewards), (None,) * count)


def random_groups(policy: Policy | None = None, *, seed: int = 0) -> list[ScoredGroup]:
    """Three groups of three answers with unequal prompts, lengths and rewards; the second group is dead.

    With a policy the sampler log-probs are its own at temperature 0.7.
    """
    generator = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randint(5, 260, (n,), generator=generator).tolist()  # noqa: E731
    rewards = [(1.0, 0.0, 0.25), (0.5, 0.5, 0.5), (0.0, 2.0, 0.0)]
    lengths = [(4, 1, 7), (3, 3, 2), (6, 2, 5)]
    groups = []
    for prompt_length, lengths_G, rewards_G in zip((3, 6, 1), lengths, rewards, strict=True):
        prompt, completions = draw(prompt_length), [draw(n) for n in lengths_G]
        logprobs = policy and [naive_logprobs(policy, prompt, ids, 0.7).tolist() for ids in completions]
        groups.append(group_of(prompt, completions, rewards_G, logprobs=logprobs))
    return groups


def naive_logprobs(
    policy: Policy, prompt: Sequence[int], completion: Sequence[int], temperature: float, *, grad: bool = False
) -> Tensor:
    """Log-probs of one answer by the obvious way: all logits of the whole row, log_softmax, gather."""
    ids = torch.tensor([[*prompt, *completion]])
    with torch.set_grad_enabled(grad):
        logits_T_V = policy.model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        logprobs_T_V = torch.log_softmax(logits_T_V / temperature, dim=-1)
        return logprobs_T_V.gather(1, ids[0, len(prompt) :, None])[:, 0]


def advantages_of(groups: Sequence[ScoredGroup]) -> Tensor:
    """The z-score of each reward in its group, (P, G) in float64; 0 in groups without spread and for no reward."""
    rewards_P_G, _ = rewards_tensor(groups)
    rows = []
    for rewards_G in rewards_P_G:
        known_G = rewards_G[~rewards_G.isnan()]
        spread = known_G.std() if len(known_G) > 1 else torch.tensor(0.0)
        scaled_G = (rewards_G - known_G.mean()) / (spread + 1e-4)
        rows.append(scaled_G.nan_to_num(nan=0.0) if spread > 0 else torch.zeros_like(scaled_G))
    return torch.stack(rows)


def pack(
    groups: Sequence[ScoredGroup],
    *,
    aggregation: str = "dapo",
    micro_batch_tokens: int = 64,
    skip_dead: bool = True,
    max_new_tokens: int = 8,
) -> list[PackedMicroBatch]:
    """`pack_groups` as the trainer calls it, with `advantages_of`."""
    advantages_P_G, (rewards_P_G, _) = advantages_of(groups), rewards_tensor(groups)
    live_P = (advantages_P_G != 0).any(dim=1) if skip_dead else torch.ones(len(groups), dtype=torch.bool)
    return pack_groups(
        groups,
        advantages_P_G,
        ~rewards_P_G.isnan(),
        live_P,
        partial(token_weights, aggregation, max_new_tokens=max_new_tokens),
        micro_batch_tokens=micro_batch_tokens,
        device=torch.device("cpu"),
    )


class RecordingSGD(torch.optim.SGD):
    """Plain gradient descent that keeps a copy of every gradient it was given, one dict per step."""

    def __init__(self, parameters: dict[str, nn.Parameter], lr: float) -> None:
        super().__init__(list(parameters.values()), lr=lr)
        self._named = parameters
        self.gradients: list[dict[str, Tensor]] = []

    def step(self, closure: Any = None) -> None:
        self.gradients.append({name: p.grad.detach().clone() for name, p in self._named.items() if p.grad is not None})
        super().step()


def updater_of(policy: Policy, *, lr: float = 0.0, **changes: Any) -> Updater:
    """An updater whose optimizer records the gradients; by default nothing moves and nothing is clipped by norm."""
    settings = dict(
        loss="clip",
        loss_options={},
        kl_coef=0.0,
        temperature=0.7,
        head_chunk_tokens=5,
        max_grad_norm=1e9,
        updates_per_rollout=1,
        lr_of=lambda update: lr,
    )
    return Updater(policy, UpdateSettings(**(settings | changes)), RecordingSGD(policy.trainable_parameters(), lr))


def gradients_of(updater: Updater, micro_batches: Sequence[PackedMicroBatch]) -> dict[str, Tensor]:
    """The gradients of one update, by parameter name."""
    updater.update(micro_batches, 0)
    optimizer = updater.optimizer
    assert isinstance(optimizer, RecordingSGD)
    return optimizer.gradients[-1]


def assert_gradients_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Same names, and each gradient within `tolerance` of the other, relative to its norm; no gradient is all 0."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        norm = value.norm().item()
        assert norm > 0, name
        assert (actual[name] - value).norm().item() <= tolerance * norm, name


@dataclass
class DecoderCalls:
    """What went through the decoder, one entry per forward: the shape (B, T) of its ids, and ids and positions."""

    shapes: list[tuple[int, int]] = field(default_factory=list)
    inputs: list[dict[str, Any]] = field(default_factory=list)


@contextmanager
def watch_decoder(policy: Policy) -> Iterator[DecoderCalls]:
    """Record every forward of the decoder inside the block."""
    calls = DecoderCalls()

    def note(_module: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.shapes.append(tuple(kwargs["input_ids"].shape))
        calls.inputs.append({name: kwargs[name].clone() for name in ("input_ids", "position_ids")})

    handle = policy.model.get_base_model().get_decoder().register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()


def script_answer(monkeypatch: pytest.MonkeyPatch, policy: Policy, tokens: Sequence[int]) -> None:
    """Let every row answer with `tokens`, one after the other, whatever the model says."""
    vocabulary = policy.model.get_base_model().config.vocab_size
    remaining = iter(tokens)

    def logits(hidden_B_H: Tensor) -> Tensor:
        logits_B_V = torch.full((len(hidden_B_H), vocabulary), -1e9)
        logits_B_V[:, next(remaining)] = 0.0
        return logits_B_V

    monkeypatch.setattr(policy, "logits", logits)


def byte_ids(text: str) -> list[int]:
    """The tokens of a text under the tiny tokenizer: one per UTF-8 byte."""
    return tiny_tokenizer()(text, add_special_tokens=False).input_ids
