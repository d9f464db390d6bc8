"""PG-19 records on the held-out books only: the gap of perplexity to full, and its ratio to the gaps of TOVA and H2O.

    python experiments/reporting.py results/pg19.jsonl

For every family and capacity that TOVA was run at too: the gap to full, and its ratio to the gaps of TOVA and H2O at
the same capacity and of TOVA at twice the capacity. Intervals (95 %) resample whole books, the same for all policies.
"""

from __future__ import annotations

import sys
from pathlib import Path

from books import Sums, halves, interval, show

from msrnn.analysis.records import families, read_results, select

LENGTH = 4096  # of a chunk: with this capacity nothing is evicted
RIVALS = (("tova", 1), ("h2o", 1), ("tova", 2))


def held_out_sums(path: Path) -> dict[tuple[str, int], Sums]:
    """Sums of the held-out half by family and capacity; `full` at 0."""
    records = select(read_results([path]), "pg19", "perplexity")
    complete = max(record.samples for record in records)
    by_family = families(record for record in records if record.samples == complete)
    parts = {(name, int(one.capacity or 0)): one.parts for name, line in by_family.items() for one in line}
    _, held_out = halves(parts["full", 0])
    return {
        key: {book: (books[book]["nll"], int(books[book]["tokens"])) for book in held_out}
        for key, books in parts.items()
    }


def line(sums: dict[tuple[str, int], Sums], name: str, capacity: int) -> str:
    full, policy = sums["full", 0], sums[name, capacity]
    cells = [show(interval(lambda f, p: p - f, full, policy))]
    for rival, factor in RIVALS:
        other = sums.get((rival, factor * capacity)) if factor * capacity < LENGTH else None
        cells.append(show(interval(lambda f, p, o: (p - f) / (o - f), full, policy, other)) if other else "")
    return f"{name:14} {capacity:5}  " + "  ".join(f"{cell:>26}" for cell in cells)


def main() -> None:
    sums = held_out_sums(Path(sys.argv[1]))
    full = sums["full", 0]
    print(f"{len(full)} books, full {interval(lambda p: p, full)[0]:.3f}")
    titles = ("gap to full", "over tova's gap", "over h2o's gap", "over tova's gap at twice")
    print(f"{'policy':14} {'slots':>5}  " + "  ".join(f"{title:>26}" for title in titles))
    for name, capacity in sums:
        if ("tova", capacity) in sums and capacity < LENGTH and name != "baseline":
            print(line(sums, name, capacity))


if __name__ == "__main__":
    main()
