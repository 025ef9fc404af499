#!/usr/bin/env python
"""Planner against simulator: peaks by arithmetic beside those of the real code on fake tensors.

    python scripts/bench_plan.py [--json] [--pairs 0 3 ...]    planned against simulated
    python scripts/bench_plan.py --cards                       the README's table: what fits on which card

Ten models from 0.5B to 32B, each with lengths and a card of its own, under the settings that the planner chooses there.
What is compared is what either says on top of the frozen weights and the CUDA context, which both get from the same
sizes: the adapter, keys and values, activations, and what the allocator reserves beside them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lowmem_grpo.catalog import card_named, compute_dtype, shape_of
from lowmem_grpo.planning.budget import PHASES
from lowmem_grpo.planning.choosing import budget_bytes, choose
from lowmem_grpo.planning.simulate import simulate
from lowmem_grpo.planning.timing import estimate_time
from lowmem_grpo.planning.workload import Workload

PAIRS = (
    ("qwen2.5-0.5b-instruct", 128, 256, "rtx3060-12gb"),
    ("llama-3.2-1b-instruct", 512, 512, "rtx3050-8gb"),
    ("qwen2.5-1.5b-instruct", 256, 1024, "gtx1660-6gb"),
    ("qwen3-1.7b", 256, 2048, "rtx2060-6gb"),
    ("gemma-2-2b-it", 256, 512, "rtx4060-8gb"),
    ("qwen3-4b", 256, 4096, "rtx3060-12gb"),
    ("qwen2.5-7b-instruct", 512, 1024, "rtx3060-12gb"),
    ("llama-3.1-8b-instruct", 256, 20000, "t4-16gb"),
    ("qwen2.5-14b-instruct", 256, 1024, "rtx3060-12gb"),
    ("qwen2.5-32b-instruct", 256, 1024, "rtx3090-24gb"),
)
"""Model, longest prompt, longest answer, card."""


def compare(model: str, prompt: int, answer: int, card_name: str) -> dict[str, Any]:
    """One pair: planned and simulated bytes on top of weights and context, by phase and at the peak."""
    card = card_named(card_name)
    dtype, _ = compute_dtype(card)
    shape = shape_of(model)
    workload = Workload(shape, card, dtype, True, False, 16, None, "adamw_8bit", 1, 8, prompt, answer)
    choice = choose(workload, budget_bytes(card, None))
    begin = time.perf_counter()
    simulated = simulate(workload, choice.settings)
    seconds = time.perf_counter() - begin
    base = simulated.weights_bytes
    planned = {phase: choice.estimate.phase_bytes(phase) - base - simulated.context_bytes for phase in PHASES}
    traced = {phase: simulated.phases[phase].reserved_bytes - base for phase in PHASES}
    return {
        "model": model,
        "prompt_tokens": prompt,
        "answer_tokens": answer,
        "card": card_name,
        "settings": str(choice.settings),
        "weights_bytes": base,
        "planned": planned,
        "simulated": traced,
        "error": max(planned.values()) / max(traced.values()) - 1,
        "errors": {phase: planned[phase] / traced[phase] - 1 for phase in ("rollout", "update")},
        "seconds": seconds,
    }


CARDS = ("rtx3060laptop-6gb", "rtx4060-8gb", "rtx3060-12gb", "rtx4060ti-16gb", "rtx3090-24gb")
MODELS = (
    "qwen2.5-0.5b-instruct",
    "qwen2.5-1.5b-instruct",
    "llama-3.2-3b-instruct",
    "qwen3-4b",
    "qwen2.5-7b-instruct",
    "llama-3.1-8b-instruct",
    "qwen2.5-14b-instruct",
    "qwen2.5-32b-instruct",
)


def card_table() -> None:
    """A row a model: minutes a step on each card, and both peaks on the smallest that holds it.

    A step is 4 prompts of 256 tokens with 8 answers of 512 each, an adapter of rank 16, and AdamW in 8 bits.
    """
    print(f"| model | {' | '.join(CARDS)} | tightest: planned | simulated |\n|{'---|' * (len(CARDS) + 3)}")
    for model in MODELS:
        cells, tightest = [], ""
        for name in CARDS:
            card = card_named(name)
            dtype, _ = compute_dtype(card)
            workload = Workload(shape_of(model), card, dtype, True, False, 16, None, "adamw_8bit", 4, 8, 256, 512)
            choice = choose(workload, budget_bytes(card, None))
            time_needed = estimate_time(workload, choice.settings, None)
            cells.append(f"{time_needed.step_s / 60:.1f}" if choice.fits and time_needed else "-")
            if choice.fits and not tightest:
                simulated = simulate(workload, choice.settings)
                planned = choice.estimate.peak_bytes
                tightest = f"{planned / 2**30:.2f} GiB | {simulated.peak_bytes / 2**30:.2f} GiB"
        print(f"| {model} | {' | '.join(cells)} | {tightest} |", flush=True)


def main() -> None:
    """Compare the pairs and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--pairs", type=int, nargs="*", default=range(len(PAIRS)), help="numbers of pairs to compare")
    parser.add_argument("--cards", action="store_true", help="print the README's table instead")
    options = parser.parse_args()
    if options.cards:
        return card_table()
    rows = []
    for number in options.pairs:
        rows.append(row := compare(*PAIRS[number]))
        if not options.json:
            planned, traced = (max(row[kind].values()) / 2**30 for kind in ("planned", "simulated"))
            phases = "  ".join(f"{phase} {error:+.1%}" for phase, error in row["errors"].items())
            print(
                f"{row['model']:24} {row['prompt_tokens']:4} + {row['answer_tokens']:5}  planned {planned:6.3f} GiB"
                f"  simulated {traced:6.3f}  error {row['error']:+6.1%}  ({phases})"
                f"  {row['seconds']:.0f} s",
                flush=True,
            )
    if options.json:
        print(json.dumps(rows, indent=2))
    else:
        print(f"largest error: {max(abs(row['error']) for row in rows):.1%}")


if __name__ == "__main__":
    main()
