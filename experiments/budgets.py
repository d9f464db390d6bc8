"""Budgets by layer on books that took no part in them, and on other kinds of text.

    python experiments/budgets.py --data DATA --profile tova=tova.json --profile KIND=preset.json

For each average: the excess of perplexity over full for plain TOVA, the kinds given, and the kinds with their profiles,
and the share of TOVA's excess that is left; and TOVA at twice the memory beside them. On the reporting half of the
books (see books.py), on Python's standard library and on the articles of QASPER. Intervals draw whole books, modules or
articles again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from books import Losses, articles, bootstrap, code, ledger_of, novels, opened, options, progress, records, save, split

from msrnn.policy import kind_of, read_profile


def at(kind: str, capacity: int, profile: str | None = None) -> str:
    name, comma, rest = kind.partition(",")
    return f"{name}:{capacity}{comma}{rest}" + (f",profile={profile}" if profile else "")


def pair(text: str) -> tuple[str, str]:
    kind, mark, file = text.rpartition("=")
    if not mark:
        raise argparse.ArgumentTypeError(f"{text!r}: write KIND=FILE, e.g. tova=profile.json")
    read_profile(file)
    return kind_of(kind), file


def labels(profiles: Sequence[tuple[str, str]], average: int) -> dict[str, str]:
    """What is compared at one average: {name in the tables: policy}."""
    found = {f"tova:{average}": f"tova:{average}"}
    for kind, file in profiles:
        found[at(kind, average)] = at(kind, average)
        found[f"{at(kind, average)} + profile"] = at(kind, average, file)
    return found


def report(losses: Losses, profiles: Sequence[tuple[str, str]], averages: Sequence[int], name: str) -> None:
    full = losses.of("full")
    print(f"\n{name}: {len(losses.texts)} texts, full {bootstrap(lambda p: p, full)[0]:.3f}")
    print(f"{'policy':58} {'over full':>26}  {'of tova at this average':>26}  {'of tova at twice':>26}")
    for average in averages:
        for label, policy in labels(profiles, average).items():
            mine = losses.of(policy)
            cells = [_cell(bootstrap(lambda f, m: m - f, full, mine))]
            for rival in (average, 2 * average):
                theirs = losses.of(f"tova:{rival}")
                cells.append(_cell(bootstrap(lambda f, m, t: (m - f) / (t - f), full, mine, theirs)))
            print(f"{label:58} " + "  ".join(f"{cell:>26}" for cell in cells))


def _cell(found: tuple[float, float, float]) -> str:
    return f"{found[0]:.3f} [{found[1]:.3f}, {found[2]:.3f}]"


def main() -> None:
    parser = options(__doc__ or "", "results/budgets.jsonl")
    parser.add_argument("--profile", type=pair, action="append", required=True, metavar="KIND=FILE")
    parser.add_argument("--average", type=int, action="append", help="default: 128 256 512")
    parser.add_argument("--texts", nargs="+", default=["novels", "code", "articles"])
    arguments = parser.parse_args()
    averages = arguments.average or [128, 256, 512]
    model, tokenizer = opened(arguments)
    made = []
    for name in arguments.texts:
        texts = {
            "novels": lambda: novels(tokenizer, split(arguments.data)[1], arguments.length, arguments.chunks),
            "code": lambda: code(tokenizer, arguments.length, arguments.chunks),
            "articles": lambda: articles(tokenizer, arguments.data, arguments.length, 1),
        }[name]()
        losses = Losses(model, texts, arguments.batch, ledger_of(arguments, name), name)
        wanted = {"full": "full"} | {f"tova:{2 * a}": f"tova:{2 * a}" for a in averages}
        for average in averages:
            wanted |= labels(arguments.profile, average)
        with progress(len(wanted), name) as bar:
            for policy in wanted.values():
                losses.of(policy)
                bar.update()
        report(losses, arguments.profile, averages, name)
        sizes = {label: (policy, _capacity(policy)) for label, policy in wanted.items()}
        settings = {
            "length": arguments.length,
            "chunks": arguments.chunks,
            "texts": name,
            "profiles": arguments.profile,
        }
        made += records(losses, f"budgets-{name}", sizes, settings)
    save(arguments.out, made)


def _capacity(policy: str) -> int | None:
    size = policy.partition(":")[2].partition(",")[0]
    return int(size) if size else None


if __name__ == "__main__":
    main()
