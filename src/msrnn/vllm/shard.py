"""Tensor parallelism: what a process needs of a layer's policy, and how heads in several processes decide together.

Where they do, the logits of a chunk are gathered over all heads, every process scans them all, bit for bit alike, and
uses the weights of its own heads. So evictions do not depend on the number of processes.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)

from ..core.attention import Attention
from ..plan import HeadPolicies, LayerPolicy
from ..policy import Policy
from .refusals import check_budgets, check_sinks, decides_together


@dataclass(frozen=True)
class Sharded(Attention):
    """Attention of one process's `local_heads` query heads of a layer."""

    rank: int = 0
    local_heads: int = 0

    @property
    def sharded(self) -> bool:
        return True

    def gather(self, rows: Tensor) -> Tensor:
        gathered: Tensor = tensor_model_parallel_all_gather(rows.contiguous(), dim=1)
        return gathered

    def local(self, rows: Tensor) -> Tensor:
        return rows[:, self.rank * self.local_heads : (self.rank + 1) * self.local_heads]


def shares(policy: LayerPolicy, kv_heads: int) -> list[LayerPolicy]:
    """A layer's policy for each of the processes that hold so many of its KV heads; one for all if it is the same."""
    if isinstance(policy, Policy):
        return [policy]
    return [HeadPolicies(policy.heads[i : i + kv_heads]) for i in range(0, len(policy.heads), kv_heads)]


def own_share(policy: LayerPolicy, kv_heads: int) -> LayerPolicy:
    """A layer's policy for this process, which holds so many of its KV heads."""
    if isinstance(policy, Policy):
        return policy
    check_budgets(policy, kv_heads, get_tensor_model_parallel_world_size())
    rank: int = get_tensor_model_parallel_rank()
    return shares(policy, kv_heads)[rank]


def attention_of(
    policy: LayerPolicy,
    heads: int,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    window: int | None = None,
) -> Attention:
    """The attention of a layer of which this process holds `heads` query heads."""
    if not decides_together(policy, window) or (processes := get_tensor_model_parallel_world_size()) == 1:
        return Attention(scale, softcap, window, sinks)
    if sinks is not None:
        check_sinks(policy, window, processes)
    return Sharded(scale, softcap, window, sinks, get_tensor_model_parallel_rank(), heads)
