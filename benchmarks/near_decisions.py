"""How many of a scan's decisions are near, by their place in a text: what a scan's time on a GPU depends on.

    python benchmarks/near_decisions.py --tokens 65536 --rope 10000 --out results/near_decisions.jsonl
    python benchmarks/near_decisions.py --tokens 8192 --attention flat --out results/near_decisions.jsonl
    python benchmarks/near_decisions.py --tokens 8192 --text BOOK.txt --out ...    # a trained model

One layer of the Llama-3-8B shape with `tova`, on a CPU. Queries and keys are as random weights give them, with RoPE of
a given base; each head's queries share a direction unless `--attention flat`, as in `vllm_gpu.py`. With `--text` they
are those of SmolLM2-135M-Instruct, which reads that file in float32 with the same policy in all of its layers.

The Triton scan weighs a row before it knows what leaves in the 16 to 31 rows in front. Where the two least important
tokens are closer than what left may change, the decision is near, and the row is looked at again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm_gpu_engine import STRENGTH

from msrnn.core.attention import Attention
from msrnn.core.recurrence import read
from msrnn.core.slots import Slots
from msrnn.policy import parse_policy
from msrnn.system.provenance import command, commit, machine, now, versions

HEADS, KV_HEADS, SIZE = 32, 8, 128
CHUNK, BLOCK, PIECE = 256, 16, 4096  # rows of a chunk, rows that the scan prepares at a time, tokens of a record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capacity", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--rope", type=float, help="base of RoPE; none if not given")
    parser.add_argument("--attention", choices=sorted(STRENGTH), help="default: steady")
    parser.add_argument("--text", type=Path, help="a text for a trained model to read, instead of random tokens")
    parser.add_argument("--layers", type=int, nargs="+", help="of the trained model; all by default")
    parser.add_argument("--every", type=int, default=4, help="look at one chunk in so many")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.text and (options.attention or options.rope):
        parser.error(
            "--text: a trained model has a RoPE and an attention of its own, so neither --rope nor --attention"
        )
    options.attention = options.attention or "steady"
    about = {"date": now(), "commit": commit(), "machine": machine(torch.device("cpu")), "versions": versions()}
    about |= {"command": command(), "kind": "near decisions", "policy": f"tova:{options.capacity}"}
    for counted in trained(options) if options.text else random(options):
        where = f"layer {counted['layer']}, " if "layer" in counted else ""
        shown = f"{where}tokens {counted['from']:6,} to {counted['to']:6,}"
        print(f"{shown}: {counted['near']:.3f} of {counted['decisions']:,}", flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(about | counted) + "\n")


def random(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Random tokens, a record for each piece."""
    layer = Layer(options.capacity, HEADS, KV_HEADS, SIZE)
    for start in range(0, options.tokens, PIECE):
        about = {"attention": options.attention, "rope_theta": options.rope}
        yield about | layer.feed(tokens(start, options), options.every)


