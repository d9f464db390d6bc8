"""Needle and passkey: one sentence with a number somewhere in a long text, asked for at the end.

`passkey` hides it among four sentences repeated over and over, `needle` in the pages of a book. A number evicted before
the question comes cannot be recalled, so this is where a bounded state fails first; recall is shown by length and depth
(0: the text's beginning, 1: its end). Intervals resample the hidden numbers.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product

from .. import data, metrics
from ..prompts import Resources
from ..task import Output, Row, Sample, Task

KINDS = ("passkey", "needle")
INTRO = "Somewhere in the text below a number is hidden. Find it and remember it; you will be asked for it.\n\n"
FILLER = "The grass is green. The sky is blue. The sun is yellow. We walk there and back again. "
HIDDEN = {
    "passkey": "The pass key is {}. Remember it: {} is the pass key.",
    "needle": "The magic number of Zurich is {}.",
}
QUESTION = {
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
        if any(kind not in KINDS for kind in self.kinds) or not self.kinds:
            raise ValueError(f"kinds is {list(self.kinds)}; allowed: {', '.join(KINDS)}")
        if any(not 0 <= depth <= 1 for depth in self.depths):
            raise ValueError(f"depths is {list(self.depths)}; each must lie from 0 (the beginning) to 1 (the end)")
        for name in ("repeats", "digits", "new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if any(length < 128 for length in self.lengths):
            raise ValueError(f"lengths is {list(self.lengths)}; a prompt needs at least 128 tokens")


@dataclass(frozen=True)
class Needle:
    """A number hidden at a depth of a text of `length` tokens, template and question included."""

    kind: str
    length: int
    depth: float
    number: str
    book: int


def task(settings: Settings, resources: Resources) -> Task:
    books = cache(lambda: [book.text for book in data.books(resources.data)])
    haystack = cache(lambda kind, book: _haystack(resources, kind, book, books, max(settings.lengths)))

    def prompt(sample: Sample, context: int | None) -> list[int]:
        needle: Needle = sample.content
        return compose(resources, needle, haystack(needle.kind, needle.book), context)

    return Task(
        "needle",
        lambda: _samples(settings, resources.seed),
        prompt,
        score,
        (metrics.mean("recall"),),
        new_tokens=settings.new_tokens,
    )


def _samples(settings: Settings, seed: int) -> Iterator[Sample]:
    for repeat in range(settings.repeats):
        rng = random.Random(f"{seed}/{repeat}")
        number = "".join(rng.choice("123456789") for _ in range(settings.digits))
        for kind, length, depth in product(settings.kinds, settings.lengths, settings.depths):
            content = Needle(kind, length, depth, number, repeat)
            yield Sample(f"{kind}:{length}:{depth:g}:{repeat}", str(repeat), content)


def _haystack(resources: Resources, kind: str, book: int, books: Callable[[], list[str]], length: int) -> list[int]:
    """`length` tokens to hide a needle in: repeated sentences, or a book's pages."""
    if kind == "passkey":
        return resources.encode(FILLER * (length // 8))[:length]
    text = books()[book % len(books())]
    return resources.encode(text[: 16 * length])[:length]


def compose(resources: Resources, needle: Needle, haystack: list[int], context: int | None) -> list[int]:
    """Exactly `length` tokens; for a shorter context the text, needle and all, is cut at its end."""
    prefix, suffix = resources.template()
    head = resources.encode_start(prefix + INTRO)
    tail = resources.encode(f"\n\n{QUESTION[needle.kind]}\n{suffix}")
    sentence = HIDDEN[needle.kind]
    hidden = resources.encode(f" {sentence.format(*[needle.number] * sentence.count('{}'))}")
    room = needle.length - len(head) - len(tail) - len(hidden)
    if room < 1:
        raise ValueError(f"a prompt of {needle.length} tokens has no room for a text; give longer lengths")
    if len(haystack) < room:
        raise ValueError(f"the text has {len(haystack)} tokens, {room} are needed; give longer books")
    place = _sentence_end(resources, haystack, round(needle.depth * room))
    text = haystack[:place] + hidden + haystack[place:room]
    shorter = min(context or needle.length, needle.length) - len(head) - len(tail)
    return head + text[: max(shorter, 0)] + tail


def _sentence_end(resources: Resources, ids: list[int], place: int) -> int:
    """The last end of a sentence at most 100 tokens before the place; the place itself where there is none."""
    for end in range(place, max(0, place - 100), -1):
        if "." in resources.tokenizer.decode(ids[end - 1 : end]):
            return end
    return place


def score(sample: Sample, output: Output) -> list[Row]:
    """Recalled if the number stands in the answer, however it is spaced."""
    needle: Needle = sample.content
    recalled = needle.number in re.sub(r"[\s,.]", "", output.text)
    cell: dict[str, float | int | str] = {"kind": needle.kind, "length": needle.length, "depth": needle.depth}
    return [Row({"recall": float(recalled), "count": 1.0}, cell)]
