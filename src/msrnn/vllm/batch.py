"""One layer's attention for a batch of requests as vLLM schedules it. Nothing here imports vLLM."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from ..core.attention import Attention
from ..core.recurrence import read, step
from ..core.slots import Slots
from ..policy import Policy
from .block import clear, one_request


@dataclass
class Batch:
    """The first `steps` requests have one new token (decode), the others more (prefill).

    blocks [R], seen [R] (tokens before this batch), starts [R + 1] (where a request's new tokens begin). `begins`: one
    of the steps may be a request's first token. The lists are empty where reading them would wait for the device.
    """

    steps: int
    begins: bool
    blocks: Tensor
    seen: Tensor
    starts: list[int]
    block_list: list[int]
    seen_list: list[int]


class StaticInputs:
    """Where `blocks` and `seen` of every batch lie on the device: a CUDA graph reads the addresses of its capture."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.memory = torch.zeros(2, rows, dtype=torch.int64, device=device)

    def put(self, blocks: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        """blocks, seen [R] of the next batch -> copies at the same addresses for every batch of R requests."""
        rows = self.memory[:, : len(blocks)]
        return rows[0].copy_(blocks), rows[1].copy_(seen)


def batch_of(blocks: Tensor, seen: Tensor, starts: list[int]) -> Batch:
    """blocks, seen [R], on the device; starts, on the host. A batch of steps on a GPU never waits for it."""
    lengths = [end - start for start, end in pairwise(starts)]
    steps = next((row for row, length in enumerate(lengths) if length > 1), len(lengths))
    on_host = steps < len(lengths) or blocks.device.type == "cpu"
    block_list, seen_list = (blocks.tolist(), seen.tolist()) if on_host else ([], [])
    begins = 0 in seen_list[:steps] if on_host else True
    return Batch(steps, begins, blocks, seen, starts, block_list, seen_list)


def attend(
    blocks: Slots,
    batch: Batch,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    policy: Policy,
    attention: Attention,
    output: Tensor,
) -> None:
    """query [tokens, H, D], key [tokens, G, D], value [tokens, G, V] -> output [tokens, H, V], filled in place."""
    if batch.steps:
        rows = slice(0, batch.steps)
        index, seen = batch.blocks[rows], batch.seen[rows]
        if batch.begins:
            clear(blocks, index, seen)
        slots = replace(blocks, rows=index, seen=seen)
        step(slots, query[rows], key[rows], value[rows], policy, attention, out=output[rows])
    for row in range(batch.steps, len(batch.starts) - 1):
        part, seen = slice(batch.starts[row], batch.starts[row + 1]), batch.seen[row : row + 1]
        if batch.seen_list[row] == 0:
            clear(blocks, batch.blocks[row : row + 1], seen)
        slots = one_request(blocks, batch.block_list[row], batch.seen_list[row])
        q, k, v = (tensor[part].transpose(0, 1)[None] for tensor in (query, key, value))
        output[part] = read(slots, q, k, v, policy, attention)[0].transpose(0, 1)
