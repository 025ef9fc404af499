"""The reward `number`: what is read as a number, the three modes, and the cheats that must not pay."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowmem_grpo.errors import ConfigError
from lowmem_grpo.rewards import REWARDS
from lowmem_grpo.rewards.number import final_number

PROMPT = "What is 3 + 4? Reply with only the number."


def score(completion: str, gold: Any, prompt: Any = PROMPT, **options: Any) -> float | None:
    form = completion if isinstance(prompt, str) else [{"role": "assistant", "content": completion}]
    (value,) = REWARDS["number"](**options)(prompts=[prompt], completions=[form], answer=[gold], level=[1])
    return value


@pytest.mark.parametrize(
    ("gold", "completion", "expected"),
    [
        ("-4", "4", 0.0),
        ("-4", "-4.0", 1.0),
        ("-4", "−4", 1.0),
        ("35", "$35.00.", 1.0),
        ("35", " 35 €\n", 1.0),
        (7, "6.5", 0.0),
        (0, "-0", 1.0),
        ("1,234", "1234", 1.0),
        (1234567, "1,234,567", 1.0),
        (1234, "12,34", 0.0),
        (0.5, ".5", 1.0),
        (1e-05, "0.00001", 1.0),
        (7, "7 apples", 0.0),
        (7, "7..", 0.0),
        (7, "3 + 4 = 7", 0.0),
        (7, "6 7", 0.0),
        (7, "--7", 0.0),
        (7, "", 0.0),
        ("He has 3 + 4 = 7.\n#### 7", "7", 1.0),
        ("0.1", "0.10000000000000000001", 0.0),
    ],
)
def test_strict_wants_one_number_and_nothing_else(gold: Any, completion: str, expected: float) -> None:
    assert score(completion, gold) == expected


@pytest.mark.parametrize(
    ("gold", "completion", "expected", "with_bare_percent"),
    [
        ("35\\%", "35 percent", 1.0, 1.0),
        ("35\\%", "0.35", 1.0, 1.0),
        ("35\\%", "35", 0.0, 1.0),
        ("35%", "35 per cent", 1.0, 1.0),
        ("35", "35%", 0.0, 1.0),
        ("0.35", "35%", 1.0, 1.0),
        ("35%", "34%", 0.0, 0.0),
    ],
)
def test_percent_rule(gold: str, completion: str, expected: float, with_bare_percent: float) -> None:
    assert score(completion, gold) == expected
    assert score(completion, gold, mode="lenient") == expected
    assert score(completion, gold, bare_percent=True) == with_bare_percent


@pytest.mark.parametrize("gold", ["???", None, "", "seven", True, float("nan"), "1/2", [7]])
def test_a_gold_that_is_no_number_gives_none(gold: Any) -> None:
    assert REWARDS["number"]().parseable_gold(gold) is False  # type: ignore[attr-defined]
    assert [score("7", gold, mode=mode) for mode in ("strict", "lenient", "format")] == [None, None, None]


def test_parseable_golds() -> None:
    checker = REWARDS["number"]()
    assert [checker.parseable_gold(gold) for gold in ("7", 7, 7.5, "$7", "x #### 7")] == [True] * 5  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("completion", "strict", "form"),
    [
        ("<think>\n3 + 4\n</think>\n<answer>\n7\n</answer>", 1.0, 1.0),
        ("<answer>$7.00</answer> done", 1.0, 1.0),
        ("<answer>8</answer>", 0.0, 1.0),
        ("7", 0.0, 0.0),
        ("<answer></answer>", 0.0, 0.0),
        ("<answer>7 apples</answer>", 0.0, 0.0),
        ("<answer>6</answer><answer>7</answer>", 0.0, 0.0),
        ("</answer>7<answer>", 0.0, 0.0),
        ("<answer>7", 0.0, 0.0),
    ],
)
def test_with_a_tag_its_content_counts(completion: str, strict: float, form: float) -> None:
    assert score(completion, 7, tag="answer") == strict
    assert score(completion, 7, tag="answer", mode="format") == form


@pytest.mark.parametrize(
    "completion",
    [
        "7",
        "7.",
        "$7.00.",
        "What is 3 + 4? 3 + 4 = 7",
        "3 + 4 = 7",
        "3 plus 4 is 7",
        "7 = 3 + 4",
        "The sum of 3 and 4 is 7.",
        "The answer is 7",
        "The answer is **7**.",
        "The answer to 3 + 4 is $7$.",
        "Answer:\n7",
        "7 is the answer",
        "The answer is 7 because 3 and 4",
        "The answer is 7, not 8.",
        "It is not 6, it is 7.",
        "It is not 6 but 7",
        "So \\boxed{7}",
        "3 + 4\n#### 7",
        "<think>5 or 6? 5.</think>7",
        "<think>maybe 6</think><answer>7</answer>",
        "He had 12 and lost 5: 12 - 5 = 7 are left.",
        "It is 12 at first.\nThen 12 - 5 = 7.\nThe answer is 7.",
        "7km",
    ],
)
def test_lenient_finds_the_right_final_answer(completion: str) -> None:
    assert score(completion, 7, mode="lenient") == 1.0


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "   \n",
        "not 7",
        "It is not 7.",
        "The answer isn't 7",
        "The answer is never equal to 7",
        "7 is wrong",
        "7 is not the answer",
        "The answer is 7. That is wrong.",
        "x > 7",
        "x != 7",
        "rather than 7",
        "1, 2, 3, 4, 5, 6, 7",
        "7, 6, 5, 4, 3, 2, 1",
        "1 2 3 4 5 6 7",
        "1\n2\n3\n4\n5\n6\n7",
        "- 5\n- 6\n- 7",
        "5; 6; maybe 7",
        "6 or 7",
        "7 or 6",
        "6-7",
        "The answer is 6. The answer is 7.",
        "The answer is 7. The answer is 6.",
        "It is 6. It is 7.",
        "7.\n6.",
        "The answer is 7. The total is 8 dollars.",
        "\\boxed{6} \\boxed{7}",
        "<answer>6</answer><answer>7</answer>",
        "3 + 4 = 6, 3 + 4 = 7",
        "Is it 7?",
        "0 + 7",
        "7 +",
        "1/7",
        "7/1",
        "the 7th",
        "version 1.0.7",
        "A7",
        "17",
        "6.7",
        "-7",
        "\\boxed{}",
        "2 * 3",
    ],
)
def test_lenient_gives_nothing_for_hedges_and_denials(completion: str) -> None:
    assert score(completion, 7, mode="lenient") == 0.0


def test_a_thread_reads_as_the_main_thread_does() -> None:
    with ThreadPoolExecutor(1) as pool:
        values = [pool.submit(score, text, 7, mode="lenient").result() for text in ("It is 7.", "It is not 7.")]
    assert values == [1.0, 0.0]


@pytest.mark.parametrize(
    ("prompt", "gold", "echo"),
    [
        ("What is 0 + 7?", 7, "What is 0 + 7?"),
        ("What is 0 + 7?", 7, "0 + 7"),
        ("Tom has 3 blue pens and 7 red pens. How many are red?", 7, "Tom has 3 blue pens and 7 red pens."),
        ([{"role": "user", "content": "There are 7 apples here. Count them."}], 7, "There are 7 apples here."),
    ],
)
def test_an_echo_of_the_question_is_no_answer(prompt: Any, gold: int, echo: str) -> None:
    assert score(echo, gold, prompt, mode="lenient") == 0.0
    assert score(f"{echo} The answer is 7.", gold, prompt, mode="lenient") == 1.0


def test_text_and_messages_are_read_alike() -> None:
    messages = [{"role": "user", "content": PROMPT}]
    for completion, expected in (("7", 1.0), ("8", 0.0)):
        assert score(completion, 7, messages) == score(completion, 7) == expected


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(0, 99), min_size=2, max_size=6, unique=True), st.sampled_from([", ", " ", "\n", " or ", "; "])
)
def test_no_list_of_different_numbers_is_an_answer(numbers: list[int], separator: str) -> None:
    assert final_number(separator.join(map(str, numbers))) is None


@settings(deadline=None, max_examples=40)
@given(st.text(alphabet="0123456789+-*/=().,$% \nxnotiswer?#\\{}<>", max_size=80))
def test_any_text_can_be_read(text: str) -> None:
    values = [score(text, 7, mode=mode) for mode in ("strict", "lenient", "format")]
    assert set(values) <= {0.0, 1.0}
    assert values[0] == 0.0 or values[2] == 1.0


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"reward 'number' has no option 'tga', did you mean 'tag'"):
        REWARDS["number"](tga="answer")
    with pytest.raises(ConfigError, match=r"is 'lenint' but should be 'strict', 'lenient' or 'format'"):
        REWARDS["number"](mode="lenint")


@pytest.mark.parametrize(
    ("completion", "strict", "lenient", "written_as_asked"),
    [
        ("3 + 4 = 7", 1.0, 1.0, 1.0),
        ("3 + 4 = 7.", 1.0, 1.0, 1.0),
        ("3 + 4 = 8", 0.0, 0.0, 1.0),
        ("7", 0.0, 1.0, 0.0),
        ("3 + 4 = 7\n\nI am glad to help!", 0.0, 1.0, 0.0),
        ("3 + 4 = 6 = 7", 0.0, 0.0, 0.0),
        ("3 + 4 = 6, 3 + 4 = 7", 0.0, 0.0, 0.0),
        ("", 0.0, 0.0, 0.0),
    ],
)
def test_after_names_what_stands_before_the_number(
    completion: str, strict: float, lenient: float, written_as_asked: float
) -> None:
    inputs = {"prompts": ["What is 3 + 4?"], "completions": [completion], "answer": ["7"]}
    by_mode = [REWARDS["number"](after="=", mode=mode)(**inputs) for mode in ("strict", "lenient", "format")]
    assert by_mode == [[strict], [lenient], [written_as_asked]]


def test_after_reads_the_form_of_gsm8k_and_not_what_was_thought() -> None:
    reward = REWARDS["number"](after="####")
    completions = ["6 x 7 is 42.\n#### 42", "<think>#### 41</think>\n#### 42", "#### 42 or 43"]
    assert reward(prompts=["q"] * 3, completions=completions, answer=["42"] * 3) == [1.0, 1.0, 0.0]


def test_tag_and_after_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="tag or after, not both"):
        REWARDS["number"](tag="answer", after="=")
