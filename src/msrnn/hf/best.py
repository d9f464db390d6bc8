"""`best:256`: the policy that we recommend on a model, in the bytes that 256 plain slots of TOVA take.

Here, and only here, the word becomes a policy: the preset and the slot format (`policy.py`), as many slots as fit, and
the budgets of a shipped profile that was made for these very weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..budgets.profile import is_by_head, open_profile, shipped_profiles
from ..core.formats import check_sizes
from ..plan import Plan, PolicyLike, per_layer
from ..policy import KV, PolicyText, is_best, parse_policy, read_size, recommended, split_policy, tova
from .cost import cost
from .geometry import Geometry, geometry, text_config
from .identity import fits

_FEW = 640  # slots: with more of them, 4-bit values lose more than their slots gain (docs/budgets.md)


@dataclass(frozen=True)
class Resolution:
    """What `best` stands for: the policy, its average capacity, and the bytes of state that it may take."""

    policy: str
    slots: int
    kv: str
    profile: str | None
    limit_bytes: int


def resolve(
    policy: PolicyLike,
    model: PreTrainedModel | PreTrainedConfig,
    *,
    dtype: torch.dtype | None = None,
    length: int | None = None,
    revision: str | None = None,
) -> PolicyLike:
    """`best:...` as the text that it stands for on this model; any other policy as it is."""
    if not is_best(policy):
        return policy
    return resolution(str(policy), model, dtype=dtype, length=length, revision=revision).policy


def resolution(
    text: str,
    model: PreTrainedModel | PreTrainedConfig,
    *,
    dtype: torch.dtype | None = None,
    length: int | None = None,
    revision: str | None = None,
) -> Resolution:
    """`best:256`, `best:1/8`, `best:64MiB`, with `kv=` and `profile=` where they are given, for texts of `length`."""
    layers, dtype = geometry(model), dtype or model.dtype or torch.float32
    context = getattr(text_config(model), "max_position_embeddings", None)
    kind, limit = recommended(split_policy(text)), _limit(text, layers, dtype, length or context)
    if _kv(kind) is None:
        kind = _with_format(kind, layers, dtype, limit)
    if (least := _state_bytes(kind, 1, layers, dtype)) > limit:
        raise ValueError(f"{text!r}: {limit:,} bytes hold no state; this model needs at least {least:,} bytes")
    for layer in layers:
        check_sizes(_kv(kind), layer.head_size)
    slots = _slots(kind, layers, dtype, limit)
    beyond = length is not None and context is not None and length > context
    profile = kind.profile or _shipped(model, slots, revision, by_layer=beyond)
    if profile and is_by_head(profile):
        slots = _slots(kind, layers, dtype, limit, by_head=True)
    policy = str(replace(kind, size=str(slots), profile=profile))
    return Resolution(policy, slots, _kv(kind) or "", profile, limit)


def _limit(text: str, layers: Sequence[Geometry], dtype: torch.dtype, length: int | None) -> int:
    """The bytes of state that the size of `text` allows: its own, or those of so many plain slots."""
    size = read_size(text, length)
    if size.unit == "bytes":
        return size.number
    return cost(layers, Plan.of(tova(size.number), len(layers)), dtype, 1).state


def _with_format(kind: PolicyText, layers: Sequence[Geometry], dtype: torch.dtype, limit: int) -> PolicyText:
    """Values in 4 bits as long as slots are few: then more slots are worth more than exact values."""
    int8, k8v4 = (replace(kind, kind=f"{kind.kind},kv={kv}") for kv in ("int8", "k8v4"))
    if any(layer.head_size % 4 for layer in layers):
        return int8
    return k8v4 if _slots(int8, layers, dtype, limit) < _slots(k8v4, layers, dtype, limit) <= _FEW else int8


def _slots(
    kind: PolicyText, layers: Sequence[Geometry], dtype: torch.dtype, limit: int, *, by_head: bool = False
) -> int:
    """The most slots whose state takes at most `limit` bytes; where windows bound it, any number above them."""

    def size(slots: int) -> int:
        return _state_bytes(kind, slots, layers, dtype, by_head=by_head)

    low, high = 1, 2
    while size(low) < size(high) <= limit:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(middle) <= limit else (low, middle)
    return low


def _state_bytes(
    kind: PolicyText, slots: int, layers: Sequence[Geometry], dtype: torch.dtype, *, by_head: bool = False
) -> int:
    """Keys, values, scales, positions and scores, the same number of slots everywhere; a profile's cost as much."""
    sizes = [[slots] * layer.kv_heads if by_head else slots for layer in layers]
    return cost(layers, per_layer(replace(kind, size=str(slots)).policy, sizes), dtype, 1).state


def _kv(kind: PolicyText) -> KV | None:
    return parse_policy(replace(kind, size="1").policy).kv


def _shipped(
    model: PreTrainedModel | PreTrainedConfig, slots: int, revision: str | None, *, by_layer: bool
) -> str | None:
    """The name of the package's profile for these weights, where it has capacities for such an average.

    One by KV head comes first: it says where slots are needed more finely. But what its heads need was measured within
    the trained context, and far beyond it budgets by layer are better (docs/results.md): there `by_layer` asks for one.
    """
    names = [name for name in shipped_profiles() if not (by_layer and is_by_head(name))]
    for name in sorted(names, key=is_by_head, reverse=True):
        if fits(name, model, revision) and slots >= min(open_profile(name)["grid"]):
            return name
    return None
