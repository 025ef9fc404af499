"""The other built-ins: text, tags, regex, length; and text_of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lowmem_grpo.errors import ConfigError
from lowmem_grpo.rewards import REWARDS, AnswerChecker, text_of
from lowmem_grpo.rewards.base import FormChecker


def score(name: str, completion: str, gold: Any = None, prompt: Any = "Which?", **options: Any) -> float | None:
    inputs = {"prompts": [prompt], "completions": [completion], "completion_ids": [[1]], "answer": [gold]}
    (value,) = REWARDS[name](**options)(**inputs)
    return value


def test_text_of_reads_either_form() -> None:
    assert text_of("a") == "a"
    assert text_of([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]) == "a\nb"
    assert text_of([{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image"}]}]) == "x"
    assert text_of([{"role": "assistant", "content": None}]) == ""


def test_which_builtins_check_answers() -> None:
    options: dict[str, dict[str, Any]] = {"regex": {"pattern": "a"}, "length": {"max_tokens": 9}}
    built = {name: factory(**options.get(name, {})) for name, factory in REWARDS.items()}
    assert {name for name, fn in built.items() if isinstance(fn, AnswerChecker)} == {"number", "text"}
    assert {name for name, fn in built.items() if fn.needs == {"answer"}} == {"number", "text"}
    assert {name for name, fn in built.items() if fn.in_worker} == {"regex"}
    assert replace(built["text"], mode="format").mode == "format"  # type: ignore[type-var, attr-defined]


@pytest.mark.parametrize(
    ("completion", "strict", "lenient", "form"),
    [
        ("Paris", 1, 1, 1),
        ("  paris. ", 1, 1, 1),
        ("ＰＡＲＩＳ", 1, 1, 1),
        ("The capital is Paris.", 0, 1, 1),
        ("Let me think.\nIt is Paris.", 0, 1, 0),
        ("Paris\nLondon", 0, 0, 0),
        ("Parisian", 0, 0, 1),
        ("not Paris", 0, 0, 1),
        ("It isn't Paris.", 0, 0, 1),
        ("It is not Paris, but London", 0, 0, 1),
        ("Paris or London", 0, 0, 1),
        ("London or Paris", 0, 0, 1),
        ("Is it Paris?", 0, 0, 1),
        ("Paris. That is wrong.", 0, 0, 1),
        ("", 0, 0, 0),
        ("...", 0, 0, 0),
    ],
)
def test_text(completion: str, strict: float, lenient: float, form: float) -> None:
    modes = ("strict", "lenient", "format")
    assert [score("text", completion, "Paris", mode=mode) for mode in modes] == [strict, lenient, form]


def test_text_echo_false_gold_and_options() -> None:
    question = "Is Paris the capital of France? Say Paris is the capital."
    assert score("text", "Say Paris is the capital.", "Paris", question, mode="lenient") == 0.0
    assert score("text", "The claim is false.", "false", mode="lenient") == 1.0
    assert score("text", "The claim is not false.", "false", mode="lenient") == 0.0
    assert score("text", "paris", "Paris", ignore_case=False) == 0.0
    assert score("text", "Paris.", "Paris", punctuation=True) == 0.0
    assert score("text", "x <answer> Paris </answer>", "Paris", tag="answer") == 1.0
    assert score("text", "Paris", "Paris", tag="answer") == 0.0
    assert [score("text", "a", gold) for gold in (None, "", " .")] == [None, None, None]


@pytest.mark.parametrize(
    ("completion", "whole", "share"),
    [
        ("<think>\na\n</think>\n<answer>9</answer>", 1.0, 1.0),
        ("<think>a</think> 9", 0.0, 0.5),
        ("<answer>9</answer><think>a</think>", 0.0, 0.5),
        ("<think><answer>9</answer></think>", 0.0, 0.5),
        ("<think>a</think><answer>9</answer><answer>8</answer>", 0.0, 0.5),
        ("</think>a<think><answer>9</answer>", 0.0, 0.5),
        ("9", 0.0, 0.0),
    ],
)
def test_tags(completion: str, whole: float, share: float) -> None:
    assert score("tags", completion) == whole
    assert score("tags", completion, partial=True) == share


def test_tags_when_the_template_opened_the_first() -> None:
    fn = REWARDS["tags"](tags=["think"])
    inputs = {"prompts": [[{"role": "user", "content": "q"}]] * 2, "completions": ["x\n</think>\n4"] * 2}
    assert fn(**inputs, prompt_texts=["<|user|>q<|bot|><think>\n", "<|user|>q<|bot|>"]) == [1.0, 0.0]
    empty = REWARDS["tags"]()(prompts=["q<think>\n\n</think>\n\n"], completions=["<answer>4</answer>"])
    assert empty == [1.0]


@pytest.mark.parametrize("tags", [[], ["a", "a"], ["<think>"]])
def test_tags_refuses_odd_names(tags: list[str]) -> None:
    with pytest.raises(ConfigError, match="should list different names"):
        REWARDS["tags"](tags=tags)


def test_regex() -> None:
    assert score("regex", "the 42", pattern="[0-9]+") == 1.0
    assert score("regex", "the 42", pattern="[0-9]+", how="fullmatch") == 0.0
    assert score("regex", "A\nb", pattern="^B$") == 0.0
    assert score("regex", "A\nb", pattern="^B$", ignore_case=True, multiline=True) == 1.0
    assert score("regex", "A\nb", pattern="A.b", dotall=True) == 1.0
    with pytest.raises(ConfigError, match=r"is '\(', which is no pattern: missing \)"):
        REWARDS["regex"](pattern="(")
    with pytest.raises(ConfigError, match="needs the option pattern"):
        REWARDS["regex"]()


def test_length_is_the_overlong_penalty() -> None:
    fn = REWARDS["length"](max_tokens=100, cache=20)
    lengths = (79, 80, 81, 90, 100, 101)
    assert fn(completion_ids=[[0] * n for n in lengths]) == [0.0, 0.0, -0.05, -0.5, -1.0, -1.0]
    assert fn(completion_ids=[[]]) == [None]
    assert REWARDS["length"](max_tokens=100)(completion_ids=[[0] * 90]) == [-0.5]


@pytest.mark.parametrize(
    ("options", "words"),
    [({}, "needs the option max_tokens"), ({"max_tokens": 5, "cache": 9}, r"cache .* is 9 but should be from 1 to")],
)
def test_length_refusals(options: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        REWARDS["length"](**options)


@pytest.mark.parametrize(
    ("name", "options", "asked"),
    [
        ("tags", {}, ("<think>", "<answer>")),
        ("tags", {"tags": ("sql",), "partial": True}, ("<sql>",)),
        ("number", {}, ()),
        ("number", {"tag": "answer"}, ("<answer>",)),
        ("number", {"tag": "answer", "mode": "format"}, ("<answer>",)),
        ("number", {"tag": "answer", "mode": "lenient"}, ()),
        ("number", {"after": "####"}, ("####",)),
        ("number", {"after": "="}, ()),
        ("text", {}, ()),
        ("text", {"tag": "label"}, ("<label>",)),
        ("text", {"tag": "label", "mode": "lenient"}, ()),
    ],
)
def test_the_form_a_reward_asks_for(name: str, options: dict[str, Any], asked: tuple[str, ...]) -> None:
    checker = REWARDS[name](**options)
    assert isinstance(checker, FormChecker)
    assert checker.asks_for == asked


def test_an_answer_without_the_form_asked_for_gets_nothing() -> None:
    assert score("number", "7", 7, tag="answer") == score("number", "7", 7, after="####") == 0.0
    assert score("text", "Paris", "Paris", tag="label") == score("tags", "Paris") == 0.0
    assert not isinstance(REWARDS["regex"](pattern="a"), FormChecker)
