"""BABILong (arXiv 2406.10149): facts about people, places and things, scattered in order through the pages of a book.

`qa1`: where a person is; `qa2`: where a thing is, which a person carried there; `qa3`: where a thing was before that.
The facts follow bAbI's first three tasks, by a generator of our own. Right is an answer whose first line names the
right place and no other, besides those of the question; a worked example of the same kind comes first, without a book.
Intervals resample the numbers of the samples: those of one number share a book.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product

from .. import data, metrics
from ..prompts import Resources
from ..task import Output, Row, Sample, Task

KINDS = ("qa1", "qa2", "qa3")
PEOPLE = ("Mary", "John", "Daniel", "Sandra")
PLACES = ("kitchen", "garden", "office", "bathroom", "hallway", "bedroom")
THINGS = ("apple", "football", "milk")
MOVES = ("went to", "moved to", "travelled to", "went back to")
SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
PAGES = 200_000  # characters of each book that texts are taken from
INTRO = "Facts about people are hidden in the text below. Remember where everyone and everything is.\n\n"
INSTRUCTION = "Answer the question by the facts in the text above. Answer with the name of the place only."


@dataclass(frozen=True)
class Settings:
    """`samples` of each kind and length; `moves` of people before the question."""

    kinds: tuple[str, ...] = KINDS
    lengths: tuple[int, ...] = (1024, 2048, 4096)
    samples: int = 20
    moves: int = 6
    new_tokens: int = 12

    def __post_init__(self) -> None:
        if any(kind not in KINDS for kind in self.kinds) or not self.kinds:
            raise ValueError(f"kinds is {list(self.kinds)}; allowed: {', '.join(KINDS)}")
        if any(length < 512 for length in self.lengths) or not self.lengths:
            raise ValueError(f"lengths is {list(self.lengths)}; a prompt needs at least 512 tokens")
        for name, least in (("samples", 1), ("moves", 3), ("new_tokens", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")


@dataclass(frozen=True)
class Story:
    facts: tuple[str, ...]
    question: str
    answer: str


@dataclass(frozen=True)
class Problem:
    kind: str
    length: int
    story: Story
    demonstration: Story
    shares: tuple[float, ...]
    book: int
    start: float


def task(settings: Settings, resources: Resources) -> Task:
    books = cache(lambda: [" ".join(book.text[:PAGES].split()) for book in data.books(resources.data)])
    sentences = cache(lambda book: SENTENCE_END.split(books()[book % len(books())]))

    def prompt(sample: Sample, context: int | None) -> list[int]:
        return compose(resources, sample.content, sentences(sample.content.book), context)

    return Task(
        "babilong",
        lambda: _samples(settings, resources.seed),
        prompt,
        score,
        (metrics.mean("accuracy"),),
        new_tokens=settings.new_tokens,
    )


def _samples(settings: Settings, seed: int) -> Iterator[Sample]:
    for number, length, kind in product(range(settings.samples), settings.lengths, settings.kinds):
        rng = random.Random(f"{seed}/{kind}/{number}")
        story, demonstration = tell(kind, settings.moves, rng), tell(kind, settings.moves, rng)
        shares = tuple(sorted(rng.random() for _ in story.facts))
        problem = Problem(kind, length, story, demonstration, shares, number, rng.random())
        yield Sample(f"{kind}:{length}:{number}", str(number), problem)


def tell(kind: str, moves: int, rng: random.Random) -> Story:
    """Facts in the order of time, and a question that they answer."""
    if kind == "qa1":
        return _whereabouts(moves, rng)
    carrier, thing = rng.choice(PEOPLE), rng.choice(THINGS)
    route = _route(moves, rng)
    facts = [f"{carrier} {rng.choice(MOVES)} the {route[0]}.", f"{carrier} took the {thing} there."]
    for place in route[1:]:
        facts.append(f"{carrier} {rng.choice(MOVES)} the {place}.")
        other = rng.choice([person for person in PEOPLE if person != carrier])
        facts.append(f"{other} {rng.choice(MOVES)} the {rng.choice(PLACES)}.")
    if kind == "qa2":
        return Story(tuple(facts), f"Where is the {thing}?", route[-1])
    before, place = route[-2:]
    return Story(tuple(facts), f"Where was the {thing} before the {place}?", before)


def _whereabouts(moves: int, rng: random.Random) -> Story:
    where, facts = dict[str, str](), list[str]()
    for _ in range(moves):
        person, place = rng.choice(PEOPLE), rng.choice(PLACES)
        where[person] = place
        facts.append(f"{person} {rng.choice(MOVES)} the {place}.")
    person = rng.choice(sorted(where))
    return Story(tuple(facts), f"Where is {person}?", where[person])


def _route(moves: int, rng: random.Random) -> list[str]:
    """Places, each another than the one before; half of the moves, the others are those of other people."""
    route = [rng.choice(PLACES)]
    while len(route) < max(2, moves // 2):
        route.append(rng.choice([place for place in PLACES if place != route[-1]]))
    return route


def compose(resources: Resources, problem: Problem, sentences: list[str], context: int | None) -> list[int]:
    """At most `length` tokens, filled with the book; for a shorter context the end of the text is cut."""
    prefix, suffix = resources.template()
    shown = problem.demonstration
    example = f"{' '.join(shown.facts)}\nQuestion: {shown.question}\nAnswer: {shown.answer}\n\n"
    head = resources.encode_start(f"{prefix}{INTRO}For example:\n{example}Now the text:\n")
    tail = resources.encode(f"\n\n{INSTRUCTION}\nQuestion: {problem.story.question}\n{suffix}Answer:")
    text = _text(resources, problem, sentences, problem.length - len(head) - len(tail))
    return head + (text if context is None else text[: max(0, context - len(head) - len(tail))]) + tail


def _text(resources: Resources, problem: Problem, sentences: list[str], room: int) -> list[int]:
    """Facts at their shares of the book's pages, each between two sentences."""
    facts = [resources.encode(f"{fact} ") for fact in problem.story.facts]
    pages = _pages(resources, sentences, problem.start, room - sum(map(len, facts)))
    size = len(pages)
    for share, fact in zip(reversed(problem.shares), reversed(facts), strict=True):  # so that places stay valid
        pages.insert(round(share * size), fact)
    return [token for page in pages for token in page]


def _pages(resources: Resources, sentences: list[str], start: float, room: int) -> list[list[int]]:
    """Sentences of the book from `start`, a share of it, as many as have room; from its beginning after its end."""
    if room < 0:
        raise ValueError("the facts and the question do not fit into a prompt; give longer lengths or fewer moves")
    first = int(start * len(sentences))
    pages = list[list[int]]()
    for offset in range(len(sentences)):
        ids = resources.encode(f"{sentences[(first + offset) % len(sentences)]} ")
        if len(ids) > room:
            return pages
        pages.append(ids)
        room -= len(ids)
    raise ValueError(f"a book of {len(sentences)} sentences is too short for these lengths; give longer books")


def score(sample: Sample, output: Output) -> list[Row]:
    problem: Problem = sample.content
    line = (output.text.strip().splitlines() or [""])[0].lower()
    named = {place for place in PLACES if place in line and place not in problem.story.question}
    columns = {"accuracy": 100.0 * (named == {problem.story.answer}), "count": 1.0}
    return [Row(columns, {"kind": problem.kind, "length": problem.length})]
