"""The columns that a read works on: the slots' rows and, behind them, room for a chunk, in reusable memory.

Slots are copied in when a read begins and out when it ends. In between rows stay where they are: after a chunk only
survivors past the slots' end move, into places that became free. Nothing here knows what attention is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import kernels
from .buffers import buffer
from .slots import NEVER, Columns, Slots, gain_of, lowest_empty


class Workspace:
    """keys [B, G, N, D], values [B, G, N, V], positions [B, U, N] (-1: empty); scores and gains where slots have them.

    `used` columns are in use; `room` behind the tensors is for the next chunk. Where slots hold codes, keys and values
    are what these stand for, and the codes themselves move with them.
    """

    def __init__(self, slots: Slots, key: Tensor, chunk: int) -> None:
        """`key` [..., T, D]: those of all tokens of the read."""
        self.slots, self.used = slots, slots.filled
        end = self.used + key.shape[2]
        room = end if slots.limit is None else min(end, slots.limit + chunk)
        sizes = zip(("keys", "values"), slots.sizes, strict=True)
        self.keys, self.values = (_room(name, slots.keys, room, size, key.dtype) for name, size in sizes)
        self.codes = [_room(f"codes {n}", rows, room, rows.shape[3]) for n, rows in enumerate(slots.codes)]
        self.fill()
        self.positions = pad(slots.positions[:, :, : self.used], (0, room - self.used), value=-1)
        self.scores, self.gains = (
            None if rows is None else pad(rows[:, :, : self.used], (0, room - self.used))
            for rows in (slots.scores, slots.gains)
        )
        self.memory = None
        if slots.memory is not None:
            self.memory = pad(slots.memory[:, :, : self.used], (0, 0, 0, room - self.used))
        self.pack()

    @property
    def columns(self) -> Columns:
        """The columns in use."""
        rows = (self.keys, self.values, self.positions, self.scores, self.gains, self.memory)
        used = Columns(*(None if row is None else row[:, :, : self.used] for row in rows))  # type: ignore[arg-type]
        return used._replace(residual=self.slots.residual)

    @property
    def stored(self) -> Sequence[Tensor]:
        """What goes back to the slots of every column: `Slots.stored`."""
        return self.codes or (self.keys, self.values)

    @property
    def moving(self) -> tuple[Tensor, ...]:
        """What moves with the columns of a stored head or of a unit: [B, G or U, N, ...]."""
        gains = () if self.gains is None else (self.gains[..., None],)
        memory = () if self.memory is None else (self.memory,)
        return self.keys, self.values, *self.codes, *gains, *memory

    def pack(self) -> None:
        """Move the last slot's row into the empty slot that a step has left: round sizes make fast matmuls."""
        if self.used == self.slots.limit:
            self.evict(torch.where(self.positions[:, :, : self.used] < 0, -1, NEVER), None)

    def fill(self) -> None:
        """Keys and values of the slots' first columns, and their codes."""
        slots, used = self.slots, slice(0, self.used)
        for ours, theirs in zip(self.stored, slots.stored, strict=True):
            ours[:, :, used] = theirs[:, :, used]
        if slots.kv is not None:
            codes = [rows[:, :, used] for rows in self.codes]
            kernels.decode(codes, slots.kv, out=(self.keys[:, :, used], self.values[:, :, used]))

    def add(self, key: Tensor, value: Tensor, steps: Tensor) -> None:
        """A chunk's rows go behind the rest. key [B, G, C, D], value [B, G, C, V], steps [B, C]."""
        new = slice(self.used, self.used + key.shape[2])
        if self.slots.kv is None:
            self.keys[:, :, new], self.values[:, :, new] = key, value
        else:
            out = [rows[:, :, new] for rows in (*self.codes, self.keys, self.values)]
            value = kernels.encode(key, value, self.slots.kv, out)[4]
        self.positions[:, :, new] = steps[:, None]
        if self.scores is not None:
            self.scores[:, :, new] = 0
        if self.gains is not None:
            self.gains[:, :, new] = gain_of(value, self.gains.dtype)
        if self.memory is not None:
            self.memory[:, :, new] = 0
        self.used = new.stop

    def remember(self, memory: Tensor | None, residual: Tensor | None) -> None:
        """memory [B, U, N, F]: what a rule stores with the columns in use; residual [B, G, D + V + 1]: the new one."""
        if self.slots.residual is not None and residual is not None:
            self.slots.residual.copy_(residual)
        if self.memory is not None and memory is not None:
            self.memory[:, :, : self.used] = memory

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
        for ours, theirs in zip(slots.stored, self.stored, strict=True):
            ours[:, :, used] = theirs[:, :, used]
        slots.positions[:, :, used] = self.positions[:, :, used]
        slots.positions[:, :, self.used :] = -1
        if slots.scores is not None and self.scores is not None:
            slots.scores[:, :, used] = self.scores[:, :, used]
        if slots.gains is not None and self.gains is not None:
            slots.gains[:, :, used] = self.gains[:, :, used]
        if slots.memory is not None and self.memory is not None:
            slots.memory[:, :, used] = self.memory[:, :, used]
        slots.next.copy_(lowest_empty(slots.positions) if slots.limit is None else slots.positions.argmin(-1))
        slots.packed_at = slots.fed


def _room(name: str, like: Tensor, columns: int, size: int, dtype: torch.dtype | None = None) -> Tensor:
    """A buffer for so many columns [B, G, columns, size] of heads like `like` has."""
    return buffer(name, (*like.shape[:2], columns, size), dtype or like.dtype, like.device)
