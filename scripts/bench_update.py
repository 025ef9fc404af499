#!/usr/bin/env python
"""The update next to its naive twin, on the groups of a recipe, on one machine in one run.

The twin packs one answer per row with its own copy of the prompt, through transformers' attention and peft's layers
(see tests/parity/rows.py); the update packs groups, each prompt once. Both get the same answers, sampled from the model
as it comes, the same made-up rewards (so that every group counts), the same adapter and the same budget of tokens for
a micro-batch. One round is a forward and backward of the whole batch each way, no optimizer step; the ratio is that of
the medians. The gradients are compared before anything is timed.

    python scripts/bench_update.py --rounds 5 --json
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, set_peft_model_state_dict
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lowmem_grpo.assembly import Parts, Preflight, assemble, preflight, sampling_params
from lowmem_grpo.batching import pack_groups
from lowmem_grpo.catalog import resolve_model
from lowmem_grpo.config import load_config
from lowmem_grpo.losses import token_weights
from lowmem_grpo.memory.peak import PeakProbe
from lowmem_grpo.model import LoraSpec, ModelSpec, attach_adapter, load_base
from lowmem_grpo.quiet import quiet_loading
from lowmem_grpo.types import PackedMicroBatch, ScoredGroup
from lowmem_grpo.update import Updater, UpdateSettings
from tests.parity.rows import row_micro_batches, row_update

Gradients = dict[str, Tensor]


def main() -> None:
    """Parse the arguments, run the bench, print a table or JSON."""
    args = _arguments()
    checked = preflight(load_config(args.recipe, ["run.sinks=[]", *args.overrides]))
    try:
        parts = assemble(checked)
        groups = _groups(checked, parts)
    finally:
        checked.close()
    stock = _stock_model(checked, parts)
    ways = {"lean": _lean(checked, parts, groups), "naive": _naive(checked, parts, groups, stock)}
    gradients = {name: way() for name, way in ways.items()}
    difference = _relative_difference(gradients["lean"], gradients["naive"])
    rounds = [{name: _measured(way, parts) for name, way in ways.items()} for _ in range(args.rounds)]
    tokens = _tokens(checked, parts, groups)
    rows = {
        name: {
            "seconds": statistics.median(r[name][0] for r in rounds),
            "peak_bytes": max(r[name][1] for r in rounds),
            "tokens": tokens[name],
        }
        for name in ways
    }
    ratio = {"naive": rows["naive"]["seconds"] / rows["lean"]["seconds"]}
    settings = {**vars(args), "threads": torch.get_num_threads(), "device": str(parts.policy.device)}
    if args.json:
        print(json.dumps({"settings": settings, "updates": rows, "gradient_difference": difference, "ratio": ratio}))
        return
    print(f"{'update':<8}{'seconds':>10}{'tokens':>10}{'peak MiB':>10}")
    for name, row in rows.items():
        print(f"{name:<8}{row['seconds']:>10.2f}{row['tokens']:>10}{row['peak_bytes'] / 2**20:>10.0f}")
    print(f"naive / lean {ratio['naive']:.2f}   largest relative difference of a gradient {difference:.1e}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("overrides", nargs="*", help="key=value of the config")
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _groups(checked: Preflight, parts: Parts) -> list[ScoredGroup]:
    """The answers of the recipe's first step; the rewards 0, 1, 2, ... leave no group without a gradient."""
    size = checked.config.rollout.group_size
    groups = parts.engine.generate(parts.stream.at(0), size, sampling_params(checked.config), step=1)
    rewards = tuple(float(g) for g in range(size))
    _shake(parts)
    return [ScoredGroup(group, {"made up": rewards}, rewards, (None,) * size) for group in groups]


