"""Rotary positions beyond the trained length: plain, the paper's compression of gaps, and cache-relative ones.

Take the tokens a unit holds when a query comes, and the query's own token. The gap between neighbours among them, g, is
counted as g (`plain`: every token stays where it was read), as ln(ln g) where g > 10 and g otherwise (`gaps`, the
paper's section 7.2), or as 1 (`relative`: the place within the state). Attention sees only differences of positions, so
the query stays where it is and the keys are turned to lie at the summed gaps before it.

`exact_nll` does that for every query, one token at a time, through `reference.py`: the definition. `Frozen` is the fast
path: before each piece it turns the keys held, and within the piece it counts true distances. With pieces of one token
both are the same; with longer ones a gap that opens inside a piece is counted in full until the piece ends.
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
from ..core.slots import State
from ..hf.cache import BoundedCache, BoundedLayer, Unsupported, text_config
from ..policy import Policy
from .scoring import Positions

Gap = Callable[[Tensor], Tensor]
BASE = 1  # where every piece but the first begins; only differences matter, and 0 would read as a new text


def paper_gap(gap: Tensor) -> Tensor:
    """ln(ln g) where g > 10, g otherwise; not monotone from 10 to 11, and so in the paper."""
    return torch.where(gap > 10, gap.clamp(min=3).log().log(), gap)


GAPS: dict[str, Gap | None] = {"plain": None, "gaps": paper_gap, "relative": torch.ones_like}


def mode(name: str, model: PreTrainedModel) -> Positions | None:
    if name not in GAPS:
        raise ValueError(f"unknown positions {name!r}; allowed: {', '.join(GAPS)}")
    gap = GAPS[name]
    return None if gap is None else Frozen(gap, Rotary.of(model))


@dataclass(frozen=True)
class Rotary:
    """How a model turns a key for a position: the first 2 x len(frequencies) numbers, halves paired."""

    frequencies: Tensor

    @classmethod
    def of(cls, model: PreTrainedModel) -> Rotary:
        """Refuses a model that turns its keys in another way."""
        found = [module for module in model.modules() if isinstance(getattr(module, "inv_freq", None), Tensor)]
        kind = text_config(model).model_type
        if len(found) != 1 or getattr(found[0], "rope_type", "default") in ("dynamic", "longrope"):
            raise Unsupported(f"{kind} has no single fixed rotary embedding; use positions = 'plain'")
        made = cls(found[0].inv_freq.detach().float())
        if not made._agrees(found[0]):
            raise Unsupported(f"{kind} turns its keys in a way of its own; use positions = 'plain'")
        return made

    def _agrees(self, module: Any) -> bool:
        """Whether the model's own code turns a vector as we do."""
        own = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
        if own is None:
            return False
        size, device = 2 * len(self.frequencies), self.frequencies.device
        vector = torch.linspace(-1, 1, size, device=device).view(1, 1, 1, size)
        with torch.no_grad():
            cos, sin = module(vector, torch.tensor([[7]], device=device))
            theirs = own(vector, vector, cos, sin)[1] / getattr(module, "attention_scaling", 1.0)
        return bool(torch.allclose(theirs, self.turn(vector, torch.full((1, 1, 1), 7.0, device=device)), atol=1e-5))

    def turn(self, keys: Tensor, by: Tensor) -> Tensor:
        """keys [..., D], by [...]: each key as it would be that many positions later."""
        angles = by[..., None].double() * self.frequencies.to(by.device).double()
        cos, sin = angles.cos(), angles.sin()
        half = len(self.frequencies)
        wide = torch.promote_types(keys.dtype, torch.float32)
        one, two, rest = torch.split(keys.to(wide), [half, half, keys.shape[-1] - 2 * half], -1)
        cos, sin = cos.to(wide), sin.to(wide)
        return torch.cat([one * cos - two * sin, two * cos + one * sin, rest], -1).to(keys.dtype)


def places(births: Tensor, now: int, gap: Gap, at: float) -> Tensor:
    """births [..., S] of the tokens held (-1: empty) -> where they count as lying for a query of step `now` at `at`."""
    order = births.argsort(-1, descending=True)  # the newest first, empty slots last
    ordered = births.gather(-1, order)
    later = torch.cat([torch.full_like(ordered[..., :1], now), ordered[..., :-1]], -1)
    counted = gap((later - ordered).double())
    return torch.empty_like(counted).scatter_(-1, order, at - counted.cumsum(-1))


