"""Lagged: keep tokens that look unusual in the light of the tokens that follow (the idea of LagKV, arXiv 2504.04704).

The text is cut into parts of L tokens, L half of the policy's `last`. Once the next part is there, a part's keys and
values are scaled, channel by channel, to the range of that next part; a token's score is the standard deviation over
channels, as a softmax within its part, keys plus values. It never changes again. Meant for `lagged+4:256,last=1/2`:
with fewer than 2 L protected tokens, part of what is compared may be gone.
"""

import torch
from torch import Tensor

from msrnn.core.rules import View

_LEAST = 1e-6  # of a channel's range


def score(view: View) -> Tensor:
    lag = max(1, view.policy.last // 2)
    end = view.now + 1
    due = (end % lag == 0) & (end >= 2 * lag)
    if not due.is_cuda and not due.any():  # nothing to compare; on a GPU to ask would cost more than to compute
        return view.scores
    own = view.visible & (view.positions >= end - 2 * lag) & (view.positions < end - lag)
    next_part = view.visible & (view.positions >= end - lag)
    spread = sum(_spread(rows, own, next_part) for rows in (view.keys, view.values))
    return torch.where(due & own, spread, view.scores)


def _spread(rows: Tensor, own: Tensor, next_part: Tensor) -> Tensor:
    """rows [B, U, K, N, D] -> [B, U, N]: a softmax over the part, averaged over KV heads."""
    outside = ~next_part[:, :, None, :, None]
    low = rows.masked_fill(outside, torch.inf).amin(3, keepdim=True)
    high = rows.masked_fill(outside, -torch.inf).amax(3, keepdim=True)
    deviation = ((rows - low) / (high - low).clamp(min=_LEAST)).std(-1)
    return deviation.masked_fill(~own[:, :, None], -torch.inf).softmax(-1).mean(2)
