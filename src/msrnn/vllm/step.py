"""One new token for each of many requests, in their blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.attention import Attention
from ..core.buffers import scratch
from ..core.recurrence import run
from ..core.slots import State
from ..kernels import step as ops
from ..policy import Policy
from .block import Blocks


def step(
    blocks: Blocks,
    index: Tensor,
    seen: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    policy: Policy,
    attention: Attention,
    out: Tensor | None = None,
) -> Tensor:
    """index, seen [B]; query [B, H, D], key [B, G, D], value [B, G, V] -> [B, H, V], in `out` if it is given.

    Nothing is asked of the host and shapes never change, as a CUDA graph needs it.
    """
    share = blocks.keys.shape[1] // key.shape[1]  # where every query head decides alone, each has rows of its own
    key, value = (new.repeat_interleave(share, 1) if share > 1 else new for new in (key, value))
    if type(attention) is Attention:
        state = (blocks.keys, blocks.values, blocks.positions, blocks.scores, blocks.slot, seen)
        return ops.step(query, key, value, *state, policy, attention, index, out)
    output = _together(blocks, index, seen, query[:, :, None], key[:, :, None], value[:, :, None], policy, attention)
    return output[:, :, 0] if out is None else out.copy_(output[:, :, 0])


def _together(
    blocks: Blocks,
    index: Tensor,
    seen: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    policy: Policy,
    attention: Attention,
) -> Tensor:
    """Heads that other processes hold have a say: a chunk of one, on copies, which meets them on its way."""
    state = _gather(blocks, index, seen)
    output = run(state, query, key, value, policy, attention)
    _write(blocks, index, state, key, value)
    return output


def _gather(blocks: Blocks, index: Tensor, seen: Tensor) -> State:
    """The states of the requests as one batch. Rows are copied: they lie apart, and matmuls want them together."""
    limit = blocks.positions.shape[2]
    keys, values = _rows("keys of a batch", blocks.keys, index), _rows("values of a batch", blocks.values, index)
    positions = blocks.positions.index_select(0, index)
    scores = None if blocks.scores is None else blocks.scores.index_select(0, index)
    return State(keys, values, positions, scores, seen.clone(), limit, fed=limit)


def _rows(name: str, pages: Tensor, index: Tensor) -> Tensor:
    """pages [M, E, S, D], index [B] -> [B, E, S, D] in working memory."""
    out = scratch(name, (len(index), *pages.shape[1:]), pages.dtype, pages.device)
    return torch.index_select(pages, 0, index, out=out)


def _write(blocks: Blocks, index: Tensor, state: State, key: Tensor, value: Tensor) -> None:
    """What a step has changed: the newcomer's row, positions and scores. key [B, E, 1, D]."""
    heads = torch.arange(key.shape[1], device=key.device)
    slot = blocks.slot.index_select(0, index).repeat_interleave(key.shape[1] // blocks.slot.shape[1], 1)
    blocks.keys[index[:, None], heads, slot] = key[:, :, 0]
    blocks.values[index[:, None], heads, slot] = value[:, :, 0]
    blocks.positions.index_copy_(0, index, state.positions)
    blocks.slot.index_copy_(0, index, state.positions.argmin(-1))
    blocks.seen.index_copy_(0, index, state.seen)
    if blocks.scores is not None and state.scores is not None:
        blocks.scores.index_copy_(0, index, state.scores)
