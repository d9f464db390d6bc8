"""The examples of RULER (arXiv 2404.06654): what is hidden in a text of a given size, the question, the right answers.

Needles: one or several keys with one or several values, 7 digits or a UUID, among repeated sentences (`filler`), in the
pages of a book, or among other needles. Variable tracking: a chain of five variables with one value. Common words: ten
words of a list come ten times as often as the others (six times below 2,048 tokens, where the list would be too long).
Frequent words: random words with Zipf frequencies. Questions: the paragraph with the answer among other paragraphs.
RULER takes its texts from essays and its words from a word list; here both come from the books of the data folder, and
the paragraphs from QASPER.
"""

from __future__ import annotations

import itertools
import random
import re
import string
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from .needle import FILLER

SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
CHAIN = 5  # variables that share a value
COMMON = 10  # common words
REPEATS = {4096: (30, 3), 2048: (10, 1), 0: (6, 1)}  # from a length on: how often each comes, and every other word
FREQUENT, ZIPF, CODED = 3, 2.0, 50  # words asked for, exponent, different words


@dataclass(frozen=True)
class Texts:
    """What examples are made of: a book by its sentences, words, and questions with a paragraph that answers them."""

    sentences: tuple[str, ...]
    words: tuple[str, ...]
    passages: tuple[tuple[str, str, tuple[str, ...]], ...] = ()


@dataclass(frozen=True)
class Example:
    """The prompt is intro, context, question and the first words of the answer.

    `every`: all answers are wanted, and the share of them counts; else one of them is enough.
    """

    intro: str
    context: str
    question: str
    answer_start: str
    answers: tuple[str, ...]
    every: bool = True

    @property
    def text(self) -> str:
        return f"{self.intro}{self.context}{self.question}{self.answer_start}"


@dataclass(frozen=True)
class Needles:
    """`keys` are hidden with `values` each; `asked` of the keys are asked for."""

    haystack: str
    value: str = "number"
    keys: int = 1
    values: int = 1
    asked: int = 1


NEEDLES = {
    "niah_single_1": Needles("filler"),
    "niah_single_2": Needles("book"),
    "niah_single_3": Needles("book", "uuid"),
    "niah_multikey_1": Needles("book", keys=4),
    "niah_multikey_2": Needles("needles"),
    "niah_multikey_3": Needles("needles", "uuid"),
    "niah_multivalue": Needles("book", values=4),
    "niah_multiquery": Needles("book", keys=4, asked=4),
}


def largest_size(kind: str, texts: Texts) -> int | None:
    """The sentences of the book, where the haystack is made of them."""
    return len(texts.sentences) if kind in NEEDLES and NEEDLES[kind].haystack == "book" else None


def needles(kind: Needles, texts: Texts, size: int, rng: random.Random) -> Example:
    """`size` sentences, or other needles, around those that are asked for."""
    keys = _keys(texts, rng, kind.keys)
    values = {key: [_value(kind.value, rng) for _ in range(kind.values)] for key in keys}
    hidden = [_needle(kind.value, key, value) for key in keys for value in values[key]]
    asked = keys[: kind.asked]
    several = kind.values * kind.asked > 1
    what, names = f"special magic {kind.value}{'s' if several else ''}", " and ".join(asked)
    return Example(
        f"Some special magic {kind.value}s are hidden within the following text. Memorize them. You will be asked "
        "for them afterwards.\n",
        " ".join(_scatter(hidden, _haystack(kind, texts, size, rng), rng)),
        f"\nWhat {'are all the' if several else 'is the'} {what} for {names} in the text above?\n",
        f"The {what} for {names} in the text {'are' if several else 'is'}",
        tuple(value for key in asked for value in values[key]),
    )


def _keys(texts: Texts, rng: random.Random, count: int) -> list[str]:
    """Pairs of words."""
    keys: dict[str, None] = {}
    while len(keys) < count:
        keys["-".join(rng.sample(texts.words, 2))] = None
    return list(keys)


def _value(kind: str, rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4)) if kind == "uuid" else str(rng.randint(10**6, 10**7 - 1))


def _needle(kind: str, key: str, value: str) -> str:
    return f"One of the special magic {kind}s for {key} is: {value}."


def _haystack(kind: Needles, texts: Texts, size: int, rng: random.Random) -> list[str]:
    if kind.haystack == "book":
        return _pages(texts, size, rng)
    if kind.haystack == "needles":
        return [_needle(kind.value, key, _value(kind.value, rng)) for key in _keys(texts, rng, size)]
    return _filler(size)


def _filler(size: int) -> list[str]:
    sentences = SENTENCE_END.split(FILLER.strip())
    return [sentences[place % len(sentences)] for place in range(size)]


def _pages(texts: Texts, size: int, rng: random.Random) -> list[str]:
    """So many sentences of the book from anywhere in it; after its end comes its beginning."""
    start = int(rng.random() * len(texts.sentences))
    return [texts.sentences[(start + place) % len(texts.sentences)] for place in range(size)]


