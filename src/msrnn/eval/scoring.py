"""How well every token of a batch of texts is predicted: teacher-forced, in pieces, never all logits at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import Cache, PreTrainedModel

from ..policy import PolicyLike
from .perplexity import empty

PIECE = 256
_WIDE = {"cpu": 1 << 24, "cuda": 1 << 28}  # bytes of logits in float32 at one time
Progress = Callable[[int], object]


class Positions(Protocol):
    """Says at which rotary positions the next piece stands; it may turn the keys held so far to fit."""

    def __call__(self, into: Cache, start: int, size: int) -> Tensor | None: ...


@torch.no_grad()
def token_nll(
    model: PreTrainedModel,
    ids: Tensor,
    policy: PolicyLike | None = None,
    *,
    piece: int = PIECE,
    positions: Positions | None = None,
    progress: Progress | None = None,
) -> Tensor:
    """ids [B, T] -> [B, T - 1] in float32 on the CPU: the nats of every token but the first, from an empty state.

    Without a policy, the plain model with transformers' own growing cache. All rows have the same length: a row is
    read as it would be alone.
    """
    if ids.ndim != 2 or ids.shape[1] < 2:
        raise ValueError(f"ids have the shape {tuple(ids.shape)}; [B, T] with T of at least 2 is needed")
    if piece < 1:
        raise ValueError(f"piece is {piece}; it must be at least 1")
    ids = ids.to(model.get_input_embeddings().weight.device)
    into, losses = empty(model, policy), []
    for start in range(0, ids.shape[1], piece):
        part = ids[:, start : start + piece]
        places = None if positions is None else positions(into, start, part.shape[1])
        given = {} if places is None else {"position_ids": places.to(ids.device).expand(len(part), -1)}
        logits = model(part, past_key_values=into, use_cache=True, **given).logits
        losses.append(_nll(logits, ids[:, start + 1 : start + 1 + piece]))
        del logits  # before the next piece makes its own
        if progress is not None:
            progress(part.numel())
    return torch.cat(losses, 1).cpu()


def _nll(logits: Tensor, targets: Tensor) -> Tensor:
    """logits [B, C, vocabulary], targets [B, C], or C - 1 where the text ends -> nats like targets, in float32."""
    rows = logits[:, : targets.shape[1]].flatten(0, 1)
    wanted = targets.flatten().to(rows.device)
    room = _WIDE.get(rows.device.type, _WIDE["cpu"])
    size = max(1, room // (4 * logits.shape[-1]))
    pairs = zip(torch.split(rows, size), torch.split(wanted, size), strict=True)
    losses = [cross_entropy(some.float(), right, reduction="none") for some, right in pairs]
    return torch.cat(losses).view(targets.shape) if losses else rows.new_empty(targets.shape, dtype=torch.float32)


def short_nll(
    model: PreTrainedModel, ids: Tensor, context: int, *, piece: int = PIECE, progress: Progress | None = None
) -> list[Tensor]:
    """The paper's baseline: every row [T] cut into pieces of `context` tokens, each read by the plain model alone.

    Of each piece all tokens but the first are predicted, so a row gives T - ceil(T / context) numbers (one less where
    the last piece is a single token), in the order of the text.
    """
    whole = ids.shape[1] // context * context
    pieces = ids[:, :whole].reshape(-1, context)
    # as many tokens at a time as a batch of whole rows would have logits for
    size = max(1, len(ids) * piece // min(piece, context))
    parts = (
        [token_nll(model, some, piece=piece, progress=progress) for some in torch.split(pieces, size)] if whole else []
    )
    head = torch.cat(parts).reshape(len(ids), -1) if parts else torch.empty(len(ids), 0)
    rest = ids[:, whole:]
    if rest.shape[1] > 1:
        head = torch.cat([head, token_nll(model, rest, piece=piece, progress=progress)], 1)
    return list(head)
