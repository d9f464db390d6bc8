"""Curves by KV head: what the loss would grow by if one head alone had fewer slots, estimated from gradients.

To measure every head at every size takes a forward pass each; one forward and one backward pass estimate them all. With
D the change of a head's output at a token when the head has so many slots and all else is full, and g the gradient of
the loss at that output, the expected growth of the loss is about the sum over tokens of (g . D)^2 / 2: the second-order
term with the Fisher information in place of the Hessian. D comes from the recurrence itself (`core/recurrence.py`).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ..core.attention import Attention
from ..core.recurrence import read
from ..core.slots import Slots
from ..hf.geometry import Geometry, geometry, text_config
from ..policy import Policy, full, parse_policy, split_policy

NAME = "msrnn-estimate"
HeadLosses = list[list[list[float]]]  # by layer, KV head and size


def head_losses(model: PreTrainedModel, ids: Tensor, kind: str, sizes: Sequence[int], start: int) -> HeadLosses:
    """Nats per token above full attention over the tokens of a chunk, ids [T], from `start` on.

    Every state must be full there, so no size may exceed `start`.
    """
    if max(sizes) > start:
        raise ValueError(f"a state of {max(sizes)} slots is not full at token {start}; use smaller sizes")
    probe = _Probe(model, [parse_policy(split_policy(kind).with_size(size)) for size in sizes], start)
    with torch.enable_grad(), _probing(model, probe):
        rows = ids[None].to(model.get_input_embeddings().weight.device)
        _loss(model, rows, start).backward()  # type: ignore[no-untyped-call]
    return [(probe.sums[layer.index] / (len(ids) - start)).T.tolist() for layer in geometry(model)]


def _loss(model: PreTrainedModel, ids: Tensor, start: int) -> Tensor:
    """The sum of nats that the tokens from `start` on predict. Only their logits are made, where the model can."""
    keep = ids.shape[1] - start
    takes = "logits_to_keep" in inspect.signature(model.forward).parameters
    options: dict[str, Any] = {"logits_to_keep": keep} if takes else {}
    logits = model(ids, use_cache=False, **options).logits[0, -keep:-1]
    return cross_entropy(logits.float(), ids[0, start + 1 :].to(logits.device), reduction="sum")


class _Probe:
    """The model's own attention, with what every size would change noted until the gradient comes back."""

    def __init__(self, model: PreTrainedModel, policies: Sequence[Policy], start: int) -> None:
        self.own: str = text_config(model)._attn_implementation
        self.policies, self.start = policies, start
        self.layers = {layer.index: layer for layer in geometry(model)}
        self.sums = dict[int, Tensor]()  # layer -> [sizes, KV heads]

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> tuple[Tensor, Any]:
        """query [B, H, T, D] -> [B, T, H, V]"""
        output, weights = self._own_attention(module)(module, query, key, value, mask, **options)
        layer, tokens = self.layers[module.layer_idx], (query.detach(), key.detach(), value.detach())
        scale = options.get("scaling") or query.shape[-1] ** -0.5
        attention = Attention(scale, options.get("softcap"), layer.window, options.get("s_aux"))
        output.register_hook(lambda gradient: self._add(layer, gradient, tokens, attention))
        return output, weights

    def _own_attention(self, module: Any) -> Callable[..., Any]:
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        return AttentionInterface().get_interface(self.own, eager)  # type: ignore[no-any-return]

    @torch.no_grad()
    def _add(self, layer: Geometry, gradient: Tensor, tokens: tuple[Tensor, ...], attention: Attention) -> None:
        """gradient [B, T, H, V]. In float32: what rounding changes would count as a loss."""
        query, key, value = (one.float() for one in tokens)

        def output(policy: Policy) -> Tensor:
            slots = Slots.empty(policy, key, value, layer.heads, layer.window)
            return read(slots, query, key, value, policy, attention)[:, :, self.start :]

        reference, gradient = output(full()), gradient[:, self.start :].transpose(1, 2).float()
        rows = []
        for policy in self.policies:
            products = (gradient * (output(policy) - reference)).sum(-1)[0]  # [H, T - start]
            by_head = products.view(layer.kv_heads, -1, products.shape[1]).sum(1)
            rows.append(by_head.double().square().sum(1) / 2)
        self.sums[layer.index] = torch.stack(rows).cpu()


@contextmanager
def _probing(model: PreTrainedModel, probe: _Probe) -> Iterator[None]:
    """The probe in place of the model's attention, and gradients for activations only."""
    config, weights = text_config(model), [weight for weight in model.parameters() if weight.requires_grad]
    AttentionInterface.register(NAME, probe)
    if probe.own in AttentionMaskInterface():
        AttentionMaskInterface.register(NAME, AttentionMaskInterface()[probe.own])
    hook = model.get_input_embeddings().register_forward_hook(lambda _, __, output: output.requires_grad_())
    config._attn_implementation = NAME
    for weight in weights:
        weight.requires_grad_(False)
    try:
        yield
    finally:
        config._attn_implementation = probe.own
        hook.remove()
        for weight in weights:
            weight.requires_grad_(True)
