"""Several turns: facts told in the first message, then talk about other things, then one of the facts is asked for.

The talk is made of pages of books, so that only the state, not the model's own answers, decides what is still known.
Recall by the number of turns between telling and asking; intervals resample conversations.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .. import data, metrics
from ..task import Output, Row, Sample, Task
from ..tools import Tools

FACTS = {
    "my dog is called {}": ("What is my dog called?", ("Rex", "Bella", "Pongo", "Luna", "Felix")),
    "my sister lives in {}": ("Where does my sister live?", ("Lisbon", "Oslo", "Cairo", "Lima", "Dublin")),
    "my favourite colour is {}": ("What is my favourite colour?", ("green", "purple", "orange", "silver", "brown")),
    "I work as a {}": ("What is my job?", ("baker", "pilot", "nurse", "farmer", "lawyer")),
    "my birthday is in {}": ("In which month is my birthday?", ("March", "June", "August", "October", "December")),
}
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
        chosen = {fact: source.choice(values) for fact, (_, values) in FACTS.items()}
        told = "Remember this about me: " + "; ".join(fact.format(chosen[fact]) for fact in FACTS) + "."
        asked = source.choice(list(FACTS))
        pages = _pages(tools, books[number % len(books)], max(settings.turns), settings.tokens_per_turn)
        for count in settings.turns:
            talk = Talk(told, FACTS[asked][0], chosen[asked], tuple(pages[:count]))
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
    ids = render(tools, [*said, ("user", talk.question)])
    return ids[-context:] if context else ids


def render(tools: Tools, said: list[tuple[str, str]]) -> list[int]:
    """In the model's chat template, or as a plain dialogue where it has none."""
    messages: list[dict[str, Any]] = [{"role": role, "content": text} for role, text in said]
    if getattr(tools.tokenizer, "chat_template", None):
        text: str = tools.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return tools.encode(text)
    lines = [f"{role.capitalize()}: {text}" for role, text in said]
    return tools.begin("\n\n".join([*lines, "Assistant:"]))


def score(sample: Sample, output: Output) -> list[Row]:
    talk: Talk = sample.content
    found = re.search(rf"\b{re.escape(talk.answer)}\b", output.text, re.IGNORECASE) is not None
    return [Row({"recall": float(found), "count": 1.0}, {"turns": len(talk.pages)})]
