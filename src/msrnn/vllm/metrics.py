"""Tokens held, read and evicted, counted in the blocks themselves and published at /metrics with vLLM's own numbers.

The blocks are in the worker, /metrics is in the front end. prometheus_client carries numbers from one to the other
through files in PROMETHEUS_MULTIPROC_DIR, which `msrnn serve` sets; without it these metrics are off.
"""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor

from ..core.slots import Slots

_FOLDER = "PROMETHEUS_MULTIPROC_DIR"


class Meter:
    """Counts one layer's blocks before each batch, so a request's last step is counted with the next batch or never."""

    def __init__(self, blocks: Slots, capacity: int, request_bytes: int) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        def gauge(name: str, about: str) -> Any:
            return Gauge(name, about, multiprocess_mode="livemostrecent")

        self.blocks = blocks
        self.request_bytes = request_bytes
        self.evictions_by_block: dict[int, int] = {}
        self.running: dict[int, tuple[int, int]] = {}
        self.tokens = Counter("msrnn_tokens_seen", "Tokens read by all requests.")
        self.evictions = Counter("msrnn_evictions", "Tokens evicted from requests' states (in the first layer).")
        self.most_seen = gauge("msrnn_request_tokens_seen_max", "Tokens read by the longest request of the last batch.")
        self.most_held = gauge("msrnn_request_tokens_held_max", "Tokens held by the fullest request of the last batch.")
        self.all_held = gauge("msrnn_tokens_held", "Tokens held by the requests of the last batch together.")
        sizes = [2**power for power in range(4, 21)]
        about = "by a request before its last step, once it has ended."
        self.seen_at_end = Histogram("msrnn_request_tokens_seen", f"Tokens read {about}", buckets=sizes)
        sizes = sorted({*(size for size in sizes if size < capacity), capacity})
        self.held_at_end = Histogram("msrnn_request_tokens_held", f"Tokens held {about}", buckets=sizes)
        self.bytes = gauge("msrnn_state_bytes", "Bytes of the states of the last batch's requests, all layers.")
        gauge("msrnn_capacity", "Tokens that a request may hold (in the first layer).").set(capacity)
        gauge("msrnn_request_state_bytes", "Bytes of one request's state, all layers.").set(request_bytes)

    def update(self, index: Tensor, seen: list[int], tokens: int) -> None:
        """index [R]: the blocks of a batch; seen: the tokens that each request had read before it; tokens: new ones."""
        held = (self.blocks.positions[index] >= 0).sum(-1).amax(-1).tolist()
        held = [count if before else 0 for count, before in zip(held, seen, strict=True)]
        self.observe_ends(dict(zip(index.tolist(), zip(seen, held, strict=True), strict=True)))
        for block, (before, count) in self.running.items():
            evictions = before - count
            self.evictions.inc(evictions - min(self.evictions_by_block.get(block, 0), evictions))
            self.evictions_by_block[block] = evictions
        self.tokens.inc(tokens)
        self.most_seen.set(max(seen, default=0))
        self.most_held.set(max(held, default=0))
        self.all_held.set(sum(held))
        self.bytes.set(len(seen) * self.request_bytes)

    def observe_ends(self, running: dict[int, tuple[int, int]]) -> None:
        """running: tokens read and held of each request of this batch, by block.

        A request of the last batch that is not in this one has ended; one that sits out a batch counts twice.
        """
        for block, (before, count) in self.running.items():
            if running.get(block, (0, 0))[0] < before:
                self.seen_at_end.observe(before)
                self.held_at_end.observe(count)
        self.running = running


def enabled() -> bool:
    """Whether this process publishes: metrics are on and it is the first; the others hold parts of the same states."""
    if not os.environ.get(_FOLDER):
        return False
    from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank

    return bool(get_tensor_model_parallel_rank() == 0 and get_pp_group().is_first_rank)
