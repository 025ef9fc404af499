"""scripts/gpu_check.py where there is no GPU: the whole run with tiny models, and its arithmetic by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lowmem_grpo.catalog import cards
from lowmem_grpo.types import Card
from tests.gpu.script import gpu_check

GIB = 1 << 30
CPU = Card("cpu", "cpu", (0, 0), 8 * GIB)
GPU = Card("a card", "cuda", (8, 6), 24 * GIB, bandwidth_bytes_per_s=1e12, flops_per_s=1e14)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one run of the script with --tiny writes."""
    file = tmp_path_factory.mktemp("gpu_check") / "check.json"
    assert gpu_check.main(["--tiny", "--json", str(file)]) == 0
    return json.loads(file.read_text(encoding="utf-8"))


def row_of(report: Mapping[str, Any], model: str) -> dict[str, Any]:
    return next(row for row in report["rows"] if row["model"] == model)


def test_the_report_has_a_row_per_model_with_every_phase(report: dict[str, Any]) -> None:
    assert set(report) == {"card", "torch", "rows", "skipped", "failed"}
    assert (report["card"]["device"], report["torch"]) == ("cpu", torch.__version__)
    assert [row["model"] for row in report["rows"]] == list(gpu_check.TINY_CASES)
    assert (report["skipped"], report["failed"]) == ([], [])
    for row in report["rows"]:
        assert list(row["planned"]) == list(row["simulated"]) == list(row["measured"]) == ["load", "rollout", "update"]
        assert all(row["planned"][phase] > 0 for phase in row["planned"])
        for kind in ("simulated", "measured"):
            assert all(set(peaks) == {"allocated_bytes", "reserved_bytes"} for peaks in row[kind].values())
        assert row["settings"]["micro_batch_tokens"] == 192 and row["settings"]["dtype"] == "float32"
        assert (row["context_bytes"], row["planned_context_bytes"], row["roofline"]) == (None, 0, {})
        assert row["decode_tokens_per_s"] > 0 and row["update_tokens_per_s"] > 0
        assert row["recoveries"] == []


@pytest.mark.parametrize("model", gpu_check.TINY_CASES)
def test_simulated_peaks_are_within_five_percent_of_the_measured_ones(report: dict[str, Any], model: str) -> None:
    row = row_of(report, model)
    for phase in ("rollout", "update"):
        simulated, measured = (
            row[kind][phase]["allocated_bytes"] - row["weights_bytes"][kind] for kind in ("simulated", "measured")
        )
        assert measured > 0
        assert abs(simulated - measured) <= 0.05 * measured, phase


def test_loading_peaks_as_simulated(report: dict[str, Any]) -> None:
    # Not packed: the simulator packs in the order of transformers' loader, this script in that of the model.
    row = row_of(report, "tiny")
    simulated, measured = (row[kind]["load"]["allocated_bytes"] for kind in ("simulated", "measured"))
    assert abs(simulated - measured) <= 0.05 * measured


def test_the_tiny_model_weighs_what_its_shape_says(report: dict[str, Any]) -> None:
    # Embedding, tied to the head, 1024 x 128; a layer q, o 2 x 128 x 128, k, v 2 x 64 x 128, MLP 3 x 384 x 128; 5 norms
    # of 128; twice 16 rotary frequencies. All fp32.
    values = 131072 + 2 * (32768 + 16384 + 147456) + 5 * 128 + 2 * 16
    assert row_of(report, "tiny")["weights_bytes"]["measured"] == 4 * values


def test_a_4bit_model_never_holds_more_than_one_weight_unpacked(report: dict[str, Any]) -> None:
    row = row_of(report, "tiny-nf4")
    above = row["measured"]["load"]["allocated_bytes"] - row["weights_bytes"]["measured"]
    assert above <= 4 * 384 * 128  # one fp32 weight of the MLP; all of them are 11 times as much


def test_the_lean_settings_lower_the_update_and_the_embedding_leaves(report: dict[str, Any]) -> None:
    plain, lean = row_of(report, "tiny-nf4"), row_of(report, "tiny-lean")
    saved = plain["weights_bytes"]["measured"] - lean["weights_bytes"]["measured"]
    assert saved == 4 * 1024 * 128
    lower = plain["measured"]["update"]["allocated_bytes"] - lean["measured"]["update"]["allocated_bytes"]
    assert lower > saved


