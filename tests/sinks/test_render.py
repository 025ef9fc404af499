from __future__ import annotations

import dataclasses
import doctest
import io
import math
from typing import Any

import pytest
from rich.console import Console, RenderableType

from lowmem_grpo.sinks import render
from lowmem_grpo.sinks.render import (
    clean_text,
    cut_text,
    duration,
    measures,
    plain_card,
    plain_gate,
    plain_sample,
    plain_step,
    prompt_line,
    render_card,
    render_gate,
    render_sample,
    sparkline,
    verdict,
)
from lowmem_grpo.types import Finding, Fix
from tests.sinks.examples import ADVANTAGES, REPORT, group


def text_of(renderable: RenderableType, width: int = 100) -> str:
    console = Console(file=io.StringIO(), record=True, width=width)
    console.print(renderable)
    return console.export_text()


def test_examples_in_the_docstrings() -> None:
    result = doctest.testmod(render)
    assert result.attempted == 8 and result.failed == 0


def test_sparkline() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([5, 5]) == "▁▁"
    assert sparkline([1.0, math.nan, 2.0]) == "▁ █"
    assert sparkline([math.nan]) == " "
    assert sparkline([]) == ""
    assert sparkline([9, 0, 1], width=2) == "▁█"


def test_duration() -> None:
    assert [duration(s) for s in (0.4, 59.6, 3599, 3600, 90_000)] == [
        "0 s",
        "1:00 min",
        "59:59 min",
        "1:00 h",
        "25:00 h",
    ]


def test_control_characters_are_shown_and_not_obeyed() -> None:
    assert clean_text("a\x1b[2Jb\x07\r\nc\td\re") == "a\\x1b[2Jb\\x07\nc\td\\re"
    assert clean_text("\u202egnp.exe \ud83d é 你") == "\\u202egnp.exe \\ud83d é 你"


def test_a_long_answer_keeps_its_start_and_its_end() -> None:
    cut = cut_text("x" * 1000 + "the answer is 4", 60)
    assert cut.startswith("x" * 40 + " […955 characters…] ") and cut.endswith("the answer is 4")
    assert cut_text("short", 5) == "short"


@pytest.mark.parametrize(
    ("prompt", "line"),
    [
        ("1+1", "1+1"),
        (
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
            "c",
        ),
        ([{"role": "system", "content": "s"}], "s"),
        ([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "look"}]}], " look"),
        ([], ""),
    ],
)
def test_prompt_line(prompt: str | list[dict[str, object]], line: str) -> None:
    assert prompt_line(prompt) == line


def test_measures_show_what_is_there_and_nothing_else() -> None:
    metrics = {
        "reward/mean": 0.53125,
        "reward/number": 0.5,
        "groups/zero_variance": 0.25,
        "completion/length_mean": 5.26,
        "completion/truncated": 0.03125,
        "policy/kl": math.nan,
        "optim/loss": -3e-9,
        "optim/lr": 1e-4,
        "speed/rollout_tokens_per_s": 412.4,
        "memory/rollout_peak_bytes": 1.0 * 2**30,
        "memory/update_peak_bytes": 1.5 * 2**30,
        "memory/planned_bytes": 2.0 * 2**30,
        "eval/score": 0.7,
    }
    assert measures(metrics, max_new_tokens=24) == {
        "reward": "0.531",
        "dead groups": "25 %",
        "length": "5.3 of 24",
        "truncated": "3 %",
        "loss": "-3.0e-09",
        "lr": "1.0e-04",
        "speed": "412 tok/s",
        "memory": "1.50 of 2.00 GiB",
        "dev score": "0.700",
    }
    assert measures({"memory/update_peak_bytes": 2**30, "optim/loss": 0.0}) == {"loss": "0.000", "memory": "1.00 GiB"}
    assert plain_step(1, 4, {}, None, 0) == "step 1/4"


def test_a_sample_as_lines() -> None:
    assert plain_sample(3, group(("45", "46", "46", "a\nb")), ADVANTAGES) == [
        "  4 answers to train-12, step 3",
        "  prompt: What is 17 + 28?",
        "  reward 1.00  advantage +0.75  end: 45",
        "  reward 0.00  advantage -0.25  end x2: 46",
        "  reward 0.00  advantage -0.25  cut off: a / b",
    ]


def test_a_dead_group_and_a_missing_reward_are_named() -> None:
    lines = plain_sample(1, group(totals=(None, 0.0, 0.0, 0.0)), (0.0,) * 4)
    assert lines[0] == "  4 answers to train-12, step 1, all scored the same: nothing to learn here"
    assert lines[2] == "  reward none  advantage +0.00  end: 45"


