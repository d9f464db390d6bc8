"""Which policy is best in the bytes of N plain slots? Candidates for `best:N`, on one half of the books.

    python experiments/best.py --data DATA --dtype bfloat16 --half choosing
        --candidate fade,kv=int8,profile=SmolLM2-135M-Instruct --candidate fade,kv=k8v4

For each number of plain slots: the gap of perplexity to full for `tova` and for every candidate with as many slots as
fit into the same bytes, and its ratio to TOVA's gap. What counts as bytes (--count): `slots`, the keys and values with
their scales, or `state`, positions and scores too; --bytes-in bfloat16 counts those of a bfloat16 model, whatever the
dtype measured in. Every policy is measured once and stored, so that a run that was stopped resumes; after --seconds no
new one starts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from books import Losses, interval, load_model, measurements_path, novels, options, records, save, show, split

from msrnn.budgets.profile import plan_for
from msrnn.hf.cost import cost
from msrnn.hf.geometry import Geometry, geometry
from msrnn.policy import parse_policy, split_policy


def sized(layers: Sequence[Geometry], dtype: torch.dtype, kind: str, slots: int, count: str) -> str:
    """The candidate with as many slots as fit into the bytes of `slots` plain ones of `tova`."""
    text = split_policy(kind)
    if count == "slots":
        kv = parse_policy(replace(text, size="64").policy).kv
        plain, own = (sum(layer.slot_bytes(dtype, kv=one) for layer in layers) for one in (None, kv))
        return text.with_size((slots + 1) * plain // own - 1)
    limit = cost(layers, plan_for(f"tova:{slots}", len(layers)), dtype, 1).state
    fits = (size for size in range(8 * slots, 0, -1) if _bytes(layers, dtype, kind, size) <= limit)
    return text.with_size(next(fits))


def _bytes(layers: Sequence[Geometry], dtype: torch.dtype, kind: str, size: int) -> int:
    uniform = replace(split_policy(kind), size=str(size)).policy
    return cost(layers, plan_for(uniform, len(layers)), dtype, 1).state


def report(losses: Losses, policies: dict[tuple[str, int], str]) -> None:
    """One line per candidate and number of plain slots, of those that are measured."""
    full = losses.of("full")
    print(f"{len(full)} books, full {interval(lambda p: p, full)[0]:.3f}")
    for (_, slots), policy in policies.items():
        if policy in losses.measurements and f"tova:{slots}" in losses.measurements:
            sums, tova = losses.of(policy), losses.of(f"tova:{slots}")
            gap = show(interval(lambda f, p: p - f, full, sums))
            ratio = show(interval(lambda f, p, t: (p - f) / (t - f), full, sums, tova))
            print(f"{slots:5} plain slots  {policy:66} gap {gap:>24}  of tova's {ratio:>24}", flush=True)


def main() -> None:
    parser = options(__doc__ or "", "results/best.jsonl")
    parser.add_argument("--candidate", action="append", required=True, help="a policy without a size")
    parser.add_argument("--slots", type=int, action="append", help="default: 64 128 256 512 1024")
    parser.add_argument("--half", choices=("choosing", "reporting"), default="choosing")
    parser.add_argument("--count", choices=("slots", "state"), default="slots")
    parser.add_argument("--bytes-in", metavar="DTYPE", help="the dtype whose bytes count (default: that of --dtype)")
    parser.add_argument("--seconds", type=float, default=math.inf)
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    model, tokenizer = load_model(arguments)
    books = split(arguments.data)[arguments.half == "reporting"]
    texts = novels(tokenizer, books, arguments.length, arguments.chunks)
    losses = Losses(model, texts, arguments.batch, measurements_path(arguments, arguments.half), arguments.half)
    plain_slots, layers = arguments.slots or [64, 128, 256, 512, 1024], geometry(model)
    dtype = getattr(torch, arguments.bytes_in) if arguments.bytes_in else model.dtype
    policies = {("tova", slots): f"tova:{slots}" for slots in plain_slots}
    for kind in arguments.candidate:
        policies |= {(kind, n): sized(layers, dtype, kind, n, arguments.count) for n in plain_slots}
    for policy in ["full", *policies.values()]:
        if time.monotonic() < deadline:
            losses.of(policy)
    report(losses, policies)
    measured = {"full": ("full", None)} | {
        policy: (policy, slots) for (_, slots), policy in policies.items() if policy in losses.measurements
    }
    settings = {name: getattr(arguments, name) for name in ("length", "chunks", "half", "count")}
    save(arguments.out, records(losses, f"best-{arguments.half}", measured, settings))


if __name__ == "__main__":
    main()
