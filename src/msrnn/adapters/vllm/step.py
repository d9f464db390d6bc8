"""One new token for each of many requests: `recurrence.run` on all of their states at once."""

from __future__ import annotations

import torch
from torch import Tensor

from ...attention import Attention
from ...policy import Policy
from ...recurrence import run
from ...scratch import scratch
from ...state import State
from .block import Blocks


def step(
    blocks: Blocks,
    index: Tensor,
    seen: Tensor,
    longest: int | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    policy: Policy,
    attention: Attention,
) -> Tensor:
    """index, seen [B]; query [B, H, 1, D], key [B, G, 1, D], value [B, G, 1, V] -> [B, H, 1, V].

    `longest`, the largest of `seen`, saves looking at slots that are empty in every request. Without it nothing is
    asked of the host and shapes never change, as a CUDA graph needs it.
    """
    if longest is not None and len(index) == 1:
        return run(blocks.state(int(index), longest), query, key, value, policy, attention)
    share = blocks.keys.shape[1] // key.shape[1]  # where every query head decides alone, each has rows of its own
    key, value = (new.repeat_interleave(share, 1) if share > 1 else new for new in (key, value))
    state = _gather(blocks, index, seen, longest)
    vacant = state.positions.argmin(-1)
    output = run(state, query, key, value, policy, attention)
    _write(blocks, index, state, vacant, key, value)
    return output


def _gather(blocks: Blocks, index: Tensor, seen: Tensor, longest: int | None) -> State:
    """The states of the requests as one batch. Rows are copied: they lie apart, and matmuls want them together."""
    limit = blocks.positions.shape[2]
    fed = limit if longest is None else longest
    used = min(fed + 1, limit)
    keys = _rows("keys of a batch", blocks.keys[:, :, :used], index)
    values = _rows("values of a batch", blocks.values[:, :, :used], index)
    positions = blocks.positions[:, :, :used].index_select(0, index)
    scores = None if blocks.scores is None else blocks.scores[:, :, :used].index_select(0, index)
    return State(keys, values, positions, scores, seen.clone(), limit, fed=fed)


def _rows(name: str, pages: Tensor, index: Tensor) -> Tensor:
    """pages [M, E, S, D], index [B] -> [B, E, S, D] in working memory."""
    out = scratch(name, (len(index), *pages.shape[1:]), pages.dtype, pages.device)
    return torch.index_select(pages, 0, index, out=out)


def _write(blocks: Blocks, index: Tensor, state: State, vacant: Tensor, key: Tensor, value: Tensor) -> None:
    """What a step has changed: the newcomer's row, positions and scores. vacant [B, U], key [B, E, 1, D]."""
    used = state.positions.shape[2]
    heads = torch.arange(key.shape[1], device=key.device)
    slot = vacant.repeat_interleave(key.shape[1] // vacant.shape[1], 1)
    blocks.keys[index[:, None], heads, slot] = key[:, :, 0]
    blocks.values[index[:, None], heads, slot] = value[:, :, 0]
    blocks.positions[:, :, :used].index_copy_(0, index, state.positions)
    blocks.seen.index_copy_(0, index, state.seen)
    if blocks.scores is not None and state.scores is not None:
        blocks.scores[:, :, :used].index_copy_(0, index, state.scores)
