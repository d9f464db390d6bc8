"""RULER: needles of eight kinds, variable tracking, common and frequent words, questions, at given prompt lengths.

An example is as long as fits into `length` tokens: template, text, question and the new tokens, as RULER counts.
Scored as in RULER, without case: the share of the right answers that stand in the output (`qa`: any one of them), 0 to
100. The cell `kind = "all"` is the mean over all kinds. Intervals resample the samples' numbers: those of one number
share a book. `ruler_examples.py` has the examples.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import product

from .. import data, metrics
from ..prompts import Resources
from ..task import Output, Row, Sample, Task
from .ruler_examples import KINDS, SENTENCE_END, Example, Texts, builder, largest_size

NEW_TOKENS = {"vt": 30, "cwe": 120, "fwe": 50, "qa": 32}  # as RULER; needles take 128
NEEDLE_TOKENS = 128
PASSAGE_WORDS = 90  # of a paragraph around an answer
PAGES = 200_000  # characters of each book that texts and words are taken from
SHORTEST = 1024  # tokens: below, some kinds have no room for a text


@dataclass(frozen=True)
class Settings:
    """`samples` of each kind and length."""

    kinds: tuple[str, ...] = KINDS
    lengths: tuple[int, ...] = (1024, 2048, 4096)
    samples: int = 20

    def __post_init__(self) -> None:
        if any(kind not in KINDS for kind in self.kinds) or not self.kinds:
            raise ValueError(f"kinds is {list(self.kinds)}; allowed: {', '.join(KINDS)}")
        if any(length < SHORTEST for length in self.lengths) or not self.lengths:
            raise ValueError(f"lengths is {list(self.lengths)}; a prompt needs at least {SHORTEST} tokens")
        if self.samples < 1:
            raise ValueError(f"samples is {self.samples}; it must be at least 1")


@dataclass(frozen=True)
class Problem:
    kind: str
    length: int
    example: Example


def task(settings: Settings, resources: Resources) -> Task:
    return Task(
        "ruler",
        lambda: _samples(settings, resources),
        lambda sample, context: compose(resources, sample.content.example, context),
        partial(score, resources),
        (metrics.mean("match"),),
        new_tokens=max(new_tokens(kind) for kind in settings.kinds),
    )


def new_tokens(kind: str) -> int:
    return NEW_TOKENS.get(kind, NEEDLE_TOKENS)


def _samples(settings: Settings, resources: Resources) -> Iterator[Sample]:
    books = [book.text[:PAGES] for book in data.books(resources.data)]
    words = _words(books)
    passages = _passages(resources) if "qa" in settings.kinds else ()
    texts = cache(lambda book: Texts(tuple(SENTENCE_END.split(" ".join(books[book].split()))), words, passages))
    for number, length, kind in product(range(settings.samples), settings.lengths, settings.kinds):
        name = f"{kind}:{length}:{number}"
        book = texts(number % len(books))
        build = partial(_build, kind, length, book, f"{resources.seed}/{name}")
        example = largest(build, resources, length - new_tokens(kind), largest_size(kind, book))
        yield Sample(name, str(number), Problem(kind, length, example))


def _build(kind: str, length: int, texts: Texts, seed: str, size: int) -> Example:
    return builder(kind, length)(texts, size, random.Random(seed))


def _words(books: list[str]) -> tuple[str, ...]:
    """The lower-case words of 4 to 9 letters that come at least five times in the books."""
    counts = Counter(word for text in books for word in re.findall(r"\b[a-z]{4,9}\b", text))
    return tuple(sorted(word for word, count in counts.items() if count >= 5))


def _passages(resources: Resources) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
    """Questions, the words around the answer in its article, and the answers: those that stand there as they are."""
    passages = []
    for question in data.qasper(resources.data):
        document = " ".join(question.document.split())
        answers = tuple(answer.strip().rstrip(".") for answer in question.answers)
        answer = next((one for one in answers if _stands_in(one, document)), None)
        if answer:
            place = document.lower().index(answer.lower())
            before, after = document[:place].split()[-PASSAGE_WORDS // 2 :], document[place:].split()[:PASSAGE_WORDS]
            passages.append((question.question, " ".join(before + after), answers))
    return tuple(passages)


def _stands_in(answer: str, document: str) -> bool:
    short = 3 <= len(answer) <= 60 and answer.lower() not in ("yes", "no", "unanswerable")
    return short and answer.lower() in document.lower()


def largest(build: Callable[[int], Example], resources: Resources, length: int, most: int | None = None) -> Example:
    """The example of the largest size, to a few percent, whose prompt has at most `length` tokens.

    `most` is the largest size that can be built; what is larger than that is refused.
    """
    small = len(compose(resources, build(1), None))
    if small > length:
        raise ValueError(f"the shortest example has {small} tokens, more than {length}; give longer lengths")
    best, over, size = 1, min(length, (most or length) + 1), 3  # `best` fits, `over` does not
    for _ in range(8):
        tokens = len(compose(resources, build(size), None))
        best, over = (size, over) if tokens <= length else (best, size)
        estimate = 1 + int((length - small) * (size - 1) / max(1, tokens - small))
        size = min(max(estimate, best + 1), over - 1)
        if size <= best:
            break
    if best == most:
        raise ValueError(f"a book has {most} sentences, too few for a prompt of {length} tokens; give longer books")
    return build(best)


def compose(resources: Resources, example: Example, context: int | None) -> list[int]:
    """The whole prompt; for a shorter context the end of the text is cut."""
    prefix, suffix = resources.template()
    head = resources.encode_start(prefix + example.intro)
    tail = resources.encode(example.question + suffix + example.answer_start)
    text = resources.encode(example.context)
    return head + (text if context is None else text[: max(0, context - len(head) - len(tail))]) + tail


def score(resources: Resources, sample: Sample, output: Output) -> list[Row]:
    """The share of the answers in the output; one row for the kind, one for all kinds."""
    problem: Problem = sample.content
    text = resources.tokenizer.decode(output.ids[: new_tokens(problem.kind)], skip_special_tokens=True).lower()
    present = [answer.lower() in text for answer in problem.example.answers]
    match = 100 * (sum(present) / len(present) if problem.example.every else any(present))
    columns = {"match": float(match), "count": 1.0}
    return [Row(columns, {"kind": kind, "length": problem.length}) for kind in (problem.kind, "all")]
