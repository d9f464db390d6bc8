"""A profile for both goals: the mean of the curves for recall and of those that ship, which are for perplexity.

python experiments/recall_budgets.py SmolLM2-135M-Instruct-recall -o both.json
python experiments/recall_budgets.py both.json --show 562          # how far it is from the one that ships
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from msrnn.budgets.profile import allocate_average, open_profile, read_profile

SHIPPED = "SmolLM2-135M-Instruct-heads"
Curve = list[list[float]]  # losses by size, as profiles have them


def mean(one: Curve, other: Curve) -> Curve:
    """Each with the same weight, at the sizes of the other; behind its end the first has no loss."""
    sizes, losses = np.array(sorted(one)).T
    return [[size, (float(np.interp(np.log(size), np.log(sizes), losses, right=0)) + loss) / 2] for size, loss in other]


def both(recall: dict[str, Any], shipped: dict[str, Any]) -> dict[str, Any]:
    layers = zip(recall["curves"], shipped["curves"], strict=True)
    curves = [[mean(*pair) for pair in zip(*heads, strict=True)] for heads in layers]
    average = recall["average"]
    sums = {"for": "both", "curves": curves, "capacities": allocate_average(curves, average)}
    return {name: entry for name, entry in recall.items() if name not in ("losses", "allocations")} | sums


def show(path: str, average: int) -> None:
    own, shipped = (np.array(read_profile(name, average)) for name in (path, SHIPPED))
    print("layer: slots of its KV heads, and those of the profile that ships")
    for layer, (one, other) in enumerate(zip(own, shipped, strict=True)):
        print(f"{layer:5}: {one.tolist()!s:24} {other.tolist()}")
    moved = np.abs(own - shipped).sum() / 2 / shipped.sum()
    print(f"{moved:.2f} of all slots are elsewhere; rank correlation {_rank_correlation(own, shipped):.2f}")


def _rank_correlation(one: Any, other: Any) -> float:
    ranks = [np.argsort(np.argsort(each.ravel())) for each in (one, other)]
    return float(np.corrcoef(*ranks)[0, 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", help="made with `msrnn calibrate --by head --for recall`")
    parser.add_argument("-o", "--out", type=Path)
    parser.add_argument("--show", type=int, metavar="AVERAGE", help="slots of a KV head on average")
    arguments = parser.parse_args()
    if not (arguments.show or arguments.out):
        parser.error("give -o FILE, or --show AVERAGE")
    if arguments.show:
        show(arguments.profile, arguments.show)
    if arguments.out:
        arguments.out.write_text(json.dumps(both(open_profile(arguments.profile), open_profile(SHIPPED))))


if __name__ == "__main__":
    main()
