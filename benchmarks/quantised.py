"""Quantised caches at equal bytes: those of transformers, which hold every token, and slots of fewer bits.

    PYTHONPATH=src:experiments python benchmarks/quantised.py --data DATA --out results/part/quantised.jsonl

The first chunk of every held-out book is read in pieces into a full cache, into transformers' `QuantizedCache` (with
`hqq`, which must be installed, and groups along a token's head, with which it is better than as it comes; `peers.py`
has `quanto`), and into our slots in as many bytes as each of these took:
perplexity, and bytes of keys and values of one text. Then the time of a token at batch 1 after such a chunk, all caches
in turns, since a busy machine has slow seconds. One harness: the model of transformers and its own loop.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from books import novels, split
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import Cache, DynamicCache, QuantizedCache

import msrnn
from msrnn.core.formats import slot_bytes
from msrnn.system import provenance

Start = Callable[[], Cache]
BITS = (8, 4, 2)
NEWEST = 128  # tokens that a `QuantizedCache` holds as they are
KINDS = ("int8", "k8v4")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--piece", type=int, default=64)
    parser.add_argument("--books", type=int, default=0, help="0: all of the held-out half, one after the other")
    parser.add_argument("--steps", type=int, default=24, help="tokens that are timed")
    parser.add_argument("--parts", nargs="+", default=["quality", "time"], choices=["quality", "time"])
    parser.add_argument("--commit", default=None)
    options = parser.parse_args()
    model, tokenizer = msrnn.load(None, dtype=options.dtype, device=options.device)
    texts = novels(tokenizer, split(options.data)[1], options.length, 1)
    ids = torch.cat(list(texts.values()))[: options.books or None].to(options.device)
    if "quality" in options.parts:
        read_all(model, ids, options)
    if "time" in options.parts:
        time_in_turns(model, ids[:1], options)


def read_all(model: Any, ids: Tensor, options: Any) -> None:
    for name, start in caches(model).items():
        held = measure(model, ids, name, start, options)
        if held and name != "full":
            for policy in equal_policies(model, held, options.length):
                measure(model, ids, policy, start_of(model, policy), options, equal=name)


def caches(model: Any) -> dict[str, Start]:
    """What our slots are compared with."""
    names = ["full", *(f"transformers, hqq, {bits} bits" for bits in BITS)]
    return {name: start_of(model, name) for name in names}


def start_of(model: Any, name: str) -> Start:
    if name == "full":
        return lambda: DynamicCache(config=model.config)
    if name.startswith("transformers"):
        settings = {"nbits": int(name.split()[-2]), "axis_key": 1, "axis_value": 1, "residual_length": NEWEST}
        return lambda: QuantizedCache("hqq", model.config, **settings)
    return lambda: msrnn.cache(model, name)


def token_bytes(model: Any, kv: Any) -> int:
    """Bytes of a token's keys and values in all layers."""
    config = model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers * config.num_key_value_heads * slot_bytes(kv, size, size, torch.bfloat16)


def equal_policies(model: Any, held: float, length: int) -> list[str]:
    return [f"fade:{min(length, int(held / token_bytes(model, kv)))},kv={kv}" for kv in KINDS]


@torch.no_grad()
def measure(model: Any, ids: Tensor, name: str, start: Start, options: Any, equal: str | None = None) -> float | None:
    """Bytes of one text's keys and values in 16 bits or fewer; a record, or the error in its place."""
    try:
        texts = [read(model, text[None], start(), options.piece) for text in ids]
        nll, cache = torch.cat([nats for nats, _ in texts]), texts[0][1]
        held = held_bytes(model, cache, name, ids.shape[1])
    except Exception as error:
        print(f"{name:34} {type(error).__name__}: {str(error)[:200]}", flush=True)
        return None
    record = {"kind": "quality", "cache": name, "equal_bytes_of": equal, "perplexity": float(nll.mean().exp())}
    record |= {"state_bytes": held, "texts": len(ids), "piece": options.piece}
    write(record | {"nll": [round(float(row.sum()), 4) for row in nll]}, ids, options)
    print(f"{name:34} perplexity {record['perplexity']:8.3f}  {held / 2**20:7.2f} MiB  {equal or ''}", flush=True)
    return held


def write(record: dict[str, Any], ids: Tensor, options: Any) -> None:
    record |= {"length": ids.shape[1], "dtype": options.dtype, "model": "SmolLM2-135M-Instruct"}
    record |= {"machine": provenance.machine(ids.device), "date": provenance.now(), "command": provenance.command()}
    record |= {"commit": options.commit or provenance.commit(), "versions": provenance.versions()}
    with options.out.open("a") as file:
        file.write(json.dumps(record) + "\n")


def read(model: Any, ids: Tensor, cache: Cache, piece: int) -> tuple[Tensor, Cache]:
    """Nats of every token but the first, [N, T - 1]."""
    parts = []
    for start in range(0, ids.shape[1], piece):
        some = ids[:, start : start + piece]
        logits = model(some, past_key_values=cache, use_cache=True).logits.float()
        following = ids[:, start + 1 : start + piece + 1]
        parts.append(cross_entropy(logits[:, : following.shape[1]].transpose(1, 2), following, reduction="none"))
    return torch.cat(parts, 1).double(), cache


def held_bytes(model: Any, cache: Cache, name: str, length: int) -> float:
    """Of one text, as a model in 16 bits holds it.

    A `QuantizedCache`: codes, a scale and a zero of 16 bits for every 64, and the newest 128 tokens as they are.
    """
    if ":" in name:
        policy, _, kv = name.partition(",kv=")
        return float(int(policy.partition(":")[2]) * token_bytes(model, kv or None))
    plain = token_bytes(model, None)
    if name == "full":
        return float(length * plain)
    bits = int(name.split()[-2])
    newest = cache.layers[0].keys.shape[-2] if cache.layers[0].keys.dim() == 4 else 0
    return (length - newest) * plain * (bits + 32 / 64) / 16 + newest * plain


@torch.no_grad()
def time_in_turns(model: Any, ids: Tensor, options: Any) -> None:
    """A token of every cache whose quality is on record, again and again, in transformers' own loop."""
    rows = [json.loads(line) for line in options.out.read_text().splitlines()]
    names = dict.fromkeys(row["cache"] for row in rows if row["kind"] == "quality")
    filled = {name: fill(model, ids, start_of(model, name)()) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    for step in range(options.steps + 2):
        for name, cache in filled.items():
            started = time.perf_counter()
            model(ids[:, step : step + 1], past_key_values=cache, use_cache=True).logits[0, -1].argmax().item()
            times[name].append(time.perf_counter() - started)
    for name, seconds in times.items():
        ratios = [a / b for a, b in zip(seconds[2:], times["full"][2:], strict=True)]  # the first two compile
        record = {"kind": "time", "cache": name, "median_s": median(seconds[2:]), "times_full": median(ratios)}
        write(record | {"steps": options.steps}, ids, options)
        print(f"{name:34} {1e3 * record['median_s']:7.2f} ms a token, {record['times_full']:.2f} x full", flush=True)


def fill(model: Any, ids: Tensor, cache: Cache) -> Cache:
    """The text in two calls: a `QuantizedCache` then has half of its newest tokens as they are, as on average.

    With them all, the first step would encode everything again, for which `hqq` wants an even number of groups.
    """
    for part in (ids[:, : -NEWEST // 2], ids[:, -NEWEST // 2 :]):
        model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


if __name__ == "__main__":
    main()
