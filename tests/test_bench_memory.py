"""The benchmark of the memory techniques: its formulas by hand, real layers, rows and table; models are tiny."""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lowmem_grpo.catalog.shapes import model_shape
from lowmem_grpo.planning.simulate import Phase, Simulation
from lowmem_grpo.planning.workload import Workload
from lowmem_grpo.types import Card, MemorySettings

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "bench_memory.py"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_memory", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_memory"] = module  # dataclasses look a class's module up by its name
    spec.loader.exec_module(module)
    return module


bench = _load()

CARD = Card("test", "cuda", (8, 6), 12 << 30, 400e9, 50e12)
MIB = 1 << 20
NAMES = [technique.name for technique in bench.TECHNIQUES]


def technique_of(name: str) -> Any:
    return next(technique for technique in bench.TECHNIQUES if technique.name == name)


def tiny_base(*, tied: bool = False, card: Card = CARD, **values: Any) -> Any:
    """4 layers, H = 64, I = 256, heads of 16 (4 and 2), V = 512; prompts of 8 and answers of 32, N = 8 + 31 = 39."""
    config = {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": tied,
    }
    workload = Workload(
        shape=model_shape(config, "tiny"),
        card=card,
        dtype="bfloat16" if card.device == "cuda" else "float32",
        quantized=card.device == "cuda",
        decoded=False,
        rank=16,
        targets=None,
        optimizer="adamw_8bit",
        prompts_per_step=2,
        group_size=4,
        prompt_tokens=8,
        answer_tokens=32,
    )
    settings = MemorySettings(
        max_concurrent=8,
        prefill_tokens=8,
        micro_batch_tokens=39,
        offload_activations=True,
        offload_embeddings=not tied,
        head_chunk_tokens=8,
        mlp_tile_tokens=10,
    )
    return bench.changed(bench.Base(workload, settings), **values)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every model of the script is tiny; the one called "tied" has one tensor for embedding and head."""
    monkeypatch.setattr(bench, "base_of", lambda model, card: tiny_base(tied=model == "tied", card=card))
    bench.simulated.cache_clear()
    yield
    bench.simulated.cache_clear()


def pretend(monkeypatch: pytest.MonkeyPatch, update_bytes: Callable[[Any], int]) -> None:
    """Let the update need what is said, the rollout 100 MiB, and the allocator 1 MiB more."""

    def simulate(workload: Workload, settings: MemorySettings, *, expandable_segments: bool) -> Simulation:
        sizes = {"load": 0, "rollout": 100 * MIB, "update": update_bytes(bench.Base(workload, settings))}
        return Simulation({name: Phase(size, size + MIB, ()) for name, size in sizes.items()}, 0, 0)

    monkeypatch.setattr(bench, "simulate", simulate)


# Tracked bytes.


def test_the_formulas_in_numbers() -> None:
    base = tiny_base()
    # 2 of 4 layer inputs of 39 tokens; the embedding; six of width I for 29 tokens less, and the input's gradient
    assert bench.of_activation_offload(base) == 2 * 39 * 64 * 2
    assert bench.of_embedding_offload(base) == 512 * 64 * 2
    # a weight of 64 x 256 in 16 bits is more than one of 10 tokens, and more than one of 39
    assert bench.of_tiles(base) == 5 * 29 * 256 * 2 - 39 * 64 * 2
    # 32 tokens predict: the answer without its last one, and the last of the prompt
    assert bench.of_head_chunk(base) == 8 * 512 * (32 - 8)
    # A of down and B of gate and up have 16 x 256 values, all others less than 4096
    assert bench.of_8bit_optimizer(base) == 4 * 3 * 4096 * (6 - 1 / 32)
    # 2 prompts of 8, 8 answers of 32: (key, value) x 4 layers x 2 heads x 272 tokens x (32 bytes, or 16 and a scale)
    assert bench.of_int8_kv(base) == 2 * 4 * 2 * 272 * (32 - 18) - 2 * 256 * 16 * 2


def test_what_a_real_layer_keeps() -> None:
    base = tiny_base(
        prompt_tokens=256, answer_tokens=1025, micro_batch_tokens=1280, mlp_tile_tokens=0, offload_activations=False
    )
    # Norms in fp32, inputs of products, q, two outputs, k and v twice, log-sum-exps; the MLP; 1280 / 4 = 320 tokens.
    per_token = 2 * 4 * 64 + 2 * 2 * 64 + 3 * 2 * 64 + 4 * 2 * 32 + 4 * 4 + 4 * 2 * 256
    mask = 256 * 320 * 2  # which only a CPU has
    assert bench.kept_by_layer(base) == pytest.approx(4 * (320 * per_token + mask), rel=0.02)
    tiled = bench.changed(base, mlp_tile_tokens=64)
    assert bench.kept_by_layer(tiled) == pytest.approx(4 * (320 * (per_token - 4 * 2 * 256) + mask), rel=0.02)


def test_prompts_in_pieces_are_worth_what_the_others_take() -> None:
    base = tiny_base(prompts_per_step=4, prompt_tokens=640, prefill_tokens=640, mlp_tile_tokens=0)
    whole, piece = bench.forward_peak(base, 4), bench.forward_peak(base, 1)
    # four of width H, three of I, cos and sin, for 640 tokens of each prompt
    assert whole == pytest.approx(4 * 640 * 2 * (4 * 64 + 3 * 256 + 2 * 16), rel=0.05)
    assert bench.of_prefill(base) == whole - piece


# Rows.


def test_every_technique_has_a_row_in_a_fixed_order() -> None:
    assert NAMES == [
        "activation-checkpointing",
        "activation-offload",
        "embedding-offload",
        "mlp-tiles",
        "head-chunk",
        "8bit-adamw",
        "int8-kv",
        "prefill-pieces",
        "expandable-segments",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_a_technique_is_switched_off_alone(name: str) -> None:
    technique = technique_of(name)
    base = technique.ready(tiny_base())
    without = technique.without(base)
    parts = [(one.workload, one.settings) for one in (base, without)]
    before, after = (
        {
            **{field: getattr(workload, field) for field in Workload.__slots__},
            **{field: getattr(settings, field) for field in MemorySettings.__slots__},
            "segments": one.expandable_segments,
        }
        for (workload, settings), one in zip(parts, (base, without), strict=True)
    )
    assert sum(before[field] != after[field] for field in before) == 1


def test_a_technique_at_the_peak_needs_no_other_run(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    # whole logits: 24 x 512 x 8 bytes more
    pretend(monkeypatch, lambda base: 200 * MIB + (base.settings.head_chunk_tokens > 8) * 98_304)
    row = bench.row_of(technique_of("head-chunk"), tiny_base(), timed=False)
    assert (row.here.saved_bytes, row.here.tracked_bytes, row.here.run_bytes) == (98_304, 98_304, 98_304)
    assert (row.here.ratio, row.at_peak, row.why_not) == (1.0, None, "")


def test_a_hidden_technique_is_shown_in_another_run(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    # the rollout is the peak of the run, and something else than the head that of the update
    pretend(monkeypatch, lambda base: 50 * MIB + (base.settings.head_chunk_tokens > 8) * 9_830)
    row = bench.row_of(technique_of("head-chunk"), tiny_base(), timed=False)
    assert (row.here.saved_bytes, row.here.run_bytes) == (9_830, 0)
    assert row.here.ratio == pytest.approx(0.1, rel=1e-3)
    assert row.at_peak.note == "qwen2.5-0.5b-instruct"


def test_what_cannot_act_says_why(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, lambda base: 50 * MIB)
    row = bench.row_of(technique_of("embedding-offload"), tiny_base(tied=True), timed=False)
    assert (row.here, row.why_not) == (None, "embedding and head are one tensor")
    assert row.at_peak.note == "llama-3.1-8b-instruct"
    one_prompt = tiny_base(prompts_per_step=1)
    row = bench.row_of(technique_of("prefill-pieces"), one_prompt, timed=False)
    assert (row.here, row.why_not) == (None, "1 x 8 prompt tokens are one piece")


def test_time_is_that_of_a_step_by_the_planner(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, lambda base: 50 * MIB)
    row = bench.row_of(technique_of("activation-checkpointing"), tiny_base(), timed=False)
    assert row.here.time_ratio > 1 and row.here.note == "layer inputs on the card"
    unknown = tiny_base(card=replace(CARD, bandwidth_bytes_per_s=0.0))
    assert bench.row_of(technique_of("8bit-adamw"), unknown, timed=False).here.time_ratio is None


# The real simulator and the real CPU.


def test_a_simulated_row(tiny: None) -> None:
    row = bench.row_of(technique_of("embedding-offload"), tiny_base(), timed=False)
    assert row.here.saved_bytes == row.here.tracked_bytes == 512 * 64 * 2


@pytest.mark.parametrize("name", NAMES)
def test_both_sides_run_on_this_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "timed_base", functools.partial(tiny_base, card=bench.CPU))
    ratio = bench.cpu_ratio(technique_of(name), rounds=1)
    assert ratio is None if name == "expandable-segments" else ratio > 0


# What is printed.


def run_script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    pretend(monkeypatch, lambda base: 200 * MIB + (base.settings.head_chunk_tokens > 8) * 98_304)
    monkeypatch.setattr(sys, "argv", ["bench_memory.py", "--card", "rtx4060-8gb", *arguments])
    bench.main()
    return capsys.readouterr().out


def test_the_table(tiny: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = run_script(monkeypatch, capsys, "--model", "tied", "--only", "head-chunk", "embedding-offload")
    lines = out.splitlines()
    assert lines[0] == "tiny, rtx4060-8gb: prompt 8, answer 32, 8 answers at once"
    assert lines[1] == "MiB allocated: load 0, rollout 100, update 200; the run needs 201 with the CUDA context"
    assert lines[3].split()[:7] == ["embedding-offload", "update", "-", "-", "-", "-", "-"]
    assert lines[3].endswith("  embedding and head are one tensor")
    assert lines[4].split()[:3] == ["at", "its", "peak"] and lines[4].endswith("  llama-3.1-8b-instruct")
    assert lines[5].split()[:6] == ["head-chunk", "update", "0.1", "0.1", "1.00", "0.1"]
    assert lines[6] == "do not lower the need of this run by 1 %: embedding-offload, head-chunk"
    assert len(lines) == 7


def test_json(tiny: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    written = json.loads(run_script(monkeypatch, capsys, "--model", "untied", "--only", "head-chunk", "--json"))
    (row,) = written["rows"]
    assert (row["technique"], row["phase"], row["formula"]) == ("head-chunk", "update", "8 V (N - chunk)")
    assert (row["here"]["saved_bytes"], row["here"]["ratio"], row["at_peak"]) == (98_304, 1.0, None)
    assert written["settings"]["card"] == "rtx4060-8gb"
