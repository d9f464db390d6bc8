"""A chat template taken apart, so that a conversation can be fed to a state turn by turn and never twice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_MARKS = ("msrnn-first", "msrnn-answer", "msrnn-second")  # stand for what is said; no template holds or changes them


@dataclass(frozen=True)
class Turns:
    """What stands before the first message, between an answer and the next message, and after a message."""

    opening: str
    between: str
    closing: str


def split_template(tokenizer: Any, system: str | None = None) -> tuple[str, str]:
    """What the template puts before and after one message to which the model then answers."""
    messages = [*_system(system), {"role": "user", "content": _MARKS[0]}]
    before, _, after = _render(tokenizer, messages).partition(_MARKS[0])
    return before, after


def turns(tokenizer: Any, system: str | None = None) -> Turns:
    opening, _ = split_template(tokenizer, system)
    roles = ("user", "assistant", "user")
    said = [{"role": role, "content": mark} for role, mark in zip(roles, _MARKS, strict=True)]
    _, _, rest = _render(tokenizer, _system(system) + said).partition(_MARKS[1])
    between, _, closing = rest.partition(_MARKS[2])
    return Turns(opening, between, closing)


def _system(text: str | None) -> list[dict[str, str]]:
    return [] if text is None else [{"role": "system", "content": text}]


def _render(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    from jinja2 import TemplateError

    name = tokenizer.name_or_path
    if not tokenizer.chat_template:
        raise ValueError(f"{name} has no chat template; use an instruct model, or `msrnn generate` without --chat")
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise ValueError(f"the chat template of {name} refuses this conversation: {error}") from error
    lost = [m["content"] for m in messages if m["role"] != "system" and text.count(m["content"]) != 1]
    if lost:
        raise ValueError(f"the chat template of {name} does not keep messages as they are; msrnn cannot use it")
    return text
