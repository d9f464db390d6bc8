"""Budgets by KV head for recall, and for both goals: profiles from the estimates of single chunks.

    msrnn calibrate --by head --policy fade --for recall ... -o recall.json      # estimates chunks, and may be cut off
    python experiments/recall_budgets.py recall.json.measured.jsonl -o FOLDER    # FOLDER/recall.json, FOLDER/both.json
    python experiments/recall_budgets.py --show FOLDER/both.json 562             # how far it is from the one that ships

`both` is the mean of these curves and of those of the profile that ships, which are for perplexity.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from msrnn.budgets.by_head import continued
from msrnn.budgets.estimate import combine
from msrnn.budgets.profile import allocate_average, open_profile, read_profile

SHIPPED = "SmolLM2-135M-Instruct-heads"
Curves = list[list[list[list[float]]]]  # by layer and KV head, as profiles have them
Estimates = dict[str, Any]  # alone, together: [layers, KV heads, sizes], the mean over chunks


def recall_estimates(path: Path) -> tuple[Estimates, list[int], int]:
    lines = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    chunks = [line for line in lines if line["key"][0] == "chunk"]
    means = {name: np.mean([line["result"][name] for line in chunks], axis=0) for name in ("alone", "together")}
    return means, chunks[0]["key"][2], len(chunks)


def chunk_length(path: Path) -> int:
    return int(json.loads(path.read_text().splitlines()[0])["conditions"]["shape"][1])


def curves_of(estimates: Estimates, sizes: list[int], length: int) -> Curves:
    curves = []
    for singles, shares in zip(estimates["alone"].tolist(), estimates["together"].tolist(), strict=True):
        heads = [combine(one, other, sizes) for one, other in zip(singles, shares, strict=True)]
        layer = [continued(dict(zip(sizes, losses, strict=True)), None, length) for losses in heads]
        curves.append([[[size, loss] for size, loss in sorted(curve.items())] for curve in layer])
    return curves


def mean(one: Curves, other: Curves) -> Curves:
    """Each with the same weight; behind the end of the first there is no loss."""
    layers = zip(one, other, strict=True)
    return [[_mean(*curves) for curves in zip(*pair, strict=True)] for pair in layers]


def _mean(one: list[list[float]], other: list[list[float]]) -> list[list[float]]:
    losses = dict(map(tuple, one))
    return [[size, (losses.get(size, 0.0) + loss) / 2] for size, loss in other]


def write(folder: Path, goal: str, curves: Curves, sizes: list[int], chunks: int, average: int) -> None:
    shipped = open_profile(SHIPPED)
    kept = {name: shipped[name] for name in ("kind", "msrnn", "policy", "model", "dtype", "by")}
    sums = {"average": average, "capacities": allocate_average(curves, average)}
    profile = kept | sums | {"for": goal, "grid": sizes, "curves": curves, "text": {"chunks with facts": chunks}}
    path = folder / f"{goal}.json"
    path.write_text(json.dumps(profile))
    print(f"{path}: from {chunks} chunks with facts")


def show(path: Path, average: int) -> None:
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
    parser.add_argument("measured", type=Path, nargs="?")
    parser.add_argument("-o", "--out", type=Path)
    parser.add_argument("--average", type=int, default=562, help="slots of a KV head on average")
    parser.add_argument("--show", nargs=2, metavar=("PROFILE", "AVERAGE"))
    arguments = parser.parse_args()
    if arguments.show:
        show(Path(arguments.show[0]), int(arguments.show[1]))
        return
    if arguments.measured is None or arguments.out is None:
        parser.error("give the file of measurements, and -o FOLDER")
    recall, sizes, chunks = recall_estimates(arguments.measured)
    arguments.out.mkdir(parents=True, exist_ok=True)
    own = curves_of(recall, sizes, chunk_length(arguments.measured))
    both = mean(own, open_profile(SHIPPED)["curves"])
    write(arguments.out, "recall", own, sizes, chunks, arguments.average)
    write(arguments.out, "both", both, sizes, chunks, arguments.average)


if __name__ == "__main__":
    main()
