"""Is a capacity for every KV head worth more than one for every layer? Both at the same number of slots in all.

    python experiments/head_budgets.py --data DATA --dtype float32 --length 2048 --average 128 --average 256

On the choosing half of the books (see books.py). Curves come from one forward and one backward pass per chunk: what
the output of each head loses with so many slots while everything else is full, D, and the gradient of the loss at
that output, g, give the second-order estimate sum (g D)^2 / 2. Slots are then allocated along these curves, by layer
and by KV head, and both are measured on other books. Each KV head has slots of its own here, so every capacity is
exact: the simplest way to hold unequal heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from books import SEED, Sums, Texts, interval, load_model, novels, options, save, show, split
from torch import Tensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from msrnn.budgets.allocate import allocate
from msrnn.budgets.profile import plan_for
from msrnn.core.attention import Attention
from msrnn.core.recurrence import read
from msrnn.core.slots import Slots
from msrnn.eval.record import Record
from msrnn.hf.geometry import geometry
from msrnn.hf.identity import profile_identity
from msrnn.policy import parse_policy
from msrnn.system import provenance

NAME = "msrnn_head_budgets"
GRID = (16, 32, 64, 128, 256, 512, 1024, 2048)


class Probe:
    """An attention function: full, with the losses of every head's output noted, or bounded by head."""

    def __init__(self, kind: str, grid: Sequence[int]) -> None:
        self.kind, self.grid = kind, grid
        self.capacities: list[list[int]] | None = None  # [layers][KV heads]; None: full, and losses are noted
        self.differences: dict[tuple[int, int], Tensor] = {}
        self.gradients: dict[int, Tensor] = {}

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any
    ) -> Any:
        layer = module.layer_idx
        if self.capacities is not None:
            return self.bounded(query, key, value, scaling, self.capacities[layer]).transpose(1, 2), None
        output = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        with torch.no_grad():
            for size in self.grid:
                bounded = self.bounded(query.detach(), key.detach(), value.detach(), scaling, [size] * key.shape[1])
                self.differences[layer, size] = bounded - output
        output.register_hook(lambda gradient: self.gradients.update({layer: gradient}))
        return output.transpose(1, 2), None

    def bounded(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, sizes: Sequence[int]) -> Tensor:
        """[B, H, T, D]: every KV head with slots of its own."""
        share, outputs = query.shape[1] // key.shape[1], []
        for head, size in enumerate(sizes):
            policy = parse_policy(f"{self.kind}:{size}")
            own, heads = slice(head, head + 1), slice(head * share, (head + 1) * share)
            slots = Slots.empty(policy, key[:, own], value[:, own], share)
            outputs.append(read(slots, query[:, heads], key[:, own], value[:, own], policy, Attention(scaling)))
        return torch.cat(outputs, 1)


def curves(model: Any, probe: Probe, chunks: Sequence[Tensor], kv_heads: int) -> np.ndarray:
    """[layers, KV heads, grid]: estimated nats per token, over the second half of the chunks."""
    total: Any = 0.0
    for row in chunks:
        ids = row.to(model.device)
        embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
        logits = model(inputs_embeds=embeddings, use_cache=False).logits[0, :-1]
        cross_entropy(logits.float(), ids[0, 1:], reduction="sum").backward()
        half = ids.shape[1] // 2
        total = total + np.array(
            [
                [_second_order(probe, layer, size, half, kv_heads) for size in probe.grid]
                for layer in sorted(probe.gradients)
            ]
        )
    return np.moveaxis(total, 2, 1) / len(chunks)


def _second_order(probe: Probe, layer: int, size: int, half: int, kv_heads: int) -> np.ndarray:
    """[KV heads]"""
    products = (probe.gradients[layer] * probe.differences[layer, size])[0, :, half:].sum(-1)  # [H, T]
    by_head = products.view(kv_heads, -1, products.shape[1]).sum(1)
    return (by_head.square().sum(-1) / (2 * products.shape[1])).double().cpu().numpy()


@torch.no_grad()
def losses(model: Any, probe: Probe, texts: Texts, capacities: list[list[int]]) -> Sums:
    """Nats and tokens of the second half of every chunk, by book."""
    probe.capacities, sums = capacities, {}
    for name, chunks in texts.items():
        rows, half = chunks.to(model.device), chunks.shape[1] // 2
        logits = [model(row[None], use_cache=False).logits[0, half - 1 : -1].float() for row in rows]
        nats = [float(cross_entropy(one, row[half:], reduction="sum")) for one, row in zip(logits, rows, strict=True)]
        sums[name] = (sum(nats), rows[:, half:].numel())
    return sums


def by_layer(estimate: np.ndarray, grid: Sequence[int], average: int) -> list[list[int]]:
    rows = [dict(zip(grid, row.tolist(), strict=True)) for row in estimate.sum(1)]
    return [[size] * estimate.shape[1] for size in allocate(rows, average * len(rows))]


def by_head(estimate: np.ndarray, grid: Sequence[int], average: int) -> list[list[int]]:
    rows = [dict(zip(grid, row.tolist(), strict=True)) for layer in estimate for row in layer]
    sizes = allocate(rows, average * len(rows))
    return [sizes[i : i + estimate.shape[1]] for i in range(0, len(sizes), estimate.shape[1])]


def main() -> None:
    parser = options(__doc__ or "", "results/budgets.jsonl")
    parser.add_argument("--average", type=int, action="append", required=True)
    parser.add_argument("--kind", default="fade", help="a policy that decides by KV head")
    parser.add_argument("--profile", default="SmolLM2-135M-Instruct", help="the profile by layer to compare with")
    parser.set_defaults(length=2048, chunks=1)
    arguments = parser.parse_args()
    model, tokenizer = load_model(arguments)
    layers = geometry(model)
    model.requires_grad_(False)
    books = list(novels(tokenizer, split(arguments.data)[0], arguments.length, arguments.chunks).items())
    calibrating, measuring = books[: len(books) * 3 // 7], dict(books[len(books) * 3 // 7 :])
    grid = [size for size in GRID if size <= arguments.length // 2]
    probe = Probe(arguments.kind, grid)
    AttentionInterface.register(NAME, probe)
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)
    model.set_attn_implementation(NAME)
    estimate = curves(model, probe, [row[None] for _, rows in calibrating for row in rows], layers[0].kv_heads)
    full = losses(model, probe, measuring, [[arguments.length] * layers[0].kv_heads] * len(layers))
    print(f"{len(calibrating)} books to calibrate, {len(measuring)} to measure", flush=True)
    results = [_record(arguments, model, "full", None, full, 0.0)]
    for average in arguments.average:
        plan = plan_for(f"{arguments.kind}:{average},profile={arguments.profile}", len(layers))
        candidates = {
            "": [[average] * layers[0].kv_heads] * len(layers),
            " by the shipped profile": [[policy.capacity or 0] * layers[0].kv_heads for policy in plan.policies],
            " by layer, estimated": by_layer(estimate, grid, average),
            " by KV head, estimated": by_head(estimate, grid, average),
        }
        rival: Sums = {}
        for name, sizes in candidates.items():
            sums, longest = losses(model, probe, measuring, sizes), float(np.mean([max(row) for row in sizes]))
            rival = rival or sums
            ratio = show(interval(lambda f, p, r: (p - f) / (r - f), full, sums, rival))
            label = f"{arguments.kind}:{average}{name}"
            print(f"{label:42} longest head of a layer {longest:6.1f}, gap {ratio} of equal capacities", flush=True)
            results.append(_record(arguments, model, label, average, sums, longest))
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