def test_the_table_has_a_line_per_phase_and_names_what_was_left_out(report: dict[str, Any]) -> None:
    left_out = report | {"skipped": [{"model": "big", "reason": "No room."}], "failed": [{"model": "b", "reason": "x"}]}
    lines = gpu_check.table(left_out).splitlines()
    assert [line.split()[:2] for line in lines if line.startswith("tiny-nf4")] == [
        ["tiny-nf4", phase] for phase in ("load", "rollout", "update")
    ]
    assert lines[-2:] == ["big was skipped: No room.", "b failed: x"]


def test_on_a_card_the_plan_is_held_against_what_is_reserved() -> None:
    peaks = {"allocated_bytes": 2 * GIB, "reserved_bytes": 4 * GIB}
    row = {
        "planned": {"update": 5 * GIB},
        "simulated": {"update": {"allocated_bytes": 1 * GIB, "reserved_bytes": 3 * GIB}},
        "measured": {"update": peaks},
    }
    cells = [(name.strip(), value) for name, value in gpu_check._cells(row, "update", GIB)]
    assert cells == [
        *[("simulated", "1.00"), ("off", "-50.0%"), ("allocated", "2.00")],
        *[("planned", "5.00"), ("off", "+25.0%"), ("simulated", "3.00"), ("off", "-25.0%"), ("reserved", "4.00")],
    ]


# Arguments.


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--models", "qwen2.5-7bb"], "There is no model 'qwen2.5-7bb' in this check (did you mean qwen2.5-7b?)"),
        (["--tiny", "--models", "qwen2.5-7b"], "There is no model 'qwen2.5-7b' in this check; choose from tiny, "),
        (["--models", "qwen2.5-7b"], "qwen2.5-7b needs a GPU, and there is no GPU here; choose from tiny, tiny-nf4"),
        (["--tiny", "--minutes", "0"], "--minutes is 0; write a number above 0."),
        (["--tiny", "--json", "no/such/folder/x.json"], "there is no folder no/such/folder."),
    ],
)
def test_a_wrong_argument_is_refused_with_one_sentence(
    arguments: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cards, "detect_card", lambda device: CPU)
    assert gpu_check.main(arguments) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err and printed.err.count("\n") == 1
    assert printed.out == ""


def test_without_a_gpu_the_tiny_models_run_and_the_script_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cards, "detect_card", lambda device: CPU)
    monkeypatch.setattr(gpu_check, "run", lambda cases, card, **_: {"rows": [], "failed": [], "cases": list(cases)})
    monkeypatch.setattr(gpu_check, "table", lambda report: " ".join(report["cases"]))
    assert gpu_check.main([]) == 4  # nothing ran
    printed = capsys.readouterr()
    assert printed.out.split() == list(gpu_check.TINY_CASES)
    assert printed.err.startswith("There is no GPU here")


def test_models_are_run_in_the_order_of_the_table() -> None:
    assert list(gpu_check.chosen(["qwen2.5-7b", "qwen2.5-0.5b"], gpu_check.GPU_CASES)) == ["qwen2.5-0.5b", "qwen2.5-7b"]
    sizes = [case.shape.parameters for case in gpu_check.GPU_CASES.values()]
    assert sizes == sorted(sizes)


# What is skipped, and what fails.


def test_a_model_that_does_not_fit_or_would_take_too_long_is_skipped_with_the_reason() -> None:
    case = gpu_check.GPU_CASES["qwen2.5-7b"]
    assert gpu_check.why_not(case, GPU, left_s=100, seconds=None) == ""
    assert gpu_check.why_not(case, GPU, left_s=100, seconds=100) == ""
    slow = gpu_check.why_not(case, GPU, left_s=99, seconds=101)
    assert slow.startswith("It may take 101 s and 99 s are left; raise --minutes")
    assert gpu_check.why_not(case, GPU, left_s=-1, seconds=None).startswith("0 s are left")
    small = gpu_check.why_not(case, replace(GPU, memory_bytes=4 * GIB), left_s=100, seconds=1)
    assert small.startswith("Its plan needs 7.") and small.endswith("and there are 4.0 GiB.")
    capped = replace(case, cap_bytes=3 * GIB)
    assert gpu_check.why_not(capped, GPU, left_s=100, seconds=1).endswith("and there are 3.0 GiB.")


