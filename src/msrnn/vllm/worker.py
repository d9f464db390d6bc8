"""vLLM's worker, with pipelined prefill: the model reads a long prompt in pieces on several streams (`lanes`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.forward_context import (
    ForwardContext,
    get_forward_context,
    is_forward_context_available,
    override_forward_context,
)
from vllm.platforms import current_platform
from vllm.sequence import IntermediateTensors

from .. import kernels
from . import lanes
from .backend import bounded_layers
from .batch import Keep
from .connector import PrefixConnector
from .lane_count import lane_count
from .lanes import Streams

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as VllmWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as VllmWorker


class Worker(VllmWorker):  # type: ignore[misc]
    """What `--worker-cls` names."""

    def load_model(self, **options: Any) -> None:
        super().load_model(**options)
        if count := lane_count(self.vllm_config):
            model = self.model_runner.get_model()
            model.forward = in_pieces(model.forward, Streams(self.device, count if self.has_graphs() else 1))

    def has_graphs(self) -> bool:
        """Whether reads may be CUDA graphs; vLLM's memory profile has counted one of the others at a time."""
        layers = bounded_layers(self.vllm_config.compilation_config.static_forward_context).values()
        return kernels.compiled(self.device.type) and all(layer.impl.sinks is None for layer in layers)


def in_pieces(forward: Callable[..., Any], streams: Streams) -> Callable[..., Any]:
    """A model's forward pass, whose arguments and results are those of all tokens of a batch."""
    largest = 0  # tokens of a memory profile so far

    @wraps(forward)
    def run(*positional: Any, **inputs: Any) -> Any:
        nonlocal largest
        count = _token_count(inputs)
        if positional or count is None or not is_forward_context_available():
            return forward(*positional, **inputs)
        context = get_forward_context()
        if context.cudagraph_runtime_mode != CUDAGraphMode.NONE:
            return forward(**inputs)
        if context.attn_metadata is None and count > largest:
            largest = count
            return _profile(forward, streams, context, inputs, count)
        pieces = _pieces(context, count, streams)
        if len(pieces) < 2:
            return forward(**inputs)
        return _concatenate(streams.run([partial(_run, forward, inputs, *piece) for piece in pieces]))

    return run


def _token_count(inputs: dict[str, Any]) -> int | None:
    """How many tokens there are, if every input is by token."""
    counts = {len(tensor) for value in inputs.values() for tensor in _tensors(value)}
    return counts.pop() if len(counts) == 1 else None


def _tensors(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value.tensors.values()) if isinstance(value, IntermediateTensors) else [value]


def _pieces(context: ForwardContext, count: int, streams: Streams) -> list[tuple[slice, ForwardContext]]:
    """The tokens of every piece and vLLM's context for it; none where the batch is not one long prompt."""
    metadata = context.attn_metadata
    if not isinstance(metadata, dict) or not metadata or context.ubatch_slices is not None:
        return []
    kinds = {id(batch): batch for batch in metadata.values()}
    first = next(iter(kinds.values()))
    if len(first.rows) != 1 or first.token_count != count:
        return []
    stops = _stops()
    if not stops and first.rows[0].size <= lanes.PIECE:
        return []
    turns = streams.turns()
    cut = {kind: batch.pieces(lanes.PIECE, turns, streams.lanes, stops) for kind, batch in kinds.items()}
    return [
        (tokens, replace(context, attn_metadata={name: cut[id(batch)][number][1] for name, batch in metadata.items()}))
        for number, (tokens, _) in enumerate(next(iter(cut.values())))
    ]


def _stops() -> dict[int, Keep]:
    """Where in the prompt states are kept for later requests, and what keeps them."""
    connector = get_kv_transfer_group() if has_kv_transfer_group() else None
    return connector.stops() if isinstance(connector, PrefixConnector) else {}


def _run(forward: Callable[..., Any], inputs: dict[str, Any], tokens: slice, context: ForwardContext) -> Any:
    with override_forward_context(context):
        return forward(**{name: _slice(value, tokens) for name, value in inputs.items()})


def _slice(value: Any, tokens: slice) -> Any:
    if isinstance(value, IntermediateTensors):
        return IntermediateTensors({name: tensor[tokens] for name, tensor in value.tensors.items()})
    return None if value is None else value[tokens]


def _concatenate(results: list[Any]) -> Any:
    if isinstance(results[0], Tensor):
        return torch.cat(results)
    names = results[0].tensors
    return IntermediateTensors({name: torch.cat([result.tensors[name] for result in results]) for name in names})


def _profile(
    forward: Callable[..., Any], streams: Streams, context: ForwardContext, inputs: dict[str, Any], count: int
) -> Any:
    """vLLM's memory profile: what a pass takes, and beside it what the lanes take, whose memory is their own."""
    gpu = bool(streams.streams)
    before = torch.cuda.memory_allocated() if gpu else 0
    result = forward(**inputs)
    if not gpu:
        return result
    peak = torch.cuda.max_memory_allocated() - before
    filler = torch.empty(max(0, peak), dtype=torch.uint8, device=streams.device)
    some = range(0, min(count, lanes.PIECE * streams.lanes), lanes.PIECE)
    pieces = (slice(start, min(count, start + lanes.PIECE)) for start in some)
    streams.run([partial(_run, forward, inputs, piece, context) for piece in pieces])
    del filler
    return result
