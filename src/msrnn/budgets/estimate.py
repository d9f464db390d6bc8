"""Curves by KV head: what each head loses with fewer slots, from gradients instead of a forward pass for every head.

D is the difference between a head's bounded and full output at a token. Two estimates, whose mean is taken:

- Alone: the other heads are full. With g the gradient of the loss, the loss grows by about the sum over tokens of
  (g . D)^2 / 2, the second-order term with the Fisher information as Hessian. One backward pass serves all sizes.
- Together: all heads have the same size. Along the straight way from the full model (D times 0) to the bounded one (D
  times 1) the KL divergence from the full model begins at 0 with slope 0 and ends with slope g . D, with g its gradient
  at the end, so a head's share is about the sum over tokens of g . D / 2. One backward pass for each size, so every
  second size is enough; in between the ratio to the first estimate is interpolated.

The first is blind where the full model is sure of a token: there is no gradient, though a head that loses what it
retrieves changes everything. The second is not, but may give a head that others outweigh a share below 0.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import kl_div, nll_loss
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ..core.attention import Attention
from ..core.recurrence import read
from ..core.slots import Slots
from ..hf.geometry import Geometry, geometry, text_config
from ..policy import Policy, full, parse_policy, split_policy

NAME = "msrnn-estimate"
_NOTHING = 1e-9  # nats
_RATIOS = (1e-3, 20)  # of a share to what a head loses alone: below 0 it is none, above it is noise
T = TypeVar("T")


def head_losses(
    model: PreTrainedModel, ids: Tensor, kind: str, sizes: Sequence[int], counted: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """Nats per counted token for every layer: alone [KV heads, sizes], and together [KV heads, `every_second(sizes)`].

    ids [T]; counted [T - 1], column i is of token i + 1. For curves that do not depend on where a chunk ends, no size
    may exceed the first counted column.
    """
    policies = [parse_policy(split_policy(kind).with_size(size)) for size in sizes]
    ids = ids.to(model.get_input_embeddings().weight.device)
    with torch.enable_grad():
        alone, target = losses_alone(model, ids, policies, counted)
        return alone, losses_together(model, ids, every_second(policies), counted, target)


def every_second(sizes: Sequence[T]) -> list[T]:
    """Of ascending sizes, with the largest."""
    return list(reversed(sizes[::-1][::2]))


def combine(alone: Sequence[float], together: Sequence[float], sizes: Sequence[int]) -> list[float]:
    """One head's losses by size: the mean of both estimates."""
    points, logarithms = every_second(range(len(sizes))), np.log(sizes)
    ratios = [together[i] / max(alone[point], _NOTHING) for i, point in enumerate(points)]
    between = np.interp(logarithms, logarithms[points], np.log(np.clip(ratios, *_RATIOS)))
    return [loss * (1 + math.exp(ratio)) / 2 for loss, ratio in zip(alone, between, strict=True)]


def losses_alone(
    model: PreTrainedModel, ids: Tensor, policies: Sequence[Policy], counted: Tensor
) -> tuple[list[Tensor], Tensor]:
    """For every layer [KV heads, policies], all other heads full; and the full model's log probabilities."""
    probe = _Alone(model, policies, _first(counted))
    with _probing(model, probe):
        output = _log_probabilities(model, ids, counted)
        labels = ids[1:][counted.to(ids.device)].to(output.device)
        nll_loss(output, labels, reduction="sum").backward()  # type: ignore[no-untyped-call]
    return [probe.losses[layer.index] / len(labels) for layer in geometry(model)], output.detach()


def losses_together(
    model: PreTrainedModel, ids: Tensor, policies: Sequence[Policy], counted: Tensor, target: Tensor
) -> list[Tensor]:
    """For every layer [KV heads, policies]: the heads' shares of the divergence from `target`."""
    columns = []
    for policy in policies:
        probe = _Together(model, policy)
        with _probing(model, probe):
            output = _log_probabilities(model, ids, counted)
            kl_div(output, target, reduction="sum", log_target=True).backward()  # type: ignore[no-untyped-call]
        columns.append([probe.losses[layer.index] / len(target) for layer in geometry(model)])
        del output  # free it before the next policy makes its own
    return [torch.stack(layer, 1) for layer in zip(*columns, strict=True)]


