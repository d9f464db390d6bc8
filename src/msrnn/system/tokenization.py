"""Streaming tokenization: the ids of a whole text, in the memory of one segment.

A tokenizer looks both ways, so a text is cut only where the ids on either side are the same without the cut: each
candidate is tried, with text before and after it, against the ids already known. Nothing here knows models or tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

SEGMENT = 1 << 14  # characters per call of the tokenizer
MARGIN = 1024  # characters of context that are compared on either side of a cut
AGREEING = 8  # ids before a cut that must come out the same from a shorter context
SENTINELS = ("", "\n", "a ")  # prefixes of a context, so that its first word is not the first of a text


def stream_tokens(
    tokenizer: Any, blocks: Iterable[str], *, special: bool = True, segment: int = SEGMENT
) -> Iterator[int]:
    """The ids that `tokenizer` gives for all blocks together, as the blocks come.

    `special` adds the special tokens at the beginning and the end of a text, as a plain call of the tokenizer does.
    Only a Unigram tokenizer can differ, where one pattern repeats for a whole segment: it cuts that into the same
    number of tokens, but settles ties by how the repetition ends.
    """
    before, after = _special_tokens(tokenizer) if special else ([], [])
    yield from before
    context, skip, text, enough = "", 0, "", segment  # `skip`: ids of the context, which were yielded before
    for part in (block[i : i + segment] for block in blocks for i in range(0, len(block), segment)):
        text += part
        while len(text) >= enough + MARGIN:
            cut = _cut(tokenizer, context, skip, text)
            if cut is None:  # no safe cut in all this text: try again when there is twice as much
                enough = len(text) * 2
                break
            ids, place, context, skip = cut
            text, enough = text[place:], segment
            yield from ids
    yield from _encode(tokenizer, context + text)[skip:]
    yield from after


def leading_special_tokens(tokenizer: Any) -> list[int]:
    """The special tokens that the tokenizer puts before every text: BOS, or nothing."""
    return _special_tokens(tokenizer)[0]


def _cut(tokenizer: Any, context: str, skip: int, text: str) -> tuple[list[int], int, str, int] | None:
    """The ids up to the last safe cut in `text`, its place, the context for what follows and its number of ids."""
    for place in _places(text):
        ids = _encode(tokenizer, context + text[:place])[skip:]
        for tail in _contexts(text[:place]):
            known = _encode(tokenizer, tail)
            same = known[-AGREEING:] == ids[-AGREEING:] and len(known) >= min(AGREEING, len(ids))
            # two ends, so that an accident of the text there does not pass for agreement
            ends = (place + MARGIN, place + MARGIN - 1)
            if same and all(_encode(tokenizer, tail + text[place:end])[: len(known)] == known for end in ends):
                return ids, place, tail, len(known)
    return None


def _places(text: str) -> Iterator[int]:
    """Where to try to cut, most promising first: before a line, before a space, anywhere; MARGIN before the end."""
    end = len(text) - MARGIN
    low = max(1, end - 16 * MARGIN)
    lines = (i for i in range(end, low, -1) if text[i - 1] == "\n" and not text[i].isspace())
    words = (i for i in range(end, low, -1) if text[i].isspace() and not text[i - 1].isspace())
    for candidates in (lines, words):
        yield from (place for place, _ in zip(candidates, range(4), strict=False))
    yield from range(end, max(0, end - 256), -1)


def _contexts(text: str) -> Iterator[str]:
    """Texts from which the tokenizer may give the same last ids as from the whole one, the shortest first."""
    start = len(text) - MARGIN
    if start > 0:
        yield text[next((i for i in range(start, start + MARGIN // 2) if text[i].isspace()), start) :]
    for sentinel in SENTINELS:
        yield sentinel + text


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] if text else []
    return ids


def _special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer adds before and after a text."""
    plain, whole = _encode(tokenizer, "a"), list(tokenizer("a", verbose=False)["input_ids"])
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return whole[:start], whole[start + len(plain) :]
    raise ValueError(
        "this tokenizer changes a text's tokens when it adds its special ones; the text cannot be streamed"
    )
