"""A residual slot for `fade`: one slot holds a mean of what left, so that evicted tokens are not quite gone.

    python experiments/residual.py --data DATA --dtype float32 --length 2048 --chunks 1 --capacity 64

A rule gives scores and cannot change what is attended to, so this is a plain loop beside the recurrence: `fade` by KV
head, token by token, with the last of its slots given to the residual. When a token leaves, the residual's key and
value become their mean with all that left before, each step back weighing `decay` times as much. It has the weight of
one token, or with --by-number that of the (decayed) number of tokens in it. On one half of the books (see books.py),
at equal memory; plain `fade` through the same loop must give the library's own figures.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from books import (
    SEED,
    Sums,
    interval,
    load_model,
    measurements_path,
    novels,
    options,
    perplexity,
    save,
    show,
    split,
)
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AttentionInterface, AttentionMaskInterface

from msrnn.eval.measurements import Measurements
from msrnn.eval.perplexity import token_nll
from msrnn.eval.record import Record
from msrnn.hf.identity import profile_identity
from msrnn.policy import fade
from msrnn.system import provenance

NAME = "msrnn_residual"


@dataclass
class Loop:
    """An attention function: `fade` with `capacity` slots; with a `decay`, one of them is the residual."""

    capacity: int
    decay: float | None = None
    by_number: bool = False  # the residual has the weight of as many tokens as are in it

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any
    ) -> Any:
        dtype = torch.promote_types(query.dtype, torch.float32)  # scores that decay need more than 16 bits
        key, value = key.to(dtype), value.to(dtype)
        state = _State(self, key, value)
        grouped = query.to(dtype).view(*key.shape[:2], -1, *query.shape[2:])  # [B, G, M, T, D]
        rows = [
            state.step(grouped[:, :, :, t], key[:, :, t], value[:, :, t], t, scaling) for t in range(query.shape[2])
        ]
        return torch.stack(rows, 1).flatten(2, 3).to(query.dtype), None  # [B, T, H, D]


class _State:
    """keys, values [B, G, S, D], positions and scores [B, G, S], the next slot [B, G, 1], the residual [B, G, D]."""

    def __init__(self, loop: Loop, key: Tensor, value: Tensor) -> None:
        self.policy, self.decay, self.by_number = fade(loop.capacity), loop.decay, loop.by_number
        self.tokens = loop.capacity - (loop.decay is not None)
        shape = (*key.shape[:2], self.tokens + 1)
        self.keys, self.values = key.new_zeros(*shape, key.shape[3]), value.new_zeros(*shape, value.shape[3])
        self.positions = torch.full(shape, -1)
        self.scores, self.next = key.new_zeros(shape), torch.zeros(*shape[:2], 1, dtype=torch.long)
        self.residual = (key.new_zeros(*shape[:2], key.shape[3]), value.new_zeros(*shape[:2], value.shape[3]))
        self.mass = 0.0

    def step(self, query: Tensor, key: Tensor, value: Tensor, now: int, scaling: float) -> Tensor:
        """query [B, G, M, D], key, value [B, G, D] -> [B, G, M, D]"""
        for rows, new in ((self.keys, key), (self.values, value)):
            rows.scatter_(2, self.next[..., None].expand(-1, -1, 1, rows.shape[3]), new[:, :, None])
        self.positions.scatter_(2, self.next, now)
        self.scores.scatter_(2, self.next, 0.0)
        logits = query @ self.keys.transpose(2, 3) * scaling
        logits = logits.masked_fill((self.positions < 0)[:, :, None], -torch.inf)
        extra = query @ self.residual[0][..., None] * scaling
        if self.by_number and self.mass:
            extra = extra + math.log(self.mass)
        weights = torch.cat([logits, extra if self.mass else torch.full_like(extra, -torch.inf)], -1).softmax(-1)
        held, rest = weights[..., :-1], weights[..., -1:]
        output = held @ self.values + rest * self.residual[1][:, :, None]
        self.scores = self.policy.momentum * self.scores + held.mean(2)
        if now + 1 > self.tokens:
            self._evict(now)
        else:
            self.next = torch.full_like(self.next, now + 1)
        return output

    def _evict(self, now: int) -> None:
        free = (self.positions >= 0) & (self.positions <= now - self.policy.last)
        self.next = self.scores.masked_fill(~free, torch.inf).argmin(-1, keepdim=True)
        self.positions.scatter_(2, self.next, -1)
        if self.decay is None:
            return
        self.mass = self.decay * self.mass + 1
        place = self.next[..., None]
        for mean, rows in zip(self.residual, (self.keys, self.values), strict=True):
            mean += (rows.gather(2, place.expand(-1, -1, 1, rows.shape[3]))[:, :, 0] - mean) / self.mass


@torch.no_grad()
def loop_nll(model: Any, ids: Tensor, loop: Loop) -> Tensor:
    """ids [B, T] -> [B, T - 1]"""
    AttentionInterface.register(NAME, loop)
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        logits = model(ids, use_cache=False).logits[:, :-1]
        return cross_entropy(logits.float().transpose(1, 2), ids[:, 1:], reduction="none")
    finally:
        model.set_attn_implementation(before)


def main() -> None:
    parser = options(__doc__ or "", "results/league.jsonl")
    parser.add_argument("--capacity", type=int, action="append", required=True)
    parser.add_argument("--decay", type=float, action="append", help="default: 1 (all that left), 0.98, 0.9")
    parser.add_argument("--by-number", action="store_true", help="the residual weighs as much as the tokens in it")
    parser.add_argument("--half", choices=("choosing", "reporting"), default="choosing")
    parser.set_defaults(length=2048, chunks=1)
    arguments = parser.parse_args()
    model, tokenizer = load_model(arguments)
    books = novels(tokenizer, split(arguments.data)[arguments.half == "reporting"], arguments.length, arguments.chunks)
    names = [name for name, part in books.items() for _ in part]
    ids = torch.cat(list(books.values()))
    about = {"model": profile_identity(model)["name"], "dtype": str(model.dtype), "books": names}
    path = measurements_path(arguments, f"residual-{arguments.half}")
    measurements = Measurements(path, about | {"length": arguments.length, "chunks": arguments.chunks})

    def sums(label: str, loop: Loop | None) -> Sums:
        if label not in measurements:
            start = time.perf_counter()
            nll = (
                token_nll(model, ids, None if label == "full" else label)
                if loop is None
                else loop_nll(model, ids, loop)
            )
            parts: dict[str, list[float]] = {name: [0.0, 0] for name in names}
            for name, row in zip(names, nll.double(), strict=True):
                parts[name] = [parts[name][0] + float(row.sum()), parts[name][1] + len(row)]
            measurements.add(label, {"sums": parts, "seconds": round(time.perf_counter() - start, 1)})
            print(f"{label}: {perplexity({k: (a, int(b)) for k, (a, b) in parts.items()}):.4f}", flush=True)
        return {name: (nats, int(count)) for name, (nats, count) in measurements[label]["sums"].items()}

    results = {"full": sums("full", None)}
    for size in arguments.capacity:
        results[f"fade:{size}"] = sums(f"fade:{size}", None)
        results[f"fade:{size} in the loop"] = sums(f"fade:{size} in the loop", Loop(size))
        for decay in arguments.decay or (1.0, 0.98, 0.9):
            label = f"fade:{size} with a residual slot, decay {decay:g}{', by number' * arguments.by_number}"
            results[label] = sums(label, Loop(size, decay, arguments.by_number))
            gap = interval(lambda f, a, b: (b - f) / (a - f), results["full"], results[f"fade:{size}"], results[label])
            print(f"{label}: {show(gap)} of fade's gap", flush=True)
    save(arguments.out, [_record(arguments, model, label, sums, measurements) for label, sums in results.items()])


def _record(arguments: Any, model: Any, label: str, sums: Sums, measurements: Measurements) -> Record:
    value, low, high = interval(lambda p: p, sums)
    size = label.partition(":")[2].partition(" ")[0]
    return Record(
        task="residual",
        model=profile_identity(model)["name"],
        policy=label,
        capacity=int(size) if size else None,
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
        seconds=measurements[label]["seconds"],
        peak_bytes=0,
        run=f"residual-{arguments.half}-{arguments.length}-{arguments.chunks}",
        settings={"length": arguments.length, "chunks": arguments.chunks, "half": arguments.half},
        parts={name: {"nll": nats, "tokens": count} for name, (nats, count) in sums.items()},
        command=provenance.command(),
    )


if __name__ == "__main__":
    main()
