"""Automatic prefix reuse: which states are kept for later requests, and under what. Nothing here imports vLLM.

A state is kept at some places of a prompt, under the hash of all tokens so far. The scheduler alone decides: it holds
the index and numbers the places of the pool, and every worker copies its share of a state into the place it is told. So
all workers hold the same states, however many there are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

STATES, EVERY = "states", "every"  # options of the connector: places of the pool, tokens between kept states
SCHEDULER = "msrnn.vllm.scheduler.scheduler"  # its pieces of prompts end where states are kept
INTERVAL = 512
_FAR = 8  # beyond so many intervals, kept states lie further apart: at most 1/8 of the text


def piece(start: int, size: int, prompt: int, every: int) -> int:
    """How many of the next `size` tokens to read at once, so that a piece ends where a state is to be kept."""
    if start >= prompt:
        return size
    last = prompt // every * every
    stop = _boundary_after(start, every)
    return min(size, (min(stop, last) if start < last else stop) - start)


def keeps(position: int, prompt: int, every: int) -> bool:
    """Whether the state after so many tokens of a prompt is kept: at boundaries, and at the last whole interval."""
    if not 0 < position <= prompt:
        return False
    return position == prompt // every * every or position % _interval(position - 1, every) == 0


def kept_between(start: int, end: int, prompt: int, every: int) -> list[int]:
    """Where a state is kept, after `start` and up to `end`."""
    boundaries = range((start // every + 1) * every, min(end, prompt) + 1, every)
    return [position for position in boundaries if keeps(position, prompt, every)]


def _interval(position: int, every: int) -> int:
    return every << max(0, (position // (_FAR * every)).bit_length() - 1)


def _boundary_after(position: int, every: int) -> int:
    interval = _interval(position, every)
    return (position // interval + 1) * interval


def keys_of(tokens: Sequence[int], every: int, isolation: str) -> list[bytes]:
    """A key for every `every` tokens: the SHA-256 hash of all tokens up to there.

    isolation: whatever else changes a state, or keeps requests apart (adapter, cache salt).
    """
    name = isolation.encode()
    digest = sha256(len(name).to_bytes(8, "little") + name)
    keys = []
    for start in range(0, len(tokens) - every + 1, every):
        digest.update(np.asarray(tokens[start : start + every], dtype="<i8").tobytes())
        keys.append(digest.digest())
    return keys


@dataclass
class _Entry:
    place: int
    parent: bytes | None  # the longest state kept that this one's tokens begin with
    children: int = 0


class Index:
    """The states of a pool with so many places. The least recently used one that no other extends leaves first."""

    def __init__(self, states: int) -> None:
        self.free = list(range(states))[::-1]
        self.entries: OrderedDict[bytes, _Entry] = OrderedDict()  # the least recently used first
        self.evictions = 0

    def __len__(self) -> int:
        return len(self.entries)

    def longest(self, keys: Sequence[bytes]) -> int:
        """How many of a text's keys lead to the longest state that is kept; 0 if none is. Changes nothing."""
        return next((count for count in range(len(keys), 0, -1) if keys[count - 1] in self.entries), 0)

    def use(self, keys: Sequence[bytes]) -> int:
        """The place of the last key's state; this one, and those that it extends, are used now."""
        self._touch(keys)
        return self.entries[keys[-1]].place

    def add(self, keys: Sequence[bytes]) -> int | None:
        """A place for the state of the last key; None if it is kept already."""
        self._touch(keys)
        if keys[-1] in self.entries:
            return None
        if not self.free:
            self._evict()
        parent = next((key for key in reversed(keys[:-1]) if key in self.entries), None)
        if parent is not None:
            self.entries[parent].children += 1
        place = self.free.pop()
        self.entries[keys[-1]] = _Entry(place, parent)
        self._touch(keys)
        return place

    def clear(self) -> None:
        self.free.extend(entry.place for entry in self.entries.values())
        self.entries.clear()

    def _touch(self, keys: Sequence[bytes]) -> None:
        """Shorter states last, so that none leaves before those that extend it."""
        for key in reversed(keys):
            if key in self.entries:
                self.entries.move_to_end(key)

    def _evict(self) -> None:
        key = next(key for key, entry in self.entries.items() if not entry.children)
        entry = self.entries.pop(key)
        if entry.parent is not None:
            self.entries[entry.parent].children -= 1
        self.free.append(entry.place)
        self.evictions += 1
