#!/usr/bin/env python
"""Peak bytes and time of the chunked LM head next to the naive one, forward and backward, on one machine in one run.

Every round runs the naive head and then each chunk size once, so that a slow moment of the machine meets all of them;
the time ratio is the median over the rounds. Bytes are counted from the operations and do not vary.

    python scripts/bench_head.py --tokens 512 --vocab 49152 --hidden 576 --chunks 512,256,64 --json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lowmem_grpo.memory.head import chunked_logprobs
from lowmem_grpo.memory.live import LiveBytes
from tests.parity.test_head import naive_logprobs

Head = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def main() -> None:
    """Parse the arguments, run the bench, print a table or JSON."""
    args = _arguments()
    inputs = _inputs(args)
    heads: dict[str, Head] = {"naive": naive_logprobs}
    for size in args.chunks:
        heads[f"chunk {size}"] = lambda h, w, t, size=size: chunked_logprobs(h, w, t, chunk_tokens=size)
    peak_bytes = {name: _peak_bytes(head, inputs) for name, head in heads.items()}
    rounds = [{name: _seconds(head, inputs) for name, head in heads.items()} for _ in range(args.rounds)]
    rows = [
        {
            "head": name,
            "peak_bytes": peak_bytes[name],
            "peak_ratio": peak_bytes[name] / peak_bytes["naive"],
            "median_s": statistics.median(seconds[name] for seconds in rounds),
            "time_ratio": statistics.median(seconds[name] / seconds["naive"] for seconds in rounds),
        }
        for name in heads
    ]
    if args.json:
        settings = {key: str(value) if key == "dtype" else value for key, value in vars(args).items() if key != "json"}
        print(json.dumps({"settings": settings, "rows": rows}))
        return
    print(f"{'head':<12}{'peak MiB':>10}{'ratio':>8}{'seconds':>10}{'ratio':>8}")
    for row in rows:
        print(
            f"{row['head']:<12}{row['peak_bytes'] / 2**20:>10.1f}{row['peak_ratio']:>8.3f}"
            f"{row['median_s']:>10.3f}{row['time_ratio']:>8.2f}"
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument(
        "--chunks", type=lambda text: [int(size) for size in text.split(",")], default=[512, 256, 128, 32]
    )
    parser.add_argument("--dtype", type=lambda name: getattr(torch, name), default=torch.float32)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _inputs(args: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden_N_H = torch.randn(args.tokens, args.hidden, device=args.device, dtype=args.dtype, requires_grad=True)
    weight_V_H = torch.randn(args.vocab, args.hidden, device=args.device, dtype=args.dtype) / args.hidden**0.5
    return hidden_N_H, weight_V_H, torch.randint(args.vocab, (args.tokens,), device=args.device)


def _peak_bytes(head: Head, inputs: tuple[Tensor, Tensor, Tensor]) -> int:
    with LiveBytes() as live:
        _forward_backward(head, inputs)
    return live.peak_bytes


def _seconds(head: Head, inputs: tuple[Tensor, Tensor, Tensor]) -> float:
    start = time.perf_counter()
    _forward_backward(head, inputs)
    return time.perf_counter() - start


def _forward_backward(head: Head, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    hidden_N_H = inputs[0]
    hidden_N_H.grad = None
    head(*inputs)[0].sum().backward()
    if hidden_N_H.is_cuda:
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
