"""Far beyond the trained length: what keeps policies that look at attention behind Window+4?

    python experiments/far.py --data DATA --dtype float32 --policy window+4:512 --policy fade:512 [--half reporting]

The first --length tokens of the books of --half (see books.py) are read into --policy with the paper's gaps (keys are
re-rotated every --piece tokens) or with the positions that the model's own use has, `--positions plain`. Perplexity by
stretch of the text, and the difference to the first policy with its interval over books. Every policy is measured once
and stored, so that a run that was stopped resumes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from books import SEED, interval, load_model, measurements_path, options, save, show, split

from msrnn.core.heads import parts_of
from msrnn.eval import positions
from msrnn.eval.measurements import Measurements
from msrnn.eval.perplexity import Positions, token_nll
from msrnn.eval.record import Record
from msrnn.hf.best import resolve
from msrnn.hf.identity import profile_identity
from msrnn.policy import split_policy
from msrnn.system import provenance

BIN = 1000
OLD = 4096  # tokens: a slot of that age holds what no chunk of the calibration could
EDGES = (0, 4000, 8000, 16000, 24000, 32000, 48000, 70000)


@dataclass
class Ages:
    """Positions by a scheme (None: plain); in passing, the share of slots that hold old tokens, the first 4 aside."""

    scheme: Positions | None
    old: dict[int, float] = field(default_factory=dict)

    def __call__(self, cache: Any, start: int, size: int) -> Any:
        if start and start % OLD < size:
            held = torch.cat([part.positions.flatten() for layer in cache.bounded for part in parts_of(layer.slots)])
            held = held[held >= 4]
            self.old[start] = round(float((held < start - OLD).float().mean()), 4)
        return None if self.scheme is None else self.scheme(cache, start, size)


class Books:
    """The nats of every bin of every book, by policy."""

    def __init__(self, model: Any, tokenizer: Any, books: Sequence[Path], arguments: Any) -> None:
        self.model, self.arguments = model, arguments
        ids = {book.stem: tokenizer(book.read_text(encoding="utf-8"), verbose=False)["input_ids"] for book in books}
        self.ids = {name: book[: arguments.length] for name, book in ids.items() if len(book) >= arguments.length}
        conditions = {
            "model": profile_identity(model)["name"],
            "dtype": str(model.dtype),
            "books": list(self.ids),
            "length": arguments.length,
            "piece": arguments.piece,
            "positions": arguments.positions,
        }
        self.measurements = Measurements(measurements_path(arguments, arguments.half), conditions)

    def bins(self, policy: str) -> np.ndarray:
        """[books, bins]"""
        if policy not in self.measurements:
            start = time.perf_counter()
            ages = Ages(positions.scheme(self.arguments.positions, self.model))
            ids = torch.tensor(list(self.ids.values()))
            nll = token_nll(self.model, ids, policy, piece=self.arguments.piece, positions=ages).double()
            whole = nll[:, : nll.shape[1] // BIN * BIN].view(len(ids), -1, BIN).sum(-1)
            seconds = round(time.perf_counter() - start, 1)
            rows = [[round(nats, 4) for nats in row] for row in whole.tolist()]
            self.measurements.add(policy, {"nll": rows, "seconds": seconds, "old": ages.old})
            print(f"{policy}: {seconds} s", flush=True)
        return np.array(self.measurements[policy]["nll"])

    def stretch(self, policy: str, start: int, end: int) -> dict[str, tuple[float, int]]:
        """Nats and tokens of every book from bin to bin."""
        part = self.bins(policy)[:, start // BIN : end // BIN]
        return {name: (float(row.sum()), row.size * BIN) for name, row in zip(self.ids, part, strict=True)}


def report(books: Books, policies: Sequence[str]) -> None:
    edges = [edge for edge in EDGES if edge < books.arguments.length - BIN] + [books.arguments.length - BIN]
    stretches = [*pairwise(edges), *((0, end) for end in edges if end in (8000, 32000, edges[-1]))]
    print(f"{'':58} " + " ".join(f"{start // 1000}-{end // 1000}K".rjust(8) for start, end in stretches))
    for policy in policies:
        values = [interval(lambda p: p, books.stretch(policy, *one))[0] for one in stretches]
        print(f"{policy:58} " + " ".join(f"{value:8.3f}" for value in values))
    for policy in policies:
        print(
            f"{policy:58} share of slots older than {OLD:,} after so many tokens: {books.measurements[policy]['old']}"
        )
    for policy in policies[1:]:
        for end in (one for one in edges if one in (8000, 32000, edges[-1])):
            sums = (books.stretch(name, 0, end) for name in (policy, policies[0]))
            print(f"{policy:58} minus {policies[0]} over {end:,}: {show(interval(np.subtract, *sums))}")


def records(books: Books, policies: Sequence[str]) -> list[Record]:
    """Per policy: the perplexity of all tokens."""
    arguments, device = books.arguments, books.model.device
    found = []
    for policy in policies:
        sums = books.stretch(policy, 0, arguments.length)
        value, low, high = interval(lambda p: p, sums)
        size = split_policy(policy).size
        found.append(
            Record(
                task=f"far-{arguments.half}",
                model=profile_identity(books.model)["name"],
                policy=policy,
                capacity=int(size) if size.isdigit() else None,
                metric="perplexity",
                value=value,
                low=low,
                high=high,
                samples=len(sums),
                groups=len(sums),
                seed=SEED,
                dtype=str(books.model.dtype).removeprefix("torch."),
                machine=provenance.machine(device),
                versions=provenance.versions(),
                commit=provenance.commit(),
                date=provenance.now(),
                seconds=books.measurements[policy]["seconds"],
                peak_bytes=0,
                run=f"far-{arguments.half}-{arguments.length}-{arguments.piece}-{arguments.positions}",
                settings={name: getattr(arguments, name) for name in ("length", "piece", "positions", "half")}
                | {"old": books.measurements[policy]["old"]},
                parts={
                    name: {f"nll {BIN * (place + 1)}": nats for place, nats in enumerate(row)}
                    for name, row in zip(books.ids, books.bins(policy).tolist(), strict=True)
                },
                command=provenance.command(),
            )
        )
    return found


def main() -> None:
    parser = options(__doc__ or "", "results/far.jsonl")
    parser.add_argument("--policy", action="append", required=True, help="the others are compared with the first")
    parser.add_argument("--half", choices=("choosing", "reporting", "all"), default="choosing")
    parser.add_argument("--positions", default="gaps", choices=list(positions.GAPS))
    parser.add_argument("--piece", type=int, default=256)
    parser.add_argument("--limit", type=int, help="so many books")
    parser.set_defaults(length=70_000)
    arguments = parser.parse_args()
    model, tokenizer = load_model(arguments)
    choosing, reporting = split(arguments.data)
    texts = {"choosing": choosing, "reporting": reporting, "all": choosing + reporting}[arguments.half]
    books = Books(model, tokenizer, texts[: arguments.limit], arguments)
    policies = [str(resolve(policy, model, length=arguments.length)) for policy in arguments.policy]
    for policy in policies:
        books.bins(policy)
    report(books, policies)
    save(arguments.out, records(books, policies))


if __name__ == "__main__":
    main()
