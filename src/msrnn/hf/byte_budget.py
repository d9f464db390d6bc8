"""How many slots fit into a number of bytes: `tova:64MiB` is `tova:509` on Llama-3.1-8B. Only here bytes become slots.

The bytes bound the whole state of a sequence, as `cache.nbytes` counts it when it is full: keys and values of every
stored head, their scales, positions, scores and gains, and the slot of the newest token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from ..budgets.profile import check_scales, plan_for
from ..core.formats import check_sizes
from ..policy import PolicyText, with_capacity
from .cost import cost
from .geometry import Geometry

_MOST = 1 << 40  # slots; no search goes beyond
State = Callable[[int], int | None]  # its bytes by the number of slots; None: the policy cannot have so few


@dataclass(frozen=True)
class ByteBudget:
    """At most `limit` bytes of state for a sequence on a model. `name` is what a person asked for, for messages."""

    name: str
    limit: int
    layers: Sequence[Geometry]
    dtype: torch.dtype

    def slots(self, text: PolicyText) -> int:
        """The largest capacity of `text` within the bytes, whatever its size; with a profile, on average.

        Where the windows of all layers are the tighter bound, any capacity above them.
        """
        self._check(text)
        state, start = self._state(text), 1
        if text.profile:  # a profile takes a while to allocate, and equal layers need about as much
            start = max(1, self._search(self._state(replace(text, profile=None)), 1))
        slots = self._search(state, start)
        if state(slots) is not None:
            return slots
        if (least := state(slots + 1)) is None:
            plan_for(text.with_size(slots), len(self.layers))  # says why it cannot be
        raise ValueError(
            f"{self.name!r}: {self.limit:,} bytes hold no state; this model needs at least {least:,} bytes"
        )

    def _check(self, text: PolicyText) -> None:
        policy = with_capacity(text.policy, _MOST)
        for layer in self.layers:
            check_sizes(policy.kv, layer.head_size)
        if text.profile:
            check_scales(text.profile)

    def _state(self, text: PolicyText) -> State:
        @cache
        def state(slots: int) -> int | None:
            try:
                plan = plan_for(text.with_size(slots), len(self.layers))
            except ValueError:
                return None
            return cost(self.layers, plan, self.dtype, 1).state

        return state

    def _search(self, state: State, start: int) -> int:
        """The largest number of slots that is not too large; fewer than the policy can have are not."""
        low, high = self._bracket(state, start)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._too_large(state(middle)) else (middle, high)
        return low

    def _bracket(self, state: State, start: int) -> tuple[int, int]:
        """A number of slots that is not too large, and one that is: from `start` in steps that double."""
        low, high, step = start, start + 1, 1
        while low > 0 and self._too_large(state(low)):
            low, high, step = max(0, low - step), low, 2 * step
        if self._too_large(state(high)):
            return low, high
        bounded = all(layer.window for layer in self.layers)
        while high < _MOST and not self._too_large(state(high)):
            if bounded and state(low) == state(high) is not None:
                break  # the windows hold no more
            low, high, step = high, high + 2 * step, 2 * step
        return low, high

    def _too_large(self, state: int | None) -> bool:
        return state is not None and state > self.limit
