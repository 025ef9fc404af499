"""From a prompt to the exact tokens the model sees: one function for training, evaluation, chat and export."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict

from lowmem_grpo.data.spec import DataSpec
from lowmem_grpo.errors import ConfigError, DataError
from lowmem_grpo.types import Message, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "RenderedPrompt",
    "TemplateRecord",
    "as_messages",
    "content_text",
    "markers_of",
    "render_prompt",
    "template_record",
    "template_warnings",
]

# What chat templates write and people do not; \uff5c is the wide bar of DeepSeek. The tokenizer's own special tokens
# come on top.
_MARKERS = (
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|begin_of_text|>"),
    *("[INST]", "[/INST]", "<<SYS>>", "<start_of_turn>", "<end_of_turn>", "<|turn>", "<|user|>", "<|assistant|>"),
    *("<|system|>", "<|end|>", "<|endoftext|>", "<|START_OF_TURN_TOKEN|>", "<\uff5cUser\uff5c>"),
    "<\uff5cAssistant\uff5c>",
)
# Special tokens that some templates spell out and that are HTML's strike-through in honest text.
_PLAIN = ("<s>", "</s>")
_RESERVED_KWARGS = (
    *("conversation", "messages", "chat_template", "tokenize", "add_generation_prompt", "continue_final_message"),
    *("return_dict", "return_tensors", "return_assistant_tokens_mask", "padding", "truncation", "max_length"),
    *("tokenizer_kwargs", "sanitize_control_tokens"),
)


class TemplateRecord(TypedDict):
    """How prompts are rendered; plain JSON, stored with the run so that every later use renders the same."""

    format: Literal["chat", "text"]
    template: str | None
    system_prompt: str | None
    thinking: bool | None
    kwargs: dict[str, Any]


class RenderedPrompt(NamedTuple):
    """The rendered text and its tokens."""

    text: str
    ids: tuple[int, ...]


def template_record(spec: DataSpec, tokenizer: PreTrainedTokenizerBase) -> TemplateRecord:
    """Decide chat or text and fix everything that rendering depends on.

    `format: auto` is chat exactly when the tokenizer has a chat template. Raises DataError for chat without a template
    and for a system prompt without chat, ConfigError for template arguments that are not free to set.
    """
    for name in spec.chat_template_kwargs:
        if name in _RESERVED_KWARGS:
            raise ConfigError(f"data.chat_template_kwargs.{name} cannot be set: the program itself decides it")
    if spec.thinking is not None and "enable_thinking" in spec.chat_template_kwargs:
        raise ConfigError("data.thinking and data.chat_template_kwargs.enable_thinking are the same switch; set one")
    template = _template_text(tokenizer, spec) if tokenizer.chat_template and spec.format != "text" else None
    if template is None and spec.format == "chat":
        raise DataError(
            "data.format is chat and the tokenizer has no chat template; use an instruct model or data.format=text"
        )
    if template is None and spec.system_prompt is not None:
        raise DataError(
            "data.system_prompt needs a chat template and the prompts are rendered as plain text; "
            "write it into the prompts, or use an instruct model with data.format=chat"
        )
    return {
        "format": "text" if template is None else "chat",
        "template": template,
        "system_prompt": spec.system_prompt,
        "thinking": spec.thinking,
        "kwargs": dict(spec.chat_template_kwargs),
    }


def render_prompt(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, record: TemplateRecord) -> RenderedPrompt:
    """Render and tokenise one prompt.

    Chat: text becomes one user message, the system prompt goes in front where the messages bring none, and the
    template alone decides about special tokens, the opening one included (as transformers does). Text: the tokenizer's
    opening token goes in front unless the text begins with it. So neither way can it stand there twice. No closing
    token is ever added. Raises DataError with the template's own message when it refuses the prompt.
    """
    if record["format"] == "chat":
        text = _chat_text(as_messages(prompt, record["system_prompt"]), tokenizer, record)
        return RenderedPrompt(text, _ids(text, tokenizer))
    if not isinstance(prompt, str):
        raise DataError("a list of messages needs a chat template, and the prompts are rendered as plain text")
    ids, bos = _ids(prompt, tokenizer), tokenizer.bos_token_id
    adds_bos = bos is not None and tokenizer("", verbose=False)["input_ids"][:1] == [bos]
    return RenderedPrompt(prompt, (bos, *ids) if adds_bos and ids[:1] != (bos,) else ids)


def as_messages(prompt: Prompt, system_prompt: str | None) -> list[Message]:
    """The messages of a prompt; `system_prompt` goes in front unless they begin with a system message.

    >>> as_messages("1+1", "Be brief.")
    [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': '1+1'}]
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if system_prompt is None or (messages and messages[0].get("role") == "system"):
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


def content_text(message: Message) -> str:
    """The text of a message whose content is text or a list of text parts.

    >>> content_text({"role": "user", "content": [{"type": "text", "text": "hi"}]})
    'hi'
    """
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


def markers_of(tokenizer: PreTrainedTokenizerBase, template: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Strings that prove a prompt was rendered before, and special tokens that may also be honest text.

    A special token of the tokenizer is proof when the template spells it out or it has bars as in `<|user|>`; others,
    such as `<filename>` or `<s>`, people write too.
    """
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special and token.content}
    proof = {token for token in special if token in template or "|" in token or "\uff5c" in token}.difference(_PLAIN)
    return (*_MARKERS, *sorted(proof.difference(_MARKERS))), tuple(sorted(special - proof.union(_MARKERS)))


def template_warnings(record: TemplateRecord) -> Iterator[str]:
    """Sentences about settings that this template will not act on, or that make its output change by the day."""
    template = record["template"]
    if template is None:
        unused = [f"data.chat_template_kwargs.{name}" for name in record["kwargs"]]
        unused += ["data.thinking"] if record["thinking"] is not None else []
        if unused:
            yield f"{' and '.join(unused)}: not used, because the prompts are plain text without a chat template"
        return
    if record["thinking"] is not None and "enable_thinking" not in template:
        yield (
            f"data.thinking={str(record['thinking']).lower()} has no effect: the chat template never mentions "
            "enable_thinking (a switch of another name goes into data.chat_template_kwargs)"
        )
    for name in record["kwargs"]:
        if name not in template:
            yield f"data.chat_template_kwargs.{name} has no effect: the chat template never mentions {name}"
    if "strftime_now" in template and "date_string" not in record["kwargs"]:
        yield (
            "the chat template writes today's date, so a run resumed tomorrow sees other prompts; "
            "where the template allows it, fix the date with data.chat_template_kwargs.date_string"
        )


def _template_text(tokenizer: PreTrainedTokenizerBase, spec: DataSpec) -> str:
    try:
        return tokenizer.get_chat_template(tools=spec.chat_template_kwargs.get("tools"))
    except ValueError as error:  # several named templates and none called default
        raise DataError(f"the tokenizer's chat template cannot be chosen: {error}") from None


def _chat_text(messages: list[Message], tokenizer: PreTrainedTokenizerBase, record: TemplateRecord) -> str:
    from jinja2 import TemplateError

    thinking = {} if record["thinking"] is None else {"enable_thinking": record["thinking"]}
    try:
        text = tokenizer.apply_chat_template(
            messages,
            chat_template=record["template"],
            tokenize=False,
            add_generation_prompt=True,
            **{**record["kwargs"], **thinking},
        )
    except (TemplateError, TypeError) as error:  # a TypeError is a template that cannot handle a value
        raise DataError(f"the chat template refuses this prompt: {error}") from error
    return str(text)


def _ids(text: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
