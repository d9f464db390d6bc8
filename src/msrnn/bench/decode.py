"""A decoding step of the whole model at a given context, batch and policy, in the engine that generates.

The slots are filled with random numbers, as if every row had read so many tokens. The baseline is the same engine with
a full KV cache and the fastest attention that PyTorch has for it.
"""

from __future__ import annotations

from statistics import median

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..core.heads import parts_of
from ..core.slots import Slots, gain_of
from ..engine.engine import Engine, EngineOptions
from ..engine.static_cache import FullAttention, FullLayer
from .measure import Record, clear, free_bytes, seconds, timed
from .shapes import weight_bytes

OURS = "our kernel"  # a backend for full attention: without scores, over as many slots


@torch.no_grad()
def fill(engine: Engine, context: int) -> None:
    """As if every row had read `context` - 1 tokens: random keys and values, full slots, no row about to end."""
    for layer in engine.cache.static:
        for slots in parts_of(layer.slots):
            for rows in (slots.keys, slots.values):
                _randomise(rows)
            if slots.scales is not None:
                slots.scales.fill_(2**-6)
            if not isinstance(layer, FullLayer):
                _fill_slots(slots, context - 1)
    engine.cache.seen.fill_(context - 1)
    engine.rows.left.fill_(2**40)
    engine.rows.token.random_(0, engine.model.get_input_embeddings().weight.shape[0])


def _randomise(rows: Tensor) -> None:
    """Normal numbers; any codes that there are."""
    if rows.is_floating_point():
        rows.normal_()
    else:
        rows.random_(0, 256) if rows.dtype == torch.uint8 else rows.random_(-127, 128)


def _fill_slots(slots: Slots, seen: int) -> None:
    """Every slot but the last holds one of the newest tokens."""
    held = min(slots.positions.shape[2] - 1, seen)
    slots.positions.fill_(-1)
    slots.positions[:, :, :held] = torch.arange(seen - held, seen, device=slots.positions.device)
    slots.next.fill_(held)
    if slots.scores is not None:
        slots.scores.uniform_()
    if slots.gains is not None:
        slots.gains.copy_(gain_of(slots.decoded(slots.gains.dtype)[1], slots.gains.dtype))


@torch.no_grad()
def step(
    model: PreTrainedModel,
    policy: str,
    batch: int,
    context: int,
    *,
    full_attention: FullAttention | None = None,
    runs: int = 5,
    compiled: bool = False,
    bytes_per_second: float | None = None,
) -> Record:
    """Seconds and tokens per second of a step; `full_attention` is the engine's option, None for its own choice."""
    options = EngineOptions(compile=compiled, full_attention=full_attention)
    engine = Engine(model, policy, batch=batch, length=context, options=options)
    fill(engine, context)
    device, one_step = engine.rnn.device, engine.capture().replay if engine.graphs else engine.step
    times = timed(seconds(one_step, device, runs))
    record: Record = {"kind": "step", "policy": policy, "batch": batch, "context": context, "reading": full_attention}
    record |= {"graph": engine.graphs, "compiled": compiled, "joined": engine.fused, "state_bytes": engine.cache.nbytes}
    record |= times | {"tokens_per_s": batch / times["median_s"]}
    if device.type == "cuda":
        record["peak_bytes"] = torch.cuda.max_memory_allocated(device)
    if bytes_per_second is not None:
        kv_bytes = sum(_kv_bytes(slots) for layer in engine.cache.static for slots in parts_of(layer.slots))
        floor = (weight_bytes(model) + kv_bytes) / bytes_per_second
        record |= {"floor_s": floor, "times_floor": times["median_s"] / floor}
    return record


def _kv_bytes(slots: Slots) -> int:
    """Bytes of keys and values that a step has to read."""
    return sum(tensor.numel() * tensor.element_size() for tensor in slots.stored)


def step_or_none(model: PreTrainedModel, policy: str, batch: int, context: int, **settings: object) -> Record | None:
    """As `step`; None where memory does not suffice."""
    device = model.get_input_embeddings().weight.device
    try:
        return step(model, policy, batch, context, **settings)  # type: ignore[arg-type]
    except (torch.OutOfMemoryError, MemoryError):
        return None
    finally:
        clear(device)