@dataclass
class Frozen:
    """Turns the keys of a bounded cache before every piece, and remembers where each of them lies."""

    gap: Gap
    rotary: Rotary
    began: int = 0
    base: float = 0.0
    lying: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # by layer: births in order, their positions

    def __call__(self, into: Cache, start: int, size: int) -> Tensor | None:
        if not isinstance(into, BoundedCache):
            raise ValueError("positions other than plain are for a bounded state; the plain model holds every token")
        if start == 0:
            self.began, self.base, self.lying = 0, 0.0, {}
            return None
        for layers in _alike(into.bounded):
            self._turn(layers, start)
        self.began, self.base = start, float(BASE)
        return BASE + torch.arange(size)[None]

    def _turn(self, layers: dict[int, State], start: int) -> None:
        """Layers of one shape together, [B, layers, U, S]: with short pieces launches are what takes time."""
        births = torch.stack([state.positions for state in layers.values()], 1)
        keys = torch.stack([state.keys for state in layers.values()], 1)
        new = places(births, start, self.gap, BASE)
        by = torch.where(births >= 0, new - self._now(list(layers), births), 0.0)
        for state, turned in zip(layers.values(), self.rotary.turn(keys, by).unbind(1), strict=True):
            state.keys.copy_(turned)
        ordered, order = births.sort(-1)
        now = zip(ordered.unbind(1), new.gather(-1, order).unbind(1), strict=True)
        self.lying |= dict(zip(layers, now, strict=True))

    def _now(self, layers: Sequence[int], births: Tensor) -> Tensor:
        """Where the keys lie that came with the last piece or before it."""
        came = self.base + (births - self.began).double()
        if layers[0] not in self.lying:
            return came
        ordered, at = (torch.stack(one, 1) for one in zip(*(self.lying[layer] for layer in layers), strict=True))
        older = at.gather(-1, torch.searchsorted(ordered, births).clamp(max=ordered.shape[-1] - 1))
        return torch.where(births >= self.began, came, older)


def _alike(layers: Iterable[BoundedLayer]) -> list[dict[int, State]]:
    """The states by layer, those that can be worked on as one tensor together."""
    groups: dict[tuple[Any, ...], dict[int, State]] = {}
    for index, layer in enumerate(layers):
        state = layer.state
        assert state is not None
        key = (state.keys.shape, state.positions.shape, state.limit, state.keys.dtype, state.keys.device)
        groups.setdefault(key, {})[index] = state
    return list(groups.values())


_EXACT = "msrnn_exact_positions"


@torch.no_grad()
def exact_nll(model: PreTrainedModel, ids: Tensor, policy: Policy, gap: Gap) -> Tensor:
    """ids [T] -> [T - 1]: the nats of every token but the first, one token at a time, all positions exact.

    For small models and short texts: all keys are kept to be turned anew at every step.
    """
    config, rotary = text_config(model), Rotary.of(model)
    layers: dict[int, reference.Reference] = {}

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
        heads, kv_heads, now = query.shape[1], key.shape[1], key.shape[2] - 1
        state = layers.setdefault(module.layer_idx, reference.start(policy, heads, kv_heads))
        for rows in state.rows:
            births = torch.tensor([row.position for row in rows], dtype=torch.long)
            for row, at in zip(rows, places(births, now, gap, now).tolist(), strict=True):
                moved = torch.full((kv_heads,), at - row.position, dtype=torch.float64)
                row.key = rotary.turn(key[0, :, row.position], moved)
        newest = (query[0], key[0, :, now:], value[0, :, now:])
        return reference.run(state, *newest, policy, Attention(scaling)).transpose(0, 1)[None], None

    AttentionInterface.register(_EXACT, attend)
    AttentionMaskInterface.register(_EXACT, lambda *_, **__: None)
    before = config._attn_implementation
    model.set_attn_implementation(_EXACT)
    try:
        cache, losses = DynamicCache(config=config), []
        for step, one in enumerate(ids[:-1]):
            logits = model(one.view(1, 1), past_key_values=cache, use_cache=True).logits[0]
            losses.append(cross_entropy(logits.double(), ids[step + 1 : step + 2], reduction="none"))
        return torch.cat(losses)
    finally:
        model.set_attn_implementation(before)
