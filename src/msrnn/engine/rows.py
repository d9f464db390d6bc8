"""What the engine knows of every row of its batch beside the slots: on the host and on the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .request import MOST_STOPS, Finished, Request


@dataclass
class Job:
    """A request that is being generated, on the host."""

    index: int
    request: Request
    stops: list[int]
    tokens: list[int] = field(default_factory=list)

    def take(self, token: int) -> Finished | None:
        self.tokens.append(token)
        if self.request.on_token is not None:
            self.request.on_token(token)
        stopped = token in self.stops
        if not stopped and len(self.tokens) < self.request.max_new_tokens:
            return None
        return Finished(self.index, self.request, self.tokens, "stop" if stopped else "length")


class Rows:
    """What the device knows of every row: all [B], `stops` [B, n]."""

    def __init__(self, batch: int, device: torch.device) -> None:
        def integers(*shape: int, value: int = 0) -> Tensor:
            return torch.full((batch, *shape), value, dtype=torch.int64, device=device)

        self.token, self.left, self.seed, self.count, self.top_k = (integers() for _ in range(5))
        self.emitted, self.stops = integers(value=-1), integers(MOST_STOPS, value=-1)
        self.temperature, self.top_p = (torch.full((batch,), value, device=device) for value in (0.0, 1.0))

    def put(self, rows: Tensor, jobs: list[Job]) -> None:
        """Requests whose first token is known go into these rows."""
        padded = [[*job.stops, *[-1] * (MOST_STOPS - len(job.stops))] for job in jobs]
        requests = [job.request for job in jobs]
        values: dict[str, list[Any]] = {
            "token": [job.tokens[-1] for job in jobs],
            "left": [request.max_new_tokens - 1 for request in requests],
            "count": [1 for _ in requests],
            "stops": padded,
        }
        for name, value in (values | sampling_settings(requests)).items():
            ours = getattr(self, name)
            ours.index_copy_(0, rows, torch.tensor(value, dtype=ours.dtype, device=ours.device))


def sampling_settings(requests: list[Request]) -> dict[str, list[Any]]:
    return {
        "temperature": [request.temperature for request in requests],
        "top_k": [request.top_k or 0 for request in requests],
        "top_p": [request.top_p for request in requests],
        "seed": [request.seed for request in requests],
    }


@dataclass
class Emitted:
    """A step's tokens, on their way to the host."""

    tokens: Tensor
    event: torch.cuda.Event | None

    def ready(self) -> list[int]:
        if self.event is not None:
            self.event.synchronize()
        tokens: list[int] = self.tokens.tolist()
        return tokens


def collect(emitted: Emitted, jobs: dict[int, Job]) -> Iterator[Finished]:
    """Hand a step's tokens to their requests; -1 is of a row that was idle."""
    for row, token in enumerate(emitted.ready()):
        if token >= 0 and row in jobs:
            ended = jobs[row].take(token)
            if ended is not None:
                del jobs[row]
                yield ended
