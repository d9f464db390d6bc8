"""Plans: a policy for every layer of a model, or for every KV head of a layer.

Plain values, as in `policy.py`; where capacities come from is not known here (`budgets/profile.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .policy import Policy, in_words, parse_policy, split_policy, with_capacity

_BETWEEN_HEADS = "|"


@dataclass(frozen=True)
class HeadPolicies:
    """A policy for each KV head of a layer: every head decides alone, in slots of its own. `fade:96|fade:416`."""

    heads: tuple[Policy, ...]

    def __post_init__(self) -> None:
        if not self.heads:
            raise ValueError("budgets by KV head need at least one head in every layer")
        for policy in self.heads:
            if policy.capacity is None:
                raise ValueError("'full' keeps everything, so it has no budgets by KV head; use e.g. 'fade'")
            _check_alone(policy, str(policy))

    @property
    def average(self) -> float:
        """Mean capacity over the heads."""
        return sum(policy.capacity or 0 for policy in self.heads) / len(self.heads)

    def __str__(self) -> str:
        return _BETWEEN_HEADS.join(map(str, self.heads))


LayerPolicy = Policy | HeadPolicies


@dataclass(frozen=True)
class Plan:
    """One policy per layer. Its text form names the average capacity where the layers differ."""

    policies: tuple[LayerPolicy, ...]

    def __post_init__(self) -> None:
        if not self.policies:
            raise ValueError("a plan needs at least one layer")

    @classmethod
    def of(cls, policy: PolicyLike, layers: int, *, length: int | None = None) -> Plan:
        """Any spelling of a policy but a profile's as one policy per layer."""
        if isinstance(policy, Plan):
            plan = policy
        elif isinstance(policy, Policy):
            plan = cls((policy,) * layers)
        elif isinstance(policy, str):
            plan = cls((parse_policy(policy, length=length),) * layers)
        elif isinstance(policy, Sequence):
            plan = cls(tuple(p if isinstance(p, LayerPolicy) else parse_policy(p, length=length) for p in policy))
        else:
            kind = type(policy).__name__
            raise TypeError(f"a policy is text such as 'tova:512', a Policy or one per layer, not {kind}")
        if len(plan) != layers:
            raise ValueError(f"the plan has {len(plan)} layers, the model {layers}; give one policy per layer")
        return plan

    def __len__(self) -> int:
        return len(self.policies)

    def __getitem__(self, layer: int) -> LayerPolicy:
        return self.policies[layer]

    @property
    def parts(self) -> tuple[Policy, ...]:
        """Every policy: one per layer, or one per KV head where heads have budgets of their own."""
        return tuple(part for policy in self.policies for part in parts(policy))

    @property
    def capacities(self) -> list[int | list[int | None] | None]:
        """The capacity of every layer (None: unbounded), or those of its KV heads."""
        return [
            [head.capacity for head in policy.heads] if isinstance(policy, HeadPolicies) else policy.capacity
            for policy in self.policies
        ]

    @property
    def by_head(self) -> bool:
        """Whether KV heads of a layer have budgets of their own."""
        return any(isinstance(policy, HeadPolicies) for policy in self.policies)

    @property
    def uniform(self) -> bool:
        return len(set(self.policies)) == 1

    @property
    def average(self) -> float | None:
        """Mean capacity over the layers, or over all KV heads if each has its own; None where a layer is full."""
        each_head = all(isinstance(policy, HeadPolicies) for policy in self.policies)  # layers may have more or fewer
        sizes = [average_capacity(policy) for policy in (self.parts if each_head else self.policies)]
        return None if None in sizes else sum(size or 0 for size in sizes) / len(sizes)

    def __str__(self) -> str:
        if self.uniform and not self.by_head:
            return str(self.policies[0])
        words = [in_words(policy) for policy in self.parts]
        names = sorted({name for name, _ in words})
        shared = [change for change in words[0][1] if all(change in changes for _, changes in words)]
        average = "full in some layers" if self.average is None else f"avg={self.average:g}"
        return f"{'/'.join(names)}:{','.join([average, *shared])}"


PolicyLike = str | Policy | Plan | Sequence[str | LayerPolicy]


def parts(policy: LayerPolicy) -> tuple[Policy, ...]:
    """The policies of a layer: its own, or those of its KV heads."""
    return policy.heads if isinstance(policy, HeadPolicies) else (policy,)


def average_capacity(policy: LayerPolicy) -> float | None:
    """Of a layer; None: it keeps everything."""
    return policy.average if isinstance(policy, HeadPolicies) else policy.capacity


def parse_layer_policy(text: str) -> LayerPolicy:
    """What `str` makes of a layer's policy: `fade:256`, or with budgets by KV head `fade:96|fade:416`."""
    heads = text.split(_BETWEEN_HEADS)
    return parse_policy(text) if len(heads) == 1 else HeadPolicies(tuple(map(parse_policy, heads)))


def per_layer(text: str, capacities: Sequence[int | Sequence[int]]) -> Plan:
    """The same kind of policy with another capacity in every layer, or a list of them: one for each of its KV heads.

    `text` names the kind and may name the average.
    """
    size = split_policy(text).size
    plan = Plan(tuple(_layer(text, capacity) for capacity in capacities))
    if size and (not size.isdigit() or abs(int(size) - (plan.average or 0)) > 0.5):
        each = "KV head" if plan.by_head else "layer"
        mean = f"the capacities by {each} average {plan.average:g}"
        raise ValueError(f"{text!r} asks for an average of {size}, but {mean}")
    return plan


def _layer(text: str, capacity: int | Sequence[int]) -> LayerPolicy:
    if isinstance(capacity, int):
        return with_capacity(text, capacity)
    policies = tuple(with_capacity(text, size) for size in capacity)
    for policy in policies:
        _check_alone(policy, split_policy(text).kind)
    return HeadPolicies(policies)


def _check_alone(policy: Policy, name: str) -> None:
    """Refuse budgets by KV head where the heads of a layer share their decisions; `name` is what the user wrote."""
    if policy.scope != "kv_head" and not policy.blind:
        raise ValueError(
            f"budgets by KV head need a policy whose KV heads decide alone, and under {name} they decide together; "
            "use fade, h2o or tova-head, or a profile by layer"
        )
