"""What PG-19's records say on the books that took no part in any choice: perplexity over full, and what is left of it.

    python experiments/reporting.py results/pg19.jsonl

For every family and capacity that TOVA was run at too: the excess over full, and its share of TOVA's and of H2O's there
and of TOVA's at twice the capacity. Intervals (95 %) draw whole books again, the same for all, so pairs stay pairs.
"""

from __future__ import annotations

import sys
from pathlib import Path

from books import Sums, bootstrap, halves

from msrnn.analysis.records import chosen, families, read_results

LENGTH = 4096  # of a chunk: from there on nothing leaves
RIVALS = (("tova", 1), ("h2o", 1), ("tova", 2))


def measured(path: Path) -> dict[tuple[str, int], Sums]:
    """Sums of the reporting half by family and capacity; `full` at 0."""
    records = chosen(read_results([path]), "pg19", "perplexity")
    whole = max(record.samples for record in records)
    named = families(record for record in records if record.samples == whole)
    found = {(name, int(one.capacity or 0)): one.parts for name, some in named.items() for one in some}
    _, reporting = halves(found["full", 0])
    return {
        key: {book: (parts[book]["nll"], int(parts[book]["tokens"])) for book in reporting}
        for key, parts in found.items()
    }


def line(found: dict[tuple[str, int], Sums], name: str, capacity: int) -> str:
    full, mine = found["full", 0], found[name, capacity]
    cells = [_cell(bootstrap(lambda f, m: m - f, full, mine))]
    for rival, times in RIVALS:
        theirs = found.get((rival, times * capacity)) if times * capacity < LENGTH else None
        share = theirs and bootstrap(lambda f, m, t: (m - f) / (t - f), full, mine, theirs)
        cells.append(_cell(share) if share else "")
    return f"{name:14} {capacity:5}  " + "  ".join(f"{cell:>26}" for cell in cells)


def _cell(found: tuple[float, float, float]) -> str:
    return f"{found[0]:.3f} [{found[1]:.3f}, {found[2]:.3f}]"


def main() -> None:
    found = measured(Path(sys.argv[1]))
    full = found["full", 0]
    print(f"{len(full)} books, full {bootstrap(lambda p: p, full)[0]:.3f}")
    titles = ("over full", "of tova's", "of h2o's", "of tova's at twice")
    print(f"{'policy':14} {'slots':>5}  " + "  ".join(f"{title:>26}" for title in titles))
    for name, capacity in found:
        twin = ("tova", capacity) in found and capacity < LENGTH
        if twin and name != "baseline":
            print(line(found, name, capacity))


if __name__ == "__main__":
    main()
