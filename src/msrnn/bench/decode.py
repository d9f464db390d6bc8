"""A decoding step of the whole model at a given context, batch and policy, in the engine that generates.

The states are filled with random numbers, as if every row had read so many tokens. The opponent is the same engine
with a full cache, read in the fastest of the ways PyTorch has.
"""

from __future__ import annotations

from statistics import median

import torch
from transformers import PreTrainedModel

from ..engine.engine import Engine
from ..engine.static_cache import FullLayer, Reading, StaticLayer
from .measure import Record, clear, free_bytes, seconds, timed
from .shapes import weight_bytes

OURS = "our kernel"  # a way to read a full cache: without scores, over as many slots


@torch.no_grad()
def fill(engine: Engine, context: int) -> None:
    """As if every row had read `context` - 1 tokens: random keys and values, full states, nobody about to end."""
    for layer in engine.cache.static:
        layer.keys.normal_()
        layer.values.normal_()
        if not isinstance(layer, FullLayer):
            _crowd(layer, context - 1)
    engine.cache.seen.fill_(context - 1)
    engine.rows.left.fill_(2**40)
    engine.rows.token.random_(0, engine.model.get_input_embeddings().weight.shape[0])


def _crowd(layer: StaticLayer, seen: int) -> None:
    """Every slot but the last holds one of the newest tokens."""
    held = min(layer.positions.shape[2] - 1, seen)
    layer.positions.fill_(-1)
    layer.positions[:, :, :held] = torch.arange(seen - held, seen, device=layer.positions.device)
    layer.slot.fill_(held)
    if layer.scores is not None:
        layer.scores.uniform_()


@torch.no_grad()
def step(
    model: PreTrainedModel,
    policy: str,
    batch: int,
    context: int,
    *,
    reading: Reading | None = None,
    runs: int = 5,
    compiled: bool = False,
    bytes_per_second: float | None = None,
) -> Record:
    """Seconds and tokens a second of a step; `reading` is how a full cache is read, None for the engine's own way."""
    engine = Engine(model, policy, batch=batch, length=context, compiled=compiled, reading=reading)
    fill(engine, context)
    once = engine.capture().replay if engine.graphs else lambda: engine._step(False)
    device = engine.rnn.device
    found = timed(seconds(once, device, runs))
    kept = sum(_kept_bytes(layer) for layer in engine.cache.static)
    record: Record = {"kind": "step", "policy": policy, "batch": batch, "context": context, "reading": reading}
    record |= {
        "graph": engine.graphs,
        "compiled": compiled,
        "joined": engine.joined,
        "state_bytes": engine.cache.nbytes,
    } | found
    record["tokens_per_s"] = batch / found["median_s"]
    if device.type == "cuda":
        record["peak_bytes"] = torch.cuda.max_memory_allocated(device)
    if bytes_per_second is not None:
        floor = (weight_bytes(model) + kept) / bytes_per_second
        record |= {"floor_s": floor, "times_floor": found["median_s"] / floor}
    return record


def _kept_bytes(layer: StaticLayer) -> int:
    """Bytes of keys and values that a step has to read."""
    return sum(tensor.numel() * tensor.element_size() for tensor in (layer.keys, layer.values))


def step_or_none(model: PreTrainedModel, policy: str, batch: int, context: int, **more: object) -> Record | None:
    """As `step`; None where memory does not suffice."""
    device = model.get_input_embeddings().weight.device
    try:
        return step(model, policy, batch, context, **more)  # type: ignore[arg-type]
    except (torch.OutOfMemoryError, MemoryError):
        return None
    finally:
        clear(device)


