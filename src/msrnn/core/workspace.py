"""The columns that a read works on: the slots' rows and, behind them, room for a chunk, in reusable memory.

Slots are copied in when a read begins and out when it ends. In between rows stay where they are: after a chunk only
survivors past the slots' end move, into places that became free. Nothing here knows what attention is.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import kernels
from .buffers import buffer
from .slots import NEVER, Columns, Slots, gain_of, lowest_empty


class Workspace:
    """keys [B, G, N, D], values [B, G, N, V], positions [B, U, N] (-1: empty); scores and gains where slots have them.

    `used` columns are in use; `room` behind the tensors is for the next chunk.
    """

    def __init__(self, slots: Slots, key: Tensor, value: Tensor, chunk: int) -> None:
        self.slots, self.used = slots, slots.filled
        end = self.used + key.shape[2]
        room = end if slots.limit is None else min(end, slots.limit + chunk)
        self.keys = _copy("keys", slots.keys, self.used, room)
        self.values = _copy("values", slots.values, self.used, room)
        self.positions = pad(slots.positions[:, :, : self.used], (0, room - self.used), value=-1)
        self.scores, self.gains = (
            None if rows is None else pad(rows[:, :, : self.used], (0, room - self.used))
            for rows in (slots.scores, slots.gains)
        )
        self.pack()

    @property
    def columns(self) -> Columns:
        """The columns in use."""
        rows = (self.keys, self.values, self.positions, self.scores, self.gains)
        return Columns(*(None if row is None else row[:, :, : self.used] for row in rows))  # type: ignore[arg-type]

    @property
    def moving(self) -> tuple[Tensor, ...]:
        """What moves with a stored head's columns: [B, G, N, ...]."""
        gains = () if self.gains is None else (self.gains[..., None],)
        return self.keys, self.values, *gains

    def pack(self) -> None:
        """Move the last slot's row into the empty slot that a step has left: round sizes make fast matmuls."""
        if self.used == self.slots.limit:
            self.evict(torch.where(self.positions[:, :, : self.used] < 0, -1, NEVER), None)

    def add(self, key: Tensor, value: Tensor, steps: Tensor) -> None:
        """A chunk's rows go behind the rest. key [B, G, C, D], value [B, G, C, V], steps [B, C]."""
        new = slice(self.used, self.used + key.shape[2])
        self.keys[:, :, new], self.values[:, :, new] = key, value
        self.positions[:, :, new] = steps[:, None]
        if self.scores is not None:
            self.scores[:, :, new] = 0
        if self.gains is not None:
            self.gains[:, :, new] = gain_of(value, self.gains.dtype)
        self.used = new.stop

    def evict(self, expiry: Tensor, scores: Tensor | None) -> None:
        """expiry [B, U, N]: columns that no later row sees leave; survivors past the slots' end move to free places."""
        if self.scores is not None and scores is not None:
            self.scores[:, :, : self.used] = scores
        limit = self.slots.limit
        end = self.used if limit is None else min(self.used, limit - 1)
        kernels.compact(self.positions, self.scores, self.moving, expiry, self.used, end)
        self.used = end

    def close(self) -> None:
        """What is left goes back to the slots."""
        slots, used = self.slots, slice(0, self.used)
        slots.reserve(self.used)
        slots.keys[:, :, used], slots.values[:, :, used] = self.keys[:, :, used], self.values[:, :, used]
        slots.positions[:, :, used] = self.positions[:, :, used]
        slots.positions[:, :, self.used :] = -1
        if slots.scores is not None and self.scores is not None:
            slots.scores[:, :, used] = self.scores[:, :, used]
        if slots.gains is not None and self.gains is not None:
            slots.gains[:, :, used] = self.gains[:, :, used]
        slots.next.copy_(lowest_empty(slots.positions) if slots.limit is None else slots.positions.argmin(-1))
        slots.packed_at = slots.fed


def _copy(name: str, rows: Tensor, used: int, room: int) -> Tensor:
    """rows [B, G, S, D] in a buffer with `room` columns, the first `used` of them filled."""
    copy = buffer(name, (*rows.shape[:2], room, rows.shape[3]), rows.dtype, rows.device)
    copy[:, :, :used] = rows[:, :, :used]
    return copy
