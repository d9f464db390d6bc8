"""Output-aware: how far the output moves if a token leaves now.

Without a token of weight p and value v, the other weights grow by 1 / (1 - p), so the output o moves by
p / (1 - p) x (v - o). The score is the length of that step, averaged over query heads.
"""

from torch import Tensor

from msrnn.core.rules import View

_LEAST = 1e-6  # of 1 - p: a token that has all the weight


def score(view: View) -> Tensor:
    batch, units, kv_heads, columns, _ = view.values.shape
    weights = view.weights.view(batch, units, kv_heads, -1, columns)
    outputs = weights @ view.values
    products = outputs @ view.values.transpose(-1, -2)
    squares = view.values.square().sum(-1)[:, :, :, None] + outputs.square().sum(-1, keepdim=True)
    distances = (squares - 2 * products).clamp(min=0).sqrt()
    return (weights / (1 - weights).clamp(min=_LEAST) * distances).mean((2, 3))
