"""Output-aware: how far the output moves if a token leaves now.

Without a token of weight p and value v, the other weights grow by 1 / (1 - p), so the output o moves by
p / (1 - p) x (v - o). The score is the length of that step, averaged over query heads. For the token with the most
weight this is p times its distance from the mean of the others, which is a number also where p is 1 but for rounding.
"""

import torch
from torch import Tensor

from msrnn.core.rules import View


def score(view: View) -> Tensor:
    batch, units, kv_heads, columns, size = view.values.shape
    weights = view.weights.view(batch, units, kv_heads, -1, columns)
    outputs = weights @ view.values
    products = outputs @ view.values.transpose(-1, -2)
    squares = view.values.square().sum(-1)[:, :, :, None] + outputs.square().sum(-1, keepdim=True)
    steps = weights / (1 - weights).clamp(min=0.5) * (squares - 2 * products).clamp(min=0).sqrt()
    most = weights.argmax(-1, keepdim=True)  # the only one whose weight may exceed a half
    others = weights.scatter(-1, most, 0.0)
    mean = others @ view.values / others.sum(-1, keepdim=True).clamp(min=torch.finfo(others.dtype).tiny)
    value = view.values.gather(3, most.expand(*most.shape[:-1], size))
    step = weights.gather(-1, most) * (value - mean).norm(dim=-1, keepdim=True)
    return steps.scatter(-1, most, step).mean((2, 3))
