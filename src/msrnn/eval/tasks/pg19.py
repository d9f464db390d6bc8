"""PG-19 perplexity: books in chunks of 4,096 tokens, as in the paper's table 3.

What is counted:
- A book is tokenized whole, without special tokens, and cut into chunks of `chunk` tokens from its beginning.
- Where the tokenizer puts a token before every text (BOS), each chunk begins with it and has one token less of the
  book; it is never predicted. `bos = false` leaves it out. The tokenizer of SmolLM2 has none.
- The rest of a book that does not fill a chunk is left out (`tail = true` keeps it, if it has at least 2 tokens).
- Each chunk starts from an empty state. All its tokens but the first are predicted: 4,095 of 4,096.
- A baseline of context k cuts each chunk into contexts of k tokens, each read alone; again all but the first token of
  each are predicted, so it predicts fewer tokens: 63 of every 64.
- Perplexity is exp(sum of nats / number of tokens predicted), over all chunks of all books. Intervals resample books.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .. import data, metrics
from ..prompts import Resources
from ..task import Output, Row, Sample, Task


@dataclass(frozen=True)
class Settings:
    chunk: int = 4096
    tail: bool = False
    bos: bool = True
    chunks_per_book: int = 0  # 0: all

    def __post_init__(self) -> None:
        if self.chunk < 2:
            raise ValueError(f"chunk is {self.chunk}; it must be at least 2")
        if self.chunks_per_book < 0:
            raise ValueError(f"chunks_per_book is {self.chunks_per_book}; it must be at least 0 (all)")


def task(settings: Settings, resources: Resources) -> Task:
    def samples() -> Iterator[Sample]:
        return _samples(settings, resources)

    return Task("pg19", samples, lambda sample, _: sample.content, score, (metrics.perplexity(),))


def _samples(settings: Settings, resources: Resources) -> Iterator[Sample]:
    bos = resources.bos_ids() if settings.bos else []
    size = settings.chunk - len(bos)
    for book in data.books(resources.data):
        ids = resources.encode(book.text)
        for index, start in enumerate(range(0, len(ids), size)):
            chunk = bos + ids[start : start + size]
            if settings.chunks_per_book and index >= settings.chunks_per_book:
                break
            if len(chunk) == settings.chunk or (settings.tail and len(chunk) > max(1, len(bos))):
                yield Sample(f"{book.name}:{index}", book.name, chunk)


def score(sample: Sample, output: Output) -> list[Row]:
    assert output.nll is not None
    return [Row({"nll": float(output.nll.sum(dtype="float64")), "tokens": float(output.nll.size)})]
