"""Any eviction schedule on the plain model: every layer sees a token until its expiry, the last step it is visible.

A schedule is one expiry per token, so rules that no policy has (frequency, chance, another layer's choices) can be
compared at equal capacity. For experiments only: all keys and values stay in memory, evicted ones are masked.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DynamicCache, PreTrainedModel

from msrnn.core.trace import ALIVE
from msrnn.hf.cache import text_config

PIECE = 256


@torch.no_grad()
def scheduled_nll(model: PreTrainedModel, ids: Sequence[int], expiry: Tensor, piece: int = PIECE) -> Tensor:
    """ids and expiry [T] -> [T - 1]: the nats of every token but the first."""
    if expiry.shape != (len(ids),):
        raise ValueError(f"{len(ids)} tokens need as many expiries, not {tuple(expiry.shape)}")
    device = model.get_input_embeddings().weight.device
    tokens, expiry = torch.tensor([list(ids)], device=device), expiry.to(device)
    cache, losses = DynamicCache(config=text_config(model)), []
    for start in range(0, len(ids), piece):
        steps = torch.arange(start, min(start + piece, len(ids)), device=device)
        positions = torch.arange(int(steps[-1]) + 1, device=device)
        visible = (positions <= steps[:, None]) & (expiry[: len(positions)] >= steps[:, None])
        mask = torch.zeros(visible.shape, dtype=model.dtype, device=device)
        mask.masked_fill_(~visible, torch.finfo(model.dtype).min)
        part = tokens[:, start : start + piece]
        logits = model(
            part, attention_mask=mask[None, None], position_ids=steps[None], past_key_values=cache, use_cache=True
        ).logits[0]
        targets = tokens[0, start + 1 : start + 1 + piece]
        losses.append(cross_entropy(logits[: len(targets)].float(), targets, reduction="none"))
    return torch.cat(losses).cpu()


def expiry_by_priority(priority: Sequence[float], capacity: int, last: int = 0) -> Tensor:
    """[T]: the lowest priority is evicted, the older of equals; the newest `last` tokens never are."""
    if not 0 <= last < capacity:
        raise ValueError(f"last is {last}; it must lie from 0 to less than the capacity of {capacity}")
    expiry = torch.full((len(priority),), ALIVE, dtype=torch.int32)
    free: list[tuple[float, int]] = []
    for step in range(len(priority)):
        position = step - last  # from this step on it is no longer protected
        if position >= 0:
            heapq.heappush(free, (priority[position], position))
        if step >= capacity:
            expiry[heapq.heappop(free)[1]] = step
    return expiry
