"""The policy in the environment, as text: workers are other processes, even on other machines."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from ..plan import LayerPolicy, Plan, average_capacity, parse_layer_policy, parts
from ..policy import check_size, needs_model
from . import POLICY

_SEPARATOR = ";"
_FOUND = "MSRNN_POLICY_FOUND"  # a policy that needs a model, and what it stands for on the one that runs here
_last: dict[str, Any] = {}  # the policy that was last worked out, and the model that it was for


def write(plan: Plan) -> str:
    """A plan as text for the environment: one policy for all layers, or one per layer."""
    texts = [str(policy) for policy in plan.policies]
    return texts[0] if plan.uniform else _SEPARATOR.join(texts)


def check() -> None:
    """Refuse a policy in the environment that no model could run."""
    text = os.environ.get(POLICY, "")
    if needs_model(text):
        check_size(text)
    else:
        parse(text)


def resolve(model: Any) -> None:
    """Work out what `best:256` or `tova:64MiB` stands for on vLLM's model configuration.

    The words themselves stay in the environment: the same process may make an engine for another model.
    """
    text = os.environ.get(POLICY, "")
    if not needs_model(text) or _last.get(text) is model:
        return
    from ..budgets.profile import plan_for
    from ..hf import best
    from ..hf.geometry import geometry

    origin = {"dtype": model.dtype, "length": model.max_model_len, "revision": model.revision}
    policy = best.resolve(text, model.hf_config, **origin)
    os.environ[_FOUND] = f"{text}\n{write(plan_for(policy, len(geometry(model.hf_config))))}"
    _last.clear()
    _last[text] = model


def policies() -> tuple[LayerPolicy, ...]:
    """The policies in the environment: one for all layers, or one per layer."""
    text = os.environ.get(POLICY, "")
    worked_out, _, found = os.environ.get(_FOUND, "").rpartition("\n")
    return parse(found if found and worked_out == text else text)


def kind_count() -> int:
    """How many different policies layers, or KV heads, have."""
    return len({part for policy in policies() for part in parts(policy)})


@cache
def parse(text: str) -> tuple[LayerPolicy, ...]:
    """`tova:512`, `tova:512;h2o:256;...` by layer, or by KV head `fade:96|fade:416;...` -> bounded policies."""
    if not text:
        raise ValueError(f"{POLICY} is not set in this process; set it on every node, e.g. {POLICY}=tova:512")
    policies = tuple(parse_layer_policy(part) for part in text.split(_SEPARATOR))
    for policy in policies:
        if average_capacity(policy) is None:
            raise ValueError(
                f"{POLICY}={text!r}: 'full' is not bounded; give a capacity, or serve with plain vLLM and no {POLICY}"
            )
    return policies


def policy_of(layer: int) -> LayerPolicy:
    """The policy of a layer; its number counts over the whole model."""
    layers = policies()
    if len(layers) == 1:
        return layers[0]
    if layer >= len(layers):
        raise ValueError(f"{POLICY} names {len(layers)} layers, the model has a layer {layer}; give one per layer")
    return layers[layer]
