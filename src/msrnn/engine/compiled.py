"""A model's forward with the small operations between its matmuls fused by torch.compile."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Forward = Callable[[Tensor, Tensor], Tensor]


def fused(forward: Forward) -> Forward:
    """The same, fused between our attention calls; all layers share what is compiled, and so do all batches above 1."""
    made = torch.compile(forward, dynamic=True)

    def call(tokens: Tensor, positions: Tensor) -> Tensor:
        with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):  # a layer's index is no reason for another
            return made(tokens, positions)

    return call
