#!/usr/bin/env python
"""Useful tokens per second of the sampler next to `model.generate` and transformers' continuous batching.

The workload is that of the recipe `quickstart` on the unquantised model: its prompts, temperature 1, and a LoRA adapter
with the same non-zero values in every engine. The answer lengths are replayed: the base model first answers all prompts
for real, and in the timed rounds every engine writes exactly as many tokens per answer, with end tokens ignored. So all
engines give the same useful tokens, and an engine that gives others ends the bench.

Both baselines run on a stock peft model with its own copy of the weights. Each is measured at several settings, and its
fastest one, by the median over the rounds, is the one it is compared at. Every round runs everything once, so that a
slow moment of the machine meets all of them. Loading is not timed; building and filling a cache is.

    python scripts/bench_rollout.py --prompts 32 --answers 8 --max-new-tokens 96 --rounds 3 --json
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lowmem_grpo.assembly import assemble, preflight, sampling_params
from lowmem_grpo.catalog import resolve_model
from lowmem_grpo.config import load_config
from lowmem_grpo.model import Policy
from lowmem_grpo.quiet import quiet_loading
from lowmem_grpo.rollout import SlotEngine as Engine  # the sampler under test
from lowmem_grpo.types import Problem, SamplingParams, StopReason

RANK, ALPHA = 16, 32
B_STD = 1e-3
PAGE_TOKENS = 16

Lengths = list[list[int]]
"""Tokens of each answer, by prompt and then by answer."""


@dataclass(frozen=True, slots=True)
class Replay:
    """What one run of an engine gave: the tokens of each row, prompt by prompt, and the seconds it took."""

    tokens: list[int]
    seconds: float


Runner = Callable[[Sequence[Problem], Lengths], Replay]


def main() -> None:
    """Parse the arguments, run the bench, print a table or JSON."""
    args = _arguments()
    problems, sampling, policy = _workload(args)
    lengths = _lengths(args, problems, sampling, policy)
    _fill_adapter(policy)
    engines = _engines(args, policy, sampling)
    _warm_up(engines, problems)
    rounds = [_round(engines, problems, lengths) for _ in range(args.rounds)]
    result = _result(rounds, sum(map(sum, lengths)))
    settings = _settings(args, lengths)
    if args.json:
        print(json.dumps({"settings": settings, **result}))
        return
    print(json.dumps(settings))
    print(f"{'engine':<22}{'setting':<18}{'tokens/s':>10}{'seconds':>10}{'ours is':>10}{'by round':>10}")
    for name, row in result["engines"].items():
        ratio, by_round = result["ratio"].get(name, 1.0), row["round_ratio"]
        print(f"{name:<22}{row['setting']:<18}{row['tokens_per_s']:>10.1f}{row['seconds']:>10.2f}", end="")
        print(f"{ratio:>9.2f}x{by_round:>9.2f}x")
    for name, row in result["engines"].items():
        if len(row["tried"]) > 1:
            print(f"{name}: " + ", ".join(f"{tried} {speed:.1f}" for tried, speed in row["tried"].items()))


def _arguments() -> argparse.Namespace:
    def sizes(text: str) -> list[int]:
        return [int(size) for size in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--max-concurrent", type=int, default=None, help="rows at once in our sampler (default: all)")
    parser.add_argument("--batch", type=sizes, default=[0, 64, 32], help="rows per call of generate; 0: all rows")
    parser.add_argument("--requests", type=sizes, default=[128, 64, 32], help="rows at once in continuous batching")
    parser.add_argument("--lengths", type=Path, help="replay the answer lengths in this file")
    parser.add_argument("--save-lengths", type=Path, help="write the answer lengths to this file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _workload(args: argparse.Namespace) -> tuple[Sequence[Problem], SamplingParams, Policy]:
    """The problems of the recipe's first step, how its answers are drawn, and the policy with a fresh adapter."""
    overrides = [
        "model.quantization=none",
        f"lora.rank={RANK}",
        f"lora.alpha={ALPHA}",
        f"rollout.prompts_per_step={args.prompts}",
        f"rollout.group_size={args.answers}",
        f"rollout.max_new_tokens={args.max_new_tokens}",
    ]
    checked = preflight(load_config("quickstart", overrides))
    try:
        parts = assemble(checked)
    finally:
        checked.close()
    return parts.stream.at(1), sampling_params(checked.config), parts.policy


def _lengths(
    args: argparse.Namespace, problems: Sequence[Problem], sampling: SamplingParams, policy: Policy
) -> Lengths:
    """The lengths to replay: from the file, or those of answers that the base model writes now."""
    if args.lengths is not None:
        lengths: Lengths = json.loads(args.lengths.read_text(encoding="utf-8"))
        if [len(row) for row in lengths] != [args.answers] * len(problems):
            raise SystemExit(f"{args.lengths} does not hold {len(problems)} lists of {args.answers} lengths.")
        if not all(1 <= length <= args.max_new_tokens for row in lengths for length in row):
            raise SystemExit(f"{args.lengths} has a length outside 1 to {args.max_new_tokens}.")
    else:
        engine = Engine(policy, seed=0, max_concurrent=args.max_concurrent)
        groups = engine.generate(problems, args.answers, sampling, step=1)
        lengths = [[len(rollout.completion_ids) for rollout in group.rollouts] for group in groups]
    if args.save_lengths is not None:
        args.save_lengths.write_text(json.dumps(lengths) + "\n", encoding="utf-8")
    return lengths


