"""A chat template split into the text around messages, so that a conversation is fed to a state turn by turn.

`split_template` frames one message (of any length: the message itself is never rendered), `split_turns` a conversation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_PLACEHOLDERS = ("msrnn-first", "msrnn-answer", "msrnn-second")  # messages that no template contains or changes


@dataclass(frozen=True)
class Turns:
    """The text before the first message, between an answer and the next message, and after each message."""

    first_prefix: str
    next_prefix: str
    suffix: str


def split_template(
    tokenizer: Any, system: str | None = None, *, default: tuple[str, str] | None = None
) -> tuple[str, str]:
    """The text before and after one user message that the model is to answer.

    `default` is for tokenizers without a chat template; without it they are refused.
    """
    if default is not None and not getattr(tokenizer, "chat_template", None):
        return default
    messages = [*_system_message(system), {"role": "user", "content": _PLACEHOLDERS[0]}]
    before, _, after = _render(tokenizer, messages).partition(_PLACEHOLDERS[0])
    return before, after


def split_turns(tokenizer: Any, system: str | None = None) -> Turns:
    """The text around the messages of a conversation in which user and model take turns."""
    first_prefix, _ = split_template(tokenizer, system)
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": text} for role, text in zip(roles, _PLACEHOLDERS, strict=True)]
    _, _, rest = _render(tokenizer, _system_message(system) + messages).partition(_PLACEHOLDERS[1])
    next_prefix, _, suffix = rest.partition(_PLACEHOLDERS[2])
    return Turns(first_prefix, next_prefix, suffix)


def _system_message(text: str | None) -> list[dict[str, str]]:
    return [] if text is None else [{"role": "system", "content": text}]


def _render(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    """The conversation as text, with each placeholder in it exactly once."""
    from jinja2 import TemplateError

    name = tokenizer.name_or_path
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(f"{name} has no chat template; use an instruct model, or `msrnn generate` without --chat")
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise ValueError(f"the chat template of {name} refuses this conversation: {error}") from error
    if any(text.count(message["content"]) != 1 for message in messages if message["role"] != "system"):
        raise ValueError(f"the chat template of {name} does not keep messages as they are; msrnn cannot use it")
    return text
