"""Chat templates split into the text around messages: joined again, they are the whole template."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from msrnn.hf import load
from msrnn.hf.chat_template import split_template, split_turns

CONVERSATION = [
    ("user", "Hello there"),
    ("assistant", "Hi!"),
    ("user", "And you?"),
    ("assistant", "Fine."),
    ("user", "Bye"),
]


@pytest.fixture
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(load.bundled())


def render(tokenizer: Any, messages: list[tuple[str, str]], system: str | None) -> str:
    roles = [("system", system)] if system else []
    conversation = [{"role": role, "content": content} for role, content in [*roles, *messages]]
    text: str = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    return text


@pytest.mark.parametrize("system", [None, "You are a pirate."])
def test_turns_join_to_the_whole_template(tokenizer: Any, system: str | None) -> None:
    turns = split_turns(tokenizer, system)
    first, *later = (content for role, content in CONVERSATION if role == "user")
    answers = [content for role, content in CONVERSATION if role == "assistant"]
    joined = turns.first_prefix + first + turns.suffix
    for answer, message in zip(answers, later, strict=True):
        joined += answer + turns.next_prefix + message + turns.suffix
    assert joined == render(tokenizer, CONVERSATION, system)


@pytest.mark.parametrize("system", [None, "You are a pirate."])
def test_one_message_joins_to_the_whole_template(tokenizer: Any, system: str | None) -> None:
    before, after = split_template(tokenizer, system)
    assert f"{before}Hello{after}" == render(tokenizer, [("user", "Hello")], system)


def test_a_tokenizer_without_a_template_gets_the_default_or_is_refused(tokenizer: Any) -> None:
    assert split_template(tokenizer, default=("", "\nAnswer:")) == split_template(tokenizer)
    tokenizer.chat_template = None
    assert split_template(tokenizer, default=("", "\nAnswer:")) == ("", "\nAnswer:")
    with pytest.raises(ValueError, match="has no chat template"):
        split_template(tokenizer)


@pytest.mark.parametrize(
    "template, reason",
    [
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "does not keep messages as they are"),
        ("{{ messages[0].content }}{{ messages[0].content }}", "does not keep messages as they are"),
        ("{{ raise_exception('no users here') }}", "refuses this conversation: no users here"),
    ],
)
def test_templates_that_cannot_be_split_are_refused(tokenizer: Any, template: str, reason: str) -> None:
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=reason):
        split_template(tokenizer)
