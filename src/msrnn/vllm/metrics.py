"""Tokens held, read and evicted, counted in the blocks themselves and published at /metrics with vLLM's own numbers.

The blocks are in the worker, /metrics is in the front end. prometheus_client carries numbers from one to the other
through files in PROMETHEUS_MULTIPROC_DIR, which `msrnn serve` sets; without it these metrics are off.
"""

from __future__ import annotations

import os
from collections import deque
from functools import cache
from typing import Any

import torch
from torch import Tensor

_FOLDER = "PROMETHEUS_MULTIPROC_DIR"


class _Count:
    """Blocks and tokens held of a batch's requests, [2, R], on their way to the host."""

    def __init__(self, count: Tensor, seen: list[int], tokens: list[int]) -> None:
        self.seen, self.tokens = seen, tokens
        self.event: torch.cuda.Event | None = None
        if count.is_cuda:
            host = torch.empty(count.shape, dtype=count.dtype, pin_memory=True)
            self.count = host.copy_(count, non_blocking=True)
            self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.event.record()
        else:
            self.count = count

    @property
    def done(self) -> bool:
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]

    def rows(self) -> list[tuple[int, int, int, int]]:
        """Block, tokens read before, tokens held, new tokens; without padding, which is in vLLM's null block."""
        rows = zip(*self.count.tolist(), self.seen, self.tokens, strict=False)
        return [(block, seen, held if seen else 0, tokens) for block, held, seen, tokens in rows if block]


class Meter:
    """Counts one layer's blocks before each batch, so a request's last step is counted with the next batch or never."""

    def __init__(self, capacity: int, request_bytes: int) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        def gauge(name: str, about: str) -> Any:
            return Gauge(name, about, multiprocess_mode="livemostrecent")

        self.request_bytes, self.slots = request_bytes, 0
        self.pending: deque[_Count] = deque()
        self.evictions_by_block: dict[int, int] = {}
        self.next: dict[int, int] = {}  # tokens that the last request of a block has read after its last batch
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

    def update(self, positions: Tensor, index: Tensor, seen: list[int], tokens: list[int]) -> None:
        """positions [M, U, S] of all blocks, index [R]: those of a batch; seen, tokens: read before it, and new ones.

        A GPU counts on its own time: what it has counted by now is published, and nothing waits.
        """
        held = (positions[index] >= 0).sum(-1).amax(-1)
        self.slots = positions.shape[2]
        self.pending.append(_Count(torch.stack([index, held]), seen, tokens))
        while self.pending and self.pending[0].done:
            self.publish(self.pending.popleft())

    def publish(self, count: _Count) -> None:
        rows = [self.observe(*row) for row in count.rows()]
        if not rows:
            return
        self.observe_ends({block: (seen, held) for block, seen, held, _ in rows})
        for block, (before, held) in self.running.items():
            evictions = before - held
            self.evictions.inc(max(0, evictions - self.evictions_by_block[block]))
            self.evictions_by_block[block] = evictions
        self.tokens.inc(sum(tokens for *_, tokens in rows))
        self.most_seen.set(max(seen for _, seen, _, _ in rows))
        self.most_held.set(max(held for _, _, held, _ in rows))
        self.all_held.set(sum(held for _, _, held, _ in rows))
        self.bytes.set(len(rows) * self.request_bytes)

    def observe(self, block: int, seen: int, held: int, tokens: int) -> tuple[int, int, int, int]:
        """The same; of a request that begins, what the state that it starts from holds.

        That is copied into its block after the count, and what it has evicted was counted with another request.
        """
        if seen != self.next.get(block):
            held = min(seen, self.slots - 1)
            self.evictions_by_block[block] = seen - held
        self.next[block] = seen + tokens
        return block, seen, held, tokens

    def observe_ends(self, running: dict[int, tuple[int, int]]) -> None:
        """running: tokens read and held of each request of this batch, by block.

        A request of the last batch that is not in this one has ended; one that sits out a batch counts twice.
        """
        for block, (before, count) in self.running.items():
            if running.get(block, (0, 0))[0] < before:
                self.seen_at_end.observe(before)
                self.held_at_end.observe(count)
        self.running = running


@cache
def meter(capacity: int, request_bytes: int) -> Meter:
    """The only one of a process: vLLM makes metadata builders anew after its memory profile, Prometheus a name once."""
    return Meter(capacity, request_bytes)


class PrefixMeter:
    """Requests that started from a state, of a file or of the pool; state_bytes: this process's share of one."""

    def __init__(self, state_bytes: int) -> None:
        from prometheus_client import Counter, Gauge

        def gauge(name: str, about: str) -> Any:
            return Gauge(name, about, multiprocess_mode="livemostrecent")

        self.state_bytes, self.evicted = state_bytes, 0
        about = "Requests that started from a prefix's state, and the tokens they did not have to read."
        self.hits, self.tokens = (Counter(f"msrnn_prefix_{unit}", about, ["prefix_id"]) for unit in ("hits", "tokens"))
        if state_bytes:
            about = "Requests that started from an earlier prompt's state, and the tokens they did not have to read."
            self.pool_hits, self.pool_tokens = (
                Counter(f"msrnn_prefix_pool_{unit}", about) for unit in ("hits", "tokens")
            )
            self.pool_evictions = Counter("msrnn_prefix_pool_evictions", "States that left the pool for others.")
            self.pool_states = gauge("msrnn_prefix_pool_states", "States in the pool.")
            self.pool_bytes = gauge("msrnn_prefix_pool_bytes", "Bytes of the states in the pool, in one process.")

    def count_file(self, name: str, tokens: int) -> None:
        self.hits.labels(name).inc()
        self.tokens.labels(name).inc(tokens)

    def count_pool(self, hits: int, tokens: int, states: int, evictions: int) -> None:
        """hits, tokens: of a batch; states, evictions: since the start."""
        self.pool_hits.inc(hits)
        self.pool_tokens.inc(tokens)
        self.pool_evictions.inc(evictions - self.evicted)
        self.evicted = evictions
        self.pool_states.set(states)
        self.pool_bytes.set(states * self.state_bytes)


def enabled() -> bool:
    """Whether this process publishes: metrics are on and it is the first; the others hold parts of the same states."""
    if not os.environ.get(_FOLDER):
        return False
    from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank

    return bool(get_tensor_model_parallel_rank() == 0 and get_pp_group().is_first_rank)
