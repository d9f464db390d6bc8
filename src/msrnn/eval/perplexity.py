"""How well a model predicts texts, with a full or a bounded state: teacher-forced, in pieces.

A bounded state gives the same losses whatever the piece, so the piece is a matter of memory only: the logits of one
piece exist at a time, never those of a whole text.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import Cache, DynamicCache, PreTrainedModel

from ..hf.cache import cache as bounded_cache
from ..hf.geometry import text_config
from ..plan import PolicyLike

PIECE = 256  # tokens per forward pass: 48 MiB of logits for a vocabulary of 49,152 in float32
_FLOAT32_BYTES = {"cpu": 1 << 24, "cuda": 1 << 28}  # of logits converted to float32 at one time
Progress = Callable[[int], object]  # called with the number of tokens read since the last call


class Positions(Protocol):
    """Gives the RoPE positions of the next piece (None: plain ones); it may re-rotate the cached keys to fit."""

    def __call__(self, cache: Cache, start: int, size: int) -> Tensor | None: ...


@dataclass(frozen=True)
class Score:
    """`nll` in nats, summed over the predicted `tokens`: all but the first. `seconds` for the whole text."""

    nll: float
    tokens: int
    seconds: float

    @property
    def mean(self) -> float:
        return self.nll / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(self.mean)


def new_cache(model: PreTrainedModel, policy: PolicyLike | None = None) -> Cache:
    """An empty `past_key_values`: bounded by the policy; without one, the growing cache of the plain model."""
    return DynamicCache(config=text_config(model)) if policy is None else bounded_cache(model, policy)


def perplexity(
    model: PreTrainedModel,
    token_ids: Tensor | Iterable[int],
    policy: PolicyLike | None = None,
    *,
    piece: int = PIECE,
    progress: Progress | None = None,
) -> Score:
    """Score one text under a policy; without one, under the plain model with transformers' own cache."""
    return score(model, token_ids, new_cache(model, policy), piece=piece, progress=progress)


def score(
    model: PreTrainedModel,
    token_ids: Tensor | Iterable[int],
    cache: Cache,
    *,
    piece: int = PIECE,
    progress: Progress | None = None,
) -> Score:
    """Score one text into a cache of the caller, which has read the whole text afterwards."""
    ids = _one_text(token_ids)
    start = time.perf_counter()
    nll = token_nll(model, ids[None], cache=cache, piece=piece, progress=progress)
    return Score(float(nll.double().sum()), len(ids) - 1, time.perf_counter() - start)


@torch.no_grad()
def token_nll(
    model: PreTrainedModel,
    ids: Tensor,
    policy: PolicyLike | None = None,
    *,
    cache: Cache | None = None,
    piece: int = PIECE,
    positions: Positions | None = None,
    progress: Progress | None = None,
) -> Tensor:
    """ids [B, T] -> [B, T - 1] in float32 on the CPU: the nats of every token but the first.

    Read into `cache`, or else from an empty state under `policy`; without either, by the plain model with
    transformers' own cache. All rows have the same length, so each is read as it would be alone.
    """
    if ids.ndim != 2 or ids.shape[1] < 2:
        raise ValueError(f"ids have the shape {tuple(ids.shape)}; [B, T] with T of at least 2 is needed")
    if piece < 1:
        raise ValueError(f"piece is {piece}; it must be at least 1")
    ids = ids.to(model.get_input_embeddings().weight.device)
    cache, losses = new_cache(model, policy) if cache is None else cache, []
    for start in range(0, ids.shape[1], piece):
        part = ids[:, start : start + piece]
        position_ids = None if positions is None else positions(cache, start, part.shape[1])
        options = {} if position_ids is None else {"position_ids": position_ids.to(ids.device).expand(len(part), -1)}
        logits = model(part, past_key_values=cache, use_cache=True, **options).logits
        losses.append(_nll(logits, ids[:, start + 1 : start + 1 + piece]))
        del logits  # free them before the next piece makes its own
        if progress is not None:
            progress(part.numel())
    return torch.cat(losses, 1).cpu()


def _nll(logits: Tensor, targets: Tensor) -> Tensor:
    """logits [B, C, vocabulary], targets [B, C], or C - 1 where the text ends -> nats like targets, in float32."""
    rows = logits[:, : targets.shape[1]].flatten(0, 1)
    labels = targets.flatten().to(rows.device)
    limit = _FLOAT32_BYTES.get(rows.device.type, _FLOAT32_BYTES["cpu"])
    size = max(1, limit // (4 * logits.shape[-1]))
    pairs = zip(torch.split(rows, size), torch.split(labels, size), strict=True)
    losses = [cross_entropy(part.float(), label, reduction="none") for part, label in pairs]
    return torch.cat(losses).view(targets.shape) if losses else rows.new_empty(targets.shape, dtype=torch.float32)


def short_context_nll(
    model: PreTrainedModel, ids: Tensor, context: int, *, piece: int = PIECE, progress: Progress | None = None
) -> list[Tensor]:
    """The paper's baseline: every row [T] cut into contexts of `context` tokens, each read by the plain model alone.

    Of each context all tokens but the first are predicted, so a row gives T - ceil(T / context) numbers (one less
    where the last context is a single token), in the order of the text.
    """
    whole = ids.shape[1] // context * context
    contexts = ids[:, :whole].reshape(-1, context)
    # as many tokens per forward pass as a batch of whole rows would have
    batch = max(1, len(ids) * piece // min(piece, context))
    batches = torch.split(contexts, batch) if whole else ()
    parts = [token_nll(model, rows, piece=piece, progress=progress) for rows in batches]
    losses = torch.cat(parts).reshape(len(ids), -1) if parts else torch.empty(len(ids), 0)
    rest = ids[:, whole:]
    if rest.shape[1] > 1:
        losses = torch.cat([losses, token_nll(model, rest, piece=piece, progress=progress)], 1)
    return list(losses)


def largest_piece(model: PreTrainedModel, batch: int) -> int:
    """The most tokens per forward pass of `batch` texts whose logits leave most of the device's memory free."""
    device, vocabulary = model.get_input_embeddings().weight.device, int(text_config(model).vocab_size)
    limit = torch.cuda.mem_get_info(device)[1] // 16 if device.type == "cuda" else 2**28
    return max(1, int(limit) // int(batch * vocabulary * model.dtype.itemsize))


def _one_text(token_ids: Tensor | Iterable[int]) -> Tensor:
    """[T] or [1, T] -> [T]"""
    ids = token_ids if isinstance(token_ids, Tensor) else torch.tensor(list(token_ids), dtype=torch.long)
    if ids.ndim == 2 and len(ids) == 1:
        ids = ids[0]
    if ids.ndim != 1:
        raise ValueError(f"perplexity reads one text, token_ids [T] or [1, T], not {tuple(ids.shape)}")
    if len(ids) < 2:
        raise ValueError(f"the text has {len(ids)} tokens; perplexity needs at least 2, one to predict the other from")
    return ids
