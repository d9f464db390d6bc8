"""RoPE positions beyond the trained length: plain, the paper's compressed gaps, and positions within the state.

Take the tokens in a unit's state when a query comes, and the query's own token. The gap g between neighbours counts as
g (`plain`: every token keeps its position), as ln(ln g) where g > 10 and g otherwise (`gaps`, the paper's section 7.2),
or as 1 (`relative`: the rank within the state). Attention sees only differences of positions, so the query keeps its
position and the cached keys are re-rotated to the summed gaps before it.

`exact_nll` does that for every query, one token at a time, through `reference.py`: the definition. `PiecePositions` is
the fast path: it re-rotates the cached keys before each piece and counts true distances within the piece. With pieces
of one token both are the same; with longer ones a gap that opens inside a piece counts in full until the piece ends.
Every re-rotation starts from the key as it was first stored, so rounding does not add up; with slots of fewer bits
(`kv=int8`) the rotated key is encoded again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AttentionInterface, AttentionMaskInterface, Cache, DynamicCache, PreTrainedModel

from ..core import reference
from ..core.attention import Attention
from ..core.formats import decode, encode, encode8
from ..core.heads import parts_of
from ..core.slots import Slots
from ..hf.cache import BoundedCache, BoundedLayer
from ..hf.geometry import Unsupported, text_config
from ..policy import KV, Policy
from .perplexity import Positions

Gap = Callable[[Tensor], Tensor]
BASE = 1  # position of the first token of every piece but the first; transformers takes 0 for a new text


def paper_gap(gap: Tensor) -> Tensor:
    """ln(ln g) where g > 10, g otherwise; it falls from 10 to 11, in the paper too."""
    return torch.where(gap > 10, gap.clamp(min=3).log().log(), gap)


GAPS: dict[str, Gap | None] = {"plain": None, "gaps": paper_gap, "relative": torch.ones_like}


def scheme(name: str, model: PreTrainedModel) -> Positions | None:
    """`plain` (None), `gaps` or `relative`."""
    if name not in GAPS:
        raise ValueError(f"unknown positions {name!r}; allowed: {', '.join(GAPS)}")
    gap = GAPS[name]
    return None if gap is None else PiecePositions(gap, Rotary.of(model))


@dataclass(frozen=True)
class Rotary:
    """How a model rotates a key to a position: its first 2 x len(frequencies) numbers, halves paired."""

    frequencies: Tensor

    @classmethod
    def of(cls, model: PreTrainedModel) -> Rotary:
        """The model's RoPE; a model with another scheme is refused."""
        modules = [module for module in model.modules() if isinstance(getattr(module, "inv_freq", None), Tensor)]
        kind = text_config(model).model_type
        if len(modules) != 1 or getattr(modules[0], "rope_type", "default") in ("dynamic", "longrope"):
            raise Unsupported(f"{kind} has no single fixed rotary embedding; use positions = 'plain'")
        rotary = cls(modules[0].inv_freq.detach().float())
        if not rotary._agrees(modules[0]):
            raise Unsupported(f"{kind} rotates its keys in a way of its own; use positions = 'plain'")
        return rotary

    def _agrees(self, module: Any) -> bool:
        """Whether the model's own code rotates a vector as we do."""
        apply_rotary = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
        if apply_rotary is None:
            return False
        size, device = 2 * len(self.frequencies), self.frequencies.device
        vector = torch.linspace(-1, 1, size, device=device).view(1, 1, 1, size)
        with torch.no_grad():
            cos, sin = module(vector, torch.tensor([[7]], device=device))
            theirs = apply_rotary(vector, vector, cos, sin)[1] / getattr(module, "attention_scaling", 1.0)
        return bool(torch.allclose(theirs, self.rotate(vector, torch.full((1, 1, 1), 7.0, device=device)), atol=1e-5))

    def rotate(self, keys: Tensor, offsets: Tensor) -> Tensor:
        """keys [..., D], offsets [...]: each key re-rotated to so many positions later."""
        angles = offsets[..., None].double() * self.frequencies.to(offsets.device).double()
        half = len(self.frequencies)
        dtype = torch.promote_types(keys.dtype, torch.float32)
        one, two, rest = torch.split(keys.to(dtype), [half, half, keys.shape[-1] - 2 * half], -1)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        return torch.cat([one * cos - two * sin, two * cos + one * sin, rest], -1).to(keys.dtype)


