"""Words and their classes (Penn tags), mapped to a tokenizer's tokens; and how long each class is kept.

Sentences come from NLTK's Punkt, trained on the text itself, words from its Treebank rules and tags from its
perceptron. A token has the class of the word it begins in; line breaks are a class of their own, as in the paper.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_LEARN = 200_000  # characters
NEWLINE, SPACE, SPECIAL = "newline", "space", "special"
# the same length, so that places stay: the tagger learned from straight quotes
_STRAIGHT = str.maketrans({"“": '"', "”": '"', "’": "'", "‘": "'", "\u00a0": " "})  # noqa: RUF001

_DASHES = dict.fromkeys("—–…", ":")  # noqa: RUF001 (Penn has them as -- and ..., which it tags so)


@dataclass(frozen=True)
class Word:
    start: int
    end: int
    tag: str


def tagged(text: str, tagger: Any, end: int | None = None) -> list[Word]:
    """Every word of a text, or of its first `end` characters, in order, with its Penn tag."""
    straight = text.translate(_STRAIGHT)
    return [word for start, stop in sentences(straight, end) for word in _words(straight, start, stop, tagger)]


def sentences(text: str, end: int | None = None) -> list[tuple[int, int]]:
    """Where each sentence begins and ends; what is an abbreviation is learned from the text's beginning."""
    from nltk.tokenize.punkt import PunktSentenceTokenizer

    splitter = PunktSentenceTokenizer(text[:_LEARN])
    return list(splitter.span_tokenize(text if end is None else text[: _word_end(text, end)]))


def _word_end(text: str, end: int) -> int:
    """`end`, moved on so that no word is cut."""
    space = re.compile(r"\s").search(text, end)
    return space.start() if space else len(text)


def _words(text: str, start: int, end: int, tagger: Any) -> Iterator[Word]:
    pieces = list(_split(text[start:end]))
    tags = tagger.tag([word for word, _, _ in pieces])
    for (word, left, right), (_, tag) in zip(pieces, tags, strict=True):
        yield Word(start + left, start + right, _DASHES.get(word, tag))


def _split(sentence: str) -> Iterator[tuple[str, int, int]]:
    """Words as the tagger knows them (quotes as `` and ''), and where they stand."""
    from nltk.tokenize import NLTKWordTokenizer, WordPunctTokenizer

    rules = NLTKWordTokenizer()
    try:
        words, spans = rules.tokenize(sentence), list(rules.span_tokenize(sentence))
    except (ValueError, RuntimeError):  # odd quotes, whose places it cannot find again
        spans = list(WordPunctTokenizer().span_tokenize(sentence))
        words = [sentence[left:right] for left, right in spans]
    yield from ((word, left, right) for word, (left, right) in zip(words, spans, strict=True))


def token_classes(text: str, spans: Sequence[tuple[int, int]], words: Sequence[Word]) -> list[str]:
    """The class of each token, from the place in the text that each came from."""
    starts = [word.start for word in words]
    return [_class(text, start, end, words, starts) for start, end in spans]


def _class(text: str, start: int, end: int, words: Sequence[Word], starts: Sequence[int]) -> str:
    if start == end:
        return SPECIAL
    token = text[start:end]
    first = start + len(token) - len(token.lstrip())
    if first == end:
        return NEWLINE if "\n" in token else SPACE
    index = bisect_right(starts, first) - 1
    # a sign that no word holds, such as a lone combining mark, belongs to no class
    return words[index].tag if index >= 0 and first < words[index].end else SPACE


def encode(tokenizer: Any, text: str, length: int | None = None) -> tuple[list[int], list[tuple[int, int]]]:
    """A text's token ids, at most `length`, and the place of each in the text."""
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} does not say where its tokens stand in the text; "
            "word classes need a fast tokenizer (one with a tokenizer.json)"
        )
    encoding = tokenizer(text, return_offsets_mapping=True, verbose=False)
    return encoding["input_ids"][:length], [tuple(span) for span in encoding["offset_mapping"][:length]]


def mean_by_class(steps: Tensor, classes: Sequence[str]) -> dict[str, tuple[float, int]]:
    """[L, T] -> for each class the mean over layers and its tokens, and how many tokens it has."""
    if steps.shape[1] != len(classes):
        raise ValueError(f"{len(classes)} classes were given for {steps.shape[1]} tokens")
    places: defaultdict[str, list[int]] = defaultdict(list)
    for place, name in enumerate(classes):
        places[name].append(place)
    return {name: (float(steps[:, indices].mean()), len(indices)) for name, indices in sorted(places.items())}


def characters(spans: Iterable[tuple[int, int]]) -> int:
    """How much of the text the tokens cover."""
    return max((end for _, end in spans), default=0)
