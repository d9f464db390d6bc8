"""Window attention: keep what the last 32 queries attended to (the observation window of SnapKV, arXiv 2404.14469).

A slot's memory is a ring of its attention weights under the last 32 queries, averaged over the heads of the unit. The
score is their mean. TOVA is a window of one query, H2O one of all.
"""

import torch
from torch import Tensor

from msrnn.core.rules import View

MEMORY = WINDOW = 32


def score(view: View) -> tuple[Tensor, Tensor]:
    memory = remember(view)
    return memory.mean(-1), memory


def remember(view: View) -> Tensor:
    """[B, U, N, 32]: the ring with this query's weights in its place."""
    place = torch.arange(WINDOW, device=view.now.device) == view.now.clamp(min=0)[..., None] % WINDOW
    return torch.where(place, view.weights.mean(2)[..., None], view.memory)
