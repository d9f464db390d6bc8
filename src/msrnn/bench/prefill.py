"""Prefill: the exact recurrence in chunks against one pass of full attention, in time and in peak memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from statistics import median

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from ..engine.pipeline import CHUNK, LANES, LAPS, PipelinedPrefill
from ..rnn import PIECE, RNN
from ..system.memory import Peak
from .measure import Record, clear, seconds, timed


def prompt(model: PreTrainedModel, batch: int, length: int) -> Tensor:
    weight = model.get_input_embeddings().weight
    return torch.randint(0, weight.shape[0], (batch, length), device=weight.device)


@torch.no_grad()
def bounded(
    model: PreTrainedModel, policy: str, batch: int, length: int, *, chunk: int, runs: int = 3, piece: int = PIECE
) -> Record:
    """The prompt through the recurrence, piece by piece, as the engine reads prompts together."""
    ids, rnn = prompt(model, batch, length), RNN(model, policy, chunk=chunk, piece=piece)

    def read() -> None:
        state = rnn.start()
        for part in torch.split(ids, piece, 1):
            _, state = rnn.step(part, state)

    return _measure(read, ids, runs) | {"policy": policy, "chunk": chunk, "piece": piece}


def exact(model: PreTrainedModel, policy: str, batch: int, length: int, *, chunk: int, runs: int = 3) -> Record:
    """The prompt through the recurrence as the engine reads it here: pipelined where that pays."""
    rnn = RNN(model, policy, chunk=chunk)
    bounded_only = all(each.capacity is not None for each in rnn.plan.parts)
    if rnn.device.type == "cuda" and batch == 1 and bounded_only:
        pipeline = PipelinedPrefill(rnn)
        if pipeline.fits(length):
            return _in_pipeline(pipeline, length, runs) | {"policy": policy, "compiled": False}
    return bounded(model, policy, batch, length, chunk=chunk, runs=runs)


@torch.no_grad()
def pipelined(
    model: PreTrainedModel,
    policy: str,
    length: int,
    *,
    chunk: int = CHUNK,
    lanes: int = LANES,
    laps: int = LAPS,
    runs: int = 3,
    compiled: bool = False,
) -> Record:
    """As `bounded`, with several chunks in flight and a CUDA graph for each round of them."""
    pipeline = PipelinedPrefill(RNN(model, policy), chunk=chunk, lanes=lanes, laps=laps, compile=compiled)
    return _in_pipeline(pipeline, length, runs) | {"policy": policy, "compiled": compiled}


def _in_pipeline(pipeline: PipelinedPrefill, length: int, runs: int) -> Record:
    """`first_s` is the first prompt's time, kernel compilation and graph capture included."""
    ids, start = prompt(pipeline.rnn.model, 1, length), time.perf_counter()
    pipeline.read(ids)[0].tolist()
    first = time.perf_counter() - start
    settings = {"chunk": pipeline.chunk, "lanes": pipeline.lanes, "laps": pipeline.laps, "joined": pipeline.fused}
    return _measure(lambda: pipeline.read(ids), ids, runs) | settings | {"first_s": first}


@torch.no_grad()
def full(
    model: PreTrainedModel,
    batch: int,
    length: int,
    *,
    runs: int = 3,
    backend: str = "flash",
    compiled: bool = False,
) -> Record:
    """One pass of the plain model over the whole prompt, without a cache, logits of the last token only."""
    ids = prompt(model, batch, length)

    def read() -> None:
        with _backend(backend):
            model(ids, use_cache=False, logits_to_keep=1)

    with _compiled_layers(model) if compiled else nullcontext():
        record = _measure(read, ids, runs)
    return record | {"policy": "full", "backend": backend, "compiled": compiled}


@contextmanager
def _compiled_layers(model: PreTrainedModel) -> Iterator[None]:
    """Each decoder layer compiled: one compilation serves them all, whatever the length."""
    layers = [module for module in model.modules() if type(module).__name__.endswith("DecoderLayer")]
    for layer in layers:
        layer.compile(dynamic=True)
    try:
        yield
    finally:
        for layer in layers:
            layer._compiled_call_impl = None


def fastest_full(
    model: PreTrainedModel, batch: int, length: int, *, runs: int = 3, backends: Sequence[str] = ("flash", "cudnn")
) -> Record | None:
    """The baseline with PyTorch's fastest backend here, by one layer's attention; None where none of them can."""
    device = model.get_input_embeddings().weight.device
    results: dict[str, float | str] = {}
    for backend in backends if device.type == "cuda" else ("any",):
        try:
            results[backend] = _attention_seconds(model, batch, length, backend)
        except (MemoryError, RuntimeError) as error:  # out of memory, or no such attention here
            results[backend] = str(error)[:100]
    times = {backend: result for backend, result in results.items() if isinstance(result, float)}
    if not times:
        return None
    try:
        fastest = min(times, key=lambda backend: times[backend])
        return full(model, batch, length, runs=runs, backend=fastest) | {"attention_s": results}
    except (MemoryError, torch.OutOfMemoryError):
        return None
    finally:
        clear(device)


def _attention_seconds(model: PreTrainedModel, batch: int, length: int, backend: str) -> float:
    """One layer's attention alone."""
    config, device = model.config.get_text_config(), model.get_input_embeddings().weight.device
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    query, key, value = torch.randn(3, batch, heads, length, size, dtype=model.dtype, device=device)

    def attend() -> None:
        with _backend(backend):
            scaled_dot_product_attention(query, key, value, is_causal=True)

    attend()
    return median(seconds(attend, device, 3, least=0))


def _backend(name: str) -> AbstractContextManager[None]:
    backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    return sdpa_kernel(backends[name]) if name in backends else nullcontext()


def _measure(read: Callable[[], object], ids: Tensor, runs: int) -> Record:
    batch, length = ids.shape
    with Peak(ids.device) as peak:
        read()
    times = timed(seconds(read, ids.device, runs, least=0))
    record: Record = {"kind": "prefill", "batch": batch, "length": length, "peak_bytes": peak.bytes}
    return record | times | {"tokens_per_s": batch * length / times["median_s"]}
