"""Is there a setting of momentum, scope, first and last that beats TOVA and H2O at equal memory, at 64 to 1,024 slots?

    python experiments/search.py --data DATA --dtype bfloat16 --batch 32 --out results/search.jsonl

One half of the books chooses. First every scope and memory, half of the state for the newest, at 64, 256 and 1,024
slots: a momentum of its own (0.95, 0.98), or one that grows with the capacity (`1-4/k`). Then around the best two: a
little more and a little less memory, other shares for the newest, the first 4 tokens kept. Then the best four at 128
and 512 too. The winner is the setting whose worst capacity gains most over the better of TOVA and H2O there. It is then
measured once on the other half, beside them, with intervals over books. About 100 measurements; every one is kept, so a
run that was stopped goes on where it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product

import numpy as np
from books import Losses, bootstrap, ledger_of, novels, opened, options, perplexity, progress, records, save, split

CAPACITIES = (64, 128, 256, 512, 1024)
RIVALS = ("tova", "h2o", "h2o-layer")
BESIDE = ("tova+4", "tova-head", "window+4")
MEMORIES = ("0.95", "0.98", "1-1/k", "1-2/k", "1-4/k", "1-8/k", "1-16/k")
LASTS = ("1/4", "1/2", "3/4")
SCOPES = ("tova", "tova-head")


def candidates() -> list[str]:
    return [f"{scope},momentum={memory},last=1/2" for scope, memory in product(SCOPES, MEMORIES)]


def around(kind: str) -> list[str]:
    """Settings that differ from one in one thing."""
    scope, memory, last = (part.rpartition("=")[2] for part in kind.split(","))
    found = [f"{scope},momentum={memory},last={share}" for share in LASTS]
    found.append(f"{scope}+4,momentum={memory},last={last}")
    if memory.endswith("/k"):
        forgotten = float(memory[2:-2])
        found += [f"{scope},momentum=1-{forgotten * factor:g}/k,last={last}" for factor in (0.75, 1.5)]
    return found


def at(kind: str, capacity: int) -> str:
    name, comma, rest = kind.partition(",")
    return f"{name}:{capacity}{comma}{rest}"


def gain(losses: Losses, kind: str, capacity: int) -> float:
    """The share of the better rival's excess over full that a kind saves; negative where it is worse."""
    full = perplexity(losses.of("full"))
    rival = min(perplexity(losses.of(at(rival, capacity))) for rival in RIVALS) - full
    return 1 - (perplexity(losses.of(at(kind, capacity))) - full) / rival


def best(losses: Losses, kinds: Iterable[str], capacities: Sequence[int], count: int) -> list[str]:
    """The kinds whose worst capacity gains most."""
    kinds = list(dict.fromkeys(kinds))
    with progress(len(kinds) * len(capacities), f"capacities {capacities}") as bar:
        for kind, capacity in product(kinds, capacities):
            gain(losses, kind, capacity)
            bar.update()
    return sorted(kinds, key=lambda kind: -min(gain(losses, kind, capacity) for capacity in capacities))[:count]


def choose(losses: Losses, quick: bool) -> str:
    few = (CAPACITIES[0], CAPACITIES[len(CAPACITIES) // 2], CAPACITIES[-1])
    first = best(losses, candidates(), few[1:2] if quick else few, 2)
    if quick:
        return first[0]
    fewer = best(losses, [*first, *(other for kind in first for other in around(kind))], few, 4)
    return best(losses, fewer, CAPACITIES, 1)[0]


def report(losses: Losses, kind: str, out: dict[str, tuple[str, int | None]]) -> None:
    """On books that took no part: the winner beside the rivals, and its difference from each, with intervals."""
    print(f"\nchosen: {kind}\non the other half (full: {perplexity(losses.of('full')):.3f}), perplexity over full:")
    names = (kind, *RIVALS, *BESIDE)
    for capacity in CAPACITIES:
        shown = []
        for name in names:
            policy = at(name, capacity)
            out[policy] = (policy, capacity)
            over, low, high = bootstrap(lambda full, mine: mine - full, losses.of("full"), losses.of(policy))
            shown.append(f"{'preset' if name == kind else name} {over:.3f} [{low:.3f}, {high:.3f}]")
        print(f"{capacity:5}  " + "; ".join(shown))
        for rival in RIVALS:
            found = bootstrap(np.subtract, losses.of(at(rival, capacity)), losses.of(at(kind, capacity)))
            better = "better" if found[1] > 0 else "worse" if found[2] < 0 else "not told apart"
            print(f"       {rival} - preset: {found[0]:+.3f} [{found[1]:+.3f}, {found[2]:+.3f}] {better}")


def main() -> None:
    parser = options(__doc__ or "", "results/search.jsonl")
    parser.add_argument("--preset", help="report on this kind instead of choosing one")
    parser.add_argument("--quick", action="store_true", help="the first stage only")
    arguments = parser.parse_args()
    model, tokenizer = opened(arguments)
    half, other = split(arguments.data)
    print(f"choosing: {' '.join(book.stem for book in half)}; reporting: {' '.join(book.stem for book in other)}")
    kind = arguments.preset
    if kind is None:
        texts = novels(tokenizer, half, arguments.length, arguments.chunks)
        kind = choose(
            Losses(model, texts, arguments.batch, ledger_of(arguments, "chosen"), "choosing"), arguments.quick
        )
    ledger_of(arguments, "reported").with_name("chosen.txt").write_text(f"{kind}\n")
    texts = novels(tokenizer, other, arguments.length, arguments.chunks)
    losses = Losses(model, texts, arguments.batch, ledger_of(arguments, "reported"), "reporting")
    policies: dict[str, tuple[str, int | None]] = {"full": ("full", None)}
    report(losses, kind, policies)
    settings = {"length": arguments.length, "chunks": arguments.chunks, "books": [book.stem for book in other]}
    save(arguments.out, records(losses, "preset", policies, settings | {"preset": kind}))


if __name__ == "__main__":
    main()
