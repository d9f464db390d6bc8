"""Any rule of which token leaves when, imposed on the plain model: every layer sees a token until the step it dies.

A rule is just its deaths, so rules that no policy knows (frequency, chance, another layer's choices) can be compared
at equal size. Positions stay as they are. For experiments: it holds all keys and values and hides the dead by a mask.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DynamicCache, PreTrainedModel

from ..core.trace import ALIVE
from ..hf.cache import text_config

PIECE = 256


@torch.no_grad()
def imposed_nll(model: PreTrainedModel, ids: Sequence[int], deaths: Tensor, piece: int = PIECE) -> Tensor:
    """ids and deaths [T], the last step at which each is visible -> [T - 1]: nats of every token but the first."""
    if deaths.shape != (len(ids),):
        raise ValueError(f"{len(ids)} tokens need as many deaths, not {tuple(deaths.shape)}")
    device = model.get_input_embeddings().weight.device
    tokens, gone = torch.tensor([list(ids)], device=device), deaths.to(device)
    into, losses = DynamicCache(config=text_config(model)), []
    for start in range(0, len(ids), piece):
        steps = torch.arange(start, min(start + piece, len(ids)), device=device)
        born = torch.arange(int(steps[-1]) + 1, device=device)
        visible = (born <= steps[:, None]) & (gone[: len(born)] >= steps[:, None])
        hidden = torch.zeros(visible.shape, dtype=model.dtype, device=device)
        hidden.masked_fill_(~visible, torch.finfo(model.dtype).min)
        part = tokens[:, start : start + piece]
        logits = model(
            part, attention_mask=hidden[None, None], position_ids=steps[None], past_key_values=into, use_cache=True
        ).logits[0]
        wanted = tokens[0, start + 1 : start + 1 + piece]
        losses.append(cross_entropy(logits[: len(wanted)].float(), wanted, reduction="none"))
    return torch.cat(losses).cpu()


def deaths_by(priority: Sequence[float], capacity: int, last: int = 0) -> Tensor:
    """[T]: the lowest priority, fixed when a token came, leaves, the older of equals; the newest `last` never do."""
    if not 0 <= last < capacity:
        raise ValueError(f"last is {last}; it must lie from 0 to less than the capacity of {capacity}")
    deaths = torch.full((len(priority),), ALIVE, dtype=torch.int32)
    free: list[tuple[float, int]] = []
    for step in range(len(priority)):
        place = step - last  # from this step on, it may leave
        if place >= 0:
            heapq.heappush(free, (priority[place], place))
        if step >= capacity:
            deaths[heapq.heappop(free)[1]] = step
    return deaths