def test_of_many_answers_the_best_and_the_worst_are_shown() -> None:
    texts = tuple(f"answer {n}" for n in range(9))
    lines = plain_sample(1, group(texts, (0.5,) * 9), tuple(n / 10 for n in range(9)), shown=4)
    assert [line.rpartition(": ")[2] for line in lines[2:]] == ["answer 8", "answer 7", "answer 1", "answer 0"]


def test_a_rendered_sample_is_plain_text_in_colour() -> None:
    scored = group(("[bold red]45[/]", "\x1b[31m46", "", "\n".join(str(n) for n in range(9))))
    shown = text_of(render_sample(3, scored, ADVANTAGES))
    assert "[bold red]45[/]" in shown and "\\x1b[31m46" in shown and "(empty)" in shown and "[…4 lines…]" in shown
    assert "What is 17 + 28?" in shown and "4 answers to train-12, step 3" in shown
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=100)
    console.print(render_sample(3, group(), ADVANTAGES))
    assert isinstance(console.file, io.StringIO)
    assert "\x1b[32m" in console.file.getvalue() and "\x1b[31m" in console.file.getvalue()  # green raised, red lowered


def test_the_card() -> None:
    shown = text_of(render_card(REPORT))
    rows = [" ".join(line.strip("│ ").split()) for line in shown.splitlines()]
    assert "Start against tuned on 200 unseen problems (test split)" in rows[0]
    assert "score 0.410 [0.345, 0.480] 0.770 [0.707, 0.823] +0.360 [+0.280, +0.430]" in rows
    assert "correct 0.400 0.760 +0.360 [+0.270, +0.440]" in rows
    assert "format 0.830 1.000" in rows
    assert "Proven: the interval of the difference lies above 0." in rows
    assert (
        "trained 40 steps in 8:13 min" in rows and "peak memory 2.00 GiB" in rows and "adapter runs/q/adapter" in rows
    )
    assert "lowmem-grpo samples runs/q shows its answers" in rows


def test_the_card_as_lines_when_nothing_is_proven() -> None:
    report = {**REPORT, "proven": False, "difference": {"value": -0.02, "interval": [-0.08, 0.04]}}
    del report["correct_difference"]
    report["start"] = {"score": 0.41, "interval": None, "correct": None, "format": None}
    report["tuned"] = {**report["tuned"], "format": None}
    assert plain_card(report) == [
        "== Start against tuned on 200 unseen problems (test split) ==",
        "score: start 0.410  tuned 0.770 [0.707, 0.823]  difference -0.020 [-0.080, +0.040]",
        "correct: tuned 0.760",
        "Not proven: the interval of the difference does not lie above 0 on this test.",
        "trained: 40 steps in 8:13 min",
        "peak memory: 2.00 GiB",
        "adapter: runs/q/adapter",
        "next: lowmem-grpo resume runs/q run.steps=80 trains longer",
        "next: lowmem-grpo samples runs/q shows where it fails",
    ]


def test_the_card_tells_what_changed_and_how_sure_that_is() -> None:
    examples = {
        "wins": [
            {"prompt": "What is\n1 + 2?", "start": "Hi \x1b[2J", "tuned": "3", "start_score": 0.0, "tuned_score": 1.0}
        ],
        "losses": [
            {
                "prompt": [{"role": "user", "content": "2 + 2?"}],
                "start": "4",
                "tuned": "",
                "start_score": 1,
                "tuned_score": 0,
            }
        ],
    }
    report = {
        **REPORT,
        "difference": {**REPORT["difference"], "p_value": 0.0321},
        "changed": {"better": 9, "worse": 1, "same": 190},
        "examples": examples,
        "start": {**REPORT["start"], "pass_at_k": {"1": 0.1, "2": 0.2, "4": 0.3}},
        "tuned": {**REPORT["tuned"], "pass_at_k": {"1": 0.6, "2": 0.65, "4": 0.7}},
        "best_step": 30,
        "dev_score": 0.75,
        "stopped_early": True,
    }
    lines = plain_card(report)
    assert lines[4:6] == [
        "pass@1: start 0.100  tuned 0.600  difference +0.500",
        "pass@4: start 0.300  tuned 0.700  difference +0.400",
    ]
    assert lines[6:12] == [
        "better on 9 problems, worse on 1, the same on 190",
        "Proven: the interval of the difference lies above 0 (exact paired test: p = 0.032).",
        "win: What is 1 + 2? | Hi \\x1b[2J -> 3",
        "loss: 2 + 2? | 4 -> (empty)",
        "trained: 40 steps in 8:13 min, ended early",
        "adapter of: step 30, the best by dev score (0.750)",
    ]
    shown = text_of(render_card(report), width=140)
    assert "better on 9 problems" in shown and "Hi \\x1b[2J -> 3" in shown
    assert "adapter of: the start: no later one had a better dev score than 0.750" in plain_card(
        {**report, "best_step": 0}
    )
    more = plain_card({**report, "proven": False})
    assert "next: lowmem-grpo resume runs/q eval.patience=0 trains longer" in more


