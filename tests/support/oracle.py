"""A model on the definition: the slow check that the transformers adapter is held to.

It shares nothing with the adapter: no bounded cache, no mask, no chunks. The model runs on an attention function of
this file, which holds one `reference.Reference` per layer and looks at new keys only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from msrnn.core import reference
from msrnn.core.attention import Attention
from msrnn.core.reference import Reference
from msrnn.hf.geometry import geometry
from msrnn.plan import parse_layer_policy, parts


@contextmanager
def slow_attention(
    model: PreTrainedModel, policy: str | Sequence[str], prompt: str = "recurrent", off: str = ""
) -> Iterator[dict[int, Reference]]:
    """The definition in place of the model's attention; `off` leaves one of its features out.

    Under `fade:5|fade:9` every KV head runs alone; the heads are then the units of the layer.
    """
    layers: dict[int, Reference] = {}
    states: dict[int, list[Reference]] = {}
    windows = {layer.index: layer.window for layer in geometry(model)}
    policies = dict(zip(windows, [policy] * len(windows) if isinstance(policy, str) else policy, strict=True))

    def forward(module, query, key, value, mask, scaling=None, softcap=None, s_aux=None, **_):
        assert mask is None
        assert len(query) == 1
        index = module.layer_idx
        rules = parts(parse_layer_policy(policies[index]))
        given = {"softcap": softcap, "window": windows[index], "sinks": s_aux}
        given = {name: value for name, value in given.items() if name != off}
        sinks = given.pop("sinks", None)
        key, value = (rows[0, :, -query.shape[2] :] for rows in (key, value))  # older ones come from a plain cache
        tokens = list(zip(*(rows.chunk(len(rules)) for rows in (query[0], key, value)), strict=True))
        if index not in states:
            states[index] = [reference.start(r, len(q), len(k)) for r, (q, k, _) in zip(rules, tokens, strict=True)]
        own, outputs = states[index], []
        for number, (state, rule) in enumerate(zip(own, rules, strict=True)):
            alone = None if sinks is None else sinks.chunk(len(rules))[number]
            attention = Attention(scaling or query.shape[-1] ** -0.5, sinks=alone, **given)
            outputs.append(reference.run(state, *tokens[number], rule, attention, oneshot=prompt == "oneshot"))
        units, deaths = ([unit for state in own for unit in getattr(state, name)] for name in ("rows", "deaths"))
        layers[index] = Reference(units, deaths, own[0].seen)
        return torch.cat(outputs).transpose(0, 1)[None], None

    before = model.config._attn_implementation
    AttentionInterface.register("slow_reference", forward)  # a name without a mask function: masks are None
    model.set_attn_implementation("slow_reference")
    try:
        yield layers
    finally:
        model.set_attn_implementation(before)
        del AttentionInterface._global_mapping["slow_reference"]


@torch.no_grad()
def slow_greedy(model: PreTrainedModel, policy: str | Sequence[str], ids: Tensor, new: int, **options: Any) -> Tensor:
    """What `generate` must give for one sequence: [1, T] -> [1, T + new], with no cache of any kind."""
    with slow_attention(model, policy, **options):
        piece = ids
        for _ in range(new):
            positions = torch.arange(ids.shape[1] - piece.shape[1], ids.shape[1])[None]
            logits = model(piece, position_ids=positions, use_cache=False).logits
            piece = logits[:, -1:].argmax(-1)
            ids = torch.cat([ids, piece], 1)
    return ids


def survivors(state: Any, row: int = 0) -> list[list[int]]:
    """The positions a layer's state holds, for each unit."""
    return [sorted(p for p in unit if p >= 0) for unit in state.positions[row].tolist()]


def positions_held(state: Reference) -> list[list[int]]:
    return [sorted(row.position for row in unit) for unit in state.rows]
