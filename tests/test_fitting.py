"""How a run is made to fit: settings from the plan, the longest case tried first, plan and measurement side by side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lowmem_grpo import assembly
from lowmem_grpo.assembly import with_memory
from lowmem_grpo.config import load_config
from lowmem_grpo.errors import ConfigError
from lowmem_grpo.lifecycle import resume_run, start_run
from lowmem_grpo.model import Policy
from lowmem_grpo.rundir import RunDir
from lowmem_grpo.types import Card, MemorySettings
from tests.runs import FUNCTIONS, IN_MEMORY, outcome, tiny_run
from tests.shortage import Shortage

MIB = 1 << 20


def run(folder: Path, *overrides: str) -> tuple[RunDir, dict[str, Any]]:
    return start_run(tiny_run("run.steps=2", *overrides, **IN_MEMORY), folder, functions=FUNCTIONS)


def of_kind(run_dir: RunDir, kind: str) -> list[dict[str, Any]]:
    return [row for row in run_dir.read("events") if row["kind"] == kind]


def with_free_memory(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    """The card of every run started from now on."""
    monkeypatch.setattr(assembly, "detect_card", lambda device: Card("small", "cpu", (0, 0), free_bytes))


def test_what_was_chosen_is_written_into_the_runs_config(tmp_path: Path) -> None:
    run_dir, report = run(tmp_path / "run", "memory.micro_batch_tokens=96")
    stored = load_config(run_dir.config_path).config
    # 2 prompts with 4 answers each are 8 rows; what was set stays, all else has a value.
    assert (stored.rollout.max_concurrent, stored.memory.micro_batch_tokens) == (8, 96)
    assert None not in stored.memory.model_dump().values()
    assert report["memory"]["settings"]["micro_batch_tokens"] == 96


def test_a_config_with_its_settings_written_out_says_the_same_otherwise() -> None:
    config = tiny_run().config
    settings = MemorySettings(3, 300, 200, False, False, False, 100, 50)
    written = with_memory(config, settings)
    assert (written.rollout.max_concurrent, written.memory.prefill_tokens) == (3, 300)
    assert (written.memory.head_chunk_tokens, written.memory.mlp_tile_tokens) == (100, 50)
    assert written.data == config.data and written.memory.budget_gib == "auto"


def test_the_longest_case_is_tried_first_and_measured_beside_the_plan(tmp_path: Path) -> None:
    run_dir, report = run(tmp_path / "run")
    first, second = [row["kind"] for row in run_dir.read("events") if row["kind"] in ("rehearsal", "pace")]
    assert (first, second) == ("rehearsal", "pace")
    memory = report["memory"]
    assert memory["measured_bytes"].keys() == memory["planned_bytes"].keys() == {"rollout", "update"}
    # The process alone takes hundreds of MiB, and the plan counts on them.
    assert all(size > 200 * MIB for size in (*memory["measured_bytes"].values(), *memory["planned_bytes"].values()))
    planned = {row["memory/planned_bytes"] for row in run_dir.read("metrics")}
    assert planned == {max(memory["planned_bytes"].values())}


def test_the_trial_of_the_longest_case_leaves_no_trace(tmp_path: Path) -> None:
    tried, _ = run(tmp_path / "tried")
    untried, _ = run(tmp_path / "untried", "run.self_checks=false")
    assert of_kind(tried, "rehearsal") and not of_kind(untried, "rehearsal")
    assert outcome(tried.path).adapter == outcome(untried.path).adapter
    assert outcome(tried.path).metrics == outcome(untried.path).metrics


def test_the_trial_uses_the_longest_prompt_with_answers_of_full_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    forward = Policy.hidden_states

    def watched(self: Policy, ids: Any, positions: Any, layout: Any) -> Any:
        seen.append(int(positions.max()) + 1)
        return forward(self, ids, positions, layout)

    monkeypatch.setattr(Policy, "hidden_states", watched)
    run_dir, _ = run(tmp_path / "run")
    longest = max(len(row["prompt"].encode()) for row in run_dir.read("problems"))
    message = of_kind(run_dir, "rehearsal")[0]["message"]
    tokens = int(message.partition("a prompt of ")[2].partition(" ")[0])
    assert tokens >= longest
    # The last token of an answer of 6 is neither forwarded nor does it have a position.
    assert max(seen) == tokens + 5


@pytest.mark.parametrize("strikes", [2, 3, 4])
def test_memory_that_runs_out_in_the_trial_makes_it_smaller_before_the_first_step(
    strikes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight, _ = run(tmp_path / "straight")
    # Calls of the model: one checks the head, then a prefill and a decode step, then the update.
    monkeypatch.setattr(Policy, "hidden_states", Shortage(range(strikes, strikes + 1)).given(Policy.hidden_states))
    run_dir, _ = run(tmp_path / "run")
    told = of_kind(run_dir, "out of memory")
    assert [row["step"] for row in told] == [0]
    assert len(list(run_dir.read("metrics"))) == 2
    assert run_dir.read_report() is not None and straight.read_report() is not None


def test_a_run_that_fits_in_no_way_is_refused_before_it_has_a_folder(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"needs 0\.7\d GiB at its peak, .* has 0\.10 GiB on .* \(memory\.budget_gib\)"
    ):
        run(tmp_path / "run", "memory.budget_gib=0.1")
    assert not (tmp_path / "run").exists()


def test_settings_that_are_too_large_are_named_with_ones_that_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 717 MiB are Python and its libraries; 264 words x 4096 tokens x 8 bytes of logits are another 8 MiB.
    with_free_memory(monkeypatch, int(725 * MIB / 0.98))
    wanted = ["rollout.prompts_per_step=40", "rollout.group_size=16", "rollout.max_new_tokens=64"]
    with pytest.raises(ConfigError, match=r"memory\.micro_batch_tokens=\d+ .*would make it fit"):
        run(tmp_path / "run", *wanted, "memory.micro_batch_tokens=100000", "memory.head_chunk_tokens=4096")
    assert not (tmp_path / "run").exists()


def test_a_run_goes_on_with_leaner_settings_where_less_memory_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = ["rollout.prompts_per_step=8", "rollout.group_size=16", "rollout.max_new_tokens=32"]
    run_dir, before = run(tmp_path / "run", *large, "memory.micro_batch_tokens=4096", "memory.head_chunk_tokens=4096")
    with_free_memory(monkeypatch, int(726 * MIB / 0.98))
    _, after = resume_run(run_dir.path, ["run.steps=3"], functions=FUNCTIONS)
    assert after["steps"] == 3
    settings = before["memory"]["settings"], after["memory"]["settings"]
    assert settings[0]["head_chunk_tokens"] == 4096 > settings[1]["head_chunk_tokens"]


def test_a_capped_process_plans_for_its_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Windows and WSL torch gets less than the card has; the context is not torch's."""
    from lowmem_grpo.memory.cap import AllocatorSetup
    from lowmem_grpo.planning.budget import CONTEXT_BYTES

    loaded = tiny_run(**IN_MEMORY)
    for cap_bytes, expected in ((None, 980 * MIB), (100 * MIB, 100 * MIB + CONTEXT_BYTES), (4000 * MIB, 980 * MIB)):
        setup = AllocatorSetup(expandable_segments=False, cap_bytes=cap_bytes)
        monkeypatch.setattr(assembly, "configure_allocator", lambda card, setup=setup: setup)
        with_free_memory(monkeypatch, 1000 * MIB)
        checked = assembly.preflight(loaded, functions=FUNCTIONS)
        assert assembly._budget(checked) == expected
        checked.close()


def test_int8_keys_switch_the_sampler_correction_on(tmp_path: Path) -> None:
    plain, _ = run(tmp_path / "plain")
    int8, report = run(tmp_path / "int8", "rollout.kv_dtype=int8")
    assert "policy/sampler_weight" not in next(iter(plain.read("metrics")))
    rows = list(int8.read("metrics"))
    assert all(0.5 < row["policy/sampler_weight"] < 2 for row in rows)
    assert rows[0]["policy/sampler_gap"] > 1e-4  # which would have stopped a run that samples from the policy
    assert report["steps"] == 2


def test_a_planned_card_counts_its_context_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowmem_grpo.planning.budget import CONTEXT_BYTES, estimate
    from tests.planning.test_budget import LLAMA_8B

    on_gpu = estimate(LLAMA_8B, MemorySettings(8))
    on_cpu = estimate(replace(LLAMA_8B, card=Card("cpu", "cpu", (0, 0), 1 << 40)), MemorySettings(8))
    assert (on_gpu.context_bytes, on_cpu.context_bytes) == (CONTEXT_BYTES, 0)