def _scatter(hidden: list[str], lines: list[str], rng: random.Random, *, in_order: bool = False) -> list[str]:
    """The hidden lines at random places among the others; the places are shares, the same at every size."""
    shares, size = [rng.random() for _ in hidden], len(lines)
    shares = sorted(shares) if in_order else shares
    for share, line in sorted(zip(shares, hidden, strict=True), reverse=True):
        lines.insert(round(share * size), line)
    return lines


def variables(texts: Texts, size: int, rng: random.Random, *, demonstration: bool = True) -> Example:
    """A chain of assignments in order, among `size` sentences of filler; a worked example comes first."""
    names = ["".join(rng.choices(string.ascii_uppercase, k=5)) for _ in range(CHAIN)]
    value = str(rng.randint(10000, 99999))
    chain = [f"VAR {names[0]} = {value}."]
    chain += [f"VAR {name} = VAR {before}." for before, name in itertools.pairwise(names)]
    example = Example(
        "Track the chain of variable assignments that is hidden in the following text.\n\n",
        " ".join(_scatter(chain, _filler(size), rng, in_order=True)),
        f"\nQuestion: find all variables that are assigned the value {value} in the text above.\n",
        f"Answer: by the chain of assignments in the text above, {CHAIN} variables are assigned the value {value}:",
        tuple(names),
    )
    return _demonstrated(example, variables(texts, 5, rng, demonstration=False)) if demonstration else example


def _demonstrated(example: Example, demonstration: Example) -> Example:
    """With a worked example before it."""
    solved = f"{demonstration.text} {' '.join(demonstration.answers)}\n\n"
    return Example(solved + example.intro, example.context, example.question, example.answer_start, example.answers)


def common_words(
    texts: Texts, size: int, rng: random.Random, *, repeats: tuple[int, int], demonstration: bool = True
) -> Example:
    """A numbered list: ten words come `repeats[0]` times each, `size` others `repeats[1]` times."""
    if COMMON + size > len(texts.words):
        raise ValueError(f"the books have {len(texts.words)} words of 4 to 9 letters, {COMMON + size} are needed")
    words = rng.sample(texts.words, len(texts.words))
    common, others = words[:COMMON], words[COMMON : COMMON + size]
    listed = common * repeats[0] + others * repeats[1]
    rng.shuffle(listed)
    example = Example(
        "Below is a numbered list of words. Some of them come more often than the others. Memorize those.\n",
        " ".join(f"{number}. {word}" for number, word in enumerate(listed, 1)),
        f"\nQuestion: which are the {COMMON} most common words in the list above?\n",
        f"Answer: the {COMMON} most common words in the list are:",
        tuple(common),
    )
    if not demonstration:
        return example
    return _demonstrated(example, common_words(texts, 10, rng, repeats=(3, 1), demonstration=False))


def frequent_words(texts: Texts, size: int, rng: random.Random) -> Example:
    """About `size` coded words; the k-th most frequent comes in proportion to 1 / k ** 2, dots being the first."""
    coded = ["".join(rng.choices(string.ascii_lowercase, k=6)) for _ in range(CODED)]
    weights = [rank**-ZIPF for rank in range(1, CODED + 2)]
    counts = [round(size * weight / sum(weights)) for weight in weights]
    listed = [word for word, count in zip(["...", *coded], counts, strict=True) for _ in range(count)]
    rng.shuffle(listed)
    return Example(
        "Read the following coded text and track how often each coded word comes. Ignore the dots '...'.\n",
        " ".join(listed),
        f"\nQuestion: which are the {FREQUENT} most frequent words in the coded text above? Ignore the dots '...'.\n",
        f"Answer: by the coded text above, the {FREQUENT} most frequent words are:",
        tuple(coded[:FREQUENT]),
    )


def questions(texts: Texts, size: int, rng: random.Random) -> Example:
    """The paragraph that answers the question among `size` paragraphs of other questions."""
    if not texts.passages:
        raise ValueError("no question of qasper/*.jsonl has an answer that stands in its article; leave out kind qa")
    question, passage, answers = rng.choice(texts.passages)
    others = list(dict.fromkeys(other for _, other, _ in texts.passages if other != passage))
    if size > len(others):
        raise ValueError(f"qasper/*.jsonl has {len(others)} other paragraphs, {size} are needed; give more articles")
    rng.shuffle(others)
    documents = _scatter([passage], others[:size], rng)
    return Example(
        "Answer the question from the documents below. Give only the answer, no other words.\n\n",
        "\n\n".join(f"Document {number}:\n{document}" for number, document in enumerate(documents, 1)),
        f"\n\nAnswer the question from the documents above. Give only the answer, no other words.\n\n"
        f"Question: {question.strip()}\n",
        "Answer:",
        answers,
        every=False,
    )


Build = Callable[[Texts, int, random.Random], Example]
KINDS = (*NEEDLES, "vt", "cwe", "fwe", "qa")


def builder(kind: str, length: int) -> Build:
    """The maker of a kind's examples for prompts of `length` tokens."""
    if kind in NEEDLES:
        return partial(needles, NEEDLES[kind])
    if kind == "cwe":
        repeats = next(repeats for least, repeats in REPEATS.items() if length >= least)
        return partial(common_words, repeats=repeats)
    return {"vt": variables, "fwe": frequent_words, "qa": questions}[kind]