def full_step(model: PreTrainedModel, batch: int, context: int, **settings: object) -> Record | None:
    """The baseline: a full cache with the fastest backend here. A backend that a machine lacks is named with its error.

    The last backend is our own kernel over as many slots, without scores, while one program can hold them.
    """
    flash = model.dtype.itemsize == 2 and model.get_input_embeddings().weight.is_cuda
    backends: list[tuple[str, FullAttention | None]] = [("full", "exact")]
    backends += [(f"window:{context - 1}", None)] if context <= 2**15 else []
    if flash and batch > 1:  # flash attention is not split at batch 1
        backends = [("full", "flash"), *backends]
    records: list[Record] = []
    for policy, backend in backends:
        try:
            record = step_or_none(model, policy, batch, context, full_attention=backend, **settings)
        except (RuntimeError, NotImplementedError) as error:
            record = {"policy": policy, "reading": backend, "error": str(error)[:200], "median_s": float("inf")}
        records += [] if record is None else [record]
    if not any("error" not in record for record in records):
        return None
    fastest = min(records, key=lambda record: float(record["median_s"]))
    return _baseline(fastest, {r["reading"] or OURS: r.get("error", r["median_s"]) for r in records})


def largest(model: PreTrainedModel, policy: str, context: int, **settings: object) -> Record | None:
    """The largest batch that fits, tried from an estimate down, and its speed."""
    batch, tried = estimate(model, policy, context), []
    own = {"full_attention": "exact"} if policy == "full" else {}
    while batch >= 1:
        tried.append(batch)
        record = step_or_none(model, policy, batch, context, **(own | settings))
        if record is not None:
            return record | {"kind": "largest", "tried": tried}
        batch = min(batch - 1, round(batch * 0.96))
    return None


def largest_full(model: PreTrainedModel, context: int, same: Record | None = None, **settings: object) -> Record | None:
    """The baseline at its largest batch: by PyTorch's attention, and by our own kernel without scores.

    `same` is a `full_step` at one batch: where our kernel is not the fastest there, it is not tried here.
    """
    policies = ["full"]
    if context <= 2**15 and (same is None or same["reading"] == OURS):
        policies.append(f"window:{context - 1}")
    attempts = (largest(model, policy, context, **settings) for policy in policies)
    records = [record for record in attempts if record is not None]
    if not records:
        return None
    fastest = max(records, key=lambda record: float(record["tokens_per_s"]))
    return _baseline(fastest, {record["reading"] or OURS: record["tokens_per_s"] for record in records})


def _baseline(fastest: Record, by_backend: Record) -> Record:
    """Whatever its backend, it is a full cache."""
    return fastest | {"policy": "full", "reading": fastest["reading"] or OURS, "all_readings": by_backend}


def estimate(model: PreTrainedModel, policy: str, context: int) -> int:
    """How many rows fit into free memory, less a small reserve and the logits."""
    engine = Engine(model, policy, batch=1, length=context, options=EngineOptions(cuda_graphs=False))
    device, size = engine.rnn.device, engine.cache.nbytes
    logits = 16 * model.get_input_embeddings().weight.shape[0]  # bytes per row: in the model's dtype, float32, copies
    del engine
    clear(device)
    room = free_bytes(device) if device.type == "cuda" else min(free_bytes(device), 2**26)
    rows = int(room * (0.97 if device.type == "cuda" else 0.5) / (size + logits))
    return max(1, rows - rows % 8 if rows > 8 else rows)


def ratio(bounded: Record | None, full: Record | None) -> float | None:
    """How many times the baseline's tokens per second."""
    if bounded is None or full is None:
        return None
    return float(bounded["tokens_per_s"]) / float(full["tokens_per_s"])


def generate_speed(model: PreTrainedModel, batch: int, context: int, new: int = 8, runs: int = 3) -> Record:
    """transformers' own generate with its growing cache, for the record: seconds per token after the prompt."""
    device = model.get_input_embeddings().weight.device
    ids = torch.randint(0, model.get_input_embeddings().weight.shape[0], (batch, context), device=device)
    common = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}

    def generate(tokens: int) -> None:
        model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, **common)

    generate(1)
    short, long = (seconds(lambda n=n: generate(n), device, runs, least=0) for n in (1, new + 1))  # type: ignore[misc]
    per_token = (median(long) - median(short)) / new
    record = {"kind": "transformers generate", "policy": "full", "batch": batch, "context": context}
    return record | {"median_s": per_token, "tokens_per_s": batch / per_token, "runs_s": [*short, *long]}
