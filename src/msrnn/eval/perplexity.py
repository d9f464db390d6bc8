"""How well a model predicts a text, whole or bounded: teacher-forced, in pieces, never all logits at once.

A bounded state read in pieces gives what one call would, whatever the piece, so the piece is a matter of memory only.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import Cache, DynamicCache, PreTrainedModel

from ..hf.cache import cache, text_config
from ..policy import PolicyLike

PIECE = 256  # tokens whose logits exist at one time: 48 MiB for a vocabulary of 49,152 in float32
_ROWS = 64  # of them in float32 again while the loss is taken
Progress = Callable[[int], object]  # told how many more tokens were read


@dataclass(frozen=True)
class Score:
    """`nll` in nats, summed over the `tokens` that were predicted: all but the first. `seconds` for all of it."""

    nll: float
    tokens: int
    seconds: float

    @property
    def mean(self) -> float:
        return self.nll / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(self.mean)


def perplexity(
    model: PreTrainedModel,
    token_ids: Tensor | Iterable[int],
    policy: PolicyLike | None = None,
    *,
    piece: int = PIECE,
    progress: Progress | None = None,
) -> Score:
    """One text under a policy; without one, under the plain model with transformers' own growing cache."""
    return score(model, token_ids, empty(model, policy), piece=piece, progress=progress)


def empty(model: PreTrainedModel, policy: PolicyLike | None = None) -> Cache:
    """A new `past_key_values`: bounded by the policy, or the one the plain model would make for itself."""
    return DynamicCache(config=text_config(model)) if policy is None else cache(model, policy)


@torch.no_grad()
def score(
    model: PreTrainedModel,
    token_ids: Tensor | Iterable[int],
    into: Cache,
    *,
    piece: int = PIECE,
    progress: Progress | None = None,
) -> Score:
    """The same into a cache of the caller's own, which has read the whole text afterwards."""
    ids = _ids(token_ids).to(model.get_input_embeddings().weight.device)
    if piece < 1:
        raise ValueError(f"piece is {piece}; it must be at least 1")
    if len(ids) < 2:
        raise ValueError(f"the text has {len(ids)} tokens; perplexity needs at least 2, one to predict the other from")
    total, began = torch.zeros((), dtype=torch.float64), time.perf_counter()
    for start in range(0, len(ids), piece):
        part = ids[start : start + piece]
        logits = model(part[None], past_key_values=into, use_cache=True).logits[0]
        total += _nll(logits, ids[start + 1 : start + 1 + piece])
        del logits  # before the next piece makes its own
        if progress is not None:
            progress(len(part))
    return Score(float(total), len(ids) - 1, time.perf_counter() - began)


def piece_for(model: PreTrainedModel, batch: int) -> int:
    """The most tokens per call of `batch` texts whose logits leave the device's memory to other things."""
    device, vocabulary = model.get_input_embeddings().weight.device, int(text_config(model).vocab_size)
    room = torch.cuda.mem_get_info(device)[1] // 16 if device.type == "cuda" else 2**28
    return max(1, int(room) // int(batch * vocabulary * model.dtype.itemsize))


def _nll(logits: Tensor, targets: Tensor) -> Tensor:
    """logits [C, vocabulary], targets [C], or C - 1 where the text ends -> their sum in float64."""
    targets = targets.to(logits.device)
    pairs = zip(torch.split(logits[: len(targets)], _ROWS), torch.split(targets, _ROWS), strict=True)
    sums = [cross_entropy(rows.float(), wanted, reduction="sum").double().cpu() for rows, wanted in pairs]
    return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64)


def _ids(token_ids: Tensor | Iterable[int]) -> Tensor:
    ids = token_ids if isinstance(token_ids, Tensor) else torch.tensor(list(token_ids), dtype=torch.long)
    if ids.ndim == 2 and len(ids) == 1:
        ids = ids[0]
    if ids.ndim != 1:
        raise ValueError(f"perplexity reads one text, token_ids [T] or [1, T], not {tuple(ids.shape)}")
    return ids
