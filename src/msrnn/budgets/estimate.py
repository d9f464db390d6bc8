"""Curves by KV head: how much of the loss of a bounded model is due to each head, from gradients.

To measure every head alone takes a forward pass for each head and size. One backward pass shares a size's loss out to
all heads. Let D be the difference between a head's bounded and full output at a token, in a model in which every head
has so many slots, and g the gradient at that output of the KL divergence to the full model. Along the straight way from
the full model (D times 0) to the bounded one (D times 1) the divergence begins at 0 with slope 0 and ends with slope
g . D, so a head's share is about the sum over tokens of g . D / 2. The gradient is taken in the bounded model because a
sure prediction has none: a head whose retrieval makes the model sure would seem to cost nothing.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ..core.attention import Attention
from ..core.recurrence import read
from ..core.slots import Slots
from ..hf.geometry import Geometry, geometry, text_config
from ..policy import Policy, parse_policy, split_policy

NAME = "msrnn-estimate"
HeadLosses = list[list[list[float]]]  # by layer, KV head and size


def head_losses(model: PreTrainedModel, ids: Tensor, kind: str, sizes: Sequence[int], counted: Tensor) -> HeadLosses:
    """Each head's share of the nats that a counted token loses. ids [T]; counted [T - 1], column i is of token i + 1.

    For curves that do not depend on where a chunk ends, no size may exceed the first counted column.
    """
    rows, probe, results = ids[None].to(model.get_input_embeddings().weight.device), _Probe(model), []
    with _probing(model, probe):
        with torch.no_grad():
            full = _log_probabilities(model, rows, counted)
        for size in sizes:
            probe.policy = parse_policy(split_policy(kind).with_size(size))
            with torch.enable_grad():
                bounded = _log_probabilities(model, rows, counted)
                kl_div(bounded, full, reduction="sum", log_target=True).backward()  # type: ignore[no-untyped-call]
            del bounded  # free it before the next size makes its own
            results.append([probe.shares[layer.index] / len(full) for layer in geometry(model)])
    return [torch.stack(layer, 1).tolist() for layer in zip(*results, strict=True)]


def _log_probabilities(model: PreTrainedModel, ids: Tensor, counted: Tensor) -> Tensor:
    """[counted tokens, vocabulary]. Logits are made from the first of them on, where the model can leave out others."""
    start = int(counted.nonzero()[0])
    takes = "logits_to_keep" in inspect.signature(model.forward).parameters
    options: dict[str, Any] = {"logits_to_keep": ids.shape[1] - start} if takes else {}
    logits: Tensor = model(ids, use_cache=False, **options).logits[0, start - ids.shape[1] : -1]
    return logits[counted[start:].to(logits.device)].float().log_softmax(-1)


class _Probe:
    """The model's own attention, or with a policy the bounded one: its outputs, and the gradient of the model's own.

    That is the gradient with D held constant, as the estimate needs it.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.own: str = text_config(model)._attn_implementation
        self.policy: Policy | None = None
        self.layers = {layer.index: layer for layer in geometry(model)}
        self.shares = dict[int, Tensor]()  # layer -> [KV heads]

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> tuple[Tensor, Any]:
        """query [B, H, T, D] -> [B, T, H, V]"""
        output, weights = self._own_attention(module)(module, query, key, value, mask, **options)
        if self.policy is None:
            return output, weights
        layer, tokens = self.layers[module.layer_idx], (query.detach(), key.detach(), value.detach())
        scale = options.get("scaling") or query.shape[-1] ** -0.5
        attention = Attention(scale, options.get("softcap"), layer.window, options.get("s_aux"))
        slots = Slots.empty(self.policy, *tokens[1:], layer.heads, layer.window)
        with torch.no_grad():
            difference = read(slots, *tokens, self.policy, attention).transpose(1, 2) - output
        output = output + difference
        output.register_hook(lambda gradient: self._share(layer, gradient, difference))
        return output, weights

    def _own_attention(self, module: Any) -> Callable[..., Any]:
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        return AttentionInterface().get_interface(self.own, eager)  # type: ignore[no-any-return]

    def _share(self, layer: Geometry, gradient: Tensor, difference: Tensor) -> None:
        """gradient and difference [B, T, H, V]"""
        by_query_head = (gradient.float() * difference).sum((0, 1, 3), dtype=torch.float64)
        self.shares[layer.index] = by_query_head.view(layer.kv_heads, -1).sum(1).cpu() / 2


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