def full_step(model: PreTrainedModel, batch: int, context: int, **more: object) -> Record | None:
    """The opponent: the fastest way to read a full cache here. Ways that a machine lacks are named with their error.

    The last way is our own kernel over as many slots, without scores, while one program can hold them.
    """
    flash = model.dtype.itemsize == 2 and model.get_input_embeddings().weight.is_cuda
    ways: list[tuple[str, Reading | None]] = [("full", "exact")]
    ways += [(f"window:{context - 1}", None)] if context <= 2**15 else []
    found: list[Record] = []
    for policy, reading in [("full", "flash"), *ways] if flash and batch > 1 else ways:  # it is not split at batch 1
        try:
            made = step_or_none(model, policy, batch, context, reading=reading, **more)
        except (RuntimeError, NotImplementedError) as error:
            made = {"policy": policy, "reading": reading, "error": str(error)[:200], "median_s": float("inf")}
        found += [] if made is None else [made]
    if not any("error" not in record for record in found):
        return None
    best = min(found, key=lambda record: float(record["median_s"]))
    return _opponent(best, {r["reading"] or OURS: r.get("error", r["median_s"]) for r in found})


def largest(model: PreTrainedModel, policy: str, context: int, **more: object) -> Record | None:
    """The largest batch that fits, tried from an estimate down, and its speed."""
    batch = estimate(model, policy, context)
    tried, how = [], {"reading": "exact"} if policy == "full" else {}
    while batch >= 1:
        tried.append(batch)
        found = step_or_none(model, policy, batch, context, **(how | more))
        if found is not None:
            return found | {"kind": "largest", "tried": tried}
        batch = min(batch - 1, round(batch * 0.96))
    return None


def largest_full(model: PreTrainedModel, context: int, same: Record | None = None, **more: object) -> Record | None:
    """The opponent at its largest batch: by PyTorch's attention, and by our own kernel without scores.

    `same` is a `full_step` at one batch: where our kernel is not the fastest there, it is not tried here.
    """
    ways = [("full", {"reading": "exact"})]
    if context <= 2**15 and (same is None or same["reading"] == OURS):
        ways.append((f"window:{context - 1}", {}))
    found = [largest(model, policy, context, **more, **how) for policy, how in ways]
    made = [one for one in found if one is not None]
    if not made:
        return None
    best = max(made, key=lambda one: float(one["tokens_per_s"]))
    return _opponent(best, {one["reading"] or OURS: one["tokens_per_s"] for one in made})


def _opponent(best: Record, told: Record) -> Record:
    """Whatever way it is read in, it is a full cache."""
    return best | {"policy": "full", "reading": best["reading"] or OURS, "all_readings": told}


def estimate(model: PreTrainedModel, policy: str, context: int) -> int:
    """How many rows fit into what is free, a twentieth and a few logits aside."""
    one = Engine(model, policy, batch=1, length=context, graphs=False)
    device, size = one.rnn.device, one.cache.nbytes
    logits = 16 * model.get_input_embeddings().weight.shape[0]  # bytes a row: in the model's dtype, float32, copies
    del one
    clear(device)
    room = free_bytes(device) if device.type == "cuda" else min(free_bytes(device), 2**26)
    rows = int(room * (0.97 if device.type == "cuda" else 0.5) / (size + logits))
    return max(1, rows - rows % 8 if rows > 8 else rows)


def ratio(bounded: Record | None, full: Record | None) -> float | None:
    """How many times the opponent's tokens a second."""
    if bounded is None or full is None:
        return None
    return float(bounded["tokens_per_s"]) / float(full["tokens_per_s"])


def generate_speed(model: PreTrainedModel, batch: int, context: int, new: int = 8, runs: int = 3) -> Record:
    """transformers' own generate with its growing cache, for the record: seconds a token after the prompt."""
    device = model.get_input_embeddings().weight.device
    ids = torch.randint(0, model.get_input_embeddings().weight.shape[0], (batch, context), device=device)
    common = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}

    def write(tokens: int) -> None:
        model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, **common)

    write(1)
    short, long = (seconds(lambda n=n: write(n), device, runs, least=0) for n in (1, new + 1))  # type: ignore[misc]
    each = (median(long) - median(short)) / new
    record = {"kind": "transformers generate", "policy": "full", "batch": batch, "context": context}
    return record | {"median_s": each, "tokens_per_s": batch / each, "runs_s": [*short, *long]}
