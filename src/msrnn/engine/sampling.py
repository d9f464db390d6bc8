"""The next token, greedy or sampled, all on the device, with one random number per row and step.

A row's samples depend on its own seed and count alone, so they do not change with the batch around it.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = (1 << 53) - 1


def pick(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, seed: Tensor, count: Tensor) -> Tensor:
    """logits [B, vocabulary], temperature (0: the likeliest), top_k (0: all), top_p, seed and count [B] -> [B]."""
    logits = logits.float()
    drawn = _draw(logits, temperature, top_k, top_p, uniform(seed, count))
    return torch.where(temperature > 0, drawn, logits.argmax(-1))


def _draw(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, at: Tensor) -> Tensor:
    """The token at the share `at` [B] of the likeliest `top_k` tokens, of these those that together have `top_p`."""
    heat = temperature.clamp(min=1e-6)[:, None]
    likely, order = torch.sort((logits - logits.amax(-1, keepdim=True)) / heat, dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    allowed = (rank < top_k[:, None]) | (top_k[:, None] == 0)
    share = likely.masked_fill(~allowed, -torch.inf).softmax(-1)
    before = share.cumsum(-1) - share
    kept = share * (before < top_p[:, None])
    until = kept.cumsum(-1)
    wanted = at[:, None] * until[:, -1:]
    place = torch.searchsorted(until, wanted, right=True)
    last = (kept > 0).sum(-1, keepdim=True) - 1
    place = torch.minimum(place, last).clamp(min=0)  # rounding may point past the end; of NaN logits nothing is kept
    return order.gather(-1, place)[:, 0]


def uniform(seed: Tensor, count: Tensor) -> Tensor:
    """[B] in [0, 1): the number `count` of the sequence that `seed` names (splitmix64's mixing steps)."""
    word = seed * 0x5851F42D4C957F2D + (count + 1) * -0x61C8864680B583EB
    word = (word ^ _shift(word, 30)) * -0x40A7B892E31B1A47
    word = (word ^ _shift(word, 27)) * -0x6B2FB644ECCEEE15
    word = word ^ _shift(word, 31)
    return ((_shift(word, 11) & _MASK).double() * 2.0**-53).float().clamp(max=1 - 2**-24)


def _shift(word: Tensor, by: int) -> Tensor:
    """To the right, filled with zeros."""
    return (word >> by) & ((1 << (64 - by)) - 1)
