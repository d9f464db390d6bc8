"""Several turns: facts told in the first message, then talk about other things, then one of the facts is asked for.

The talk is made of pages of books, so that only the state, not the model's own answers, decides what is still known.
The answer is begun for the model in the words of the telling, so that only the fact is left to say. Recall by the
number of turns between telling and asking; intervals resample conversations.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .. import data, metrics
from ..prompts import Tools
from ..task import Output, Row, Sample, Task


@dataclass(frozen=True)
class Fact:
    told: str
    question: str
    begun: str
    values: tuple[str, ...]


FACTS = (
    Fact("my dog is called {}", "What is my dog called?", "My dog is called", ("Rex", "Bella", "Pongo", "Felix")),
    Fact("my sister lives in {}", "Where does my sister live?", "My sister lives in", ("Lisbon", "Oslo", "Cairo")),
    Fact("my car is painted {}", "Which colour has my car?", "My car is painted", ("green", "purple", "silver")),
    Fact("my brother works as a {}", "What is my brother's job?", "My brother works as a", ("baker", "pilot", "nurse")),
    Fact("my birthday is in {}", "When is my birthday?", "My birthday is in", ("March", "June", "August", "October")),
)
WORDS = "Answer in the words I used."  # a small model copies where it could not answer
HEARD, TALK = "Thank you, I will remember that.", "Thank you for sharing this passage with me."


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
class Talk:
    told: str
    question: str
    begun: str
    answer: str
    pages: tuple[str, ...]


def task(settings: Settings, tools: Tools) -> Task:
    return Task(
        "turns",
        lambda: _samples(settings, tools),
        lambda sample, context: compose(tools, sample.content, context),
        score,
        (metrics.mean("recall"),),
        writes=settings.new_tokens,
    )


def _samples(settings: Settings, tools: Tools) -> Iterator[Sample]:
    books = [book.text for book in data.books(tools.data)] if max(settings.turns) else [""]
    for number in range(settings.conversations):
        source = random.Random(f"{tools.seed}/{number}")
        chosen = [source.choice(fact.values) for fact in FACTS]
        facts = [fact.told.format(value) for fact, value in zip(FACTS, chosen, strict=True)]
        told = f"Remember this about me: {'; '.join(facts)}."
        asked, answer = source.choice(list(zip(FACTS, chosen, strict=True)))
        pages = _pages(tools, books[number % len(books)], max(settings.turns), settings.tokens_per_turn)
        for count in settings.turns:
            talk = Talk(told, asked.question, asked.begun, answer, tuple(pages[:count]))
            yield Sample(f"{count}:{number}", str(number), talk)


def _pages(tools: Tools, text: str, count: int, size: int) -> list[str]:
    ids = tools.encode(text[: 16 * size * (count + 1)])
    if len(ids) < size * count:
        raise ValueError(f"a book of {len(ids)} tokens was given, {size * count} are needed; use longer ones")
    return [tools.tokenizer.decode(ids[i * size : (i + 1) * size]).strip() for i in range(count)]


def compose(tools: Tools, talk: Talk, context: int | None) -> list[int]:
    """The conversation up to the answer; for a shorter context its newest part."""
    said = [("user", talk.told), ("assistant", HEARD)]
    for page in talk.pages:
        said += [("user", f"Here is something I read:\n{page}"), ("assistant", TALK)]
    ids = render(tools, [*said, ("user", f"{talk.question} {WORDS}")], talk.begun)
    return ids[-context:] if context else ids


def render(tools: Tools, said: list[tuple[str, str]], begun: str) -> list[int]:
    """In the model's chat template, or as a plain dialogue where it has none; `begun` begins the answer."""
    messages: list[dict[str, Any]] = [{"role": role, "content": text} for role, text in said]
    if getattr(tools.tokenizer, "chat_template", None):
        text: str = tools.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return tools.encode(text + begun)
    lines = [f"{role.capitalize()}: {text}" for role, text in said]
    return tools.begin("\n\n".join([*lines, f"Assistant: {begun}"]))


def score(sample: Sample, output: Output) -> list[Row]:
    talk: Talk = sample.content
    found = re.search(rf"\b{re.escape(talk.answer)}\b", output.text, re.IGNORECASE) is not None
    return [Row({"recall": float(found), "count": 1.0}, {"turns": len(talk.pages)})]