def trained(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A text as SmolLM2 reads it, a record for each piece and layer."""
    import msrnn

    model, tokenizer = msrnn.load(dtype="float32")
    ids = tokenizer(options.text.read_text(), add_special_tokens=False, verbose=False)["input_ids"][: options.tokens]
    if len(ids) < options.tokens or options.tokens % PIECE:
        raise SystemExit(
            f"--tokens {options.tokens}: it must be a multiple of {PIECE}, and {options.text} has {len(ids)}"
        )
    config, cache = model.config, msrnn.cache(model, f"tova:{options.capacity}", chunk=CHUNK)
    about = {"attention": "SmolLM2-135M-Instruct", "rope_theta": config.rope_parameters["rope_theta"]}
    about["text"] = options.text.stem
    sizes = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    counts: dict[int, dict[str, Any]] = {}
    for number in options.layers or range(config.num_hidden_layers):
        _count_calls(cache.layers[number], Layer(options.capacity, *sizes), number, options.every, counts)
    for start in range(0, options.tokens, PIECE):
        piece = torch.tensor([ids[start : start + PIECE]])
        with torch.no_grad():
            model(piece, past_key_values=cache, logits_to_keep=1)
        yield from (about | {"layer": number} | found for number, found in sorted(counts.items()))


def _count_calls(held: Any, layer: Layer, number: int, every: int, counts: dict[int, dict[str, Any]]) -> None:
    """Every call of a layer of the cache is counted by `layer`, which reads the same tokens beside it."""
    attend = held.attend

    def counting(query: Tensor, attention: Attention, real: Tensor | None) -> Tensor:
        key, value = held.pending
        counts[number] = layer.feed((query[0], key[0], value[0]), every)
        return attend(query, attention, real)

    held.attend = counting


def tokens(start: int, options: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    """query [H, T, D], key and value [G, T, D] of the next piece."""
    generator = torch.Generator().manual_seed(start)
    query, key, value = (
        1.28 * torch.randn(heads, PIECE, SIZE, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    if options.attention != "flat":
        slow = SIZE // 2 * 5 // 8
        shared = torch.randn(HEADS, 1, 2, SIZE // 2 - slow, generator=torch.Generator().manual_seed(9))
        query.view(HEADS, PIECE, 2, SIZE // 2)[..., slow:] += STRENGTH[options.attention] * shared
    if options.rope:
        query, key = (_rotate(tensor, start, options.rope) for tensor in (query, key))
    return query, key, value


def _rotate(rows: Tensor, start: int, base: float) -> Tensor:
    angles = torch.arange(start, start + PIECE)[:, None] * base ** (-torch.arange(SIZE // 2) / (SIZE // 2))
    a, b = rows.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


class Layer:
    """One layer's state, and all keys so far by position."""

    def __init__(self, capacity: int, heads: int, kv_heads: int, size: int) -> None:
        self.policy, self.attention = parse_policy(f"tova:{capacity}"), Attention(size**-0.5)
        self.heads, self.keys = heads, torch.empty(kv_heads, 0, size)
        self.slots: Slots | None = None

    def feed(self, new: tuple[Tensor, Tensor, Tensor], every: int) -> dict[str, Any]:
        """Read a piece -> its place, the number of decisions in the chunks looked at, and the share of near ones."""
        query, key, value = new
        first, self.keys = self.keys.shape[1], torch.cat([self.keys, key], 1)
        if self.slots is None:
            self.slots = Slots.empty(self.policy, key[None], value[None], self.heads)
        near = decisions = 0
        for start in range(0, PIECE, CHUNK):
            part = slice(start, start + CHUNK)

            def look(positions: Tensor, expiry: Tensor, part: slice = part, step: int = first + start) -> None:
                nonlocal near, decisions
                if step // CHUNK % every == 0:
                    found = self._near(query[:, part], positions[0, 0], expiry[0, 0], step)
                    near, decisions = near + found[0], decisions + found[1]

            q, k, v = (tensor[None, :, part] for tensor in (query, key, value))
            read(self.slots, q, k, v, self.policy, self.attention, chunk=CHUNK, on_evict=look)
        return {"from": first, "to": first + PIECE, "near": near / max(1, decisions), "decisions": decisions}

    def _near(self, query: Tensor, positions: Tensor, expiry: Tensor, step: int) -> tuple[int, int]:
        """query [H, C, D]; positions, expiry [N] of the columns of the chunk that begins at `step`."""
        used = positions >= 0
        positions, expiry = positions[used], expiry[used]
        kv_heads, _, size = self.keys.shape
        grouped = query.reshape(kv_heads, -1, size) @ self.keys[:, positions].mT
        logits = grouped.view(self.heads, CHUNK, -1) * self.attention.scale
        decisions = [self._decision(logits[:, row], positions, expiry, step, row) for row in range(CHUNK)]
        return decisions.count(True), sum(decision is not None for decision in decisions)

    def _decision(self, logits: Tensor, positions: Tensor, expiry: Tensor, step: int, row: int) -> bool | None:
        """Whether a row's decision is near; None where nobody has to leave. logits [H, N]."""
        now, since = step + row, step + max(0, (row // BLOCK - 1) * BLOCK)
        arrived = positions <= now
        present = arrived & (expiry >= now)
        if self.policy.capacity is None or int(present.sum()) <= self.policy.capacity:
            return None
        prepared = arrived & (expiry >= since)
        weights = logits.masked_fill(~prepared, -torch.inf).softmax(-1)
        lost = float(weights.amax(0)[prepared & ~present].sum())
        lowest, second = weights.mean(0).masked_fill(~present, torch.inf).topk(2, largest=False).values.tolist()
        return not (second * (1 - lost) > lowest * (1 + 1e-5) and lost <= 0.5)


if __name__ == "__main__":
    main()
