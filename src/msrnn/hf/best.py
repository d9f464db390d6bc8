"""What a policy's text stands for on a model: `best:256`, and sizes in bytes (`byte_budget.py`).

`best:256` is the policy that we recommend, in the bytes that 256 plain slots of TOVA take. Here, and only here, the
word becomes a policy: the preset and the slot format (`policy.py`), as many slots as fit, and the budgets of a shipped
profile that was made for these very weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..budgets.profile import goal, is_by_head, open_profile, read_profile, shipped_profiles
from ..plan import Plan, PolicyLike
from ..policy import (
    KV,
    PolicyText,
    check_size,
    is_best,
    needs_model,
    read_size,
    recommended,
    split_policy,
    tova,
    with_capacity,
)
from .byte_budget import ByteBudget
from .cost import cost
from .geometry import Geometry, geometry, text_config
from .identity import check_profile, fits

_FEW = 640  # slots: with more of them, 4-bit values lose more than their slots gain (docs/budgets.md)
_BEYOND = "last=7/8"  # beyond the trained context old tokens do harm, so few slots are for them (docs/results.md)


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
    """`best:...` or a size in bytes as the text that it stands for on this model; any other policy as it is.

    A profile that was made for another model is refused.
    """
    if not isinstance(policy, str):
        return policy
    text = policy
    if is_best(text):
        return resolution(text, model, dtype=dtype, length=length, revision=revision).policy
    if profile := split_policy(text).profile:
        check_profile(profile, model, revision)
    if not needs_model(text):
        return text
    budget = ByteBudget(text, read_size(text).number, geometry(model), dtype or model.dtype or torch.float32)
    return split_policy(text).with_size(budget.slots(split_policy(text)))


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
    check_size(text, length=length or context)
    budget = ByteBudget(text, _limit(text, layers, dtype, length or context), layers, dtype)
    asked = recommended(split_policy(text))
    if asked.profile:
        check_profile(asked.profile, model, revision)
    beyond = length is not None and context is not None and length > context
    kind = replace(asked, profile=None, kind=f"{asked.kind},{_BEYOND}" if beyond else asked.kind)
    if _kv(kind) is None:
        kind = _with_format(kind, budget)
    slots = budget.slots(kind)
    profile = asked.profile or _shipped(model, slots, revision, by_layer=beyond)
    if profile:
        kind = replace(kind, profile=profile)
        slots = budget.slots(kind)
    return Resolution(kind.with_size(slots), slots, _kv(kind) or "", profile, budget.limit)


def _limit(text: str, layers: Sequence[Geometry], dtype: torch.dtype, length: int | None) -> int:
    """The bytes of state that the size of `text` allows: its own, or those of so many plain slots."""
    size = read_size(text, length)
    if size.unit == "bytes":
        return size.number
    return cost(layers, Plan.of(tova(size.number), len(layers)), dtype, 1).state


def _with_format(kind: PolicyText, budget: ByteBudget) -> PolicyText:
    """Values in 4 bits as long as slots are few: then more slots are worth more than exact values."""
    int8, k8v4 = (replace(kind, kind=f"{kind.kind},kv={kv}") for kv in ("int8", "k8v4"))
    if any(layer.head_size % 4 for layer in budget.layers):
        return int8
    return k8v4 if budget.slots(int8) < budget.slots(k8v4) <= _FEW else int8


def _kv(kind: PolicyText) -> KV | None:
    return with_capacity(kind.policy, 1).kv


def _shipped(
    model: PreTrainedModel | PreTrainedConfig, slots: int, revision: str | None, *, by_layer: bool
) -> str | None:
    """The name of the package's profile for these weights, where it has unequal capacities for such an average.

    One by KV head comes first: it says where slots are needed more finely. But what its heads need was measured within
    the trained context, and far beyond it budgets by layer are better (docs/results.md): there `by_layer` asks for one.
    Those for recall cost perplexity, so they have to be named.
    """
    names = [name for name in shipped_profiles() if goal(name) == "perplexity" and not (by_layer and is_by_head(name))]
    for name in sorted(names, key=is_by_head, reverse=True):
        # slots of its own for every KV head may take the bytes of one slot more
        if fits(name, model, revision) and slots > min(open_profile(name)["grid"]) and not _is_equal(name, slots):
            return name
    return None


def _is_equal(profile: str, slots: int) -> bool:
    """Whether every layer and KV head has the average: it does from the ends of the curves on."""
    layers = read_profile(profile, slots)
    return all(layer == (slots if isinstance(layer, int) else [slots] * len(layer)) for layer in layers)
