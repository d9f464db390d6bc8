"""Search for momentum, scope, first and last that beat TOVA and H2O at equal memory, at 64 to 1,024 slots.

    python experiments/search.py --data DATA --dtype bfloat16 --batch 32 --out results/search.jsonl

On the development half of the books. First every scope and momentum, with half of the state for the newest tokens, at
64, 256 and 1,024 slots: a constant momentum (0.95, 0.98), or one that grows with the capacity (`1-4/k`). Then variants
of the best two: a little more and less momentum, other shares for the newest tokens, the first 4 tokens protected. Then
the best four at 128 and 512 too. The winner has the best worst-case gain over the better of TOVA and H2O. It is then
measured once on the held-out half, with intervals over books. About 100 measurements, each stored, so that a run that
was stopped resumes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product

import numpy as np
from books import (
    Losses,
    interval,
    load_model,
    measurements_path,
    novels,
    options,
    perplexity,
    progress,
    records,
    save,
    show,
    split,
)

from msrnn.policy import split_policy

CAPACITIES = (64, 128, 256, 512, 1024)
RIVALS = ("tova", "h2o", "h2o-layer")
OTHERS = ("tova+4", "tova-head", "window+4")
MOMENTA = ("0.95", "0.98", "1-1/k", "1-2/k", "1-4/k", "1-8/k", "1-16/k")
LASTS = ("1/4", "1/2", "3/4")
SCOPES = ("tova", "tova-head")


def candidates() -> list[str]:
    return [f"{scope},momentum={momentum},last=1/2" for scope, momentum in product(SCOPES, MOMENTA)]


def variants(kind: str) -> list[str]:
    """Kinds that differ from one in one setting."""
    scope, momentum, last = (part.rpartition("=")[2] for part in kind.split(","))
    kinds = [f"{scope},momentum={momentum},last={share}" for share in LASTS]
    kinds.append(f"{scope}+4,momentum={momentum},last={last}")
    if momentum.endswith("/k"):
        rate = float(momentum[2:-2])
        kinds += [f"{scope},momentum=1-{rate * factor:g}/k,last={last}" for factor in (0.75, 1.5)]
    return kinds


def at(kind: str, capacity: int) -> str:
    return split_policy(kind).with_size(capacity)


def gain(losses: Losses, kind: str, capacity: int) -> float:
    """The share of the better rival's gap to full that a kind closes; negative where it is worse."""
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
    fewer = best(losses, [*first, *(other for kind in first for other in variants(kind))], few, 4)
    return best(losses, fewer, CAPACITIES, 1)[0]


def report(losses: Losses, kind: str, out: dict[str, tuple[str, int | None]]) -> None:
    """On the held-out books: the winner and its rivals, and the difference to each, with intervals."""
    print(f"\nchosen: {kind}\non the held-out half (full: {perplexity(losses.of('full')):.3f}), gap to full:")
    names = (kind, *RIVALS, *OTHERS)
    for capacity in CAPACITIES:
        cells = []
        for name in names:
            policy = at(name, capacity)
            out[policy] = (policy, capacity)
            gap = interval(lambda full, sums: sums - full, losses.of("full"), losses.of(policy))
            cells.append(f"{'preset' if name == kind else name} {show(gap)}")
        print(f"{capacity:5}  " + "; ".join(cells))
        for rival in RIVALS:
            value, low, high = interval(np.subtract, losses.of(at(rival, capacity)), losses.of(at(kind, capacity)))
            verdict = "better" if low > 0 else "worse" if high < 0 else "no significant difference"
            print(f"       {rival} - preset: {value:+.3f} [{low:+.3f}, {high:+.3f}] {verdict}")


def main() -> None:
    parser = options(__doc__ or "", "results/search.jsonl")
    parser.add_argument("--preset", help="report on this kind instead of choosing one")
    parser.add_argument("--quick", action="store_true", help="the first stage only")
    arguments = parser.parse_args()
    model, tokenizer = load_model(arguments)
    development, held_out = split(arguments.data)
    names = [" ".join(book.stem for book in books) for books in (development, held_out)]
    print(f"development: {names[0]}; held out: {names[1]}")
    kind = arguments.preset
    if kind is None:
        texts = novels(tokenizer, development, arguments.length, arguments.chunks)
        kind = choose(
            Losses(model, texts, arguments.batch, measurements_path(arguments, "chosen"), "choosing"), arguments.quick
        )
    measurements_path(arguments, "reported").with_name("chosen.txt").write_text(f"{kind}\n")
    texts = novels(tokenizer, held_out, arguments.length, arguments.chunks)
    losses = Losses(model, texts, arguments.batch, measurements_path(arguments, "reported"), "reporting")
    policies: dict[str, tuple[str, int | None]] = {"full": ("full", None)}
    report(losses, kind, policies)
    settings = {"length": arguments.length, "chunks": arguments.chunks, "books": [book.stem for book in held_out]}
    save(arguments.out, records(losses, "preset", policies, settings | {"preset": kind}))


if __name__ == "__main__":
    main()
