"""Quantised caches at equal bytes: those of transformers, which hold every token, and slots of fewer bits.

    PYTHONPATH=src:experiments python benchmarks/quantised.py --data DATA --out results/part/quantised.jsonl

The first chunk of every held-out book is read in pieces into a full cache, into transformers' `QuantizedCache` (with
`hqq`, which must be installed; `peers.py` has `quanto`), and into our slots in as many bytes as each of these took.
Perplexity, bytes of keys and values of one text, and the time of a token at batch 1 after a whole chunk: one harness,
the model of transformers and its own loop.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
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
KINDS = ("int8", "k8v4")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--piece", type=int, default=64)
    parser.add_argument("--books", type=int, default=0, help="0: all of the held-out half")
    parser.add_argument("--steps", type=int, default=24, help="tokens that are timed")
    parser.add_argument("--commit", default=None)
    options = parser.parse_args()
    model, tokenizer = msrnn.load(None, dtype=options.dtype, device=options.device)
    texts = novels(tokenizer, split(options.data)[1], options.length, 1)
    ids = torch.cat(list(texts.values()))[: options.books or None].to(options.device)
    for name, start in caches(model):
        bytes_of_peer = measure(model, ids, name, start, options)
        if bytes_of_peer and name != "full":
            for policy in equal_policies(model, bytes_of_peer, options.length):
                measure(model, ids, policy, lambda policy=policy: msrnn.cache(model, policy), options, equal=name)
    measure(model, ids, "tova:256", lambda: msrnn.cache(model, "tova:256"), options)
    plain = 256 * token_bytes(model, None)
    for policy in equal_policies(model, plain, options.length):
        measure(model, ids, policy, lambda policy=policy: msrnn.cache(model, policy), options, equal="tova:256")


def caches(model: Any) -> Iterator[tuple[str, Start]]:
    yield "full", lambda: DynamicCache(config=model.config)
    for bits in BITS:
        yield f"transformers, hqq, {bits} bits", lambda bits=bits: QuantizedCache("hqq", model.config, nbits=bits)


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
        nll, cache = read(model, ids[:1], start(), options.piece)
        held = held_bytes(model, cache, name, ids.shape[1])
        times = {"median_s": time_of_token(model, ids[:1], cache, options.steps)}
        if len(ids) > 1:
            nll = torch.cat((nll, read(model, ids[1:], start(), options.piece)[0]))
    except Exception as error:
        print(f"{name:34} {type(error).__name__}: {str(error)[:200]}", flush=True)
        return None
    record = {"cache": name, "equal_bytes_of": equal, "perplexity": float(nll.mean().exp()), "state_bytes": held}
    record |= times | {"length": ids.shape[1], "texts": len(ids), "piece": options.piece, "dtype": options.dtype}
    record |= {"nll": [round(float(row.sum()), 4) for row in nll], "model": "SmolLM2-135M-Instruct"}
    record |= {"machine": provenance.machine(ids.device), "date": provenance.now(), "command": provenance.command()}
    record |= {"commit": options.commit or provenance.commit(), "versions": provenance.versions()}
    with options.out.open("a") as file:
        file.write(json.dumps(record) + "\n")
    print(f"{name:34} perplexity {record['perplexity']:8.3f}  {held / 2**20:7.2f} MiB  "
          f"{1e3 * times['median_s']:7.2f} ms a token  {equal or ''}", flush=True)  # fmt: skip
    return held


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
    if "kv=" in name or ":" in name:
        policy, _, kv = name.partition(",kv=")
        return float(int(policy.partition(":")[2]) * token_bytes(model, kv or None))
    plain = token_bytes(model, None)
    if name == "full":
        return float(length * plain)
    bits = int(name.split()[-2])
    newest = cache.layers[0].keys.shape[-2] if cache.layers[0].keys.dim() == 4 else 0
    return (length - newest) * plain * (bits + 32 / 64) / 16 + newest * plain


def time_of_token(model: Any, ids: Tensor, cache: Cache, steps: int) -> float:
    """Seconds of a single token after what the cache has read, in transformers' own loop."""
    times = []
    for step in range(steps):
        started = time.perf_counter()
        model(ids[:, step : step + 1], past_key_values=cache, use_cache=True).logits[0, -1].argmax().item()
        times.append(time.perf_counter() - started)
    return median(times)


if __name__ == "__main__":
    main()
