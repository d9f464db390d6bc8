"""Needle and passkey: one sentence with a number somewhere in a long text, asked for at the end.

`passkey` hides it among four sentences repeated over and over, `needle` in the pages of a book. What an eviction policy
has dropped before the question comes cannot be recalled, so this is where a bounded state fails first; recall is shown
by length and depth (0: the text's beginning, 1: its end). Intervals resample the hidden numbers.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

from .. import data, metrics
from ..prompts import Tools
from ..task import Output, Row, Sample, Task

KINDS = ("passkey", "needle")
INTRO = "Somewhere in the text below a number is hidden. Find it and remember it; you will be asked for it.\n\n"
FILLER = "The grass is green. The sky is blue. The sun is yellow. We walk there and back again. "
HIDDEN = {
    "passkey": "The pass key is {}. Remember it: {} is the pass key.",
    "needle": "The magic number of Zurich is {}.",
}
ASKED = {
    "passkey": "What is the pass key? Answer with the number only.",
    "needle": "What is the magic number of Zurich? Answer with the number only.",
}


@dataclass(frozen=True)
class Settings:
    kinds: tuple[str, ...] = KINDS
    lengths: tuple[int, ...] = (1024, 2048, 4096)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    repeats: int = 5
    digits: int = 5
    new_tokens: int = 16

    def __post_init__(self) -> None:
        strange = [kind for kind in self.kinds if kind not in KINDS]
        if strange or not self.kinds:
            raise ValueError(f"kinds is {list(self.kinds)}; allowed: {', '.join(KINDS)}")
        if any(not 0 <= depth <= 1 for depth in self.depths):
            raise ValueError(f"depths is {list(self.depths)}; each must lie from 0 (the beginning) to 1 (the end)")
        for name in ("repeats", "digits", "new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if any(length < 128 for length in self.lengths):
            raise ValueError(f"lengths is {list(self.lengths)}; a prompt needs at least 128 tokens")


@dataclass(frozen=True)
class Hidden:
    kind: str
    length: int
    depth: float
    number: str
    book: int


def task(settings: Settings, tools: Tools) -> Task:
    hay = cache(lambda kind, book: _hay(tools, kind, book, max(settings.lengths)))

    def prompt(sample: Sample, context: int | None) -> list[int]:
        return compose(tools, sample.content, hay(sample.content.kind, sample.content.book), context)

    return Task(
        "needle",
        lambda: _samples(settings, tools.seed),
        prompt,
        score,
        (metrics.mean("recall"),),
        writes=settings.new_tokens,
    )


def _samples(settings: Settings, seed: int) -> Iterator[Sample]:
    for repeat in range(settings.repeats):
        source = random.Random(f"{seed}/{repeat}")
        number = "".join(source.choice("123456789") for _ in range(settings.digits))
        for kind, length, depth in product(settings.kinds, settings.lengths, settings.depths):
            content = Hidden(kind, length, depth, number, repeat)
            yield Sample(f"{kind}:{length}:{depth:g}:{repeat}", str(repeat), content)


def _hay(tools: Tools, kind: str, book: int, length: int) -> list[int]:
    if kind == "passkey":
        return tools.encode(FILLER * (length // 8))[:length]
    texts = _texts(tools)
    text = texts[book % len(texts)]
    return tools.encode(text[: 16 * length])[:length]


def _texts(tools: Any) -> list[str]:
    if not hasattr(tools, "_books"):
        tools._books = [book.text for book in data.books(tools.data)]
    found: list[str] = tools._books
    return found


def compose(tools: Tools, hidden: Hidden, hay: list[int], context: int | None) -> list[int]:
    """Exactly `length` tokens; for a shorter context the text, needle and all, is cut at its end."""
    opening, closing = tools.frame()
    head = tools.begin(opening + INTRO)
    tail = tools.encode(f"\n\n{ASKED[hidden.kind]}\n{closing}")
    said = HIDDEN[hidden.kind]
    needle = tools.encode(f" {said.format(*[hidden.number] * said.count('{}'))}")
    room = hidden.length - len(head) - len(tail) - len(needle)
    if room < 1:
        raise ValueError(f"a prompt of {hidden.length} tokens has no room for a text; give longer lengths")
    if len(hay) < room:
        raise ValueError(f"the text has {len(hay)} tokens, {room} are needed; give longer books")
    place = _boundary(tools, hay, round(hidden.depth * room))
    text = hay[:place] + needle + hay[place:room]
    shorter = min(context or hidden.length, hidden.length) - len(head) - len(tail)
    return head + text[: max(shorter, 0)] + tail


def _boundary(tools: Tools, hay: list[int], place: int) -> int:
    """After the last sentence that ends at most 100 tokens before the place; the place itself where none does."""
    for end in range(place, max(0, place - 100), -1):
        if "." in tools.tokenizer.decode(hay[end - 1 : end]):
            return end
    return place


def score(sample: Sample, output: Output) -> list[Row]:
    """Recalled if the number stands in the answer, however it is spaced."""
    hidden: Hidden = sample.content
    found = hidden.number in re.sub(r"[\s,.]", "", output.text)
    cell: dict[str, float | int | str] = {"kind": hidden.kind, "length": hidden.length, "depth": hidden.depth}
    return [Row({"recall": float(found), "count": 1.0}, cell)]
