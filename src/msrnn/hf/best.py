"""`best:256`: the policy that we recommend on a model, in the bytes that 256 plain slots of TOVA take.

Here, and only here, the word becomes a policy: the preset and the slot format (`policy.py`), as many slots as fit, and
the budgets of a shipped profile that was made for these very weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..budgets.profile import open_profile, shipped_profiles
from ..core.formats import check_sizes
from ..policy import Plan, PolicyLike, PolicyText, is_best, read_size, recommended, split_policy, tova
from .cost import cost
from .geometry import Geometry, geometry, text_config
from .identity import fits


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
    """`best:256`, `best:1/8`, `best:64MiB`, with `kv=` and `profile=` where they are given."""
    kind, layers = recommended(split_policy(text)), geometry(model)
    plan = Plan.of(_at(kind, 1), len(layers))
    for layer in layers:
        check_sizes(plan[0].kv, layer.head_size)
    dtype = dtype or model.dtype or torch.float32
    length = length or getattr(text_config(model), "max_position_embeddings", None)
    limit = _limit(text, layers, dtype, length)
    slots = _slots(text, kind, layers, dtype, limit)
    profile = kind.profile or _shipped(model, slots, revision)
    policy = str(replace(kind, size=str(slots), profile=profile))
    return Resolution(policy, slots, plan[0].kv or "", profile, limit)


def _limit(text: str, layers: Sequence[Geometry], dtype: torch.dtype, length: int | None) -> int:
    """The bytes of state that the size of `text` allows: its own, or those of so many plain slots."""
    size = read_size(text, length)
    if size.unit == "bytes":
        return size.number
    return cost(layers, Plan.of(tova(size.number), len(layers)), dtype, 1).state


def _slots(text: str, kind: PolicyText, layers: Sequence[Geometry], dtype: torch.dtype, limit: int) -> int:
    """The most slots whose state takes at most `limit` bytes: keys, values, scales, positions and scores."""

    def state_bytes(slots: int) -> int:
        return cost(layers, Plan.of(_at(kind, slots), len(layers)), dtype, 1).state

    if state_bytes(1) > limit:
        raise ValueError(f"{text!r}: {limit:,} bytes hold no state; this model needs at least {state_bytes(1):,} bytes")
    low, high = 1, 2
    while state_bytes(high) <= limit and state_bytes(high) > state_bytes(low):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if state_bytes(middle) <= limit else (low, middle)
    return low


def _at(kind: PolicyText, slots: int) -> str:
    """The same number of slots in every layer: a profile's take as many bytes."""
    return replace(kind, size=str(slots)).policy


def _shipped(model: PreTrainedModel | PreTrainedConfig, slots: int, revision: str | None) -> str | None:
    """The name of the package's profile for these weights, where it has capacities for such an average."""
    for name in shipped_profiles():
        if fits(name, model, revision) and slots >= min(open_profile(name)["grid"]):
            return name
    return None
