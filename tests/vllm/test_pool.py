"""The pool of states: where prompts are cut, what a state is kept under, who leaves first, and the copies."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from msrnn.vllm import host
from msrnn.vllm.host import HostPool
from msrnn.vllm.pool import Index, keeps, kept_between, keys_of, piece


def positions(prompt: int, every: int, budget: int) -> list[int]:
    """Where the pieces of a prompt end if a batch takes `budget` tokens at most."""
    ends, start = [], 0
    while start < prompt:
        size = piece(start, min(budget, prompt - start), prompt, every)
        assert 0 < size <= budget
        start += size
        ends.append(start)
    return ends


def test_pieces_by_hand() -> None:
    assert positions(100, 512, 8192) == [100], "shorter than an interval: nothing is kept"
    assert positions(1300, 512, 8192) == [512, 1024, 1300]
    assert positions(1024, 512, 300) == [300, 512, 812, 1024], "the budget cuts too, and the next piece ends aligned"
    ends = positions(100_000, 512, 8192)
    assert [end for end in ends if end <= 8192] == list(range(512, 8193, 512))
    assert ends[-5:] == [81920, 90112, 98304, 99840, 100_000], "far apart, then the last whole interval, then the rest"
    assert len(ends) < 60


def test_tokens_after_the_prompt_are_not_cut() -> None:
    assert piece(1300, 7, 1300, 512) == 7
    assert not keeps(1536, 1300, 512)


@given(st.integers(1, 5000), st.integers(1, 64), st.integers(1, 700), st.integers(1, 700))
def test_kept_positions_do_not_depend_on_the_budget(prompt: int, every: int, one: int, two: int) -> None:
    kept = [{end for end in positions(prompt, every, budget) if keeps(end, prompt, every)} for budget in (one, two)]
    assert kept[0] == kept[1]
    assert all(position % every == 0 for position in kept[0])
    whole = prompt // every * every
    assert max(kept[0], default=0) == whole


@given(st.integers(1, 5000), st.integers(1, 64), st.integers(1, 700))
def test_a_prompt_in_longer_pieces_keeps_the_same(prompt: int, every: int, budget: int) -> None:
    """A batch whose pieces end anywhere keeps the states within it."""
    ends = [*range(0, prompt, budget), prompt + 3]
    kept = [position for start, end in pairwise(ends) for position in kept_between(start, end, prompt, every)]
    assert kept == [position for position in range(1, prompt + 1) if keeps(position, prompt, every)]


@given(st.integers(1, 50_000))
def test_at_least_most_of_a_shared_text_is_found(shared: int) -> None:
    """A longer prompt with the same beginning leaves a state at 7/8 of it or more, or less than an interval before."""
    every, prompt = 64, 60_000
    best = max((end for end in range(every, shared + 1, every) if keeps(end, prompt, every)), default=0)
    assert shared - best < max(every, shared / 8)


def test_keys_tell_texts_apart() -> None:
    text = list(range(100))
    keys = keys_of(text, 32, "")
    assert len(keys) == len(set(keys)) == 3
    assert keys_of(text[:64], 32, "") == keys[:2], "a key depends on the tokens up to it alone"
    other = keys_of([*text[:40], 5, *text[41:]], 32, "")
    assert other[0] == keys[0]
    assert not set(other[1:]) & set(keys)
    assert not set(keys_of(text, 32, "salt")) & set(keys)
    assert keys_of(text[:31], 32, "") == []


def test_the_oldest_leaf_leaves_first() -> None:
    pool = Index(3)
    system, one, two, three = (bytes([number]) for number in range(4))
    assert [pool.add([system]), pool.add([system, one]), pool.add([system, two])] == [0, 1, 2]
    assert pool.add([system, two]) is None, "it is there already"
    pool.use([system, one])
    assert pool.add([system, three]) == 2, "two was used least recently; system is older, but others extend it"
    assert pool.longest([system, two]) == 1
    assert pool.longest([system, one]) == 2
    assert pool.longest([b"other"]) == 0
    assert pool.evictions == 1


def test_a_text_too_long_for_the_pool_keeps_its_beginning_and_its_end() -> None:
    pool, keys = Index(4), [bytes([number]) for number in range(10)]
    for count in range(1, 11):
        pool.add(keys[:count])
    assert {key for key in keys if key in pool.entries} == {*keys[:3], keys[9]}


def test_places_are_never_shared() -> None:
    """Random texts: as many places as states, no two alike, and what is found was put there and has not left."""
    rng, pool, places = random.Random(0), Index(8), {}
    for _ in range(2000):
        keys = [bytes(rng.choices(range(2), k=3)[:1]) + bytes([depth]) for depth in range(rng.randint(1, 6))]
        keys = [b"".join(keys[: depth + 1]) for depth in range(len(keys))]
        count = pool.longest(keys)
        if count:
            assert places[pool.use(keys[:count])] == keys[count - 1]
        place = pool.add(keys)
        if place is not None:
            places[place] = keys[-1]
        assert len({entry.place for entry in pool.entries.values()}) == len(pool) <= 8
        for entry in pool.entries.values():
            assert entry.parent is None or entry.parent in pool.entries
    assert pool.evictions > 100
    pool.clear()
    assert len(pool) == 0
    assert sorted(pool.free) == list(range(8))


RING = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: a host's memory needs no ring")
DEVICES = [("cpu", 0), *(pytest.param("cuda", size, marks=RING) for size in (host._RING, 4 * 640, 1))]


@pytest.mark.parametrize("device, ring", DEVICES)
def test_states_come_back_as_they_were(device: str, ring: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More saves than the ring has places, each block overwritten at once, and places used again."""
    monkeypatch.setattr(host, "_RING", ring)
    torch.manual_seed(0)
    layers = [torch.randint(256, (12, size), dtype=torch.uint8, device=device) for size in (640, 128)]
    pool = HostPool(10, layers)
    assert pool.state_bytes == 768
    before = [layer.clone() for layer in layers]
    for block in range(1, 11):
        for number, layer in enumerate(layers):
            pool.save(number, layer[block], block - 1)
            layer[block] = 0
    for block in range(1, 11):
        pool.load(layers, block - 1, 11 - block)
    for layer, old in zip(layers, before, strict=True):
        assert torch.equal(layer[1:11], old[1:11].flip(0))
    for number, layer in enumerate(layers):
        pool.save(number, layer[1], 0)
    pool.load(layers, 0, 5)
    assert all(torch.equal(layer[5], layer[1]) for layer in layers)
    pool.close()


