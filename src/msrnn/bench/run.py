"""The parts of `msrnn bench`: each yields records as it goes, so that an interrupted run keeps its first ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from . import decode, prefill
from .measure import Record, clear


@dataclass(frozen=True)
class Settings:
    """What to measure. `batches`: when decoding; `prompts`: how long and how many at once."""

    policies: tuple[str, ...]
    context: int
    batches: tuple[int, ...]
    prompts: tuple[tuple[int, int], ...]
    chunk: int
    runs: int = 5
    compiled: bool = False
    bytes_per_second: float | None = None

    @property
    def decoding(self) -> dict[str, Any]:
        return {"runs": self.runs, "compiled": self.compiled, "bytes_per_second": self.bytes_per_second}


def count(parts: Sequence[str], settings: Settings) -> int:
    """How many records the parts will yield."""
    sizes = {
        "table": len(settings.policies) + 1,
        "same": len(settings.batches) * (len(settings.policies) + 1),
        "prefill": len(settings.prompts) * (len(settings.policies) + 1),
        "generate": len(settings.batches),
    }
    return sum(sizes[part] for part in parts)


def run(model: PreTrainedModel, parts: Sequence[str], settings: Settings) -> Iterator[Record]:
    measurements = {"table": _table, "same": _same, "prefill": _prefill, "generate": _generate}
    for part in parts:
        yield from (record | {"part": part} for record in measurements[part](model, settings))


def _table(model: PreTrainedModel, settings: Settings) -> Iterator[Record]:
    """The paper's table 1: memory, largest batch and its speed, for a full cache and for each policy."""
    full = decode.largest_full(model, settings.context, **settings.decoding)
    yield full or _out_of_memory("full", context=settings.context)
    for policy in settings.policies:
        record = decode.largest(model, policy, settings.context, **settings.decoding)
        times = {"times_full": decode.ratio(record, full)}
        yield (record or _out_of_memory(policy, context=settings.context)) | times


def _same(model: PreTrainedModel, settings: Settings) -> Iterator[Record]:
    """The same batch for all: what a bounded state gains without a larger batch."""
    for batch in settings.batches:
        full = decode.full_step(model, batch, settings.context, **settings.decoding)
        yield full or _out_of_memory("full", batch=batch, context=settings.context)
        for policy in settings.policies:
            record = decode.step_or_none(model, policy, batch, settings.context, **settings.decoding)
            times = {"times_full": decode.ratio(record, full)}
            yield (record or _out_of_memory(policy, batch=batch, context=settings.context)) | times


def _prefill(model: PreTrainedModel, settings: Settings) -> Iterator[Record]:
    """A prompt through the exact recurrence, against one pass of full attention."""
    device = model.get_input_embeddings().weight.device
    for length, batch in settings.prompts:
        full = prefill.fastest_full(model, batch, length, runs=settings.runs)
        yield full or _out_of_memory("full", batch=batch, length=length)
        for policy in settings.policies:
            record = prefill.exact(model, policy, batch, length, chunk=settings.chunk, runs=settings.runs)
            clear(device)
            yield record | {"times_full": record["median_s"] / full["median_s"] if full else None}


def _generate(model: PreTrainedModel, settings: Settings) -> Iterator[Record]:
    for batch in settings.batches:
        yield decode.generate_speed(model, batch, settings.context)


def _out_of_memory(policy: str, **conditions: int) -> Record:
    """The record of what did not fit into memory."""
    return {"policy": policy, **conditions, "out_of_memory": True}
