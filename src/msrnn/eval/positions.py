"""RoPE positions beyond the trained length: plain, the paper's compressed gaps, and positions within the state.

Take the tokens in a unit's state when a query comes, and the query's own token. The gap g between neighbours counts as
g (`plain`: every token keeps its position), as ln(ln g) where g > 10 and g otherwise (`gaps`, the paper's section 7.2),
or as 1 (`relative`: the rank within the state). Attention sees only differences of positions, so the query keeps its
position and the cached keys are re-rotated to the summed gaps before it.

`exact_nll` does that for every query, one token at a time, through `reference.py`: the definition. `PiecePositions` is
the fast path: it re-rotates the cached keys before each piece and counts true distances within the piece. With pieces
of one token both are the same; with longer ones a gap that opens inside a piece counts in full until the piece ends.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AttentionInterface, AttentionMaskInterface, Cache, DynamicCache, PreTrainedModel

from ..core import reference
from ..core.attention import Attention
from ..core.slots import Slots
from ..hf.cache import BoundedCache, BoundedLayer
from ..hf.geometry import Unsupported, text_config
from ..policy import Policy
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
    """Re-rotates the keys of a bounded cache before every piece, and remembers the RoPE position of each.

    `start` is the step of the last piece's first token, `base` its RoPE position; `known` has, by layer, the positions
    in the text in ascending order and their RoPE positions.
    """

    gap: Gap
    rotary: Rotary
    start: int = 0
    base: float = 0.0
    known: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __call__(self, cache: Cache, start: int, size: int) -> Tensor | None:
        if not isinstance(cache, BoundedCache):
            raise ValueError("positions other than plain are for a bounded state; the plain model holds every token")
        if start == 0:
            self.start, self.base, self.known = 0, 0.0, {}
            return None
        for layers in _same_shape(cache.bounded):
            self._rotate(layers, start)
        self.start, self.base = start, float(BASE)
        return BASE + torch.arange(size)[None]

    def _rotate(self, layers: dict[int, Slots], start: int) -> None:
        """Layers of one shape together, [B, layers, U, S]: with short pieces kernel launches take the time."""
        positions = torch.stack([state.positions for state in layers.values()], 1)
        keys = torch.stack([state.keys for state in layers.values()], 1)
        rotary = rotary_positions(positions, start, self.gap, BASE)
        offsets = torch.where(positions >= 0, rotary - self._current(list(layers), positions), 0.0)
        for state, rotated in zip(layers.values(), self.rotary.rotate(keys, offsets).unbind(1), strict=True):
            state.keys.copy_(rotated)
        ordered, order = positions.sort(-1)
        known = zip(ordered.unbind(1), rotary.gather(-1, order).unbind(1), strict=True)
        self.known |= dict(zip(layers, known, strict=True))

    def _current(self, layers: Sequence[int], positions: Tensor) -> Tensor:
        """The RoPE positions that the cached keys have now: those of the last piece, and older ones."""
        newest = self.base + (positions - self.start).double()
        if layers[0] not in self.known:
            return newest
        ordered, rotary = (torch.stack(one, 1) for one in zip(*(self.known[layer] for layer in layers), strict=True))
        older = rotary.gather(-1, torch.searchsorted(ordered, positions).clamp(max=ordered.shape[-1] - 1))
        return torch.where(positions >= self.start, newest, older)


def _same_shape(layers: Iterable[BoundedLayer]) -> list[dict[int, Slots]]:
    """The states by layer, grouped by what can be stacked into one tensor."""
    groups: dict[tuple[Any, ...], dict[int, Slots]] = {}
    for index, layer in enumerate(layers):
        state = layer.slots
        assert state is not None
        key = (state.keys.shape, state.positions.shape, state.limit, state.keys.dtype, state.keys.device)
        groups.setdefault(key, {})[index] = state
    return list(groups.values())


_EXACT = "msrnn_exact_positions"


@torch.no_grad()
def exact_nll(model: PreTrainedModel, ids: Tensor, policy: Policy, gap: Gap) -> Tensor:
    """ids [T] -> [T - 1]: the nats of every token but the first, one token at a time, all positions exact.

    For small models and short texts: all keys stay in memory and are re-rotated at every step.
    """
    config, rotary = text_config(model), Rotary.of(model)
    layers: dict[int, reference.Reference] = {}

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
        heads, kv_heads, step = query.shape[1], key.shape[1], key.shape[2] - 1
        state = layers.setdefault(module.layer_idx, reference.start(policy, heads, kv_heads))
        for rows in state.rows:
            positions = torch.tensor([row.position for row in rows], dtype=torch.long)
            for row, rope in zip(rows, rotary_positions(positions, step, gap, step).tolist(), strict=True):
                offsets = torch.full((kv_heads,), rope - row.position, dtype=torch.float64)
                row.key = rotary.rotate(key[0, :, row.position], offsets)
        newest = (query[0], key[0, :, step:], value[0, :, step:])
        return reference.run(state, *newest, policy, Attention(scaling)).transpose(0, 1)[None], None

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