def rotary_positions(positions: Tensor, step: int, gap: Gap, query: float) -> Tensor:
    """positions [..., S] in the text (-1: an empty slot) -> RoPE positions before a query of `step` at `query`."""
    order = positions.argsort(-1, descending=True)  # the newest first, empty slots last
    ordered = positions.gather(-1, order)
    later = torch.cat([torch.full_like(ordered[..., :1], step), ordered[..., :-1]], -1)
    gaps = gap((later - ordered).double())
    return torch.empty_like(gaps).scatter_(-1, order, query - gaps.cumsum(-1))


@dataclass
class PiecePositions:
    """Re-rotates the keys of a bounded cache before every piece, from the keys as they were first stored.

    `start` is the step of the last piece's first token, `base` its RoPE position; `known` has, by layer, the positions
    in the text in ascending order, and the RoPE positions and keys that these tokens were first stored with.
    """

    gap: Gap
    rotary: Rotary
    start: int = 0
    base: float = 0.0
    known: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)

    def __call__(self, cache: Cache, start: int, size: int) -> Tensor | None:
        if not isinstance(cache, BoundedCache):
            raise ValueError("positions other than plain are for a bounded state; the plain model holds every token")
        if any(policy.residual is not None for policy in cache.plan.parts):
            raise ValueError("a residual is a mean of keys of several positions; use positions = 'plain', or fade")
        if start == 0:
            self.start, self.base, self.known = 0, 0.0, {}
            return None
        for layers in _same_shape(cache.bounded):
            self._rotate(layers, start, cache.model.dtype)
        self.start, self.base = start, float(BASE)
        return BASE + torch.arange(size)[None]

    def _rotate(self, layers: dict[int, Slots], start: int, dtype: torch.dtype) -> None:
        """Layers of one shape together, [B, layers, U, S]: with short pieces kernel launches take the time."""
        positions = torch.stack([state.positions for state in layers.values()], 1)
        keys = torch.stack([state.decoded(dtype)[0] for state in layers.values()], 1)
        first, keys = self._first_stored(list(layers), positions, keys)
        rotary = rotary_positions(positions, start, self.gap, BASE)
        offsets = torch.where(positions >= 0, rotary - first, 0.0)
        for state, rotated in zip(layers.values(), self.rotary.rotate(keys, offsets).unbind(1), strict=True):
            _store(state, rotated)
        ordered, order = positions.sort(-1)
        known = (ordered, first.gather(-1, order), _gather_keys(keys, order))
        self.known |= dict(zip(layers, zip(*(one.unbind(1) for one in known), strict=True), strict=True))

    def _first_stored(self, layers: Sequence[int], positions: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """RoPE positions [B, layers, U, S] and keys that the held tokens came with: now, or before the last piece."""
        newest = self.base + (positions - self.start).double()
        if layers[0] not in self.known:
            return newest, keys
        ordered, rotary, older = (
            torch.stack(one, 1) for one in zip(*(self.known[layer] for layer in layers), strict=True)
        )
        index = torch.searchsorted(ordered, positions).clamp(max=ordered.shape[-1] - 1)
        new = positions >= self.start
        first = torch.where(new, newest, rotary.gather(-1, index))
        return first, torch.where(new[..., None], keys, _gather_keys(older, index))


def _gather_keys(keys: Tensor, index: Tensor) -> Tensor:
    """keys [B, layers, G, S, D] in the order of index [B, layers, U, S]; one unit decides for all heads."""
    return keys.gather(-2, index.expand(keys.shape[:-1])[..., None].expand(keys.shape))


def _store(state: Slots, keys: Tensor) -> None:
    """keys [B, G, S, D] in the place of those in the slots, in their format; values stay."""
    if state.scales is None:
        state.keys.copy_(keys)
        return
    codes, scale = encode8(keys)  # both formats store keys in 8 bits
    state.keys.copy_(codes)
    state.scales[..., :1].copy_(scale)


def _same_shape(layers: Iterable[BoundedLayer]) -> list[dict[int, Slots]]:
    """The states by layer, grouped by what can be stacked into one tensor."""
    groups: dict[tuple[Any, ...], dict[int, Slots]] = {}
    for index, state in enumerate(
        part for layer in layers if layer.slots is not None for part in parts_of(layer.slots)
    ):
        key = (state.keys.shape, state.positions.shape, state.limit, state.keys.dtype, state.keys.device)
        groups.setdefault(key, {})[index] = state
    return list(groups.values())


def _as_stored(rows: Tensor, kv: KV | None, part: Literal["key", "value"] = "key") -> Tensor:
    """Keys or values [..., D] as slots of this format give them back."""
    return rows if kv is None else decode(*encode(rows, rows, kv), kv, rows.dtype)[part == "value"]


def _origin(step: int) -> int:
    """What RoPE positions are counted from where the token of `step` is a piece of its own."""
    return max(step - BASE, 0)


def _move(rotary: Rotary, keys: Tensor, by: float) -> Tensor:
    """keys [..., D], all re-rotated to so many positions later."""
    return rotary.rotate(keys, torch.full(keys.shape[:-1], by, dtype=torch.float64, device=keys.device))


_EXACT = "msrnn_exact_positions"


@torch.no_grad()
def exact_nll(model: PreTrainedModel, ids: Tensor, policy: Policy, gap: Gap) -> Tensor:
    """ids [T] -> [T - 1]: the nats of every token but the first, one token at a time, all positions exact.

    For small models and short texts: all keys stay in memory and are re-rotated at every step.
    """
    config, rotary, plain = text_config(model), Rotary.of(model), replace(policy, kv=None)
    layers: dict[int, reference.Reference] = {}

    def stored(keys: Tensor, by: float, origin: int) -> Tensor:
        """keys [G, D] moved by so many positions, as slots give them back whose positions count from `origin`."""
        return _move(rotary, _as_stored(_move(rotary, keys, by - origin), policy.kv), origin)

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
        heads, kv_heads, step = query.shape[1], key.shape[1], key.shape[2] - 1
        state = layers.setdefault(module.layer_idx, reference.start(plain, heads, kv_heads))
        for rows in state.rows:
            positions = torch.tensor([row.position for row in rows], dtype=torch.long)
            for row, rope in zip(rows, rotary_positions(positions, step, gap, step).tolist(), strict=True):
                first = stored(key[0, :, row.position], 0, _origin(row.position))
                row.key = stored(first, rope - row.position, _origin(step))
        newest = stored(key[0, :, step], 0, _origin(step))[:, None], _as_stored(value[0, :, step:], policy.kv, "value")
        return reference.run(state, query[0], *newest, plain, Attention(scaling)).transpose(0, 1)[None], None

    AttentionInterface.register(_EXACT, attend)
    AttentionMaskInterface.register(_EXACT, lambda *_, **__: None)
    before = config._attn_implementation
    model.set_attn_implementation(_EXACT)
    try:
        cache, losses = DynamicCache(config=config), []
        for step, token in enumerate(ids[:-1]):
            logits = model(token.view(1, 1), past_key_values=cache, use_cache=True).logits[0]
            losses.append(cross_entropy(logits.double(), ids[step + 1 : step + 2], reduction="none"))
        return torch.cat(losses)
    finally:
        model.set_attn_implementation(before)
