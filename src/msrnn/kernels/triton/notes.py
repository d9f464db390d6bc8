"""The memory between the two kernels of `step`, and the stream on which the second may run beside the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
import triton
from torch import Tensor


class Notes(NamedTuple):
    """What `attend` leaves for `finish` to decide by."""

    logits: Tensor  # [B, H, S and some], so that every row begins where it can be read by fours
    tops: Tensor  # [B, H, shares], the highest logit of each share
    masses: Tensor  # [B, H, shares], the sum of its exponentials


def new_notes(query: Tensor, slots: int, splits: int, scored: bool) -> Notes:
    (batch, heads, _), wide = query.shape, torch.promote_types(query.dtype, torch.float32)
    logits = torch.empty(batch, heads, triton.cdiv(slots, 16) * 16 if scored else 0, dtype=wide, device=query.device)
    return Notes(logits, *torch.empty(2, batch, heads, splits, dtype=wide, device=query.device))


def new_output(query: Tensor, value: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """[B, H, V], and its shares [B, H, shares, V], which are the output itself where there is one."""
    shape, width = query.shape[:2], value.shape[2]
    output = torch.empty(*shape, width, dtype=value.dtype, device=query.device)
    if splits == 1:
        return output, output
    wide = torch.promote_types(query.dtype, torch.float32)
    return output, torch.empty(*shape, splits, width, dtype=wide, device=query.device)


class DecisionStream:
    """Inside this context victims are chosen on a stream beside the model's; when it ends, all are chosen.

    Two layers' notes are used in turn: before a layer writes its own, the decision that read them must be over.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.notes: dict[tuple[object, ...], Notes] = {}
        self.done: list[torch.cuda.Event | None] = [None, None]
        self.turn = 0

    def __enter__(self) -> None:
        self.done = [None, None]  # events of another graph mean nothing in this one
        self._outside = decision_stream.set(self)

    def __exit__(self, *_: object) -> None:
        decision_stream.reset(self._outside)
        self._wait(0)
        self._wait(1)

    def _wait(self, turn: int) -> None:
        done = self.done[turn]
        if done is not None:
            torch.cuda.current_stream().wait_event(done)

    def take(self, query: Tensor, slots: int, splits: int, scored: bool) -> Notes:
        """The next turn's."""
        self.turn = 1 - self.turn
        self._wait(self.turn)
        key = (self.turn, query.shape, slots, splits, scored, query.dtype)
        if key not in self.notes:
            self.notes[key] = new_notes(query, slots, splits, scored)
        return self.notes[key]

    @contextmanager
    def deciding(self) -> Iterator[None]:
        """What is launched here runs beside the rest, after what was launched before."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield
        self.done[self.turn] = self.stream.record_event()


decision_stream: ContextVar[DecisionStream | None] = ContextVar("decision stream", default=None)
