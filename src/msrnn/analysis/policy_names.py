"""What a record's policy is called in figures and tables. Light: no torch.

Policies of records are texts such as `tova:512`, `tova:256,profile=FILE`, `baseline:64`, the name of a plan
(`tova:avg=256`), or a label such as `tova:256 by layer`.
"""

from __future__ import annotations

from functools import cache

from ..budgets.profile import is_by_head
from ..policy import split_policy


def short_name(policy: str) -> str:
    """A policy as tables name it: `tova:512 by layer` where a profile gives every layer its own capacity.

    `fade:512 by KV head` where it gives one to every KV head.
    """
    text = split_policy(policy)
    return text.policy if text.profile is None else f"{text.policy} by {_owner(text.profile)}"


@cache
def _owner(profile: str) -> str:
    """Whose capacities a profile has. Records outlive files: one that is gone counts as the usual kind, by layer."""
    try:
        return "KV head" if is_by_head(profile) else "layer"
    except ValueError:
        return "layer"


def family(policy: str) -> str:
    """A policy's name without its size: `tova` for tova:512, `window+4` for window+4:512."""
    text = split_policy(short_name(policy))
    _, space, label = text.size.partition(" ")
    return ", ".join(part for part in text.kind.split(",") if not part.startswith("avg=")) + space + label


def policy_capacity(policy: str) -> float | None:
    """The number of slots that a policy's text names; None for `full`, fractions and bytes."""
    text = split_policy(policy)
    averages = [part.removeprefix("avg=") for part in text.kind.split(",") if part.startswith("avg=")]
    size, _, _ = (text.size or "".join(averages)).partition(" ")
    return float(size) if size.replace(".", "", 1).isdigit() else None
