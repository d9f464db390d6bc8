"""On a GPU a kernel is compiled for the shape of a chunk: the warm-up must have had every shape that requests come to.

Here plans are those of a GPU, and a stand-in for the scan notes what Triton's would be compiled for.
"""

from __future__ import annotations

import random
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from msrnn import kernels
from msrnn.core import head_groups
from msrnn.core.attention import Attention
from msrnn.core.slots import NEVER, Columns
from msrnn.kernels import Scan
from msrnn.plan import parse_layer_policy
from msrnn.vllm import batch as batches
from msrnn.vllm import read_graphs, warmup
from msrnn.vllm.batch import attend, batch_of
from msrnn.vllm.block import Layout

HEADS, KV_HEADS, SIZE, TOKENS, REQUESTS = 2, 2, 8, 2048, 4
BY_HEAD = "fade:300|fade:500", "h2o:801|fade:290", "tova-head:600|tova-head:520"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> set[tuple[object, ...]]:
    """What kernels are compiled for: rows of a scan, and powers of two and divisors of columns."""
    keys: set[tuple[object, ...]] = set()
    compact = kernels.compact

    def scan(logits: Tensor, columns: Columns, steps: Tensor, policy: Any, attention: Attention) -> Scan:
        rows, size = logits.shape[2:]
        keys.add(("scan", policy.momentum == 0, rows, (size - 1).bit_length(), size % 16 == 0))
        kept = columns.positions.argsort(-1).argsort(-1) >= size - policy.capacity
        expiry = torch.where(kept & (columns.positions >= 0), NEVER, -1)
        total = logits.new_ones(*logits.shape[:3], 1)
        return Scan(torch.zeros_like(logits), total, expiry, columns.scores)

    def compact_and_note(positions: Tensor, scores: Any, rows: Any, expiry: Tensor, used: int, end: int) -> None:
        if end not in (0, used):
            keys.add(("compact", scores is None, (used - 1).bit_length()))
        compact(positions, scores, rows, expiry, used, end)

    monkeypatch.setenv("MSRNN_OPS", "eager")
    monkeypatch.setattr(kernels, "scan", scan)
    monkeypatch.setattr(kernels, "compact", compact_and_note)
    monkeypatch.setattr(head_groups, "_together", lambda _: True)
    monkeypatch.setattr(read_graphs, "_graphs", {})
    monkeypatch.setattr(warmup, "_token_counts", {})
    sizes_of = batches.sizes_of
    for module in (batches, warmup):
        monkeypatch.setattr(module, "sizes_of", lambda *arguments: sizes_of(*arguments)._replace(gpu=True))
    return keys


@pytest.mark.parametrize("text", [*BY_HEAD, "h2o:801", "tova:500", "tova:500,gain=value_norm"])
def test_nothing_is_compiled_when_requests_come(text: str, compiled: set[tuple[object, ...]]) -> None:
    """Texts that begin, go on with few or many tokens held, and are past the capacity, alone and together."""
    attention = Attention(SIZE**-0.5)
    layout = Layout(parse_layer_policy(text), HEADS, KV_HEADS, SIZE, SIZE, torch.float32)
    new = [torch.randn(TOKENS, n, SIZE) for n in (HEADS, KV_HEADS, KV_HEADS)]
    warmup.warm_up(layout, *new, attention, requests=REQUESTS, kinds=30)
    before = set(compiled)
    assert before
    blocks = layout.carve(torch.zeros(REQUESTS, layout.nbytes, dtype=torch.uint8))
    rng, seen = random.Random(0), [0] * REQUESTS
    for turn in range(60):
        rows = sorted(rng.sample(range(REQUESTS), rng.randint(1, REQUESTS)))
        seen = [0 if turn % 5 == 0 or rng.random() < 0.3 else count for count in seen]
        sizes = rng.choices([2, 64, 65, 256, 320, 512], k=len(rows)) if turn % 2 else [TOKENS // len(rows)] * len(rows)
        old = [seen[row] for row in rows]
        batch = batch_of(torch.tensor(rows), torch.tensor(old), [0, *accumulate(sizes)], old)
        tokens = [tensor[: sum(sizes)] for tensor in new]
        attend(blocks, batch, *tokens, layout.policy, attention, torch.empty_like(tokens[0]))
        for row, size in zip(rows, sizes, strict=True):
            seen[row] += size
    assert compiled <= before, compiled - before


def test_graphs_that_are_there_serve_another_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that do not are kept: to destroy one frees memory that the others on its stream use."""
    graphs, replaced = {}, []
    monkeypatch.setattr(read_graphs, "_graphs", graphs)
    monkeypatch.setattr(read_graphs, "_replaced", replaced)
    layout = Layout(parse_layer_policy("tova:40"), HEADS, KV_HEADS, SIZE, SIZE, torch.float32).parts[0]
    blocks = layout.carve(torch.zeros(1, layout.nbytes, dtype=torch.uint8))
    new = tuple(torch.zeros(64, n, SIZE) for n in (HEADS, KV_HEADS, KV_HEADS))
    for shapes in ([(1, 16), (2, 16)], [(1, 16)], [(1, 16), (2, 16), (2, 32)]):
        read_graphs.capture(blocks, new, layout.policy, Attention(SIZE**-0.5), shapes, 16)
        (now,) = graphs.values()
        if len(shapes) == 2:
            first = now
        assert (now is first) == (len(shapes) < 3)
    assert replaced == [first]
