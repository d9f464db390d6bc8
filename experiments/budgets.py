"""Capacities by layer on held-out books, and on other kinds of text.

    python experiments/budgets.py --data DATA --profile tova=tova.json --profile KIND=preset.json

For each average: the gap of perplexity to full for TOVA, for each KIND, and for each KIND with its profile, and the
ratio of that gap to TOVA's at the same and at twice the memory. On the held-out half of the books (see books.py), on
Python's standard library and on the articles of QASPER. Intervals resample whole books, modules or articles.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from books import (
    Losses,
    articles,
    code,
    interval,
    load_model,
    measurements_path,
    novels,
    options,
    progress,
    records,
    save,
    show,
    split,
)

from msrnn.budgets.profile import check_policy_kind, read_profile
from msrnn.policy import split_policy


def at(kind: str, capacity: int, profile: str | None = None) -> str:
    return str(replace(split_policy(kind), size=str(capacity), profile=profile))


def kind_and_profile(text: str) -> tuple[str, str]:
    kind, equals, file = text.rpartition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: write KIND=FILE, e.g. tova=profile.json")
    read_profile(file)
    check_policy_kind(kind)
    return kind, file


def labels(profiles: Sequence[tuple[str, str]], average: int) -> dict[str, str]:
    """The policies to compare at one average: {name in the tables: policy}."""
    policies = {f"tova:{average}": f"tova:{average}"}
    for kind, file in profiles:
        policies[at(kind, average)] = at(kind, average)
        policies[f"{at(kind, average)} + profile"] = at(kind, average, file)
    return policies


def report(losses: Losses, profiles: Sequence[tuple[str, str]], averages: Sequence[int], name: str) -> None:
    full = losses.of("full")
    print(f"\n{name}: {len(losses.texts)} texts, full {interval(lambda p: p, full)[0]:.3f}")
    print(f"{'policy':58} {'gap to full':>26}  {'over gap of tova':>26}  {'over gap of tova at twice':>26}")
    for average in averages:
        for label, policy in labels(profiles, average).items():
            sums = losses.of(policy)
            cells = [show(interval(lambda f, p: p - f, full, sums))]
            for size in (average, 2 * average):
                tova = losses.of(f"tova:{size}")
                cells.append(show(interval(lambda f, p, t: (p - f) / (t - f), full, sums, tova)))
            print(f"{label:58} " + "  ".join(f"{cell:>26}" for cell in cells))


def main() -> None:
    parser = options(__doc__ or "", "results/budgets.jsonl")
    parser.add_argument("--profile", type=kind_and_profile, action="append", required=True, metavar="KIND=FILE")
    parser.add_argument("--average", type=int, action="append", help="default: 128 256 512")
    parser.add_argument("--texts", nargs="+", default=["novels", "code", "articles"])
    arguments = parser.parse_args()
    averages = arguments.average or [128, 256, 512]
    model, tokenizer = load_model(arguments)
    results = []
    for name in arguments.texts:
        texts = {
            "novels": lambda: novels(tokenizer, split(arguments.data)[1], arguments.length, arguments.chunks),
            "code": lambda: code(tokenizer, arguments.length, arguments.chunks),
            "articles": lambda: articles(tokenizer, arguments.data, arguments.length, 1),
        }[name]()
        losses = Losses(model, texts, arguments.batch, measurements_path(arguments, name), name)
        policies = {"full": "full"} | {f"tova:{2 * a}": f"tova:{2 * a}" for a in averages}
        for average in averages:
            policies |= labels(arguments.profile, average)
        with progress(len(policies), name) as bar:
            for policy in policies.values():
                losses.of(policy)
                bar.update()
        report(losses, arguments.profile, averages, name)
        sizes = {label: (policy, _slots(policy)) for label, policy in policies.items()}
        settings = {
            "length": arguments.length,
            "chunks": arguments.chunks,
            "texts": name,
            "profiles": arguments.profile,
        }
        results += records(losses, f"budgets-{name}", sizes, settings)
    save(arguments.out, results)


def _slots(policy: str) -> int | None:
    size = split_policy(policy).size
    return int(size) if size else None


if __name__ == "__main__":
    main()