@RING
def test_streams_share_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three lanes, each keeping its layer's part of every state, with two places; blocks are overwritten at once."""
    size, states = 1 << 20, 24
    monkeypatch.setattr(host, "_RING", 2 * size)
    layers = [torch.randint(256, (states, size), dtype=torch.uint8, device="cuda") for _ in range(3)]
    pool = HostPool(states, layers)
    before, lanes = [layer.clone() for layer in layers], [torch.cuda.Stream() for _ in layers]
    for lane in lanes:
        lane.wait_stream(torch.cuda.current_stream())
    for state in range(states):
        for number, (layer, lane) in enumerate(zip(layers, lanes, strict=True)):
            with torch.cuda.stream(lane):
                pool.save(number, layer[state], state)
                layer[state] = 0
    for lane in lanes:
        torch.cuda.current_stream().wait_stream(lane)
    for state in range(states):
        pool.load(layers, state, states - 1 - state)
    for number, layer in enumerate(layers):  # a place is overwritten while it may still be loaded
        pool.save(number, torch.zeros_like(layer[0]), 0)
    for layer, old in zip(layers, before, strict=True):
        assert torch.equal(layer, old.flip(0))
    pool.load(layers, 0, 0)
    assert not any(layer[0].any() for layer in layers)
    pool.close()


@RING
def test_a_load_waits_for_its_own_state() -> None:
    """Not for copies that were begun after it, which a slow kernel holds up on the stream they share."""
    layers = [torch.arange(4, dtype=torch.uint8, device="cuda").repeat_interleave(1 << 20).view(4, -1)]
    pool = HostPool(2, layers)
    pool.save(0, layers[0][1], 0)
    slow = torch.cuda.Stream()
    slow.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(slow):
        torch.cuda._sleep(2_000_000_000)  # about a second
        pool.save(0, layers[0][2], 1)
        ended = torch.cuda.Event()
        ended.record()
    pool.load(layers, 0, 3)
    torch.cuda.current_stream().synchronize()
    assert not ended.query(), "the load has not waited"
    assert torch.equal(layers[0][3], layers[0][1])
    pool.load(layers, 1, 3)
    assert torch.equal(layers[0][3], layers[0][2])
    pool.close()


@RING
def test_the_memory_of_the_ring_may_be_taken_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_reserved", {})
    layers = [torch.zeros(2, 1 << 20, dtype=torch.uint8, device="cuda")]
    before = torch.cuda.memory_allocated()
    host.reserve_ring(layers[0].device)
    reserved = torch.cuda.memory_allocated()
    assert reserved == before + host._RING
    pool = HostPool(2, layers)
    host.reserve_ring(layers[0].device)  # vLLM runs the model without blocks later, too
    files = HostPool(2, layers, saves=False)
    assert files.ring is None
    assert torch.cuda.memory_allocated() == reserved
    files.close()
    pool.close()
    assert torch.cuda.memory_allocated() == before


@RING
def test_memory_can_be_pinned_again_after_the_end() -> None:
    layers = [torch.zeros(2, 1 << 20, dtype=torch.uint8, device="cuda")]
    for _ in range(3):  # freed memory comes back at the same address
        HostPool(64, layers).close()
