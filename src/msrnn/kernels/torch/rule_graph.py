"""A research rule's scan on a GPU as one CUDA graph: thousands of small kernels, launched by one replay.

A rule that a graph cannot hold (it waits for the device) runs kernel by kernel instead.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable

import torch
from torch import Tensor

from ...core.attention import Attention
from ...core.slots import Columns
from ...policy import Policy
from . import scan as eager
from .scan import Scan

log = logging.getLogger("msrnn")
_MOST = 4  # graphs at a time: each holds the memory of a scan
_LEAST_ROWS = 16  # below, capturing costs more than it saves
_graphs: OrderedDict[Hashable, Graph] = OrderedDict()
_refused: set[str | None] = set()


class Graph:
    """The scan of one policy for tensors of one shape. Its outputs stay valid until the next replay."""

    def __init__(self, tensors: list[Tensor | None], policy: Policy, attention: Attention) -> None:
        self.inputs = [None if tensor is None else tensor.clone() for tensor in tensors]
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # libraries allocate on their first call, which a capture forbids
            self._scan(policy, attention, rows=2)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.result = self._scan(policy, attention)

    def _scan(self, policy: Policy, attention: Attention, rows: int | None = None) -> Scan:
        logits, steps, *columns = self.inputs
        assert logits is not None
        assert steps is not None
        return eager.scan(logits[:, :, :rows], Columns(*columns), steps[:, :rows], policy, attention)  # type: ignore[arg-type]

    def replay(self, tensors: list[Tensor | None]) -> Scan:
        for ours, theirs in zip(self.inputs, tensors, strict=True):
            if ours is not None and theirs is not None:
                ours.copy_(theirs)
        self.graph.replay()
        weights, total, *kept = self.result
        return Scan(weights, total, *(None if tensor is None else tensor.clone() for tensor in kept))  # type: ignore[arg-type]


def scan(logits: Tensor, columns: Columns, steps: Tensor, policy: Policy, attention: Attention) -> Scan:
    """See `kernels/torch/scan.py`."""
    tensors = [logits, steps, *columns]
    plain = attention.sinks is None and not attention.sharded and not torch.cuda.is_current_stream_capturing()
    if not plain or logits.shape[2] < _LEAST_ROWS or policy.rule in _refused:
        return eager.scan(logits, columns, steps, policy, attention)
    shapes = tuple(None if tensor is None else (tensor.shape, tensor.dtype) for tensor in tensors)
    key = (policy, attention.window, logits.device, shapes)
    if key not in _graphs and not _add(key, tensors, policy, attention):
        return eager.scan(logits, columns, steps, policy, attention)
    _graphs.move_to_end(key)
    return _graphs[key].replay(tensors)


def _add(key: Hashable, tensors: list[Tensor | None], policy: Policy, attention: Attention) -> bool:
    """Capture a graph; False, from now on, for a rule that cannot be captured."""
    while len(_graphs) >= _MOST:
        _graphs.popitem(last=False)
    try:
        with torch.inference_mode(False), torch.no_grad():
            _graphs[key] = Graph(tensors, policy, attention)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        _refused.add(policy.rule)
        reason = str(error).splitlines()[0]
        log.warning("msrnn: %s cannot go into a CUDA graph and runs kernel by kernel: %s", policy.rule, reason)
    return key in _graphs
