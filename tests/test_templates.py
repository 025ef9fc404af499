"""From a prompt to its tokens: templates, the opening token, the thinking switch, markers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lowmem_grpo.data import DataSpec, PreparedData, prepare, read_rows, render_prompt, template_record
from lowmem_grpo.errors import ConfigError, DataError
from lowmem_grpo.rewards.base import text_of
from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer

BOS_TEMPLATE = "{{ bos_token }}" + CHAT_TEMPLATE
THINKING_TEMPLATE = (
    CHAT_TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
BOS, IM_START = 3, 1


def prepared(rows: list[dict[str, Any]], tokenizer: Any = None, **settings: Any) -> PreparedData:
    spec = DataSpec(rows, **settings)
    return prepare(read_rows(spec, base_dir=Path()), spec, tokenizer or tiny_tokenizer(), needs_gold=False)


def with_template(template: str, *, bos: bool = False) -> Any:
    tokenizer = tiny_tokenizer(bos=bos)
    tokenizer.chat_template = template
    return tokenizer


def rendered(prompt: Any, tokenizer: Any, **settings: Any) -> Any:
    return render_prompt(prompt, tokenizer, template_record(DataSpec([], **settings), tokenizer))


class TestOpeningToken:
    def test_template_and_tokenizer_both_write_it_chat(self) -> None:
        text, ids = rendered("hi", with_template(BOS_TEMPLATE, bos=True))
        assert text == "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        assert ids[:2] == (BOS, IM_START)
        assert ids.count(BOS) == 1

    def test_tokenizer_adds_it_raw_text(self) -> None:
        text, ids = rendered("hi", with_template(BOS_TEMPLATE, bos=True), format="text")
        assert text == "hi"
        assert len(ids) == 3 and ids[0] == BOS and ids.count(BOS) == 1

    def test_raw_text_that_begins_with_it(self) -> None:
        tokenizer = tiny_tokenizer(bos=True)
        assert rendered("<s>hi", tokenizer, format="text").ids == rendered("hi", tokenizer, format="text").ids

    def test_chat_leaves_it_to_the_template(self) -> None:
        assert BOS not in rendered("hi", with_template(CHAT_TEMPLATE, bos=True)).ids

    def test_a_tokenizer_that_adds_none(self) -> None:
        tokenizer = tiny_tokenizer(bos=False)
        assert rendered("hi", tokenizer, format="text").ids == tuple(tokenizer("hi")["input_ids"])

    def test_an_opening_token_that_only_the_template_uses(self) -> None:
        # As in SmolLM2: the opening token is <|im_start|>, and the tokenizer adds nothing by itself.
        tokenizer = tiny_tokenizer()
        tokenizer.bos_token = "<|im_start|>"
        assert rendered("hi", tokenizer).ids.count(IM_START) == 2
        assert IM_START not in rendered("hi", tokenizer, format="text").ids

    def test_chat_tokens_equal_those_of_transformers(self) -> None:
        tokenizer = with_template(BOS_TEMPLATE, bos=True)
        messages = [{"role": "user", "content": "hi"}]
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert rendered(messages, tokenizer).ids == tuple(expected)

    def test_a_closing_token_is_never_added(self) -> None:
        from tokenizers import processors

        tokenizer = tiny_tokenizer(bos=True)
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A <|im_end|>", special_tokens=[("<s>", BOS), ("<|im_end|>", 2)]
        )
        ids = rendered("hi", tokenizer, format="text").ids
        assert len(ids) == 3 and ids[0] == BOS and 2 not in ids


class TestFormat:
    def test_auto_is_chat_with_a_template_and_text_without(self) -> None:
        assert prepared([{"prompt": "hi"}]).prompt_format == "chat"
        plain = prepared([{"prompt": "hi"}], tiny_tokenizer(chat=False))
        assert plain.prompt_format == "text"
        assert plain.example == "hi"

    def test_chat_without_a_template_is_refused(self) -> None:
        with pytest.raises(DataError, match=r"no chat template; use an instruct model or data.format=text"):
            prepared([{"prompt": "hi"}], tiny_tokenizer(chat=False), format="chat")

    def test_messages_without_a_template_are_refused(self) -> None:
        rows = [{"prompt": [{"role": "user", "content": "hi"}]}]
        with pytest.raises(DataError, match=r"row 1, column 'prompt': a list of messages needs a chat template"):
            prepared(rows, tiny_tokenizer(chat=False))

    def test_the_same_row_as_text_and_as_messages(self) -> None:
        as_text = prepared([{"prompt": "1+1"}]).train[0]
        as_list = prepared([{"prompt": [{"role": "user", "content": "1+1"}]}]).train[0]
        assert as_text.prompt_ids == as_list.prompt_ids
        assert as_text.prompt_text == as_list.prompt_text == "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n"
        # A user's function gets what TRL would give it, a built-in reads the same text from both.
        assert as_text.prompt == "1+1"
        assert as_list.prompt == [{"role": "user", "content": "1+1"}]
        assert text_of(as_text.prompt) == text_of(as_list.prompt) == "1+1"

    def test_content_parts_are_text(self) -> None:
        parts = [{"type": "text", "text": "1+1"}]
        tokenizer = with_template("{% for m in messages %}{{ m['content'][0]['text'] }}{% endfor %}")
        assert prepared([{"prompt": [{"role": "user", "content": parts}]}], tokenizer).example == "1+1"


class TestMessages:
    def test_system_prompt_goes_in_front(self) -> None:
        expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        assert prepared([{"prompt": "hi"}], system_prompt="Be brief.").example == expected
        listed = prepared([{"prompt": [{"role": "user", "content": "hi"}]}], system_prompt="Be brief.")
        assert listed.example == expected
        assert listed.train[0].prompt == [{"role": "user", "content": "hi"}]

    def test_a_row_with_its_own_system_message_keeps_it_and_says_so(self) -> None:
        messages = [{"role": "system", "content": "Own."}, {"role": "user", "content": "hi"}]
        data = prepared([{"prompt": messages}], system_prompt="Be brief.")
        assert "Be brief" not in data.example and "Own." in data.example
        assert [w for w in data.report.warnings if "row 1" in w and "data.system_prompt is not used there" in w]

    def test_system_prompt_without_a_template_is_refused(self) -> None:
        with pytest.raises(DataError, match=r"data.system_prompt needs a chat template"):
            prepared([{"prompt": "hi"}], tiny_tokenizer(chat=False), system_prompt="Be brief.")

    def test_a_last_assistant_message_is_refused(self) -> None:
        messages = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
        with pytest.raises(DataError, match=r"row 2, column 'prompt' ends with an assistant message"):
            prepared([{"prompt": messages[:1]}, {"prompt": messages}])

    def test_an_earlier_assistant_message_is_kept(self) -> None:
        turns = ["user", "assistant", "user"]
        data = prepared([{"prompt": [{"role": role, "content": role.upper()} for role in turns]}])
        assert "<|im_start|>assistant\nASSISTANT<|im_end|>" in data.example

    @pytest.mark.parametrize(
        ("prompt", "message"),
        [
            (7, "holds 7; a prompt is text or a list of messages"),
            (["hi"], r"without role and content \(found: str\)"),
            ([{"from": "human", "value": "hi"}], r"without role and content \(found: from, value\)"),
            ([{"role": "user", "content": 7}], "whose content is 7, not text"),
            ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "a part that is not text"),
        ],
    )
    def test_other_forms_are_refused_by_row_and_column(self, prompt: Any, message: str) -> None:
        with pytest.raises(DataError, match=rf"the given rows row 1, column 'q' .*{message}"):
            prepared([{"q": prompt}], prompt_column="q")

    def test_text_and_lists_in_one_column_are_refused(self) -> None:
        rows = [{"prompt": "a"}, {"prompt": "b"}, {"prompt": [{"role": "user", "content": "c"}]}]
        with pytest.raises(DataError, match=r"mixes text and lists of messages \(rows 1 and 3\)"):
            prepared(rows)


class TestAlreadyRendered:
    @pytest.mark.parametrize(
        "text",
        [
            "<|im_start|>user\n1+1<|im_end|>",
            "<|start_header_id|>user<|end_header_id|>1+1",
            "<s>[INST] 1+1 [/INST]",
            "<start_of_turn>user\n1+1",
            "<\uff5cUser\uff5c>1+1",
            "1+1<|endoftext|>",
        ],
    )
    def test_refused_in_a_chat_run(self, text: str) -> None:
        with pytest.raises(DataError, match=r"row 2, column 'q' already holds the chat marker"):
            prepared([{"q": "fine"}, {"q": text}], prompt_column="q")

    def test_refused_inside_messages_too(self) -> None:
        rows = [{"prompt": [{"role": "user", "content": "<|im_start|>user\nhi"}]}]
        with pytest.raises(DataError, match=r"row 1, column 'prompt' already holds the chat marker '<\|im_start\|>'"):
            prepared(rows)

    def test_refused_in_the_system_prompt(self) -> None:
        with pytest.raises(DataError, match=r"data.system_prompt already holds the chat marker"):
            prepared([{"prompt": "hi"}], system_prompt="<|im_start|>system\nBe brief.")

    def test_the_tokenizers_own_special_tokens_count(self) -> None:
        tokenizer = tiny_tokenizer()
        assert prepared([{"prompt": "a <|turn_end_42|> b"}], tokenizer).report.train == 1
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn_end_42|>"]})
        with pytest.raises(DataError, match=r"chat marker '<\|turn_end_42\|>'"):
            prepared([{"prompt": "a <|turn_end_42|> b"}], tokenizer)

    def test_a_token_that_is_also_honest_text_is_a_warning(self) -> None:
        tokenizer = tiny_tokenizer(bos=True)
        tokenizer.add_special_tokens({"additional_special_tokens": ["<filename>"]})
        data = prepared([{"prompt": p} for p in ("fine", "Is <s>old</s> HTML?", "cp <filename> x")], tokenizer)
        assert data.report.train == 3
        assert data.report.warnings == (
            "the given rows row 2: the text <s> is read as a special token by this tokenizer",
            "the given rows row 3: the text <filename> is read as a special token by this tokenizer",
        )

    def test_a_special_token_that_the_template_writes_counts(self) -> None:
        template = CHAT_TEMPLATE.replace("<|im_end|>", "[END]")
        assert prepared([{"prompt": "a [END] b"}], with_template(template)).report.train == 1
        tokenizer = with_template(template)
        tokenizer.add_special_tokens({"additional_special_tokens": ["[END]"]})
        with pytest.raises(DataError, match=r"chat marker '\[END\]'"):
            prepared([{"prompt": "a [END] b"}], tokenizer)

    def test_accepted_as_it_is_in_a_text_run(self) -> None:
        text = "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n"
        data = prepared([{"prompt": text}], format="text")
        assert data.example == text
        assert data.train[0].prompt_ids == prepared([{"prompt": "1+1"}]).train[0].prompt_ids


class TestThinking:
    def test_off_on_and_unset(self) -> None:
        tokenizer = with_template(THINKING_TEMPLATE)
        ends = {
            switch: rendered("hi", tokenizer, thinking=switch).text.endswith("<think></think>")
            for switch in (False, True, None)
        }
        assert ends == {False: True, True: False, None: False}

    def test_a_template_without_the_switch_is_a_warning(self) -> None:
        data = prepared([{"prompt": "hi"}], thinking=False)
        assert len(data.report.warnings) == 1
        assert "data.thinking=false has no effect" in data.report.warnings[0]
        assert prepared([{"prompt": "hi"}], with_template(THINKING_TEMPLATE), thinking=False).report.warnings == ()

    def test_both_ways_of_setting_it_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="are the same switch; set one"):
            prepared([{"prompt": "hi"}], thinking=False, chat_template_kwargs={"enable_thinking": True})

    def test_a_stored_record_renders_the_same_after_the_tokenizer_changed(self) -> None:
        tokenizer = with_template(THINKING_TEMPLATE)
        spec = DataSpec([], thinking=False, system_prompt="Be brief.", chat_template_kwargs={"enable": 1})
        record = template_record(spec, tokenizer)
        assert record == {
            "format": "chat",
            "template": THINKING_TEMPLATE,
            "system_prompt": "Be brief.",
            "thinking": False,
            "kwargs": {"enable": 1},
        }
        before = render_prompt("hi", tokenizer, record)
        tokenizer.chat_template = "another"
        assert render_prompt("hi", tokenizer, record) == before


class TestTemplateArguments:
    def test_they_reach_the_template(self) -> None:
        tokenizer = with_template(CHAT_TEMPLATE + "{{ effort }}")
        assert rendered("hi", tokenizer, chat_template_kwargs={"effort": "low"}).text.endswith("assistant\nlow")

    def test_one_that_the_template_ignores_is_a_warning(self) -> None:
        data = prepared([{"prompt": "hi"}], chat_template_kwargs={"efort": "low"})
        assert data.report.warnings == (
            "data.chat_template_kwargs.efort has no effect: the chat template never mentions efort",
        )

    def test_without_a_template_they_are_a_warning(self) -> None:
        data = prepared([{"prompt": "hi"}], tiny_tokenizer(chat=False), thinking=True, chat_template_kwargs={"a": 1})
        assert len(data.report.warnings) == 1
        assert "data.chat_template_kwargs.a and data.thinking: not used" in data.report.warnings[0]

    def test_those_the_program_decides_are_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"data.chat_template_kwargs.tokenize cannot be set"):
            prepared([{"prompt": "hi"}], chat_template_kwargs={"tokenize": True})

    def test_a_template_that_writes_the_date_is_a_warning(self) -> None:
        tokenizer = with_template(CHAT_TEMPLATE + "{{ date_string or strftime_now('%d %b %Y') }}")
        assert "writes today's date" in prepared([{"prompt": "hi"}], tokenizer).report.warnings[0]
        fixed = prepared([{"prompt": "hi"}], tokenizer, chat_template_kwargs={"date_string": "26 Jul 2024"})
        assert fixed.report.warnings == ()
        assert fixed.example.endswith("26 Jul 2024")


class TestTemplateErrors:
    def test_the_templates_own_message_is_shown(self) -> None:
        tokenizer = with_template(
            "{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system role!') }}{% endif %}x"
        )
        assert prepared([{"prompt": "hi"}], tokenizer).example == "x"
        with pytest.raises(
            DataError, match=r"row 1, column 'prompt': the chat template refuses this prompt: No system role!"
        ):
            prepared([{"prompt": "hi"}], tokenizer, system_prompt="Be brief.")

    def test_a_template_with_a_syntax_error(self) -> None:
        with pytest.raises(DataError, match=r"the chat template refuses this prompt: Unexpected end of template"):
            prepared([{"prompt": "hi"}], with_template("{% for m in messages %}"))

    def test_a_template_that_cannot_handle_a_value(self) -> None:
        with pytest.raises(DataError, match="the chat template refuses this prompt"):
            prepared([{"prompt": "hi"}], with_template("{{ messages[0]['content'] + 1 }}"))

    def test_several_templates_without_a_default(self) -> None:
        tokenizer = with_template({"rag": "x", "tool_use": "y"})  # type: ignore[arg-type]
        with pytest.raises(DataError, match="cannot be chosen"):
            prepared([{"prompt": "hi"}], tokenizer)

    def test_several_templates_with_a_default(self) -> None:
        tokenizer = with_template({"default": CHAT_TEMPLATE, "tool_use": "y"})  # type: ignore[arg-type]
        assert template_record(DataSpec([]), tokenizer)["template"] == CHAT_TEMPLATE
        tools = DataSpec([], chat_template_kwargs={"tools": [{"type": "function"}]})
        assert template_record(tools, tokenizer)["template"] == "y"