def _first(counted: Tensor) -> int:
    return int(counted.nonzero()[0])


def _log_probabilities(model: PreTrainedModel, ids: Tensor, counted: Tensor) -> Tensor:
    """[counted tokens, vocabulary]. Logits are made from the first of them on, where the model can leave out others."""
    start = _first(counted)
    takes = "logits_to_keep" in inspect.signature(model.forward).parameters
    options: dict[str, Any] = {"logits_to_keep": len(ids) - start} if takes else {}
    logits: Tensor = model(ids[None], use_cache=False, **options).logits[0, start - len(ids) : -1]
    return logits[counted[start:].to(logits.device)].float().log_softmax(-1)


class _Probe:
    """An attention function: the model's own, and what a bounded one would change."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.own: str = text_config(model)._attn_implementation
        self.layers = {layer.index: layer for layer in geometry(model)}
        self.losses = dict[int, Tensor]()

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> tuple[Tensor, Any]:
        """query [B, H, T, D] -> [B, T, H, V]"""
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        own = AttentionInterface().get_interface(self.own, eager)
        output, weights = own(module, query, key, value, mask, **options)
        layer, tokens = self.layers[module.layer_idx], (query.detach(), key.detach(), value.detach())
        scale = options.get("scaling") or query.shape[-1] ** -0.5
        attention = Attention(scale, options.get("softcap"), layer.window, options.get("s_aux"))

        def bounded(policy: Policy) -> Tensor:
            """[B, T, H, V] in float32: of the first estimate, a square, rounding would be a part."""
            query, key, value = (token.float() for token in tokens)
            slots = Slots.empty(policy, key, value, layer.heads, layer.window)
            return read(slots, query, key, value, policy, attention).transpose(1, 2)

        return self.attend(layer, output, torch.no_grad()(bounded)), weights

    def attend(self, layer: Geometry, output: Tensor, bounded: Callable[[Policy], Tensor]) -> Tensor:
        raise NotImplementedError


class _Alone(_Probe):
    """losses: layer -> [KV heads, policies], over the tokens from `start` on."""

    def __init__(self, model: PreTrainedModel, policies: Sequence[Policy], start: int) -> None:
        super().__init__(model)
        self.policies, self.start = policies, start

    def attend(self, layer: Geometry, output: Tensor, bounded: Callable[[Policy], Tensor]) -> Tensor:
        def add(gradient: Tensor) -> None:
            reference, columns = bounded(full()), []
            for policy in self.policies:
                products = (gradient * (bounded(policy) - reference))[0, self.start :].sum(-1)  # [T - start, H]
                by_head = products.view(len(products), layer.kv_heads, -1).sum(-1)
                columns.append(by_head.double().square().sum(0) / 2)
            self.losses[layer.index] = torch.stack(columns, 1).cpu()

        output.register_hook(add)  # type: ignore[no-untyped-call]
        return output


class _Together(_Probe):
    """losses: layer -> [KV heads]. Outputs are bounded; gradients are the model's own, which is to hold D constant."""

    def __init__(self, model: PreTrainedModel, policy: Policy) -> None:
        super().__init__(model)
        self.policy = policy

    def attend(self, layer: Geometry, output: Tensor, bounded: Callable[[Policy], Tensor]) -> Tensor:
        difference = bounded(self.policy).to(output.dtype) - output.detach()

        def add(gradient: Tensor) -> None:
            by_query_head = (gradient.float() * difference).sum((0, 1, 3), dtype=torch.float64)
            self.losses[layer.index] = by_query_head.view(layer.kv_heads, -1).sum(1).cpu() / 2

        output = output + difference
        output.register_hook(add)  # type: ignore[no-untyped-call]
        return output


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