def _fill_adapter(policy: Policy) -> None:
    """Give B small values in place of its zeros, as some steps of training do."""
    generator = torch.Generator().manual_seed(0)
    state = policy.adapter_state()
    for name, tensor in state.items():
        if "lora_B" in name:
            tensor.normal_(std=B_STD, generator=generator)
    policy.load_adapter_state(state)


def _engines(args: argparse.Namespace, policy: Policy, sampling: SamplingParams) -> dict[str, dict[str, Runner]]:
    """Engine -> setting -> what replays a workload."""
    stock, pad_id = _stock_model(policy), policy.tokenizer.pad_token_id
    rows = args.prompts * args.answers
    batches = dict.fromkeys(min(size or rows, rows) for size in args.batch)
    requests = dict.fromkeys(min(size, rows) for size in args.requests)
    return {
        "ours": {f"{args.max_concurrent or rows} at once": OurSampler(policy, sampling, args.max_concurrent)},
        "generate": {f"{size} per call": Generate(stock, pad_id, size) for size in batches},
        "continuous_batching": {f"{size} at once": ContinuousBatching(stock, pad_id, size) for size in requests},
    }


def _stock_model(policy: Policy) -> PeftModel:
    """A second copy of the weights in plain transformers and peft, with the values of the policy's adapter."""
    path = resolve_model("smollm2-135m-instruct").path
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    with quiet_loading():
        base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
        model = get_peft_model(base, config)
    set_peft_model_state_dict(model, policy.adapter_state())
    return model.to(policy.device).eval()


class ReplayEngine(Engine):
    """The sampler with answers that end at a given length and nowhere else."""

    lengths: Lengths

    def _stop_reason(self, row: Any, sampling: SamplingParams) -> StopReason | None:
        return "length" if len(row.tokens) >= self.lengths[row.group][row.answer] else None


class OurSampler:
    """Replays with the project's own sampler."""

    def __init__(self, policy: Policy, sampling: SamplingParams, max_concurrent: int | None) -> None:
        self._engine = ReplayEngine(policy, seed=0, max_concurrent=max_concurrent)
        self._sampling = sampling

    def __call__(self, problems: Sequence[Problem], lengths: Lengths) -> Replay:
        self._engine.lengths = lengths
        start = time.perf_counter()
        groups = self._engine.generate(problems, len(lengths[0]), self._sampling, step=1)
        seconds = time.perf_counter() - start
        return Replay([len(rollout.completion_ids) for group in groups for rollout in group.rollouts], seconds)


class RecordedLengths(StoppingCriteria):
    """Marks each row of a batch as done at its length; `tokens_B` counts what a row had written when it was done."""

    def __init__(self, prompt_tokens: int, lengths: Sequence[int], device: torch.device) -> None:
        self._prompt_tokens = prompt_tokens
        self._lengths_B = torch.tensor(lengths, device=device)
        self.tokens_B = torch.zeros_like(self._lengths_B)

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        written = input_ids.shape[1] - self._prompt_tokens
        # A row that is done keeps its count while the longer ones of the batch go on.
        self.tokens_B = torch.where(self.tokens_B < self._lengths_B, written, self.tokens_B)
        return self.tokens_B >= self._lengths_B


class Generate:
    """Replays with `model.generate`, `batch` rows per call, the rows of one prompt together."""

    def __init__(self, model: PeftModel, pad_id: int, batch: int) -> None:
        self._model, self._pad_id, self._batch = model, pad_id, batch

    def __call__(self, problems: Sequence[Problem], lengths: Lengths) -> Replay:
        rows = _rows(problems, lengths)
        tokens: list[int] = []
        start = time.perf_counter()
        for first in range(0, len(rows), self._batch):
            tokens += self._call(rows[first : first + self._batch])
        return Replay(tokens, time.perf_counter() - start)

    @torch.inference_mode()
    def _call(self, rows: Sequence[tuple[list[int], int]]) -> list[int]:
        device = self._model.device
        widest = max(len(ids) for ids, _ in rows)
        pads = [widest - len(ids) for ids, _ in rows]
        ids_B_T = torch.tensor([[self._pad_id] * pad + ids for pad, (ids, _) in zip(pads, rows, strict=True)])
        mask_B_T = torch.tensor([[0] * pad + [1] * (widest - pad) for pad in pads])
        done = RecordedLengths(widest, [length for _, length in rows], device)
        self._model.generate(
            input_ids=ids_B_T.to(device),
            attention_mask=mask_B_T.to(device),
            max_new_tokens=max(length for _, length in rows),
            stopping_criteria=StoppingCriteriaList([done]),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=None,
            pad_token_id=self._pad_id,
        )
        return [int(count) for count in done.tokens_B]


