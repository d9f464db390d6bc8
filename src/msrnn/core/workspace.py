"""The columns a call can see: the state's rows and, behind them, room for a chunk, in scratch memory.

A state is opened at the start of a call and closed at its end. In between rows stay where they are: when a chunk is
done, only its survivors past the end move, into places that became free. Nothing here knows what attention is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import kernels as ops
from .buffers import scratch
from .slots import State


class Columns:
    """keys [B, E, N, D], values [B, E, N, V], births [B, U, N] (-1: empty), scores [B, U, N] or None."""

    def __init__(self, state: State, key: Tensor, value: Tensor, chunk: int) -> None:
        self.state, self.used = state, state.filled
        end = self.used + key.shape[2]
        room = end if state.limit is None else min(end, state.limit + chunk)
        self._keys = _open("keys", state.keys, self.used, room)
        self._values = _open("values", state.values, self.used, room)
        self._births = torch.nn.functional.pad(state.positions[:, :, : self.used], (0, room - self.used), value=-1)
        self._scores = None
        if state.scores is not None:
            self._scores = torch.nn.functional.pad(state.scores[:, :, : self.used], (0, room - self.used))

    def add(self, key: Tensor, value: Tensor, steps: Tensor) -> None:
        """A chunk's rows go behind the rest. key [B, E, C, D], steps [B, C]."""
        new = slice(self.used, self.used + key.shape[2])
        self._keys[:, :, new], self._values[:, :, new] = key, value
        self._births[:, :, new] = steps[:, None]
        if self._scores is not None:
            self._scores[:, :, new] = 0
        self.used = new.stop

    @property
    def keys(self) -> Tensor:
        return self._keys[:, :, : self.used]

    @property
    def values(self) -> Tensor:
        return self._values[:, :, : self.used]

    @property
    def births(self) -> Tensor:
        return self._births[:, :, : self.used]

    @property
    def scores(self) -> Tensor | None:
        return None if self._scores is None else self._scores[:, :, : self.used]

    @property
    def buffers(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Keys, values, births and scores with the room behind the columns in use."""
        return self._keys, self._values, self._births, self._scores

    def keep(self, expiry: Tensor, scores: Tensor | None) -> None:
        """expiry [B, U, N]: who will be seen no more leaves; what stands past the state's end moves to free places."""
        if self._scores is not None and scores is not None:
            self._scores[:, :, : self.used] = scores
        end = self.used if self.state.limit is None else min(self.used, self.state.limit - 1)
        ops.compact(self._births, self._scores, (self._keys, self._values), expiry, self.used, end)
        self.used = end

    def close(self) -> None:
        """What is left becomes the state."""
        state, room = self.state, slice(0, self.used)
        state.reserve(self.used)
        state.keys[:, :, room], state.values[:, :, room] = self.keys, self.values
        state.positions[:, :, room] = self.births
        state.positions[:, :, self.used :] = -1
        if state.scores is not None and self.scores is not None:
            state.scores[:, :, room] = self.scores
        state.packed = True


def _open(name: str, rows: Tensor, used: int, room: int) -> Tensor:
    opened = scratch(name, (*rows.shape[:2], room, rows.shape[3]), rows.dtype, rows.device)
    opened[:, :, :used] = rows[:, :, :used]
    return opened
