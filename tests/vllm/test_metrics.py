"""What /metrics counts of a batch, from blocks as vLLM gives them. prometheus_client is vLLM's: a list stands in."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from msrnn.vllm.metrics import Meter

CAPACITY = 4


class Metric:
    """A counter, gauge or histogram that remembers."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.value, self.observations = 0.0, []

    def inc(self, amount: float) -> None:
        assert amount >= 0
        self.value += amount

    def set(self, value: float) -> None:
        self.value = value

    def observe(self, value: float) -> None:
        self.observations.append(value)


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Meter:
    monkeypatch.setitem(
        sys.modules, "prometheus_client", SimpleNamespace(Counter=Metric, Gauge=Metric, Histogram=Metric)
    )
    return Meter(CAPACITY, 100)


class Blocks:
    """Blocks 1 to 3 of one layer, never written yet; block 0 is vLLM's padding."""

    def __init__(self, meter: Meter) -> None:
        self.meter, self.positions = meter, torch.zeros(4, 1, CAPACITY + 1, dtype=torch.int64)

    def batch(self, *requests: tuple[int, int, int]) -> None:
        """Block, tokens read before, new tokens; then they are in the block, or a state that has read them is."""
        index, seen, sizes = (list(numbers) for numbers in zip(*requests, (0, 0, 0), strict=True))
        self.meter.update(self.positions, torch.tensor(index), seen, sizes)
        for block, before, size in requests:
            held = min(CAPACITY, before + size)
            self.positions[block] = -1
            self.positions[block, :, :held] = torch.arange(held)


def test_evictions_of_requests_that_read_all_their_text(meter: Meter) -> None:
    blocks = Blocks(meter)
    blocks.batch((1, 0, 10), (2, 0, 3))
    blocks.batch((1, 10, 1), (2, 3, 1))
    blocks.batch((1, 11, 1), (2, 4, 1))
    blocks.batch((2, 5, 1))
    assert meter.evictions.value == (11 - CAPACITY) + (5 - CAPACITY)
    assert meter.tokens.value == 13 + 2 + 2 + 1
    blocks.batch((1, 0, 6))
    blocks.batch((1, 6, 1))
    assert meter.evictions.value == 7 + 1 + 2, "another request in the same block"
    assert meter.most_held.value == CAPACITY


@pytest.mark.parametrize("block", [1, 2, 3], ids=["where one has ended", "where none was before", "where one evicts"])
def test_what_a_state_has_evicted_was_another_requests(meter: Meter, block: int) -> None:
    """A request starts from a state that has read 100 tokens, and reads 8 more; its block holds something else yet."""
    blocks = Blocks(meter)
    blocks.batch((1, 0, 2), (3, 0, 30))
    blocks.batch((3, 30, 1))
    blocks.batch((3, 31, 1))
    before = meter.evictions.value
    assert before == 31 - CAPACITY
    blocks.batch((block, 100, 6))
    assert meter.evictions.value == before
    assert meter.most_held.value == CAPACITY, "as the state, whatever lies in the block"
    blocks.batch((block, 106, 1))
    blocks.batch((block, 107, 1))
    assert meter.evictions.value == before + 7
    assert set(meter.held_at_end.observations) <= {2, CAPACITY}


def test_a_request_that_sits_out_a_batch_goes_on(meter: Meter) -> None:
    blocks = Blocks(meter)
    blocks.batch((1, 0, 9), (2, 0, 1))
    blocks.batch((1, 9, 2), (2, 1, 1))
    blocks.batch((2, 2, 1))
    blocks.batch((1, 11, 1))
    assert meter.evictions.value == 11 - CAPACITY