@pytest.mark.parametrize(
    ("difference", "failures", "sentence"),
    [
        ([0.1, 0.5, 0.0004], 0, "Proven: the interval of the difference lies above 0 (exact paired test: p < 0.001)."),
        (
            [0.01, 0.5, 0.25],
            0,
            "Not proven: there are too few problems to tell the difference from chance (exact paired test: p = 0.250).",
        ),
        ([0.1, 0.5, 0.01], 7, "Not proven: the metric failed on 7 answers, which could explain the gain."),
        (
            [-0.1, 0.5, 0.3],
            0,
            "Not proven: the interval of the difference does not lie above 0 on this test "
            "(exact paired test: p = 0.300).",
        ),
    ],
)
def test_the_verdict_says_what_a_proof_lacks(difference: list[float], failures: int, sentence: str) -> None:
    low, high, p_value = difference
    report = {
        "proven": sentence.startswith("Proven"),
        "difference": {"value": 0.3, "interval": [low, high], "p_value": p_value},
        "start": {"failures": 0},
        "tuned": {"failures": failures},
    }
    assert verdict(report) == sentence


def gate_report(**values: Any) -> dict[str, Any]:
    finding = Finding(
        "dead groups", "warning", "most are dead", "66 % expected", (Fix("sample more", ("rollout.group_size=16",)),)
    )
    return {
        "verdict": "caution",
        "prompts": 64,
        "answers": 512,
        "group_size": 8,
        "reward_mean": 0.05,
        "reward_std": 0.218,
        "within_group_std": 0.1,
        "pass_at": {"1": 0.05, "8": 0.33},
        "dead_share": 0.67,
        "forecasts": [{"group_size": 8, "share": 0.66, "interval": [0.58, 0.74], "method": "beta-binomial"}],
        "truncated": 0.25,
        "unique": 0.9,
        "length_mean": 12.34,
        "length_max": 16,
        "missing": 0.0,
        "failures": 0,
        "findings": [finding.to_json()],
        "sentence": "",
    } | values


def test_the_gate_as_lines() -> None:
    assert plain_gate(gate_report()) == [
        "== Can it learn? ==",
        "sampled: 64 training prompts x 8 answers of the start",
        "reward: mean 0.050, spread 0.100 inside a group, 0.218 over all",
        "right: pass@1 0.050, pass@8 0.330",
        "dead groups: 67 % of those sampled",
        "  at 8 answers: 66 % expected [58 %, 74 %]",
        "length: mean 12.3, longest 16 tokens, 25 % cut at the limit",
        "unique: 90 % of the answers in a group are different",
        "warning: most are dead (66 % expected)",
        "  - sample more: rollout.group_size=16",
        "Go, with care: see what was found.",
    ]
    missing = gate_report(
        reward_mean=None, pass_at=None, forecasts=[], missing=1.0, failures=3, findings=[], verdict="stop"
    )
    assert plain_gate(missing)[2:] == [
        "dead groups: 67 % of those sampled",
        "length: mean 12.3, longest 16 tokens, 25 % cut at the limit",
        "unique: 90 % of the answers in a group are different",
        "no reward: 100 % of the answers, 3 failures",
        "No: as it is, nothing can be learnt.",
    ]
    shown = text_of(render_gate(gate_report()))
    assert "Can it learn?" in shown and "- sample more: rollout.group_size=16" in shown and "Go, with care" in shown


def test_the_smallest_report_has_a_card() -> None:
    report = {"start": {"score": 0.1}, "tuned": {"score": 0.2}, "difference": {"value": 0.1}, "n": 5}
    assert plain_card(report)[1:] == ["score: start 0.100  tuned 0.200  difference +0.100"]
    assert "0.100" in text_of(render_card(report))


def test_an_empty_group_prompt_and_no_advantages() -> None:
    scored = group(("",), (0.0,))
    empty = dataclasses.replace(scored.group.problem, prompt="")
    scored = dataclasses.replace(scored, group=dataclasses.replace(scored.group, problem=empty))
    assert plain_sample(1, scored, (0.0,))[1:] == ["  prompt: ", "  reward 0.00  advantage +0.00  cut off: (empty)"]


def test_a_run_without_test_problems_still_gets_a_card() -> None:
    report = {"steps": 3, "seconds": 12.0, "adapter": "/runs/a/adapter", "best_step": None}
    title = "Trained; there were no test problems to compare start and tuned on (data.test_size)"
    assert plain_card(report)[:3] == [f"== {title} ==", "trained: 3 steps in 12 s", "adapter: /runs/a/adapter"]
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(render_card(report))
    text = console.export_text()
    assert title in text and "3 steps in 12 s" in text and "tuned   difference" not in text
