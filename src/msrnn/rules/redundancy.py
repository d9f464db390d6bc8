"""Redundancy: keep tokens that recent queries attended to and whose keys no other key resembles (the idea of R-KV).

The score is 0.1 x importance - 0.9 x redundancy (arXiv 2505.24133). Importance is the mean attention weight over the
last 32 queries. Redundancy is a softmax over the held tokens of a key's mean cosine with all other keys.
"""

import torch
from torch import Tensor
from torch.nn.functional import normalize

from msrnn.core.rules import View
from msrnn.rules.window_attention import MEMORY as MEMORY
from msrnn.rules.window_attention import remember

IMPORTANCE = 0.1


def score(view: View) -> tuple[Tensor, Tensor]:
    memory = remember(view)
    redundancy = similarity(view).masked_fill(~view.visible, -torch.inf).softmax(-1)
    return IMPORTANCE * memory.mean(-1) - (1 - IMPORTANCE) * redundancy.nan_to_num(), memory


def similarity(view: View) -> Tensor:
    """[B, U, N]: the mean cosine of each key with the other held keys, averaged over KV heads."""
    held = view.visible[:, :, None, :, None]
    directions = normalize(view.keys, dim=-1) * held
    total = directions.sum(3, keepdim=True)
    others = (held.sum(3) - 1).clamp(min=1)
    return (((directions * total).sum(-1) - 1) / others).mean(2)
