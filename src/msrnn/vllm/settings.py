"""What the environment asks of the plugin. Workers are other processes, even on other machines: they get text."""

from __future__ import annotations

import os
from functools import cache

from ..policy import Plan, Policy, parse_policy
from . import POLICY

_BETWEEN = ";"


def write(plan: Plan) -> str:
    """A plan as the environment holds it: one policy for all layers, or one per layer."""
    texts = [str(policy) for policy in plan.policies]
    return texts[0] if plan.uniform else _BETWEEN.join(texts)


def policies() -> tuple[Policy, ...]:
    """The policies in the environment: one for all layers, or one per layer."""
    return read(os.environ.get(POLICY, ""))


@cache
def read(text: str) -> tuple[Policy, ...]:
    if not text:
        raise ValueError(f"{POLICY} is not set in this process; set it on every node, e.g. {POLICY}=tova:512")
    policies = tuple(parse_policy(part) for part in text.split(_BETWEEN))
    for policy in policies:
        if policy.capacity is None:
            raise ValueError(
                f"{POLICY}={text!r}: 'full' is not bounded; give a capacity, or serve with plain vLLM and no {POLICY}"
            )
    return policies


def policy_of(layer: int) -> Policy:
    """The policy of a layer, counted over the whole model."""
    layers = policies()
    if len(layers) == 1:
        return layers[0]
    if layer >= len(layers):
        raise ValueError(f"{POLICY} names {len(layers)} layers, the model has a layer {layer}; give one per layer")
    return layers[layer]
