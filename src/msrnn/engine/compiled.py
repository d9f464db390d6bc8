"""A model's forward with the small operations between its matmuls fused by torch.compile."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Forward = Callable[[Tensor, Tensor], Tensor]


def compile_forward(forward: Forward) -> Forward:
    """The same, compiled between our attention calls; all layers share one compilation, all batches above 1 another."""
    compiled = torch.compile(forward, dynamic=True)

    def call(tokens: Tensor, positions: Tensor) -> Tensor:
        with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):  # do not recompile per layer index
            return compiled(tokens, positions)

    return call