def test_the_time_of_one_model_decides_about_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    # 10 s each: at that pace 3.1 times the parameters take 31 s, and 4.9 times as many as these 49 s. There are 40.
    monkeypatch.setattr(gpu_check, "time", SimpleNamespace(monotonic=lambda: 0.0))
    monkeypatch.setattr(gpu_check, "check", lambda name, *_: {"model": name, "seconds": 10.0})
    cases = {name: gpu_check.GPU_CASES[name] for name in ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b")}
    report = gpu_check.run(cases, replace(GPU, device="cpu"), deadline=40.0)
    assert [row["model"] for row in report["rows"]] == ["qwen2.5-0.5b", "qwen2.5-1.5b"]
    assert [entry["model"] for entry in report["skipped"]] == ["qwen2.5-7b"]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")])
def test_a_model_that_runs_out_of_memory_is_reported_and_the_status_is_4(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def out_of_memory(name: str, *_: Any) -> dict[str, Any]:
        raise error

    monkeypatch.setattr(gpu_check, "check", out_of_memory)
    assert gpu_check.main(["--tiny", "--models", "tiny"]) == 4
    assert "tiny failed: The memory ran out: CUDA out of memory. Tried to allocate 2 GiB\n" in capsys.readouterr().out


def test_another_error_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str, *_: Any) -> dict[str, Any]:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(gpu_check, "check", broken)
    with pytest.raises(RuntimeError, match="mat1"):
        gpu_check.main(["--tiny", "--models", "tiny"])


# What the card is asked.


def fake_cuda(monkeypatch: pytest.MonkeyPatch, *, reserved: int) -> list[tuple[float, int | None]]:
    """A card of 100 GiB with 20 in use, of which torch has reserved some; returns the fractions that are set."""
    fractions: list[tuple[float, int | None]] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 * GIB, 100 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="ab-12"))
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, device: fractions.append((share, device))
    )
    return fractions


def test_the_context_is_what_is_in_use_less_what_others_and_torch_have(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch, reserved=15 * GIB)
    monkeypatch.setattr(gpu_check, "nvml_used_bytes", lambda: {"GPU-ab-12": 21 * GIB, "GPU-other": 1})
    assert gpu_check.CardMeter("cuda", {"GPU-ab-12": 5 * GIB}).context_bytes() == 1 * GIB
    # Without NVML everything that is in use and not torch's.
    assert gpu_check.CardMeter("cuda", {}).context_bytes() == 5 * GIB


def test_a_cap_leaves_room_for_the_context_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    fractions = fake_cuda(monkeypatch, reserved=0)
    case = replace(gpu_check.GPU_CASES["qwen2.5-32b"], cap_bytes=25 * GIB)
    with gpu_check.capped(case, GPU):
        assert fractions == [(pytest.approx((25 - 0.7) / 100), None)]
    assert fractions[1:] == [(1.0, None)]
    with gpu_check.capped(replace(case, cap_bytes=None), GPU), gpu_check.capped(case, CPU):
        assert len(fractions) == 2


def test_the_rooflines_by_hand() -> None:
    case = gpu_check.TINY_CASES["tiny"]
    workload = replace(gpu_check.workload_of(case, GPU), quantized=False)
    assert workload.dtype == "bfloat16"
    measured = gpu_check.Measured(
        {}, 0, decode_step_s=1e-6, decode_tokens=20.0, update_s=1e-3, update_tokens=100, update_predictors=60
    )
    shares = gpu_check.rooflines(workload, case.settings, measured)
    # Read in a step: 393 216 linear weights, a head of 131 072, and 6 answers of 20 tokens behind one prompt of 48,
    # with 2 layers x (key, value) x 64 values a token; all of 2 bytes.
    assert shares["decode"] == pytest.approx((2 * (393216 + 131072 + 256 * (48 + 120))) / 1e-6 / 1e12)
    # Forward, recompute and backward of 100 tokens, the head forward and backward for 60, 2 operations a weight.
    assert shares["update"] == pytest.approx((6 * 393216 * 100 + 4 * 131072 * 60) / 1e-3 / 1e14)
    assert gpu_check.rooflines(replace(workload, card=CPU), case.settings, measured) == {}


def test_errors_are_relative_to_the_measurement() -> None:
    assert gpu_check.error_percent(90, 100) == pytest.approx(-10.0)
