"""Is a capacity for every KV head worth more than one for every layer? Both at the same number of slots in all.

    python experiments/head_budgets.py --data DATA --dtype float32 --length 2048 --average 64 --average 230

On the choosing half of the books (see books.py): the curves of all KV heads are estimated on three of seven books
(`msrnn/budgets/estimate.py`), slots are allocated along them by layer and by KV head, and both are measured on the
other books, in the second half of each chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from books import SEED, Sums, Texts, interval, load_model, measurements_path, novels, options, save, show, split

from msrnn.budgets.allocate import allocate
from msrnn.budgets.by_head import HeadCurves, head_curves
from msrnn.budgets.calibrate import Capacities, Meter, Settings, default_grid
from msrnn.budgets.profile import allocate_average, read_profile
from msrnn.eval.record import Record
from msrnn.hf.identity import profile_identity
from msrnn.system import provenance


def meter(model: Any, arguments: Any, texts: Texts, name: str) -> Meter:
    settings = Settings(arguments.kind, default_grid(arguments.length), 0, arguments.batch)
    return Meter(model, torch.cat(list(texts.values())), settings, measurements_path(arguments, f"heads-{name}"))


def by_layer(curves: HeadCurves, average: int) -> list[int]:
    """Along the sum of each layer's curves."""
    sums = [{size: sum(curve[size] for curve in layer) for size in layer[0]} for layer in curves]
    return allocate(sums, average * len(sums))


def by_head(curves: HeadCurves, average: int) -> tuple[tuple[int, ...], ...]:
    pairs = [[[[size, loss] for size, loss in curve.items()] for curve in layer] for layer in curves]
    return tuple(map(tuple, allocate_average(pairs, average)))  # type: ignore[arg-type]


def losses(measuring: Meter, texts: Texts, capacities: Capacities) -> Sums:
    """Nats and tokens of the second half of every chunk, by book."""
    measuring.loss(capacities)
    nats = iter(measuring.measurements[capacities]["nll"])
    tokens = int(measuring.counted[0].sum())
    return {name: (sum(next(nats) for _ in rows) * tokens, tokens * len(rows)) for name, rows in texts.items()}


def longest(capacities: Sequence[int | Sequence[int]]) -> float:
    """The largest head of a layer, on average over layers."""
    return float(np.mean([size if isinstance(size, int) else max(size) for size in capacities]))


def main() -> None:
    parser = options(__doc__ or "", "results/budgets.jsonl")
    parser.add_argument("--average", type=int, action="append", required=True)
    parser.add_argument("--kind", default="fade", help="a policy that decides by KV head")
    parser.add_argument("--profile", default="SmolLM2-135M-Instruct", help="the profile by layer to compare with")
    parser.set_defaults(length=2048, chunks=1, batch=1)
    arguments = parser.parse_args()
    model, tokenizer = load_model(arguments)
    books = list(novels(tokenizer, split(arguments.data)[0], arguments.length, arguments.chunks).items())
    first = max(1, len(books) * 3 // 7)
    calibrating, texts = dict(books[:first]), dict(books[first:])
    curves = head_curves(meter(model, arguments, calibrating, "curves"))
    measuring = meter(model, arguments, texts, "losses")
    full = losses(measuring, texts, (None,) * len(curves))
    print(f"{len(calibrating)} books to calibrate, {len(texts)} to measure", flush=True)
    results = [_record(arguments, model, "full", None, full, 0.0)]
    for average in arguments.average:
        equal = (average,) * len(curves)
        candidates: dict[str, Any] = {
            "": equal,
            " by the shipped profile": tuple(read_profile(arguments.profile, average)),
            " by layer, estimated": tuple(by_layer(curves, average)),
            " by KV head, estimated": by_head(curves, average),
        }
        for name, sizes in candidates.items():
            sums, rival = losses(measuring, texts, sizes), losses(measuring, texts, equal)
            ratio = show(interval(lambda f, p, r: (p - f) / (r - f), full, sums, rival))
            label = f"{arguments.kind}:{average}{name}"
            print(f"{label:42} longest head {longest(sizes):6.1f}, gap {ratio} of equal capacities", flush=True)
            results.append(_record(arguments, model, label, average, sums, longest(sizes)))
    save(arguments.out, results)


def _record(arguments: Any, model: Any, label: str, average: int | None, sums: Sums, longest: float) -> Record:
    value, low, high = interval(lambda p: p, sums)
    return Record(
        task="budgets-heads",
        model=profile_identity(model)["name"],
        policy=label,
        capacity=average,
        metric="perplexity",
        value=value,
        low=low,
        high=high,
        samples=len(sums) * arguments.chunks,
        groups=len(sums),
        seed=SEED,
        dtype=str(model.dtype).removeprefix("torch."),
        machine=provenance.machine(model.device),
        versions=provenance.versions(),
        commit=provenance.commit(),
        date=provenance.now(),
        seconds=0.0,
        peak_bytes=0,
        run=f"budgets-heads-{arguments.length}-{arguments.chunks}",
        settings={"length": arguments.length, "chunks": arguments.chunks, "longest": longest, "half": "choosing"},
        parts={name: {"nll": nats, "tokens": count} for name, (nats, count) in sums.items()},
        command=provenance.command(),
    )


if __name__ == "__main__":
    main()
