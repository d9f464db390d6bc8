"""Conversations: facts in the first message, then turns about other things, then a question about one of the facts.

The turns between are pages of books, so that only the state, not the model's own answers, decides what is recalled. The
first words of the answer are given, so that only the fact is left to generate. Recall by the number of turns between
statement and question; intervals resample conversations.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .. import data, metrics
from ..prompts import Resources
from ..task import Output, Row, Sample, Task


@dataclass(frozen=True)
class Fact:
    statement: str
    question: str
    answer_start: str
    values: tuple[str, ...]


FACTS = (
    Fact("my dog is called {}", "What is my dog called?", "My dog is called", ("Rex", "Bella", "Pongo", "Felix")),
    Fact("my sister lives in {}", "Where does my sister live?", "My sister lives in", ("Lisbon", "Oslo", "Cairo")),
    Fact("my car is painted {}", "Which colour has my car?", "My car is painted", ("green", "purple", "silver")),
    Fact("my brother works as a {}", "What is my brother's job?", "My brother works as a", ("baker", "pilot", "nurse")),
    Fact("my birthday is in {}", "When is my birthday?", "My birthday is in", ("March", "June", "August", "October")),
)
HINT = "Answer in the words I used."  # a small model copies where it could not answer
FACTS_REPLY, PAGE_REPLY = "Thank you, I will remember that.", "Thank you for sharing this passage with me."


@dataclass(frozen=True)
class Settings:
    turns: tuple[int, ...] = (0, 2, 4, 8, 16)
    tokens_per_turn: int = 200
    conversations: int = 10
    new_tokens: int = 24

    def __post_init__(self) -> None:
        if any(count < 0 for count in self.turns) or not self.turns:
            raise ValueError(f"turns is {list(self.turns)}; each must be 0 or more")
        for name in ("tokens_per_turn", "conversations", "new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")


@dataclass(frozen=True)
class Conversation:
    statement: str
    question: str
    answer_start: str
    answer: str
    pages: tuple[str, ...]


def task(settings: Settings, resources: Resources) -> Task:
    return Task(
        "turns",
        lambda: _samples(settings, resources),
        lambda sample, context: compose(resources, sample.content, context),
        score,
        (metrics.mean("recall"),),
        new_tokens=settings.new_tokens,
    )


def _samples(settings: Settings, resources: Resources) -> Iterator[Sample]:
    books = [book.text for book in data.books(resources.data)] if max(settings.turns) else [""]
    for number in range(settings.conversations):
        rng = random.Random(f"{resources.seed}/{number}")
        values = [rng.choice(fact.values) for fact in FACTS]
        facts = [fact.statement.format(value) for fact, value in zip(FACTS, values, strict=True)]
        statement = f"Remember this about me: {'; '.join(facts)}."
        fact, answer = rng.choice(list(zip(FACTS, values, strict=True)))
        pages = _pages(resources, books[number % len(books)], max(settings.turns), settings.tokens_per_turn)
        for count in settings.turns:
            between = tuple(pages[:count])
            conversation = Conversation(statement, fact.question, fact.answer_start, answer, between)
            yield Sample(f"{count}:{number}", str(number), conversation)


def _pages(resources: Resources, text: str, count: int, size: int) -> list[str]:
    ids = resources.encode(text[: 16 * size * (count + 1)])
    if len(ids) < size * count:
        raise ValueError(f"a book has {len(ids)} tokens, {size * count} are needed; use longer ones")
    return [resources.tokenizer.decode(ids[i * size : (i + 1) * size]).strip() for i in range(count)]


def compose(resources: Resources, conversation: Conversation, context: int | None) -> list[int]:
    """The conversation up to the answer; for a shorter context its newest part."""
    messages = [("user", conversation.statement), ("assistant", FACTS_REPLY)]
    for page in conversation.pages:
        messages += [("user", f"Here is something I read:\n{page}"), ("assistant", PAGE_REPLY)]
    messages.append(("user", f"{conversation.question} {HINT}"))
    ids = render(resources, messages, conversation.answer_start)
    return ids[-context:] if context else ids


def render(resources: Resources, messages: list[tuple[str, str]], answer_start: str) -> list[int]:
    """Messages (role, text) in the model's chat template, or as a plain dialogue where it has none."""
    if getattr(resources.tokenizer, "chat_template", None):
        turns: list[dict[str, Any]] = [{"role": role, "content": text} for role, text in messages]
        text: str = resources.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return resources.encode(text + answer_start)
    lines = [f"{role.capitalize()}: {text}" for role, text in messages]
    return resources.encode_start("\n\n".join([*lines, f"Assistant: {answer_start}"]))


def score(sample: Sample, output: Output) -> list[Row]:
    conversation: Conversation = sample.content
    recalled = re.search(rf"\b{re.escape(conversation.answer)}\b", output.text, re.IGNORECASE) is not None
    return [Row({"recall": float(recalled), "count": 1.0}, {"turns": len(conversation.pages)})]