@torch.no_grad()
def _shake(parts: Parts) -> None:
    """Random values for every lora_B: while it is 0 nothing reaches lora_A."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in parts.policy.trainable_parameters().items():
        if "lora_B" in name:
            parameter.copy_(1e-3 * torch.randn(parameter.shape, generator=generator))
    parts.policy.refresh_adapter()


def _stock_model(checked: Preflight, parts: Parts) -> PeftModel:
    """The same base and adapter, as transformers and peft make them."""
    config = checked.config
    resolved = resolve_model(config.model.name, revision=config.model.revision)
    spec = ModelSpec(
        resolved.path,
        base_name=resolved.name,
        quantization=config.model.quantization,
        prequantized=resolved.quantized,
        weights=config.model.weights,
        compute_dtype=checked.dtype,
    )
    with quiet_loading():
        model = attach_adapter(load_base(spec, checked.card), LoraSpec(config.lora.rank, config.lora.alpha))
    set_peft_model_state_dict(model, parts.policy.adapter_state())
    if parts.memory.activation_checkpointing:
        model.get_base_model().activation_checkpointing_enable()
    return model.train()


def _batch(checked: Preflight, parts: Parts, groups: list[ScoredGroup]) -> dict[str, Any]:
    """What both ways of packing are told."""
    size = checked.config.rollout.group_size
    advantages_P_G = (torch.arange(size, dtype=torch.float64) - (size - 1) / 2).repeat(len(groups), 1)
    return {
        "groups": groups,
        "advantages_P_G": advantages_P_G,
        "counted_P_G": torch.ones_like(advantages_P_G, dtype=torch.bool),
        "live_P": torch.ones(len(groups), dtype=torch.bool),
        "weigh": functools.partial(
            token_weights,
            checked.config.algorithm.aggregation,
            max_new_tokens=checked.config.rollout.max_new_tokens,
        ),
        "micro_batch_tokens": parts.memory.micro_batch_tokens,
    }


def _packed(checked: Preflight, parts: Parts, groups: list[ScoredGroup]) -> list[PackedMicroBatch]:
    return pack_groups(**_batch(checked, parts, groups), device=parts.policy.device)


class _KeepGradients(torch.optim.SGD):
    """An optimizer that moves nothing and keeps what it was given."""

    def step(self, closure: Any = None) -> None:
        self.kept = [parameter.grad for group in self.param_groups for parameter in group["params"]]


def _lean(checked: Preflight, parts: Parts, groups: list[ScoredGroup]) -> Callable[[], Gradients]:
    parameters = parts.policy.trainable_parameters()
    optimizer = _KeepGradients(list(parameters.values()), lr=0.0)
    settings = UpdateSettings(
        loss="clip",
        loss_options={},
        kl_coef=0.0,
        temperature=checked.config.rollout.temperature,
        head_chunk_tokens=parts.memory.head_chunk_tokens,
        max_grad_norm=1e9,
        updates_per_rollout=1,
        lr_of=lambda _: 0.0,
    )
    updater = Updater(parts.policy, settings, optimizer)

    def run() -> Gradients:
        updater.update(_packed(checked, parts, groups), 0)
        return dict(zip(parameters, optimizer.kept, strict=True))

    return run


def _naive(checked: Preflight, parts: Parts, groups: list[ScoredGroup], stock: PeftModel) -> Callable[[], Gradients]:
    def run() -> Gradients:
        stock.zero_grad(set_to_none=True)
        row_update(
            stock,
            **_batch(checked, parts, groups),
            pad_id=parts.policy.tokenizer.pad_token_id,
            temperature=checked.config.rollout.temperature,
            head_chunk_tokens=parts.memory.head_chunk_tokens,
        )
        return {name: p.grad for name, p in stock.named_parameters() if p.requires_grad}

    return run


def _tokens(checked: Preflight, parts: Parts, groups: list[ScoredGroup]) -> dict[str, int]:
    """Tokens that pass the model each way, padding included."""
    rows = row_micro_batches(
        **_batch(checked, parts, groups), pad_id=parts.policy.tokenizer.pad_token_id, device=parts.policy.device
    )
    return {
        "lean": sum(len(micro.input_ids_N) for micro in _packed(checked, parts, groups)),
        "naive": sum(micro.input_ids_BT.numel() for micro in rows),
    }


def _relative_difference(lean: Gradients, naive: Gradients) -> float:
    assert lean.keys() == naive.keys()
    return max(((lean[name] - naive[name]).norm() / naive[name].norm()).item() for name in naive)


def _measured(way: Callable[[], Gradients], parts: Parts) -> tuple[float, int]:
    """Seconds and peak bytes (of the process or of the allocator) of one update."""
    probe = PeakProbe(parts.policy.device)
    probe.reset()
    start = time.perf_counter()
    way()
    if parts.policy.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, probe.peak_bytes()


if __name__ == "__main__":
    main()
