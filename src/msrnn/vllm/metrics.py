"""What the blocks really hold, counted in them and published beside vLLM's own numbers at /metrics.

The blocks live in the worker, /metrics in the front end. prometheus_client carries numbers from one to the other
through files in PROMETHEUS_MULTIPROC_DIR, which `msrnn serve` sets; without it there are no such numbers.
"""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor

from ..core.slots import Slots

_FOLDER = "PROMETHEUS_MULTIPROC_DIR"


class Meter:
    """Counts one layer's blocks before each batch; a request's last tokens are seen with the next batch or never."""

    def __init__(self, blocks: Slots, capacity: int, request_bytes: int) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        def gauge(name: str, about: str) -> Any:
            return Gauge(name, about, multiprocess_mode="livemostrecent")

        self.blocks = blocks
        self.request_bytes = request_bytes
        self.evicted: dict[int, int] = {}
        self.running: dict[int, tuple[int, int]] = {}
        self.read = Counter("msrnn_tokens_seen", "Tokens that went through the states of all requests.")
        self.left = Counter("msrnn_evictions", "Tokens that left a request's state (in the first layer).")
        self.seen = gauge("msrnn_request_tokens_seen_max", "Tokens read by the longest request of the last batch.")
        self.held = gauge("msrnn_request_tokens_held_max", "Tokens held by the fullest request of the last batch.")
        self.all_held = gauge("msrnn_tokens_held", "Tokens held by the requests of the last batch together.")
        sizes = [2**power for power in range(4, 21)]
        about = "by a request before its last step, once it has ended."
        self.each_seen = Histogram("msrnn_request_tokens_seen", f"Tokens read {about}", buckets=sizes)
        sizes = sorted({*(size for size in sizes if size < capacity), capacity})
        self.each_held = Histogram("msrnn_request_tokens_held", f"Tokens held {about}", buckets=sizes)
        self.bytes = gauge("msrnn_state_bytes", "Bytes of the states of the last batch's requests, all layers.")
        gauge("msrnn_capacity", "Tokens that a request may hold (in the first layer).").set(capacity)
        gauge("msrnn_request_state_bytes", "Bytes of one request's state, all layers.").set(request_bytes)

    def note(self, index: Tensor, seen: list[int], tokens: int) -> None:
        """index [R], seen: the requests of a batch and what they have read before it; tokens: what it brings."""
        held = (self.blocks.positions[index] >= 0).sum(-1).amax(-1).tolist()
        held = [count if before else 0 for count, before in zip(held, seen, strict=True)]
        self.end(dict(zip(index.tolist(), zip(seen, held, strict=True), strict=True)))
        for block, (before, count) in self.running.items():
            gone = before - count
            self.left.inc(gone - min(self.evicted.get(block, 0), gone))
            self.evicted[block] = gone
        self.read.inc(tokens)
        self.seen.set(max(seen, default=0))
        self.held.set(max(held, default=0))
        self.all_held.set(sum(held))
        self.bytes.set(len(seen) * self.request_bytes)

    def end(self, running: dict[int, tuple[int, int]]) -> None:
        """running: what each request of this batch has read and holds, by block.

        Who was in the last batch and is not in this one has ended; one that must sit out a batch is taken for two.
        """
        for block, (before, count) in self.running.items():
            if running.get(block, (0, 0))[0] < before:
                self.each_seen.observe(before)
                self.each_held.observe(count)
        self.running = running


def wanted() -> bool:
    """Whether this process is the one that counts: every other holds its share of the same states."""
    if not os.environ.get(_FOLDER):
        return False
    from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank

    return bool(get_tensor_model_parallel_rank() == 0 and get_pp_group().is_first_rank)
