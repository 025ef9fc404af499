"""The rubric in this process: labels, columns, totals, None, failures."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lowmem_grpo.errors import ConfigError, PluginError, RewardFailed
from lowmem_grpo.rewards import RewardSpec, Rubric
from tests.rewards.helpers import group

Function = Callable[..., Any]


def rubric(*specs: RewardSpec | str, problems: list[tuple[str, str]] | None = None, **functions: Function) -> Rubric:
    listed = [RewardSpec(spec) if isinstance(spec, str) else spec for spec in specs] or [
        RewardSpec(f) for f in functions
    ]
    seen = [] if problems is None else problems
    return Rubric(listed, base_dir=Path("/"), functions=functions, on_problem=lambda *pair: seen.append(pair))


def scores_of(function: Function, *texts: str, **columns: Any) -> tuple[float | None, ...]:
    with rubric(f=function) as made:
        return made.score([group(*texts, **columns)])[0].scores["f"]


# Labels, columns, refusals


def test_labels_are_unique() -> None:
    specs = (RewardSpec("text"), RewardSpec("number"), RewardSpec("number", label="text_2"), RewardSpec("text"))
    with rubric(*specs) as made:
        assert made.labels == ("text", "number", "text_2", "text_3")
    with rubric(RewardSpec("mean"), mean=lambda completions: [0.0]) as made:
        assert made.labels == ("mean_2",)


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        (
            (RewardSpec("number", label="a"), RewardSpec("text", label="a")),
            "label 'a' cannot be used: two rewards have it",
        ),
        ((RewardSpec("number", label="mean"),), "label 'mean' cannot be used: another metric"),
        ((RewardSpec("number", weight=float("nan")),), "the weight of reward 'number' is nan"),
        ((RewardSpec("number", timeout_s=0),), "timeout_s of reward 'number' is 0 but should be above 0"),
        ((RewardSpec("number", args={"tga": "x"}),), "has no option 'tga', did you mean 'tag'"),
    ],
)
def test_wrong_specs_are_refused(specs: tuple[RewardSpec, ...], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rubric(*specs)
    assert words in str(caught.value)


def test_no_reward_and_unknown_reward_are_refused() -> None:
    with pytest.raises(ConfigError, match="rewards is empty"):
        Rubric([], base_dir=Path("/"))
    with pytest.raises(PluginError) as caught:
        rubric("numbr", brevity=len)
    assert str(caught.value).startswith(
        "unknown reward 'numbr': did you mean 'number'? Choices: brevity, length, number, regex, tags, text, or"
    )


def test_columns_and_gold() -> None:
    def mine(prompts: Any, completions: Any, solution: Any, level: Any = 1, **kwargs: Any) -> Any: ...

    def graded(completions: Any, answer: Any) -> Any: ...

    with rubric("number", "tags", "mine", mine=mine) as made:
        assert made.needed_columns() == {"number": {"answer"}, "tags": frozenset(), "mine": {"solution"}}
        assert made.needs_gold
        assert (made.parseable_gold("7"), made.parseable_gold("???")) == (True, False)
    with rubric("tags", mine=mine) as made:
        assert (made.needs_gold, made.parseable_gold("???")) == (False, True)
    with rubric(graded=graded) as made:
        assert made.needs_gold


def test_a_notebook_function_comes_with_a_warning() -> None:
    with rubric("number", "f", f=lambda completions: [0.0]) as made:
        (warning,) = made.warnings
    assert warning.startswith("reward 'f' is a function of this process: it has no time limit")


# What a function gets


def test_text_prompts_and_repeated_columns() -> None:
    seen: dict[str, Any] = {}

    def f(prompts: Any, completions: Any, **kwargs: Any) -> list[float]:
        seen.update(kwargs, prompts=prompts, completions=completions)
        return [0.0] * len(prompts)

    with rubric(f=f) as made:
        made.score([group("a", "b", answer=2, level=3), group("c", prompt="r", answer=4)])
    assert seen == {
        "prompts": ["q", "q", "r"],
        "completions": ["a", "b", "c"],
        "completion_ids": [[0], [0], [0]],
        "answer": [2, 2, 4],
        "level": [3, 3, None],
    }


def test_message_prompts_give_message_completions_and_cannot_be_changed() -> None:
    prompt = [{"role": "user", "content": "q"}]

    def f(prompts: Any, completions: Any) -> list[float]:
        prompts[0].append("x")
        return [float(completions[0] == [{"role": "assistant", "content": "7"}])]

    with rubric("f", "number", f=f) as made:
        (scored,) = made.score([group("7", prompt=prompt, answer="7")])
    assert scored.scores == {"f": (1.0,), "number": (1.0,)}
    assert prompt == [{"role": "user", "content": "q"}]


def test_only_accepted_parameters_and_args_from_the_config() -> None:
    def brevity(completions: Any, limit: int = 9) -> list[float]:
        return [float(len(text) <= limit) for text in completions]

    assert scores_of(brevity, "abc", answer=1) == (1.0,)
    with rubric(RewardSpec("f", args={"limit": 2}), f=brevity) as made:
        assert made.score([group("abc", "ab")])[0].scores["f"] == (0.0, 1.0)
    with pytest.raises(ConfigError, match="reward 'f' has no argument 'limt', did you mean 'limit'"):
        rubric(RewardSpec("f", args={"limt": 2}), f=brevity)


def test_tags_see_what_the_template_wrote() -> None:
    prompt = [{"role": "user", "content": "q"}]
    with rubric(RewardSpec("tags", args={"tags": ["think"]})) as made:
        opened = made.score([group("x\n</think>\n4", prompt=prompt, prompt_text="q<bot><think>\n")])
        plain = made.score([group("x\n</think>\n4", prompt=prompt, prompt_text="q<bot>")])
    assert (opened[0].totals, plain[0].totals) == ((1.0,), (0.0,))


def test_async_functions_keep_one_loop_even_inside_a_running_one() -> None:
    loops = []

    async def f(completions: Any) -> list[float]:
        await asyncio.sleep(0)
        loops.append(asyncio.get_running_loop())
        return [1.0] * len(completions)

    async def notebook_cell() -> list[Any]:
        with rubric(f=f) as made:
            return made.score([group("a", "b")]) + made.score([group("c")])

    scored = asyncio.run(notebook_cell())
    assert [s.totals for s in scored] == [(1.0, 1.0), (1.0,)]
    assert loops[0] is loops[1]


# What a function may return


@pytest.mark.parametrize(
    "result",
    [
        [True, 0, None],
        (np.float32(1), np.int64(0), None),
        [torch.tensor(1.0), torch.tensor([0]), None],
        iter([1, 0.0, None]),
    ],
)
def test_kinds_of_scores(result: Any) -> None:
    assert scores_of(lambda completions: result, "a", "b", "c") == (1.0, 0.0, None)


@pytest.mark.parametrize("result", [torch.tensor([1.0, 0.5]), np.array([1.0, 0.5]), torch.tensor([1, 0.5]).half()])
def test_whole_tensors_and_arrays(result: Any) -> None:
    assert scores_of(lambda completions: result, "a", "b") == (1.0, 0.5)


@pytest.mark.parametrize(
    ("score", "error"),
    [
        (float("nan"), "f: ValueError: the score is nan"),
        (float("-inf"), "f: ValueError: the score is -inf"),
        ("1", "f: TypeError: the score is '1', not a number"),
        ([1], "f: TypeError: the score is [1], not a number"),
        (10**400, "f: OverflowError: int too large to convert to float"),
    ],
)
def test_a_score_that_is_none_of_these_is_a_failure_of_its_answer(score: Any, error: str) -> None:
    with rubric(f=lambda completions: [score, 1.0]) as made:
        (scored,) = made.score([group("a", "b")])
        assert (scored.totals, scored.errors) == ((None, 1.0), (error, None))
        assert made.statistics()["f"]["failures"] == 1


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1, 1, 1], "reward 'f' returned 3 scores for 2 answers"),
        ([], "reward 'f' returned 0 scores for 2 answers"),
        (None, "reward 'f' returned None for 2 answers, not a list of 2 scores"),
        (torch.tensor(1.0), "reward 'f' returned 1.0 for 2 answers, not a list of 2 scores"),
        ("11", "reward 'f' returned '11' for 2 answers, not a list of 2 scores"),
    ],
)
def test_a_wrong_number_of_scores_stops(result: Any, message: str) -> None:
    with rubric(f=lambda completions: result) as made, pytest.raises(RewardFailed) as caught:
        made.score([group("a", "b")])
    assert str(caught.value) == message


# Totals and None


def test_weighted_totals_and_none_by_hand() -> None:
    """x: 1, .5 | None, None | 0, None ; y: 2, 4 | 6, 8 | None, 1 ; weights 1 and -.25."""
    x = iter([1, 0.5, None, None, 0, None])
    y = iter([2, 4, 6, 8, None, 1])
    specs = (RewardSpec("x"), RewardSpec("y", weight=-0.25))
    with rubric(*specs, x=lambda completions: x, y=lambda completions: y) as made:
        scored = made.score([group("a", "b"), group("c", "d"), group("e", "f")])
        assert made.statistics()["x"]["mean"] == 0.5
        assert made.statistics()["x"]["std"] == pytest.approx((1 / 6) ** 0.5)  # 1, .5, 0 around .5: (.25 + 0 + .25) / 3
        assert [made.statistics()[label]["failures"] for label in ("x", "y")] == [0, 0]
    # Group 1: 1 - .5, .5 - 1. Group 2: x is left out: -1.5, -2. Group 3: y is None for e, x for f.
    assert [s.totals for s in scored] == [(0.5, -0.5), (-1.5, -2.0), (None, None)]
    assert scored[2].scores == {"x": (0.0, None), "y": (None, 1.0)}
    assert [s.errors for s in scored] == [(None, None)] * 3


def test_all_functions_none_gives_none() -> None:
    with rubric("number", f=lambda completions: [None, None]) as made:
        (scored,) = made.score([group("7", "8", answer="???")])
        assert scored.totals == (None, None)
        assert made.statistics()["number"] == {
            "mean": None,
            "std": None,
            "seconds": made.statistics()["number"]["seconds"],
            "failures": 0,
        }


def test_five_answers_two_blank_give_five_scores_in_order() -> None:
    with rubric("number") as made:
        (scored,) = made.score([group("7", "", "8", " ", "7.0", answer=7)])
    assert scored.scores["number"] == (1.0, 0.0, 0.0, 0.0, 1.0)


def test_no_groups_no_scores() -> None:
    with rubric("number") as made:
        assert made.score([]) == []


# Failures


def fails_on_bad(completions: list[str]) -> list[float]:
    return [1 / len(text.removeprefix("bad")) for text in completions]


def test_one_bad_answer_is_isolated_counted_and_shown_once() -> None:
    problems: list[tuple[str, str]] = []
    with rubric("f", "number", problems=problems, f=fails_on_bad) as made:
        for _ in range(2):
            (scored,) = made.score([group("aa", "bad", "a", answer="?")])
            assert scored.scores["f"] == (0.5, None, 1.0)
            assert scored.errors == (None, "f: ZeroDivisionError: division by zero", None)
            assert made.statistics()["f"]["failures"] == 1
    ((label, trace),) = problems
    assert label == "f"
    assert trace.startswith("Traceback (most recent call last):\n") and "in fails_on_bad" in trace
    assert "call_function" not in trace
    assert trace.endswith("ZeroDivisionError: division by zero")


def test_a_function_that_always_fails_stops_at_once_with_its_traceback_once() -> None:
    problems: list[tuple[str, str]] = []
    with rubric(problems=problems, f=fails_on_bad) as made, pytest.raises(RewardFailed) as caught:
        made.score([group("bad", "bad")])
    assert str(caught.value).startswith("reward 'f' failed on every one of 2 answers:\nTraceback")
    assert str(caught.value).endswith("ZeroDivisionError: division by zero")
    assert problems == []


def test_what_the_reason_of_the_end_does_not_say_is_still_shown() -> None:
    problems: list[tuple[str, str]] = []
    functions = {"f": lambda completions: [math.nan, "x"], "g": lambda completions: [math.inf, math.inf]}
    with rubric(problems=problems, **functions) as made, pytest.raises(RewardFailed) as caught:
        made.score([group("a", "b")])
    assert (
        str(caught.value) == "reward 'f' failed on every one of 2 answers:\nTypeError: the score is 'x', not a number"
    )
    assert problems == [("f", "ValueError: the score is nan"), ("g", "ValueError: the score is inf")]


def test_only_the_step_that_ends_the_run_keeps_its_new_problem_for_the_reason() -> None:
    problems: list[tuple[str, str]] = []
    results: Iterator[Any] = iter([1.0, "x", "y", "z"])
    with rubric(problems=problems, f=lambda completions: [next(results)]) as made:
        for _ in range(3):
            made.score([group("a")])
        with pytest.raises(RewardFailed, match=r"3 times in a row:\nTypeError: the score is 'z', not a number$"):
            made.score([group("a")])
    assert [trace for _, trace in problems] == [f"TypeError: the score is '{x}', not a number" for x in "xy"]


def test_three_failed_steps_in_a_row_stop_a_function_that_once_worked() -> None:
    with rubric(f=fails_on_bad) as made:
        made.score([group("a")])
        made.score([group("bad", "bad")])
        made.score([group("bad", "a")])  # a success in between starts the count again
        assert made.score([group("bad")])[0].totals == (None,)
        assert made.score([group("bad")])[0].totals == (None,)
        with pytest.raises(RewardFailed, match="on every one of 1 answers, 3 times in a row:"):
            made.score([group("bad")])


def test_sys_exit_in_a_reward_is_a_failure() -> None:
    def f(completions: list[str]) -> list[float]:
        if "x" in completions:
            raise SystemExit(3)
        return [1.0] * len(completions)

    with rubric(f=f) as made:
        assert made.score([group("x", "y")])[0].errors == ("f: SystemExit: 3", None)


# What a checkpoint keeps


def test_a_restored_rubric_tolerates_what_a_straight_run_does() -> None:
    with rubric(f=fails_on_bad, g=lambda completions: [None] * len(completions)) as made:
        made.score([group("a")])
        made.score([group("bad")])
        kept = json.loads(json.dumps(made.state()))
    assert kept == {"succeeded": ["f", "g"], "failed_steps": {"f": 1, "g": 0}}
    with rubric(f=fails_on_bad) as made:
        made.restore(kept)
        assert made.score([group("bad")])[0].totals == (None,)
        with pytest.raises(RewardFailed, match="on every one of 1 answers, 3 times in a row:"):
            made.score([group("bad")])


def test_a_label_without_a_state_starts_afresh() -> None:
    with rubric(f=fails_on_bad) as made:
        made.restore({"succeeded": ["gone"], "failed_steps": {"gone": 2}})
        assert made.state() == {"succeeded": [], "failed_steps": {"f": 0}}
        with pytest.raises(RewardFailed, match="on every one of 1 answers:"):
            made.score([group("bad")])
