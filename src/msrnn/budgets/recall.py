"""Facts hidden in a text and asked for at its end: what `msrnn calibrate --for recall` counts the loss of.

Facts stand anywhere in a chunk but at its end, so that every size loses some of them: if all were farther back than any
size reaches, the largest would be worth no more than the smallest. The questions and answers are the chunk's last
tokens, and only the tokens of the answers count.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

Goal = Literal["perplexity", "recall", "both"]
GOALS: tuple[Goal, ...] = get_args(Goal)
_PER_CHUNK = 4


@dataclass(frozen=True)
class Fact:
    """`statement` has a place for the value, `question` ends where the answer begins."""

    statement: str
    question: str
    values: tuple[str, ...] = ()  # none: a number of 5 digits

    def value(self, rng: random.Random) -> str:
        return rng.choice(self.values) if self.values else "".join(rng.choice("123456789") for _ in range(5))


FACTS = (
    Fact("The code of the vault is {}.", "What is the code of the vault? The code of the vault is"),
    Fact("The ticket of the traveller has the number {}.", "Which number has the ticket? The ticket has the number"),
    Fact("The telephone of the hotel is {}.", "What is the telephone of the hotel? The telephone of the hotel is"),
    Fact("The harvest came to {} sacks.", "What did the harvest come to? The harvest came to"),
    Fact(
        "The captain was born in {}.",
        "Where was the captain born? The captain was born in",
        ("Bremen", "Dublin", "Genoa", "Madrid", "Prague", "Riga", "Tunis", "Vienna"),
    ),
    Fact(
        "The teacher keeps a {} in the garden.",
        "What does the teacher keep in the garden? The teacher keeps a",
        ("donkey", "falcon", "goat", "peacock", "pony", "rabbit", "turtle"),
    ),
    Fact(
        "The letter was sealed with {} wax.",
        "Which wax was the letter sealed with? The letter was sealed with",
        ("black", "blue", "golden", "green", "purple", "white", "yellow"),
    ),
    Fact(
        "The fair is held in {}.",
        "When is the fair held? The fair is held in",
        ("April", "August", "February", "January", "November", "September"),
    ),
)


def goal_chunks(goal: Goal, tokenizer: Any, chunks: Tensor) -> tuple[Tensor, Tensor]:
    """chunks [N, T] of a text -> the chunks to measure and which of their tokens count, [M, T] and [M, T - 1].

    `both` has the chunks of both goals, each chunk with the same weight.
    """
    if goal not in GOALS:
        raise ValueError(f"unknown goal {goal!r}; allowed: {', '.join(GOALS)}")
    plain = (chunks, second_half(chunks))
    if goal == "perplexity":
        return plain
    hidden = hide_facts(tokenizer, chunks)
    return hidden if goal == "recall" else (torch.cat([plain[0], hidden[0]]), torch.cat([plain[1], hidden[1]]))


def second_half(chunks: Tensor) -> Tensor:
    """[N, T - 1], true for the losses of a chunk's second half; column i predicts token i + 1."""
    count, length = chunks.shape
    return (torch.arange(1, length) >= length // 2).expand(count, -1)


def hide_facts(tokenizer: Any, chunks: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    """chunks [N, T] with facts hidden in them -> ids [N, T] and the places of the answers [N, T - 1]."""
    rows = [_hide(tokenizer, row, random.Random(f"{seed}/{number}")) for number, row in enumerate(chunks.tolist())]
    ids, counted = (torch.tensor(part) for part in zip(*rows, strict=True))
    return ids, counted[:, 1:].bool()


def _hide(tokenizer: Any, row: Sequence[int], rng: random.Random) -> tuple[list[int], list[int]]:
    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    facts = [(fact, fact.value(rng)) for fact in rng.sample(FACTS, _PER_CHUNK)]
    statements = [encode(f" {fact.statement.format(value)}") for fact, value in facts]
    tail, counted = list[int](), list[int]()
    for fact, value in rng.sample(facts, len(facts)):
        question, answer = encode(f"\n\n{fact.question}"), encode(f" {value}")
        tail += [*question, *answer]
        counted += [0] * len(question) + [1] * len(answer)
    room = len(row) - len(tail) - sum(map(len, statements))
    if room < len(tail):
        raise ValueError(f"chunks of {len(row)} tokens have no room for facts; use --length {8 * len(tail)} or more")
    text, places = list(row[:room]), sorted(rng.sample(range(room // 16, room - room // 8), _PER_CHUNK), reverse=True)
    for place, statement in zip(places, statements, strict=True):
        text[place:place] = statement
    return text + tail, [0] * len(text) + counted
