"""Texts of any length as token ids, in pieces: the ids are those of the whole text, the memory that of one piece.

A tokenizer looks both ways, so a text is cut only where the ids on either side come out the same without the cut: each
place is tried, with text before and after it, against the ids already known. Nothing here knows models or tensors.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

BLOCK = 1 << 16  # bytes per read
SEGMENT = 1 << 14  # characters per call of the tokenizer
MARGIN = 1024  # characters that are looked at on either side of a cut
AGREEING = 8  # ids before a cut that must come out the same from a shorter beginning
SENTINELS = ("", "\n", "a ")  # what may stand before a piece, to take the blow of being the first of a text


def read_blocks(source: str | Path | IO[bytes], size: int = BLOCK) -> Iterator[str]:
    """The text of a UTF-8 file, or of an open binary one, block by block; a byte order mark is left out."""
    if isinstance(source, str | Path):
        with open(source, "rb") as file:
            yield from read_blocks(file, size)
        return
    decoder = codecs.getincrementaldecoder("utf-8")()
    start, first = 0, True  # where the next block begins; whether no text came yet
    read = getattr(source, "read1", source.read)  # what a pipe has now, without waiting for the rest
    while True:
        block = read(size)
        kept = decoder.getstate()[0]
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise ValueError(_not_text(source, error, start - len(kept))) from None
        if text:
            yield text.removeprefix("\ufeff") if first else text
            first = False
        if not block:
            return
        start += len(block)


def _not_text(source: IO[bytes], error: UnicodeDecodeError, start: int) -> str:
    name = getattr(source, "name", None)
    given = name if isinstance(name, str) and name != "<stdin>" else "standard input"
    found = error.object[error.start]
    place = start + error.start
    return f"{given} is not UTF-8 text: byte {place} is 0x{found:02x} ({error.reason}); convert it, e.g. with iconv"


def stream_tokens(
    tokenizer: Any, blocks: Iterable[str], *, special: bool = True, segment: int = SEGMENT
) -> Iterator[int]:
    """The ids that `tokenizer` gives for all blocks together, as the blocks come.

    `special` adds what the tokenizer puts at the beginning and the end of a text, as a plain call of it does. Only a
    Unigram tokenizer can differ, where one pattern repeats for a whole segment: it cuts that into the same number of
    tokens, but settles ties by how the repetition ends.
    """
    before, after = _specials(tokenizer) if special else ([], [])
    yield from before
    context, skip, text, wanted = "", 0, "", segment  # `skip`: the ids of the context, which were given before
    for part in (block[i : i + segment] for block in blocks for i in range(0, len(block), segment)):
        text += part
        while len(text) >= wanted + MARGIN:
            cut = _cut(tokenizer, context, skip, text)
            if cut is None:  # no safe place in all this text: look again when there is twice as much
                wanted = len(text) * 2
                break
            ids, place, context, skip = cut
            text, wanted = text[place:], segment
            yield from ids
    yield from _encode(tokenizer, context + text)[skip:]
    yield from after


def opening(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before every text: BOS, or nothing."""
    return _specials(tokenizer)[0]


def _cut(tokenizer: Any, context: str, skip: int, text: str) -> tuple[list[int], int, str, int] | None:
    """The ids up to the last safe place in `text`, that place, the context for what follows and the ids in that."""
    for place in _places(text):
        ids = _encode(tokenizer, context + text[:place])[skip:]
        for tail in _contexts(text[:place]):
            known = _encode(tokenizer, tail)
            same = known[-AGREEING:] == ids[-AGREEING:] and len(known) >= min(AGREEING, len(ids))
            # two ends, so that no chance in what happens to stand there passes for agreement
            ends = (place + MARGIN, place + MARGIN - 1)
            if same and all(_encode(tokenizer, tail + text[place:end])[: len(known)] == known for end in ends):
                return ids, place, tail, len(known)
    return None


def _places(text: str) -> Iterator[int]:
    """Where to try to cut, the likeliest first: before a line, before a space, anywhere; always with room after it."""
    end = len(text) - MARGIN
    low = max(1, end - 16 * MARGIN)
    lines = (i for i in range(end, low, -1) if text[i - 1] == "\n" and not text[i].isspace())
    words = (i for i in range(end, low, -1) if text[i].isspace() and not text[i - 1].isspace())
    for kind in (lines, words):
        yield from (place for place, _ in zip(kind, range(4), strict=False))
    yield from range(end, max(0, end - 256), -1)


def _contexts(text: str) -> Iterator[str]:
    """Beginnings from which the tokenizer may find the same last ids as from the true one, the shortest first."""
    start = len(text) - MARGIN
    if start > 0:
        yield text[next((i for i in range(start, start + MARGIN // 2) if text[i].isspace()), start) :]
    for sentinel in SENTINELS:
        yield sentinel + text


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] if text else []
    return ids


def _specials(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after a text."""
    plain, whole = _encode(tokenizer, "a"), list(tokenizer("a", verbose=False)["input_ids"])
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return whole[:start], whole[start + len(plain) :]
    raise ValueError(
        "this tokenizer changes a text's tokens when it adds its special ones; the text cannot be streamed"
    )