class ContinuousBatching:
    """Replays with transformers' continuous batching, at most `requests` rows in a forward pass.

    Without flash-attn its attention is one dense mask over all rows of a pass: that work grows with the square of the
    rows, while the other layers take less time per row, so neither few rows nor all of them need be best. The cache has
    room for exactly these rows, since all of it is cleared at the start. A page is shorter than a prompt, so that later
    answers to a prompt find its first page filled.
    """

    def __init__(self, model: PeftModel, pad_id: int, requests: int) -> None:
        self._base: Any = model.get_base_model()
        self._requests = requests
        self._generation = GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=pad_id
        )

    @torch.inference_mode()
    def __call__(self, problems: Sequence[Problem], lengths: Lengths) -> Replay:
        rows = _rows(problems, lengths)
        start = time.perf_counter()
        manager = self._base.init_continuous_batching(self._generation, self._config(rows))
        manager.start()
        try:
            names = [manager.add_request(ids, max_new_tokens=length, eos_token_id=-1) for ids, length in rows]
            results: dict[str, Any] = {}
            while len(results) < len(names):
                result = manager.get_result(timeout=1)
                if result is not None:
                    results[result.request_id] = result
                elif not manager.is_running():
                    raise SystemExit(f"Continuous batching ended with {len(results)} of {len(names)} answers.")
            seconds = time.perf_counter() - start
        finally:
            manager.stop()
        for result in results.values():
            if result.error is not None:
                raise SystemExit(f"Continuous batching failed: {result.error}")
        return Replay([len(results[name].generated_tokens) for name in names], seconds)

    def _config(self, rows: Sequence[tuple[list[int], int]]) -> ContinuousBatchingConfig:
        longest = max(len(ids) + length for ids, length in rows)
        return ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=self._requests * (math.ceil(longest / PAGE_TOKENS) + 1),
            max_batch_tokens=max(256, self._requests),
            max_requests_per_batch=self._requests,
            safety_margin=0.0,
            auto_switch_to_flash=False,
            seed=0,
        )


def _rows(problems: Sequence[Problem], lengths: Lengths) -> list[tuple[list[int], int]]:
    """One (prompt ids, answer length) per answer, the answers to one prompt together."""
    return [
        (list(problem.prompt_ids), length)
        for problem, of_prompt in zip(problems, lengths, strict=True)
        for length in of_prompt
    ]


def _warm_up(engines: dict[str, dict[str, Runner]], problems: Sequence[Problem]) -> None:
    """What is paid once per process (imports, threads, first kernels) is not part of a round."""
    for settings in engines.values():
        for run in settings.values():
            run(problems[:1], [[2, 3]])


def _round(
    engines: dict[str, dict[str, Runner]], problems: Sequence[Problem], lengths: Lengths
) -> dict[str, dict[str, float]]:
    """Run everything once; seconds by engine and setting. Ends the program when an answer has another length."""
    expected = [length for of_prompt in lengths for length in of_prompt]
    seconds: dict[str, dict[str, float]] = {name: {} for name in engines}
    for name, settings in engines.items():
        for setting, run in settings.items():
            replay = run(problems, lengths)
            if replay.tokens != expected:
                raise SystemExit(
                    f"{name} ({setting}) wrote {sum(replay.tokens)} tokens in {len(replay.tokens)} answers, not the "
                    f"recorded lengths, which are {sum(expected)} tokens in {len(expected)} answers."
                )
            seconds[name][setting] = replay.seconds
    return seconds


def _result(rounds: Sequence[dict[str, dict[str, float]]], tokens: int) -> dict[str, Any]:
    """The fastest setting of each engine, and how many times as fast ours is."""
    median_s = {
        name: {setting: statistics.median(seconds[name][setting] for seconds in rounds) for setting in settings}
        for name, settings in rounds[0].items()
    }
    best = {name: min(settings, key=lambda s: settings[s]) for name, settings in median_s.items()}
    engines: dict[str, dict[str, Any]] = {
        name: {
            "tokens_per_s": tokens / settings[best[name]],
            "seconds": settings[best[name]],
            "tokens": tokens,
            "setting": best[name],
            "tried": {setting: tokens / seconds for setting, seconds in settings.items()},
            "round_ratio": statistics.median(s[name][best[name]] / s["ours"][best["ours"]] for s in rounds),
        }
        for name, settings in median_s.items()
    }
    ours = engines["ours"]["tokens_per_s"]
    ratio = {name: ours / row["tokens_per_s"] for name, row in engines.items() if name != "ours"}
    return {"engines": engines, "ratio": ratio}


def _settings(args: argparse.Namespace, lengths: Lengths) -> dict[str, Any]:
    flat = [length for of_prompt in lengths for length in of_prompt]
    named = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    return {
        **{key: value for key, value in named.items() if key != "json"},
        "model": "smollm2-135m-instruct",
        "threads": torch.get_num_threads(),
        "mean_length": statistics.mean(flat),
        "at_limit": sum(length == args.max_new_tokens for length in flat) / len(flat),
    }


if __name__ == "__main__":
    main()
